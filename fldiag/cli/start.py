"""The verbs to start with: they train, and say what there is."""

from __future__ import annotations

import os
import sys
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter

from fldiag import registry
from fldiag.cli.app import Console, Device, Out, Seed, Set, ask, verb
from fldiag.errors import unknown


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
    from fldiag.device import threads
    from fldiag.diagnosis.diagnose import FALLBACK
    from fldiag.training.sweep import sweep, table

    folder = out or FALLBACK / "demo"
    values: Any = {"method.name": ["fedavg", "fedsol"], "seed": [seed], "checkpoint.every": [10]}
    # on one thread: as fast as on two on such small networks, which wait for each other
    with threads(1):
        with console.progress("demo") as progress:
            show = _runs_on_bar(progress)
            runs = sweep("digits", values, out=folder, device=device, on_event=show)
        console.table(table(runs, values).to_dict("records"))
        checkpoints, options = [run.checkpoint() for run in runs], {"seed": seed, "device": device}
        ask(console, "landscape", checkpoints, options, out=folder)


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
    from fldiag.training.setup import Setup
    from fldiag.training.sweep import table

    overrides = dict(map(configs.parse_override, set_ or []))
    if seed is not None:
        overrides["seed"] = seed
    is_run = os.path.isdir(source)
    config = (
        configs.of_run(Run.open(source), overrides)
        if is_run
        else configs.Config.load(source, **overrides)
    )
    if is_run or dry_run:
        console.result["config"] = config.model_dump(mode="json")
        console.say(dumps(console.result["config"], indent=1))
    path = out or training.run_path(config)
    if dry_run:
        del options["executor"]
        if not registry.code_names(config.model_dump()):  # which is not imported to show a config
            setup = Setup(config, **options)
            parameters, size = setup.network.size, setup.model_bytes
            console.result |= {"parameters": parameters, "bytes": size}
            console.say(f"{parameters:,} parameters, {size / 1e6:,.1f} MB a model")
        return console.done(path)
    with console.progress(config.method.name) as progress:
        show = training.rounds_on_bar(progress)
        run = training.train(config, out=path, resume=resume, on_event=show, **options)
    (scores,) = table([run], {}).drop(columns=["runs", "diverged"]).to_dict("records")
    console.table([{"run": run.name, "rounds": run.done, "status": run.status, **scores}])
    console.done(run.path / run.round_file(run.rounds[-1]) if run.rounds else run.path)
    if run.status == "diverged":
        console.note("the weights are no longer finite; a smaller train.lr usually helps")
        sys.exit(3)


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
    from fldiag.results.files import digest, write_table
    from fldiag.training import sweep as sweeps
    from fldiag.training.train import RUNS

    values = {key: [value] for key, value in map(parse_override, set_ or [])}
    for text in over:
        key, _, listing = text.partition("=")
        values[key.strip()] = [parse_override(f"{key}={v}")[1] for v in listing.split(",")]
    with console.progress("sweep") as progress:
        show = _runs_on_bar(progress)
        runs = sweeps.sweep(config, values, out=out, on_event=show, **options)
    if options["shard"]:
        return console.done(*(run.path for run in runs))
    frame, names = sweeps.table(runs, values), [run.name for run in runs]
    console.table(frame.to_dict("records"))
    path = (out or RUNS) / f"sweep-{digest(names)[:8]}"
    console.done(*write_table(frame, path, {"source": config, "runs": names}))


def _runs_on_bar(progress: registry.Progress) -> Any:
    return lambda event: progress(event["done"], event["total"], Path(event["path"]).name)


@verb("Start", name="list")
def list_(
    console: Console,
    what: Annotated[
        str | None,
        typer.Argument(
            help="methods, models, datasets, diagnostics, presets or figures. Default: all of them."
        ),
    ] = None,
) -> None:
    """List methods, models, data sets, diagnostics, presets or figures, or all of them.

    Example: fldiag list methods
    """
    for kind in [what] if what else registry.kinds():
        console.table([{"name": n, kind: line} for n, line in registry.catalogue(kind).items()])
    console.done()


@verb("Start")
def explain(
    console: Console,
    name: Annotated[
        str,
        typer.Argument(
            help="A method, model, data set or diagnostic, settings, or a section (partition) or key (clients.sampling) of these."
        ),
    ],
) -> None:
    """Describe a method, model, data set or diagnostic: equations, options with defaults, source; or the settings of a run.

    Example: fldiag explain fedsol
    """
    from fldiag.config import settings

    registry.allow(name)
    fields = settings()
    kinds = [getattr(registry, kind[:-1]) for kind in registry.KINDS]
    entries = (kind.get(name) for kind in kinds if name in kind or registry.is_code(name))
    if entry := next(entries, None):
        meta = {k: v for k, v in entry.meta.items() if v and not callable(v)}
        console.result |= {"kind": entry.kind, "name": entry.name, "doc": entry.doc, **meta}
        console.say(f"{entry.kind} {entry.name}\n\n{entry.doc}\n")
        for key, value in meta.items():
            console.say(f"{key}: {value}")
        fields = entry.options.model_fields
    elif name != "settings":
        fields = {k: f for k, f in fields.items() if f"{k}.".startswith(f"{name}.")}
        if not fields:
            raise unknown("name", name, [*settings(), *(n for kind in kinds for n in kind.names())])
    console.table([about(key, field) for key, field in fields.items()])
    console.done()


def about(key: str, field: Any) -> dict[str, str]:
    """An option in words: its default, which values it takes, and what it is."""
    schema = TypeAdapter(Annotated[field.annotation, field]).json_schema()
    return {
        "option": key,
        "default": "(required)" if field.is_required() else str(field.default),
        "values": words(schema),
        "what it is": field.description or "",
    }


TYPES = {"integer": "whole number", "string": "text", "null": "none"}
BOUNDS = {
    "minimum": "from",
    "exclusiveMinimum": "above",
    "maximum": "to",
    "exclusiveMaximum": "below",
}


def words(schema: dict[str, Any]) -> str:
    """What a JSON schema allows; nothing where only the option's own check knows.

    >>> words({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]})
    'whole number from 1 or none'
    """
    if "anyOf" in schema:
        return " or ".join(map(words, schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    if "items" in schema:
        return f"several: {words(schema['items'])}"
    kind = schema.get("type", "")
    bounds = [f"{text} {schema[key]:g}" for key, text in BOUNDS.items() if key in schema]
    return " ".join([TYPES.get(kind, kind), *bounds])
