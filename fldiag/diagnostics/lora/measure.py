"""What the adapters of a round's clients have in common, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from fldiag.models.lora import adapters
from fldiag.results.table import Row
from fldiag.runs.history import History
from fldiag.runs.round_weights import Stored


def round_rows(history: History, cohort: Stored) -> list[Row]:
    """The rows of a round's clients, but those whose weights are not finite; none where no client is left."""
    cohort = history.finite(cohort)
    if not cohort.ids or cohort.clients is None:
        return []
    views = history.layout.views(cohort.clients)
    p = torch.from_numpy(history.weights(cohort.ids)).to(history.device)
    return [
        {"layer": layer, **row}
        for layer, factors in adapters(history.network.module).items()
        for row in of_layer(views[factors.a], views[factors.b], p, factors.scale, cohort.ids)
    ]


def of_layer(a: Tensor, b: Tensor, p: Tensor, scale: float, ids: Sequence[int]) -> Iterator[Row]:
    """Rows of one layer: factors ``a`` [K, r, in] and ``b`` [K, out, r] of the clients ``ids``, whose weights are ``p`` [K].

    Without a value where the adapters do nothing yet, as all B are 0."""
    dtype, a, b, p = a.dtype, a.double(), b.double(), p.double()
    is_zero = not bool(b.any())
    # the mean of the products is left @ right; averaged factors give (scale mean B) @ mean A
    left, right = (scale * p[:, None, None] * b).transpose(0, 1).flatten(1), a.flatten(0, 1)
    mean_b, mean_a = scale * torch.tensordot(p, b, 1), torch.tensordot(p, a, 1)
    singular = singular_values(left, right)
    size = float(torch.linalg.vector_norm(singular))
    rounding = torch.finfo(a.dtype).eps * left.shape[1] * float(left.norm() * right.norm())
    good = size > rounding and not is_zero
    common: Row = {"moment": "aggregated", "scope": "global", "estimator": "exact"}
    error = torch.linalg.vector_norm(
        singular_values(torch.cat([left, -mean_b], 1), torch.cat([right, mean_a]))
    )
    yield {**common, "metric": "update_norm", "value": None if is_zero else size}
    yield {**common, "metric": "aggregation_error", "value": float(error) / size if good else None}
    yield {
        **common,
        "metric": "effective_rank",
        "value": effective_rank(singular) if good else None,
    }
    bases = [row_space(factor, torch.finfo(dtype).eps) for factor in a]
    for (i, first), (j, second) in combinations(enumerate(bases), 2):
        distance, most = procrustes(first, second), (first.shape[1] + second.shape[1]) ** 0.5
        values = {} if is_zero or not most else {"value": distance, "scaled": distance / most}
        yield {
            "moment": "trained",
            "scope": "pair",
            "client": ids[i],
            "client_b": ids[j],
            "metric": "misalignment",
            "estimator": "exact",
            "value": None,
            **values,
        }


def singular_values(left: Tensor, right: Tensor) -> Tensor:
    """Of left [out, m] @ right [m, in], which is not formed where it is larger than its factors."""
    if left.shape[1] < min(left.shape[0], right.shape[1]):
        left, right = torch.linalg.qr(left)[1], torch.linalg.qr(right.T)[1].T
    return torch.linalg.svdvals(left @ right)


def effective_rank(singular: Tensor) -> float:
    """exp of the entropy of the singular values' shares of their sum (Roy & Vetterli, 2007): 1 to their number.

    >>> round(effective_rank(torch.tensor([2.0, 2.0, 0.0])), 6)
    2.0
    """
    shares = (singular / singular.sum()).double()
    shares = shares[shares > 0]
    return float(np.exp(float(-(shares * shares.log()).sum())))


def row_space(a: Tensor, eps: float) -> Tensor:
    """An orthonormal basis [in, rank] of the rows of a matrix [r, in]; singular values of the size of the rounding ``eps`` of its
    entries are none."""
    _, singular, rows = torch.linalg.svd(a, full_matrices=False)
    return rows[singular > singular.max() * max(a.shape) * eps].T


def procrustes(first: Tensor, second: Tensor) -> float:
    """min ||first - second R||_F over orthogonal R, for orthonormal bases [n, r]: 0 for one space, sqrt(2 r) for spaces at right
    angles. A basis of fewer vectors counts as filled up with zeros."""
    squares = (
        first.shape[1] + second.shape[1] - 2 * torch.linalg.matrix_norm(first.T @ second, "nuc")
    )
    return float(squares.clamp(min=0) ** 0.5)
