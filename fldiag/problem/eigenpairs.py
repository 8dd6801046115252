"""Eigenpairs of a problem's curvature, and their rows in a result table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fldiag.curvature.lanczos import EigenPairs, lanczos
from fldiag.errors import FldiagError
from fldiag.problem.problem import Problem
from fldiag.results.table import Row
from fldiag.sections import Matrix, Which

#: The ratio reported is lambda_1 over this eigenvalue (or over the last one, when fewer are asked for).
RATIO_INDEX = 5
#: So many may be asked for of fewer weights; all that there are come.
FEW = 10


def eigenpairs(
    problem: Problem,
    k: int,
    *,
    matrix: Matrix = "hessian",
    names: Sequence[str] | None = None,
    **options: Any,
) -> EigenPairs:
    """The k leading eigenpairs of the Hessian (or Gauss-Newton matrix) at the problem's weights.

    Args:
        problem: whose curvature it is.
        k: eigenpairs.
        matrix: hessian or ggn.
        names: only the block of these tensors; the vectors have one entry a weight of the block, in order.
        options: of ``lanczos``: which, tol, max_products, miss, strict, seed, progress.

    Returns:
        The eigenpairs.

    Raises:
        FldiagError: more eigenpairs than weights, a fault that the probe finds, or a product that is not finite.
    """
    operator = problem.hessian(matrix=matrix, names=names)
    if k > max(operator.size, FEW):
        raise FldiagError(f"k = {k}, and there are {operator.size} weights", usage=True)
    # vectors of each of the two sequences; below k + 8 a restart would never converge
    room = problem.memory // 4 // (8 * operator.size)
    return lanczos(
        operator,
        operator.size,
        k,
        noise=problem.noise,
        limit=min(max(100, 3 * k + 20), max(k + 8, room)),
        device=problem.device,
        dtype=problem.dtype,
        **options,
    )


def eigenvalue_rows(
    problem: Problem, pairs: EigenPairs, *, which: Which = "largest", **about: Any
) -> list[Row]:
    """A row an eigenvalue (index from 1), and the ratio lambda_1 / lambda_k (index k: 5, or the last) with its first-order error.

    No ratio from the lower end of the spectrum, nor to an eigenvalue that is zero within its residual or within rounding.
    """
    method = "lanczos, differences" if problem.by_differences else "lanczos"
    common: Row = {"estimator": method, "which": which, **about}
    columns = (of.tolist() for of in (pairs.values, pairs.residuals, pairs.converged))
    rows: list[Row] = [
        {**common, "metric": "eigenvalue", "index": i, "value": v, "residual": r, "converged": c}
        for i, (v, r, c) in enumerate(zip(*columns, strict=True), start=1)
    ]
    if which == "smallest" or len(rows) < 2:
        return rows
    last = min(RATIO_INDEX, len(rows))
    top, low = rows[0], rows[last - 1]
    row: Row = {**common, "metric": "eigenvalue_ratio", "index": last, "value": None}
    row["converged"] = top["converged"] and low["converged"]
    size = abs(low["value"])
    if size > max(low["residual"], problem.noise * float(np.abs(pairs.values).max())):
        row["value"] = top["value"] / low["value"]
        row["residual"] = (top["residual"] + abs(row["value"]) * low["residual"]) / size
    return [*rows, row]
