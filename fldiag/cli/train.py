"""The verbs that train: a demonstration, one run, or every combination of some values."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fldiag.cli.app import verb
from fldiag.cli.console import Console
from fldiag.cli.options import Device, Out, Seed, Set

if TYPE_CHECKING:
    from fldiag.config import Config
    from fldiag.registry import Progress

#: Exit code of a training that diverged.
DIVERGED = 3


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
    from fldiag.diagnosis.diagnose import FALLBACK, diagnose
    from fldiag.execution import threads
    from fldiag.training.sweep import sweep, table

    folder = out or FALLBACK / "demo"
    values: dict[str, list[Any]] = {
        "method.name": ["fedavg", "fedsol"],
        "seed": [seed],
        "checkpoint.every": [10],
    }
    # on one thread: as fast as on two on such small networks, which wait for each other
    with threads(1):
        with console.progress("demo") as progress:
            show = _runs_on_bar(progress)
            runs = sweep("digits", values, out=folder, device=device, on_event=show)
        checkpoints, options = [run.checkpoint() for run in runs], {"seed": seed, "device": device}
        answer = diagnose("landscape", checkpoints, options, out=folder, **console.listeners)
    console.table(table(runs, values).to_dict("records"))
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
        typer.Option("--dry-run", help="Only show the config and the model's size."),
    ] = False,
    seed: Seed = None,
    **options: Any,
) -> None:
    """Train a federated model and write a checkpoint every round; can be stopped and resumed at any moment.

    Example: fldiag train digits --set method.name=fedsol --set method.rho=2.0
    """
    from fldiag import config as configs
    from fldiag.runs.run import Run
    from fldiag.training import train as training
    from fldiag.training.sweep import table

    overrides = dict(map(configs.parse_override, set_ or []))
    overrides |= {} if seed is None else {"seed": seed}
    is_run = os.path.isdir(source)
    config = (
        configs.of_run(Run.open(source), overrides) if is_run else configs.load(source, overrides)
    )
    if is_run or dry_run:
        console.result["config"] = config.model_dump(mode="json")
        console.say(dumps(console.result["config"], indent=1))
    path = out or training.run_path(config)
    if dry_run:
        return _size(console, config, path, options["device"], options["download"])
    with console.progress(config.method.name) as progress:
        show = training.rounds_on_bar(progress)
        run = training.train(config, out=path, resume=resume, on_event=show, **options)
    (scores,) = table([run], {}).drop(columns=["runs", "diverged"]).to_dict("records")
    console.table([{"run": run.name, "rounds": run.done, "status": run.status, **scores}])
    has_diverged = run.status == "diverged"
    if has_diverged:
        console.note("the weights are no longer finite; a smaller train.lr usually helps")
    console.done(run.path / run.round_file(run.rounds[-1]) if run.rounds else run.path)
    if has_diverged:
        sys.exit(DIVERGED)


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
    from fldiag.training.train import RUNS

    values = {key: [value] for key, value in map(parse_override, set_ or [])}
    keys = [text.partition("=") for text in over]
    values |= {
        key.strip(): [parse_override(f"{key}={value}")[1] for value in listing.split(",")]
        for key, _, listing in keys
    }
    with console.progress("sweep") as progress:
        show = _runs_on_bar(progress)
        runs = sweeps.sweep(config, values, out=out, on_event=show, **options)
    if options["shard"]:
        return console.done(*(run.path for run in runs))
    frame, names = sweeps.table(runs, values), [run.name for run in runs]
    console.table(frame.to_dict("records"))
    path = (out or RUNS) / f"sweep-{digest(names)[:8]}"
    about = {"source": config, "runs": names, **provenance()}
    console.done(*write_table(frame, path, about))


def _runs_on_bar(progress: Progress) -> Callable[[dict[str, Any]], None]:
    return lambda event: progress(event["done"], event["total"], Path(event["path"]).name)


def _size(console: Console, config: Config, path: Path, device: str, download: bool) -> None:
    """The model's size. Writes nothing, and imports no user code."""
    from fldiag import user_code

    if not user_code.names(config.model_dump()):
        from fldiag.training.setup import Setup

        setup = Setup(config, device=device, download=download)
        parameters, size = setup.network.size, setup.model_bytes
        console.result |= {"parameters": parameters, "bytes": size}
        console.say(f"{parameters:,} parameters, {size / 1e6:,.1f} MB a model")
    console.done(path)
