"""Sums of squared per-example weight gradients, layer by layer.

For cotangents g of a layer's output (r to an example) and its input a, the gradient of the weight for example n and cotangent c
is a product G_nc of g_nc and a_n. Needed are sum_nc G_nc^2 entry by entry (the diagonal) or its total (the trace), and no G
needs to be formed where the layer allows it: an outer product squares entrywise, and over L positions
sum_c (sum_p g_cp u_p)^2 = sum_pq (sum_c g_cp g_cq) u_p u_q.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Bytes of one piece of a sum of squares; larger ones fall out of the processor's caches.
PIECE = 8 * 2**20


def outer_squares(g: Tensor, a: Tensor, total: bool) -> Tensor:
    """One position: g [b, r, O], a [b, I] -> [O, I], or its sum."""
    squared = g.square().sum(1)
    if total:
        return squared.sum(1).double() @ a.square().sum(1).double()
    return squared.T @ a.square()


def position_squares(g: Tensor, u: Tensor, total: bool) -> Tensor:
    """L positions: g [b, r, O, L], u [b, K, L] -> sum_nr (g_nr u_n^T)^2 [O, K], or its sum.

    Three ways of the same sum, the cheapest by its count of multiplications.
    """
    (b, r, o, length), k = g.shape, u.shape[1]
    pairs = length * (length + 1) // 2
    if total and length * (r * o + k) < r * o * k:
        return _gram_squares(g, u)
    if not total and pairs < r * length:
        return _paired_squares(g, u)
    out = g.new_zeros(o, k, dtype=torch.float64)
    for s in _pieces(b, r * o * k * g.element_size()):
        gradients = g[s].reshape(-1, r * o, length) @ u[s].transpose(1, 2)
        out += gradients.square_().reshape(-1, o, k).sum(0)
    return out.sum() if total else out


def bias_squares(g: Tensor, total: bool) -> Tensor:
    """g [b, r, O, L] -> [O]."""
    squared = g.sum(3).square().sum((0, 1), dtype=torch.float64)
    return squared.sum() if total else squared


def _gram_squares(g: Tensor, u: Tensor) -> Tensor:
    b, r, o, length = g.shape
    flat = g.reshape(b, r * o, length)
    return ((flat.transpose(1, 2) @ flat) * (u.transpose(1, 2) @ u)).sum(dtype=torch.float64)


def _paired_squares(g: Tensor, u: Tensor) -> Tensor:
    (b, r, o, length), k = g.shape, u.shape[1]
    out = g.new_zeros(o, k, dtype=torch.float64)
    for s in _pieces(b, (k + 2 * r * o) * length * g.element_size()):
        gs, us = g[s].transpose(2, 3).contiguous(), u[s].transpose(1, 2).contiguous()
        for p in range(length):
            # with the positions from p on; a pair of two positions counts twice
            gg = (gs[:, :, p : p + 1] * gs[:, :, p:]).sum(1)
            gg[:, 1:] *= 2
            out += gg.reshape(-1, o).T @ (us[:, p : p + 1] * us[:, p:]).reshape(-1, k)
    return out


def _pieces(count: int, bytes_each: int) -> list[slice]:
    step = max(1, PIECE // max(1, bytes_each))
    return [slice(i, min(i + step, count)) for i in range(0, count, step)]
