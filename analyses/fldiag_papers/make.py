"""``fldiag figures``: train what is missing, ask, draw, write; go on after an interruption."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from fldiag import data
from fldiag.config import Config
from fldiag.errors import FldiagError
from fldiag.plotting import style
from fldiag.registry import Progress
from fldiag.results import files
from fldiag.results.provenance import provenance
from fldiag_papers import gather, plan, records, reported, workers
from fldiag_papers.caption import NOT_YET, about, unfinished
from fldiag_papers.paper_tables import markdown
from fldiag_papers.plan import Plan, Task
from fldiag_papers.scales import SCALES, Scale, packed
from fldiag_papers.study import Study

STORE = Path("checkpoints/figures")
OUT = Path("figures")


@dataclass
class Made:
    """A study's files (the picture last), or why there are none. ``absent``: because none of its runs is finished, and none
    was to be trained."""

    study: Study
    files: list[Path] = field(default_factory=list)
    error: str = ""
    absent: bool = False


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
) -> list[Made]:
    """Make the figures and tables. ``progress``: rounds done of all runs; ``on_done``: a sentence about every run that was
    trained or failed, how many are done, and of how many. ``strict``: the first failure is raised. ``only``: which runs are
    trained and asked; what there is of the others is drawn. ``draw``: False where others train the rest.
    ``records``: a folder in which every finished run is also kept without its weights, and from which runs are taken that
    ``store`` lacks (``fldiag_papers.records``).

    A run or figure that fails is reported and does not stop the others; each figure is written when its last run is done.
    Raises KeyboardInterrupt when stopped (the same call goes on from there), and FldiagError when a folder cannot be written
    or a study is not valid."""
    the_plan = plan.make_plan(scale, studies, reported.studies().values(), store, records)
    _writable(out, store, *([records] if records else []))
    failures = prepare(the_plan, download)
    results: dict[str, Made] = {}

    def ready(name: str, paths: Mapping[str, Path], errors: Mapping[str, str]) -> None:
        if not draw:
            return
        results[name] = _write(
            next(s for s in studies if s.name == name),
            the_plan,
            out,
            paths,
            errors,
            download,
            strict,
        )

    _run(
        the_plan,
        {s.name for s in studies},
        executor,
        device,
        download,
        failures,
        progress,
        on_done,
        ready,
        strict,
        only,
    )
    return [results[s.name] for s in studies if s.name in results]


def _writable(*folders: Path) -> None:
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FldiagError(
                f"cannot write to {folder}: {error.strerror}",
                "choose others with --out, --runs and --records",
            ) from None


def prepare(the_plan: Plan, download: bool) -> dict[str, str]:
    """Write the reduced data sets of the scale; returns which could not be made, and why."""
    scale = the_plan.scale
    failures: dict[str, str] = {}
    if scale.images is None:
        return failures
    names = {c.data.name for c in (t.config for t in the_plan.tasks.values())}
    for name in sorted(names | {f"{v}-{scale.images}" for v in scale.data.values()}):
        file = packed(the_plan.store) / f"{name}.npz"
        if file.is_file():
            continue
        try:
            dataset = data.load(name.rpartition("-")[0], download=download)
            files.write_atomic(file, lambda f, w=dataset: reduce(w, scale, f))  # type: ignore[misc]
        except FldiagError as error:
            failures[name] = error.what
    return failures


def reduce(dataset: Any, scale: Scale, file: Any) -> None:
    """The first examples of every class, in the order of the data set, equally many of each; channels repeated."""
    import numpy as np

    def first(y: Any, count: int) -> Any:
        classes = dataset.classes
        each = [np.flatnonzero(y.numpy() == c)[: -(-count // classes)] for c in range(classes)]
        return np.sort(np.concatenate(each))[:count]

    def pixels(x: Any, index: Any) -> Any:
        x = x[index].permute(0, 2, 3, 1).numpy()
        return np.repeat(x, dataset.repeat, -1) if dataset.repeat > 1 else x

    train = first(dataset.train_y, scale.images or len(dataset.train_y))
    test = first(dataset.test_y, scale.test_images or len(dataset.test_y))
    np.savez_compressed(
        file,
        train_images=pixels(dataset.train_x, train),
        train_labels=dataset.train_y[train].numpy(),
        test_images=pixels(dataset.test_x, test),
        test_labels=dataset.test_y[test].numpy(),
    )


def _run(
    the_plan: Plan,
    names: set[str],
    executor: Any,
    device: str,
    download: bool,
    failures: Mapping[str, str],
    progress: Progress | None,
    on_done: Callable[[str, int, int], None] | None,
    ready: Callable[[str, Mapping[str, Path], Mapping[str, str]], None],
    strict: bool,
    only: Callable[[Config], bool],
) -> None:
    """The chosen runs trained and asked. ``ready`` is told of each study that waits for no further run, and of the runs so far:
    hash -> folder, hash -> what is wrong."""
    paths, errors, missing = _sorted(the_plan, failures, only)
    total, at, count = (
        sum(t.config.rounds for t in missing),
        dict.fromkeys((t.core for t in missing), 0),
        0,
    )
    records.keep_ended(the_plan, paths.values())
    awaited: dict[str, set[str]] = {name: set() for name in sorted(names)}
    for task in missing:
        for name in task.users:
            awaited[name].add(task.core)
    for name in [n for n, cores in awaited.items() if not cores]:
        ready(name, paths, errors)

    def tell(core: str, done: int, of: int, text: str) -> None:
        at[core] = max(at[core], done)  # what a run said before it ended may come later
        if progress:
            progress(sum(at.values()), total, text)

    def finished(outcome: workers.Outcome) -> None:
        nonlocal count
        task = the_plan.tasks[outcome.core]
        count += 1
        at[outcome.core] = task.config.rounds
        if (outcome.path / "run.json").is_file():
            paths[outcome.core] = outcome.path
        if outcome.error:
            errors[outcome.core] = outcome.error
        if outcome.stopped:
            return
        records.keep_ended(the_plan, [outcome.path])
        if on_done:
            on_done(
                "; ".join([f"{task.text}: {outcome.error or 'done'}", *outcome.notes]),
                count,
                len(missing),
            )
        for name in task.users:
            awaited[name].discard(outcome.core)
            if not awaited[name]:
                ready(name, paths, errors)

    bench = workers.Bench(the_plan.scale, the_plan.store, device, download, strict)
    workers.perform_all(missing, bench, executor, tell, finished)


def _sorted(
    the_plan: Plan, failures: Mapping[str, str], only: Callable[[Config], bool]
) -> tuple[dict[str, Path], dict[str, str], list[Task]]:
    """Folders of runs by hash, why runs are not complete by hash, and the runs to be trained or asked."""
    paths: dict[str, Path] = {}
    errors: dict[str, str] = {}
    missing: list[Task] = []
    for core, task in the_plan.tasks.items():
        path = task.folder(the_plan.store)
        if task.done(path):
            paths[core] = path
            continue
        if only(task.config) and task.config.data.name not in failures:
            missing.append(task)
            continue
        errors[core] = failures[task.config.data.name] if only(task.config) else NOT_YET
        if ended := task.ended(the_plan.store):
            paths[core] = ended
    return paths, errors, missing


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
    study: Study,
    the_plan: Plan,
    out: Path,
    paths: Mapping[str, Path],
    errors: Mapping[str, str],
    download: bool,
    strict: bool = False,
) -> Made:
    mine = {core for (name, _, _), core in the_plan.cells.items() if name == study.name}
    if (
        mine
        and {errors.get(core) for core in mine} == {NOT_YET}
        and all(t.train for t in study.trials)
        and not (study.alone or gather.answered(study, the_plan, paths))
    ):
        return Made(study, error="none of its runs is finished", absent=True)
    try:
        table = gather.table_of(study, the_plan, paths, download)
        lost = {name for name, _ in the_plan.failed}
        path = target(
            out,
            study,
            the_plan.scale,
            is_complete=not mine & errors.keys() and study.name not in lost,
        )
        read_back = read(files.csv_text(table))  # what is drawn is what the csv holds, to the digit
        about_figure = about(study, the_plan, read_back, paths, errors)
        page = (
            ""
            if study.layout is None
            else f"{about_figure['caption']}\n\n{markdown(study.layout(read_back))}"
        )
        pictures = style.write(
            study.draw(read_back), path
        )  # numbers are not written where anything fails
        tables = files.write_table(table, path, about_figure)
        return Made(
            study,
            [
                *tables,
                *([files.write_text(files.beside(path, ".md"), page)] if page else []),
                *pictures,
            ],
        )
    except FldiagError as error:
        if strict:
            raise
        return Made(study, error=f"{error.what}; {error.remedy}")
    except Exception as error:  # a study that fails does not stop the others
        if strict:
            raise
        return Made(study, error=f"{type(error).__name__}: {error}")


def redraw(studies: Sequence[Study], out: Path = OUT) -> list[Made]:
    """Draw again from the csv files in ``out`` and in its folders of scales: pictures and pages anew, numbers and provenance as
    they are. The json notes under ``origin`` what drew. What is not there, or does not fit its json, is left as it is."""
    results, origin = [], provenance()  # before files under version control change
    places = [
        (s, folder / s.paper / s.id)
        for s in studies
        for folder in (out, *(out / name for name in SCALES))
    ]
    for study, path in places:
        if path.parents[1] != out and not files.beside(path, ".json").is_file():
            continue  # most have nothing beside the whole
        try:
            about_figure = files.read_json(files.beside(path, ".json"))
            table = read(files.read_csv_bytes(files.beside(path, ".csv"), about_figure).decode())
            paths = style.write(study.draw(table), path)
        except FileNotFoundError:
            results.append(Made(study, error="not there", absent=True))
            continue
        except FldiagError as error:
            results.append(Made(study, error=f"{error.what}; {error.remedy}"))
            continue
        if study.layout is not None:
            page = f"{about_figure['caption']}\n\n{markdown(study.layout(table))}"
            paths.insert(0, files.write_text(files.beside(path, ".md"), page))
        note = files.write_text(
            files.beside(path, ".json"), files.json_text({**about_figure, "drawn": origin})
        )
        results.append(Made(study, [note, *paths]))
    return results


def read(text: str) -> pd.DataFrame:
    """A study's table from its csv."""
    table = pd.read_csv(io.StringIO(text), keep_default_na=False, na_values=[""], low_memory=False)
    for column in gather.KEYS:
        table[column] = (
            table[column].astype(object).fillna("").astype(str) if column in table else ""
        )
    return table
