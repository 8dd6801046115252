"""``fldiag figures``: train what is missing, ask, draw, write; a stopped call is continued by the same call."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fldiag import data
from fldiag.config import Config
from fldiag.errors import FldiagError
from fldiag.plotting import style, words
from fldiag.registry import Progress
from fldiag.results import files
from fldiag.results.provenance import provenance
from fldiag_papers import gather, reported
from fldiag_papers.caption import NOT_YET, describe, unfinished
from fldiag_papers.pictures import markdown
from fldiag_papers.plan import Plan, Task, is_finished, make_plan
from fldiag_papers.records import keep_records
from fldiag_papers.scales import SCALES, Scale, packed
from fldiag_papers.study import Study
from fldiag_papers.workers import Bench, Job, perform_all

STORE = Path("checkpoints/figures")
OUT = Path("figures")


@dataclass
class Result:
    """A study's files (the picture last), or why there are none. ``is_absent``: none of its runs is finished, and none was to
    be trained."""

    study: Study
    files: list[Path] = field(default_factory=list)
    error: str = ""
    is_absent: bool = False


@dataclass
class Status:
    """By the hash of a run: ``paths`` of the runs that can be drawn, ``errors``: why a run or an answer is missing."""

    paths: dict[str, Path] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def make(
    studies: Sequence[Study],
    scale: Scale,
    *,
    out: Path = OUT,
    store: Path = STORE,
    executor: Any = "serial",
    device: str = "cpu",
    download: bool = False,
    progress: Progress | None = None,
    on_done: Callable[[str, int, int], None] | None = None,
    strict: bool = False,
    only: Callable[[Config], bool] = lambda config: True,
    draw: bool = True,
    records: Path | None = None,
) -> list[Result]:
    """Make the figures and tables.

    Args:
        studies: figures and tables.
        scale: how small they are made.
        out: folder of the pictures.
        store: folder of the runs.
        executor: where runs are trained.
        device: of training and diagnostics.
        download: fetch missing public data.
        progress: told of the rounds done of all runs.
        on_done: told of every run that was trained or failed, how many are done, and of how many.
        strict: the first failure is raised.
        only: which runs are trained and asked; the others are drawn as they are.
        draw: False where others train the rest.
        records: a folder in which every finished run is also kept without its weights, and from which runs are taken that
            ``store`` lacks (``fldiag_papers.records``).

    A run or figure that fails is reported and does not stop the others; each figure is written when its last run is done.
    The same call continues where one was stopped.

    Raises:
        FldiagError: a folder cannot be written, or a study is not valid.
    """
    plan = make_plan(scale, studies, reported.studies().values(), store, records)
    for folder in filter(None, (out, store, records)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FldiagError(
                f"cannot write to {folder}: {error.strerror}",
                "choose others with --out, --runs and --records",
            ) from None
    status, jobs = look(plan, prepare(plan, download), only)
    keep_records(plan, status.paths.values())
    waiting = {s.name: {t.core for t, _ in jobs if s.name in t.users} for s in studies}
    results: dict[str, Result] = {}

    def write_ready() -> None:
        for study in studies if draw else ():
            if study.name not in results and not waiting[study.name]:
                results[study.name] = _write(study, plan, out, status, download, strict)

    write_ready()
    rounds_done = {task.core: 0 for task, _ in jobs}
    total = sum(task.config.rounds for task, _ in jobs)

    def on_round(task: Task, done: int) -> None:
        rounds_done[task.core] = done
        if progress:
            progress(sum(rounds_done.values()), total, f"{task.text}: round {done}")

    bench = Bench(scale, device, download, strict)
    with closing(perform_all(jobs, bench, executor, on_round)) as outcomes:
        for count, outcome in enumerate(outcomes, 1):
            task = outcome.task
            on_round(task, task.config.rounds)
            if (outcome.path / "run.json").is_file():
                status.paths[task.core] = outcome.path
            if outcome.error:
                status.errors[task.core] = outcome.error
            keep_records(plan, [outcome.path])
            if on_done:
                texts = [f"{task.text}: {outcome.error or 'done'}", *outcome.notes]
                on_done("; ".join(texts), count, len(jobs))
            for cores in waiting.values():
                cores.discard(task.core)
            write_ready()
    return [results[s.name] for s in studies if s.name in results]


def look(
    plan: Plan, failures: Mapping[str, str], is_chosen: Callable[[Config], bool]
) -> tuple[Status, list[Job]]:
    """The runs so far, and what is left to train or ask. ``failures``: data sets that cannot be had, and why."""
    status, jobs = Status(), []
    for core, task in plan.tasks.items():
        runs, name = plan.runs(task), task.config.data.name
        run = next(filter(task.fits, runs), None)
        if run is not None and task.is_done(run):
            status.paths[core] = run.path
        elif is_chosen(task.config) and name not in failures:
            jobs.append((task, run.path if run else plan.new_folder(task)))
        else:
            status.errors[core] = failures[name] if is_chosen(task.config) else NOT_YET
            first = [run] if run else []
            if finished := next(filter(is_finished, [*first, *runs]), None):
                status.paths[core] = finished.path
    return status, jobs


# ---- the data of a scale


def prepare(plan: Plan, download: bool) -> dict[str, str]:
    """Write the reduced data sets of the scale; returns which could not be made, and why."""
    scale = plan.scale
    failures: dict[str, str] = {}
    if scale.images is None:
        return failures
    names = {task.config.data.name for task in plan.tasks.values()}
    for name in sorted(names | {f"{v}-{scale.images}" for v in scale.data.values()}):
        file = packed(plan.store) / f"{name}.npz"
        if file.is_file():
            continue
        try:
            arrays = reduce(data.load(name.rpartition("-")[0], download=download), scale)
            files.write_atomic(file, lambda f, a=arrays: np.savez_compressed(f, **a))  # type: ignore[misc]
        except FldiagError as error:
            failures[name] = error.what
    return failures


def reduce(dataset: data.Dataset, scale: Scale) -> dict[str, np.ndarray]:
    """The first examples of every class, in the order of the data set, equally many of each; channels repeated."""
    arrays = {}
    for split, x, y, count in (
        ("train", dataset.train_x, dataset.train_y, scale.images),
        ("test", dataset.test_x, dataset.test_y, scale.test_images),
    ):
        count = count or len(y)
        share = -(-count // dataset.classes)
        each = [np.flatnonzero(y.numpy() == c)[:share] for c in range(dataset.classes)]
        index = np.sort(np.concatenate(each))[:count]
        pixels = x[index].permute(0, 2, 3, 1).numpy()
        arrays[f"{split}_images"] = np.repeat(pixels, dataset.repeat, -1)
        arrays[f"{split}_labels"] = y[index].numpy()
    return arrays


# ---- writing


def target(out: Path, study: Study, scale: Scale, is_complete: bool = True) -> Path:
    """``out/<paper>/<id>``. Files made there at a larger scale are kept; so are complete files where the new result is partial.
    The new result is then written to ``out/<scale>/<paper>/<id>``."""
    path = out / study.paper / f"{study.id}.json"
    order = list(SCALES)
    try:
        former = files.read_json(path)
        before = former["scale"]
    except (OSError, ValueError, KeyError, TypeError):
        before = None
    stays = before in SCALES and (
        order.index(before) > order.index(scale.name)
        or (not is_complete and (before != scale.name or not unfinished(former)))
    )
    return (out / scale.name if stays else out) / study.paper / study.id


def _write(
    study: Study, plan: Plan, out: Path, status: Status, download: bool, strict: bool
) -> Result:
    cores = set(plan.cells_of(study).values())
    has_more = study.alone or not all(t.train for t in study.trials)
    is_waiting = bool(cores) and {status.errors.get(core) for core in cores} == {NOT_YET}
    if is_waiting and not has_more and not gather.answered(study, plan, status.paths):
        return Result(study, error="none of its runs is finished", is_absent=True)
    try:
        table = gather.table_of(study, plan, status.paths, download)
        is_whole = not (cores & status.errors.keys() or study.name in {n for n, _ in plan.failed})
        path = target(out, study, plan.scale, is_whole)
        frame = read(files.csv_text(table))  # what is drawn is what the csv holds, to the digit
        about = describe(study, plan, frame, status.paths, status.errors)
        page = _page(study, frame, about)
        # Numbers are not written where anything fails.
        pictures = style.write(_draw(study, frame, about), path)
        tables = files.write_table(table, path, about)
        pages = [files.write_text(files.beside(path, ".md"), page)] if page else []
        return Result(study, [*tables, *pages, *pictures])
    except Exception as error:  # a study that fails does not stop the others
        if strict:
            raise
        if isinstance(error, FldiagError):
            return Result(study, error=f"{error.what}; {error.remedy}")
        return Result(study, error=f"{type(error).__name__}: {error}")


def _draw(study: Study, table: pd.DataFrame, about: Mapping[str, Any]) -> Figure:
    """The picture; where its runs are not the paper's protocol, it says above what was trained."""
    figure = study.picture(table)
    if text := _what_was_trained(about):
        height = figure.get_figheight()
        figure.set_figheight(height + 0.15)
        if figure.get_layout_engine() is None:  # nobody else moves what stands there
            share = height / (height + 0.15)
            for ax in figure.axes:
                x, y, width, tall = ax.get_position().bounds
                ax.set_position((x, y * share, width, tall * share))
            for label in figure.texts:
                label.set_y(label.get_position()[1] * share)
        figure.suptitle(text, x=0.01, ha="left", fontsize=7, color="#555555")
    return figure


def _what_was_trained(about: Mapping[str, Any]) -> str:
    """Scale, data, rounds and seeds of runs that are not the paper's protocol; nothing of others."""
    configs = [run["config"] for run in about["runs"].values()]
    if about["scale"] == "paper" or not configs:
        return ""
    data = sorted({words.data(c["data"]["name"]) for c in configs})
    rounds = sorted({c["rounds"] for c in configs})
    seeds = len(about["seeds"])
    parts = [
        *data,
        f"{' or '.join(map(str, rounds))} rounds",
        f"{seeds} seed{'s' if seeds > 1 else ''}",
    ]
    scale = {"smoke": "Smoke test", "paper-bf16": "Trained in bf16"}.get(about["scale"], "Reduced")
    return f"{scale}: {', '.join(parts)}"


def _page(study: Study, table: pd.DataFrame, about: Mapping[str, Any]) -> str:
    if study.layout is None:
        return ""
    return f"{about['caption']}\n\n{markdown(study.layout(table))}"


def redraw(studies: Sequence[Study], out: Path = OUT) -> list[Result]:
    """Draw again from the csv files in ``out`` and in its folders of scales: pictures and pages anew, numbers and provenance as
    they are. The json notes under ``drawn`` what drew. A csv that is missing, or does not fit its json, is left as it is."""
    results, origin = [], provenance()  # before files under version control change
    for study in studies:
        stems = [folder / study.paper / study.id for folder in (out, *(out / s for s in SCALES))]
        stems = [path for path in stems if files.beside(path, ".json").is_file()]
        if not stems:
            results.append(Result(study, error="not there", is_absent=True))
        for path in stems:
            try:
                note = files.beside(path, ".json")
                about = files.read_json(note)
                text = files.read_csv_bytes(files.beside(path, ".csv"), about).decode()
                table = read(text)
                pictures = style.write(_draw(study, table, about), path)
            except FileNotFoundError:
                results.append(Result(study, error="not there", is_absent=True))
                continue
            except FldiagError as error:
                results.append(Result(study, error=f"{error.what}; {error.remedy}"))
                continue
            paths = [files.write_text(note, files.json_text({**about, "drawn": origin}))]
            if page := _page(study, table, about):
                paths.append(files.write_text(files.beside(path, ".md"), page))
            results.append(Result(study, [*paths, *pictures]))
    return results


def read(text: str) -> pd.DataFrame:
    """A study's table from its csv."""
    table = pd.read_csv(io.StringIO(text), keep_default_na=False, na_values=[""], low_memory=False)
    for column in gather.KEYS:
        table[column] = (
            table[column].astype(object).fillna("").astype(str) if column in table else ""
        )
    return table
