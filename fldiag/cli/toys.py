"""The toys."""

from __future__ import annotations

from typing import Annotated

import typer

from fldiag.cli.app import toy
from fldiag.cli.options import Debug, Json, Out
from fldiag.console import Console, errors


@toy.command()
def plane(rho: Annotated[float, typer.Option(help="FedSOL's perturbation radius.")] = 1.5,
          beta: Annotated[float, typer.Option(help="FedProx's weight.")] = 1.0,
          a: Annotated[list[float] | None, typer.Option(help="Curvature along x, once per client.")] = None,
          out: Out = None, json: Json = False, debug: Debug = False) -> None:
    """FedSOL against FedProx in the plane: where clients end, drawn and compared with the closed forms.

    Example: fldiag toy plane --rho 0.5
    """
    with errors(debug):
        from fldiag.verbs import toys as verb

        verb.plane(Console(json), rho, beta, tuple(a) if a else None, out)
