"""The verbs that begin with a config: train one run or many, see what that takes, and how data are dealt to clients."""

from __future__ import annotations

import os
import sys
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fldiag.cli.app import app
from fldiag.cli.compare import show_report
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
    Shard,
    TrustFile,
    Width,
)
from fldiag.device import device_of
from fldiag.diagnosis.places import FALLBACK, prepare
from fldiag.errors import FldiagError
from fldiag.plotting.sheet import use_sheet
from fldiag.results.files import beside, csv_text, write_table, write_text
from fldiag.results.machine import emulated

if TYPE_CHECKING:
    from fldiag.config import Config
    from fldiag.runs.run import Run

#: Exit code of a training that diverged.
DIVERGED = 3

Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Override a setting: section.key=value; may be given several times."
    ),
]


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
    with errors(debug), use_sheet(width, format):
        import pandas as pd

        from fldiag.diagnosis.answer import Answer, answer, pictures
        from fldiag.execution import threads
        from fldiag.report.page import report
        from fldiag.results.summary import Small

        console, device, seed = Console(json), device_of(device), seed or 0
        folder = prepare(out or FALLBACK / "demo")
        with threads(1):  # as fast as two on such small networks, which wait for each other
            runs = [_train_demo(console, folder, m, seed, device) for m in ("fedavg", "fedsol")]
            options = {"seed": seed, "device": device}
            seen: dict[str, Any] = {"bar": console.progress, "tell": console.note}
            replies = []
            for run in runs:
                answer("forgetting", [run], {"device": device}, **seen)
                replies += answer("landscape", [run.checkpoint()], options, **seen)
        table = pd.concat([reply.table for reply in replies], ignore_index=True)
        landscapes = Answer(replies[0].entry, table, replies[0].options)
        files = pictures(landscapes.entry, table, folder / "landscape")
        sharpness = next(item for item in landscapes.summary() if isinstance(item, Small))
        rows = []
        for run, row in zip(runs, sharpness.rows, strict=True):
            tests = run.metrics[run.metrics["slice"] == "test"]
            scores = tests.set_index(["round", "metric"])["value"]
            accuracy, loss = (float(scores[run.done, metric]) for metric in ("accuracy", "loss"))
            method = run.config.method.name
            rows.append({**row, "method": method, "accuracy": accuracy, "test_loss": loss})
        console.say(
            f"digits, 20 clients (LDA 0.1), 10 sampled a round, {runs[0].done} rounds, seed {seed}:"
        )
        columns = {
            "method": "method",
            "accuracy": "test accuracy",
            "test_loss": "test loss",
            "loss": "train loss",
            "lambda_1": "λ1",
            "residual": "± (residual)",
            "ratio": "λ1/λ5",
        }
        console.table(rows, columns)
        paths = [run.path for run in runs]
        page = report(paths, folder / "report.html", "FedAvg and FedSOL on the digits")
        console.say(f"interactive: {next(file for file in files if file.suffix == '.html')}")
        console.say(f"everything on one page: {page}")
        console.done(page, *files)


def _train_demo(console: Console, folder: Path, method: str, seed: int, device: str) -> Run:
    from fldiag import config as configs
    from fldiag.training import rounds

    keys = {"method.name": method, "seed": seed}
    checkpoints = {"checkpoint.every": 10, "checkpoint.clients": "sampled"}
    config = configs.load("digits", {**keys, **checkpoints})
    path = folder / f"{method}-s{seed}-{config.hash[:8]}"
    with console.progress(f"training {method}") as progress:
        show = rounds.rounds_on_bar(progress)
        return rounds.train(config, out=path, on_event=show, resume=True, device=device)


@app.command(rich_help_panel="Start")
def train(
    config: Annotated[
        str | None, typer.Argument(help="A preset (fldiag list presets) or a TOML file.")
    ] = None,
    like: Annotated[
        Path | None,
        typer.Option(
            "--like",
            metavar="RUN",
            help="Instead of a preset: data, partition, model and settings of this run, which fldiag trained or recorded.",
        ),
    ] = None,
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
    over: Annotated[
        list[str] | None,
        typer.Option("--sweep", help="key=a,b,c: train every value, as fldiag sweep --over does."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Only show the config, the model's size and the disk space."
        ),
    ] = False,
    executor: Executor = "serial",
    shard: Shard = None,
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
        from fldiag.runs.prune import remove
        from fldiag.training import rounds
        from fldiag.user_code import importable

        console, device = Console(json), device_of(device)
        overrides = [*(set_ or []), *([f"seed={seed}"] if seed is not None else [])]
        if over and overwrite:
            raise FldiagError(
                "--overwrite works for a single run only", "give a sweep another --out", usage=True
            )
        if shard and not over:
            raise FldiagError(
                "--shard selects a part of several runs", "give --sweep key=a,b,c too", usage=True
            )
        source = _source(console, config, like, overrides, allow_code or [])
        if over:
            # what is like a run holds the overrides already
            fixed = _read_fixed(overrides) if like is None else {}
            return _sweep(
                console,
                source,
                _read_values(over),
                fixed,
                out,
                dry_run,
                executor,
                shard,
                download,
                device,
            )
        resolved = configs.load(source, overrides) if isinstance(source, str) else source
        path = out or rounds.run_path(resolved)
        if overwrite and resume:
            raise FldiagError(
                "--overwrite starts again and --resume continues", "give one of them", usage=True
            )
        if dry_run:
            return _describe_run(console, resolved, path, download, device)
        if warning := emulated(resolved.train.precision, device):
            console.note(warning)
        if overwrite and os.path.isfile(path / "run.json"):
            data_file = resolved.data.name.partition(":")[2]
            sources = (resolved.partition.path, resolved.train.initial, data_file)
            if any(Path(n).resolve().is_relative_to(path.resolve()) for n in sources if n):
                raise FldiagError(
                    f"--overwrite would delete {path}, of which this training needs files",
                    "choose another folder with --out",
                    usage=True,
                )
            remove(path)
        with importable():
            run = _train_run(console, resolved, path, executor, resume, device, download)
        _show_run(console, run)


def _source(
    console: Console,
    config: str | None,
    like: Path | None,
    overrides: list[str],
    allow_code: list[str],
) -> str | Config:
    """The preset or TOML file, or the config that is like a run; it says what was taken from the run."""
    from fldiag import config as configs
    from fldiag.runs.run import Run

    if config is not None and like is None:
        return config
    if config is not None or like is None:
        raise FldiagError(
            "a config and --like were given" if config else "what to train is not clear",
            "give a preset, a TOML file, or --like RUN: one of them",
            usage=True,
        )
    run = Run.open(like).allow(allow_code)
    resolved, remarks = configs.like(run, dict(map(configs.parse_override, overrides)))
    for text in remarks:
        console.note(text)
    return resolved


def _train_run(
    console: Console,
    config: Config,
    path: Path,
    executor: str,
    resume: bool,
    device: str,
    download: bool,
) -> Run:
    from fldiag.training import rounds

    with console.progress(config.method.name) as progress:
        show = rounds.rounds_on_bar(progress)

        def on_event(event: dict[str, Any]) -> None:
            if event["event"] == "start":
                if event["round"]:
                    console.note(f"resuming after round {event['round']} of {event['rounds']}")
                for text in event["notes"]:
                    console.note(text)
            show(event)

        try:
            return rounds.train(
                config,
                out=path,
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


def _show_run(console: Console, run: Run) -> None:
    """The last round in a few numbers. A run that failed says so in red and leaves with exit code 3."""
    from fldiag.diagnostics.personalise import summary
    from fldiag.results.summary import Small
    from fldiag.training.rounds import failure

    frame = run.metrics
    last = frame[(frame["slice"] == "test") & (frame["round"] == frame["round"].max())]
    problem = failure(run)
    row = {
        "run": run.path.name,
        "method": run.config.method.name,
        "rounds": int(frame["round"].max()),
        "status": "diverged" if problem else run.status,
        **{m: float(v) for m, v in zip(last["metric"], last["value"], strict=True)},
    }
    names = ("run", "method", "rounds", "status", "accuracy", "loss")
    console.table([row], {name: name for name in names})
    for item in summary(frame, {}):
        if isinstance(item, Small):
            console.table(list(item.rows), dict(item.columns))
    if problem:
        console.alarm(f"{problem}; a smaller train.lr usually helps")
    checkpoints = [name for name in run.index["files"] if name.startswith("rounds/")]
    console.done(run.path / checkpoints[-1] if checkpoints else run.path)
    if problem:
        sys.exit(DIVERGED)


def _describe_run(
    console: Console, config: Config, path: Path, download: bool, device: str
) -> None:
    """The config, the model's size and the disk that a training would take. Writes nothing."""
    from fldiag.training.setup import Setup
    from fldiag.training.storing import disk_bytes
    from fldiag.user_code import importable

    with importable():
        setup = Setup(config, device=device, download=download)
    size, tree = disk_bytes(setup), config.model_dump(mode="json")
    console.result |= {"config": tree, "parameters": setup.network.size, "bytes": size}
    console.say(dumps(tree, indent=1))
    console.say(f"{setup.network.size:,} parameters, about {size / 1e6:,.0f} MB of disk")
    console.done(path)


@app.command(rich_help_panel="Start")
def sweep(
    config: Annotated[str, typer.Argument(help="A preset (fldiag list presets) or a TOML file.")],
    over: Annotated[
        list[str],
        typer.Option(
            "--over",
            help="key=a,b,c: values to train. May be given several times; every "
            "combination is trained.",
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
        _sweep(
            Console(json),
            config,
            _read_values(over),
            _read_fixed(set_ or []),
            out,
            dry_run,
            executor,
            shard,
            download,
            device_of(device),
        )


def _sweep(
    console: Console,
    source: str | Config,
    values: dict[str, list[Any]],
    fixed: dict[str, Any],
    out: Path | None,
    dry_run: bool,
    executor: str,
    shard: str | None,
    download: bool,
    device: str,
) -> None:
    """``values``: of the keys that differ; ``fixed``: keys of all runs."""
    from fldiag.results.provenance import digest, provenance
    from fldiag.training import sweep as sweeps
    from fldiag.user_code import importable

    if repeated := sorted(set(values) & set(fixed)):
        raise FldiagError(f"{repeated[0]} is given in two ways", "give it once", usage=True)
    plan = sweeps.configs(source, values, fixed)
    count = len(plan)
    from fldiag.execution import shard_of

    plan = shard_of(plan, shard)
    console.say(f"{count} runs")
    if dry_run:
        rows = [{"run": sweeps.rounds.run_path(config).name} for config in plan]
        console.table(rows, {"run": "run"})
        return console.done()
    try:
        with console.progress("sweep") as progress, importable():
            finished = 0
            progress(0, len(plan), source if isinstance(source, str) else source.name)

            def on_event(event: dict[str, Any]) -> None:
                nonlocal finished
                if event["event"] == "end":
                    finished += 1
                    progress(finished, len(plan), Path(event["path"]).name)

            runs = sweeps.train_configs(
                plan,
                out=out,
                executor=executor,
                device=device,
                download=download,
                on_event=on_event,
            )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            "stopped; everything up to the last checkpoint is kept",
            "run the same command again to continue",
        ) from None
    if shard is not None:
        console.say(
            f"part {shard}: {len(runs)} of {count} runs; when all parts are done, the same command without --shard "
            "makes the table"
        )
        return console.done(*(run.path for run in runs))
    frame = sweeps.table(runs, values)
    console.table(frame.to_dict("records"), {c: c.replace("_", " ") for c in frame})
    about = {
        "source": source if isinstance(source, str) else source.model_dump(mode="json"),
        "over": values,
        "fixed": fixed,
        "runs": [run.path.name for run in runs],
        **provenance(),
    }
    path = (out or sweeps.rounds.RUNS) / f"sweep-{digest(about['runs'])[:8]}"
    write_table(frame, path, about)
    if "diverged" in frame:
        console.alarm("some runs diverged; the numbers are those of the others")
    show_report(console, [run.path for run in runs], path.with_name(f"{path.name}-report.html"))


def _read_fixed(texts: list[str]) -> dict[str, Any]:
    from fldiag.config import parse_override

    return dict(parse_override(text) for text in texts)


def _read_values(texts: list[str]) -> dict[str, list[Any]]:
    """``key=a,b,c`` -> the key's values, each read as TOML or else as text."""
    from fldiag.config import parse_override

    values: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, listing = text.partition("=")
        key = key.strip()
        if not equals or not key or not listing.strip():
            raise FldiagError(
                f"{text!r} is not of the form key=value,value",
                "write for example --over seed=0,1,2",
                usage=True,
            )
        if key in values:
            raise FldiagError(
                f"{key} is given twice", "give all its values at once: key=a,b,c", usage=True
            )
        values[key] = [parse_override(f"{key}={value}")[1] for value in listing.split(",")]
    return values


@app.command(rich_help_panel="Clients")
def partition(
    config: Annotated[
        str,
        typer.Argument(help="A preset, a TOML file or a run folder; with --data a partition file."),
    ],
    set_: Set = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Check a partition file (npz or JSON) against these data: NAME, npz:PATH, csv:PATH or "
            "pkg.mod:loader. Exit code 3 if training would refuse it."
        ),
    ] = None,
    allow_code: AllowCode = None,
    trust_file: TrustFile = False,
    download: Download = False,
    out: Out = None,
    width: Width = None,
    format: Format = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Draw the label distribution per client, and measure how far clients are from alike.

    Example: fldiag partition digits --set partition.alpha=0.5
    """
    with errors(debug), use_sheet(width, format):
        from fldiag.data.partition import sizes as sizes_of
        from fldiag.diagnosis import heterogeneity
        from fldiag.diagnosis.dealt_partition import check_file, partition_of
        from fldiag.plotting import partition as picture
        from fldiag.plotting import style
        from fldiag.results.provenance import provenance

        console = Console(json)
        if data is None:
            division = partition_of(
                config, set_ or [], download=download, allow_code=allow_code or []
            )
        elif set_:
            raise FldiagError(
                "--set changes a preset or TOML file, and --data is for a partition file",
                "give one of them: --data with the file alone, or --set partition.kind=file "
                "--set partition.path=FILE",
                usage=True,
            )
        else:
            division = check_file(config, data, download=download)
        counts = division.counts
        path = prepare(out or division.folder) / division.name
        measures = heterogeneity.measure(counts, division.parts)
        about = {**provenance(), "partition": division.title}
        of_measures = path.with_name(f"{path.name}-heterogeneity")
        files = write_table(measures, of_measures, about)
        table = write_text(beside(path, ".csv"), csv_text(counts))
        pictures = style.write(picture.draw_counts(counts, title=division.title), path)
        sizes = sizes_of(division.parts)
        row = {
            "clients": len(sizes),
            "smallest": int(sizes.min()),
            "largest": int(sizes.max()),
            "classes": float(counts[counts["count"] > 0].groupby("client").size().mean()),
        }
        headings = {name: name for name in row} | {"classes": "classes a client (mean)"}
        console.table([row | heterogeneity.in_short(measures)], headings | heterogeneity.HEADINGS)
        for text in (*division.remarks, *heterogeneity.remarks(measures)):
            console.note(text)
        for text in division.faults[:8]:
            console.alarm(f"fault: {text}")
        if len(division.faults) > 8:
            console.alarm(f"and {len(division.faults) - 8} more faults")
        console.result["faults"] = list(division.faults)
        console.done(table, *files, *pictures)
        if division.faults:
            sys.exit(3)
