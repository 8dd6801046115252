"""How far the weights may move before the model is worse: along most directions, and along the worst."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import pandas as pd
from pydantic import Field

from fldiag.diagnostics.basins import picture
from fldiag.diagnostics.basins.summary import summary
from fldiag.registry import Progress, diagnostic
from fldiag.results.table import table

if TYPE_CHECKING:
    from fldiag.problem.problem import Problem


def cost(problem: Problem, options: Mapping[str, Any]) -> float:
    """A third of a gradient a point: of every direction most of the grid, and two bisections."""
    return (options["draws"] + 1) * 30 / 3


@diagnostic("basins", parts=True, draw=picture.draw, summary=summary, cost=cost, order=20,
            example="checkpoints/example/fedsol-digits.pt --samples 300")
def basins(problem: Problem, progress: Progress | None = None, *,
           draws: Annotated[int, Field(ge=1, le=9999, description="Number of random directions.")] = 100,
           drop: Annotated[float, Field(gt=0, lt=1, description="The basin ends where the accuracy has fallen by this much "
                                                                "(0.01 is one percentage point).")] = 0.01,
           rise: Annotated[float, Field(gt=0, description="The basin ends where the loss has risen by this fraction.")] = 0.1,
           least: Annotated[float, Field(gt=0, description="Smallest radius tested, in units of the norm "
                                                           "of the weights.")] = 1e-4,
           most: Annotated[float, Field(gt=0, description="Largest radius tested, in the same units.")] = 10.0,
           density: Annotated[int, Field(ge=1, le=1000, description="Number of radii tested per factor of ten.")] = 5,
           rtol: Annotated[float, Field(gt=0, lt=1, description="Bisection stops at this relative width of the bracket.")] = 0.01,
           seed: Annotated[int, Field(description="Random seed.")] = 0, store: Any = None) -> pd.DataFrame:
    """Measure the radius of the basin around the weights: most case (median direction) and worst case, by accuracy and by loss.

    An operational definition in the spirit of arXiv 2505.17646, of which only the abstract was read. Along a random direction
    d of norm 1 (no filter normalisation) the weights are w + r ||w|| d. Rows ``radius``, by ``index`` of the direction and
    ``criterion``: the first r at which the accuracy on the slice has fallen by more than ``drop`` (``accuracy``), or the loss
    has risen by more than the share ``rise`` (``loss``): the first on a logarithmic grid, then by bisection; a crossing
    between grid points that is undone before the next is not seen. ``residual``: the width of the last bracket.
    ``direction``: ``random``, or ``ascent``, that of the gradient.

    ``most_case``: the median over the random directions, with their quartiles ``low`` and ``high`` and its standard error
    (Maritz and Jarrett); ``worst_case``: the smallest over these and the ascent direction. All are of this slice; buffers stay
    as they are. ``masked`` with a ``note``: a direction along which nothing was crossed up to ``most`` (as infinitely far in a
    median), a gradient that is rounding noise, a criterion that does not apply (no classes, a loss that is not above 0).

    ``store`` as for ``landscape``, of finished directions.

    Raises FldiagError for weights that are all zero, ``least`` above ``most``, or a loss that is not finite.
    """
    from fldiag.diagnostics.basins.measure import Options, rows

    options = Options(draws, drop, rise, least, most, density, rtol, seed)
    return table(rows(problem, options, progress, store), **problem.common)
