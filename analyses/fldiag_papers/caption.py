"""What the json beside a picture says: the caption, the runs, what is missing and why."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fldiag.config import Config
from fldiag.plotting import words
from fldiag.results.machine import machine
from fldiag.results.provenance import provenance
from fldiag.results.select import only
from fldiag.runs.run import Run
from fldiag_papers import evidence, gather
from fldiag_papers.plan import Plan
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


def describe(
    study: Study,
    plan: Plan,
    table: pd.DataFrame,
    paths: Mapping[str, Path],
    errors: Mapping[str, str],
) -> dict[str, Any]:
    """The json beside a picture. ``table``: the study's table; ``paths``, ``errors``: of runs, by their hash."""
    scale, cells = plan.scale, plan.cells_of(study)
    answered = gather.answered(study, plan, paths)
    runs = {core: Run.open(paths[core]) for core in sorted(set(cells.values())) if core in paths}
    refused = {n: why for (name, n), why in plan.left_out.items() if name == study.name}
    first = scale.seed_list(study.seeds)[0]
    protocols = [
        (study.trials[n].protocol(), plan.tasks[core].config)
        for (n, seed), core in cells.items()
        if seed == first
    ] + [
        (trial.protocol(), scale.config(trial, 0, plan.store))
        for n, trial in enumerate(study.trials)
        if not trial.train and n not in refused
    ]
    if cells:
        seeds = sorted({seed for (_, seed), core in cells.items() if core in answered})
    else:  # nothing is trained
        column = table.loc[table["origin"] == "measured", "seed"].dropna()
        seeds = sorted({int(seed) for seed in column}) or [0]
    # Once a trial, whatever its seeds.
    waiting = dict.fromkeys(n for (n, _), core in cells.items() if errors.get(core) == NOT_YET)
    left_out = [
        {**study.trials[n].key(), "label": study.trials[n].name, "why": why}
        for n, why in [*refused.items(), *((n, NOT_YET) for n in waiting)]
    ]
    failed = [
        {**study.trials[n].key(), "seed": seed, "why": without_folders(why, plan.store)}
        for n, seed, why in [
            *((n, s, errors.get(core, NOT_YET)) for (n, s), core in cells.items()),
            *((n, 0, why) for (name, n), why in plan.failed.items() if name == study.name),
        ]
        if why != NOT_YET
    ]
    measured = gather.measured(table, study, plan, answered)
    differences = reduction(protocols)
    sentences = [
        study.caption,
        protocol([theirs for theirs, _ in protocols]),
        *_of_the_scale(study, plan, differences, bool(cells)),
        *_of_the_answers(
            study, plan, seeds, [n for n in range(len(study.trials)) if n not in refused]
        ),
        *_of_the_untrained(measured),
        *_of_the_missing(study, cells, answered, errors, set(refused.values())),
        *_of_the_failed(study, failed, cells, runs),
    ]
    about = {
        "paper": study.paper,
        "id": study.id,
        **({"varies": study.varies} if study.varies else {}),
        "title": study.title,
        "source": study.source,
        "caption": " ".join(filter(None, sentences)),
        "scale": scale.name,
        "reduction": differences,
        "seeds": seeds,
        "machine": machines(runs.values()),
        **provenance(),
        "runs": {run.path.name: _about_run(plan, core, run) for core, run in runs.items()},
        "failed": failed,
        "left_out": left_out,
        "measured": measured,
    }
    return {**about, "command": command(about)}


def command(about: Mapping[str, Any]) -> str:
    """What makes a figure again; of one that is not finished, the runs that it has."""
    parts = [f"fldiag figures {about['paper']}/{about['id']} --scale {about['scale']}"]
    configs = [run["config"] for run in about["runs"].values() if "config" in run]
    for key in CHOICE if unfinished(about) else ():
        section, _, name = key.partition(".")
        values = {c[section].get(name) if name else c[section] for c in configs}
        if values and None not in values:
            parts.append(f"--only {key}={','.join(sorted(map(str, values)))}")
    return " ".join(parts)


def unfinished(about: Mapping[str, Any]) -> bool:
    """Whether runs that the scale has are missing from what was made."""
    return bool(about.get("failed")) or any(
        hit.get("why") == NOT_YET for hit in about.get("left_out", ())
    )


# ---- sentences of the caption


def protocol(configs: Sequence[Config]) -> str:
    """The paper's data and partition, as far as they are the same in all parts of the figure."""
    splits = {
        " ".join([p.kind, *(f"{k} {v}" for k, v in p.options.items() if k != "min_size")])
        for p in (c.partition for c in configs)
    }
    values = {"data": {c.data.name for c in configs}, "partition": splits}
    parts = [f"{kind} {names.pop()}" for kind, names in values.items() if len(names) == 1]
    return f"In the paper: {', '.join(parts)}." if parts else ""


def _of_the_scale(study: Study, plan: Plan, differences: str, trains: bool) -> Iterator[str]:
    scale = plan.scale
    if differences:
        has_settings = not scale.is_unreduced and any(t.setting for t in study.trials)
        remark = "Titles and axes show the paper's settings. " if has_settings else ""
        yield f"{remark}Scale {scale.name}: {differences}."
    data = {task.config.data.name for task in plan.tasks.values() if study.name in task.users}
    if notes := [note for name, note in scale.notes.items() if name in data]:
        yield f"Data: {'; '.join(notes)}."
    if scale.test_images and trains:
        worst = 50 / scale.test_images**0.5  # of a share of one half
        yield f"{scale.test_images:,} test images: an accuracy's standard error is up to {worst:.1f} points."


def _of_the_answers(
    study: Study, plan: Plan, seeds: Sequence[int], numbers: Sequence[int]
) -> Iterator[str]:
    asks = [a for n in numbers for a in (*study.ask, *study.trials[n].ask)] + list(study.alone)
    if settings := questions(plan.scale, asks, len(seeds)):
        yield f"Diagnostics: {settings}."
    if len(seeds) > 1 or (plan.cells_of(study) and seeds):
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


def _of_the_missing(
    study: Study,
    cells: Mapping[tuple[int, int], str],
    answered: Collection[str],
    errors: Mapping[str, str],
    reasons: Collection[str],
) -> Iterator[str]:
    """Which lines of a picture there are, where runs of it are still to come; what was left out, and why."""
    cores = set(cells.values())
    waiting = [core for core in cores if errors.get(core) == NOT_YET]
    reasons = sorted(reasons)
    if waiting:
        done = list(dict.fromkeys(n for (n, _), core in cells.items() if core in answered))
        names = ", ".join(_trial_name(study.trials[n]) for n in done) if len(done) <= NAMED else ""
        yield f"Finished so far, {len(done)} of {len({n for n, _ in cells})}{': ' if names else ''}{names}."
        reasons.append(f"{len(waiting)} of {len(cores)} runs, {NOT_YET}")
    if reasons:
        yield f"Left out: {'; '.join(reasons)}."


def _of_the_failed(
    study: Study,
    failed: Sequence[Mapping[str, Any]],
    cells: Mapping[tuple[int, int], str],
    runs: Mapping[str, Run],
) -> Iterator[str]:
    if failed:
        yield f"Failed: {'; '.join(sorted({str(hit['why']) for hit in failed}))}."
    diverged = [
        f"{_trial_name(study.trials[n])}, seed {seed}"
        for (n, seed), core in cells.items()
        if core in runs and runs[core].status == "diverged"
    ]
    if diverged:
        yield f"Diverged: {'; '.join(dict.fromkeys(diverged))}."


def _trial_name(trial: Trial) -> str:
    return words.method(trial.name) + (f" ({trial.setting})" if trial.setting else "")


# ---- the runs


def _about_run(plan: Plan, core: str, run: Run) -> dict[str, Any]:
    config = plan.tasks[core].config.model_dump(mode="json")
    config["data"].pop("root")  # where data lie is nobody's business
    origin = ("fldiag", "commit", "torch", "capability", "device_name", "threads")
    return {
        "hash": core[:10],
        "status": run.status,
        "rounds": run.done,
        **{k: run.index["provenance"].get(k) for k in origin},
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
    spread = {"accuracy": float(values.mean()), "std": float(values.std(ddof=1))}
    return {"last_rounds": {"rounds": LAST, **spread}}


def without_folders(text: str, store: Path) -> str:
    """A message without the names of folders, which are nobody's business."""
    folders = {store, store.absolute(), Path.cwd(), Path.home()}
    for folder in sorted(folders, key=lambda p: -len(str(p))):
        if len(str(folder)) > 1:
            text = text.replace(str(folder), folder.name or "~")
    return " ".join(re.sub(r"(?<![:/\w])(?:/[^\s/:;,'\"]+)+/([^\s/:;,'\"]+)", r"\1", text).split())


def machines(runs: Iterable[Run]) -> str:
    """Where the runs were trained."""
    parts = [part for run in runs for part in run.index.get("segments", ())]
    names = {part["machine"] for part in parts if "machine" in part}
    return "; ".join(sorted(names)) or machine()
