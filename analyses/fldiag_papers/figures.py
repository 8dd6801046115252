"""What ``fldiag figures`` shows on the console: the files, the statements, the plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fldiag.cli.console import Console
from fldiag.errors import FldiagError
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


def show_plan(console: Console, the_plan: plan.Plan, cores: Sequence[str], download: bool) -> None:
    """What there is to train; writes nothing but the scale's reduced data."""
    for name, why in make.prepare(the_plan, download).items():
        console.note(f"{name}: {why}")
    todo = []
    for task in (the_plan.tasks[core] for core in cores):
        run = next(filter(task.fits, the_plan.runs(task)), None)
        if run is None or not plan.is_finished(run):
            todo.append(task)
    rounds = sum(task.config.rounds for task in todo)
    console.result |= {
        "scale": the_plan.scale.name,
        "runs": len(cores),
        "there": len(cores) - len(todo),
        "rounds": rounds,
        "left_out": sorted({f"{name}: {why}" for (name, _), why in the_plan.left_out.items()}),
    }
    console.say(
        f"scale {the_plan.scale.name}: {len(cores)} runs, {len(cores) - len(todo)} of them finished, "
        f"{rounds:,} rounds to train"
    )
    for why in sorted(set(the_plan.left_out.values())):
        console.note(f"left out: {why}")
    console.done(the_plan.store)
