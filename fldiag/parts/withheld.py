"""A method's part whose term is kept out of the local objective, to perturb along its gradient instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fldiag.method import Part, Personal, Round
from fldiag.step import Local, Output, Step

if TYPE_CHECKING:
    from fldiag.config import Config
    from fldiag.data import Dataset
    from fldiag.models.network import Network


class Withheld(Part):
    """``part`` without its loss term and its correction: its states, uploads and server step stay.

    ``proximal_gradient`` is what those two would have added to the local gradient (FedSOL with another method's
    proximal loss, Lee et al. 2024, Table 4).
    """

    def __init__(self, part: Part):
        self.part = part
        self.sent, self.uploaded = part.sent, part.uploaded
        self.maps, self.isolated, self.public = part.maps, part.isolated, part.public

    def proximal_gradient(self, step: Step) -> Tensor:
        """[k, P] at w: of the part's loss term and the part's correction of a zero gradient."""
        decay = step.decay
        g = self.part.correct(step, torch.zeros_like(step.w))
        g = g + step.w * (step.decay - decay)  # what a penalty leaves to the weight decay belongs to it
        step.decay = decay
        if type(self.part).loss is Part.loss:
            return g

        def term(step: Step, out: Output) -> Tensor:
            value = self.part.loss(step, out)
            return out.leaf.sum(-1) * 0 if value is None else value

        return g + step.gradient(term)[1]

    def check(self, network: Network, dataset: Dataset, config: Config) -> None:
        self.part.check(network, dataset, config)

    def client_init(self, w0: Tensor) -> dict[str, Tensor]:
        return self.part.client_init(w0)

    def server_init(self, w0: Tensor) -> dict[str, Tensor]:
        return self.part.server_init(w0)

    def send(self, w_g: Tensor, state: dict[str, Tensor]) -> Tensor:
        return self.part.send(w_g, state)

    def begin(self, local: Local) -> None:
        self.part.begin(local)

    def batch(self, step: Step) -> None:
        self.part.batch(step)

    def finish(self, local: Local) -> dict[str, Tensor]:
        return self.part.finish(local)

    def weigh(self, round: Round, p: Tensor) -> Tensor:
        return self.part.weigh(round, p)

    def server(self, round: Round, w: Tensor) -> Tensor:
        return self.part.server(round, w)

    def refine(self, round: Round, w: Tensor) -> Tensor:
        return self.part.refine(round, w)

    def personalise(self) -> Personal | None:
        return self.part.personalise()
