"""The proximal loss, its gradient and FedSOL's perturbed gradient at stored weights: what a step from there would see.

As in Algorithm 1 of Lee et al., "FedSOL" (CVPR 2024): g_p is the gradient of the proximal loss at the client's weights w,
e = rho Lambda g_p / ||g_p|| the perturbation (the maths is ``fldiag.losses``), g_u the gradient of the local loss at w + e.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fldiag import losses
from fldiag.models.network import Network
from fldiag.params import Layout, norm
from fldiag.runs.pool import ExamplePool, Weights
from fldiag.sections import Proximal

#: Examples in one pass of a gradient over many.
CHUNK = 512
#: Means over pieces of the examples as functions of w, and each piece's share of the examples.
Terms = Iterator[tuple[Callable[[Tensor], Tensor], float]]


@dataclass(frozen=True)
class Losses:
    """A client's local loss and proximal loss as functions of its weights [P], on a stretch of ``examples`` of the pool.

    ``start``: the received weights w_g, the teacher of the ``kl`` loss: mean over the examples of
    KL(softmax(f(x; w_g) / tau) || softmax(f(x; w) / tau)), without a factor tau^2. ``l2``: 1/2 ||w - w_g||^2.
    """

    network: Network
    pool: ExamplePool
    buffers: dict[str, Tensor]
    start: Weights
    examples: slice
    kind: Proximal = "kl"
    tau: float = 3.0

    def outputs(self, weights: Weights, x: Tensor) -> Tensor:
        """[b, out]; with gradients to the weights."""
        w, buffers = weights
        bound = self.network.bind(w[None], {n: b[None].clone() for n, b in buffers.items()})
        return bound(x[None])[0]

    def local(self) -> Terms:
        """The local loss."""
        return self._terms(self._local)

    def proximal(self) -> Terms:
        """The proximal loss."""
        if self.kind == "kl":
            return self._terms(self._divergence)
        return iter([(lambda w: losses.l2(w - self.start[0]), 1.0)])

    def _local(self, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return losses.per_example(self.outputs((w, self.buffers), x), y).mean()

    def _divergence(self, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = self.outputs(self.start, x)
        return losses.kl(teacher, self.outputs((w, self.buffers), x), self.tau).mean()

    def _terms(self, mean: Callable[..., Tensor]) -> Terms:
        """Pieces of the examples."""
        n = self.examples.stop - self.examples.start
        for piece in self.pool.batches(self.examples, CHUNK):
            x, y = self.pool.read(piece.start, piece.stop)
            yield partial(mean, x, y), len(x) / n


def gradient(terms: Terms, w: Tensor) -> tuple[float, Tensor]:
    """Value and gradient [P] of the weighted sum of the terms at w [P]."""
    at, total, g = w.detach().clone().requires_grad_(), 0.0, torch.zeros_like(w)
    for term, share in terms:
        with torch.enable_grad():
            part = term(at)
            g.add_(torch.autograd.grad(part, at)[0], alpha=share)
        total += share * float(part.detach())
    return total, g


def perturbation(g_p: Tensor, d: Tensor, rho: float, layout: Layout) -> Tensor | None:
    """FedSOL's e [P] at weights w with d = w - w_g, of adaptive strengths by layer. None where g_p is rounding noise."""
    if float(norm(g_p)) < losses.noise_floor(g_p.dtype):
        return None
    return losses.perturbation(g_p, rho, losses.strengths(d, layout))
