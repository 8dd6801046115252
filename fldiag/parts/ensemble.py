"""The clients' models as one teacher: their logits on the public inputs, combined."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fldiag import losses
from fldiag.method import Round

BATCH = 500  # inputs a forward; fixed, so the bits do not depend on the memory at hand
STACK = 16  # clients a forward, of a network that is stacked


class Ensemble:
    """Teacher logits [M, C] on ``round.public``, computed once a round; ``combine``: [m, B, C] -> [B, C].

    ``at_once``: the combination looks at all M inputs at once (it then holds m M C numbers), not at B of them.
    """

    def __init__(self, combine: Callable[[Tensor], Tensor], *, at_once: bool = False):
        self.combine, self.at_once = combine, at_once

    def __call__(self, round: Round) -> Tensor:
        if self not in round.memo:
            with torch.no_grad():
                blocks = client_logits(round)
                round.memo[self] = (
                    self.combine(torch.cat(list(blocks), 1))
                    if self.at_once
                    else torch.cat([self.combine(z) for z in blocks])
                )
        return round.memo[self]


def client_logits(round: Round) -> Iterator[Tensor]:
    """Logits [m, B, C] of the sampled clients' models in eval mode, block by block of ``round.public``."""
    network, public = round.network, round.public
    if public is None:
        return
    # on batches of this size grouped convolutions are slower than one client after another
    affine = network.stackable and all(len(shape) <= 2 for shape in network.layout.shapes)
    size = STACK if affine else 1
    bounds = [
        network.bind(
            round.rows[j : j + size], {n: b[j : j + 1].clone() for n, b in round.buffers.items()}
        )
        for j in range(0, round.m, size)
    ]
    for x in public.split(BATCH):
        yield torch.cat([bound(x.expand(bound.rows, *x.shape)) for bound in bounds])


def mean(z: Tensor) -> Tensor:
    """zbar = mean_k z_k (FedDF, Lin et al. 2020)."""
    return z.mean(0)


def confident(z: Tensor) -> Tensor:
    """zbar(x) = sum_k alpha_k(x) z_k(x), alpha_k(x) = Var_c[z_k(x)] / sum_j Var_c[z_j(x)] (FedET, Cho et al. 2022).

    Where every variance is 0 all clients count alike.
    """
    return (confidence(z) * z).sum(0)


def confidence(z: Tensor) -> Tensor:
    """alpha [m, B, 1] of logits [m, B, C]; it sums to 1 over the clients."""
    variance = z.var(-1, correction=0, keepdim=True)
    total = variance.sum(0)
    return torch.where(total > 0, variance / total.clamp(min=torch.finfo(z.dtype).tiny), 1 / len(z))


def confident_official(z: Tensor) -> Tensor:
    """FedET as FedProj's released code has it: sum_k a_k z_k, a_k [C] = Var_x[z_k] / (its mean over clients and classes)."""
    variance = z.var(1, correction=0, keepdim=True)
    overall = variance.mean()
    return (
        torch.where(overall > 0, variance / overall.clamp(min=torch.finfo(z.dtype).tiny), 1.0) * z
    ).sum(0)


def divergence(
    teacher: Tensor, student: Tensor, tau: float, direction: str = "teacher_student"
) -> Tensor:
    """KL(softmax(teacher/tau) || softmax(student/tau)) of each example, or the other way round: [..., C] -> [...]."""
    return (
        losses.kl(student, teacher, tau)
        if direction == "student_teacher"
        else losses.kl(teacher, student, tau)
    )
