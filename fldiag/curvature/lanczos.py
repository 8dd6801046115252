"""Eigenpairs of a symmetric operator, each with a residual computed from measured products.

Lanczos with full reorthogonalisation (Lanczos 1950; Parlett, *The Symmetric Eigenvalue Problem*, ch. 13),
written as Rayleigh-Ritz on a growing orthonormal basis: for every processed basis vector the coefficients of
its product on the whole basis are kept, as they were measured. The residual ``||H x - theta x||`` of a Ritz
pair follows from them without a further product, and some eigenvalue lies within it of theta whatever
rounding did to the recurrence.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fldiag.curvature.basis import Krylov
from fldiag.curvature.iteration import Iteration, Ritz, Which
from fldiag.curvature.overlooked import Unseen, innocent
from fldiag.errors import FldiagError

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class EigenPairs:
    """``values`` [k] in the order asked for, ``vectors`` [k, P] (rows, unit norm, largest entry positive).

    ``residuals`` [k] = ||H x - theta x||: an eigenvalue lies within it. ``bounds`` [k]: estimated error,
    min(residual, residual^2 / gap), where the search found no eigenvalue in the gap. ``converged`` [k] (bool):
    bound within the tolerance, and the search for missed eigenvalues came to its end. ``missed`` bounds the
    probability that this search overlooked one (1 without it, 0 when the whole space was seen). ``products``: how
    many were used. All but ``vectors`` are numpy arrays or numbers.
    """

    values: np.ndarray
    vectors: Tensor
    residuals: np.ndarray
    bounds: np.ndarray
    converged: np.ndarray
    products: int
    missed: float = 1.0


#: Asks for the product of every vector that it yields.
Search = Generator[Tensor, Tensor, EigenPairs]


def lanczos(operator: Callable[[Tensor], Tensor], size: int, k: int, *, which: Which = "largest",
            tol: float = 1e-3, max_products: int = 100, miss: float = 0.05, noise: float = 1e-6, seed: int = 0,
            limit: int | None = None, strict: bool = False, device: str | torch.device = "cpu",
            progress: Progress | None = None) -> EigenPairs:
    """The k eigenpairs at one end of the spectrum of a symmetric operator ``v [P] -> [P]``, P = ``size``.

    ``which``: largest or smallest (algebraic), or largest magnitude. ``tol``: relative error of every
    eigenvalue. ``noise``: relative rounding error of a product (1e-6 for float32, 1e-12 for float64);
    remainders and eigenvalues below noise * ||H|| count as zero. An invariant subspace makes it start again
    from a new random vector, so repeated eigenvalues are found. Convergence relies on the gaps to other Ritz
    values, and a Ritz vector may mix two close eigenvectors: so after it a second sequence, from a random vector
    orthogonal to the k found, looks for an eigenvalue inside the gaps or beyond, until the probability of having
    overlooked one is at most ``miss`` (0: no search); if it finds one, the iteration goes on. With more than
    ``limit`` basis vectors (default: 100, or 3 k + 20) it restarts from the best; the second sequence holds as
    many at most. ``strict``: also the residuals
    must be within ``tol``, so that the vectors are as accurate as their gaps allow (the values are far more
    accurate then).
    Returns min(k, P) pairs; those not converged within ``max_products`` say so.

    Raises FldiagError for a wrong option or a product that is not finite.
    """
    it = search(size, k, which, tol, max_products, miss, noise, seed, limit, strict, device, progress)
    v = next(it)
    while True:
        try:
            v = it.send(operator(v))
        except StopIteration as end:
            return end.value


def search(size: int, k: int, which: Which, tol: float, max_products: int, miss: float, noise: float, seed: int,
           limit: int | None, strict: bool, device: str | torch.device, progress: Progress | None) -> Search:
    """``lanczos`` one product at a time: yields a vector [P], is sent its product, and returns the eigenpairs."""
    if k < 1 or max_products < 1 or not 0 < tol < 1 or which not in ("largest", "smallest", "magnitude"):
        raise FldiagError(f"no eigenpairs for k = {k}, max_products = {max_products}, tol = {tol}, {which!r}",
                          "k and max_products at least 1, 0 < tol < 1, which: largest, smallest or magnitude",
                          usage=True)
    k = min(k, size)
    limit = max(limit or max(100, 3 * k + 20), k + 8)
    it = Iteration(None, size, which, noise, seed, torch.device(device))
    count = 0

    def slack(values: np.ndarray) -> np.ndarray:
        return np.maximum(tol * np.abs(values), noise * it.scale)

    def settled(r: Ritz) -> np.ndarray:
        return (r.residuals[:k] if strict else r.bounds) <= slack(r.values[:k])

    def product(j: int) -> Generator[Tensor, Tensor, tuple[int | None, Ritz]]:
        nonlocal count
        if len(it.basis) >= limit and len(it.processed) > k + 2:
            j = it.shrink(max(k + 2, limit // 2), j)
        new = it.take(j, (yield it.basis[j]))
        r = it.bounded(k)
        count += 1
        tell(r)
        return new, r

    def tell(r: Ritz) -> None:
        if progress:
            progress(count, max_products, f"{int(settled(r).sum())} of {k} eigenvalues converged")

    def converged(r: Ritz) -> bool:
        return len(r.values) >= k and bool(settled(r).all())

    def looked_again(r: Ritz) -> Generator[Tensor, Tensor, float]:
        """The probability that an eigenvalue beside the k found lies where the bounds need none; 1 when one does.

        The second sequence runs in the complement of the k vectors, not of the basis, where a neighbour that mixes
        with one of them would lie hidden.
        """
        nonlocal count
        if it.full or not miss:
            return 1.0 if it.waiting or not it.full else 0.0
        height = {"largest": r.values, "smallest": -r.values, "magnitude": np.abs(r.values)}[which]
        room = slack(r.values[:k])
        # a residual above the tolerance counts squared over the gap to the nearest other eigenvalue
        uncertain = r.residuals[:k] > room
        reach = np.where(uncertain, -r.residuals[:k] ** 2 / np.where(uncertain, room, 1.0), room)
        edge = float((height[:k] + reach).min())
        keep, fall = innocent(height, r.residuals, edge, k)
        edge -= fall
        points = {"largest": [edge], "smallest": [-edge], "magnitude": [edge, -edge]}[which]
        known = torch.as_tensor(it.on_basis(r, keep), device=it.device)

        def outside(v: Tensor) -> Tensor:
            return it.basis.without(v, known)

        second = Iteration(None, size, which, noise, seed, it.device)
        second.starts, it.starts = it.starts, it.starts + 1
        new: int | None = second.fresh(outside)
        unseen, risk = [Unseen(point, size - keep) for point in points], 1.0
        while risk > miss and count < max_products and new is not None and len(second.basis) <= limit:
            j, u = new, (yield second.basis[new])
            count += 1
            tell(r)
            new = second.take(j, outside(u.to(it.device, torch.float64)))
            ahead = second.ritz()
            top = float(ahead.values[0])
            if {"largest": top, "smallest": -top, "magnitude": abs(top)}[which] > edge:
                it.add(second.vectors(ahead, 1)[0])
                return 1.0
            column = second.columns[-1]
            # a sequence that ends does so with a remainder below the noise, which may still hold a small share
            remainder = noise * max(it.scale, second.scale) if new is None else float(column[new])
            for eye in unseen if remainder else []:
                eye.extend(float(column[j]), remainder)
            risk = max(eye.probability for eye in unseen) if remainder and len(second.basis) < size - keep else 0.0
        return risk

    result, risk, due = None, 1.0, 0
    while count < max_products and not (it.full and not it.waiting):
        new, result = yield from product(it.waiting.pop(0) if it.waiting else it.fresh())
        it.waiting += [] if new is None else [new]
        due -= 1
        if due <= 0 and converged(result):
            risk = yield from looked_again(result)
            if risk <= miss or not miss:
                break
            due = len(it.waiting)  # what was found lies in their span
    assert result is not None  # size and max_products are at least 1
    risk = 0.0 if it.full and not it.waiting else risk
    vectors = it.vectors(result, k)
    good = settled(result) & (risk <= miss or not miss) if len(vectors) == k else np.zeros(len(vectors), dtype=bool)
    return EigenPairs(result.values[:k], vectors, result.residuals[:k], result.bounds, good, count, risk)


def krylov(operator: Callable[[Tensor], Tensor], size: int, products: int, *, noise: float = 1e-6, seed: int = 0,
           device: str | torch.device = "cpu", progress: Callable[[int], None] | None = None) -> Krylov:
    """What ``products`` steps of Lanczos measure of a symmetric operator; fewer when the space is exhausted."""
    it = Iteration(operator, size, "magnitude", noise, seed, torch.device(device))
    j: int | None = it.fresh()
    for done in range(products):
        if j is None:
            if it.full:
                break
            j = it.fresh()
        j = it.step(j)
        if progress:
            progress(done + 1)
    return Krylov(it.basis, it.processed, it.rows())
