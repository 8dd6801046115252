"""Time of a training round: fldiag against other ways to train the same, and methods against fldiag's FedAvg.

All sides of a table take turns on the same data, partition, model and settings; printed are medians and the median of the
ratios turn by turn. Evaluation and checkpoints are left out everywhere. One call measures one number of threads.

    python analyses/speed/training.py [--turns 7] [--threads 1] [--only digits|cifar|methods] [--epochs 1]

FedLab runs where it is installed.
The CIFAR workload takes real images when $FLDIAG_DATA holds them, else random ones of the same shape
(the time does not depend on the pixel values); the first line says which.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from training_peers import Careful, FedLab, Side, Textbook

from fldiag import config, data
from fldiag.data import Dataset
from fldiag.results.files import machine
from fldiag.training.server import Federation
from fldiag.training.setup import Setup

CIFAR_IMAGES = 2_000


class Ours:
    def __init__(self, setup: Setup):
        self.federation = Federation(setup)

    def round(self) -> float:
        began = time.perf_counter()
        setup = self.federation.setup
        self.federation.round(lambda units: map(setup.train, units))
        return time.perf_counter() - began


def digits(model: str, **train: object) -> Setup:
    """10 of 20 LDA(0.1) clients, about 75 examples each, one epoch in batches of 10: steps too small to fill a processor."""
    given = {"epochs": 1, "batch_size": 10, "clip": None, **train}
    base = config.Config.load("digits", model__name=model)
    return Setup(base.model_copy(update={"train": base.train.model_copy(update=given)}))


def cifar(*overrides: str) -> Setup:
    """2 of 4 clients with 500 examples each, one epoch, batch 50."""
    cfg = config.build(
        {
            "rounds": 1,
            "model": {"name": "fedavg_cifar"},
            "partition": {"kind": "iid"},
            "data": {"augment": False},
            "clients": {"total": 4, "per_round": 2},
            "train": {"epochs": 1, "batch_size": 50},
        },
        dict(config.parse_override(o) for o in overrides),
    )
    if has_cifar():
        full = data.load("cifar10")
        x, y = full.train_x[:CIFAR_IMAGES], full.train_y[:CIFAR_IMAGES]
    else:
        rng = np.random.default_rng(0)
        x = torch.from_numpy(rng.integers(0, 256, (CIFAR_IMAGES, 3, 32, 32), dtype=np.uint8))
        y = torch.from_numpy(rng.integers(0, 10, CIFAR_IMAGES))
    return Setup(
        cfg,
        dataset=Dataset(
            "cifar", x, y, x[:100], y[:100], 10, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25)
        ),
    )


def has_cifar() -> bool:
    root = os.environ.get("FLDIAG_DATA")
    return bool(root) and (Path(root) / "cifar10.npz").is_file()


def turns(sides: dict[str, Callable[[], Side]], count: int) -> pd.DataFrame:
    """Seconds of every side, turn by turn."""
    rounds = {name: make().round for name, make in sides.items()}
    return pd.DataFrame(
        [{name: round() for name, round in rounds.items()} for _ in range(count + 1)]
    )[1:]


def table(title: str, sides: dict[str, Callable[[], Side]], args: argparse.Namespace) -> None:
    """Ratios are to the first side."""
    seconds = turns(sides, args.turns)
    print(f"\n| {title} | ms | ratio (min–max) |\n|---|---|---|")
    for name in seconds:
        ratios = seconds[name] / seconds.iloc[:, 0]
        spread = f"{ratios.median():.2f} ({ratios.min():.2f}–{ratios.max():.2f})"
        print(f"| {name} | {seconds[name].median() * 1e3:.1f} | {spread} |", flush=True)


def sides_of(setup: Callable[[], Setup]) -> dict[str, Callable[[], Side]]:
    """fldiag and the others that are installed, each with a setup of its own."""
    makers = {"fldiag": Ours, "textbook loop": Textbook, "careful loop": Careful, "FedLab": FedLab}
    if not FedLab.installed():
        del makers["FedLab"]
    return {name: lambda make=make: make(setup()) for name, make in makers.items()}


def has_bf16() -> bool:
    """Whether the processor multiplies bf16 natively; where torch does not know, it is taken to."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    native = [capabilities.get(name) for name in ("avx512_bf16", "amx_bf16")]
    return capabilities.get("architecture") != "x86_64" or any(native)


def of_digits(args: argparse.Namespace) -> None:
    for model in ("mlp", "small_cnn"):
        sides = sides_of(lambda model=model: digits(model))
        table(f"digits {model}, batch 10: side / fldiag", sides, args)


def of_cifar(args: argparse.Namespace) -> None:
    table("CIFAR CNN, batch 50, fp32: side / fldiag", sides_of(cifar), args)
    if not has_bf16():
        print("\nbf16: not measured, this processor only emulates it")
        return
    table(
        "CIFAR CNN, batch 50, bf16: side / fldiag",
        {
            "fldiag bf16": lambda: Ours(cifar("train.precision=bf16")),
            "textbook loop, fp32": lambda: Textbook(cifar()),
            "careful loop with autocast": lambda: Careful(cifar(), bf16=True),
        },
        args,
    )


def of_methods(args: argparse.Namespace) -> None:
    sides: dict[str, Callable[[], Side]] = {
        name: lambda m=name: Ours(cifar(f"method.name={m}", f"train.epochs={args.epochs}"))
        for name in ("fedavg", "fedsam", "fedsol", "fedntd", "scaffold")
    }
    title = f"CIFAR CNN, batch 50, fp32, epochs: {args.epochs}: method / FedAvg, both fldiag's"
    table(title, sides, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=("digits", "cifar", "methods"))
    parser.add_argument(
        "--epochs", type=int, default=1, help="local epochs of the table of methods (the papers: 5)"
    )
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):  # the same cores for every side
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    torch.set_num_threads(args.threads)
    print(
        f"{machine()}, {torch.backends.cpu.get_cpu_capability()}, bf16 instructions: {'yes' if has_bf16() else 'no'}; "
        f"torch {torch.__version__}; {args.threads} thread{'s' * (args.threads > 1)}; {args.turns} turns; "
        f"CIFAR images: {'real' if has_cifar() else 'random, of the same shape'}{'' if FedLab.installed() else '; no FedLab'}"
    )
    for name, job in (("digits", of_digits), ("cifar", of_cifar), ("methods", of_methods)):
        if args.only in (None, name):
            job(args)


if __name__ == "__main__":
    main()
