"""What the adapters of a round's clients have in common, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from fldiag.results.table import Row


def of_layer(a: Tensor, b: Tensor, p: Tensor, scale: float, ids: Sequence[int]) -> Iterator[Row]:
    """Rows of one layer: factors ``a`` [K, r, in] and ``b`` [K, out, r] of the clients ``ids``, whose weights are ``p`` [K].

    Without a value where the adapters do nothing yet, as all B are 0."""
    a, b, p = a.double(), b.double(), p.double()
    rank, nothing = a.shape[1], not bool(b.any())
    mean = scale * torch.einsum("k,koj,kji->oi", p, b, a)  # what an average of the products would add to W
    sent = scale * torch.einsum("k,koj->oj", p, b) @ torch.einsum("k,kji->ji", p, a)  # what averaged factors add
    size = float(torch.linalg.matrix_norm(mean))
    good = size > 0 and not nothing
    common: Row = {"moment": "aggregated", "scope": "global", "estimator": "exact"}
    error = float(torch.linalg.matrix_norm(mean - sent))
    yield {**common, "metric": "update_norm", "value": None if nothing else size}
    yield {**common, "metric": "aggregation_error", "value": error / size if good else None}
    singular = torch.linalg.svdvals(mean)
    energy = (singular**2).cumsum(0) / (singular**2).sum()
    for j in range(rank):
        yield {**common, "metric": "rank_energy", "index": j + 1, "value": float(energy[j]) if good else None}
    yield {**common, "metric": "effective_rank", "value": effective_rank(singular) if good else None}
    bases = [row_space(each) for each in a]
    for (i, first), (j, second) in combinations(enumerate(bases), 2):
        found, most = procrustes(first, second), (first.shape[1] + second.shape[1]) ** 0.5
        told = {} if nothing or not most else {"value": found, "scaled": found / most}
        yield {"moment": "trained", "scope": "pair", "client": ids[i], "client_b": ids[j], "metric": "misalignment",
               "estimator": "exact", "value": None, **told}


def effective_rank(singular: Tensor) -> float:
    """exp of the entropy of the singular values' shares of their sum (Roy & Vetterli, 2007): 1 to their number.

    >>> round(effective_rank(torch.tensor([2.0, 2.0, 0.0])), 6)
    2.0
    """
    shares = (singular / singular.sum()).double()
    shares = shares[shares > 0]
    return float(np.exp(float(-(shares * shares.log()).sum())))


def row_space(a: Tensor) -> Tensor:
    """An orthonormal basis [in, rank] of the rows of a matrix [r, in]; singular values of rounding's size are none."""
    _, singular, rows = torch.linalg.svd(a, full_matrices=False)
    limit = singular.max() * max(a.shape) * torch.finfo(a.dtype).eps
    return rows[singular > limit].T


def procrustes(first: Tensor, second: Tensor) -> float:
    """min ||first - second R||_F over orthogonal R, for orthonormal bases [n, r]: 0 for one space, sqrt(2 r) for spaces at right
    angles. A basis of fewer vectors counts as filled up with zeros."""
    squares = first.shape[1] + second.shape[1] - 2 * torch.linalg.matrix_norm(first.T @ second, "nuc")
    return float(squares.clamp(min=0) ** 0.5)
