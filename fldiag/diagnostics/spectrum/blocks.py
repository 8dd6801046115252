"""The leading eigenvalues of the whole matrix, or of the diagonal block of some tensors."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fldiag.choices import Fisher, Matrix, Which
from fldiag.curvature.operator import Operator
from fldiag.errors import FldiagError
from fldiag.execution.workspace import workspace
from fldiag.problem.eigenpairs import (
    choose_matrix,
    eigenpairs,
    eigenvalue_rows,
    noise_of,
    strict_pairs,
)
from fldiag.problem.fisher import LabelledFisher, fisher_operator
from fldiag.problem.operators import block_index, block_names
from fldiag.problem.problem import Problem
from fldiag.results.table import Row, Vectors
from fldiag.seeding import numpy_rng

#: At most so many minibatches have an eigenvalue of their own.
MINIBATCHES = 20


@dataclass(frozen=True)
class Block:
    """The tensors that match a pattern or are listed (None: all), and how many eigenvalues are computed."""

    tensors: str | tuple[str, ...] | None
    k: int
    layer: str | None
    is_single_layer: bool = False

    @staticmethod
    def without(problem: Problem, params: str | None, not_params: str, k: int) -> Block:
        """The block of the tensors that match ``params`` (None: all) and do not match ``not_params``."""
        names = block_names(problem, "*" if params is None else params)
        rest = tuple(n for n in names if not fnmatch.fnmatchcase(n, not_params))
        if len(rest) == len(names):
            block_names(problem, not_params, "not_params")  # raises with the nearest name
        if rest in ((), tuple(names)):
            raise FldiagError(
                f"not_params = {not_params!r} {'leaves no' if not rest else 'leaves out no'} parameter of the block",
                f"its parameters: {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}",
                usage=True,
            )
        return Block(rest, k, f"{'' if params is None else f'{params} '}without {not_params}")

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
    matrix: Matrix | Fisher,
    max_products: int,
    strict: bool,
    save_vectors: bool = False,
    draws: int = 1,
    seed: int,
) -> list[Row]:
    """The rows ``eigenvalue`` of a block, with ``cross_block``, and ``eigenvalue_ratio`` where it is not a single layer's.

    With ``save_vectors`` the rows hold their eigenvectors [p] too (``vector``; not of a single layer)."""
    operator: Operator
    form: str
    if matrix == "hessian" or matrix == "ggn":
        form = choose_matrix(problem, matrix, block.tensors)
        operator = problem.hessian(matrix=form)
    else:
        form = "ggn" if matrix == "fisher" else matrix
        operator = fisher_operator(problem, matrix, draws=draws, seed=seed)
    if strict and block.tensors is None and (matrix == "hessian" or matrix == "ggn"):
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
    names = "*" if block.tensors is None else block.tensors
    index = block_index(problem, names)
    if isinstance(operator, LabelledFisher) and matrix == "fisher-mc" and draws > 1:
        for row, vector in zip(rows[: len(pairs.values)], pairs.vectors, strict=True):
            of_draws = operator.quotients(padded(vector, operator, index))
            row["stderr"] = float(of_draws.std()) / draws**0.5
    if block.tensors is None:
        return rows
    if matrix == "hessian" and form == "ggn":
        operator.release()  # so that only one keeps its graphs
        operator = problem.hessian()
    for row, vector in zip(rows[: len(pairs.values)], pairs.vectors, strict=True):
        row["cross_block"] = length_outside(operator, index, vector)
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


def length_outside(operator: Operator, index: Tensor, vector: Tensor) -> float:
    """The length of M x outside a block, for a vector x [p] within it: what the block leaves out of the product with x.

    For a unit eigenvector of the block with residual r an eigenvalue of the whole matrix M lies within sqrt(r^2 + this^2) of
    the block's, because these are the parts of the residual in M.
    """
    product = operator(padded(vector, operator, index))
    product[index] = 0
    return float(product.norm())


def padded(vector: Tensor, operator: Operator, index: Tensor) -> Tensor:
    """A block's vector [p] as one of all weights [P], with zeros outside the block."""
    weights = vector.new_zeros(operator.size)
    weights[index] = vector
    return weights


def minibatch_indices(n: int, size: int, seed: int) -> list[list[int]]:
    """Disjoint random minibatches of so many of n examples, at most ``MINIBATCHES``."""
    order = numpy_rng(seed, "minibatches of the spectrum").permutation(n)
    return [order[i * size : (i + 1) * size].tolist() for i in range(min(n // size, MINIBATCHES))]


def minibatch_rows(
    problem: Problem,
    examples: list[int],
    *,
    tol: float,
    max_products: int,
    matrix: Matrix | Fisher,
    draws: int,
    seed: int,
) -> list[Row]:
    """The row ``minibatch_eigenvalue`` of a minibatch: its own largest eigenvalue."""
    part = problem.on(examples, f"minibatch of {problem.slice_name}")
    block = Block(None, 1, None)
    rows = block_rows(
        part,
        block,
        which="largest",
        tol=tol,
        matrix=matrix,
        max_products=max_products,
        strict=False,
        draws=draws,
        seed=seed,
    )
    about: Row = {"metric": "minibatch_eigenvalue", "slice": part.slice_name, "n_examples": part.n}
    return [{**rows[0], **about}]


def distribution_rows(rows: list[Row], size: int) -> list[Row]:
    """The rows of minibatches, numbered, and their mean with its standard error and deviation."""
    values = np.array([row["value"] for row in rows])
    mean: Row = {
        "metric": "minibatch_eigenvalue_mean",
        "value": float(values.mean()),
        "n_minibatches": len(values),
        "slice": rows[0]["slice"],
        "n_examples": size,
        "estimator": rows[0]["estimator"],
        "which": "largest",
        "matrix": rows[0]["matrix"],
        "converged": all(row["converged"] for row in rows),
    }
    if len(values) > 1:
        deviation = float(values.std(ddof=1))
        mean |= {"stderr": deviation / len(values) ** 0.5, "deviation": deviation}
    return [*({**row, "index": i} for i, row in enumerate(rows, start=1)), mean]
