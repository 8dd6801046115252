"""One local step of a cohort, as the parts of a method see it: ``Step``, and the model's ``Output`` on its minibatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fldiag import losses
from fldiag.local import Local, ProximalTerm
from fldiag.models.network import Network


@dataclass(frozen=True)
class Perturbation:
    """e [k, n] on the entries ``start:stop`` of the weights (n = stop - start), zero elsewhere."""

    value: Tensor
    start: int
    stop: int


@dataclass(frozen=True)
class Output:
    """The model at w + e on the step's minibatch, with its graph."""

    leaf: Tensor  # [k, P] these weights
    features: Tensor | None  # [k, B, ...] what the head sees
    logits: Tensor  # [k, B, C]
    bound: Network  # the network with these weights
    #: [B, C, H, W] of each stage before its ReLU, when a part reads them (k = 1)
    maps: list[Tensor] | None = None


class Step:
    """One local step of the k clients that still train. ``weight`` [k, B] sums to 1 a row (None: uniform).

    ``targets``: labels and their shares of the loss, [(y, share)]; one label with share 1 unless a part mixes.
    ``decay``: added to the weight decay of this step. ``maps``: whether outputs carry the maps of the stages.
    """

    def __init__(
        self,
        local: Local,
        losses: Callable[[Step, Output], Tensor],
        x: Tensor,
        y: Tensor,
        weight: Tensor | None,
        index: Tensor,
        maps: bool = False,
    ):
        self.local, self.x, self.y, self.weight, self.index = local, x, y, weight, index
        self.maps = maps
        self.k = x.shape[0]
        self.targets: list[tuple[Tensor, Tensor | float]] = [(y, 1.0)]
        self.decay: float | Tensor = 0.0
        self._losses = losses
        self._inputs = x  # a part may replace ``x``: then nothing cached fits
        #: leaf, bound, features and maps at w
        self._at_w: tuple[Tensor, Network, Tensor | None, list[Tensor] | None] | None = None
        self._gradient: tuple[Tensor, Tensor] | None = None
        self._passed = False
        self.proximal: ProximalTerm | None = None

    @property
    def recording(self) -> bool:
        return self.local.notes is not None

    def note(self, metric: str, value: Tensor, **about: Any) -> None:
        """Record a number [k] of this step, if steps are recorded; see ``Notes.add``."""
        if self.local.notes is not None:
            self.local.notes.add(metric, value, **about)

    def note_proximal(
        self,
        kind: str,
        g: Tensor,
        value: Tensor | None = None,
        *,
        start: int = 0,
        g_u: Tensor | None = None,
    ) -> None:
        """Note the gradient g [k, P - start] (of the entries from ``start`` on) and the value [k] of a proximal loss at
        w; of several the first counts. ``l2`` is ||w - w_g||^2 / 2, whose value follows from its gradient."""
        if self.recording and self.proximal is None:
            value = losses.l2(g) if kind == "l2" else value
            self.proximal = ProximalTerm(
                kind, g.clone(), value, start, None if g_u is None else g_u.clone()
            )

    @property
    def w(self) -> Tensor:
        return self.local.w[: self.k]

    def state(self, name: str) -> Tensor:
        """The clients' state rows [k, ...]; a view, so in-place changes are kept."""
        return self.local.state[name][: self.k]

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the minibatch: [k, B] -> [k]."""
        return values.mean(1) if self.weight is None else (values * self.weight).sum(1)

    def label_loss(self, logits: Tensor) -> Tensor:
        """The loss of each example against its targets, [k, B]."""
        (y, share), *mixed = self.targets
        loss = share * losses.per_example(logits, y) if mixed else losses.per_example(logits, y)
        for y, share in mixed:
            loss = loss + share * losses.per_example(logits, y)
        return loss

    def on(self, x: Tensor, y: Tensor, weight: Tensor | None, index: Tensor) -> Step:
        """A step of the same clients on other inputs; it leaves batch-norm statistics alone."""
        step = Step(self.local, self._losses, x, y, weight, index, self.maps)
        step._inputs, step._passed = self._inputs, True
        return step

    def pull(self, g: Tensor, centre: Tensor, strength: float | Tensor) -> Tensor:
        """g + strength (w - centre), in place: the gradient of strength/2 ||w - centre||^2; strength may be [k, 1].

        With ``train.clip_before_quadratic`` the part that is proportional to w joins after clipping, with the
        weight decay, as it does in code that writes the penalty that way.
        """
        if not isinstance(strength, Tensor) and not strength:
            return g
        if self.local.train.clip_before_quadratic:
            self.decay = self.decay + strength
            return g.sub_(centre * strength)
        return g.add_((self.w - centre) * strength)

    def received_logits(self) -> Tensor:
        """Logits [k, B, C] of the received model on this minibatch, in eval mode."""
        local = self.local
        if (
            self.x is self._inputs
            and local.received_logits is not None
            and local.offset is not None
        ):
            return local.received_logits[local.offset[: self.k, None] + self.index]
        with torch.no_grad():
            bound = local.network.bind(
                local.w_g.unsqueeze(0), {n: b.clone() for n, b in local.received_buffers.items()}
            )
            if local.network.batch_dependent:
                return bound(self.x)
            return bound(self.x.flatten(0, 1).unsqueeze(0))[0].unflatten(0, self.x.shape[:2])

    def _bind(self, leaf: Tensor) -> Network:
        """Only the first pass of a step moves batch-norm statistics: a second one would count the minibatch twice,
        and at perturbed weights."""
        buffers = (
            {n: b.clone() for n, b in self.local.buffers.items()}
            if self._passed
            else self.local.buffers
        )
        self._passed = True
        return self.local.network.bind(leaf, buffers, train=True)

    def forward(self, e: Perturbation | None = None) -> Output:
        """The model at w + e. The features at w are shared between calls while e touches only the head."""
        net = self.local.network
        if e is None or (net.has_split and e.start >= net.cut):
            if self._at_w is None:
                leaf = self.w.detach().requires_grad_()
                bound = self._bind(leaf)
                self._at_w = (leaf, bound, *self._features(bound))
            leaf, bound, features, maps = self._at_w
            head = None if e is None else leaf[:, net.cut :] + e.value
            return self._output(leaf, bound, features, maps, head)
        leaf = self._moved(e).requires_grad_()
        bound = self._bind(leaf)
        return self._output(leaf, bound, *self._features(bound))

    def _moved(self, e: Perturbation) -> Tensor:
        """w + e as new rows [k, P]."""
        if e.stop - e.start == self.local.network.size:
            return self.w + e.value
        w = self.w.clone()
        w[:, e.start : e.stop] += e.value
        return w

    def _output(
        self,
        leaf: Tensor,
        bound: Network,
        features: Tensor | None,
        maps: list[Tensor] | None,
        head: Tensor | None = None,
    ) -> Output:
        """``head``: in place of the head's own weights in ``leaf``."""
        if features is None:
            return Output(leaf, None, bound(self.x), bound)
        return Output(leaf, features, bound.head(features, head), bound, maps)

    def _features(self, bound: Network) -> tuple[Tensor | None, list[Tensor] | None]:
        if not bound.has_split:
            return None, None
        if not (self.maps and bound.staged):
            return bound.features(self.x), None
        maps = bound.call("stages", self.x[0])
        return bound.call("pooled", maps).unsqueeze(0), maps

    def gradient(
        self, term: Callable[[Step, Output], Tensor], e: Perturbation | None = None
    ) -> tuple[Tensor, Tensor]:
        """Values [k] of ``term`` at w + e and its gradient [k, P]."""
        out = self.forward(e)
        values = term(self, out)
        (g,) = torch.autograd.grad(values.sum(), out.leaf)
        if self._at_w is not None and out.leaf is self._at_w[0]:
            self._at_w = None  # its graph is used up
        return values.detach(), g

    def head_gradient(self, term: Callable[[Step, Output], Tensor]) -> tuple[Tensor, Tensor]:
        """Values [k] of ``term`` at w and its gradient with respect to the head only, [k, H].

        Costs a backward pass of the head alone; the features stay available for the step's own gradient.
        """
        net = self.local.network
        if not net.has_split:
            values, g = self.gradient(term)
            return values, g[:, net.size - net.layout.head_size :]
        self.forward()
        leaf, bound, features, maps = self._at_w  # type: ignore[misc]
        head = leaf[:, net.cut :].detach().requires_grad_()
        z = features.detach()  # type: ignore[union-attr]
        values = term(self, Output(leaf, z, bound.head(z, head), bound, maps))
        (g,) = torch.autograd.grad(values.sum(), head)
        return values.detach(), g

    def local_gradient(self, e: Perturbation | None = None) -> tuple[Tensor, Tensor]:
        """Local loss [k] (with the parts' loss terms) and gradient [k, P] at w + e; at w it is kept."""
        if e is not None:
            return self.gradient(self._losses, e)
        if self._gradient is None:
            self._gradient = self.gradient(self._losses)
        return self._gradient
