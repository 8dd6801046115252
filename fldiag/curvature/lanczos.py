"""Eigenpairs of a symmetric operator, each with a residual computed from measured products.

Lanczos with full reorthogonalisation (Parlett, *The Symmetric Eigenvalue Problem*, ch. 13), written as Rayleigh-Ritz on a growing
orthonormal basis: of every product the coefficients on the whole basis are kept as they were measured, and the residuals
||H x - theta x|| follow from them, whatever rounding did to the recurrence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fldiag.curvature.operator import Operator
from fldiag.sections import Which
from fldiag.seeding import torch_rng

#: How near an eigenvalue is to the end of the spectrum that is searched.
HEIGHT: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "largest": np.positive,
    "smallest": np.negative,
    "magnitude": np.abs,
}
#: Allowed probability of having overlooked an eigenvalue.
MISS = 0.05


@dataclass(frozen=True)
class EigenPairs:
    """What ``lanczos`` returns.

    Args:
        values: [k] in the order asked for.
        vectors: [k, P] of unit norm in float64, the largest entry of each positive.
        residuals: [k], ||H x - theta x||; an eigenvalue lies within it.
        bounds: [k], min(residual, residual^2 / gap), which holds if no eigenvalue was overlooked in the gap.
        converged: [k], whether the error is within the tolerance, and the search for overlooked eigenvalues is over.
        products: that were spent.
    """

    values: np.ndarray
    vectors: Tensor
    residuals: np.ndarray
    bounds: np.ndarray
    converged: np.ndarray
    products: int


class Krylov:
    """Orthonormal rows, and the products of the first ``done`` of them as coefficients on all rows.

    Rows are kept in ``dtype``, sums are in float64. ``noise``: relative rounding error of a product.
    """

    def __init__(self, size: int, noise: float, device: torch.device, dtype: torch.dtype):
        self.size, self.noise, self.device, self.dtype = size, noise, device, dtype
        self.rows: list[Tensor] = []
        self.columns: list[np.ndarray] = []
        self.dropped: list[float] = []  # of every product the length that became no row
        self.scale = 0.0

    @property
    def done(self) -> int:
        return len(self.columns)

    def reduce(self, v: Tensor) -> Tensor:
        """Subtract the part of v in the rows, in place; its coefficients."""
        total, wide = v.new_zeros(len(self.rows)), torch.empty_like(v)
        for _ in range(2):  # once leaves what cancellation hid
            for i, row in enumerate(self.rows):
                wide.copy_(row)  # new memory for each row would cost as much as the sums
                coefficient = wide @ v
                v.sub_(wide.mul_(coefficient))
                total[i] += coefficient
        return total

    def append(self, v: Tensor) -> None:
        """Make what is new in v another row, unless that is rounding."""
        before = float(v.norm())
        self.reduce(v)
        length = float(v.norm())
        if length > self.noise * before and len(self.rows) < self.size:
            self.rows.append((v / length).to(self.dtype))

    def append_random(
        self, seed: int, number: int, project: Callable[[Tensor], Tensor] = torch.clone
    ) -> None:
        """Append a random row of the projection's range."""
        rng = torch_rng(seed, "lanczos start", number)
        start = torch.randn(self.size, dtype=torch.float64, generator=rng)
        self.append(project(start.to(self.device)))

    def step(self, operator: Operator) -> None:
        """Multiply the first row that waits for it; what is new in the product becomes a row."""
        product = operator(self.rows[self.done].double())
        self.scale = max(self.scale, float(product.norm()))
        coefficients = self.reduce(product)
        length = float(product.norm())
        if length > self.noise * self.scale and len(self.rows) < self.size:
            self.rows.append((product / length).to(self.dtype))
            coefficients = torch.cat([coefficients, coefficients.new_tensor([length])])
            length = 0.0
        self.dropped.append(length)
        self.columns.append(coefficients.cpu().numpy())

    def coefficients(self) -> np.ndarray:
        """The products on the rows [rows, done]."""
        matrix = np.zeros((len(self.rows), self.done))
        for j, column in enumerate(self.columns):
            matrix[: len(column), j] = column
        return matrix

    def ritz(self, which: Which) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ritz values in the order asked for, their coefficients on the rows, and what H leaves beside them [rows + 1, done]: on
        the rows, and at most beyond."""
        matrix, m = self.coefficients(), self.done
        theta, y = np.linalg.eigh((matrix[:m] + matrix[:m].T) / 2)
        order = np.argsort(-HEIGHT[which](theta), kind="stable")
        theta, y = theta[order], y[:, order]
        rest = matrix @ y
        rest[:m] -= y * theta
        return theta, y, np.vstack([rest, np.array(self.dropped) @ np.abs(y)])

    def combine(self, y: np.ndarray) -> Tensor:
        """Combinations of the rows with coefficients [done, k], as unit vectors [k, P]."""
        vectors = torch.zeros(y.shape[1], self.size, dtype=torch.float64, device=self.device)
        for row, c in zip(self.rows, torch.from_numpy(y).to(self.device), strict=False):
            vectors.addr_(c, row.double())
        return vectors / vectors.norm(dim=1, keepdim=True)

    def restart(self, count: int, which: Which) -> None:
        """Keep only the best Ritz vectors and the rows that wait, with their products (Wu and Simon, SIMAX 2000)."""
        theta, y, rest = self.ritz(which)
        waiting = self.rows[self.done :]
        vectors = self.combine(y[:, :count])
        diagonal = np.diag(theta[:count])
        self.columns = [np.append(diagonal[i], rest[self.done : -1, i]) for i in range(count)]
        self.rows, self.dropped = [*vectors.to(self.dtype), *waiting], list(rest[-1, :count])


def lanczos(
    operator: Operator,
    size: int,
    k: int,
    *,
    which: Which = "largest",
    tol: float = 1e-3,
    max_products: int = 100,
    strict: bool = False,
    noise: float = 1e-6,
    limit: int = 100,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
    progress: Callable[[int, int, str], None] | None = None,
) -> EigenPairs:
    """The k eigenpairs at one end of the spectrum of a symmetric operator.

    Error bounds rely on the gaps to other Ritz values, and a Ritz vector may mix two close eigenvectors. So after convergence a
    second sequence, from a random vector orthogonal to the k vectors, looks for an eigenvalue in the gaps or beyond; what it
    finds joins the basis, and the iteration goes on.

    Args:
        operator: v [P] -> Hv [P] in float64.
        size: P.
        k: eigenpairs; min(k, P) are returned, or fewer if ``max_products`` is smaller.
        which: largest or smallest (algebraic), or largest magnitude.
        tol: relative error of every eigenvalue.
        max_products: products allowed.
        strict: the residuals, too, must be within ``tol``: the vectors are then as accurate as their gaps allow.
        noise: relative rounding error of a product; what is below noise * ||H|| counts as zero.
        limit: rows of the basis, from which on it restarts from the best.
        seed: of the random starts.
        device: of the vectors.
        dtype: in which rows are kept.
        progress: is called with (products, max_products, what is done).

    Returns:
        Eigenvalues, vectors and residuals; those that did not converge say so.

    >>> pairs = lanczos(lambda v: torch.tensor([3.0, 1.0, 2.0]).double() * v, 3, 2)
    >>> pairs.values.round(6).tolist(), pairs.converged.tolist()
    ([3.0, 2.0], [True, True])
    """
    k, limit, device, height = min(k, size), max(limit, k + 8), torch.device(device), HEIGHT[which]
    main = Krylov(size, noise, device, dtype)
    products, starts, overlooked = 0, 0, 1.0

    def multiply(v: Tensor) -> Tensor:
        nonlocal products
        products += 1
        if progress:
            progress(products, max_products, "eigenvalues")
        return operator(v)

    while True:
        if main.done == len(main.rows):
            main.append_random(seed, starts)
            starts += 1
        main.step(multiply)
        theta, y, rest = main.ritz(which)
        # rows are rounded, too
        residuals = np.hypot(np.linalg.norm(rest, axis=0), noise / 10 * main.scale)
        sizes = np.abs(theta[:k])
        if which == "smallest":  # no relative error is ever reached of what lies near zero
            sizes = np.where(sizes <= tol * main.scale, main.scale, sizes)
        slack = np.maximum(tol * sizes, noise * main.scale)
        bounds = _bounds(theta, residuals, k)
        accurate = (residuals[:k] if strict else bounds) <= slack
        if main.done == size:
            overlooked = 0.0
        elif len(accurate) == k and accurate.all():
            beyond = [s if r <= s else -(r**2) / s for r, s in zip(residuals, slack, strict=False)]
            edge = float((height(theta[:k]) + beyond).min())
            found, overlooked = _search(
                multiply,
                main.combine(y[:, :k]),
                Krylov(size, noise, device, dtype),
                (seed, starts),
                which,
                edge,
                lambda risk: risk > MISS and products < max_products,
            )
            starts += 1
            if found is not None and products < max_products:
                main.append(found)
                continue
        if overlooked <= MISS or products >= max_products:
            break
        if len(main.rows) >= limit:
            main.restart(max(k + 2, limit // 2), which)
    vectors = main.combine(y[:, :k])
    largest = vectors.gather(1, vectors.abs().argmax(1, keepdim=True))
    converged = accurate & (overlooked <= MISS)
    vectors = vectors * largest.sign()
    return EigenPairs(theta[:k], vectors, residuals[:k], bounds, converged, products)


def _search(
    operator: Operator,
    vectors: Tensor,
    second: Krylov,
    start: tuple[int, int],
    which: Which,
    edge: float,
    goes_on: Callable[[float], bool],
) -> tuple[Tensor | None, float]:
    """A vector beside ``vectors`` [k, P] whose height is above ``edge``, if one shows; and the probability that one has not."""

    def outside(v: Tensor) -> Tensor:
        return v - (vectors @ v) @ vectors

    ends = [edge, -edge] if which == "magnitude" else [float(HEIGHT[which](np.array(edge)))]
    second.append_random(*start, outside)
    overlooked = 1.0
    while goes_on(overlooked) and second.done < len(second.rows):
        second.step(lambda v: outside(operator(v)))
        values, y, _ = second.ritz(which)
        if HEIGHT[which](values)[0] > edge:
            return second.combine(y[:, :1])[0], 1.0
        overlooked = max(unseen(end, second, second.size - len(vectors)) for end in ends)
    return None, overlooked


def _bounds(theta: np.ndarray, residuals: np.ndarray, k: int) -> np.ndarray:
    """Error bounds of the first k values: residual, or its square over the gap (Parlett, 11.7)."""
    distance = np.abs(theta[:k, None] - theta[None, :]) - residuals[None, :]
    np.fill_diagonal(distance, np.inf)
    gap = distance.min(axis=1) if len(theta) > k else np.zeros(len(theta))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.minimum(residuals[:k], np.where(gap > 0, residuals[:k] ** 2 / gap, np.inf))


def unseen(point: float, sequence: Krylov, dimension: int) -> float:
    """How probably has a sequence from a random start not shown an eigenvalue at or beyond ``point``?

    Its tridiagonal matrix bounds the share of the start vector that can lie there by 1 / sum_i p_i(point)^2 with its orthonormal
    polynomials (Chebyshev, Markov, Stieltjes); of a random start a share below s has a probability of at most
    sqrt(2 / pi * s * dimension).
    """
    before, last, beta, total = 0.0, 1.0, 0.0, 1.0
    for j, column in enumerate(sequence.columns, start=1):
        if len(column) <= j:  # the sequence ended: all of the start vector was seen
            return 0.0
        before, last = last, ((point - column[-2]) * last - beta * before) / column[-1]
        beta = column[-1]
        total += last**2
    return min(1.0, math.sqrt(2 / math.pi * dimension / total))


def quadrature(
    operator: Operator, start: Tensor, steps: int, noise: float
) -> tuple[np.ndarray, np.ndarray]:
    """The Gauss rule of an operator's spectral measure (Golub and Meurant, 1994).

    Args:
        operator: v [P] -> Hv [P] in float64.
        start: the vector [P] whose measure it is.
        steps: nodes at most.
        noise: relative rounding error of a product.

    Returns:
        Nodes, and weights that sum to 1.
    """
    sequence = Krylov(len(start), noise, start.device, torch.float64)
    sequence.append(start.double().clone())
    while sequence.done < min(steps, len(sequence.rows)):
        sequence.step(operator)
    nodes, y, _ = sequence.ritz("largest")
    return nodes, y[0] ** 2
