"""The lines of a profile and their points."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fldiag.errors import FldiagError
from fldiag.landscape import directions as rules
from fldiag.landscape.evaluator import Evaluator
from fldiag.landscape.interpolation import StraightPath, barrier
from fldiag.landscape.points import Points, Value
from fldiag.problem.eigenpairs import eigenpairs, eigenvalue_rows, finite_scores, noise_of
from fldiag.problem.problem import Problem
from fldiag.registry import Progress
from fldiag.results.table import Row


class Job:
    def __init__(self, problem: Problem, progress: Progress | None, points: int, seed: int):
        self.problem, self.progress, self.points, self.seed = problem, progress, points, seed

    def _values(
        self,
        kept: Points,
        line: int,
        places: np.ndarray,
        evaluate: Callable[[float], Value],
        text: str,
    ) -> list[Row]:
        def one(_: int, place: int) -> Value:
            return evaluate(float(places[place]))

        kept.fill([(line, i) for i in range(len(places))], one, text, self.progress, kept.done.size)
        return [
            {
                "metric": "loss",
                "index": line + 1,
                "x": float(x),
                "value": float(v),
                "stderr": float(e),
                "estimator": "exact",
            }
            for x, v, e in zip(places, kept.value[line], kept.stderr[line], strict=True)
        ]

    def lines(
        self, directions: str, places: np.ndarray, kept: Points, options: dict[str, Any]
    ) -> list[Row]:
        """Lines through the weights, each with its parabola."""
        count, p = len(kept.done), self.problem
        if kept.before is not None:
            along, found = (
                torch.from_numpy(kept.before[0]["directions"]).to(p.device),
                kept.before[1],
            )
        elif directions == "eigen":
            pairs = eigenpairs(
                p,
                min(options.pop("k"), p.layout.size),
                seed=self.seed,
                progress=self.progress,
                **options,
            )
            if len(pairs.values) < count:
                raise FldiagError(
                    f"{count} lines need as many eigenvectors, {len(pairs.values)} found",
                    "ask for fewer lines or allow more products",
                    usage=True,
                )
            along = torch.stack([pairs.vectors[i] for i in range(count)])
            found = {
                "rows": eigenvalue_rows(pairs, noise=noise_of(p)),
                "curvature": [float(v) for v in pairs.values[:count]],
                "residual": [float(v) for v in pairs.residuals[:count]],
            }
        else:
            along = torch.stack([rules.random_direction(p, self.seed, i) for i in range(count)])
            found = {
                "rows": [],
                "curvature": [float(d @ p.hvp(d.to(p.dtype))) for d in along],
                "residual": [None] * count,
            }
        kept.keep({"directions": along.cpu().numpy()}, found)
        gradient, centre = p.gradient(), finite_scores(p).loss
        rows: list[Row] = []
        try:
            for i, d in enumerate(along):
                evaluate = Evaluator(p, [d], reach=float(places[-1]))
                slope, curvature = float(gradient @ d), found["curvature"][i]
                rows += self._values(kept, i, places, evaluate, f"line {i + 1} of {count}")
                how = "lanczos" if directions == "eigen" else "exact"
                rows += [
                    {"metric": "slope", "index": i + 1, "value": slope, "estimator": "exact"},
                    {
                        "metric": "curvature",
                        "index": i + 1,
                        "value": curvature,
                        "residual": found["residual"][i],
                        "estimator": how,
                    },
                ]
                rows += [
                    {
                        "metric": "parabola",
                        "index": i + 1,
                        "x": float(x),
                        "estimator": how,
                        "value": centre + slope * float(x) + 0.5 * curvature * float(x) ** 2,
                    }
                    for x in places
                ]
        finally:  # also on Ctrl-C
            kept.save()
        return [*rows, *found["rows"]]

    def paths(self, given: dict[Any, Any], named: bool, kept: Points) -> list[Row]:
        """Straight paths to other models, each with its barrier."""
        places = np.linspace(0.0, 1.0, self.points)
        rows: list[Row] = []
        try:
            for i, (label, end) in enumerate(given.items()):
                path = StraightPath.to(self.problem, end)
                what: Row = {"index": i + 1}
                if named and isinstance(label, int):
                    what["client"] = label
                if path.buffers:
                    what["buffers"] = path.buffers
                losses = self._values(
                    kept, i, places, path.evaluate, f"path {i + 1} of {len(given)}"
                )
                rows += [{**row, **what} for row in losses]
                rows.append({**barrier(path, places, kept.value[i]), **what})
                rows.append(
                    {"metric": "distance", "value": path.length, "estimator": "exact", **what}
                )
        finally:
            kept.save()
        return rows
