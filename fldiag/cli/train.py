"""The verbs that train: a demonstration, one run, or every combination of some values."""

from __future__ import annotations

import itertools
import math
import os
import sys
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fldiag.cli.app import verb
from fldiag.cli.console import Console
from fldiag.cli.options import AllowCode, Device, Json, Out, Seed, Set, Shard

if TYPE_CHECKING:
    from fldiag.config import Config
    from fldiag.runs.run import Run

#: Exit code of a training that diverged.
DIVERGED = 3
GO_ON = "to continue, run the same command with --resume"
COLUMNS = {name: name for name in ("run", "method", "rounds", "status", "accuracy", "loss")}


@verb("Start", "width", "format")
def demo(
    out: Out = None,
    json: Json = False,
    device: Device = "cpu",
    seed: Seed = 0,
) -> None:
    """Train FedAvg and FedSOL on the digits data and compare their loss landscapes; under a minute.

    Example: fldiag demo
    """
    import pandas as pd

    from fldiag.config import Config
    from fldiag.diagnosis.diagnose import FALLBACK, diagnose, pictures
    from fldiag.execution import threads
    from fldiag.report.page import report

    console, runs, replies = Console(json), [], []
    folder = out or FALLBACK / "demo"
    seen: dict[str, Any] = {"bar": console.progress, "tell": console.note}
    settings = {"seed": seed, "checkpoint__every": 10, "checkpoint__clients": "sampled"}
    options = {"seed": seed, "device": device}
    # on one thread: as fast as on two on such small networks, which wait for each other
    with threads(1):
        for method in ("fedavg", "fedsol"):
            config = Config.load("digits", method__name=method, **settings)
            path = folder / f"{method}-s{config.seed}-{config.hash[:8]}"
            runs.append(_train(console, config, path, resume=True, device=device))
            diagnose("forgetting", [runs[-1]], {"device": device}, **seen)
            replies.append(diagnose("landscape", [runs[-1].checkpoint()], options, **seen))
        table = pd.concat([reply.table for reply in replies], ignore_index=True)
        files = pictures(replies[0].entry, table, folder / "landscape")
        page = report([run.path for run in runs], folder / "report.html")
    console.table([_row(run) for run in runs], COLUMNS)
    for reply in replies:
        console.show(reply.summary())
    console.done(page, *files)


@verb("Start", "executor", "download", "device")
def train(
    source: Annotated[
        str,
        typer.Argument(
            help="A preset (fldiag list presets), a TOML file, or a run, whose data, model and partition are taken."
        ),
    ],
    set_: Set = None,
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a stopped run.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only show the config and the model's size."),
    ] = False,
    allow_code: AllowCode = None,
    json: Json = False,
    seed: Seed = None,
    **options: Any,
) -> None:
    """Train a federated model and write a checkpoint every round; can be stopped and resumed at any moment.

    Example: fldiag train digits --set method.name=fedsol --set method.rho=2.0
    """
    from fldiag import config as configs
    from fldiag.runs.run import Run
    from fldiag.training.train import run_path

    console = Console(json)
    overrides = dict(map(configs.parse_override, set_ or []))
    overrides |= {} if seed is None else {"seed": seed}
    if os.path.isdir(source):
        config = configs.of_run(Run.open(source).allow(allow_code or []), overrides)
        console.say(f"data, model and partition of {source}; besides --set, defaults:")
        console.say(dumps(config.model_dump(mode="json"), indent=1))
    else:
        config = configs.load(source, overrides)
    path = out or run_path(config)
    if dry_run:
        _describe(console, config, path, options["device"], options["download"])
    else:
        _show(console, _train(console, config, path, resume=resume, **options))


@verb("Start", "executor", "download", "device")
def sweep(
    config: Annotated[str, typer.Argument(help="A preset (fldiag list presets) or a TOML file.")],
    over: Annotated[
        list[str],
        typer.Option(
            help="key=a,b,c: values to train. May be given several times; every combination is trained."
        ),
    ],
    set_: Set = None,
    out: Out = None,
    shard: Shard = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Train every combination of the given values; write one table and one report. Finished runs are reused.

    Example: fldiag sweep digits --over method.name=fedavg,fedsol --over seed=0,1,2
    """
    from fldiag.cli.compare import show_report
    from fldiag.config import parse_override
    from fldiag.report.collect import collect
    from fldiag.results.files import write_table
    from fldiag.results.provenance import digest, provenance
    from fldiag.training import sweep as sweeps
    from fldiag.training.train import RUNS

    console, values = Console(json), dict(map(_values, over))
    fixed = {key: [value] for key, value in map(parse_override, set_ or [])}
    finished, total = itertools.count(1), math.prod(map(len, values.values()))
    with console.progress("sweep") as progress:

        def on_event(event: dict[str, Any]) -> None:
            if event["event"] == "end":
                progress(next(finished), total, Path(event["path"]).name)

        options |= {"out": out, "shard": shard, "on_event": on_event}
        runs = sweeps.sweep(config, fixed | values, **options)
    paths = [run.path for run in runs]
    if shard is not None:
        return console.done(*paths)
    frame = sweeps.table(runs, values)
    console.table(frame.to_dict("records"), {c: c for c in frame})
    names = [path.name for path in paths]
    path = (out or RUNS) / f"sweep-{digest(names)[:8]}"
    write_table(frame, path, {"source": config, "runs": names, **provenance()})
    show_report(console, collect(paths), path.with_name(f"{path.name}-report.html"))


def _values(text: str) -> tuple[str, list[Any]]:
    """``key=a,b,c`` -> the key and its values, each read as TOML or else as text."""
    from fldiag.config import parse_override

    key, _, listing = text.partition("=")
    return key.strip(), [parse_override(f"{key}={value}")[1] for value in listing.split(",")]


def _train(console: Console, config: Config, path: Path, **options: Any) -> Run:
    from fldiag.training import train as training

    with console.progress(config.method.name) as progress:
        try:
            on_event = training.rounds_on_bar(progress)
            return training.train(config, out=path, on_event=on_event, **options)
        except KeyboardInterrupt:
            what = f"stopped; everything up to the last checkpoint is kept in {path}"
            raise KeyboardInterrupt(what, GO_ON) from None


def _row(run: Run) -> dict[str, Any]:
    """The last round in a few numbers."""
    last = run.metrics[run.metrics["round"] == run.done]
    scores = last[last["slice"] == "test"].set_index("metric")["value"].astype(float)
    row = {"run": run.path.name, "method": run.config.method.name, "rounds": run.done}
    return {**row, "status": run.status, **scores}


def _show(console: Console, run: Run) -> None:
    """The last round; exit code 3 for a run that failed."""
    from fldiag.diagnostics.personalise import summary

    has_diverged = run.status == "diverged"
    console.table([_row(run)], COLUMNS)
    console.show(summary(run.metrics, {}))
    if has_diverged:
        console.note("the weights are no longer finite; a smaller train.lr usually helps")
    console.done(run.checkpoint(run.rounds[-1]).path if run.rounds else run.path)
    if has_diverged:
        sys.exit(DIVERGED)


def _describe(console: Console, config: Config, path: Path, device: str, download: bool) -> None:
    """The config and the model's size. Writes nothing, and imports no user code."""
    from fldiag import user_code

    tree = config.model_dump(mode="json")
    console.result["config"] = tree
    console.say(dumps(tree, indent=1))
    if not user_code.names(tree):
        from fldiag.training.setup import Setup

        setup = Setup(config, device=device, download=download)
        parameters, size = setup.network.size, setup.model_bytes
        console.result |= {"parameters": parameters, "bytes": size}
        console.say(f"{parameters:,} parameters, {size / 1e6:,.1f} MB a model")
    console.done(path)
