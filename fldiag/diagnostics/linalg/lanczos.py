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

from fldiag.errors import FldiagError
from fldiag.seeding import torch_rng

Which = Literal["largest", "smallest", "magnitude"]
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class EigenPairs:
    """``values`` [k] in the order asked for, ``vectors`` [k, P] (rows, unit norm, largest entry positive).

    ``residuals`` [k] = ||H x - theta x||: an eigenvalue lies within it. ``bounds`` [k]: estimated error,
    min(residual, residual^2 / gap). ``converged`` [k] (bool): bound within the tolerance. All but
    ``vectors`` are numpy arrays.
    """

    values: np.ndarray
    vectors: Tensor
    residuals: np.ndarray
    bounds: np.ndarray
    converged: np.ndarray
    products: int


class _Basis:
    """Orthonormal rows in float64, in blocks so that growing copies nothing."""

    def __init__(self, size: int, device: torch.device, block: int = 16):
        self.size, self.device, self.block, self.count = size, device, block, 0
        self._blocks: list[Tensor] = []

    def __len__(self) -> int:
        return self.count

    def _filled(self) -> list[Tensor]:
        return [b[: min(self.block, self.count - i * self.block)] for i, b in enumerate(self._blocks)]

    def __getitem__(self, i: int) -> Tensor:
        return self._blocks[i // self.block][i % self.block]

    def append(self, v: Tensor) -> int:
        if self.count == self.block * len(self._blocks):
            self._blocks.append(torch.empty(self.block, self.size, dtype=torch.float64, device=self.device))
        self._blocks[-1][self.count % self.block] = v
        self.count += 1
        return self.count - 1

    def remove_from(self, v: Tensor) -> Tensor:
        """Subtracts from v its part in the basis, in place; the coefficients [count]."""
        parts = self._filled()
        if not parts:
            return v.new_zeros(0)
        coefficients = torch.cat([b @ v for b in parts])
        for b, c in zip(parts, coefficients.split([len(b) for b in parts]), strict=True):
            v.addmv_(b.T, c, alpha=-1.0)
        return coefficients

    def combine(self, coefficients: np.ndarray) -> Tensor:
        """[count, k] -> rows [k, P]."""
        c = torch.as_tensor(coefficients, dtype=torch.float64, device=self.device)
        out = torch.zeros(c.shape[1], self.size, dtype=torch.float64, device=self.device)
        for b, part in zip(self._filled(), c.split([len(b) for b in self._filled()]), strict=True):
            out.addmm_(part.T, b)
        return out


@dataclass
class _Ritz:
    """Ritz values in the order asked for, their coefficients on the processed vectors, measured residuals."""

    values: np.ndarray
    coefficients: np.ndarray
    residuals: np.ndarray
    bounds: np.ndarray = field(default_factory=lambda: np.zeros(0))


class _Iteration:
    def __init__(self, operator: Callable[[Tensor], Tensor], size: int, which: Which, noise: float, seed: int,
                 device: torch.device):
        self.operator, self.which, self.noise, self.seed, self.device = operator, which, noise, seed, device
        self.basis = _Basis(size, device)
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

    def ritz(self) -> _Ritz:
        rows = np.zeros((len(self.basis), len(self.processed)))
        for i, column in enumerate(self.columns):
            rows[: len(column), i] = column
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


def lanczos(operator: Callable[[Tensor], Tensor], size: int, k: int, *, which: Which = "largest",
            tol: float = 1e-3, max_products: int = 100, check: int = 3, noise: float = 1e-6, seed: int = 0,
            device: str | torch.device = "cpu", progress: Progress | None = None) -> EigenPairs:
    """The k eigenpairs at one end of the spectrum of a symmetric operator ``v [P] -> [P]``, P = ``size``.

    ``which``: largest or smallest (algebraic), or largest magnitude. ``tol``: relative error of every
    eigenvalue. ``noise``: relative rounding error of a product (1e-6 for float32, 1e-12 for float64);
    remainders and eigenvalues below noise * ||H|| count as zero. An invariant subspace makes it start again
    from a new random vector, so repeated eigenvalues are found. After convergence ``check`` further products
    (0: none; a fifth of the products so far, if that is more) on a random vector orthogonal to everything so
    far look for missed eigenvalues; if they move a result, it goes on. That is a test by chance, no proof.
    Returns min(k, P) pairs; those not converged within ``max_products`` say so.

    Raises FldiagError for a wrong option or a product that is not finite.
    """
    if k < 1 or max_products < 1 or not 0 < tol < 1 or which not in ("largest", "smallest", "magnitude"):
        raise FldiagError(f"no eigenpairs for k = {k}, max_products = {max_products}, tol = {tol}, {which!r}",
                          "k and max_products at least 1, 0 < tol < 1, which: largest, smallest or magnitude",
                          usage=True)
    k = min(k, size)
    it = _Iteration(operator, size, which, noise, seed, torch.device(device))

    def settled(r: _Ritz) -> np.ndarray:
        return r.bounds <= np.maximum(tol * np.abs(r.values[:k]), noise * it.scale)

    def product(j: int) -> tuple[int | None, _Ritz]:
        new, r = it.step(j), it.bounded(k)
        if progress:
            progress(len(it.processed), max_products, f"{int(settled(r).sum())} of {k} eigenvalues converged")
        return new, r

    def converged(r: _Ritz) -> bool:
        return len(r.values) >= k and bool(settled(r).all())

    def looked_again(r: _Ritz) -> tuple[bool, _Ritz]:
        """Whether a few products on a new random vector leave the result where it was."""
        before, j = r.values[:k], None if it.full or not check else it.fresh()
        # a spectrum that was hard to resolve hides more, so the search grows with the work so far
        for _ in range(min(max(check, len(it.processed) // 5), max_products - len(it.processed))):
            if j is None:
                break
            j, r = product(j)
        it.waiting += [] if j is None else [j]
        moved = np.abs(r.values[:k] - before) > np.maximum(tol * np.abs(before), noise * it.scale)
        return converged(r) and not moved.any(), r

    result = None
    while len(it.processed) < max_products and not (it.full and not it.waiting):
        new, result = product(it.waiting.pop(0) if it.waiting else it.fresh())
        it.waiting += [] if new is None else [new]
        if converged(result):
            done, result = looked_again(result)
            if done:
                break
    assert result is not None  # size and max_products are at least 1
    vectors = it.vectors(result, k)
    good = settled(result) if len(vectors) == k else np.zeros(len(vectors), dtype=bool)
    return EigenPairs(result.values[:k], vectors, result.residuals[:k], result.bounds, good,
                      len(it.processed))
