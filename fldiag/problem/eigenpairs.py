"""Eigenpairs of a problem's curvature, with what decides that they may be trusted, and their rows in a result table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fldiag.choices import Matrix, Which
from fldiag.curvature.lanczos import EigenPairs, lanczos
from fldiag.curvature.operator import Operator, OperatorBlock
from fldiag.device import memory as installed_memory
from fldiag.errors import FldiagError
from fldiag.problem.exact_curvature import within_a_layer
from fldiag.problem.operators import block_index, block_names
from fldiag.problem.problem import Problem
from fldiag.problem.scores import Scores
from fldiag.registry import Progress
from fldiag.results.standing import ERRORS, guess_accuracy
from fldiag.results.table import Row

#: Relative rounding error of a product: what is smaller than this share of the matrix's norm counts as zero.
NOISE = {torch.float32: 1e-6, torch.float64: 1e-12}
#: The ratio reported is lambda_1 over this eigenvalue (or over the last one, when fewer are asked for).
RATIO_INDEX = 5


def noise_of(problem: Problem) -> float:
    """``NOISE``, or the error of products by differences."""
    return max(NOISE[problem.dtype], problem.step.error if problem.by_differences else 0.0)


def default_products(k: int) -> int:
    """Hessian-vector products allowed for k eigenpairs when nobody says how many."""
    return max(100, 8 * k)


#: Up to so many eigenpairs of a smaller model mean all of them; who asks for more of too small a model is mistaken.
FEW = 10


def eigenpairs(
    problem: Problem,
    k: int = 5,
    *,
    which: Which = "largest",
    tol: float = 1e-3,
    max_products: int = 100,
    miss: float = 0.05,
    seed: int = 0,
    matrix: Matrix = "hessian",
    params: str | Sequence[str] | None = None,
    operator: Operator | None = None,
    strict: bool = False,
    progress: Progress | None = None,
) -> EigenPairs:
    """The k leading eigenpairs of the Hessian (or Gauss-Newton matrix) at ``problem.w``; see ``lanczos``.

    ``params``: only the block of the tensors whose names match a pattern such as ``features.*`` or are listed;
    the vectors have one entry per weight of the block, in order. ``operator``: reuse this one; else the block of a
    single layer is multiplied in the form of ``choose_matrix``.

    Raises FldiagError when the probe finds a culprit, a product is not finite or no tensor matches.
    """
    if operator is None:
        operator = problem.hessian(matrix=choose_matrix(problem, matrix, params))
    product: Operator | OperatorBlock = operator
    if params is not None:
        product = OperatorBlock(operator, block_index(problem, params))
    limit = basis_limit(problem, k, product.size)
    return lanczos(
        product,
        product.size,
        k,
        which=which,
        tol=tol,
        max_products=max_products,
        miss=miss,
        noise=noise_of(problem),
        limit=limit,
        strict=strict,
        seed=seed,
        device=problem.device,
        dtype=problem.dtype,
        progress=progress,
    )


def check_count(k: int, size: int) -> None:
    """Refuse more eigenpairs than there are weights (but ``FEW``), or than this machine's memory holds vectors of."""
    if k > max(size, FEW):
        raise FldiagError(
            f"k = {k:,}, and the model has {size:,} weights",
            "ask for fewer eigenvalues",
            usage=True,
        )
    k = min(k, size)
    nbytes, memory = 8 * size * (k + 8), installed_memory()
    if nbytes > memory:
        raise FldiagError(
            f"k = {k:,} eigenvectors of {size:,} weights take {nbytes / 1e9:,.0f} GB, and this machine has "
            f"{memory / 1e9:,.0f} GB of memory",
            "ask for fewer eigenvalues",
            usage=True,
        )


def basis_limit(problem: Problem, k: int, size: int) -> int:
    """Vectors that each of the two sequences of ``lanczos`` may hold."""
    # as many as fit in double precision, in which single precision takes half; below k + 8 a restart would never converge
    return min(max(100, 3 * k + 20), max(k + 8, problem.memory // 4 // (8 * size)))


def choose_matrix(problem: Problem, matrix: Matrix, params: str | Sequence[str] | None) -> Matrix:
    """``ggn`` where the Hessian's block of these tensors is that of the Gauss-Newton matrix: of one layer in a network that
    is piecewise linear in each layer's weights. The products then have no negative curvature but rounding."""
    if params is None or problem.by_differences:
        return matrix
    return "ggn" if within_a_layer(problem, block_names(problem, params)) else matrix


def strict_pairs(
    problem: Problem,
    k: int,
    *,
    which: Which = "largest",
    tol: float = 1e-3,
    matrix: Matrix = "hessian",
    max_products: int,
    seed: int = 0,
    **others: Any,
) -> EigenPairs:
    """``eigenpairs`` of the whole matrix with residuals within ``tol``, computed once per problem.

    ``others``: operator and progress, which decide nothing.
    """
    options: dict[str, Any] = {
        "which": which,
        "tol": tol,
        "matrix": matrix,
        "max_products": max_products,
        "seed": seed,
    }
    return problem.recall(
        ("eigenpairs", k, *options.values()),
        lambda: eigenpairs(problem, k, **options, strict=True, **others),
    )


def finite_scores(problem: Problem) -> Scores:
    """``problem.scores()``, computed once. Raises FldiagError when the loss is not finite."""
    scores = problem.recall("scores", problem.scores)
    if not np.isfinite(scores.loss):
        raise FldiagError(
            f"the loss on slice {problem.slice_name!r} is {scores.loss}",
            "diagnose a checkpoint from before the training diverged",
        )
    return scores


def loss_rows(problem: Problem) -> list[Row]:
    """The mean loss at the weights, and the accuracy where the loss is a classification. Column ``guess``: what a guess gives.

    Raises FldiagError when the loss is not finite.
    """
    return rows_of_scores(problem, finite_scores(problem))


def rows_of_scores(problem: Problem, scores: Scores) -> list[Row]:
    """The rows ``loss`` and, of a classification, ``accuracy``, of scores on the problem's slice."""
    stderr = None if scores.each is None else problem.stderr(scores.each)
    common: Row = {"estimator": "exact", "inputs": problem.inputs}
    rows: list[Row] = [
        {
            **common,
            "metric": "loss",
            "value": scores.loss,
            "stderr": stderr,
            "guess": scores.guess_loss,
        }
    ]
    if scores.right is None:
        return rows
    entropy = scores.guess_loss is not None and math.isclose(
        scores.guess_loss - scores.penalty, math.log(len(scores.shares)), rel_tol=1e-3
    )
    bound = scores.loss - scores.penalty + ERRORS * (stderr or 0.0) if entropy else math.inf
    return [
        *rows,
        {
            **common,
            "metric": "accuracy",
            "value": scores.accuracy,
            "stderr": scores.accuracy_stderr,
            "guess": guess_accuracy(scores.shares, problem.slice_name, bound),
        },
    ]


def eigenvalue_rows(
    pairs: EigenPairs,
    *,
    noise: float = NOISE[torch.float32],
    which: Which = "largest",
    matrix: Matrix = "hessian",
    estimator: str = "lanczos",
) -> list[Row]:
    """A row per eigenvalue (index from 1), and the ratio lambda_1 / lambda_k (index k: 5, or the last) with its
    first-order error.

    No ratio from the lower end of the spectrum, nor to an eigenvalue that is zero within its residual or within rounding
    (``noise``, relative to the largest one).
    """
    values, residuals, converged = pairs.values, pairs.residuals, pairs.converged
    common: Row = {"estimator": estimator, "which": which, "matrix": matrix}
    rows: list[Row] = [
        {
            **common,
            "metric": "eigenvalue",
            "index": i + 1,
            "value": float(values[i]),
            "residual": float(residuals[i]),
            "converged": bool(converged[i]),
        }
        for i in range(len(values))
    ]
    if which == "smallest" or len(rows) < 2:
        return rows
    last = min(RATIO_INDEX, len(values)) - 1
    top, low = float(values[0]), float(values[last])
    zero = abs(low) <= max(float(residuals[last]), noise * float(np.abs(values).max()))
    ratio = None if zero else top / low
    error = None
    if ratio is not None:
        error = (float(residuals[0]) + abs(ratio) * float(residuals[last])) / abs(low)
    rows.append(
        {
            **common,
            "metric": "eigenvalue_ratio",
            "index": last + 1,
            "value": ratio,
            "residual": error,
            "converged": bool(converged[0] and converged[last]),
        }
    )
    return rows
