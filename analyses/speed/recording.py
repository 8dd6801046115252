"""What ``fldiag.Recorder`` costs a training loop: seconds of a round without it, and of recording the round.

    python analyses/speed/recording.py [--rounds 12] [--clients 10]

Digits, ten clients, FedAvg with torch's own SGD, all ten clients' weights of every round. Printed for each model: the seconds of
a round of training and the bytes of its file. For a recorder that does not test the global model and for one that does: the time
that ``Recorder.round`` takes, and its share of the round. Medians over rounds.
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
            nn.functional.cross_entropy(
                model(DIGITS.batch(batch)), DIGITS.train_y[batch]
            ).backward()
            optimiser.step()
    return model


def measure(name: str, rounds: int, clients: int, epochs: int) -> None:
    parts = np.array_split(
        torch.randperm(len(DIGITS.train_y), generator=torch.Generator().manual_seed(0)).numpy(),
        clients,
    )
    training: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        model = models.build(name, DIGITS.shape, DIGITS.classes)
        recorders = {
            "recording": fldiag.Recorder(f"{folder}/a", model, DIGITS, parts, evaluate=False),
            "with the test": fldiag.Recorder(f"{folder}/b", model, DIGITS, parts),
        }
        calls: dict[str, list[float]] = {kind: [] for kind in recorders}
        for _ in range(rounds):
            began, received = time.perf_counter(), copy.deepcopy(model)
            trained = {
                k: train(model, torch.from_numpy(mine), epochs) for k, mine in enumerate(parts)
            }
            states = [m.state_dict() for m in trained.values()]
            model.load_state_dict(
                {n: torch.stack([s[n] for s in states]).mean(0) for n in states[0]}
            )
            training.append(time.perf_counter() - began)
            for kind, rec in recorders.items():
                began = time.perf_counter()
                rec.round(received=received, clients=trained, aggregated=model)
                calls[kind].append(time.perf_counter() - began)
        size = Path(f"{folder}/a/rounds/0001.pt").stat().st_size
        for rec in recorders.values():
            rec.close()
    alone = statistics.median(training[1:])
    print(f"{name}, {epochs} epochs: a round {1e3 * alone:.0f} ms, {size / 1e6:.1f} MB", flush=True)
    for kind in recorders:
        call = statistics.median(calls[kind][1:])
        print(f"  {kind}: {1e3 * call:.1f} ms, {call / alone:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--clients", type=int, default=10)
    given = parser.parse_args()
    torch.manual_seed(0)
    for name, epochs in (("small_cnn", 1), ("small_cnn", 5), ("mlp", 1), ("mlp", 5)):
        measure(name, given.rounds, given.clients, epochs)


if __name__ == "__main__":
    main()
