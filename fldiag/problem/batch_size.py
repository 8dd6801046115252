"""How large a problem's batches are, and how many of their graphs are kept between products: fixed rules, never timed."""

from __future__ import annotations

import torch
from torch import Tensor

#: Batch size of a model whose outputs depend on the batch (batch-norm without running statistics): such a
#: loss has no meaning without a batch size, so it is fixed and does not follow the memory at hand.
DEPENDENT = 256
#: Larger batches gain nothing: their activations leave the processor's caches (small CNN on digits, 1,500
#: examples: 46 ms at 512, 50 ms as one batch; 17 and 32 ms with channels-last weights).
LARGEST = 512
#: On a CPU larger graphs are slower by up to 1.6: they fall out of the caches and are allocated anew.
CPU_BYTES = 32 * 2**20
#: But every batch is a pass over the weights, and its gradient as large as they are. So a graph may take up to this many times
#: the size of the weights: a product of MiniLM on 32 sentences takes half as long in batches of seven as in batches of one.
CPU_WEIGHTS = 2


def largest(graph: int, weights: int, memory: int, device: torch.device) -> int:
    """Examples of a batch, at least one, when the graph of one takes ``graph`` bytes, all weights (frozen ones, too) ``weights``
    bytes, and there are ``memory`` bytes."""
    room = memory // 4
    if device.type == "cpu":
        room = min(room, max(CPU_BYTES, CPU_WEIGHTS * weights))
    return max(1, min(LARGEST, room // graph))


def room_for_graphs(w: Tensor, memory: int) -> int:
    """Bytes that graphs kept between products may take: half of the memory, less the product, an iteration's copy of it, the
    vector and an eigenvector, all in float64; but at least a quarter of the memory."""
    return max(memory // 4, memory // 2 - 4 * 8 * w.numel())


def kept(graph: int, batches: int, w: Tensor, memory: int) -> int:
    """Batches whose graphs, of ``graph`` bytes each, are kept.

    A kept graph saves 40 % of its batch's part of a product. A few of many graphs save little and fill the room: then none is.
    """
    many = room_for_graphs(w, memory) // (
        graph + 2 * w.nbytes
    )  # it also holds its gradient, and a copy of it in pieces
    return many if 2 * many >= batches else 0
