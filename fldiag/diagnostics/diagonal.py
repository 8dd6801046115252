"""The diagonal of the Hessian, as a summary: exact where the network's structure allows it, else estimated.

The cross-client measures of Mendieta et al. (CVPR 2022) and the trace of Yao et al. (2020) are made of these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import pandas as pd
from pydantic import Field

from fldiag.choices import Deflated, Estimate, Per, Products, Rtol
from fldiag.execution import workspace
from fldiag.registry import diagnostic
from fldiag.results.table import Row, table

if TYPE_CHECKING:
    from fldiag.problem.diagonal import Diagonal
    from fldiag.problem.problem import Problem


def diagonal_rows(problem: Problem, result: Diagonal, per: Per) -> list[Row]:
    """Norm, largest and smallest entry, of the whole and by layer or tensor."""
    import torch

    from fldiag.problem.diagonal import norm, parts

    assert result.values is not None  # entries were asked for
    slices = problem.layout.slices()
    rows: list[Row] = []
    for label, names in [(None, problem.layout.names), *parts(problem, per).items()]:
        values = torch.cat([result.values[slices[n]] for n in names])
        estimator = result.how(names)
        stderr = None
        if result.stderr is not None and estimator != "exact":
            stderr = torch.cat([result.stderr[slices[n]] for n in names])
        size, error = norm(values, stderr)
        common: Row = {
            "layer": label,
            "estimator": estimator,
            "converged": estimator == "exact" or result.converged,
        }
        rows.append({**common, "metric": "diagonal_norm", "value": size, "stderr": error})
        for metric, i in (
            ("diagonal_max", int(values.argmax())),
            ("diagonal_min", int(values.argmin())),
        ):
            error = None if stderr is None else float(stderr[i])
            rows.append({**common, "metric": metric, "value": float(values[i]), "stderr": error})
    return rows


@diagnostic(
    "diagonal",
    draw="fldiag.plotting.layers:draw",
    example="checkpoints/example/fedsol-digits.pt",
)
def diagonal(
    problem: Problem,
    *,
    per: Per = "layer",
    estimate: Estimate = "auto",
    rtol: Rtol = 0.02,
    max_products: Products = 200,
    deflate: Deflated = 20,
    seed: Annotated[int, Field(description="Random seed.")] = 0,
) -> pd.DataFrame:
    """Summarise the Hessian's diagonal: its norm, largest and smallest entry, whole and by layer.

    Exact where the network is piecewise linear in each layer's weights.

    Rows ``diagonal_norm`` (Euclidean norm; what H_N compares), ``diagonal_max``, ``diagonal_min`` and ``trace``, for
    the whole and ``per`` layer or tensor. ``estimator``: exact (in any network also for the layers in which its outputs are
    affine, such as a classifier), or hutchinson-deflated with standard errors: such
    entries are rough (many probes leave them tens of per cent off), so ``rtol`` is seldom reached within
    ``max_products`` Hessian-vector products and ``converged`` says so. The whole vector: ``diagonal_of`` of
    ``fldiag.problem.diagonal``. Cost of the exact form: about 4 Hessian-vector products with 10 classes.

    Raises FldiagError when ``estimate = "exact"`` is not possible, or the loss is not a function of the weights.
    """
    from fldiag.problem.diagonal import diagonal_of, trace_rows
    from fldiag.problem.eigenpairs import loss_rows

    result = diagonal_of(
        problem,
        estimate=estimate,
        rtol=rtol,
        max_products=max_products,
        deflate=deflate,
        seed=seed,
        progress=workspace().show,
    )
    rows = diagonal_rows(problem, result, per)
    return table([*rows, *trace_rows(problem, result, per), *loss_rows(problem)], **problem.common)
