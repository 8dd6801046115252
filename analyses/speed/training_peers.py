"""The other sides of ``training.py``: the same rounds as tutorials, careful programmers and other packages write them."""

from __future__ import annotations

import copy
import importlib.util
import time
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from fldiag.training.setup import Setup


class Side(Protocol):
    def round(self) -> float:
        """Seconds of one more round."""


class Clients:
    """Data, settings and the schedule of a setup, and a round that times ``train``."""

    def __init__(self, setup: Setup):
        self.train, self.schedule, self.parts = setup.config.train, setup.schedule, setup.parts
        self.model, self.t = copy.deepcopy(setup.module), 0
        self.x, self.y = setup.dataset.normalise(setup.dataset.train_x), setup.dataset.train_y

    def optimizer(self, model: nn.Module, **options: Any) -> torch.optim.SGD:
        t = self.train
        return torch.optim.SGD(
            model.parameters(), lr=t.lr, momentum=t.momentum, weight_decay=t.weight_decay, **options
        )

    def round(self) -> float:
        began = time.perf_counter()
        self.clients(self.schedule.sampled(self.t))
        self.t += 1
        return time.perf_counter() - began

    def clients(self, ids: list[int]) -> None:
        raise NotImplementedError


class Textbook(Clients):
    """FedAvg as every tutorial writes it: deepcopy, DataLoader, torch.optim, averaged state_dicts."""

    def __init__(self, setup: Setup):
        super().__init__(setup)
        examples = TensorDataset(self.x, self.y)
        self.subsets = [Subset(examples, p.tolist()) for p in self.parts]

    def clients(self, ids: list[int]) -> None:
        states, sizes = [], []
        for i in ids:
            model = copy.deepcopy(self.model)
            model.train()
            optimizer, criterion = self.optimizer(model), nn.CrossEntropyLoss()
            for _ in range(self.train.epochs):
                for x, y in DataLoader(
                    self.subsets[i], batch_size=self.train.batch_size, shuffle=True
                ):
                    optimizer.zero_grad()
                    criterion(model(x), y).backward()
                    optimizer.step()
            states.append(model.state_dict())
            sizes.append(len(self.subsets[i]))
        total = sum(sizes)
        mean = {
            k: sum(s[k] * (n / total) for s, n in zip(states, sizes, strict=True))
            for k in states[0]
        }
        self.model.load_state_dict(mean)


class Careful(Clients):
    """One model, no DataLoader, channels last, the fused optimiser, a running mean; with autocast for bf16."""

    def __init__(self, setup: Setup, bf16: bool = False):
        super().__init__(setup)
        self.bf16 = bf16
        if self.x.dim() == 4:
            self.model = self.model.to(memory_format=torch.channels_last)
            self.x = self.x.contiguous(memory_format=torch.channels_last)

    def clients(self, ids: list[int]) -> None:
        weights = list(self.model.parameters())
        start = [p.detach().clone() for p in weights]
        mean, total = [torch.zeros_like(p) for p in start], sum(len(self.parts[i]) for i in ids)
        for i in ids:
            part = torch.as_tensor(self.parts[i])
            with torch.no_grad():
                torch._foreach_copy_(weights, start)
            optimizer = self.optimizer(self.model, fused=True)
            for _ in range(self.train.epochs):
                for at in part[torch.randperm(len(part))].split(self.train.batch_size):
                    x = self.x[at]
                    if x.dim() == 4:
                        x = x.contiguous(memory_format=torch.channels_last)
                    with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                        loss = F.cross_entropy(self.model(x), self.y[at])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            with torch.no_grad():
                torch._foreach_add_(mean, weights, alpha=len(part) / total)
        with torch.no_grad():
            torch._foreach_copy_(weights, mean)


class Loaders:
    """What FedLab asks a data set for."""

    def __init__(self, subsets: list[Subset[Any]]):
        self.subsets = subsets

    def get_dataloader(self, client: int, batch_size: int) -> DataLoader[Any]:
        return DataLoader(self.subsets[client], batch_size=batch_size, shuffle=True)


class FedLab(Clients):
    """FedLab's serial trainer and aggregator, with the same optimiser."""

    @staticmethod
    def installed() -> bool:
        return importlib.util.find_spec("fedlab") is not None

    def __init__(self, setup: Setup):
        from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
        from fedlab.utils.aggregator import Aggregators

        super().__init__(setup)
        examples: Dataset[Any] = TensorDataset(self.x, self.y)
        self.trainer = SGDSerialClientTrainer(self.model, len(self.parts), cuda=False)
        self.aggregate = Aggregators.fedavg_aggregate
        self.trainer.setup_dataset(Loaders([Subset(examples, p.tolist()) for p in self.parts]))
        self.trainer.setup_optim(self.train.epochs, self.train.batch_size, self.train.lr)
        self.weights = self.trainer.model_parameters

    def clients(self, ids: list[int]) -> None:
        # one optimiser for all clients is FedLab's way; a fresh one a round keeps the momentum of a round only
        self.trainer.optimizer = self.optimizer(self.trainer._model)
        self.trainer.local_process([self.weights], ids)
        found = [package[0] for package in self.trainer.uplink_package]
        self.trainer.cache = []
        self.weights = self.aggregate(found, [len(self.parts[i]) for i in ids])
