"""Verbs that say what there is."""

from __future__ import annotations

from typing import Annotated

import typer

from fldiag.cli.app import app
from fldiag.cli.options import Debug, Json
from fldiag.console import Console, errors


@app.command("list")
def list_(what: Annotated[str, typer.Argument(help="methods, models, datasets, diagnostics, presets or figures.")],
          json: Json = False, debug: Debug = False) -> None:
    """What there is.

    Example: fldiag list methods
    """
    with errors(debug):
        from fldiag.verbs import inform as verb

        verb.listing(Console(json), what)


@app.command()
def explain(name: str, json: Json = False, debug: Debug = False) -> None:
    """A method, model, data set or diagnostic: equations, options with defaults, source.

    Example: fldiag explain fedsol
    """
    with errors(debug):
        from fldiag.verbs import inform as verb

        verb.explain(Console(json), name)
