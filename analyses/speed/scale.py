"""What the number of clients costs: time a round, peak memory and disk for N = 100 to 100,000 clients, 100 of them sampled.

    python analyses/speed/scale.py [--clients 100,1000,10000,100000] [--methods fedavg,scaffold] [--rounds 40]

The small CNN (46,594 parameters) on noisy patterns: 32 examples a client, Dirichlet 0.3, one epoch in batches of 10, one thread.
Every run is a process of its own, and they train a round each in turn, so that what else the machine does meets all of them.
Printed are median times, the median ratio to the fewest clients in the same turn, the largest resident memory (Linux: MB, after
the first fifth of the rounds and at the end) and what the run takes on disk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import fldiag
from fldiag.results.files import machine

SAMPLED = 100
#: Says ``patterns`` how many clients there are, each with so many examples.
VARIABLE, EXAMPLES = "SCALE_CLIENTS", 32


def patterns() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A noisy pattern a class, uint8 [n, 8, 8], the training examples of all clients and 1,000 to test on."""
    rng = np.random.default_rng(0)
    of_class = rng.integers(64, 192, (10, 8, 8), dtype=np.uint8)

    def split(n: int) -> tuple[np.ndarray, np.ndarray]:
        y = np.arange(n) % 10
        return of_class[y] + rng.integers(0, 64, (n, 8, 8), dtype=np.uint8), y

    return (*split(int(os.environ[VARIABLE]) * EXAMPLES), *split(1000))


def config(method: str, clients: int, rounds: int) -> fldiag.Config:
    return fldiag.Config.load(
        "digits",
        data__name="scale:patterns",
        partition__kind="dirichlet",
        partition__alpha=0.3,
        clients__total=clients,
        clients__per_round=SAMPLED,
        rounds=rounds,
        method__name=method,
        train__epochs=1,
        train__batch_size=10,
        train__lr=0.05,
    )


def child(method: str, clients: str, rounds: str, folder: str) -> None:
    """Train; after every event say its seconds and the memory so far, and wait for a line."""
    torch.set_num_threads(1)
    os.environ[VARIABLE] = clients

    def tell(event: dict[str, Any]) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
        print(json.dumps({"seconds": event.get("seconds"), "peak": peak}), flush=True)
        sys.stdin.readline()

    fldiag.train(config(method, int(clients), int(rounds)), out=folder, device="cpu", on_event=tell)


def measure(method: str, clients: list[int], rounds: int) -> pd.DataFrame:
    """A row a number of clients. The first round of each is left out of the times."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        paths = [Path(folder) / str(n) for n in clients]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, __file__, "--child", method, str(n), str(rounds), str(path)],
                    encoding="utf-8",
                    **pipes,
                )
            )
            for n, path in zip(clients, paths, strict=True)
        ]
        events = []
        for _ in range(rounds + 1):  # the start, then the rounds
            for n, process in zip(clients, processes, strict=True):
                events.append({"clients": n, **json.loads(process.stdout.readline())})  # type: ignore[union-attr]
                print(file=process.stdin, flush=True)
        for process in processes:
            process.communicate("\n")
        events = pd.DataFrame(events)
        seconds = pd.DataFrame(dict(iter(events.groupby("clients")["seconds"].apply(list).items())))
        seconds, peaks = seconds[2:], events.groupby("clients")["peak"]
        table = pd.DataFrame(
            {
                "method": method,
                "ms": seconds.median() * 1000,
                "ratio": seconds.div(seconds[clients[0]], axis=0).median(),
                "early_mb": peaks.nth(rounds // 5).to_numpy(),
                "peak_mb": peaks.last(),
            }
        )
        for name, part in (("disk_mb", "."), ("state_mb", "state")):
            files = [(path / part).rglob("*.*") for path in paths]
            table[name] = [sum(file.stat().st_size for file in of) / 1e6 for of in files]
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", default="100,1000,10000,100000")
    parser.add_argument("--methods", default="fedavg,scaffold")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(*args.child)
    clients = sorted(map(int, args.clients.split(",")))
    print(f"{machine()}, one thread, torch {torch.__version__}; {args.rounds} rounds")
    for method in args.methods.split(","):
        print(measure(method, clients, args.rounds).round(2).to_string(), flush=True)


if __name__ == "__main__":
    main()
