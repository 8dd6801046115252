"""Time of a training round: fldiag against a textbook PyTorch loop, and methods against FedAvg.

Both sides run in this process on the same data, partition, model and settings, in alternation; printed are
medians and the median of the ratios pair by pair. Evaluation and checkpoints are left out on both sides.

    python analyses/speed/training.py [--rounds 7] [--only digits|cifar] [--bf16]

The CIFAR workload takes real images when $FLDIAG_DATA holds them, else random ones of the same shape
(the time does not depend on the pixel values); the table says which.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from fldiag import config, data
from fldiag.data import Dataset
from fldiag.results.machine import has_bf16
from fldiag.training.federation import Federation
from fldiag.training.setup import Setup


class Textbook:
    """FedAvg as every tutorial writes it: deepcopy, DataLoader, torch.optim, averaged state_dicts."""

    def __init__(self, setup: Setup):
        self.train, self.schedule, self.model = setup.config.train, setup.schedule, copy.deepcopy(setup.module)
        x = setup.dataset.normalise(setup.dataset.train_x)
        examples = TensorDataset(x, setup.dataset.train_y)
        self.clients = [Subset(examples, p.tolist()) for p in setup.parts]
        self.t = 0

    def round(self) -> None:
        states, sizes = [], []
        for i in self.schedule.sampled(self.t):
            model = copy.deepcopy(self.model)
            model.train()
            optimizer = torch.optim.SGD(model.parameters(), lr=self.train.lr, momentum=self.train.momentum,
                                        weight_decay=self.train.weight_decay)
            criterion = nn.CrossEntropyLoss()
            for _ in range(self.train.epochs):
                for x, y in DataLoader(self.clients[i], batch_size=self.train.batch_size, shuffle=True):
                    optimizer.zero_grad()
                    criterion(model(x), y).backward()
                    optimizer.step()
            states.append(model.state_dict())
            sizes.append(len(self.clients[i]))
        total = sum(sizes)
        mean = {k: sum(s[k] * (n / total) for s, n in zip(states, sizes, strict=True)) for k in states[0]}
        self.model.load_state_dict(mean)
        self.t += 1


#: 10 of 20 LDA(0.1) clients, about 75 examples each: one epoch in small batches (steps too small to fill the
#: processor, where stacking pays), or the papers' five epochs of batch 50 (convolutions dominate).
SHORT = ("train.epochs=1", "train.batch_size=10")
LONG = ("train.epochs=5", "train.batch_size=50")


class Ours:
    def __init__(self, setup: Setup):
        self.federation = Federation(setup)

    def round(self) -> None:
        setup = self.federation.setup
        self.federation.round(lambda units: map(setup.train, units))


def digits(model: str, *overrides: str) -> Setup:
    return Setup(config.load("digits", [f"model.name={model}", *overrides]))


def cifar(*overrides: str) -> Setup:
    """10 of 20 clients with 500 examples each, one epoch, batch 50."""
    cfg = config.build({"rounds": 1, "model": {"name": "fedavg_cifar"}, "partition": {"kind": "iid"}, "data": {"augment": False},
                        "clients": {"total": 20, "per_round": 10}, "train": {"epochs": 1, "batch_size": 50}},
                       dict(config.parse_override(o) for o in overrides))
    if has_cifar():
        full = data.load("cifar10")
        x, y = full.train_x[:10_000], full.train_y[:10_000]
    else:
        rng = np.random.default_rng(0)
        x = torch.from_numpy(rng.integers(0, 256, (10_000, 3, 32, 32), dtype=np.uint8))
        y = torch.from_numpy(rng.integers(0, 10, 10_000))
    return Setup(cfg, dataset=Dataset("cifar", x, y, x[:100], y[:100], 10, mean=(.5, .5, .5), std=(.25, .25, .25)))


def has_cifar() -> bool:
    root = os.environ.get("FLDIAG_DATA")
    return bool(root) and (Path(root) / "cifar10.npz").is_file()


def pairs(a: Ours | Textbook, b: Ours | Textbook, rounds: int) -> tuple[float, float, float, float, float]:
    """Median seconds of a and of b, the median, smallest and largest of the pairwise ratios a/b."""
    a.round(), b.round()  # warm up
    seconds: list[tuple[float, float]] = []
    for _ in range(rounds):
        pair = []
        for side in (a, b):
            began = time.perf_counter()
            side.round()
            pair.append(time.perf_counter() - began)
        seconds.append((pair[0], pair[1]))
    ratios = [x / y for x, y in seconds]
    return (statistics.median(x for x, _ in seconds), statistics.median(y for _, y in seconds),
            statistics.median(ratios), min(ratios), max(ratios))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=("digits", "cifar"))
    parser.add_argument("--bf16", action="store_true", help="measure bf16 also where it is emulated (minutes)")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.rounds} alternating rounds; "
          f"CIFAR images: {'real' if has_cifar() else 'random, of the same shape'}; "
          f"bf16 instructions: {'yes' if has_bf16() else 'no (emulated)'}")
    print(f"| {'round':<46} | {'reference ms':>12} | {'fldiag ms':>9} | ratio (min–max)   | target |")
    print("|" + "|".join("-" * n for n in (48, 14, 11, 19, 8)) + "|")

    def line(name: str, reference: Ours | Textbook, ours: Ours, target: str, *, cost: bool = False) -> None:
        first, second = (ours, reference) if cost else (reference, ours)
        a, b, ratio, low, high = pairs(first, second, args.rounds)
        ref, own = (b, a) if cost else (a, b)
        print(f"| {name:<46} | {ref * 1e3:12.1f} | {own * 1e3:9.1f} | {ratio:.2f} ({low:.2f}–{high:.2f})".ljust(100)
              + f"| {target:<6} |", flush=True)

    if args.only != "cifar":
        for model, target in (("mlp", "≥ 3"), ("small_cnn", "≥ 2.5")):
            line(f"digits {model}, batch 10: textbook / fldiag", Textbook(digits(model, *SHORT)),
                 Ours(digits(model, *SHORT)), target)
        line("digits small_cnn, batch 50: textbook / fldiag", Textbook(digits("small_cnn", *LONG)),
             Ours(digits("small_cnn", *LONG)), "–")
        for method, target in (("fedsam", "≤ 2.1"), ("fedsol", "≤ 1.35")):
            line(f"digits small_cnn, batch 50: {method} / fedavg", Ours(digits("small_cnn", *LONG)),
                 Ours(digits("small_cnn", *LONG, f"method.name={method}")), target, cost=True)
    if args.only != "digits":
        line("cifar fp32: textbook / fldiag", Textbook(cifar()), Ours(cifar()), "≥ 1.1")
        if has_bf16() or args.bf16:
            line("cifar bf16: textbook / fldiag", Textbook(cifar()), Ours(cifar("train.precision=bf16")), "≥ 2.2")
        else:
            print(f"| {'cifar bf16: textbook / fldiag':<46} | not run: this processor only emulates bf16 (--bf16 runs it)")
        for method, target in (("fedsam", "≤ 2.1"), ("fedsol", "≤ 1.35")):
            line(f"cifar fp32: {method} / fedavg", Ours(cifar()), Ours(cifar(f"method.name={method}")), target, cost=True)


if __name__ == "__main__":
    main()
