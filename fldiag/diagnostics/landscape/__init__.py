"""The loss over a plane in weight space, around a checkpoint.

Directions and grid as in Mendieta et al. (CVPR 2022): L(w + x d1 + y d2) with d1, d2 the top two Hessian
eigenvectors, coefficients added to all weights alike; or filter-normalised random directions, or the principal
axes of a trajectory (both Li et al., NeurIPS 2018), or the plane through three weight sets (Garipov et al.,
NeurIPS 2018).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pandas as pd
from pydantic import Field

from fldiag.diagnostics.landscape.summary import summary
from fldiag.diagnostics.landscape.surfaces import AXES
from fldiag.execution import workspace
from fldiag.landscape.grid import axis
from fldiag.registry import diagnostic
from fldiag.results.select import only
from fldiag.results.standing import at_centre
from fldiag.results.table import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fldiag.plotting.pages import Interactive
    from fldiag.problem.problem import Problem

#: Grid points along an axis when nobody says how many.
POINTS = 41


def axes(table: pd.DataFrame) -> tuple[str, str]:
    """What the two axes are; principal axes with the share of the variance that they explain."""
    directions = table.attrs.get("options", {}).get("directions")
    first, second = AXES.get(directions, ("direction 1", "direction 2"))
    shares = only(table, metric="explained_variance").set_index("index")["value"]
    if directions != "pca" or len(shares) < 2 or shares.index.has_duplicates:
        return first, second
    return f"{first} ({100 * shares[1]:.0f} % of variance)", f"{second} ({100 * shares[2]:.0f} %)"


def draw(table: pd.DataFrame) -> Figure:
    """The surfaces of a table side by side, on one grid and one colour scale."""
    from fldiag.diagnostics.landscape import picture  # imports matplotlib, as below

    return picture.draw(table, names=axes(table))


def page(table: pd.DataFrame) -> Interactive:
    """The surfaces of a table to turn and to hover over."""
    from fldiag.diagnostics.landscape import interactive

    return interactive.charts(table, names=axes(table))


@diagnostic(
    "landscape",
    draw={"": draw, ".html": page},
    summary=summary,
    example="checkpoints/example/fedsol-digits.pt",
)
def landscape(
    problem: Problem | Sequence[Problem],
    *,
    directions: Annotated[
        Literal["eigen", "random", "plane", "pca"],
        Field(
            description="Directions: eigen (top Hessian eigenvectors), random, plane (through three checkpoints) or pca "
            "(principal axes of a run's trajectory).",
            json_schema_extra={"joint": ["plane", "pca"]},
        ),
    ] = "eigen",
    points: Annotated[
        int | None,
        Field(
            ge=3, le=9999, description="Number of grid points along each axis (odd; default 41)."
        ),
    ] = None,
    span: Annotated[
        float | None, Field(gt=0, le=1e30, description="Largest coefficient (default 1).")
    ] = None,
    k: Annotated[int, Field(ge=2, description="Number of eigenvalues, with eigen directions.")] = 5,
    tol: Annotated[
        float,
        Field(
            gt=0,
            lt=1,
            description="Allowed relative error of each eigenvalue.",
            json_schema_extra={"advanced": True},
        ),
    ] = 1e-3,
    max_products: Annotated[
        int,
        Field(
            ge=2,
            description="Maximum number of Hessian-vector products for the eigenvalues.",
            json_schema_extra={"advanced": True},
        ),
    ] = 100,
    seed: Annotated[int, Field(description="Random seed.")] = 0,
) -> pd.DataFrame:
    """Draw the loss surface around checkpoints, with λ1 and λ1/λk: picture, interactive page and table.

    Rows ``loss``: the mean loss at a grid of points w + x d1 + y d2, with standard errors over the examples; ``accuracy`` at the
    centre.

    ``directions``: ``eigen`` (top two Hessian eigenvectors; adds the rows of the spectrum), ``random`` (filter-normalised,
    ``seed``), ``plane`` (of three problems; adds rows ``point``) or ``pca`` (principal axes of the checkpoints of a run, or
    of several problems; adds rows ``trajectory``, ``projection_error``, ``explained_variance``). These two surfaces have the
    buffers of the weights at the centre everywhere, while the loss of a point is with its own.
    The grid has an odd number of ``points`` from -``span`` to ``span`` along each axis, so its centre is the
    checkpoint; ``span`` defaults to 1, for a plane or pca to 1.25 times the farthest coordinate.

    Coarse points are evaluated and a polyharmonic spline goes through them; points are added where it may be most
    wrong, until its error is estimated to be below 1 % of the loss range (of exploding corners: of the loss
    there), or all points are evaluated because it does not become so. ``estimator`` says of each row ``exact`` or
    ``spline``; a spline's ``residual`` is that estimate of the largest error, which is made to be an upper one but is no
    bound (docs/explanation/performance.md says how wrong); its ``stderr`` is interpolated like the loss, as the
    interpolated loss is a mean over the same examples. Row ``interpolation_error``: the estimate as a share of the
    range; ``evaluated``: the number of points.

    Cost: from 81 evaluations of the slice for 41 points.

    Raises FldiagError for an even number of points, weights that span no plane, or a loss at the weights that is not finite.
    """
    from fldiag.diagnostics.landscape import through as stored
    from fldiag.diagnostics.landscape.measure import Plane, find_directions, surface_rows
    from fldiag.problem.eigenpairs import loss_rows
    from fldiag.problem.problem import Problem

    problems = [problem] if isinstance(problem, Problem) else list(problem)
    axis(points or POINTS, 1.0)
    problem = problems[0]
    others: list[Any] = []
    if directions == "plane":
        others = stored.plane(problems)
    elif directions == "pca":
        problem, others = stored.trajectory(problems)
    if directions in ("plane", "pca") and problem.buffers:
        which = "first" if directions == "plane" else "last"
        warnings.warn(
            f"the surface has the buffers of the {which} checkpoint everywhere; the losses of the points are with their own",
            stacklevel=2,
        )
    with workspace().part(0, 2, ""):
        vectors = find_directions(
            problem, directions, others, seed, k=k, tol=tol, max_products=max_products
        )
    span = span if span is not None else 1.25 * vectors.reach or 1.0
    plane = Plane(problem, (vectors.d1, vectors.d2), axis(points or POINTS, span))
    with workspace().part(1, 2, ""):
        rows = surface_rows(plane, seed)
    return table(
        [*at_centre(rows, loss_rows(problem), x=0.0, y=0.0), *vectors.rows], **problem.common
    )
