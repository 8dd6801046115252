"""The verb ``toy``. Nothing heavy is imported before it runs."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from ..verbs import Debug, Json, Out, progress, say

toy = typer.Typer(
    no_args_is_help=True,
    help="Two toy problems whose results can be checked by hand.",
    rich_help_panel="Papers",
)


@toy.command()
def plane(
    rho: Annotated[float, typer.Option(help="FedSOL's perturbation radius.")] = 1.5,
    beta: Annotated[float, typer.Option(help="FedProx's weight.")] = 1.0,
    a: Annotated[
        list[float] | None, typer.Option(help="Curvature along x; give it once per client.")
    ] = None,
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """FedSOL and FedProx in the plane: where the clients end up, drawn and compared with the closed forms.

    Example: fldiag toy plane --rho 0.5
    """
    _play("plane", {"rho": rho, "beta": beta} | ({"a": a} if a else {}), out, as_json)


@toy.command()
def iris(
    lr: Annotated[
        float, typer.Option(help="Learning rate of clients and distillation; the paper's is 0.001.")
    ] = 0.01,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of 5 local epochs.")] = 20,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds.")] = 5,
    seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Decision regions on Iris: what three clients forget under FedAvg, FedDF and FedProj.

    Example: fldiag toy iris --seeds 2
    """
    options = {"lr": lr, "rounds": rounds, "seeds": [seed + i for i in range(seeds)]}
    _play("iris", options, out, as_json)


def _play(name: str, options: dict[str, Any], out: Path | None, as_json: bool) -> None:
    from fldiag.results.files import json_digest

    from ..study import write

    game = import_module(f".{name}", __package__)
    with progress() as bars:
        table = game.run(**options, track=bars.track)
    rows = game.summary(table)
    if not as_json:
        print(rows.to_string(index=False, float_format="{:.4g}".format, na_rep=""))
    path = (out or Path("fldiag-out")) / f"toy-{name}-{json_digest(options)[:8]}"
    written = write(table, path, options, game.draw(table))
    say(written, as_json, rows=json.loads(rows.to_json(orient="records")))
