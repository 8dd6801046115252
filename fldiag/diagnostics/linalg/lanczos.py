"""Eigenpairs of a symmetric operator, each with a residual computed from measured products.

Lanczos with full reorthogonalisation (Lanczos 1950; Parlett, *The Symmetric Eigenvalue Problem*, ch. 13),
written as Rayleigh-Ritz on a growing orthonormal basis: for every processed basis vector the coefficients of
its product on the whole basis are kept, as they were measured. The residual ``||H x - theta x||`` of a Ritz
pair follows from them without a further product, and some eigenvalue lies within it of theta whatever
rounding did to the recurrence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fldiag.diagnostics.linalg.basis import Basis, Krylov
from fldiag.diagnostics.linalg.missed import Unseen
from fldiag.errors import FldiagError
from fldiag.seeding import torch_rng

Which = Literal["largest", "smallest", "magnitude"]
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class EigenPairs:
    """``values`` [k] in the order asked for, ``vectors`` [k, P] (rows, unit norm, largest entry positive).

    ``residuals`` [k] = ||H x - theta x||: an eigenvalue lies within it. ``bounds`` [k]: estimated error,
    min(residual, residual^2 / gap). ``converged`` [k] (bool): bound within the tolerance, and the search for
    missed eigenvalues came to its end. ``missed`` bounds the probability that this search overlooked one (1
    without it, 0 when the whole space was seen). ``products``: how many were used. All but
    ``vectors`` are numpy arrays or numbers.
    """

    values: np.ndarray
    vectors: Tensor
    residuals: np.ndarray
    bounds: np.ndarray
    converged: np.ndarray
    products: int
    missed: float = 1.0


@dataclass
class _Ritz:
    """Ritz values in the order asked for, their coefficients on the processed vectors, measured residuals."""

    values: np.ndarray
    coefficients: np.ndarray
    residuals: np.ndarray
    bounds: np.ndarray = field(default_factory=lambda: np.zeros(0))


class Iteration:
    """The basis, the products so far, and the next steps that are open."""

    def __init__(self, operator: Callable[[Tensor], Tensor], size: int, which: Which, noise: float, seed: int,
                 device: torch.device):
        self.operator, self.which, self.noise, self.seed, self.device = operator, which, noise, seed, device
        self.basis = Basis(size, device)
        self.processed: list[int] = []
        self.columns: list[np.ndarray] = []  # column j: coefficients of H v_processed[j] on the basis
        self.lost: list[float] = []  # norm of what was cut off from that product
        self.waiting: list[int] = []
        self.scale, self.starts = 0.0, 0

    @property
    def full(self) -> bool:
        return len(self.basis) == self.basis.size

    def fresh(self) -> int:
        """A random unit vector orthogonal to the basis, appended; drawn on the CPU, alike on every device."""
        while True:
            rng = torch_rng(self.seed, "lanczos start", self.starts)
            self.starts += 1
            v = torch.randn(self.basis.size, dtype=torch.float64, generator=rng).to(self.device)
            for _ in range(3):
                self.basis.remove_from(v)
                norm = float(torch.linalg.vector_norm(v))
                if norm == 0.0:
                    break
                v /= norm
            if norm > 0.5:  # the last pass must have had nothing left to remove
                return self.basis.append(v)

    def step(self, j: int) -> int | None:
        """One product; the basis grows by its new direction, whose index is returned (None: no new one)."""
        u = self.operator(self.basis[j]).detach().to(self.device, torch.float64, copy=True)
        size = float(torch.linalg.vector_norm(u))
        if not np.isfinite(size):
            raise FldiagError("a Hessian-vector product is not finite",
                              "use dtype float64, or weights from before the training diverged")
        self.scale = max(self.scale, size)
        coefficients = self.basis.remove_from(u)
        coefficients += self.basis.remove_from(u)  # once leaves what cancellation hid; twice is enough
        norm = float(torch.linalg.vector_norm(u))
        column, new, lost = coefficients.cpu().numpy(), None, norm
        if not self.full and norm > self.noise * self.scale:
            u /= norm
            if norm < 1e-3 * self.scale:
                self.basis.remove_from(u)
                u /= torch.linalg.vector_norm(u)
            new, lost = self.basis.append(u), 0.0
            column = np.append(column, norm)
        self.processed.append(j)
        self.columns.append(column)
        self.lost.append(lost)
        return new

    def rows(self) -> np.ndarray:
        """[basis, processed]: the products' coefficients."""
        rows = np.zeros((len(self.basis), len(self.processed)))
        for i, column in enumerate(self.columns):
            rows[: len(column), i] = column
        return rows

    def ritz(self) -> _Ritz:
        rows = self.rows()
        square = rows[self.processed]
        theta, y = np.linalg.eigh((square + square.T) / 2)
        keys = {"largest": -theta, "smallest": theta, "magnitude": -np.abs(theta)}
        order = np.argsort(keys[self.which], kind="stable")
        theta, y = theta[order], y[:, order]
        rest = rows @ y
        rest[self.processed] -= y * theta
        residuals = np.hypot(np.linalg.norm(rest, axis=0), np.asarray(self.lost) @ np.abs(y))
        return _Ritz(theta, y, residuals)

    def bounded(self, k: int) -> _Ritz:
        """With error bounds of the first k values: residual, or its square over the gap (Parlett, 11.7)."""
        r = self.ritz()
        distance = np.abs(r.values[:k, None] - r.values[None, :]) - r.residuals[None, :]
        distance[np.arange(len(distance)), np.arange(len(distance))] = np.inf
        gap = distance.min(axis=1)
        if len(r.values) <= k:  # no neighbour is known yet, which does not mean that there is none
            gap[:] = 0
        with np.errstate(divide="ignore", invalid="ignore"):
            squared = np.where(gap > 0, r.residuals[:k] ** 2 / gap, np.inf)
        r.bounds = np.minimum(r.residuals[:k], squared)
        return r

    def vectors(self, r: _Ritz, k: int) -> Tensor:
        """The first k Ritz vectors [k, P], unit norm, largest entry positive."""
        chosen = r.coefficients[:, :k]
        coefficients = np.zeros((len(self.basis), chosen.shape[1]))
        coefficients[self.processed] = chosen
        rows = self.basis.combine(coefficients)
        rows /= torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        largest = rows.gather(1, rows.abs().argmax(1, keepdim=True))
        return rows * torch.where(largest < 0, -1.0, 1.0).to(rows)


    def shrink(self, keep: int, extra: int) -> int:
        """Thick restart (Wu and Simon 2000): only the first ``keep`` Ritz vectors and the unprocessed vectors
        stay, with their products as measured. The new place of the unprocessed vector ``extra``."""
        r, rows = self.ritz(), self.rows()
        y, theta = r.coefficients[:, :keep], r.values[:keep]
        rest = rows @ y
        rest[self.processed] -= y * theta
        lost = np.hypot(np.linalg.norm(rest[self.processed], axis=0), np.asarray(self.lost) @ np.abs(y))
        chosen = np.zeros((len(self.basis), y.shape[1]))
        chosen[self.processed] = y
        outside = [*self.waiting, extra]
        old, self.basis = self.basis, Basis(self.basis.size, self.device)
        for v in [*old.combine(chosen), *(old[i] for i in outside)]:
            self.basis.append(v)
        size = y.shape[1]
        self.columns = [np.concatenate([np.eye(size)[i] * theta[i], rest[outside, i]]) for i in range(size)]
        self.processed, self.lost = list(range(size)), list(lost)
        self.waiting = list(range(size, size + len(self.waiting)))
        return len(self.basis) - 1


def lanczos(operator: Callable[[Tensor], Tensor], size: int, k: int, *, which: Which = "largest",
            tol: float = 1e-3, max_products: int = 100, miss: float = 0.05, noise: float = 1e-6, seed: int = 0,
            limit: int | None = None, strict: bool = False, device: str | torch.device = "cpu",
            progress: Progress | None = None) -> EigenPairs:
    """The k eigenpairs at one end of the spectrum of a symmetric operator ``v [P] -> [P]``, P = ``size``.

    ``which``: largest or smallest (algebraic), or largest magnitude. ``tol``: relative error of every
    eigenvalue. ``noise``: relative rounding error of a product (1e-6 for float32, 1e-12 for float64);
    remainders and eigenvalues below noise * ||H|| count as zero. An invariant subspace makes it start again
    from a new random vector, so repeated eigenvalues are found. After convergence a second sequence, from a
    random vector orthogonal to everything so far, looks for missed eigenvalues until the probability of
    having overlooked one that lies beyond the last by more than ``tol`` is at most ``miss`` (0: no search); if
    it moves a result, the iteration goes on. With more than ``limit`` basis vectors (default: 100, or 3 k + 20)
    it restarts from the best. ``strict``: also the residuals must be within ``tol``, so that the vectors are as
    accurate as their gaps allow (the values are far more accurate then).
    Returns min(k, P) pairs; those not converged within ``max_products`` say so.

    Raises FldiagError for a wrong option or a product that is not finite.
    """
    if k < 1 or max_products < 1 or not 0 < tol < 1 or which not in ("largest", "smallest", "magnitude"):
        raise FldiagError(f"no eigenpairs for k = {k}, max_products = {max_products}, tol = {tol}, {which!r}",
                          "k and max_products at least 1, 0 < tol < 1, which: largest, smallest or magnitude",
                          usage=True)
    k = min(k, size)
    limit = max(limit or max(100, 3 * k + 20), k + 8)
    it = Iteration(operator, size, which, noise, seed, torch.device(device))
    count = 0

    def slack(values: np.ndarray) -> np.ndarray:
        return np.maximum(tol * np.abs(values), noise * it.scale)

    def settled(r: _Ritz) -> np.ndarray:
        return (r.residuals[:k] if strict else r.bounds) <= slack(r.values[:k])

    def product(j: int) -> tuple[int | None, _Ritz]:
        nonlocal count
        if len(it.basis) >= limit and len(it.processed) > k + 2:
            j = it.shrink(max(k + 2, limit // 2), j)
        new, r = it.step(j), it.bounded(k)
        count += 1
        if progress:
            progress(count, max_products, f"{int(settled(r).sum())} of {k} eigenvalues converged")
        return new, r

    def converged(r: _Ritz) -> bool:
        return len(r.values) >= k and bool(settled(r).all())

    def looked_again(r: _Ritz) -> tuple[float, _Ritz]:
        """The probability of a missed eigenvalue after a second sequence; 1 when it found something."""
        if it.full or not miss:
            return (1.0 if it.waiting or not it.full else 0.0), r
        before, j = r.values[:k], it.fresh()
        last, step = float(before[-1]), float(slack(before)[-1])
        points = {"largest": [last + step], "smallest": [last - step],
                  "magnitude": [abs(last) + step, -abs(last) - step]}[which]
        unseen = [Unseen(point, size - len(it.basis) + 1) for point in points]
        risk = 1.0
        new: int | None = j
        while risk > miss and count < max_products and new is not None:
            new, r = product(new)
            if (np.abs(r.values[:k] - before) > slack(before)).any():
                it.waiting[:0] = [] if new is None else [new]
                return 1.0, r
            column = it.columns[-1]
            for u in unseen if new is not None else []:
                u.extend(float(column[it.processed[-1]]), float(column[new]))
            # a sequence that ends has shown all it can
            risk = 0.0 if new is None else max(u.probability for u in unseen)
        it.waiting[:0] = [] if new is None else [new]
        return risk if converged(r) else 1.0, r

    result, risk = None, 1.0
    while count < max_products and not (it.full and not it.waiting):
        new, result = product(it.waiting.pop(0) if it.waiting else it.fresh())
        it.waiting += [] if new is None else [new]
        if converged(result):
            risk, result = looked_again(result)
            if risk <= miss or not miss:
                break
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
