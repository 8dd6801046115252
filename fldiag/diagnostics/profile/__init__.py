"""The loss along lines in weight space: through the weights along a direction, or from one model to another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pandas as pd
from pydantic import Field

from fldiag.diagnostics.profile.summary import summary
from fldiag.landscape.grid import axis
from fldiag.registry import diagnostic
from fldiag.results.standing import at_centre
from fldiag.results.table import table

if TYPE_CHECKING:
    from fldiag.problem.problem import Problem


@diagnostic(
    "profile",
    draw="fldiag.diagnostics.profile.picture:draw",
    summary=summary,
    example="checkpoints/example/fedsol-digits.pt --directions random",
)
def profile(
    problem: Problem,
    *,
    directions: Annotated[
        Literal["eigen", "random"],
        Field(description="Directions: eigen or random."),
    ] = "eigen",
    lines: Annotated[int, Field(ge=1, description="Number of directions.")] = 2,
    points: Annotated[
        int | None,
        Field(ge=3, le=9999, description="Number of points along each line (odd; default 41)."),
    ] = None,
    span: Annotated[float, Field(gt=0, le=1e30, description="Largest coefficient.")] = 1.0,
    k: Annotated[int, Field(ge=1, description="Number of eigenvalues, with eigen directions.")] = 5,
    tol: Annotated[
        float, Field(gt=0, lt=1, description="Allowed relative error of each eigenvalue.")
    ] = 1e-3,
    max_products: Annotated[
        int,
        Field(ge=2, description="Maximum number of Hessian-vector products for the eigenvalues."),
    ] = 100,
    seed: Annotated[int, Field(description="Random seed.")] = 0,
) -> pd.DataFrame:
    """Draw the loss along lines through the weights, with the parabola of its curvature.

    ``directions`` = ``eigen`` (the leading ``lines`` Hessian eigenvectors) or ``random`` (filter-normalised):
    rows, by ``index`` of the line from 1, of ``loss`` at ``points`` (odd, default 41) coefficients ``x`` from
    -``span`` to ``span``; ``slope`` g = <gradient, d>; ``curvature`` c = d.Hd; and ``parabola``,
    L(w) + g x + c x^2 / 2. ``eigen`` adds the rows of the spectrum.

    Cost: lines x points evaluations of the slice.
    Raises FldiagError for an even number of points, or a loss at the weights that is
    not finite.
    """
    from fldiag.diagnostics.profile.lines import rows_along
    from fldiag.problem.eigenpairs import loss_rows

    centre = loss_rows(problem)
    rows = rows_along(
        problem,
        directions,
        lines,
        axis(points or 41, span),
        seed,
        k=min(max(k, lines), problem.layout.size),
        tol=tol,
        max_products=max_products,
    )
    return table(at_centre(rows, centre, x=0.0), **problem.common)


def lines_to(problem: Problem, clients: Mapping[int, Any], points: int | None) -> pd.DataFrame:
    """The rows of the straight paths to the weights of clients."""
    from fldiag.diagnostics.profile.lines import rows_between
    from fldiag.problem.eigenpairs import loss_rows

    centre = loss_rows(problem)
    rows = rows_between(problem, clients, points or 21)
    return table(at_centre(rows, centre, x=0.0), **problem.common)
