"""``fldiag spectrum``: leading eigenvalues with residuals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from fldiag import api
from fldiag.console import Console
from fldiag.plotting import spectrum as picture
from fldiag.plotting import style
from fldiag.verbs import output

COLUMNS = {"run": "checkpoint", "metric": "metric", "index": "index", "value": "value", "residual": "residual",
           "converged": "converged"}


def spectrum(console: Console, paths: list[Path], out: Path | None, *, model: str | None, data: str | None, precision: str,
             options: dict[str, Any], where: dict[str, Any]) -> None:
    found = output.checkpoints(paths, model, data)
    folder = output.prepare(output.folder(found, out))
    problems = output.problems(found, {**where, "dtype": output.dtype(precision)})
    tables = []
    for problem in problems:
        with console.progress(problem.name) as progress:
            tables.append(api.diagnose(problem, "spectrum", cache=folder / "cache", progress=progress, **options))
    frame = pd.concat(tables, ignore_index=True)
    path = folder / output.stem("spectrum", found, options, precision, where["slice"], where["samples"], where["client"])
    written = output.write_table(frame, path, problems, found, **options)
    written += style.save(picture.draw(frame), path, ("pdf", "png"))
    rows = frame[list(COLUMNS)].astype(object).where(frame[list(COLUMNS)].notna(), None).to_dict("records")
    console.table(rows, COLUMNS)
    if not frame.loc[frame["metric"] == "eigenvalue", "converged"].all():
        console.note("not all eigenvalues converged: their residuals say how far they can be off; raise --max-products")
    console.done(*written)
