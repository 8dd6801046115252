"""The eigenvalues of the whole matrix and of its blocks."""

from __future__ import annotations

import pandas as pd
from torch import Tensor

from fldiag.choices import Matrix, Which
from fldiag.curvature.operator import Operator
from fldiag.problem.eigenpairs import (
    choose_matrix,
    default_products,
    eigenpairs,
    eigenvalue_rows,
    loss_rows,
    noise_of,
    strict_pairs,
)
from fldiag.problem.operators import block_index
from fldiag.problem.problem import Problem
from fldiag.registry import Progress
from fldiag.results.table import Row, table


def eigenvalues(
    problem: Problem,
    progress: Progress | None,
    k: int,
    which: Which,
    tol: float,
    max_products: int | None,
    matrix: Matrix,
    params: str | None,
    per_layer: bool,
    strict: bool,
    seed: int,
) -> pd.DataFrame:
    rows = loss_rows(problem)
    budget, forms = max_products or default_products(k), {matrix: problem.hessian(matrix=matrix)}
    labels = [] if not per_layer else [*problem.layout.layers]
    pieces = [
        (params, params, k),
        *((label or "(model)", list(problem.layout.layers[label]), 1) for label in labels),
    ]
    blocks: list[tuple[list[Row], Tensor, Tensor]] = []
    for done, (label, block, count) in enumerate(pieces):

        def tell(
            at: int, total: int, text: str, label: str | None = label, done: int = done
        ) -> None:
            if progress:
                where = f"{label}: {text}" if done else text
                progress(done * total + at, len(pieces) * total, where)

        form = choose_matrix(problem, matrix, block)
        if form not in forms:
            for other in forms.values():  # so that only one keeps its graphs
                other.release()
            forms[form] = problem.hessian(matrix=form)
        if strict and block is None:
            pairs = strict_pairs(
                problem,
                count,
                which=which,
                tol=tol,
                matrix=matrix,
                max_products=budget,
                seed=seed,
                operator=forms[form],
                progress=tell,
            )
        else:
            pairs = eigenpairs(
                problem,
                count,
                which=which,
                tol=tol,
                max_products=budget,
                seed=seed,
                params=block,
                operator=forms[form],
                strict=strict,
                progress=tell,
            )
        found = eigenvalue_rows(
            pairs,
            noise=noise_of(problem),
            which=which,
            matrix=matrix,
            estimator=problem.estimator_name("lanczos" if form == matrix else f"lanczos-{form}"),
        )
        found = [{**row, "layer": label} for row in (found[:1] if done else found)]
        rows += found
        if block is not None:
            blocks.append((found[: len(pairs.values)], block_index(problem, block), pairs.vectors))
    for form, operator in forms.items():
        if form != matrix:
            operator.release()
    for found, index, vectors in blocks:
        for row, x in zip(found, vectors, strict=True):
            row["cross_block"] = left_out(forms[matrix], index, x)
    return table(rows, **problem.common)


def left_out(whole: Operator, index: Tensor, x: Tensor) -> float:
    """The length of M x outside a block, for a vector x [p] within it: what the block leaves out of the product with x.

    For a unit eigenvector of the block with residual r an eigenvalue of the whole matrix M lies within sqrt(r^2 + this^2) of
    the block's, because these are the parts of the residual in M.
    """
    within = x.new_zeros(whole.size)
    within[index] = x
    product = whole(within)
    product[index] = 0
    return float(product.norm())
