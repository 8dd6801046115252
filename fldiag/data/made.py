"""Examples that are made when they are asked for, of a data set that is too large to be held."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Made:
    """Stands where ``Dataset`` has a tensor [n, ...] of training inputs or labels, and knows of a tensor's methods those that
    choose rows.

    ``rows``: int64 indices [m] -> tensor [m, ...] on the CPU; the same row whatever is asked for beside it. ``shape`` and
    ``dtype`` are those that the whole tensor would have.
    """

    rows: Callable[[np.ndarray], Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str | torch.device = "cpu"

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Tensor | np.ndarray) -> Tensor:
        at = np.asarray(index.cpu() if isinstance(index, Tensor) else index, dtype=np.int64)
        return self.rows(at).to(self.device)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def index_select(self, axis: int, index: Tensor) -> Tensor:
        return self[index]

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def to(self, device: str | torch.device) -> Made:
        return replace(self, device=device)
