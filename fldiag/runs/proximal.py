"""The proximal loss, its gradient and FedSOL's perturbed gradient at stored weights: what a step from there would see.

As in Algorithm 1 of Lee et al., "FedSOL" (CVPR 2024): g_p is the gradient of the proximal loss at the client's weights w,
e = rho Lambda g_p / ||g_p|| the perturbation (the maths is ``fldiag.losses``), g_u the gradient of the local loss at w + e.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fldiag import losses
from fldiag.choices import Proximal, Rule, Strength
from fldiag.errors import FldiagError
from fldiag.models.network import Network
from fldiag.params import Layout, norm
from fldiag.runs.pool import ExamplePool, Weights

#: Examples in one pass of a gradient over many.
CHUNK = 512

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Batch:
    """Some of a client's examples, in pieces that fit the memory; the mean over them is a mean over all."""

    pieces: tuple[slice, ...]

    @property
    def n(self) -> int:
        return sum(p.stop - p.start for p in self.pieces)


def batches(stretch: slice, size: int | None) -> list[Batch]:
    """The stretch as one batch, or in fixed minibatches of ``size`` in the order of the data (the last may be smaller)."""
    step = size or max(stretch.stop - stretch.start, 1)
    return [
        Batch(
            tuple(
                slice(j, min(j + CHUNK, i + step, stretch.stop))
                for j in range(i, min(i + step, stretch.stop), CHUNK)
            )
        )
        for i in range(stretch.start, stretch.stop, step)
    ]


class Losses:
    """A client's local loss and proximal loss as functions of its weights [P], on fixed examples.

    ``start``: the received weights w_g, the teacher of the ``kl`` loss: mean over the examples of
    KL(softmax(f(x; w_g) / tau) || softmax(f(x; w) / tau)), without a factor tau^2. ``l2``: 1/2 ||w - w_g||^2.
    """

    def __init__(
        self,
        network: Network,
        pool: ExamplePool,
        buffers: dict[str, Tensor],
        start: Weights,
        batch: Batch,
        *,
        kind: Proximal = "kl",
        tau: float = 3.0,
    ):
        if kind == "kl" and pool.dataset.regression:
            raise FldiagError(
                "the KL proximal loss needs class outputs, and the data are regression",
                "use proximal = 'l2'",
                usage=True,
            )
        self.network, self.pool, self.buffers, self.batch = network, pool, buffers, batch
        self.start, self.kind, self.tau = start, kind, tau

    def outputs(self, weights: Weights, x: Tensor) -> Tensor:
        """[b, out]; with gradients to the weights."""
        w, buffers = weights
        bound = self.network.bind(
            w.unsqueeze(0), {n: b.unsqueeze(0).clone() for n, b in buffers.items()}
        )
        return bound(x.unsqueeze(0))[0]

    def local(self) -> Iterator[tuple[Function, float]]:
        """The mean local loss of each piece as a function of w, and the piece's share of the examples."""
        for piece in self.batch.pieces:
            x, y = self.pool.read(piece.start, piece.stop)

            def term(w: Tensor, x: Tensor = x, y: Tensor = y) -> Tensor:
                values = losses.per_example(self.outputs((w, self.buffers), x), y)
                return losses.of_examples(values, y).mean()

            yield term, len(x) / self.batch.n

    def proximal(self) -> Iterator[tuple[Function, float]]:
        """The proximal loss, likewise."""
        if self.kind == "l2":
            yield (lambda w: losses.l2(w - self.start[0])), 1.0
            return
        for piece in self.batch.pieces:
            x, _ = self.pool.read(piece.start, piece.stop)
            with torch.no_grad():
                teacher = self.outputs(self.start, x)

            def term(w: Tensor, x: Tensor = x, teacher: Tensor = teacher) -> Tensor:
                return losses.kl(teacher, self.outputs((w, self.buffers), x), self.tau).mean()

            yield term, len(x) / self.batch.n


def value(terms: Iterator[tuple[Function, float]], w: Tensor) -> float:
    """The weighted sum of the terms at w [P]."""
    with torch.no_grad():
        return sum(share * float(term(w)) for term, share in terms)


def gradient(terms: Iterator[tuple[Function, float]], w: Tensor) -> tuple[float, Tensor]:
    """Value and gradient [P] of the weighted sum of the terms at w [P]."""
    at, total, g = w.detach().clone().requires_grad_(), 0.0, torch.zeros_like(w)
    for term, share in terms:
        with torch.enable_grad():
            part = term(at)
            g.add_(torch.autograd.grad(part, at)[0], alpha=share)
        total += share * float(part.detach())
    return total, g


def perturbation(
    g_p: Tensor,
    d: Tensor,
    rho: float,
    layout: Layout,
    *,
    strength: Strength = "adaptive",
    part: str = "full",
    per: Rule = "layer",
) -> Tensor | None:
    """FedSOL's e [P] at weights w with d = w - w_g, zero outside ``part``. None where g_p is rounding noise on that part."""
    start, stop = layout.span(part)
    g = g_p[start:stop]
    if float(norm(g)) < losses.noise_floor(g.dtype):
        return None
    Lambda = (
        losses.strengths(d[start:stop], layout.part(start, stop), per)
        if strength == "adaptive"
        else None
    )
    return F.pad(losses.perturbation(g, rho, Lambda), (start, layout.size - stop))
