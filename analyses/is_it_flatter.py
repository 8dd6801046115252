"""Is FedX flatter? Methods on CIFAR-10 with three seeds: curvature, sharpness, accuracy and forgetting of the final models.

    python analyses/is_it_flatter.py train [--only fedavg,fedsam] [--part 1/2] [--store checkpoints/flatter]

The 50,000 images of CIFAR-10 under FedTOGA's protocol (100 clients, 10 a round, Dirichlet 0.1, lr 0.1, weight decay 1e-3,
clipping at 10, uniform averages), reduced to a core-minute a run: ``small_lenet`` in place of LeNet, 40 rounds in place of 800
with a decay of the lr of 0.97 in place of 0.997, one local epoch in batches of 20 in place of five in batches of 50. A run that is
there is used again, and a broken one is continued. Runs name ``is_it_flatter:small_lenet`` as their model: have ``analyses`` on
PYTHONPATH.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from pathlib import Path
from typing import Any

from torch import nn

import fldiag
from fldiag import Config
from fldiag.runs.run import Run

PRESET, MODEL = "fedtoga-cifar10-dir0.1", "is_it_flatter:small_lenet"
ROUNDS, SEEDS = 40, (0, 1, 2)
#: In the order of training, so that an early end leaves whole triples of seeds. Options: the defaults, which say their source
#: (``fldiag explain METHOD``), but FedProx's mu of FL-Simulator's table, and FedSOL's Lambda as the released code has it. FedTOGA's
#: own rho of FedSAM and MoFedSAM is 0.01, a tenth of what it gives the other methods: here all of these have 0.1.
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedsam": {"rho": 0.1},
    "fedsmoo": {"rho": 0.1, "lam": 0.1},
    "fedlesam": {"rho": 0.01},
    "fedsol": {"lambda_norm": "dim0", "rho": 1.5},
    "fedprox": {"mu": 0.1},
    "scaffold": {},
    "feddyn": {"lam": 0.1},
    "fedspeed": {"rho": 0.1, "lam": 0.1},
    "mofedsam": {"rho": 0.1},
    "fedasam": {},
    "fedtoga": {},
    "fedntd": {},
}


def small_lenet(shape: tuple[int, ...], classes: int) -> nn.Module:
    """LeNet with a stride of 2 and a quarter to a third of its widths: 39,338 parameters on 32x32x3 images."""
    return nn.Sequential(
        OrderedDict(
            [
                ("conv1", nn.Conv2d(shape[0], 16, 5, stride=2, padding=2)),
                ("relu1", nn.ReLU()),
                ("pool1", nn.MaxPool2d(2)),
                ("conv2", nn.Conv2d(16, 32, 3, padding=1)),
                ("relu2", nn.ReLU()),
                ("pool2", nn.MaxPool2d(2)),
                ("flatten", nn.Flatten()),
                ("fc", nn.Linear(32 * (shape[1] // 8) * (shape[2] // 8), 64)),
                ("relu3", nn.ReLU()),
                ("classifier", nn.Linear(64, classes)),
            ]
        )
    )


def train(method: str, seed: int, store: Path) -> Run:
    """The run of a method and seed; read where it is finished, continued where it was broken."""
    config = Config.load(
        PRESET,
        rounds=ROUNDS,
        seed=seed,
        train__epochs=1,
        train__batch_size=20,
        train__lr_decay=0.97,
        model__name=MODEL,
        checkpoint__every=10,
        checkpoint__clients="sampled",
        **{
            "method__name": method,
            **{f"method__{key}": value for key, value in METHODS[method].items()},
        },
    )
    return fldiag.train(config, out=store / f"{method}-s{seed}", resume=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("verb", choices=("train",))
    parser.add_argument("--only", default=",".join(METHODS), help="comma-separated methods")
    parser.add_argument("--part", default="1/1", help="K/N: every N-th run from the K-th on")
    parser.add_argument("--store", type=Path, default=Path("checkpoints/flatter"))
    args = parser.parse_args()
    part, parts = map(int, args.part.split("/"))
    cells = [(method, seed) for method in args.only.split(",") for seed in SEEDS]
    for method, seed in cells[part - 1 :: parts]:
        run = train(method, seed, args.store)
        accuracy = run.metrics.query("metric == 'accuracy' and slice == 'test'")["value"]
        print(f"{method} seed {seed}: {run.status}, accuracy {accuracy.iloc[-1]:.3f}", flush=True)


if __name__ == "__main__":
    main()
