"""How alike two models see the same examples: linear centred kernel alignment (Kornblith et al., ICML 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from fldiag.runs.history import History
from fldiag.runs.pool import BATCH, Weights


def cka(a: Tensor, b: Tensor) -> float | None:
    """Linear CKA of two representations [n, d] and [n, e] of the same examples, in [0, 1].

    Unchanged by a rotation, a shift and an overall scale of either. None when one is the same for all examples.
    """
    a, b = (v.double() - v.double().mean(0) for v in (a, b))
    n = len(a)
    if n <= max(a.shape[1], b.shape[1]):  # the smaller of the two equal forms
        k, l = a @ a.T, b @ b.T
        cross, sizes = (k * l).sum(), (torch.linalg.matrix_norm(k), torch.linalg.matrix_norm(l))
    else:
        cross = torch.linalg.matrix_norm(a.T @ b).square()
        sizes = torch.linalg.matrix_norm(a.T @ a), torch.linalg.matrix_norm(b.T @ b)
    if min(float(s) for s in sizes) == 0.0:
        return None
    return float(cross / (sizes[0] * sizes[1]))


def features(history: History, weights: Weights, stretch: slice) -> Tensor:
    """What the head sees (without a head: the outputs) on a stretch of the pool, [n, d]."""
    w, buffers = weights
    network, outputs = history.network, []
    bound = network.bind(w.unsqueeze(0), {n: b.unsqueeze(0).clone() for n, b in buffers.items()})
    with torch.no_grad():
        for piece in history.pool.batches(stretch, BATCH):
            x = history.pool.read(piece.start, piece.stop)[0].unsqueeze(0)
            outputs.append((bound.features(x) if network.has_split else bound(x))[0].flatten(1))
    return torch.cat(outputs)
