"""``fldiag figures``: the papers' figures and tables again, and the ledger."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from fldiag.cli.console import Console
from fldiag.config import Config
from fldiag.errors import FldiagError, duration
from fldiag.execution.executor import Shard, parse_executor
from fldiag.results.machine import emulated
from fldiag_papers import forecast as forecasts
from fldiag_papers import ledger, make, plan, reported
from fldiag_papers import scales as sizes

#: Seconds from which on the time that is left is said.
ANNOUNCE = 60
#: The first of many runs carry the start of everything: a forecast waits for a tenth, at most so many, or seconds.
FEW, LONG = 10, 300


def figures(
    console: Console,
    ids: list[str],
    scale: str,
    out: Path | None,
    store: Path | None,
    records: Path | None,
    executor: str,
    shard: str | None,
    dry_run: bool,
    as_is: bool,
    only: list[str],
    only_ledger: bool,
    redraw: bool,
    download: bool,
    device: str,
    strict: bool = False,
) -> None:
    out, store = out or make.OUT, store or make.STORE
    if only_ledger:
        return _ledger(console, out)
    if redraw:
        redrawn = make.redraw(reported.select(ids), out)
        return _report(
            console,
            [m for m in redrawn if not m.absent] or redrawn,
            [],
            "fldiag figures NAME makes what is not there",
        )
    size, studies = sizes.scale(scale), reported.select(ids)
    if as_is:
        _trains_nothing(shard, dry_run)
    elif warning := emulated(size.over.get("train.precision", "fp32"), device):
        console.note(warning)
    choice, part = parse_executor(executor), Shard.parse(shard)
    jobs = choice.workers_here(threads=1)
    the_plan = plan.Plan(size, store)
    if only or dry_run or part:
        the_plan = plan.make_plan(size, studies, reported.studies().values(), store, records)
    is_chosen = plan.only(only, (task.config for task in the_plan.tasks.values()))
    if part is not None:
        mine = set(
            part.part(
                sorted(core for core, task in the_plan.tasks.items() if is_chosen(task.config))
            )
        )

        def is_chosen(config: Config) -> bool:
            return config.hash in mine

    if dry_run:
        return forecast(console, the_plan, is_chosen, jobs, download)
    began, is_announced, failed_runs = time.perf_counter(), False, list[str]()

    def on_done(text: str, done: int, total: int) -> None:
        nonlocal is_announced
        spent = time.perf_counter() - began
        left = spent / done * (total - done)
        if not text.endswith(": done"):
            failed_runs.append(text)
            console.note(text)
        if left > ANNOUNCE and (
            (not is_announced and (done >= min(FEW, total / 10) or spent > LONG)) or done % 20 == 0
        ):
            is_announced = True
            console.note(
                f"{done} of {total} runs, about {duration(left)} to go; Ctrl-C keeps finished work"
            )

    try:
        with console.progress("figures") as bar:
            results = make.make(
                studies,
                size,
                out=out,
                store=store,
                executor=choice,
                device=device,
                download=download,
                progress=bar,
                on_done=on_done,
                strict=strict,
                draw=part is None,
                records=records,
                only=lambda config: not as_is and is_chosen(config),
            )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"stopped; what was trained is kept in {store}",
            "run the same command again to continue",
        ) from None
    if part is not None:
        if failed_runs:
            raise FldiagError(
                f"{len(failed_runs)} of the {len(mine)} runs of part {part} failed or lack an answer (why: above)",
                "the others are kept; run the same command again to retry these",
            )
        console.say(
            f"part {part}: {len(mine)} runs; when all parts are done, the same command without --shard draws"
        )
        return console.done(store)
    _report(
        console,
        results,
        ledger.write(out),
        f"without {'--as-is' if as_is else '--only'} all that they need is trained"
        if as_is or only
        else "the others were written; run the same command again to retry these",
    )


def _trains_nothing(shard: str | None, dry_run: bool) -> None:
    if shard is not None:
        raise FldiagError(
            "--shard trains a part, and --as-is trains nothing", "leave out one of them", usage=True
        )
    if dry_run:
        raise FldiagError(
            "--as-is trains nothing: there is nothing to forecast",
            "leave out --as-is or --dry-run",
            usage=True,
        )


def _report(console: Console, results: list[make.Made], files: list[Path], remedy: str) -> None:
    console.table(
        [
            {
                "figure": m.study.name,
                "title": m.study.title,
                "file": str(m.files[-1]) if m.files else "–",
                "problem": m.error or None,
            }
            for m in results
        ],
        {
            "figure": "figure",
            "title": "title",
            "file": "file",
            **({"problem": "problem"} if any(m.error for m in results) else {}),
        },
    )
    failed, absent = (
        [m.study.name for m in results if m.error and m.absent == kind] for kind in (False, True)
    )
    if failed or len(absent) == len(results):
        console.done(*files) if console.machine else None
        names = failed or absent
        raise FldiagError(
            f"{len(names)} of {len(results)} could not be made: {', '.join(names)} (why: in the table above)",
            remedy,
        )
    if absent:
        console.note(f"not drawn, because none of their runs is finished: {', '.join(absent)}")
    console.done(*files, *(f for m in results for f in m.files))


def _ledger(console: Console, out: Path) -> None:
    files = ledger.write(out)
    rows = ledger.rows(out)
    claims = rows[rows["kind"] == "claim"]
    console.table(
        [
            {"statement": r["metric"], "scale": r["scale"] or None, "outcome": r["status"]}
            for r in claims.astype(object).where(claims.notna(), None).to_dict("records")
        ],
        {"statement": "statement", "scale": "scale", "outcome": "outcome"},
    )
    console.done(*files)


def not_forecast(unknown: dict[str, str]) -> list[str]:
    """A line for each reason, with one of the kinds of run that it holds for."""
    kinds: dict[str, list[str]] = {}
    for text, why in unknown.items():
        kinds.setdefault(why, []).append(text)
    return [
        f"not in the forecast: {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {why}"
        for why, names in kinds.items()
    ]


def forecast(
    console: Console,
    the_plan: plan.Plan,
    only: Callable[[Config], bool],
    jobs: int | None,
    download: bool,
) -> None:
    """What there is to train, its time and disk on this machine; writes nothing but the scale's reduced data."""
    the_plan.tasks = {core: task for core, task in the_plan.tasks.items() if only(task.config)}
    failures = make.prepare(the_plan, download)
    with console.progress("forecast") as bar:
        estimate = forecasts.forecast(the_plan, download, bar)
    free = shutil.disk_usage(
        next(
            p for p in [the_plan.store.absolute(), *the_plan.store.absolute().parents] if p.exists()
        )
    ).free
    console.result |= {
        "scale": the_plan.scale.name,
        "runs": estimate.runs,
        "there": estimate.finished,
        "rounds": estimate.rounds,
        "seconds": None if jobs is None else estimate.wall(jobs),
        "core_seconds": estimate.seconds,
        "bytes": estimate.bytes,
        "jobs": jobs,
        "unknown": estimate.unknown,
        "left_out": sorted({f"{name}: {why}" for (name, _), why in the_plan.left_out.items()}),
    }
    console.say(
        f"scale {the_plan.scale.name}: {estimate.runs} runs, {estimate.finished} of them there, "
        f"{estimate.rounds:,} rounds to train"
    )
    spent = "" if jobs is None else f", {duration(estimate.wall(jobs))} with {jobs} at a time"
    console.say(
        f"forecast: {estimate.seconds / 3600:,.1f} core-hours of training{spent} "
        f"({forecasts.machine_words()}), {estimate.bytes / 1e9:,.1f} GB of disk ({free / 1e9:,.0f} GB free)"
    )
    for line in not_forecast({**failures, **estimate.unknown}):
        console.note(line)
    for why in sorted(set(the_plan.left_out.values())):
        console.note(f"left out: {why}")
    if estimate.bytes > free:
        console.note("that does not fit on the disk: give --runs a folder on another one")
    console.done(the_plan.store)
