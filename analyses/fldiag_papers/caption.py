"""What the json beside a picture says: the caption, the runs, what is missing and why."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd

from fldiag.config import Config
from fldiag.errors import FldiagError
from fldiag.plotting import words
from fldiag.results.machine import machine
from fldiag.results.provenance import provenance
from fldiag.results.select import only
from fldiag.runs.run import Run
from fldiag_papers import evidence, gather
from fldiag_papers.plan import Plan
from fldiag_papers.questions import CLOCK
from fldiag_papers.scales import questions, reduction
from fldiag_papers.study import Study, Trial

#: What is said of runs that are missing or not asked everything, where they are not to be trained.
NOT_YET = "not finished yet"
#: A caption names so many trials of an unfinished figure; of more it says how many there are.
NAMED = 6
#: So many last rounds say how much a run's accuracy changes from one to the next, where they are at most half of all.
LAST = 20
#: What tells the finished runs of a figure from the others.
CHOICE = (
    "data.name",
    "partition.kind",
    "partition.alpha",
    "partition.shards",
    "partition.classes",
    "model.name",
    "method.name",
    "seed",
)
#: Number of a trial in its study, seed -> hash of the run.
Cells = Mapping[tuple[int, int], str]


def about(
    study: Study,
    the_plan: Plan,
    table: pd.DataFrame,
    paths: Mapping[str, Path],
    errors: Mapping[str, str],
) -> dict[str, Any]:
    """The json beside a picture. ``table``: the study's table; ``paths``, ``errors``: of runs, by their hash."""
    cells = {
        (trial, seed): core
        for (name, trial, seed), core in the_plan.cells.items()
        if name == study.name
    }
    answered = gather.answered(study, the_plan, paths)
    trained = {core: paths[core] for core in cells.values() if core in paths}
    runs = {core: run_about(the_plan, core, trained[core]) for core in sorted(trained)}
    protocols = _protocols(study, the_plan, cells)
    differences, seeds = reduction(protocols), _seeds(cells, answered, table)
    measured = gather.measured(table, study, the_plan, answered)
    left, failed = (
        _left_out(study, the_plan, cells, errors),
        _failed(study, the_plan, cells, errors),
    )
    sentences = [
        study.caption,
        protocol([theirs for theirs, _ in protocols]),
        *_of_the_scale(study, the_plan, differences, trains=bool(cells)),
        *_of_the_answers(study, the_plan, seeds, trains=bool(cells)),
        *_of_the_untrained(measured),
        *_of_the_finished(study, cells, answered, errors),
        *_of_the_missing(left, cells, errors),
        *_of_the_failed(study, failed, cells, runs),
    ]
    about = {
        "paper": study.paper,
        "id": study.id,
        **({"varies": study.varies} if study.varies else {}),
        "title": study.title,
        "source": study.source,
        "caption": " ".join(filter(None, sentences)),
        "scale": the_plan.scale.name,
        "reduction": differences,
        "seeds": seeds,
        "machine": machines(trained.values()),
        **provenance(),
        "runs": {trained[core].name: entry for core, entry in runs.items()},
        "failed": failed,
        "left_out": left,
        "measured": measured,
    }
    return {**about, "command": command(about)}


def command(about: Mapping[str, Any]) -> str:
    """What makes a figure again; of one that is not finished, the runs that it has."""
    words = [f"fldiag figures {about['paper']}/{about['id']} --scale {about['scale']}"]
    configs = [run["config"] for run in about["runs"].values() if "config" in run]
    for key in CHOICE if unfinished(about) else ():
        section, _, name = key.partition(".")
        values = {c[section].get(name) if name else c[section] for c in configs}
        if values and None not in values:
            words.append(f"--only {key}={','.join(sorted(map(str, values)))}")
    return " ".join(words)


# ---- what was done


def _protocols(study: Study, the_plan: Plan, cells: Cells) -> list[tuple[Config, Config]]:
    """The paper's config and the scale's, of every trial: once, whatever its seeds."""
    scale = the_plan.scale
    first = scale.seed_list(study.seeds)[0]
    trained = [
        (study.trials[n].protocol(), the_plan.tasks[core].config)
        for (n, seed), core in cells.items()
        if seed == first
    ]
    untrained = [
        (trial.protocol(), scale.config(trial, 0, the_plan.store))
        for n, trial in enumerate(study.trials)
        if not trial.train and (study.name, n) not in the_plan.left_out
    ]
    return trained + untrained


def _seeds(cells: Cells, answered: Collection[str], table: pd.DataFrame) -> list[int]:
    """The seeds of the runs that have answered; of a study that trains nothing, those in its table."""
    if cells:
        return sorted({seed for (_, seed), core in cells.items() if core in answered})
    return sorted({int(s) for s in table.loc[table["origin"] == "measured", "seed"].dropna()}) or [
        0
    ]


def _left_out(
    study: Study, the_plan: Plan, cells: Cells, errors: Mapping[str, str]
) -> list[dict[str, Any]]:
    """The trials that the scale does not have, then those whose runs are not finished, each with the reason."""
    refused = [(n, why) for (name, n), why in the_plan.left_out.items() if name == study.name]
    waiting = dict.fromkeys(
        (n, NOT_YET) for (n, _), core in cells.items() if errors.get(core) == NOT_YET
    )  # once, of all seeds
    return [
        {**study.trials[n].key(), "label": study.trials[n].name, "why": why}
        for n, why in [*refused, *waiting]
    ]


def _failed(
    study: Study, the_plan: Plan, cells: Cells, errors: Mapping[str, str]
) -> list[dict[str, Any]]:
    """The runs that failed, then the trials that could not be planned, each with the reason."""
    runs = [
        (n, seed, errors[core])
        for (n, seed), core in cells.items()
        if errors.get(core, NOT_YET) != NOT_YET
    ]
    unplanned = [(n, 0, why) for (name, n), why in the_plan.failed.items() if name == study.name]
    return [
        {**study.trials[n].key(), "seed": seed, "why": public(why, the_plan.store)}
        for n, seed, why in runs + unplanned
    ]


# ---- sentences of the caption


def _of_the_scale(study: Study, the_plan: Plan, differences: str, trains: bool) -> Iterator[str]:
    scale = the_plan.scale
    if differences:
        remark = (
            ""
            if scale.is_unreduced or not any(t.setting for t in study.trials)
            else "Titles and axes show the paper's settings. "
        )
        yield f"{remark}Scale {scale.name}: {differences}."
    datasets = {
        task.config.data.name for task in the_plan.tasks.values() if study.name in task.users
    }
    if notes := [note for name, note in scale.notes.items() if name in datasets]:
        yield f"Data: {'; '.join(notes)}."
    if scale.test_images and trains:
        worst = 50 / scale.test_images**0.5  # of a share of one half
        yield f"{scale.test_images:,} test images: an accuracy's standard error is up to {worst:.1f} points."


def _of_the_answers(
    study: Study, the_plan: Plan, seeds: Sequence[int], trains: bool
) -> Iterator[str]:
    ours = [
        trial for n, trial in enumerate(study.trials) if (study.name, n) not in the_plan.left_out
    ]
    settings = questions(
        the_plan.scale,
        [ask for trial in ours for ask in (*study.ask, *trial.ask)] + list(study.alone),
        len(seeds),
    )
    if settings:
        yield f"Diagnostics: {settings}."
    if len(seeds) > 1 or (trains and seeds):
        yield f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''}."


def _of_the_untrained(measured: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    low = [
        hit["value"] <= limit
        for hit in measured
        if hit["metric"] == "accuracy"
        and hit["value"] is not None
        and (limit := evidence.floor(hit["trained_on"])) is not None
    ]
    if any(low):
        yield f"Not trained far enough to compare methods (near chance, or two classes): {sum(low)} of {len(low)} models."


def _of_the_finished(
    study: Study, cells: Cells, answered: Collection[str], errors: Mapping[str, str]
) -> Iterator[str]:
    """Which lines of a picture there are, where runs of it are still to come."""
    if NOT_YET in {errors.get(core) for core in cells.values()}:
        trials, done = (
            dict.fromkeys(n for n, _ in cells),
            dict.fromkeys(n for (n, _), core in cells.items() if core in answered),
        )
        names = ", ".join(_trial_name(study.trials[n]) for n in done) if len(done) <= NAMED else ""
        yield f"Finished so far, {len(done)} of {len(trials)}{': ' if names else ''}{names}."


def _trial_name(trial: Trial) -> str:
    return words.method(trial.name) + (f" ({trial.setting})" if trial.setting else "")


def _of_the_missing(
    left: Sequence[Mapping[str, Any]], cells: Cells, errors: Mapping[str, str]
) -> Iterator[str]:
    reasons = sorted({hit["why"] for hit in left} - {NOT_YET})
    runs = set(cells.values())
    if waiting := {core for core in runs if errors.get(core) == NOT_YET}:
        reasons.append(f"{len(waiting)} of {len(runs)} runs, {NOT_YET}")
    if reasons:
        yield f"Left out: {'; '.join(reasons)}."


def _of_the_failed(
    study: Study,
    failed: Sequence[Mapping[str, Any]],
    cells: Cells,
    runs: Mapping[str, Mapping[str, Any]],
) -> Iterator[str]:
    if failed:
        yield f"Failed: {'; '.join(sorted({str(hit['why']) for hit in failed}))}."
    lost = {core for core, entry in runs.items() if entry["status"] == "diverged"}
    if diverged := [(study.trials[n], seed) for (n, seed), core in cells.items() if core in lost]:
        labels = [f"{_trial_name(trial)}, seed {seed}" for trial, seed in diverged]
        yield f"Diverged: {'; '.join(dict.fromkeys(labels))}."


def protocol(configs: Sequence[Config]) -> str:
    """The paper's data and partition, as far as they are the same in all parts of the figure."""
    data = {c.data.name for c in configs}
    splits = {
        " ".join(
            [
                c.partition.kind,
                *(f"{k} {v}" for k, v in c.partition.options.items() if k != "min_size"),
            ]
        )
        for c in configs
    }
    parts = [
        f"{kind} {values.pop()}"
        for kind, values in (("data", data), ("partition", splits))
        if len(values) == 1
    ]
    return f"In the paper: {', '.join(parts)}." if parts else ""


def unfinished(about: Mapping[str, Any]) -> bool:
    """Whether runs that the scale has are missing from what was made."""
    return bool(about.get("failed")) or any(
        hit.get("why") == NOT_YET for hit in about.get("left_out", ())
    )


def run_about(the_plan: Plan, core: str, path: Path) -> dict[str, Any]:
    config = the_plan.tasks[core].config.model_dump(mode="json")
    config["data"].pop("root")  # where data lie is nobody's business
    run = Run.open(path)
    origin = {
        k: run.index["provenance"].get(k)
        for k in ("fldiag", "commit", "torch", "capability", "device_name", "threads")
    }
    return {
        "hash": core[:10],
        "status": run.status,
        "rounds": run.done,
        **origin,
        "segments": run.index.get("segments", []),
        "config": config,
        **_last_rounds(run),
    }


def _last_rounds(run: Run) -> dict[str, Any]:
    """Mean and standard deviation of the accuracy, in percent, over the last rounds: what another last round might have given."""
    if run.done < 2 * LAST or not run.has_metrics:
        return {}
    rows = only(run.metrics, metric="accuracy", scope="global")
    values = 100 * rows.loc[rows["round"] > run.done - LAST, "value"].astype(float).dropna()
    if len(values) < LAST:
        return {}
    return {
        "last_rounds": {
            "rounds": LAST,
            "accuracy": float(values.mean()),
            "std": float(values.std(ddof=1)),
        }
    }


def public(text: str, store: Path) -> str:
    """A message without the names of folders, which are nobody's business."""
    for folder in sorted(
        {store, store.absolute(), Path.cwd(), Path.home()}, key=lambda p: -len(str(p))
    ):
        if len(str(folder)) > 1:
            text = text.replace(str(folder), folder.name or "~")
    return " ".join(re.sub(r"(?<![:/\w])(?:/[^\s/:;,'\"]+)+/([^\s/:;,'\"]+)", r"\1", text).split())


def machines(paths: Iterable[Path]) -> str:
    """Where the runs were trained."""
    names = set()
    for path in paths:
        with suppress(FldiagError):
            names |= {
                part["machine"]
                for part in Run.open(path).index.get("segments", ())
                if "machine" in part
            }
        with suppress(OSError, ValueError, KeyError):  # runs of fldiag 0.1.0 name it only here
            names.add(json.loads((path / CLOCK).read_text("utf-8"))["machine"])
    return "; ".join(sorted(names)) or machine()
