"""Projections of the local gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fldiag.local import Local
from fldiag.losses import noise_floor
from fldiag.method import Part, Round
from fldiag.params import dot, norm
from fldiag.parts.distillation import check_minibatches
from fldiag.parts.ensemble import Ensemble, divergence
from fldiag.parts.proximal import ProximalLoss
from fldiag.seeding import torch_rng
from fldiag.step import Output, Step

if TYPE_CHECKING:
    from fldiag.config import Config
    from fldiag.data import Dataset
    from fldiag.models.network import Network


def project(
    g: Tensor,
    onto: Tensor,
    *,
    eps: float = 0.0,
    min_norm_sq: float = 0.0,
    clamp: float | None = None,
) -> Tensor:
    """g - (<g, h> / (||h||^2 + eps)) h where <g, h> < 0 and ||h||^2 > min_norm_sq, else g; h = ``onto``; row by row.

    ``clamp``: the coefficient of h is at most so large.
    """
    inner, square = dot(g, onto), dot(onto, onto)
    conflict = (inner < 0) & (square > min_norm_sq)
    coefficient = inner / (square + eps).clamp(min=torch.finfo(g.dtype).tiny)
    if clamp is not None:
        coefficient = coefficient.clamp(min=-clamp)  # where it is used it is negative
    return torch.where(conflict, g - coefficient * onto, g)


class ProximalProjection(Part):
    """g_u = g_l - (<g_l, g_p> / ||g_p||^2) g_p when <g_l, g_p> < 0, else g_l (FedSOL, Lee et al. 2024, Eq. 3).

    Unchanged where g_p is rounding noise (the first step of a round).
    """

    def __init__(self, loss_p: ProximalLoss):
        self.loss_p, self.needs = loss_p, loss_p.needs

    def correct(self, step: Step, g: Tensor) -> Tensor:
        value, g_p = self.loss_p.gradient(step)
        g_u = project(g, g_p)
        if not self.loss_p.exact:
            g_u = torch.where(norm(g_p) >= noise_floor(g_p.dtype), g_u, g)
        step.note_proximal(self.loss_p.kind, g_p, value, g_u=g_u)
        return g_u


class MemoryProjection(Part):
    """g_u = g - (<g, h> / (||h||^2 + eps)) h when <g, h> < 0, else g, where h is the gradient of
    mean_x KL(softmax(zbar/tau) || softmax(f(x; w)/tau)) over a minibatch of the memory (FedProj).

    Memory: ``size`` of the public inputs (-1: all), drawn anew each round; their teacher logits zbar [size, C] of the
    previous round are sent down. Each client projects in a round with probability ``rate``, and only in rounds
    ``first`` to ``last`` (counted from 0), from the second on: before it there is no teacher. ``truncate``: inputs and
    teacher logits are cut to integers, as the released code does.
    """

    sent, needs = ("teacher",), ("classes",)

    def __init__(
        self,
        teacher: Ensemble,
        tau: float,
        *,
        rate: float = 1.0,
        size: int = -1,
        batch_size: int = 128,
        first: int = 0,
        last: int | None = None,
        eps: float = 1e-8,
        min_norm_sq: float = 0.0,
        clamp: float | None = None,
        direction: str = "teacher_student",
        truncate: bool = False,
    ):
        self.teacher, self.tau, self.rate = teacher, tau, rate
        self.size, self.batch_size = size, batch_size
        self.first, self.last, self.direction, self.truncate = first, last, direction, truncate
        self.rule = {"eps": eps, "min_norm_sq": min_norm_sq, "clamp": clamp}
        self.public = rate > 0 and size != 0

    def check(self, network: Network, dataset: Dataset, config: Config) -> None:
        size = self.batch_size if self.size < 0 else min(self.batch_size, self.size)
        check_minibatches(network, size)

    def memory(self, seed: int, t: int, n: int) -> Tensor:
        """Which of the n public inputs are the memory of round t: known to both sides by the seed."""
        return torch.randperm(n, generator=torch_rng(seed, "memory", t))[
            : n if self.size < 0 else self.size
        ]

    def refine(self, round: Round, w: Tensor) -> Tensor:
        """Keep what the clients of the next round are to be sent."""
        t, public = round.t + 1, round.public
        round.state.pop("teacher", None)
        if (
            self.public
            and public is not None
            and self.first <= t
            and (self.last is None or t <= self.last)
        ):
            round.state["teacher"] = self.teacher(round)[
                self.memory(round.seed, t, len(public)).to(public.device)
            ]
        return w

    def begin(self, local: Local) -> None:
        teacher = local.sent.get("teacher")
        on = torch.tensor(
            [torch.rand((), generator=g).item() < self.rate for g in local.rng("projection")]
        )
        if teacher is None or local.public is None or not on.any():
            return
        memory = self.memory(local.seed, local.t, len(local.public))
        size = min(self.batch_size, len(memory))
        streams = [endless(len(memory), size, g) for g in local.rng("memory batches")]
        local.memo["projection"] = on.to(local.w.device).unsqueeze(1), teacher, memory, streams

    def correct(self, step: Step, g: Tensor) -> Tensor:
        if "projection" not in step.local.memo:
            return g
        on, teacher, memory, streams = step.local.memo["projection"]
        index = torch.stack([next(s) for s in streams[: step.k]])
        x, z = step.local.public[memory[index].to(g.device)], teacher[index.to(g.device)]  # type: ignore[index]
        if self.truncate:
            x, z = x.trunc(), z.trunc()

        def forgetting(on_memory: Step, out: Output) -> Tensor:
            return on_memory.mean(divergence(z, out.logits, self.tau, self.direction))

        h = step.on(x, index, None, index).gradient(forgetting)[1]
        return torch.where(on[: step.k], project(g, h, **self.rule), g)  # type: ignore[arg-type]


def endless(n: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Minibatches of ``size`` out of n positions, epoch after epoch, each in a new order, without short last ones."""
    while True:
        yield from torch.randperm(n, generator=generator)[: n - n % size].split(size)
