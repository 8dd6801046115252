"""Time of ``forgetting`` on a run of 100 rounds with 10 clients each: models evaluated side by side, or one by one.

    python analyses/speed/forgetting.py [--rounds 100] [--models small_cnn,mlp] [--threads 2]

The runs (digits, 10 of 20 clients, client weights of every round) are trained first, in a temporary folder. Printed for
each model: seconds for the whole table stacked, looped and by the fixed rule (``stack = auto``), in alternation, the
median of ``--repeats``, in brackets the processor's (of all threads, so that a busy machine shows); the rule's once more
with torch's own threads inside every layer instead of a model a thread; the peak memory of the process; and whether both
ways give the same numbers.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch

import fldiag
from fldiag import config
from fldiag.runs import pool
from fldiag.runs.history import History

WAYS: tuple[Literal["auto", "on", "off"], ...] = ("on", "off", "auto")


def timed(run: fldiag.Run, stack: Literal["auto", "on", "off"]) -> tuple[float, float, float]:
    """Seconds to open the run and make the table (wall, processor), and the mean of its values."""
    began, busy = time.perf_counter(), time.process_time()
    frame = fldiag.diagnose(History.of(run, stack=stack), "forgetting")
    return time.perf_counter() - began, time.process_time() - busy, float(frame["value"].mean())


@contextmanager
def inside(threads: int) -> Iterator[Callable[..., Any]]:
    """Models one after the other, each with all of torch's threads."""
    yield map


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", default="small_cnn,mlp")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(
        f"torch {torch.__version__}, {args.threads} threads, {args.rounds} rounds of 10 clients, digits\n"
    )
    print(
        f"{'model':<10} {'P':>8} {'stacked s':>15} {'looped s':>15} {'auto s':>15} {'inside s':>15} {'looped/stacked':>15}"
    )
    for name in args.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            overrides = [
                f"rounds={args.rounds}",
                f"model.name={name}",
                "train.epochs=1",
                "checkpoint.clients=sampled",
            ]
            run = fldiag.train(config.load("digits", overrides), out=Path(folder) / "run")
            seconds: dict[str, list[tuple[float, float]]] = {s: [] for s in (*WAYS, "inside")}
            means = {}
            for _ in range(args.repeats):
                for stack in WAYS:
                    wall, busy, means[stack] = timed(run, stack)
                    seconds[stack].append((wall, busy))
            for _ in range(args.repeats):
                with mock.patch.object(pool, "workers", inside):
                    seconds["inside"].append(timed(run, "auto")[:2])
            median = {
                s: tuple(statistics.median(v[i] for v in seconds[s]) for i in (0, 1))
                for s in seconds
            }
            texts = [f"{wall:.1f} ({busy:.1f})" for wall, busy in median.values()]
            ratio = median["off"][0] / median["on"][0]
            size = History.of(run).layout.size
            print(
                f"{name:<10} {size:>8} " + " ".join(f"{t:>15}" for t in texts) + f" {ratio:>15.2f}",
                flush=True,
            )
            if abs(means["on"] - means["off"]) > 1e-3:
                print(f"           the two ways differ: {means}")
    print(
        f"\npeak memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"
    )


if __name__ == "__main__":
    main()
