"""The basis of a Lanczos process, what its products measured, and the Ritz pairs that follow (see lanczos.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fldiag.choices import Which
from fldiag.curvature.basis import Basis
from fldiag.curvature.operator import not_finite
from fldiag.seeding import torch_rng


def height(values: np.ndarray, which: Which) -> np.ndarray:
    """How near eigenvalues are to the end of the spectrum that is searched."""
    return {"largest": values, "smallest": -values, "magnitude": np.abs(values)}[which]


@dataclass
class Ritz:
    """Ritz values in the order asked for, their coefficients on the processed vectors, measured residuals."""

    values: np.ndarray
    coefficients: np.ndarray
    residuals: np.ndarray
    bounds: np.ndarray = field(default_factory=lambda: np.zeros(0))


class Iteration:
    """The basis, the products of its vectors so far, and which of them are to be multiplied next."""

    def __init__(
        self,
        size: int,
        which: Which,
        noise: float,
        seed: int,
        device: torch.device,
        dtype: torch.dtype = torch.float64,
    ):
        self.which, self.noise, self.seed, self.device = which, noise, seed, device
        self.basis = Basis(size, device, dtype)
        self.processed: list[int] = []  # basis vectors, by their places, whose products are known
        self.waiting: list[int] = []  # and those that are to be multiplied next
        self.columns: list[np.ndarray] = []  # coefficients on the basis of H v_j, j in processed
        self.lost: list[float] = []  # norm of what rounding and cutting took from that product
        self.scale, self.starts = 0.0, 0

    @property
    def full(self) -> bool:
        return len(self.basis) == self.basis.size

    def append_random(self, outside: Callable[[Tensor], Tensor] | None = None) -> int:
        """A random unit vector orthogonal to the basis (``outside``: and projected by this), appended; drawn on the CPU,
        alike on every device."""
        while True:
            rng = torch_rng(self.seed, "lanczos start", self.starts)
            self.starts += 1
            v = torch.randn(self.basis.size, dtype=torch.float64, generator=rng).to(self.device)
            for _ in range(3):
                self.basis.remove_from(v)
                v = v if outside is None else outside(v)
                norm = float(torch.linalg.vector_norm(v))
                if norm == 0.0:
                    break
                v /= norm
            if norm > 0.5:  # the last pass must have had nothing left to remove
                self.basis.append(v)
                return len(self.basis) - 1

    def process_next(self, v: Tensor) -> None:
        """Make what is new in the unit vector v the next to be processed."""
        for _ in range(2):
            self.basis.remove_from(v)
        norm = float(torch.linalg.vector_norm(v))
        if norm > self.noise:
            v = v / norm
            self.basis.remove_from(v)
            self.basis.append(v / torch.linalg.vector_norm(v))
            self.waiting[:0] = [len(self.basis) - 1]

    def append_product(self, j: int, product: Tensor, *, copy: bool = True) -> int | None:
        """Add the product of basis vector j (overwritten without ``copy``).

        The basis grows by its new direction, whose place is returned; None where there is none.
        """
        u = product.detach().to(self.device, torch.float64, copy=copy)
        size = float(torch.linalg.vector_norm(u))
        if not np.isfinite(size):
            raise not_finite()
        self.scale = max(self.scale, size)
        # once leaves what cancellation hid; twice is enough
        alphas = self.basis.remove_from(u)
        alphas += self.basis.remove_from(u)
        beta = float(torch.linalg.vector_norm(u))
        column, new, lost = alphas.cpu().numpy(), None, beta
        if not self.full and beta > self.noise * self.scale:
            u /= beta
            if beta < 1e-3 * self.scale:
                self.basis.remove_from(u)
                u /= torch.linalg.vector_norm(u)
            lost = beta * self.basis.append(u)
            new = len(self.basis) - 1
            column = np.append(column, beta)
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

    def ritz(self) -> Ritz:
        rows = self.rows()
        square = rows[self.processed]
        theta, y = np.linalg.eigh((square + square.T) / 2)
        order = np.argsort(-height(theta, self.which), kind="stable")
        theta, y = theta[order], y[:, order]
        rest = rows @ y
        rest[self.processed] -= y * theta
        residuals = np.hypot(np.linalg.norm(rest, axis=0), np.asarray(self.lost) @ np.abs(y))
        return Ritz(theta, y, residuals)

    def bounded(self, k: int) -> Ritz:
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

    def on_basis(self, r: Ritz, k: int) -> np.ndarray:
        """The first k Ritz vectors as coefficients [basis, k]."""
        y = r.coefficients[:, :k]
        coefficients = np.zeros((len(self.basis), y.shape[1]))
        coefficients[self.processed] = y
        return coefficients

    def vectors(self, r: Ritz, k: int) -> Tensor:
        """The first k Ritz vectors [k, P], unit norm, largest entry positive."""
        rows = self.basis.combine(self.on_basis(r, k))
        # one after the other: a copy of all is as large as a dozen rows of the basis
        for row in rows:
            row /= torch.linalg.vector_norm(row)
            row *= -1.0 if row[row.abs().argmax()] < 0 else 1.0
        return rows

    def shrink(self, keep: int, extra: int) -> int:
        """Thick restart (Wu and Simon 2000): only the first ``keep`` Ritz vectors and the unprocessed vectors
        stay, with their products as measured. The new place of the unprocessed vector ``extra``."""
        r, rows = self.ritz(), self.rows()
        y, theta = r.coefficients[:, :keep], r.values[:keep]
        rest = rows @ y
        rest[self.processed] -= y * theta
        lost = np.hypot(
            np.linalg.norm(rest[self.processed], axis=0), np.asarray(self.lost) @ np.abs(y)
        )
        vectors = self.on_basis(r, keep)
        outside = [*self.waiting, extra]
        old, self.basis = self.basis, Basis(self.basis.size, self.device, self.basis.dtype)
        size = y.shape[1]
        for i in range(size):  # H x = theta x + rest, of x as it is rounded in the basis
            lost[i] += 2 * self.scale * self.basis.append(old.combine(vectors[:, i : i + 1])[0])
        for i in outside:
            self.basis.append(old[i])
        self.columns = [
            np.concatenate([np.eye(size)[i] * theta[i], rest[outside, i]]) for i in range(size)
        ]
        self.processed, self.lost = list(range(size)), list(lost)
        self.waiting = list(range(size, size + len(self.waiting)))
        return len(self.basis) - 1
