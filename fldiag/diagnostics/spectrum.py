"""The leading eigenvalues of the Hessian: how sharp the minimum is, and in how many directions.

lambda_1 and lambda_1 / lambda_5 are the sharpness measures of Jastrzebski et al. (2020), reported for
federated models by Lee et al. (CVPR 2024); the top eigenvalue by Mendieta et al. (CVPR 2022).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
from pydantic import Field

from fldiag.diagnostics.linalg.lanczos import EigenPairs, Which, lanczos
from fldiag.diagnostics.problem import Problem
from fldiag.errors import FldiagError
from fldiag.registry import diagnostic
from fldiag.results.table import table

Progress = Callable[[int, int, str], None]
Row = dict[str, Any]

#: The ratio reported is lambda_1 over this eigenvalue (or over the last one, when fewer are asked for).
RATIO_INDEX = 5


def eigenpairs(problem: Problem, k: int = 5, *, which: Which = "largest", tol: float = 1e-3,
               max_products: int = 100, check: int = 3, seed: int = 0,
               progress: Progress | None = None) -> EigenPairs:
    """The k leading eigenpairs of the Hessian at ``problem.w``; see ``lanczos`` for the options and fields.

    Raises FldiagError when the probe finds a culprit or a product is not finite.
    """
    hessian = problem.hessian()
    noise = 1e-6 if problem.dtype == torch.float32 else 1e-12
    return lanczos(hessian, problem.layout.size, k, which=which, tol=tol, max_products=max_products,
                   check=check, noise=noise, seed=seed, device=problem.device, progress=progress)


def loss_row(problem: Problem) -> Row:
    """The mean loss at the weights. Raises FldiagError when it is not finite."""
    value, stderr = problem.loss()
    if not np.isfinite(value):
        raise FldiagError(f"the loss on slice {problem.slice_name!r} is {value}",
                          "diagnose a checkpoint from before the training diverged")
    return {"metric": "loss", "value": value, "stderr": stderr, "estimator": "exact"}


def eigenvalue_rows(pairs: EigenPairs) -> list[Row]:
    """A row per eigenvalue (index from 1), and the ratio lambda_1 / lambda_5 with its first-order error."""
    values, residuals, converged = pairs.values, pairs.residuals, pairs.converged
    rows: list[Row] = [
        {"metric": "eigenvalue", "index": i + 1, "value": float(values[i]), "residual": float(residuals[i]),
         "converged": bool(converged[i]), "estimator": "lanczos"} for i in range(len(values))]
    last = min(RATIO_INDEX, len(values)) - 1
    top, low = float(values[0]), float(values[last])
    ratio = top / low if low else None  # a zero eigenvalue has no ratio
    error = None
    if ratio is not None and last:
        error = (float(residuals[0]) + abs(ratio) * float(residuals[last])) / abs(low)
    rows.append({"metric": "eigenvalue_ratio", "index": last + 1, "value": ratio, "residual": error,
                 "converged": bool(converged[0] and converged[last]), "estimator": "lanczos"})
    return rows


@diagnostic("spectrum")
def spectrum(problem: Problem, progress: Progress | None = None, *, k: Annotated[int, Field(ge=1)] = 5,
             which: Which = "largest", tol: Annotated[float, Field(gt=0, lt=1)] = 1e-3,
             max_products: Annotated[int, Field(ge=1)] = 100, seed: int = 0) -> pd.DataFrame:
    """Top-k Hessian eigenvalues with residuals, lambda_1 / lambda_5, and the loss.

    Rows ``loss`` (with its standard error over the examples), ``eigenvalue`` (index 1..k, each with the
    residual ||Hv - lambda v||: an eigenvalue lies that close) and ``eigenvalue_ratio``. ``tol`` is the
    relative error of every eigenvalue; ``converged`` is false where ``max_products`` Hessian-vector products
    did not reach it. Cost: about 15 to 20 products at a minimum (30 to 40 near the initialisation), each
    worth about 2 gradients of the slice.

    Raises FldiagError when the loss is not finite or not a function of the weights alone.
    """
    rows = [loss_row(problem)]
    pairs = eigenpairs(problem, k, which=which, tol=tol, max_products=max_products, seed=seed,
                       progress=progress)
    return table(rows + eigenvalue_rows(pairs), **problem.common)
