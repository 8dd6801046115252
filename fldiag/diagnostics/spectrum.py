"""The leading eigenvalues of the Hessian: how sharp the minimum is, and in how many directions.

lambda_1 and lambda_1 / lambda_5 are the sharpness measures of Jastrzebski et al. (2020), reported for
federated models by Lee et al. (CVPR 2024); the top eigenvalue by Mendieta et al. (CVPR 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
from pydantic import Field

from fldiag.diagnostics.linalg.lanczos import EigenPairs, Which, lanczos
from fldiag.diagnostics.linalg.operator import Block, Matrix, Operator
from fldiag.diagnostics.operators import block_index, block_names
from fldiag.diagnostics.piecewise import within_a_layer
from fldiag.diagnostics.problem import Problem
from fldiag.errors import FldiagError
from fldiag.registry import diagnostic
from fldiag.results.table import table

Progress = Callable[[int, int, str], None]
Row = dict[str, Any]

#: Relative rounding error of a product: what is smaller than this share of the matrix's norm counts as zero.
NOISE = {torch.float32: 1e-6, torch.float64: 1e-12}
#: The ratio reported is lambda_1 over this eigenvalue (or over the last one, when fewer are asked for).
RATIO_INDEX = 5


def default_products(k: int) -> int:
    """Hessian-vector products allowed for k eigenpairs when nobody says how many."""
    return max(100, 8 * k)


def eigenpairs(problem: Problem, k: int = 5, *, which: Which = "largest", tol: float = 1e-3,
               max_products: int = 100, miss: float = 0.05, seed: int = 0, matrix: Matrix = "hessian",
               params: str | Sequence[str] | None = None, operator: Operator | None = None,
               strict: bool = False, progress: Progress | None = None) -> EigenPairs:
    """The k leading eigenpairs of the Hessian (or Gauss-Newton matrix) at ``problem.w``; see ``lanczos``.

    ``params``: only the block of the tensors whose names match a pattern such as ``features.*`` or are listed;
    the vectors have one entry per weight of the block, in order. ``operator``: reuse this one; else the block of a
    single layer is multiplied in the form of ``in_form``.

    Raises FldiagError when the probe finds a culprit, a product is not finite or no tensor matches.
    """
    whole = problem.hessian(matrix=in_form(problem, matrix, params)) if operator is None else operator
    product: Operator | Block = whole if params is None else Block(whole, block_index(problem, params))
    limit = basis_limit(problem, k, product.size)
    return lanczos(product, product.size, k, which=which, tol=tol, max_products=max_products, miss=miss,
                   noise=NOISE[problem.dtype], limit=limit, strict=strict, seed=seed, device=problem.device, progress=progress)


def basis_limit(problem: Problem, k: int, size: int) -> int:
    """Vectors that each of the two sequences of ``lanczos`` may hold."""
    # the basis is double precision; below k + 8 vectors a restart would never converge
    return min(max(100, 3 * k + 20), max(k + 8, problem.memory // 4 // (8 * size)))


def in_form(problem: Problem, matrix: Matrix, params: str | Sequence[str] | None) -> Matrix:
    """``ggn`` where the Hessian's block of these tensors is that of the Gauss-Newton matrix: of one layer in a network that
    is piecewise linear in each layer's weights. The products then have no negative curvature but rounding."""
    return "ggn" if params is not None and within_a_layer(problem, block_names(problem, params)) else matrix


def strict_pairs(problem: Problem, k: int, *, which: Which = "largest", tol: float = 1e-3, matrix: Matrix = "hessian",
                 max_products: int, seed: int = 0, operator: Operator | None = None,
                 progress: Progress | None = None) -> EigenPairs:
    """``eigenpairs`` of the whole matrix with residuals within ``tol``, found once per problem."""
    return problem.recall(("eigenpairs", k, which, tol, matrix, max_products, seed), lambda: eigenpairs(
        problem, k, which=which, tol=tol, matrix=matrix, max_products=max_products, seed=seed, operator=operator,
        strict=True, progress=progress))


def finite_loss(problem: Problem) -> tuple[float, float | None]:
    """``problem.loss()``, found once. Raises FldiagError when it is not finite."""
    value, stderr = problem.recall("loss", problem.loss)
    if not np.isfinite(value):
        raise FldiagError(f"the loss on slice {problem.slice_name!r} is {value}",
                          "diagnose a checkpoint from before the training diverged")
    return value, stderr


def loss_row(problem: Problem) -> Row:
    """The mean loss at the weights. Raises FldiagError when it is not finite."""
    value, stderr = finite_loss(problem)
    return {"metric": "loss", "value": value, "stderr": stderr, "estimator": "exact"}


def eigenvalue_rows(pairs: EigenPairs, *, noise: float = NOISE[torch.float32], which: Which = "largest",
                    matrix: Matrix = "hessian", estimator: str = "lanczos") -> list[Row]:
    """A row per eigenvalue (index from 1), and the ratio lambda_1 / lambda_5 with its first-order error.

    No ratio from the lower end of the spectrum, nor to an eigenvalue that is zero within its residual or within rounding
    (``noise``, relative to the largest one).
    """
    values, residuals, converged = pairs.values, pairs.residuals, pairs.converged
    common: Row = {"estimator": estimator, "which": which, "matrix": matrix}
    rows: list[Row] = [
        {**common, "metric": "eigenvalue", "index": i + 1, "value": float(values[i]), "residual": float(residuals[i]),
         "converged": bool(converged[i])} for i in range(len(values))]
    if which == "smallest":
        return rows
    last = min(RATIO_INDEX, len(values)) - 1
    top, low = float(values[0]), float(values[last])
    zero = abs(low) <= max(float(residuals[last]), noise * float(np.abs(values).max()))
    ratio = None if zero else top / low
    error = None
    if ratio is not None and last:
        error = (float(residuals[0]) + abs(ratio) * float(residuals[last])) / abs(low)
    rows.append({**common, "metric": "eigenvalue_ratio", "index": last + 1, "value": ratio, "residual": error,
                 "converged": bool(converged[0] and converged[last])})
    return rows


@diagnostic("spectrum")
def spectrum(problem: Problem, progress: Progress | None = None, *, k: Annotated[int, Field(ge=1)] = 5,
             which: Which = "largest", tol: Annotated[float, Field(gt=0, lt=1)] = 1e-3,
             max_products: Annotated[int, Field(ge=1)] | None = None, matrix: Matrix = "hessian",
             params: str | None = None, per_layer: bool = False, strict: bool = False, seed: int = 0) -> pd.DataFrame:
    """Top-k Hessian eigenvalues with residuals, lambda_1 / lambda_5, and the loss.

    Rows ``loss`` (with its standard error over the examples), ``eigenvalue`` (index 1..k, each with the
    residual ||Hv - lambda v||: an eigenvalue lies that close) and ``eigenvalue_ratio`` (not from the smallest ones, nor to
    a zero one); columns ``which`` (largest, smallest, magnitude) and ``matrix``. ``tol`` is the
    relative error of every eigenvalue; ``converged`` is false where ``max_products`` Hessian-vector products
    (default: 100, or 8 k) did not reach it, or did not suffice to look for missed eigenvalues. ``matrix``:
    hessian, or ggn (Gauss-Newton). ``params``: only the diagonal block of the tensors whose names match this
    pattern (``features.*``), named in ``layer``. ``strict``: also the residuals are within ``tol``, not only the errors that
    follow from them (a few products more; ``density`` on the same problem then reuses the pairs). ``per_layer``: also the
    first eigenvalue of every layer's own block (weight and bias). Where the network is piecewise linear in each layer's
    weights, the block of a single layer is the same in both matrices and taken from the Gauss-Newton matrix (estimator
    ``lanczos-ggn``). Cost: about 15 to 20 products at a minimum (30 to 60 near the initialisation), each worth 1.2 to 2
    gradients of the slice; ``per_layer`` about 10 more a layer.

    Raises FldiagError when the loss is not finite or not a function of the weights alone, or no tensor matches.
    """
    rows = [loss_row(problem)]
    budget, forms = max_products or default_products(k), {matrix: problem.hessian(matrix=matrix)}
    labels = [] if not per_layer else [*problem.layout.layers]
    pieces = [(params, params, k), *((label or "(model)", list(problem.layout.layers[label]), 1) for label in labels)]
    for done, (label, block, count) in enumerate(pieces):
        def tell(at: int, total: int, text: str, label: str | None = label, done: int = done) -> None:
            if progress:
                where = f"{label}: {text}" if done else text
                progress(done * total + at, len(pieces) * total, where)

        form = in_form(problem, matrix, block)
        if form not in forms:
            for other in forms.values():  # so that only one keeps its graphs
                other.release()
            forms[form] = problem.hessian(matrix=form)
        if strict and block is None:
            pairs = strict_pairs(problem, count, which=which, tol=tol, matrix=matrix, max_products=budget, seed=seed,
                                 operator=forms[form], progress=tell)
        else:
            pairs = eigenpairs(problem, count, which=which, tol=tol, max_products=budget, seed=seed, params=block,
                               operator=forms[form], strict=strict, progress=tell)
        found = eigenvalue_rows(pairs, noise=NOISE[problem.dtype], which=which, matrix=matrix,
                                estimator="lanczos" if form == matrix else f"lanczos-{form}")
        rows += [{**row, "layer": label} for row in (found[:1] if done else found)]
    return table(rows, **problem.common)
