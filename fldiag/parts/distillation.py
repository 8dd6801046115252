"""Distillation on the server: the new model learns from the clients' models on unlabelled public inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fldiag.errors import FldiagError
from fldiag.method import Part, Round
from fldiag.parts.ensemble import Ensemble, divergence
from fldiag.seeding import torch_rng

if TYPE_CHECKING:
    from fldiag.config import Config
    from fldiag.data import Dataset
    from fldiag.models.network import Network

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}
Optimizer = Literal["adam", "sgd"]
Schedule = Literal["constant", "cosine"]
PERIOD = 10  # epochs of half a cosine


class ServerDistillation(Part):
    """w := argmin over some epochs of tau^2 mean_x KL(softmax(zbar/tau) || softmax(f(x; w)/tau)) + gamma ||w - w_ref||^2,
    begun at the aggregated model (FedDF, Lin et al. 2020; the second term: FedProj).

    ``teacher``: zbar. ``reference``: w_ref is the aggregated model (``avg``), the global model before the round
    (``prev_global``), or the penalty is mean_k ||w - w_k||^2 (``clients``). ``schedule``: of the learning rate over
    the epochs of a round. The student's batch-norm statistics move with it.
    """

    needs = ("classes",)

    def __init__(
        self,
        teacher: Ensemble,
        epochs: int,
        tau: float,
        lr: float,
        batch_size: int,
        *,
        optimizer: str = "adam",
        schedule: str = "constant",
        weight_decay: float = 0.0,
        direction: str = "teacher_student",
        gamma: float = 0.0,
        reference: str = "avg",
    ):
        self.teacher, self.epochs, self.tau = teacher, epochs, tau
        self.lr, self.batch_size, self.optimizer = lr, batch_size, optimizer
        self.schedule, self.weight_decay, self.direction = schedule, weight_decay, direction
        self.gamma, self.reference = gamma, reference
        self.public = epochs > 0

    def check(self, network: Network, dataset: Dataset, config: Config) -> None:
        check_minibatches(network, self.batch_size)

    def refine(self, round: Round, w: Tensor) -> Tensor:
        public, network = round.public, round.network
        if not self.epochs or public is None:
            return w
        teacher, centre = self.teacher(round), self.centre(round, w)
        buffers = {n: b.unsqueeze(0).clone() for n, b in round.mean_buffers.items()}
        student = w.clone().requires_grad_()
        optimizer = OPTIMIZERS[self.optimizer](
            [student], lr=self.lr, weight_decay=self.weight_decay
        )  # type: ignore[call-arg]
        cosine = (
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, PERIOD)
            if self.schedule == "cosine"
            else None
        )
        generator = torch_rng(round.seed, "distillation", round.t)
        for _ in range(self.epochs):
            order = torch.randperm(len(public), generator=generator).to(public.device)
            for batch in minibatches(order, self.batch_size, network):
                bound = network.bind(student.unsqueeze(0), buffers, train=True)
                logits = bound(public[batch].unsqueeze(0))[0]
                loss = divergence(teacher[batch], logits, self.tau, self.direction).mean()
                (g,) = torch.autograd.grad(self.tau**2 * loss, student)
                if self.gamma:
                    g = g.add(student.detach() - centre, alpha=2 * self.gamma)
                student.grad = g
                optimizer.step()
            if cosine is not None:
                cosine.step()
        round.mean_buffers = {n: b[0] for n, b in buffers.items()}
        return student.detach()

    def centre(self, round: Round, w: Tensor) -> Tensor:
        """Where the penalty's gradient 2 gamma (w - centre) vanishes; the student is another tensor than all of these."""
        if self.reference == "clients":
            return round.mean(round.rows)
        return w if self.reference == "avg" else round.w_g


def check_minibatches(network: Network, batch_size: int) -> None:
    """Raises FldiagError for minibatches of one example where layers mix examples."""
    if batch_size == 1 and uses_batches(network):
        raise FldiagError(
            "distillation in minibatches of one example, which batch-norm cannot train on",
            "set the method's batch sizes and memory to 2 or more",
            usage=True,
        )


def uses_batches(network: Network) -> bool:
    return network.batch_dependent or bool(network.buffers)


def minibatches(order: Tensor, size: int, network: Network) -> tuple[Tensor, ...]:
    """``order`` in minibatches, without a last one of a single example where batch-norm cannot use it."""
    batches = order.split(size)
    if uses_batches(network) and len(batches) > 1 and len(batches[-1]) == 1:
        return batches[:-1]
    return batches
