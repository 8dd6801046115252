"""The verbs that train: a demonstration, one run, or every combination of some values."""

from __future__ import annotations

import itertools
import os
import sys
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fldiag.cli.app import app
from fldiag.cli.console import Console, errors
from fldiag.cli.options import (
    AllowCode,
    Debug,
    Device,
    Download,
    Executor,
    Format,
    Json,
    Out,
    Seed,
    Set,
    Shard,
    TrustFile,
    Width,
)
from fldiag.errors import FldiagError

if TYPE_CHECKING:
    from fldiag.config import Config
    from fldiag.runs.run import Run

#: Exit code of a training that diverged.
DIVERGED = 3
GO_ON = "to continue, run the same command with --resume"


@app.command(rich_help_panel="Start")
def demo(
    out: Out = None,
    width: Width = None,
    format: Format = None,
    json: Json = False,
    device: Device = "cpu",
    seed: Seed = None,
    debug: Debug = False,
) -> None:
    """Train FedAvg and FedSOL on the digits data and compare their loss landscapes; under a minute.

    Example: fldiag demo
    """
    with errors(debug):
        import pandas as pd

        from fldiag.config import Config
        from fldiag.device import device_of
        from fldiag.diagnosis.diagnose import FALLBACK, Answer, diagnose, pictures, prepare
        from fldiag.execution import threads
        from fldiag.plotting.sheet import use_sheet
        from fldiag.report.page import report

        console, device, runs, replies = Console(json), device_of(device), [], []
        folder = prepare(out or FALLBACK / "demo")
        options = {"seed": seed or 0, "device": device}
        seen: dict[str, Any] = {"bar": console.progress, "tell": console.note}
        # on one thread: as fast as on two on such small networks, which wait for each other
        with threads(1), use_sheet(width, format):
            for method in ("fedavg", "fedsol"):
                config = Config.load(
                    "digits",
                    method__name=method,
                    seed=seed or 0,
                    checkpoint__every=10,
                    checkpoint__clients="sampled",
                )
                path = folder / f"{method}-s{config.seed}-{config.hash[:8]}"
                runs.append(_train(console, config, path, resume=True, device=device))
            for run in runs:
                diagnose("forgetting", [run], {"device": device}, **seen)
                replies.append(diagnose("landscape", [run.checkpoint()], options, **seen))
            table = pd.concat([reply.table for reply in replies], ignore_index=True)
            landscapes = Answer(replies[0].entry, table, replies[0].options)
            files = pictures(landscapes.entry, table, folder / "landscape")
            paths = [run.path for run in runs]
            page = report(paths, folder / "report.html", "FedAvg and FedSOL on the digits")
        console.say(
            f"digits, 20 clients (LDA 0.1), 10 sampled a round, {runs[0].done} rounds, seed {seed or 0}:"
        )
        console.table([_row(run) for run in runs], COLUMNS)
        console.show(landscapes.summary())
        console.say(f"interactive: {next(file for file in files if file.suffix == '.html')}")
        console.say(f"everything on one page: {page}")
        console.done(page, *files)


@app.command(rich_help_panel="Start")
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
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Delete an existing run in this folder, with its results, and train again.",
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Only show the config, the model's size and the disk space."
        ),
    ] = False,
    executor: Executor = "serial",
    allow_code: AllowCode = None,
    trust_file: TrustFile = False,
    download: Download = False,
    json: Json = False,
    device: Device = "auto",
    seed: Seed = None,
    debug: Debug = False,
) -> None:
    """Train a federated model and write a checkpoint every round; can be stopped and resumed at any moment.

    Example: fldiag train digits --set method.name=fedsol --set method.rho=2.0
    """
    with errors(debug):
        from fldiag import config as configs
        from fldiag.device import device_of
        from fldiag.results.machine import emulated
        from fldiag.runs.run import remove
        from fldiag.training.train import run_path

        console, device = Console(json), device_of(device)
        overrides = dict(map(configs.parse_override, set_ or []))
        overrides |= {} if seed is None else {"seed": seed}
        if os.path.isdir(source):
            config = configs.of_run(Path(source), overrides, allow_code or [])
            console.say(f"data, model and partition of {source}; besides --set, defaults:")
            console.say(dumps(config.model_dump(mode="json"), indent=1))
        else:
            config = configs.load(source, overrides)
        path = out or run_path(config)
        if overwrite and resume:
            raise FldiagError(
                "--overwrite starts again and --resume continues", "give one of them", usage=True
            )
        if dry_run:
            return _describe(console, config, path, device, download)
        if warning := emulated(config.train.precision, device):
            console.note(warning)
        if overwrite and os.path.isfile(path / "run.json"):
            if Path(source).resolve().is_relative_to(path.resolve()):
                raise FldiagError(f"--overwrite would delete {source}", usage=True)
            remove(path)
        run = _train(
            console,
            config,
            path,
            executor=executor,
            resume=resume,
            device=device,
            download=download,
        )
        _show(console, run)


@app.command(rich_help_panel="Start")
def sweep(
    config: Annotated[str, typer.Argument(help="A preset (fldiag list presets) or a TOML file.")],
    over: Annotated[
        list[str],
        typer.Option(
            "--over",
            help="key=a,b,c: values to train. May be given several times; every combination is trained.",
        ),
    ],
    set_: Set = None,
    out: Out = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list the runs that would be trained.")
    ] = False,
    executor: Executor = "serial",
    shard: Shard = None,
    trust_file: TrustFile = False,
    download: Download = False,
    json: Json = False,
    device: Device = "auto",
    debug: Debug = False,
) -> None:
    """Train every combination of the given values; write one table and one report. Finished runs are reused.

    Example: fldiag sweep digits --over method.name=fedavg,fedsol --over seed=0,1,2
    """
    with errors(debug):
        from fldiag.cli.compare import show_report
        from fldiag.config import parse_override
        from fldiag.device import device_of
        from fldiag.execution import shard_of
        from fldiag.report.collect import collect
        from fldiag.results.files import write_table
        from fldiag.results.provenance import digest, provenance
        from fldiag.training import sweep as sweeps
        from fldiag.training.train import RUNS, run_path

        console = Console(json)
        values, fixed = dict(map(_values, over)), dict(map(parse_override, set_ or []))
        if repeated := sorted(set(values) & set(fixed)):
            raise FldiagError(f"{repeated[0]} is given in two ways", "give it once", usage=True)
        plan = sweeps.configs(config, values, fixed)
        part = shard_of(plan, shard)
        console.say(f"{len(plan)} runs")
        if dry_run:
            console.table([{"run": run_path(one).name} for one in part], {"run": "run"})
            return console.done()
        with console.progress("sweep") as progress:
            progress(0, len(part), config)
            finished = itertools.count(1)

            def on_event(event: dict[str, Any]) -> None:
                if event["event"] == "end":
                    progress(next(finished), len(part), Path(event["path"]).name)

            runs = sweeps.train_configs(
                part,
                out=out,
                executor=executor,
                device=device_of(device),
                download=download,
                on_event=on_event,
            )
        if shard is not None:
            console.say("when all parts are done, the same command without --shard makes the table")
            return console.done(*(run.path for run in runs))
        frame = sweeps.table(runs, values)
        console.table(frame.to_dict("records"), {c: c.replace("_", " ") for c in frame})
        names = [run.path.name for run in runs]
        about = {"source": config, "over": values, "fixed": fixed, "runs": names, **provenance()}
        path = (out or RUNS) / f"sweep-{digest(names)[:8]}"
        write_table(frame, path, about)
        if "diverged" in frame:
            console.alarm("some runs diverged; the numbers are those of the others")
        members = collect([run.path for run in runs])
        show_report(console, members, path.with_name(f"{path.name}-report.html"))


def _values(text: str) -> tuple[str, list[Any]]:
    """``key=a,b,c`` -> the key and its values, each read as TOML or else as text."""
    from fldiag.config import parse_override

    key, equals, listing = text.partition("=")
    if not equals or not listing.strip():
        raise FldiagError(
            f"{text!r} is not of the form key=value,value",
            "write for example --over seed=0,1,2",
            usage=True,
        )
    return key.strip(), [parse_override(f"{key}={value}")[1] for value in listing.split(",")]


def _train(console: Console, config: Config, path: Path, **options: Any) -> Run:
    from fldiag.training import train as training

    with console.progress(config.method.name) as progress:
        show = training.rounds_on_bar(progress)

        def on_event(event: dict[str, Any]) -> None:
            if event["event"] == "start":
                if event["round"]:
                    console.note(f"resuming after round {event['round']} of {event['rounds']}")
                for text in event["notes"]:
                    console.note(text)
            show(event)

        try:
            return training.train(config, out=path, on_event=on_event, **options)
        except KeyboardInterrupt:
            what = f"stopped; everything up to the last checkpoint is kept in {path}"
            raise KeyboardInterrupt(what, GO_ON) from None


COLUMNS = {name: name for name in ("run", "method", "rounds", "status", "accuracy", "loss")}


def _row(run: Run) -> dict[str, Any]:
    """The last round in a few numbers."""
    frame = run.metrics
    last = frame[(frame["slice"] == "test") & (frame["round"] == frame["round"].max())]
    return {
        "run": run.path.name,
        "method": run.config.method.name,
        "rounds": int(frame["round"].max()),
        "status": run.status,
        **{m: float(v) for m, v in zip(last["metric"], last["value"], strict=True)},
    }


def _show(console: Console, run: Run) -> None:
    """The last round; a run that failed says so in red and leaves with exit code 3."""
    from fldiag.diagnostics.personalise import summary
    from fldiag.training.train import failure

    problem = failure(run)
    console.table([_row(run) | ({"status": "diverged"} if problem else {})], COLUMNS)
    console.show(summary(run.metrics, {}))
    if problem:
        console.alarm(f"{problem}; a smaller train.lr usually helps")
    rounds = run.rounds
    console.done(run.checkpoint(rounds[-1]).path if rounds else run.path)
    if problem:
        sys.exit(DIVERGED)


def _describe(console: Console, config: Config, path: Path, device: str, download: bool) -> None:
    """The config, the model's size and the disk that a training would take. Writes nothing, and imports no user code."""
    from fldiag import user_code

    tree = config.model_dump(mode="json")
    console.result["config"] = tree
    console.say(dumps(tree, indent=1))
    if not user_code.names(tree):
        from fldiag.training.setup import Setup
        from fldiag.training.train import disk_bytes

        setup = Setup(config, device=device, download=download)
        parameters, size = setup.network.size, disk_bytes(setup)
        console.result |= {"parameters": parameters, "bytes": size}
        console.say(f"{parameters:,} parameters, about {size / 1e6:,.0f} MB of disk")
    console.done(path)
