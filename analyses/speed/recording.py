"""What ``fldiag.Recorder`` costs a training loop: seconds of a round without it, and of writing the round.

    python analyses/speed/recording.py [--rounds 30] [--clients 10]

The loop is plain FedAvg on the digits, one epoch in batches of 20, of a small CNN (0.1 M parameters) and of an MLP. Recorded
are the received, the aggregated and all the clients' weights of every round. Printed for each model: median seconds of a round
of training, of ``Recorder.round`` without testing the global model and with it, their shares of a round, and the bytes of a
round on the disk. The disk is that of the temporary folder.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import fldiag
from fldiag import data, models

DIGITS = data.load("digits")


def train(model: nn.Module, mine: torch.Tensor, epochs: int) -> nn.Module:
    model = copy.deepcopy(model)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(epochs):
        for batch in mine[torch.randperm(len(mine))].split(20):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(DIGITS.batch(batch)), DIGITS.train_y[batch]).backward()
            optimiser.step()
    return model


def measure(name: str, rounds: int, clients: int, epochs: int) -> None:
    parts = np.array_split(torch.randperm(len(DIGITS.train_y), generator=torch.Generator().manual_seed(0)).numpy(), clients)
    seconds: dict[str, list[float]] = {"training": [], "recording": [], "with the test": []}
    with tempfile.TemporaryDirectory() as folder:
        model = models.build(name, DIGITS.shape, DIGITS.classes)
        recorders = {"recording": fldiag.Recorder(f"{folder}/a", model, DIGITS, parts, evaluate=False),
                     "with the test": fldiag.Recorder(f"{folder}/b", model, DIGITS, parts)}
        for _ in range(rounds):
            began, received = time.perf_counter(), copy.deepcopy(model)
            trained = {k: train(model, torch.from_numpy(mine), epochs) for k, mine in enumerate(parts)}
            states = [m.state_dict() for m in trained.values()]
            model.load_state_dict({n: torch.stack([s[n] for s in states]).mean(0) for n in states[0]})
            seconds["training"].append(time.perf_counter() - began)
            for kind, rec in recorders.items():
                began = time.perf_counter()
                rec.round(received=received, clients=trained, aggregated=model)
                seconds[kind].append(time.perf_counter() - began)
        size = Path(f"{folder}/a/rounds/0001.pt").stat().st_size
        for rec in recorders.values():
            rec.close()
    median = {kind: statistics.median(values[1:]) for kind, values in seconds.items()}
    shares = ", ".join(f"{kind} {1e3 * median[kind]:.1f} ms ({median[kind] / median['training']:.1%})"
                       for kind in ("recording", "with the test"))
    print(f"{name}, {epochs} epochs: a round {1e3 * median['training']:.0f} ms, {shares}, {size / 1e6:.1f} MB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--clients", type=int, default=10)
    given = parser.parse_args()
    torch.manual_seed(0)
    for name, epochs in (("small_cnn", 1), ("small_cnn", 5), ("mlp", 1), ("mlp", 5)):
        measure(name, given.rounds, given.clients, epochs)


if __name__ == "__main__":
    main()
