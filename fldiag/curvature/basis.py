"""Orthonormal rows, and what is known of an operator on them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class Basis:
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

    def remove_from(self, v: Tensor, only: Tensor | None = None) -> Tensor:
        """Subtracts from v its part in the basis (in the rows where ``only`` is 1), in place; the coefficients."""
        parts = self._filled()
        if not parts:
            return v.new_zeros(0)
        coefficients = torch.cat([b @ v for b in parts])
        if only is not None:
            coefficients = coefficients * only
        for b, c in zip(parts, coefficients.split([len(b) for b in parts]), strict=True):
            v.addmv_(b.T, c, alpha=-1.0)
        return coefficients

    def without(self, v: Tensor, coefficients: Tensor) -> Tensor:
        """v less its part in the space of the orthonormal combinations [count, k]: none of them is formed."""
        inside = torch.cat([b @ v for b in self._filled()])
        inside, v = coefficients @ (coefficients.T @ inside), v.clone()
        for b, c in zip(self._filled(), inside.split([len(b) for b in self._filled()]), strict=True):
            v.addmv_(b.T, c, alpha=-1.0)
        return v

    def combine(self, coefficients: np.ndarray) -> Tensor:
        """[count, k] -> rows [k, P]."""
        c = torch.as_tensor(coefficients, dtype=torch.float64, device=self.device)
        out = torch.zeros(c.shape[1], self.size, dtype=torch.float64, device=self.device)
        for b, part in zip(self._filled(), c.split([len(b) for b in self._filled()]), strict=True):
            out.addmm_(part.T, b)
        return out

    def quadratic(self, matrix: np.ndarray) -> Tensor:
        """The diagonal [P] of B^T M B for the rows B and a symmetric M [count, count]."""
        m = torch.as_tensor(matrix, dtype=torch.float64, device=self.device)
        out = torch.zeros(self.size, dtype=torch.float64, device=self.device)
        for piece in range(0, self.size, 2**16):
            rows = torch.cat([b[:, piece:piece + 2**16] for b in self._filled()])
            out[piece:piece + 2**16] = (rows * (m @ rows)).sum(0)
        return out


class Krylov:
    """What Lanczos has measured of an operator A: its products with orthonormal vectors Q.

    A = P A P + (Q Q^T A + A Q Q^T - Q Q^T A Q Q^T) with P = I - Q Q^T; the second part is known.
    """

    def __init__(self, basis: Basis, processed: list[int], rows: np.ndarray):
        self._basis = basis
        self._processed = torch.zeros(len(basis), dtype=torch.float64, device=basis.device)
        self._processed[processed] = 1.0
        e = np.zeros((len(basis), len(processed)))
        e[processed, np.arange(len(processed))] = 1.0
        square = rows[processed]
        self._known = rows @ e.T + e @ rows.T - e @ ((square + square.T) / 2) @ e.T
        self.dimension = len(processed)

    def project(self, v: Tensor) -> Tensor:
        """P v."""
        v = v.double().clone()
        for _ in range(2):
            self._basis.remove_from(v, self._processed)
        return v

    def diagonal(self) -> Tensor:
        """The diagonal [P] of the known part."""
        return self._basis.quadratic(self._known)
