"""``fldiag train``: a run, its forecast, its resumption."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fldiag import config as configs
from fldiag.clock import duration
from fldiag.config import Config
from fldiag.console import Console
from fldiag.errors import FldiagError
from fldiag.results.machine import emulated
from fldiag.results.summary import Small
from fldiag.runs import prune
from fldiag.runs.run import Run
from fldiag.training import forecast as forecasts
from fldiag.training import rounds
from fldiag.training.diagnostics import personalise as personal
from fldiag.training.rounds import failure
from fldiag.user_code import importable

#: Exit code of a training that diverged.
DIVERGED = 3


def source(
    console: Console,
    config: str | None,
    like: Path | None,
    overrides: list[str],
    allow_code: list[str],
) -> str | Config:
    """The preset or TOML file, or the config that is like a run, of which it is said what was taken from it."""
    if (config is None) == (like is None):
        raise FldiagError(
            "what to train is not clear" if config is None else "a config and --like were given",
            "give a preset, a TOML file, or --like RUN: one of them",
            usage=True,
        )
    if like is None:
        return str(config)
    run = Run.open(like).allow(allow_code)
    resolved, remarks = configs.like(run, dict(map(configs.parse_override, overrides)))
    for text in remarks:
        console.note(text)
    return resolved


def train(
    console: Console,
    source: str | Config,
    overrides: list[str],
    out: Path | None,
    resume: bool,
    overwrite: bool,
    dry_run: bool,
    executor: str,
    download: bool,
    device: str,
) -> None:
    config = source if isinstance(source, Config) else configs.load(source, overrides)
    path = out or rounds.run_path(config)
    if overwrite and resume:
        raise FldiagError(
            "--overwrite starts again and --resume continues", "give one of them", usage=True
        )
    if dry_run:
        return forecast(console, config, path, executor, download, device)
    if warning := emulated(config.train.precision, device):
        console.note(warning)
    if overwrite and os.path.isfile(path / "run.json"):
        names = (config.partition.path, config.train.initial, config.data.name.partition(":")[2])
        if any(Path(n).resolve().is_relative_to(path.resolve()) for n in names if n):
            raise FldiagError(
                f"--overwrite would delete {path}, of which this training needs files",
                "choose another folder with --out",
                usage=True,
            )
        prune.remove(path)
    with console.progress(config.method.name) as progress:

        def on_event(event: dict[str, Any]) -> None:
            if event["event"] == "round":
                score = (
                    f"accuracy {event['accuracy']:.4f}"
                    if "accuracy" in event
                    else f"loss {event['loss']:.4g}"
                )
                progress(event["round"], event["rounds"], f"round {event['round']}, {score}")
            elif event["event"] == "personalise":
                progress(event["done"], event["total"], "clients' own models")
            elif event["event"] == "start":
                if event["round"]:
                    console.note(f"resuming after round {event['round']} of {event['rounds']}")
                for text in event["notes"]:
                    console.note(text)
                progress(event["round"], event["rounds"], f"round {event['round'] + 1}")

        try:
            with importable():
                run = rounds.train(
                    config,
                    out=out,
                    executor=executor,
                    on_event=on_event,
                    resume=resume,
                    device=device,
                    download=download,
                )
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"stopped; everything up to the last checkpoint is kept in {path}",
                "to continue, run the same command with --resume",
            ) from None
    report(console, run)


def report(console: Console, run: Any) -> None:
    """The end of a run in a few numbers. One that failed says so in red and leaves with exit code 3."""
    frame = run.metrics
    last = frame[(frame["slice"] == "test") & (frame["round"] == frame["round"].max())]
    why = failure(run)
    row = {
        "run": run.path.name,
        "method": run.config.method.name,
        "rounds": int(frame["round"].max()),
        "status": "diverged" if why else run.status,
        **{m: float(v) for m, v in zip(last["metric"], last["value"], strict=True)},
    }
    console.table(
        [row], {key: key for key in ("run", "method", "rounds", "status", "accuracy", "loss")}
    )
    for item in personal.summary(frame, {}):
        if isinstance(item, Small):
            console.table(list(item.rows), dict(item.columns))
    if why:
        console.alarm(f"{why}; a smaller train.lr usually helps")
    files = [f for f in run.index["files"] if f.startswith("rounds/")]
    console.done(run.path / files[-1] if files else run.path)
    if why:
        sys.exit(DIVERGED)


def forecast(
    console: Console, config: Config, path: Path, executor: str, download: bool, device: str
) -> None:
    """Writes nothing."""
    with importable():
        estimate = forecasts.forecast(config, executor=executor, device=device, download=download)
    free = shutil.disk_usage(
        next(p for p in [path.absolute(), *path.absolute().parents] if os.path.exists(p))
    ).free
    console.result |= {
        "config": config.model_dump(mode="json"),
        **asdict(estimate),
        "path": str(path),
    }
    console.say(json.dumps(config.model_dump(mode="json"), indent=1))
    console.say(
        f"{estimate.parameters:,} parameters, {estimate.clients} of {config.clients.total} clients a round, "
        f"{'stacked' if estimate.stacked else 'one after another'}"
    )
    speed = forecasts.speed_words(estimate.at_a_time, estimate.executor, estimate.serial_seconds)
    console.say(
        f"forecast: {duration(estimate.seconds)} {speed}, {estimate.bytes / 1e6:,.0f} MB of disk ({free / 1e9:,.0f} GB free)"
    )
    for text in [*estimate.remarks, estimate.kept]:
        console.say(text)
    if estimate.bytes > free:
        console.note(
            "that does not fit on the disk: raise checkpoint.every or set checkpoint.clients = 'none'"
        )
    console.done(path)
