"""The command line's root, to which the modules beside it add their verbs."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="Diagnose federated learning: train, and look at what the checkpoints say.")
toy = typer.Typer(no_args_is_help=True, help="The two toys: pictures one can check by hand.")


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from fldiag import version as own

        print(own.version())
        raise typer.Exit
