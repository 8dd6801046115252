"""Orthonormal rows, and what is known of an operator on them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

#: Columns of a basis in float32 that are widened at a time.
PIECE = 2**15


class Basis:
    """Orthonormal rows, in blocks so that growing copies nothing.

    Kept in ``dtype``, and all sums are in float64. A row in float32 differs from the unit vector it stands for by at most
    2^-24 = 6e-8, so two rows are orthogonal within 1.2e-7, whatever their number: rounding does not add up, as every vector is
    made orthogonal to the rows as they are kept. ``append`` says by how much the kept row differs.
    """

    def __init__(
        self, size: int, device: torch.device, dtype: torch.dtype = torch.float64, block: int = 16
    ):
        self.size, self.device, self.dtype, self.block, self.count = size, device, dtype, block, 0
        self._blocks: list[Tensor] = []
        step = size if dtype == torch.float64 else PIECE
        self._pieces = [slice(i, i + step) for i in range(0, size, max(step, 1))]

    def __len__(self) -> int:
        return self.count

    def _filled(self) -> list[Tensor]:
        return [
            b[: min(self.block, self.count - i * self.block)] for i, b in enumerate(self._blocks)
        ]

    def __getitem__(self, i: int) -> Tensor:
        """Row i as it is kept."""
        return self._blocks[i // self.block][i % self.block]

    def append(self, v: Tensor) -> float:
        """Keep a unit vector as the last row; the norm of what rounding changed."""
        if self.count == self.block * len(self._blocks):
            self._blocks.append(
                torch.empty(self.block, self.size, dtype=self.dtype, device=self.device)
            )
        row = self._blocks[-1][self.count % self.block]
        row.copy_(v)
        self.count += 1
        changed = [
            torch.linalg.vector_norm(v[piece] - row[piece].double()) for piece in self._pieces
        ]
        return float(torch.linalg.vector_norm(torch.stack(changed)))

    def _coefficients(self, v: Tensor) -> Tensor:
        """The coefficients [count] of v."""
        coefficients = v.new_zeros(self.count)
        for piece in self._pieces:
            coefficients += torch.cat([b[:, piece].double() @ v[piece] for b in self._filled()])
        return coefficients

    def _subtract(self, v: Tensor, coefficients: Tensor) -> None:
        """v less the rows times the coefficients, in place."""
        blocks = self._filled()
        for piece in self._pieces:
            for b, c in zip(blocks, coefficients.split([len(b) for b in blocks]), strict=True):
                v[piece].addmv_(b[:, piece].double().T, c, alpha=-1.0)

    def remove_from(self, v: Tensor, only: Tensor | None = None) -> Tensor:
        """Subtracts from v its part in the basis (in the rows where ``only`` is 1), in place; the coefficients."""
        if not self.count:
            return v.new_zeros(0)
        coefficients = self._coefficients(v) if only is None else self._coefficients(v) * only
        self._subtract(v, coefficients)
        return coefficients

    def without(self, v: Tensor, coefficients: Tensor) -> Tensor:
        """v less its part in the space of the orthonormal combinations [count, k]: none of them is formed."""
        inside = coefficients @ (coefficients.T @ self._coefficients(v))
        v = v.clone()
        self._subtract(v, inside)
        return v

    def combine(self, coefficients: np.ndarray) -> Tensor:
        """[count, k] -> rows [k, P] in float64."""
        c = torch.as_tensor(coefficients, dtype=torch.float64, device=self.device)
        out = torch.zeros(c.shape[1], self.size, dtype=torch.float64, device=self.device)
        for piece in self._pieces:
            for b, part in zip(
                self._filled(), c.split([len(b) for b in self._filled()]), strict=True
            ):
                out[:, piece].addmm_(part.T, b[:, piece].double())
        return out

    def quadratic(self, matrix: np.ndarray) -> Tensor:
        """The diagonal [P] of B^T M B for the rows B and a symmetric M [count, count]."""
        m = torch.as_tensor(matrix, dtype=torch.float64, device=self.device)
        out = torch.zeros(self.size, dtype=torch.float64, device=self.device)
        for piece in range(0, self.size, 2**16):
            rows = torch.cat([b[:, piece : piece + 2**16].double() for b in self._filled()])
            out[piece : piece + 2**16] = (rows * (m @ rows)).sum(0)
        return out


class Krylov:
    """What Lanczos has measured of an operator A: its products with orthonormal vectors Q.

    A = P A P + (Q Q^T A + A Q Q^T - Q Q^T A Q Q^T) with P = I - Q Q^T; the second part is measured.
    """

    def __init__(self, basis: Basis, processed: list[int], rows: np.ndarray):
        self._basis = basis
        self._processed = torch.zeros(len(basis), dtype=torch.float64, device=basis.device)
        self._processed[processed] = 1.0
        e = np.zeros((len(basis), len(processed)))
        e[processed, np.arange(len(processed))] = 1.0
        square = rows[processed]
        self._measured = rows @ e.T + e @ rows.T - e @ ((square + square.T) / 2) @ e.T
        self.dimension = len(processed)

    def project(self, v: Tensor) -> Tensor:
        """P v."""
        v = v.double().clone()
        for _ in range(2):
            self._basis.remove_from(v, self._processed)
        return v

    def diagonal(self) -> Tensor:
        """The diagonal [P] of the measured part."""
        return self._basis.quadratic(self._measured)
