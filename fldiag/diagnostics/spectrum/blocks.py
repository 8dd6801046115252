"""The leading eigenvalues of the whole matrix, or of the diagonal block of some tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fldiag.choices import Matrix, Which
from fldiag.execution import workspace
from fldiag.problem.eigenpairs import (
    choose_matrix,
    eigenpairs,
    eigenvalue_rows,
    noise_of,
    strict_pairs,
)
from fldiag.problem.operators import block_names
from fldiag.problem.problem import Problem
from fldiag.results.table import Row, Vectors


@dataclass(frozen=True)
class Block:
    """The tensors that match a pattern or are listed (None: all), and how many eigenvalues are computed."""

    tensors: str | tuple[str, ...] | None
    k: int
    layer: str | None
    is_single_layer: bool = False

    def __str__(self) -> str:
        if self.tensors is None:
            return "whole matrix"
        return f"{'layer' if self.is_single_layer else 'block'} {self.layer}"


def block_rows(
    problem: Problem,
    block: Block,
    *,
    which: Which,
    tol: float,
    matrix: Matrix,
    max_products: int,
    strict: bool,
    save_vectors: bool = False,
    seed: int,
) -> list[Row]:
    """The rows ``eigenvalue`` of a block, and ``eigenvalue_ratio`` where it is not a single layer's.

    With ``save_vectors`` the rows hold their eigenvectors [p] too (``vector``; not of a single layer)."""
    form = choose_matrix(problem, matrix, block.tensors)
    operator = problem.hessian(matrix=form)
    if strict and block.tensors is None:
        pairs = strict_pairs(
            problem,
            block.k,
            which=which,
            tol=tol,
            matrix=matrix,
            max_products=max_products,
            seed=seed,
            operator=operator,
            progress=workspace().show,
        )
    else:
        pairs = eigenpairs(
            problem,
            block.k,
            which=which,
            tol=tol,
            max_products=max_products,
            seed=seed,
            params=block.tensors,
            operator=operator,
            strict=strict,
            progress=workspace().show,
        )
    rows = eigenvalue_rows(
        pairs,
        noise=noise_of(problem),
        which=which,
        matrix=matrix,
        estimator=problem.estimator_name("lanczos" if form == matrix else f"lanczos-{form}"),
    )
    rows = [{**row, "layer": block.layer} for row in (rows[:1] if block.is_single_layer else rows)]
    if save_vectors and not block.is_single_layer:
        for row, vector in zip(rows[: len(pairs.values)], pairs.vectors, strict=True):
            row["vector"] = vector.to("cpu", problem.dtype)
    return rows


def take_vectors(problem: Problem, block: Block, rows: list[Row]) -> Vectors:
    """The eigenvectors of a block, taken out of its rows: by tensor [k, ...]."""
    vectors = torch.stack([row.pop("vector") for row in rows if "vector" in row])
    names = block_names(problem, "*" if block.tensors is None else block.tensors)
    shapes = dict(zip(problem.layout.names, problem.layout.shapes, strict=True))
    parts = vectors.split([shapes[name].numel() for name in names], dim=1)
    return Vectors(
        {
            name: part.reshape(-1, *shapes[name]).contiguous()
            for name, part in zip(names, parts, strict=True)
        }
    )
