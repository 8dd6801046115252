"""``fldiag landscape``: surfaces around checkpoints on one grid and one colour scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from fldiag import api
from fldiag.checkpoint.schema import Checkpoint
from fldiag.console import Console
from fldiag.diagnostics.problem import Problem
from fldiag.errors import FldiagError
from fldiag.plotting import interactive, style
from fldiag.plotting import landscape as picture
from fldiag.verbs import output


def landscape(console: Console, paths: list[Path], out: Path | None, *, directions: str, points: int, span: float | None,
              seed: int, model: str | None, data: str | None, where: dict[str, Any]) -> None:
    found = output.checkpoints(paths, model, data)
    folder = output.prepare(output.folder(found, out))
    problems = output.problems(found, where)
    through = None
    if directions == "plane":
        if len(problems) != 3:
            raise FldiagError(f"a plane goes through three checkpoints, {len(problems)} given", "give three", usage=True)
        through = [p.w for p in problems[1:]]
        found, problems = found[:1], problems[:1]
    options = {"directions": directions, "points": points, "span": span, "seed": seed}
    frame = surfaces(console, problems, folder / "cache", through=through, **options)
    path = folder / output.stem("landscape", found, options, where["slice"], where["samples"], where["client"])
    written = output.write_table(frame, path, problems, found, **options)
    written += draw(frame, path)
    console.table(summary(frame, problems, found), SUMMARY)
    console.done(*written)


SUMMARY = {"run": "checkpoint", "slice": "slice", "n": "n", "loss": "loss", "lambda_1": "λ1", "residual": "± (residual)",
           "ratio": "λ1/λ5", "converged": "converged"}


def surfaces(console: Console, problems: list[Problem], cache: Path, **options: Any) -> pd.DataFrame:
    """The landscape tables of several problems, one below the other."""
    tables = []
    for i, problem in enumerate(problems, start=1):
        with console.progress(f"{problem.name} ({i}/{len(problems)})") as progress:
            tables.append(api.diagnose(problem, "landscape", cache=cache, progress=progress, **options))
    return pd.concat(tables, ignore_index=True)


def draw(frame: pd.DataFrame, path: Path) -> list[Path]:
    """html, pdf and png (the last one is what people look at first)."""
    page = interactive.interactive(frame, output.beside(path, ".html"))
    pictures = style.save(picture.draw(frame), path, ("pdf", "png"))
    return [Path(page), *pictures]


def summary(frame: pd.DataFrame, problems: list[Problem], found: list[Checkpoint]) -> list[dict[str, Any]]:
    """One row a checkpoint: loss at the centre, λ1 with residual, λ1/λ5."""
    rows = []
    for problem in problems:
        part = frame[frame["run"] == problem.name]
        centre = part[(part["metric"] == "loss") & (part["x"] == 0) & (part["y"] == 0)]
        row: dict[str, Any] = {"run": problem.name, "slice": problem.slice_name, "n": problem.n,
                               "loss": float(centre["value"].iloc[0])}
        first = part[(part["metric"] == "eigenvalue") & (part["index"] == 1)]
        ratio = part[(part["metric"] == "eigenvalue_ratio")]
        if len(first):
            row |= {"lambda_1": float(first["value"].iloc[0]), "residual": float(first["residual"].iloc[0]),
                    "converged": bool(part.loc[part["metric"] == "eigenvalue", "converged"].all())}
        if len(ratio) and ratio["value"].notna().all():
            row["ratio"] = float(ratio["value"].iloc[0])
        rows.append(row)
    return rows
