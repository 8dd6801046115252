"""The loss along lines in weight space: through the weights along a direction, or from one model to another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import torch
from pydantic import Field

from fldiag.diagnostics.landscape import axis
from fldiag.diagnostics.profile import picture
from fldiag.diagnostics.profile.summary import summary
from fldiag.errors import FldiagError
from fldiag.problem.eigenpairs import NOISE, eigenpairs, eigenvalue_rows, finite_loss
from fldiag.problem.problem import Problem
from fldiag.registry import Progress, diagnostic
from fldiag.results.provenance import digest
from fldiag.results.table import Row, table
from fldiag.surface import directions as rules
from fldiag.surface.evaluator import Evaluator
from fldiag.surface.interpolation import Path, barrier
from fldiag.surface.points import Points


def cost(problem: Problem, options: Mapping[str, Any]) -> float:
    """A third of a gradient a point, and the spectrum's."""
    ways = len(options["through"]) if options["directions"] == "through" and options["through"] is not None else options["lines"]
    return ways * (options["points"] or 41) / 3 + (50 if options["directions"] == "eigen" else 0)


@diagnostic("profile", draw=picture.draw, summary=summary, cost=cost,
            variant=lambda options: str(options.get("directions", "eigen")),
            example="checkpoints/example/fedsol-digits.pt --directions random")
def profile(problem: Problem, progress: Progress | None = None, *,
            directions: Annotated[Literal["eigen", "random", "through"], Field(
                description="eigen, random, or through (Python only: to other weights).")] = "eigen",
            lines: Annotated[int, Field(ge=1, description="How many directions.")] = 2,
            points: Annotated[int | None, Field(ge=3, description="Points along each line (odd; default 41).")] = None,
            span: Annotated[float, Field(gt=0, description="Largest coefficient.")] = 1.0, through: Any = None,
            k: Annotated[int, Field(ge=1, description="How many eigenvalues, with eigen.")] = 5,
            tol: Annotated[float, Field(gt=0, lt=1, description="Relative error allowed in each eigenvalue.")] = 1e-3,
            max_products: Annotated[int, Field(ge=2, description="Hessian-vector products allowed for them.")] = 100,
            seed: Annotated[int, Field(description="Random seed.")] = 0, store: Any = None) -> pd.DataFrame:
    """The loss along lines: through the weights with the parabola of its curvature, or to other models with barriers.

    ``directions`` = ``eigen`` (the leading ``lines`` Hessian eigenvectors) or ``random`` (filter-normalised):
    rows, by ``index`` of the line from 1, of ``loss`` at ``points`` (odd, default 41) coefficients ``x`` from
    -``span`` to ``span``; ``slope`` g = <gradient, d>; ``curvature`` c = d.Hd; and ``parabola``,
    L(w) + g x + c x^2 / 2. ``eigen`` adds the rows of the spectrum.

    ``through``: straight paths from the weights (``x`` = 0) to each weight set of ``through`` (``x`` = 1; a list,
    or a dict whose integer labels are clients): rows of ``loss`` at ``points`` (default 21) places, and
    ``barrier``, the largest excess over the straight line between the ends' losses, with a standard error over
    the examples. Floating-point buffers (batch-norm statistics) go along the same straight path if the weight
    sets hold them, else stay the problem's: column ``buffers`` says ``interpolated`` or ``fixed``.

    ``store`` as for ``landscape``. Cost: lines x points evaluations of the slice.
    Raises FldiagError for an even number of points, weight sets that do not fit the model, or a loss at the weights that is
    not finite.
    """
    finite_loss(problem)
    job = _Job(problem, progress, points or (21 if directions == "through" else 41), seed)
    ends = dict(through) if isinstance(through, Mapping) else list(through) if isinstance(through, Sequence) else None

    def kept(shape: tuple[int, ...]) -> Points:
        return Points(shape, store, lambda: digest("profile", problem.digest(), directions, lines, shape[1], span, ends, k,
                                                   tol, max_products, seed))

    if directions == "through":
        given = rules.labelled(through, "paths need", 1)
        rows = job.paths(given, isinstance(through, Mapping), kept((len(given), job.points)))
    else:
        places = axis(job.points, span)
        rows = job.lines(directions, places, kept((lines, job.points)),
                         {"k": max(k, lines), "tol": tol, "max_products": max_products})
    return table(rows, **problem.common)


class _Job:
    def __init__(self, problem: Problem, progress: Progress | None, points: int, seed: int):
        self.problem, self.progress, self.points, self.seed = problem, progress, points, seed

    def _values(self, kept: Points, line: int, places: np.ndarray, evaluate: Any, text: str) -> list[Row]:
        def one(_: int, place: int) -> tuple[float, float | None, float]:
            return *evaluate(float(places[place])), np.nan

        kept.fill([(line, i) for i in range(len(places))], one, text, self.progress, kept.done.size)
        return [{"metric": "loss", "index": line + 1, "x": float(x), "value": float(v), "stderr": float(e),
                 "estimator": "exact"} for x, v, e in zip(places, kept.value[line], kept.stderr[line], strict=True)]

    def lines(self, directions: str, places: np.ndarray, kept: Points, options: dict[str, Any]) -> list[Row]:
        """Lines through the weights, each with its parabola."""
        count, p = len(kept.done), self.problem
        if kept.held is not None:
            along, found = torch.from_numpy(kept.held[0]["directions"]).to(p.device), kept.held[1]
        elif directions == "eigen":
            pairs = eigenpairs(p, min(options.pop("k"), p.layout.size), seed=self.seed, progress=self.progress, **options)
            if len(pairs.values) < count:
                raise FldiagError(f"{count} lines need as many eigenvectors, {len(pairs.values)} found",
                                  "ask for fewer lines or allow more products", usage=True)
            along = torch.stack([pairs.vectors[i] for i in range(count)])
            found = {"rows": eigenvalue_rows(pairs, noise=NOISE[p.dtype]), "curvature": [float(v) for v in pairs.values[:count]],
                     "residual": [float(v) for v in pairs.residuals[:count]]}
        else:
            along = torch.stack([rules.random_direction(p, self.seed, i) for i in range(count)])
            found = {"rows": [], "curvature": [float(d @ p.hvp(d.to(p.dtype))) for d in along],
                     "residual": [None] * count}
        kept.keep({"directions": along.cpu().numpy()}, found)
        gradient, centre = p.gradient(), finite_loss(p)[0]
        rows: list[Row] = []
        try:
            for i, d in enumerate(along):
                evaluate = Evaluator(p, [d], reach=float(places[-1]))
                slope, curvature = float(gradient @ d), found["curvature"][i]
                rows += self._values(kept, i, places, evaluate, f"line {i + 1} of {count}")
                how = "lanczos" if directions == "eigen" else "exact"
                rows += [{"metric": "slope", "index": i + 1, "value": slope, "estimator": "exact"},
                         {"metric": "curvature", "index": i + 1, "value": curvature, "residual": found["residual"][i],
                          "estimator": how}]
                rows += [{"metric": "parabola", "index": i + 1, "x": float(x), "estimator": how,
                          "value": centre + slope * float(x) + 0.5 * curvature * float(x) ** 2} for x in places]
        finally:  # also on Ctrl-C
            kept.save()
        return [*rows, *found["rows"]]

    def paths(self, given: dict[Any, Any], named: bool, kept: Points) -> list[Row]:
        """Straight paths to other models, each with its barrier."""
        places = np.linspace(0.0, 1.0, self.points)
        rows: list[Row] = []
        try:
            for i, (label, end) in enumerate(given.items()):
                path = Path.to(self.problem, end)
                what: Row = {"index": i + 1}
                if named and isinstance(label, int):
                    what["client"] = label
                if path.buffers:
                    what["buffers"] = path.buffers
                losses = self._values(kept, i, places, path.evaluate, f"path {i + 1} of {len(given)}")
                rows += [{**row, **what} for row in losses]
                rows.append({**barrier(path, places, kept.value[i]), **what})
                rows.append({"metric": "distance", "value": path.length, "estimator": "exact", **what})
        finally:
            kept.save()
        return rows
