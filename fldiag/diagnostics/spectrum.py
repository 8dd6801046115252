"""The leading eigenvalues of the Hessian: how sharp the minimum is, and in how many directions.

lambda_1 and lambda_1 / lambda_5 are the sharpness measures of Jastrzebski et al. (2020), reported for
federated models by Lee et al. (CVPR 2024); the top eigenvalue by Mendieta et al. (CVPR 2022).
"""

from __future__ import annotations

from typing import Annotated

import pandas as pd
from pydantic import Field

from fldiag.curvature.lanczos import Which
from fldiag.curvature.operator import Matrix
from fldiag.problem.eigenpairs import (
    NOISE,
    default_products,
    eigenpairs,
    eigenvalue_rows,
    in_form,
    loss_row,
    strict_pairs,
)
from fldiag.problem.problem import Problem
from fldiag.registry import Progress, diagnostic
from fldiag.results.table import table


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
