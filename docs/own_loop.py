"""Federated averaging in a plain loop, recorded by fldiag: one file, complete.

python own_loop.py
fldiag forgetting runs/own --model own_loop:net
fldiag report runs/own
"""

import copy

import numpy as np
import torch
from torch import nn

import fldiag
from fldiag import data

CLIENTS, ROUNDS = 10, 3
digits = data.load("digits")
#: Whose examples are whose: sorted by label, so that every client knows few digits.
parts = np.array_split(torch.argsort(digits.train_y, stable=True).numpy(), CLIENTS)
#: Examples that no client trains on: without ``test=`` accuracies are those of training examples.
x, y = digits.batch(torch.arange(len(digits.train_y))), digits.train_y
test = digits.normalise(digits.test_x), digits.test_y


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def train(model: nn.Module, mine: torch.Tensor) -> nn.Module:
    model = copy.deepcopy(model)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        for batch in mine[torch.randperm(len(mine))].split(20):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimiser.step()
    return model


def main(out: str = "runs/own") -> None:
    model = net()
    rec = fldiag.Recorder(out, model, data=(x, y), test=test, clients=parts)
    for _ in range(ROUNDS):
        received = copy.deepcopy(model)
        trained = {k: train(model, torch.from_numpy(parts[k])) for k in range(CLIENTS)}
        sizes = [len(parts[k]) / len(y) for k in trained]
        model.load_state_dict(
            {
                n: sum(s * m.state_dict()[n] for s, m in zip(sizes, trained.values(), strict=True))
                for n in model.state_dict()
            }
        )
        rec.round(received=received, clients=trained, aggregated=model)
    rec.close()


if __name__ == "__main__":
    main()
