"""Verbs that bring results in from other programs and out to them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fldiag.cli.app import app
from fldiag.cli.options import Data, Debug, Download, Json, Out, Root
from fldiag.console import Console, errors


@app.command()
def convert(source: Annotated[Path, typer.Argument(metavar="IN", help="A .pt or .safetensors file, or a folder of per-client "
                                                                      "files.")],
            target: Annotated[Path, typer.Argument(metavar="OUT", help="The file in the other format, or the run folder to "
                                                                       "make.")],
            pattern: Annotated[str | None, typer.Option(help="Where the clients' files lie: 'round_{round}/client_{client}.pt' "
                                                             "(* for any text; known for PFLlib).")] = None,
            global_pattern: Annotated[str | None, typer.Option(help="Where the global models lie: "
                                                                    "'round_{round}/global.pt'.")] = None,
            global_is: Annotated[str, typer.Option(help="What the global file of a round is: aggregated (after it) or received "
                                                        "(before it).")] = "aggregated",
            initial: Annotated[Path | None, typer.Option(help="File of the model that the first round's clients "
                                                              "received.")] = None,
            partition: Annotated[Path | None, typer.Option(help="Whose examples are whose: npz or JSON, client -> "
                                                                "indices.")] = None,
            model: Annotated[str | None, typer.Option(help="The files' model: NAME or pkg.mod:factory.")] = None,
            data: Data = None, method: Annotated[str, typer.Option(help="What tables call the method.")] = "foreign",
            seed: Annotated[int, typer.Option(help="Seed of that training, for the tables.")] = 0,
            evaluate: Annotated[bool, typer.Option(help="Test the global model of every round, when data are given.")] = True,
            root: Root = None, download: Download = False, json: Json = False, debug: Debug = False) -> None:
    """Convert .pt to .safetensors or back (with the manifest), or turn a folder of client checkpoints into a run.

    Example: fldiag convert received/ checkpoints/theirs --pattern 'round_{round}/client_{client}.pt' --model small_cnn
    --data digits --partition partition.json
    """
    with errors(debug):
        from fldiag.verbs import convert as verb

        verb.convert(Console(json), source, target, pattern=pattern, global_pattern=global_pattern, global_is=global_is,
                     initial=initial, partition=partition, model=model, data=data, root=root, download=download, method=method,
                     seed=seed, evaluate=evaluate)


@app.command()
def export(run: Annotated[Path, typer.Argument(help="A run folder.")],
           to: Annotated[str, typer.Option(help="tensorboard, wandb (offline) or mlflow (local store).")],
           table: Annotated[list[Path] | None, typer.Option(help="Further tables, csv or parquet (those in RUN/diagnostics go "
                                                                 "along anyway).")] = None,
           per_client: Annotated[bool, typer.Option("--per-client", help="Also the numbers of single clients.")] = False,
           out: Out = None, json: Json = False, debug: Debug = False) -> None:
    """Hand a run's numbers, and its diagnostics', to TensorBoard, Weights & Biases or MLflow; nothing is sent anywhere.

    Example: fldiag export checkpoints/digits-fedavg-s0-1a2b3c4d --to tensorboard
    """
    with errors(debug):
        from fldiag.verbs import export as verb

        verb.export(Console(json), run, to, out, list(table or ()), per_client=per_client)
