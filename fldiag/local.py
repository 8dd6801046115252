"""What the parts of a method see of a cohort in one round: ``Local``; and what is recorded of its steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fldiag.models.network import Network
from fldiag.sections import TrainSection
from fldiag.seeding import torch_rng

#: Examples per forward when a frozen model's outputs are computed for a whole client.
REFERENCE_BATCH = 256

Key = tuple[str, str | None, str | None]  # metric, layer, which proximal loss


class Notes:
    """Numbers of local steps: what parts know of a step (``Step.note``, ``Step.note_proximal``) and what the loop adds."""

    def __init__(self) -> None:
        #: the last is the step at work
        self.steps: list[dict[Key, tuple[Tensor, Tensor | None]]] = [{}]
        self.scales: dict[Key, float] = {}

    def add(
        self,
        metric: str,
        value: Tensor,
        *,
        layer: str | None = None,
        proximal: str | None = None,
        mask: Tensor | None = None,
        scale: float | None = None,
    ) -> None:
        """``value`` [k] of the clients (``mask`` [k]: only of these). ``scale``: column ``scaled`` is value * scale."""
        key = metric, layer, proximal
        self.steps[-1][key] = value.detach(), mask
        if scale is not None:
            self.scales[key] = scale


@dataclass(frozen=True)
class ProximalTerm:
    """A proximal loss L_p at w on the step's minibatch, as a part of the method computed it."""

    kind: str
    g: Tensor  # [k, P - start] its gradient
    value: Tensor | None  # [k]
    start: int
    #: [k, P] what to compare it with, when that is not the gradient of the local loss
    g_u: Tensor | None


@dataclass(kw_only=True)
class Local:
    """K clients of one cohort in one round, sorted by falling number of steps; every vector is a row."""

    network: Network
    train: TrainSection
    seed: int
    t: int
    lr: float
    ids: list[int]
    w_g: Tensor  # [P], as received
    w: Tensor  # [K, P], current
    n: Tensor  # [K] examples
    steps: Tensor  # [K] local steps of this round
    state: dict[str, Tensor]  # name -> [K, ...]
    sent: dict[str, Tensor]  # what the server sent besides w_g
    #: name -> [K, ...]; only K = 1 if there are any
    buffers: dict[str, Tensor] = field(default_factory=dict)
    #: all examples of the cohort one after another, when training inputs are fixed
    x: Tensor | None = None
    offset: Tensor | None = None  # [K] where each client's examples start in ``x``
    public: Tensor | None = None  # [M, ...] unlabelled inputs that every client and the server hold
    mean_size: float = 0.0  # examples a client has on average, over all N
    trained: tuple[int, int] | None = None  # entries of the weights that are trained (None: all)
    memo: dict[str, Any] = field(default_factory=dict)  # what parts keep within the round
    notes: Notes | None = None  # where steps are recorded, when they are

    def rng(self, purpose: str) -> list[torch.Generator]:
        """One generator a client for a part's own randomness: it never shifts the data order."""
        return [torch_rng(self.seed, purpose, self.t, i) for i in self.ids]

    def effective_steps(self) -> Tensor:
        """[K, 1] sum of the weights with which the gradients enter the displacement, divided by lr.

        K_k for plain SGD; with momentum r, a(K_k) = (K_k - r (1 - r^K_k) / (1 - r)) / (1 - r) (FedNova, Wang et al.
        2020), with Nesterov's K_k + r a. Adam has no such sum; K_k stands in. With ``train.local_decay`` f after L
        steps: a(L) + f (a(K_k) - a(L)).
        """
        a, f = weighed_steps(self.steps.double(), self.train), self.train.local_decay
        if f != 1:
            before = weighed_steps(
                torch.tensor(self.steps_before_decay, device=a.device).double(), self.train
            )
            a = before + f * (a - before)
        return a.to(self.w.dtype).unsqueeze(1)

    @cached_property
    def steps_before_decay(self) -> list[int]:
        """[K] local steps of the epochs before ``train.local_decay`` applies."""
        train = self.train
        return [
            steps * train.epochs_before_decay // max(train.epochs, 1)
            for steps in self.steps.tolist()
        ]

    def lr_at(self, s: int, k: int) -> float | Tensor:
        """Learning rate of step s (from 0) of the first k clients: one for all of them, or [k, 1]."""
        if self.train.local_decay == 1:
            return self.lr
        rates = [
            self.lr * self.train.local_decay if s >= before else self.lr
            for before in self.steps_before_decay[:k]
        ]
        if len(set(rates)) == 1:
            return rates[0]
        return torch.tensor(rates, dtype=self.w.dtype, device=self.w.device).unsqueeze(1)

    @cached_property
    def received_buffers(self) -> dict[str, Tensor]:
        """Batch-norm statistics as received; read first in ``__post_init__``, before a step moves the live ones."""
        return {n: b[:1].clone() for n, b in self.buffers.items()}

    def __post_init__(self) -> None:
        _ = self.received_buffers

    @cached_property
    def received_logits(self) -> Tensor | None:
        """Logits [n, C] of the received model for all of ``x``, computed once a round.

        None when that would not be exact: augmented inputs, or layers that use batch statistics.
        """
        if self.x is None or self.network.batch_dependent:
            return None
        with torch.no_grad():
            bound = self.network.bind(self.w_g.unsqueeze(0), self.received_buffers)
            return torch.cat([bound(b.unsqueeze(0))[0] for b in self.x.split(REFERENCE_BATCH)])


def weighed_steps(k: Tensor, train: TrainSection) -> Tensor:
    """a(k) of the first k steps at one learning rate, see ``Local.effective_steps``."""
    r = train.momentum if train.optimizer == "sgd" else 0.0
    a = (k - r * (1 - r**k) / (1 - r)) / (1 - r)
    return k + r * a if train.nesterov and train.optimizer == "sgd" else a
