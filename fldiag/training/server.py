"""The server's turn: weights of the clients, their mean, and what the method's parts make of it."""

from __future__ import annotations

import torch
from torch import Tensor

from fldiag.method import Method, Round
from fldiag.sections import Train


def aggregate(round: Round, method: Method, train: Train) -> Tensor:
    """New global weights [P]: w = sum_k p_k w_k, then the server slots in order. p_k is proportional to n_k, 1 or
    the number of full minibatches, by ``train.aggregate``.

    ``round.state`` is replaced where a part updates it. Rows are summed in the order of the clients' ids and in
    float64, so the order of sampling does not show in the bits.
    """
    p = torch.full((round.m,), 1 / round.m, dtype=torch.float64)
    counts = {"n": round.n, "batches": round.n // train.batch_size}.get(train.aggregate)
    if counts is not None and int(
        counts.sum()
    ):  # when no client fills a minibatch, nobody trained: all equal
        p = (
            counts.double() / counts.double().sum()
        ).cpu()  # where it is when uniform, whatever the device
    round.p = p
    w = round.mean(round.rows, p)
    for part in method:
        w = part.server(round, w)
    return w


def mean_buffers(buffers: dict[str, Tensor], p: Tensor) -> dict[str, Tensor]:
    """Batch-norm statistics averaged with the weights p; integer counters take the largest."""
    merged = {}
    for name, rows in buffers.items():
        if rows.is_floating_point():
            merged[name] = torch.tensordot(p.to(rows.device), rows.double(), 1).to(rows.dtype)
        else:
            merged[name] = rows.amax(0)
    return merged
