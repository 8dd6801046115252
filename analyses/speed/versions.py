"""Time of training and curvature in two checkouts of fldiag, in turns.

    python analyses/speed/versions.py CHECKOUT [--turns 5] [--jobs JOB ...]

Each side is a process that has its checkout's ``fldiag`` alone and one thread. A turn of a job runs on both sides, one after
the other. Printed are medians of CPU seconds and the median, least and largest of the ratios (this checkout / the other).
CIFAR's images for training are drawn at random, as the time does not depend on them; its spectrum reads $FLDIAG_DATA.
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
JOBS = ("train mlp", "train cnn", "train cifar", "products digits", "products cifar10")
JOBS += ("spectrum digits", "spectrum cifar10")
#: Images, channels, size, kernel and hidden units of the example checkpoints' networks.
PRODUCTS = {"digits": (1500, 1, 8, 3, 104), "cifar10": (120, 3, 32, 5, 512)}


def prepare(job: str, folder: Path):
    """The function of no argument that a turn of ``job`` times."""
    import torch

    import fldiag

    torch.set_num_threads(1)
    kind, name = job.split()
    if kind == "train":
        settings = {"model": {"name": "small_cnn" if name == "cnn" else name}, "rounds": 3}
        if name == "cifar":
            file = folder / "cifar.npz"
            random = np.random.default_rng(0)
            x = random.integers(0, 256, (2000, 32, 32, 3), dtype=np.uint8)
            y = random.integers(0, 10, 2000)
            np.savez(file, train_images=x, train_labels=y, test_images=x[:10], test_labels=y[:10])
            settings = {
                "rounds": 1,
                "model": {"name": "fedavg_cifar"},
                "partition": {"kind": "iid"},
                "data": {"name": f"npz:{file}", "augment": False},
                "clients": {"total": 4, "per_round": 2},
                "train": {"epochs": 1, "batch_size": 50},
            }
            config = fldiag.Config(**settings)
        else:
            config = fldiag.Config.load("digits", **settings)

        def train() -> None:
            with tempfile.TemporaryDirectory() as out:
                fldiag.train(config, out=Path(out) / "run", device="cpu")

        return train
    checkpoint = ROOT / "checkpoints" / "example" / f"fedsol-{name}.pt"
    if kind == "spectrum":
        seeds = itertools.count()  # a question is answered once
        question = {"trace": True, "diagonal": True, "samples": 120}
        return lambda: fldiag.diagnose(checkpoint, "spectrum", seed=next(seeds), **question)
    torch.manual_seed(0)
    n, channels, size, kernel, hidden = PRODUCTS[name]
    layers = []
    for before, width in ((channels, 32), (32, 64)):
        layers.append(torch.nn.Conv2d(before, width, kernel, padding=kernel // 2))
        layers += [torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
    layers += [torch.nn.Flatten(), torch.nn.Linear(4 * size**2, hidden), torch.nn.ReLU()]
    module = torch.nn.Sequential(*layers, torch.nn.Linear(hidden, 10))
    data = torch.randn(n, channels, size, size), torch.randint(0, 10, (n,))
    problem = fldiag.Problem(module, torch.nn.functional.cross_entropy, data)
    vector = torch.randn(problem.w.numel())

    def products() -> None:
        for _ in range(10):
            problem.hvp(vector)

    return products


def serve(folder: Path) -> None:
    """A side: for each line with a job, one turn, and its CPU seconds on a line."""
    prepared = {}
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        job = line.strip()
        if job not in prepared:
            prepared[job] = prepare(job, folder)
        began = time.process_time()
        prepared[job]()
        print(time.process_time() - began, file=answers, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path, help="of the other version")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--jobs", choices=JOBS, nargs="+", default=JOBS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sides = []
        for number, root in enumerate((ROOT, args.checkout.resolve())):
            (Path(folder) / str(number)).mkdir()
            environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
            environment["XDG_CACHE_HOME"] = f"{folder}/{number}/cache"
            sides.append(
                subprocess.Popen(
                    [sys.executable, __file__, "--serve", f"{folder}/{number}"],
                    env=environment,
                    cwd=root,
                    encoding="utf-8",
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )

        def turn(side: subprocess.Popen, job: str) -> float:
            side.stdin.write(f"{job}\n")
            side.stdin.flush()
            return float(side.stdout.readline())

        print("| job | CPU s | the other | ratio (min to max) |\n|---|---|---|---|")
        for job in args.jobs:
            pairs = [[turn(side, job) for side in sides] for _ in range(args.turns + 1)][1:]
            here, there = (statistics.median(times) for times in zip(*pairs, strict=True))
            ratios = sorted(a / b for a, b in pairs)
            middle = statistics.median(ratios)
            print(
                f"| {job} | {here:.3f} | {there:.3f} | "
                f"{middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |",
                flush=True,
            )
        for side in sides:
            side.stdin.close()
            side.wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]))
    else:
        main()
