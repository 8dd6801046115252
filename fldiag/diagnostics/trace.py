"""The trace of the Hessian, for the whole network and its layers.

H_T of Mendieta et al. (CVPR 2022), there by Hutchinson's estimator with the rules of PyHessian (Yao et al. 2020).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import pandas as pd
from pydantic import Field

from fldiag.choices import Deflated, Estimate, Per, Products, Rtol
from fldiag.execution import workspace
from fldiag.registry import diagnostic
from fldiag.results.table import table

if TYPE_CHECKING:
    from fldiag.problem.problem import Problem


@diagnostic(
    "trace",
    draw="fldiag.plotting.layers:draw",
    example="checkpoints/example/fedsol-digits.pt",
)
def trace(
    problem: Problem,
    *,
    per: Per = "layer",
    estimate: Estimate = "auto",
    rtol: Rtol = 0.02,
    max_products: Products = 200,
    deflate: Deflated = 20,
    seed: Annotated[int, Field(description="Random seed.")] = 0,
) -> pd.DataFrame:
    """Compute the trace of the Hessian, whole and by layer; exact where the network is piecewise linear in each layer's weights.

    Rows ``trace`` for the whole and ``per`` layer (weight and bias together) or tensor. ``estimator``: ``exact``
    (diag(H) = diag(J^T H_L J), found from the module graph; in any network also of the layers in which its outputs are
    affine, such as a classifier), else ``hutchinson-deflated`` (or ``hutchinson`` with
    ``deflate = 0``): the first ``deflate`` products span a Krylov space whose part is counted exactly, random
    signs sample the rest until the standard error is at most ``rtol`` times the trace (``converged``) or
    ``max_products`` Hessian-vector products are spent.

    Raises FldiagError when ``estimate = "exact"`` is not possible, or the loss is not a function of the weights.
    """
    from fldiag.problem.diagonal import diagonal_of, trace_rows
    from fldiag.problem.eigenpairs import loss_rows

    diagonal = diagonal_of(
        problem,
        entries=False,
        estimate=estimate,
        rtol=rtol,
        max_products=max_products,
        deflate=deflate,
        seed=seed,
        progress=workspace().show,
    )
    return table([*trace_rows(problem, diagonal, per), *loss_rows(problem)], **problem.common)
