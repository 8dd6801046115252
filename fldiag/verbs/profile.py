"""``fldiag landscape --line`` and ``--directions clients``: the loss along lines, not over a plane."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from fldiag.checkpoint.schema import Checkpoint
from fldiag.console import Console
from fldiag.errors import FldiagError
from fldiag.plotting import profile as picture
from fldiag.plotting import style
from fldiag.problem.problem import Problem
from fldiag.results.select import number, only
from fldiag.verbs import output

LINES = {"run": "checkpoint", "line": "direction", "loss": "loss", "slope": "slope", "curvature": "curvature",
         "residual": "± (residual)"}
BARRIERS = {"run": "checkpoint", "client": "client", "loss": "loss of client's model", "barrier": "barrier",
            "stderr": "± (stderr)", "at": "at", "distance": "distance"}


def lines(console: Console, paths: list[Path], out: Path | None, *, directions: str, points: int | None, span: float | None,
          seed: int, model: str | None, data: str | None, where: dict[str, Any]) -> None:
    """Profiles along eigenvectors or random directions, or from the global model to each stored client's."""
    from fldiag.verbs.landscape import tables

    if directions not in ("eigen", "random", "clients"):
        raise FldiagError(f"directions {directions!r} span a plane, not lines",
                          "use eigen, random or clients, or leave out --line", usage=True)
    clients = directions == "clients"
    if clients and (where["client"] is not None or span is not None):
        raise FldiagError("the ways to the clients' models start at the global model and end at theirs",
                          "leave out --client and --span", usage=True)
    found = output.checkpoints(paths, model, data)
    folder = output.prepare(output.folder(found, out))
    problems = output.problems(found, where)
    options: dict[str, Any] = {"directions": "through" if clients else directions, "points": points, "seed": seed,
                               **({} if span is None else {"span": span})}
    each = [{**options, "through": ends(c, p)} if clients else options for c, p in zip(found, problems, strict=True)]
    frame = tables(console, problems, "profile", folder / "cache", each)
    path = folder / output.stem("interpolation" if clients else "profile", found, options, where)
    written = output.write_table(frame, path, problems, found, **options)
    written += style.save(picture.draw(frame), path, ("pdf", "png"))
    console.table(barriers(frame) if clients else summary(frame), BARRIERS if clients else LINES)
    if "buffers" in frame.columns and frame["buffers"].notna().any():
        console.note("batch-norm statistics are interpolated like the weights: both ends are the models as stored")
    console.done(*written)


def ends(checkpoint: Checkpoint, problem: Problem) -> dict[int, Any]:
    """The trained models of the clients a checkpoint holds: client -> named weights and buffers.

    Raises FldiagError when it holds none, or they do not fit the model.
    """
    if checkpoint.clients is None or not checkpoint.client_ids:
        raise FldiagError(f"{checkpoint.path} holds no trained weights of clients",
                          "train with checkpoint.clients = 'sampled'", usage=True)
    if checkpoint.clients.shape[1:] != (problem.layout.size,):
        raise FldiagError(f"{checkpoint.path}: client weights of shape {list(checkpoint.clients.shape)} do not fit the model",
                          "the file was edited; use the original")
    return {client: {**problem.layout.views(checkpoint.clients[row]), **{n: b[row] for n, b in checkpoint.buffers.items()}}
            for row, client in enumerate(checkpoint.client_ids)}


def summary(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """One row a line."""
    rows = []
    own = only(frame, metric=["loss", "slope", "curvature"])
    for (run, line), part in own.groupby(["run", "index"], sort=False):
        rows.append({"run": run, "line": int(line), "loss": number(part, "loss", x=0), "slope": number(part, "slope"),
                     "curvature": number(part, "curvature"), "residual": number(part, "curvature", column="residual")})
    return rows


def barriers(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """One row a client."""
    rows = []
    for (run, client), part in frame.groupby(["run", "client"], sort=False):
        rows.append({"run": run, "client": int(client), "loss": number(part, "loss", x=1),
                     "barrier": number(part, "barrier"), "stderr": number(part, "barrier", column="stderr"),
                     "at": number(part, "barrier", column="x"), "distance": number(part, "distance")})
    return rows
