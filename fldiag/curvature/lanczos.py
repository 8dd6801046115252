"""Eigenpairs of a symmetric operator, each with a residual computed from measured products.

Lanczos with full reorthogonalisation (Lanczos 1950; Parlett, *The Symmetric Eigenvalue Problem*, ch. 13),
written as Rayleigh-Ritz on a growing orthonormal basis: for every processed basis vector the coefficients of
its product on the whole basis are kept, as they were measured. The residual ``||H x - theta x||`` of a Ritz
pair follows from them without a further product, and some eigenvalue lies within it of theta whatever
rounding did to the recurrence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from fldiag.choices import Which
from fldiag.curvature.basis import Krylov
from fldiag.curvature.iteration import Iteration, Ritz, height
from fldiag.errors import FldiagError

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class EigenPairs:
    """``values`` [k] in the order asked for, ``vectors`` [k, P] (rows, unit norm, largest entry positive).

    ``residuals`` [k] = ||H x - theta x||: an eigenvalue lies within it. ``bounds`` [k]: estimated error,
    min(residual, residual^2 / gap), where the search found no eigenvalue in the gap. ``converged`` [k] (bool):
    bound within the tolerance, and the search for overlooked eigenvalues came to its end. ``overlooked`` bounds the
    probability that this search overlooked one (1 without it, 0 when the whole space was seen). ``products``: how
    many were used. All but ``vectors`` are numpy arrays or numbers.
    """

    values: np.ndarray
    vectors: Tensor
    residuals: np.ndarray
    bounds: np.ndarray
    converged: np.ndarray
    products: int
    overlooked: float = 1.0


def lanczos(operator: Callable[[Tensor], Tensor], size: int, k: int, **options: Any) -> EigenPairs:
    """The k eigenpairs at one end of the spectrum of a symmetric operator ``v [P] -> [P]``, P = ``size``.

    ``options``: those of ``Search``. Returns min(k, P) pairs; those not converged within ``max_products`` say so.

    Raises FldiagError for a wrong option or a product that is not finite.
    """
    return Search(operator, size, k, **options).pairs()


@dataclass
class Search:
    """``lanczos`` with its options: see ``pairs``.

    An invariant subspace makes it start again from a new random vector, so repeated eigenvalues are found. Convergence relies
    on the gaps to other Ritz values, and a Ritz vector may mix two close eigenvectors: so after it a second sequence, from a
    random vector orthogonal to the k found, looks for an eigenvalue inside the gaps or beyond; if it finds one, the
    iteration goes on.

    Args:
        operator: v [P] -> [P].
        size: entries of a vector.
        k: eigenpairs.
        which: largest or smallest (algebraic), or largest magnitude.
        tol: relative error of every eigenvalue; of one of the smallest that lies within ``tol`` ||H|| of zero, that is allowed.
        max_products: products allowed.
        miss: the second sequence goes on until the probability of having overlooked an eigenvalue is at most this (0: no
            search).
        noise: relative rounding error of a product (1e-6 for float32, 1e-12 for float64); remainders and eigenvalues below
            noise * ||H|| count as zero.
        seed: of the random vectors.
        limit: with more basis vectors (default: 100, or 3 k + 20) it restarts from the best; the second sequence holds as many
            at most.
        strict: also the residuals must be within ``tol``, so that the vectors are as accurate as their gaps allow (the values
            are far more accurate then).
        device: where vectors are.
        dtype: in which basis vectors are kept and multiplied. In float32 they are orthonormal within 1.2e-7 (see ``Basis``).
            What rounding takes from a product's remainder is counted in the residuals, so these remain bounds for the vectors
            as they are kept. A value differs from the Rayleigh quotient of its vector by at most 6e-8 sqrt(n) ||H||, n the
            number of basis vectors: 6e-7 ||H|| for 100, which is below the rounding error of a product in float32.
        progress: called after every product.
    """

    operator: Callable[[Tensor], Tensor]
    size: int
    k: int
    _: KW_ONLY
    which: Which = "largest"
    tol: float = 1e-3
    max_products: int = 100
    miss: float = 0.05
    noise: float = 1e-6
    seed: int = 0
    limit: int | None = None
    strict: bool = False
    device: str | torch.device = "cpu"
    dtype: torch.dtype = torch.float64
    progress: Progress | None = None

    def __post_init__(self) -> None:
        if (
            self.k < 1
            or self.max_products < 1
            or not 0 < self.tol < 1
            or self.which not in get_args(Which)
        ):
            raise FldiagError(
                f"no eigenpairs for k = {self.k}, max_products = {self.max_products}, tol = {self.tol}, {self.which!r}",
                "k and max_products at least 1, 0 < tol < 1, which: largest, smallest or magnitude",
                usage=True,
            )
        self.k = min(self.k, self.size)
        self.basis_limit = max(self.limit or max(100, 3 * self.k + 20), self.k + 8)
        self.first = self._sequence()
        self.products = 0

    def _sequence(self) -> Iteration:
        return Iteration(
            self.size,
            self.which,
            self.noise,
            self.seed,
            torch.device(self.device),
            self.dtype,
        )

    def pairs(self) -> EigenPairs:
        """The eigenpairs, product by product."""
        risk, due = 1.0, 0
        while True:
            ritz = self._extend()
            due -= 1
            if due <= 0 and len(ritz.values) >= self.k and bool(self._accurate(ritz).all()):
                risk = self._look_again(ritz)
                if self._is_certain(risk):
                    break
                due = len(self.first.waiting)  # the overlooked vector lies in their span
            if self.products >= self.max_products or self._exhausted():
                break
        risk = 0.0 if self._exhausted() else risk
        k, vectors = self.k, self.first.vectors(ritz, self.k)
        converged = np.zeros(len(vectors), dtype=bool)
        if len(vectors) == k:
            converged = self._accurate(ritz) & self._is_certain(risk)
        return EigenPairs(
            ritz.values[:k],
            vectors,
            ritz.residuals[:k],
            ritz.bounds,
            converged,
            self.products,
            risk,
        )

    # -- convergence

    def _slack(self, values: np.ndarray) -> np.ndarray:
        sizes, norm = np.abs(values), self.first.scale
        if self.which == "smallest":  # no relative error is ever reached of what lies so near zero
            sizes = np.where(sizes <= self.tol * norm, norm, sizes)
        return np.maximum(self.tol * sizes, self.noise * norm)

    def _accurate(self, r: Ritz) -> np.ndarray:
        """Of the first k values whether they are within the tolerance."""
        return (r.residuals[: self.k] if self.strict else r.bounds) <= self._slack(
            r.values[: self.k]
        )

    def _is_certain(self, risk: float) -> bool:
        return risk <= self.miss or not self.miss

    def _exhausted(self) -> bool:
        """The whole space was seen."""
        return self.first.full and not self.first.waiting

    # -- the first sequence

    def _extend(self) -> Ritz:
        """One product more, and the Ritz pairs after it."""
        first = self.first
        j = first.waiting.pop(0) if first.waiting else first.append_random()
        if len(first.basis) >= self.basis_limit and len(first.processed) > self.k + 2:
            j = first.shrink(max(self.k + 2, self.basis_limit // 2), j)
        new = first.append_product(j, self.operator(first.basis[j]))
        first.waiting += [] if new is None else [new]
        ritz = first.bounded(self.k)
        self._count(ritz)
        return ritz

    def _count(self, r: Ritz) -> None:
        self.products += 1
        if self.progress:
            self.progress(
                self.products,
                self.max_products,
                f"{int(self._accurate(r).sum())} of {self.k} eigenvalues converged",
            )

    # -- the second sequence

    def _look_again(self, r: Ritz) -> float:
        """The probability that an eigenvalue beside the k found lies where the bounds need none; 1 when one does.

        The second sequence runs in the complement of the k vectors, not of the basis, where a neighbour that mixes
        with one of them would lie hidden.
        """
        first = self.first
        if first.full or not self.miss:
            return 0.0 if self._exhausted() else 1.0
        edge, deflated = self._edge(r)
        coefficients = torch.as_tensor(first.on_basis(r, deflated), device=first.device)
        outside = partial(first.basis.without, coefficients=coefficients)
        second = self._sequence()
        second.starts, first.starts = first.starts, first.starts + 1
        dimension = self.size - deflated
        ends = {"largest": [edge], "smallest": [-edge], "magnitude": [edge, -edge]}[self.which]
        unseen, risk = [Unseen(point, dimension) for point in ends], 1.0
        new: int | None = second.append_random(outside)
        while (
            risk > self.miss
            and self.products < self.max_products
            and new is not None
            and len(second.basis) <= self.basis_limit
        ):
            j, product = new, self.operator(second.basis[new])
            self._count(r)
            new = second.append_product(
                j, outside(product.to(first.device, torch.float64)), copy=False
            )
            ritz = second.ritz()
            if height(ritz.values, self.which)[0] > edge:
                first.process_next(second.vectors(ritz, 1)[0])
                return 1.0
            risk = self._risk(second, j, new, unseen) if len(second.basis) < dimension else 0.0
        return risk

    def _edge(self, r: Ritz) -> tuple[float, int]:
        """How far from the k found another eigenvalue must stay (as a ``height``) for their bounds to hold, and how many Ritz
        vectors may be deflated in the search for one beyond."""
        k, heights, slack = self.k, height(r.values, self.which), self._slack(r.values[: self.k])
        # a residual above the tolerance counts squared over the gap to the nearest other eigenvalue
        uncertain = r.residuals[:k] > slack
        reach = np.where(
            uncertain, -(r.residuals[:k] ** 2) / np.where(uncertain, slack, 1.0), slack
        )
        edge = float((heights[:k] + reach).min())
        deflated, fall = innocent(heights, r.residuals, edge, k)
        return edge - fall, deflated

    def _risk(self, second: Iteration, j: int, new: int | None, unseen: list[Unseen]) -> float:
        """The probability after the product of basis vector j, whose remainder became the vector ``new``."""
        column = second.columns[-1]
        # a sequence that ends does so with a remainder below the noise, which may still hold a small share
        remainder = (
            self.noise * max(self.first.scale, second.scale) if new is None else float(column[new])
        )
        if not remainder:
            return 0.0
        for end in unseen:
            end.extend(float(column[j]), remainder)
        return max(end.probability for end in unseen)


class Unseen:
    """How probably has a sequence from a random start not shown an eigenvalue at or beyond ``point``?

    Its tridiagonal matrix bounds the share of the start vector that can lie there: by the inequality of
    Chebyshev, Markov and Stieltjes, at most 1 / sum_i p_i(point)^2 with the orthonormal polynomials p_i of the
    matrix. Of a random start, the squared share of a given direction is chi-squared / dimension, so a share
    below s has a probability of at most sqrt(2 / pi * s * dimension).
    """

    def __init__(self, point: float, dimension: int):
        self.point, self.dimension, self.total = point, dimension, 1.0
        self._last, self._before, self._beta = 1.0, 0.0, 0.0

    def extend(self, alpha: float, beta: float) -> None:
        value = ((self.point - alpha) * self._last - self._beta * self._before) / beta
        self._before, self._last, self._beta = self._last, value, beta
        self.total += value**2

    @property
    def probability(self) -> float:
        return min(1.0, math.sqrt(2 / math.pi * self.dimension / self.total))


#: Share of its distance from the edge that the residual of a further Ritz vector may have, and how many are used.
NEARLY, FURTHER = 0.1, 25


def innocent(height: np.ndarray, residuals: np.ndarray, edge: float, k: int) -> tuple[int, float]:
    """How many of the leading Ritz vectors may be deflated in a search for eigenvalues beyond ``edge``, so that it
    gets on faster, and by how much the sought one can sink thereby.

    ``height``: Ritz values, descending. An eigenvector of a value mu beyond the edge has at most the share
    s_j = residual_j / (mu - theta_j) in Ritz vector j (Davis and Kahan 1970), and its quotient outside all of them is
    at least mu - sum s_j^2 (mu - theta_j) / (1 - sum s_j^2). The first k are out in any case.
    """
    distance = edge - height[k : k + FURTHER]
    good = (distance > 0) & (residuals[k : k + FURTHER] <= NEARLY * distance)
    count = int(np.argmin(good)) if not good.all() else len(good)
    shares = (residuals[k : k + count] / distance[:count]) ** 2
    return k + count, float((shares * distance[:count]).sum() / (1 - shares.sum()))


def krylov(
    operator: Callable[[Tensor], Tensor],
    size: int,
    products: int,
    *,
    noise: float = 1e-6,
    seed: int = 0,
    device: str | torch.device = "cpu",
    progress: Callable[[int], None] | None = None,
) -> Krylov:
    """What ``products`` steps of Lanczos measure of a symmetric operator; fewer when the space is exhausted."""
    it = Iteration(size, "magnitude", noise, seed, torch.device(device))
    j: int | None = it.append_random()
    for done in range(products):
        if j is None:
            if it.full:
                break
            j = it.append_random()
        j = it.append_product(j, operator(it.basis[j]))
        if progress:
            progress(done + 1)
    return Krylov(it.basis, it.processed, it.rows())
