"""Parts of personalised federated learning: what is kept from the server, and how a client makes its own model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fldiag.errors import FldiagError
from fldiag.local import Local
from fldiag.method import Method, Neighbours, Part, PersonalPlan, Round
from fldiag.sections import Whole
from fldiag.step import Perturbation, Step

if TYPE_CHECKING:
    from fldiag.config import Config
    from fldiag.data import Dataset
    from fldiag.models.network import Network
    from fldiag.sections import TrainSection

#: Type of an option ``tune_epochs``: after how many epochs of fine-tuning the clients' models are measured.
Epochs = Annotated[tuple[Whole, ...], Field(min_length=1)]
#: Of an option ``tune_lr``: the learning rate of the last round, or the first one.
Rate = Literal["decayed", "initial"]


class FineTune(Part):
    """After the last round every client trains the global model on its own data with plain cross entropy."""

    def __init__(self, epochs: tuple[int, ...], lr: str, neighbours: Neighbours | None = None):
        self.plan = PersonalPlan(epochs, lr=lr, neighbours=neighbours)
        self.needs = ("classes", "features") if neighbours else ()

    def personalise(self) -> PersonalPlan:
        return self.plan


class FrozenHead(Part):
    """The head stays as it was initialised: clients train and the server averages the body only."""

    needs = ("head",)

    def begin(self, local: Local) -> None:
        layout = local.network.layout
        local.trained = (0, layout.size - layout.head_size)

    def server(self, round: Round, w: Tensor) -> Tensor:
        body = w.numel() - round.network.layout.head_size
        # the mean of equal numbers is off by rounding
        return torch.cat([w[:body], round.w_g[body:]])


class LocalTraining(Part):
    """Every client goes on with weights (and batch-norm statistics) of its own; the global model never changes."""

    isolated = True

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}

    def check(self, network: Network, dataset: Dataset, config: Config) -> None:
        self.buffers = network.buffers

    def client_init(self, w0: Tensor) -> dict[str, Tensor]:
        return {"own": w0.clone(), **{f"own/{n}": b.clone() for n, b in self.buffers.items()}}

    def begin(self, local: Local) -> None:
        local.w.copy_(local.state["own"])
        for name, rows in local.buffers.items():
            rows.copy_(local.state[f"own/{name}"])

    def finish(self, local: Local) -> dict[str, Tensor]:
        local.state["own"] = local.w.clone()
        for name, rows in local.buffers.items():
            local.state[f"own/{name}"] = rows.clone()
        return {}

    def server(self, round: Round, w: Tensor) -> Tensor:
        return round.w_g

    def refine(self, round: Round, w: Tensor) -> Tensor:
        round.mean_buffers = {n: b.clone() for n, b in round.network.buffers.items()}
        return w

    def personalise(self) -> PersonalPlan:
        return PersonalPlan((0,), Method(self))


class MetaStep(Part):
    """First-order MAML on the two halves b1, b2 of each minibatch (Per-FedAvg, Fallah et al. 2020, without Hessian):
    w' = w - inner_lr (g(w; b1) + wd w), then the base optimiser steps from w by g(w'; b2) with lr = beta.

    ``inner_lr`` None: the round's lr. ``shared``: one momentum buffer sees both gradients, as in the released code of
    FedSOL; else the inner step has no momentum. A minibatch of m examples gives halves of ceil(m/2) and floor(m/2);
    a single example is both.
    """

    cuts = 2

    def __init__(
        self, inner_lr: float | None, beta: float, shared: bool, personal: PersonalPlan, split: int
    ):
        self.inner_lr, self.beta, self.shared, self.split = inner_lr, beta, shared, split
        self.plan = replace(personal, method=Method(self), steps=self.steps)

    def check(self, network: Network, dataset: Dataset, config: Config) -> None:
        train = config.train
        is_plain = train.optimizer == "sgd" and not (train.nesterov or train.keep_momentum)
        if self.shared and (not is_plain or train.clip is not None):
            raise FldiagError(
                "a momentum buffer shared by the inner and the outer step is that of plain SGD, fresh each round",
                "set train.optimizer = 'sgd' without nesterov, keep_momentum and clip, or official = false",
                usage=True,
            )

    def begin(self, local: Local) -> None:
        local.memo["inner lr"] = local.lr if self.inner_lr is None else self.inner_lr
        local.lr = self.beta
        local.memo["velocity"] = torch.zeros_like(local.w) if self.shared else None

    def batch(self, step: Step) -> None:
        width = step.x.shape[1]
        count = (
            torch.full((step.k,), width) if step.weight is None else (step.weight > 0).sum(1).cpu()
        )
        second = (count // 2).clamp(min=1)
        inner = step.on(*_cut(step, torch.zeros_like(count), count - count // 2))
        step.local.memo["inner step"] = inner
        step.x, step.y, step.weight, step.index = _cut(step, count - second, second)
        step.targets = [(step.y, 1.0)]

    def perturb(self, step: Step) -> Perturbation:
        """The inner step as a displacement: the outer gradient is taken at w' = w + e."""
        memo, train = step.local.memo, step.local.train
        _, g = memo.pop("inner step").local_gradient()
        g = g.add(step.w, alpha=train.weight_decay)
        if self.shared:
            v = memo["velocity"][: step.k]
            memo["before"] = v.clone()
            g = v.mul_(train.momentum).add_(g)
        return Perturbation(-memo["inner lr"] * g, 0, g.shape[-1])

    def correct(self, step: Step, g: Tensor) -> Tensor:
        """Shared momentum: the optimiser's v := r v + g + wd w must come out as r v' + g + wd w, with v' the buffer
        after the inner step."""
        if not self.shared:
            return g
        memo, train = step.local.memo, step.local.train
        v = memo["velocity"][: step.k]
        raised = g.add(v - memo.pop("before"), alpha=train.momentum)
        v.mul_(train.momentum).add_(g).add_(step.w, alpha=train.weight_decay)
        return raised

    def steps(self, n: int, train: TrainSection) -> int:
        """Outer steps of a fine-tuning epoch: ceil(L / split), L the number of halves in a pass over n examples."""
        return math.ceil(math.ceil(n / max(train.batch_size // 2, 1)) / self.split)

    def personalise(self) -> PersonalPlan:
        return self.plan


def _cut(step: Step, start: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Examples start_i .. start_i + count_i - 1 of each row's minibatch: (x, y, weight, index), padded and weighted
    where the rows differ in size."""
    width = int(count.max())
    column = torch.arange(width)
    real = column < count[:, None]
    at = torch.where(real, start[:, None] + column, 0).to(step.x.device)
    rows = torch.arange(step.k, device=step.x.device)[:, None]
    weight = None if bool(real.all()) else (real.double() / count[:, None]).to(step.x)
    return step.x[rows, at], step.y[rows, at], weight, step.index[rows, at]
