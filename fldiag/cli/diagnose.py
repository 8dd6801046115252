"""``diagnose`` asks any diagnostic by name, and ``partition`` also of what is not trained yet."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from fldiag.cli.app import Console, Device, Download, Out, Set, ask, verb


@verb("Weights", "allow_code", "width", "format")
def diagnose(
    console: Console,
    name: Annotated[
        str,
        typer.Argument(
            help="A diagnostic (fldiag list diagnostics), or a function of your own: pkg.mod:function."
        ),
    ],
    targets: Annotated[list[Path], typer.Argument(help="Checkpoint files or run folders.")],
    set_: Set = None,
    out: Out = None,
    device: Device = "auto",
    **shared: Any,
) -> None:
    """Run any diagnostic, including those of other packages and your own; set its options with --set.

    Example: fldiag diagnose spectrum checkpoints/example/fedsol-digits.pt --set k=3
    """
    from fldiag.config import parse_override

    options = dict(map(parse_override, set_ or []))
    if device != "auto":
        options["device"] = device
    ask(console, name, targets, options, out=out, **shared)


@verb("Clients", "allow_code", "width", "format")
def partition(
    console: Console,
    config: Annotated[str, typer.Argument(help="A preset, a TOML file or a run folder.")],
    set_: Set = None,
    download: Download = False,
    out: Out = None,
    **shared: Any,
) -> None:
    """Draw the label distribution per client, and measure how far clients are from alike.

    Example: fldiag partition digits --set partition.alpha=0.5
    """
    from fldiag.diagnosis.diagnose import FALLBACK, Answer, check_writable, write_files
    from fldiag.diagnostics import partition as partitions
    from fldiag.registry import diagnostic
    from fldiag.results.files import provenance, sources

    if os.path.isfile(Path(config) / "run.json"):
        options = {"download": download}
        return ask(console, "partition", [Path(config)], options, out=out, **shared)
    table = partitions.of_config(config, set_ or [], download)
    answer = Answer(diagnostic.get("partition"), table, {})
    path = check_writable(out or FALLBACK) / partitions.file_name(table)
    write_files(answer, path, provenance(code=sources()))
    console.show(answer.summary())
    console.done(*answer.files)
