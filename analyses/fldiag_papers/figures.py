"""What ``fldiag figures`` shows on the console: the files, the statements, the forecast."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fldiag.cli.console import Console
from fldiag.config import Config
from fldiag.errors import FldiagError, duration
from fldiag.results.machine import machine
from fldiag.training import forecast as training
from fldiag_papers import ledger, make, plan


def report(
    console: Console, results: Sequence[make.Result], files: list[Path], remedy: str
) -> None:
    rows = [
        {
            "figure": r.study.name,
            "title": r.study.title,
            "file": str(r.files[-1]) if r.files else "–",
            "problem": r.error or None,
        }
        for r in results
    ]
    heads = ["figure", "title", "file", *(["problem"] if any(r.error for r in results) else [])]
    console.table(rows, {head: head for head in heads})
    absent = [r.study.name for r in results if r.is_absent]
    failed = [r.study.name for r in results if r.error and not r.is_absent]
    if failed or len(absent) == len(results):
        if console.machine:
            console.done(*files)
        names = failed or absent
        raise FldiagError(
            f"{len(names)} of {len(results)} could not be made: {', '.join(names)} (why: in the table above)",
            remedy,
        )
    if absent:
        console.note(f"not drawn, because none of their runs is finished: {', '.join(absent)}")
    console.done(*files, *(f for r in results for f in r.files))


def show_ledger(console: Console, out: Path) -> None:
    files = ledger.write(out)
    claims = ledger.rows(out).query("kind == 'claim'")
    columns = {"metric": "statement", "scale": "scale", "status": "outcome"}
    rows = claims[list(columns)].rename(columns=columns).astype(object)
    heads = {name: name for name in columns.values()}
    console.table(rows.where(rows.notna(), None).to_dict("records"), heads)
    console.done(*files)


def forecast(
    console: Console,
    the_plan: plan.Plan,
    cores: Sequence[str],
    executor: Any,
    device: str,
    download: bool,
) -> None:
    """What there is to train, its time and disk on this machine, without the diagnostics; writes nothing but the scale's
    reduced data. One run of a kind is timed; the others take as much longer as they have more local steps."""
    tasks = [the_plan.tasks[core] for core in cores]
    unknown = dict(make.prepare(the_plan, download))
    jobs, todo = executor.workers_here(threads=1), []
    for task in tasks:
        run = next(filter(task.fits, the_plan.runs(task)), None)
        if run is None or not plan.is_finished(run):
            todo.append(task)
    seconds, size, kinds = [], 0, {}
    with console.progress("forecast") as bar:
        for i, task in enumerate(todo):
            config = task.config
            kind = (config.data.name, config.model.name, config.method.name)
            bar(i, len(todo), f"timing {', '.join(kind)}")
            try:
                if kind not in kinds:
                    estimate = training.forecast(config, device=device, download=download)
                    kinds[kind] = estimate.seconds / local_steps(config), 4 * estimate.parameters
            except FldiagError as error:
                unknown[", ".join(kind)] = error.what
                continue
            seconds.append(kinds[kind][0] * local_steps(config))
            size += kinds[kind][1] * models_kept(task)
    place = next(
        p for p in [the_plan.store.absolute(), *the_plan.store.absolute().parents] if p.exists()
    )
    free = shutil.disk_usage(place).free
    spent = None if jobs is None else training.wall(seconds, jobs)
    rounds = sum(task.config.rounds for task in todo)
    console.result |= {
        "scale": the_plan.scale.name,
        "runs": len(tasks),
        "there": len(tasks) - len(todo),
        "rounds": rounds,
        "seconds": spent,
        "core_seconds": sum(seconds),
        "bytes": size,
        "jobs": jobs,
        "unknown": unknown,
        "left_out": sorted({f"{name}: {why}" for (name, _), why in the_plan.left_out.items()}),
    }
    console.say(
        f"scale {the_plan.scale.name}: {len(tasks)} runs, {len(tasks) - len(todo)} of them finished, "
        f"{rounds:,} rounds to train"
    )
    side_by_side = "" if spent is None else f", {duration(spent)} with {jobs} at a time"
    console.say(
        f"forecast: {sum(seconds) / 3600:,.1f} core-hours of training{side_by_side} ({machine()}), "
        f"{size / 1e9:,.1f} GB of disk ({free / 1e9:,.0f} GB free)"
    )
    for line in not_forecast(unknown):
        console.note(line)
    for why in sorted(set(the_plan.left_out.values())):
        console.note(f"left out: {why}")
    if size > free:
        console.note("that does not fit on the disk: give --runs a folder on another one")
    console.done(the_plan.store)


def models_kept(task: plan.Task) -> int:
    """Global models, and of the rounds whose clients stay the models that were sent and received; the server's state."""
    clients = task.config.clients.per_round if task.config.checkpoint.clients != "none" else 0
    return (len(task.rounds) or 1) * (2 + clients if clients else 1) + 2


def local_steps(config: Config) -> float:
    """In units of those in which every client trains one epoch once."""
    clients, train = config.clients, config.train
    return config.rounds * clients.per_round / clients.total * train.epochs / train.batch_size


def not_forecast(unknown: Mapping[str, str]) -> list[str]:
    """A line for each reason, with one of the kinds of run that it holds for."""
    kinds: dict[str, list[str]] = {}
    for text, why in unknown.items():
        kinds.setdefault(why, []).append(text)
    return [
        f"not in the forecast: {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {why}"
        for why, names in kinds.items()
    ]
