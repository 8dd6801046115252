"""The units of work of a round, cohorts to train and parts of the test set: what every worker builds for itself for them."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from fldiag.config import Config
from fldiag.training.client import Trained
from fldiag.training.evaluate import Sums, Tested, sums
from fldiag.training.setup import Setup, Unit


class Trainer:
    """Data, partition, network and method of a run, built by the process that needs them; a setup of the caller's own (his data,
    his module) is sent as it is."""

    def __init__(self, setup: Setup, config: Config, device: str, given: bool):
        self.config, self.device, self.given = config, device, given
        self.setup = setup

    @cached_property
    def setup(self) -> Setup:
        return Setup(self.config, device=self.device)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if self.given or k != "setup"}


def work(trainer: Trainer, unit: Unit | Tested) -> Trained | Sums:
    setup = trainer.setup
    if isinstance(unit, Tested):
        return sums(setup.network, unit, setup.dataset, setup.device)
    return setup.train(unit)


def name(unit: Unit | Tested) -> str:
    if isinstance(unit, Tested):
        return str(unit)
    clients = ", ".join(map(str, unit.ids[:5])) + (", …" if len(unit.ids) > 5 else "")
    return f"round {unit.t + 1}, clients {clients}"
