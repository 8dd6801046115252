"""Perturbations e(w): the local gradient is taken at w + e."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fldiag.errors import FldiagError
from fldiag.method import Part, Perturbation
from fldiag.params import Layout, norm, per_tensor_norm
from fldiag.parts.withheld import Withheld
from fldiag.step import Output, Step, noise_floor

if TYPE_CHECKING:
    from fldiag.config import Config
    from fldiag.data import Dataset
    from fldiag.models.network import Network

GUARD = 1e-12


class Sharpness(Part):
    """e = rho g / (||g|| + 1e-12), g the local gradient on the same minibatch (SAM, Foret et al. 2021);
    adaptive: e = rho w^2 g / (|| |w| g || + 1e-12) (ASAM, Kwon et al. 2021, without the constant eta)."""

    def __init__(self, rho: float, adaptive: bool = False, guard: float = GUARD):
        self.rho, self.adaptive, self.guard = rho, adaptive, guard

    def perturb(self, step: Step) -> Perturbation | None:
        if not self.rho:
            return None
        _, g = step.local_gradient()
        e = ascent(g, self.rho, step.w.abs() if self.adaptive else None, self.guard)
        return Perturbation(e, 0, e.shape[-1])


def ascent(g: Tensor, rho: float, scale: Tensor | None = None, guard: float = GUARD) -> Tensor:
    """rho T^2 g / (||T g|| + guard), row by row; T = 1 without ``scale``."""
    if scale is None:
        return rho * g / (norm(g) + guard)
    scaled = scale * g
    return rho * scale * scaled / (norm(scaled) + guard)


class ProximalPerturbation(Part):
    """e = rho Lambda g_p / (||g_p|| + 1e-12): towards larger proximal loss (FedSOL, Lee et al. 2024, Alg. 1).

    ``part`` of the weights that is perturbed (g_p is cut to it before its norm is taken). ``strength``:
    fixed (Lambda = 1) or adaptive, Lambda^(m)[i] = |w - w_g|[i] / ||w^(m) - w_g^(m)|| per layer m.
    No perturbation where ||g_p|| < floor: at w = w_g the gradient is rounding noise, which the
    normalisation would blow up to length rho.
    ``loss``: a term of the output, a method's part that is withheld from the objective, or None for
    ||w - w_g||^2 / 2.
    """

    def __init__(self, loss: Callable[[Step, Output], Tensor] | Withheld | None, rho: float,
                 part: Literal["full", "body", "head"], strength: Literal["fixed", "adaptive"],
                 lambda_norm: Literal["layer", "tensor", "dim0"], floor: float | None):
        self.loss_p, self.rho, self.part, self.strength = loss, rho, part, strength
        self.lambda_norm, self.floor = lambda_norm, floor

    def check(self, network: Network, dataset: Dataset, config: Config) -> None:
        if self.part != "full":
            _ = network.layout.head_size  # raises when there is no head
        if callable(self.loss_p):
            needs_classes(dataset)

    def bounds(self, layout: Layout) -> tuple[int, int]:
        if self.part == "full":
            return 0, layout.size
        cut = layout.size - layout.head_size
        return (0, cut) if self.part == "body" else (cut, layout.size)

    def gradient(self, step: Step, start: int, stop: int) -> Tensor:
        """g_p on the perturbed part, [k, stop - start]."""
        if self.loss_p is None:
            d = step.w - step.local.w_g
            step.publish("l2", d)
            return d[:, start:stop]
        if isinstance(self.loss_p, Withheld):
            g = self.loss_p.proximal_gradient(step)
            step.publish("own", g)
            return g[:, start:stop]
        if self.part == "head":
            value, g = step.head_gradient(self.loss_p)
            step.publish(str(self.loss_p), g, value, start=start)
            return g
        value, g = step.gradient(self.loss_p)
        step.publish(str(self.loss_p), g, value)
        return g[:, start:stop]

    def perturb(self, step: Step) -> Perturbation | None:
        if not self.rho:
            return None
        start, stop = self.bounds(step.local.network.layout)
        g = self.gradient(step, start, stop)
        length = norm(g)
        floor = self.floor if self.floor is not None else noise_floor(g.dtype)
        e = torch.where(length >= floor, self.rho * g / (length + GUARD), 0.0)
        if self.strength == "adaptive":
            e = e * self.strengths(step, start, stop)
        return Perturbation(e, start, stop)

    def strengths(self, step: Step, start: int, stop: int) -> Tensor:
        """Lambda on the perturbed part, [k, stop - start]."""
        layout = step.local.network.layout.part(start, stop)
        found = strengths(step.w[:, start:stop] - step.local.w_g[start:stop], layout, self.lambda_norm)
        if step.recording:
            for name, members in groups_of(layout, self.lambda_norm).items():
                values = torch.cat([layout.views(found)[n].flatten(1) for n in members], dim=-1)
                mean = values.double().mean(-1)
                step.note("lambda_mean", mean, layer=name or members[0], where=mean > 0,
                          scale=None if self.lambda_norm == "dim0" else values.shape[-1] ** 0.5)
        return found


def needs_classes(dataset: Dataset) -> None:
    """Raises FldiagError for real targets: a softmax of them has no meaning."""
    if dataset.train_y.is_floating_point():
        raise FldiagError("the kl proximal loss needs class labels, the data set has real targets",
                          "set method.loss = 'l2'", usage=True)


def groups_of(layout: Layout, rule: str) -> dict[str, tuple[str, ...]]:
    """The tensors over which Lambda is normalised together (dim0: inside which)."""
    return layout.layers if rule == "layer" else {n: (n,) for n in layout.names}


def strengths(d: Tensor, layout: Layout, rule: str = "layer") -> Tensor:
    """Lambda of a displacement d [k, n] laid out by ``layout``: |d| over its norm per layer (weight and bias of a
    module), per parameter tensor, or along the first axis of each tensor (what the authors' released code does);
    0 where the norm is 0."""
    if rule == "dim0":
        views = [v if v.dim() > 1 else v.unsqueeze(1) for v in layout.views(d).values()]  # a scalar is one entry
        return torch.cat([_ratio(v.abs(), torch.linalg.vector_norm(v, dim=1, keepdim=True)).flatten(1) for v in views],
                         dim=-1)
    sizes = dict(zip(layout.names, layout.sizes, strict=True))
    groups = groups_of(layout, rule).values()
    return _ratio(d.abs(), per_tensor_norm(d, [sum(sizes[n] for n in group) for group in groups]))


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(b > 0, a / b, 0.0)
