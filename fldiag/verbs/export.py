"""``fldiag export``: the numbers of a finished run for a tracker of experiments."""

from __future__ import annotations

import importlib
from pathlib import Path

from fldiag import api
from fldiag.checkpoint.run import Run
from fldiag.console import Console
from fldiag.diagnosis import places
from fldiag.errors import FldiagError, check_name, unknown
from fldiag.export import scalars

KINDS = ("tensorboard", "wandb", "mlflow")


def export(
    console: Console, path: Path, to: str, out: Path | None, tables: list[Path], *, per_client: bool
) -> None:
    if to not in KINDS:
        raise unknown("format", to, KINDS)
    run = api.load(path)
    if not isinstance(run, Run):
        raise FldiagError(f"{path} is one checkpoint", "give the run's folder", usage=True)
    collected = scalars.collect(run, tables, per_client=per_client)
    folder = places.prepare(out or run.path / "export" / to)
    check_name(folder)
    with console.progress(f"{len(collected.series)} numbers to {to}"):
        written = importlib.import_module(f"fldiag.export.{to}").export(collected, folder)
    tags = collected.series["tag"].nunique()
    console.table(
        [{"run": run.path.name, "series": tags, "numbers": len(collected.series)}],
        {"run": "run", "series": "series", "numbers": "numbers"},
    )
    console.done(written)
