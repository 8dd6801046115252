"""``fldiag train``: a run, its forecast, its resumption."""

from __future__ import annotations

import json
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from fldiag import config as configs
from fldiag.checkpoint import prune
from fldiag.clock import duration
from fldiag.config import Config
from fldiag.console import Console
from fldiag.diagnosis.measure import LONG as ANNOUNCE
from fldiag.diagnosis.subjects import user_code
from fldiag.errors import FldiagError
from fldiag.execution.choice import chosen
from fldiag.execution.forecast import START, faster, wall, workers
from fldiag.results.machine import has_bf16
from fldiag.results.summary import Small
from fldiag.training import held, rounds
from fldiag.training.diagnostics import personalise as personal
from fldiag.training.outcome import failure
from fldiag.training.setup import Setup, Unit

#: Exit code of a training that diverged.
DIVERGED = 3
#: A forecast times a local step that takes longer, in seconds, once.
SLOW = 2.0


def train(console: Console, source: str, overrides: list[str], out: Path | None, resume: bool, overwrite: bool, dry_run: bool,
          executor: str,
          download: bool, device: str) -> None:
    config = configs.load(source, overrides)
    path = out or rounds.run_path(config)
    if overwrite and resume:
        raise FldiagError("--overwrite begins anew and --resume goes on", "give one of them", usage=True)
    if dry_run:
        return forecast(console, config, path, executor, download, device)
    if config.train.precision == "bf16" and device == "cpu" and not has_bf16():
        console.note("this processor has no bf16 instructions: bf16 is emulated and much slower than fp32")
    if overwrite and (path / "run.json").is_file():
        prune.remove(path)
    with console.progress(config.method.name) as progress:
        clock: list[float] = []

        def on_event(event: dict[str, Any]) -> None:
            if event["event"] == "round":
                clock.append(event["seconds"])
                if len(clock) == 2 and (left := clock[-1] * (event["rounds"] - event["round"])) > ANNOUNCE:
                    console.note(f"about {duration(left)} to go; Ctrl-C keeps what is done")
                score = f"accuracy {event['accuracy']:.4f}" if "accuracy" in event else f"loss {event['loss']:.4g}"
                progress(event["round"], event["rounds"], f"round {event['round']}, {score}")
            elif event["event"] == "personalise":
                progress(event["done"], event["total"], "clients' own models")
            elif event["event"] == "start":
                if event["round"]:
                    console.note(f"resuming after round {event['round']} of {event['rounds']}")
                for text in event["notes"]:
                    console.note(text)

        try:
            with user_code():
                run = rounds.train(config, out=out, executor=executor, on_event=on_event, resume=resume, device=device,
                                   download=download)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"stopped; everything up to the last checkpoint is kept in {path}",
                                    "go on with the same command and --resume") from None
    report(console, run)


def report(console: Console, run: Any) -> None:
    """The end of a run in a few numbers. One that failed says so in red and leaves with exit code 3."""
    frame = run.metrics
    last = frame[(frame["slice"] == "test") & (frame["round"] == frame["round"].max())]
    row = {"run": run.path.name, "method": run.config.method.name, "rounds": int(frame["round"].max()), "status": run.status,
           **{m: float(v) for m, v in zip(last["metric"], last["value"], strict=True)}}
    console.table([row], {key: key for key in ("run", "method", "rounds", "status", "accuracy", "loss")})
    for item in personal.summary(frame, {}):
        if isinstance(item, Small):
            console.table(list(item.rows), dict(item.columns))
    if why := failure(run):
        console.alarm(f"{why}; a smaller train.lr usually helps")
    files = [f for f in run.index["files"] if f.startswith("rounds/")]
    console.done(run.path / files[-1] if files else run.path)
    if why:
        sys.exit(DIVERGED)


def forecast(console: Console, config: Config, path: Path, executor: str, download: bool, device: str) -> None:
    """Time by training two steps of one cohort, disk by the size of what is stored; writes nothing."""
    with user_code():
        setup = Setup(config, device=device, download=download, rehearsal=True)
    ids = sorted(setup.schedule.sampled(0))
    zero = {i: setup.method.client_init(setup.initial()) for i in ids}
    server = setup.method.server_init(setup.initial())
    units = setup.units(0, ids, setup.initial(), {n: b.clone() for n, b in setup.network.buffers.items()},
                        {n: server[n] for n in setup.method.sent if n in server}, zero if next(iter(zero.values())) else {})
    step, choice = _per_step(setup, units[0]), chosen(executor)
    cohorts = [step * max((len(b) for b in u.batches), default=0) for u in units]
    seconds, at_a_time = sum(cohorts) * config.rounds, workers(choice)
    long = seconds if at_a_time in (1, None) else wall(cohorts, at_a_time or 1) * config.rounds + START
    size, state = setup.model_bytes, len(server) + config.clients.total * len(zero[ids[0]]) + 1
    disk = size * (held.stored_rounds(config) + state) + held.bytes_of_clients(config, size)
    free = shutil.disk_usage(next(p for p in [path.absolute(), *path.absolute().parents] if p.exists())).free
    console.result |= {"config": config.model_dump(mode="json"), "seconds": long, "serial_seconds": seconds,
                       "executor": str(choice), "bytes": disk, "stacked": setup.stack, "path": str(path)}
    console.say(json.dumps(config.model_dump(mode="json"), indent=1))
    console.say(f"{setup.network.size:,} parameters, {len(ids)} of {config.clients.total} clients a round, "
                f"{'stacked' if setup.stack else 'one after another'}")
    where = {1: "of local training on this machine", None: f"of work for {choice}, by the speed of this machine"}.get(
        at_a_time, f"of local training with {at_a_time} at a time on this machine ({duration(seconds)} of work)")
    console.say(f"forecast: {duration(long)} {where}, {disk / 1e6:,.0f} MB of disk ({free / 1e9:,.0f} GB free)")
    if at_a_time is not None and (better := faster(cohorts, config.rounds, long)):
        console.say(f"--executor {better[0]}: {duration(better[1])} instead of {duration(long)}")
    for text in [*setup.remarks, held.described(config, size)]:
        console.say(text)
    console.result["remarks"] = setup.remarks
    if disk > free:
        console.note("that does not fit on the disk: raise checkpoint.every or set checkpoint.clients = 'none'")
    console.done(path)


def _per_step(setup: Setup, unit: Unit) -> float:
    """Seconds of a local step: timed when it is warm, unless one alone takes so long that the warming does not count."""
    for steps in (1, 3):
        trial = replace(unit, batches=[b[:steps] for b in unit.batches])
        began = time.perf_counter()
        setup.train(trial)
        found = (time.perf_counter() - began) / max(1, max(map(len, trial.batches)))
        if found > SLOW:
            break
    return found
