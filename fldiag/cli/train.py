"""The verbs that train: a demonstration, one run, or every combination of some values."""

from __future__ import annotations

import os
import sys
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fldiag.cli.app import verb
from fldiag.cli.console import Console
from fldiag.cli.options import Device, Out, Seed, Set

if TYPE_CHECKING:
    from fldiag.config import Config
    from fldiag.runs.run import Run

#: Exit code of a training that diverged.
DIVERGED = 3
COLUMNS = {name: name for name in ("run", "method", "rounds", "status", "accuracy", "loss")}


@verb("Start", "width", "format")
def demo(
    console: Console,
    out: Out = None,
    device: Device = "cpu",
    seed: Seed = 0,
) -> None:
    """Train FedAvg and FedSOL on the digits data and compare their loss landscapes; under a minute.

    Example: fldiag demo
    """
    from fldiag.config import Config
    from fldiag.diagnosis.diagnose import FALLBACK, diagnose
    from fldiag.execution import threads
    from fldiag.training.train import run_path

    runs = []
    folder = out or FALLBACK / "demo"
    settings = {"seed": seed, "checkpoint__every": 10, "checkpoint__clients": "sampled"}
    # on one thread: as fast as on two on such small networks, which wait for each other
    with threads(1):
        for method in ("fedavg", "fedsol"):
            config = Config.load("digits", method__name=method, **settings)
            path = folder / run_path(config).name
            runs.append(_train(console, config, path, resume=True, device=device))
        checkpoints, options = [run.checkpoint() for run in runs], {"seed": seed, "device": device}
        shown: dict[str, Any] = {"bar": console.progress, "tell": console.note}
        answer = diagnose("landscape", checkpoints, options, out=folder, **shown)
    console.table([_row(run) for run in runs], COLUMNS)
    console.show(answer.summary())
    console.done(*answer.files)


@verb("Start", "allow_code", "executor", "download", "device")
def train(
    console: Console,
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
        typer.Option(
            "--dry-run", help="Only show the config, the model's size and the disk space."
        ),
    ] = False,
    seed: Seed = None,
    **options: Any,
) -> None:
    """Train a federated model and write a checkpoint every round; can be stopped and resumed at any moment.

    Example: fldiag train digits --set method.name=fedsol --set method.rho=2.0
    """
    from fldiag import config as configs
    from fldiag.training.train import run_path

    allow_code = options.pop("allow_code")
    overrides = dict(map(configs.parse_override, set_ or []))
    overrides |= {} if seed is None else {"seed": seed}
    if os.path.isdir(source):
        config = configs.of_run(Path(source), overrides, allow_code)
        console.say(f"data, model and partition of {source}; besides --set, defaults:")
        console.say(dumps(config.model_dump(mode="json"), indent=1))
    else:
        config = configs.load(source, overrides)
    path = out or run_path(config)
    if dry_run:
        _describe(console, config, path, options["device"], options["download"])
    else:
        _show(console, _train(console, config, path, resume=resume, **options))


@verb("Start", "executor", "download", "device", "shard")
def sweep(
    console: Console,
    config: Annotated[str, typer.Argument(help="A preset (fldiag list presets) or a TOML file.")],
    over: Annotated[
        list[str],
        typer.Option(
            help="key=a,b,c: values to train. May be given several times; every combination is trained."
        ),
    ],
    set_: Set = None,
    out: Out = None,
    **options: Any,
) -> None:
    """Train every combination of the given values, and write one table. Finished runs are reused.

    Example: fldiag sweep digits --over method.name=fedavg,fedsol --over seed=0,1,2
    """
    from fldiag.config import parse_override
    from fldiag.results.files import write_table
    from fldiag.results.provenance import digest, provenance
    from fldiag.training import sweep as sweeps
    from fldiag.training.train import RUNS, rounds_on_bar

    values = dict(map(_values, over))
    fixed = {key: [value] for key, value in map(parse_override, set_ or [])}
    with console.progress("sweep") as progress:
        options |= {"out": out, "on_event": rounds_on_bar(progress)}
        runs = sweeps.sweep(config, fixed | values, **options)
    if options["shard"]:
        return console.done(*(run.path for run in runs))
    frame, names = sweeps.table(runs, values), [run.name for run in runs]
    console.table(frame.to_dict("records"), {c: c for c in frame})
    path = (out or RUNS) / f"sweep-{digest(names)[:8]}"
    about = {"source": config, "runs": names, **provenance()}
    console.done(*write_table(frame, path, about))


def _values(text: str) -> tuple[str, list[Any]]:
    """``key=a,b,c`` -> the key and its values, each read as TOML or else as text."""
    from fldiag.config import parse_override

    key, _, listing = text.partition("=")
    return key.strip(), [parse_override(f"{key}={value}")[1] for value in listing.split(",")]


def _train(console: Console, config: Config, path: Path, **options: Any) -> Run:
    from fldiag.training.train import rounds_on_bar, train

    with console.progress(config.method.name) as progress:
        show = rounds_on_bar(progress)

        def on_event(event: dict[str, Any]) -> None:
            for text in event.get("notes", ()):
                console.note(text)
            show(event)

        return train(config, out=path, on_event=on_event, **options)


def _row(run: Run) -> dict[str, Any]:
    """The last round in a few numbers."""
    last = run.metrics[run.metrics["round"] == run.done]
    scores = last[last["slice"] == "test"].set_index("metric")["value"].astype(float)
    row = {"run": run.path.name, "method": run.config.method.name, "rounds": run.done}
    return {**row, "status": run.status, **scores}


def _show(console: Console, run: Run) -> None:
    """The last round; exit code 3 for a run that failed."""
    from fldiag.training.train import failure

    problem = failure(run)
    console.table([_row(run) | ({"status": "diverged"} if problem else {})], COLUMNS)
    if problem:
        console.note(f"{problem}; a smaller train.lr usually helps")
    console.done(run.path / run.round_file(run.rounds[-1]) if run.rounds else run.path)
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
