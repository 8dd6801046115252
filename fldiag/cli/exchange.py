"""Verbs that bring results in from other programs and out to them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fldiag.cli.app import app
from fldiag.cli.options import Data, Debug, Download, Json, Out, Root
from fldiag.console import Console, errors


@app.command()
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN", help="A .pt or .safetensors file, or a folder of per-client files."
        ),
    ],
    target: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", help="The file in the other format, or the run folder to make."
        ),
    ],
    pattern: Annotated[
        str | None,
        typer.Option(
            help="Paths of the clients' files, such as "
            "'round_{round}/client_{client}.pt' (* stands for any text; not "
            "needed for PFLlib)."
        ),
    ] = None,
    global_pattern: Annotated[
        str | None,
        typer.Option(help="Paths of the global models, such as 'round_{round}/global.pt'."),
    ] = None,
    global_is: Annotated[
        str,
        typer.Option(
            help="What a round's global file holds: the aggregated model (after the "
            "round) or the received one (before it)."
        ),
    ] = "aggregated",
    initial: Annotated[
        Path | None, typer.Option(help="File of the model that the first round's clients received.")
    ] = None,
    partition: Annotated[
        Path | None,
        typer.Option(help="Which examples belong to which client: npz or JSON, client -> indices."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model of the files: NAME or pkg.mod:factory.")
    ] = None,
    data: Data = None,
    method: Annotated[str, typer.Option(help="Name of the method in tables.")] = "foreign",
    seed: Annotated[
        int, typer.Option(help="Seed that the training used; only shown in tables.")
    ] = 0,
    evaluate: Annotated[
        bool, typer.Option(help="Test the global model of every round if data are given.")
    ] = True,
    key: Annotated[
        str | None,
        typer.Option(
            help="Set of weights to read of files that hold several, such as model_ema "
            "(default: the plain one)."
        ),
    ] = None,
    root: Root = None,
    download: Download = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Convert .pt to .safetensors or back (with the manifest), or turn a folder of client checkpoints into a run.

    Example: fldiag convert received/ checkpoints/theirs --pattern 'round_{round}/client_{client}.pt' --model small_cnn
    --data digits --partition partition.json
    """
    with errors(debug):
        from fldiag.verbs import convert as verb

        verb.convert(
            Console(json),
            source,
            target,
            pattern=pattern,
            global_pattern=global_pattern,
            global_is=global_is,
            initial=initial,
            partition=partition,
            model=model,
            data=data,
            root=root,
            download=download,
            method=method,
            seed=seed,
            evaluate=evaluate,
            key=key,
        )


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    to: Annotated[str, typer.Option(help="tensorboard, wandb (offline) or mlflow (local store).")],
    table: Annotated[
        list[Path] | None,
        typer.Option(
            help="More tables to export, csv or parquet (those in "
            "RUN/diagnostics are always exported)."
        ),
    ] = None,
    per_client: Annotated[
        bool, typer.Option("--per-client", help="Also export the numbers of each client.")
    ] = False,
    out: Out = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Export a run's metrics and diagnostics to TensorBoard, Weights & Biases or MLflow; nothing is sent over the network.

    Example: fldiag export checkpoints/digits-fedavg-s0-1a2b3c4d --to tensorboard
    """
    with errors(debug):
        from fldiag.verbs import export as verb

        verb.export(Console(json), run, to, out, list(table or ()), per_client=per_client)
