"""What an executor costs and gains: overhead over serial work, start-up, and the speed-up of real work on two cores.

    python analyses/speed/execution.py [--turns N] [--out FOLDER]

Overhead: units that wait (no processor is needed, so workers do not crowd each other) for 0.03, 0.3 and 3 s, with 2 and 50 MB of
shared state, on one worker; the time of a unit beyond serial's, in percent. Start-up: until the first unit is done.
Speed-up: a round of CIFAR-sized clients, four runs of a sweep, a round of matching and a landscape, serial against two
processes, in turns; medians and the ratio of paired turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch

import fldiag
from fldiag.execution.start import started
from fldiag.results.machine import machine

SECONDS, SIZES = (0.03, 0.3, 3.0), (2, 50)  # of a unit; MB of shared state
EXECUTORS = ("processes:1", "dask")


def wait(state: np.ndarray, seconds: float) -> float:
    time.sleep(seconds)
    return float(state[0])


def overhead(turns: int) -> list[dict[str, object]]:
    rows = []
    for megabytes in SIZES:
        state = np.ones(megabytes * 2**20 // 8)
        for executor in EXECUTORS:
            began = time.perf_counter()
            with started(executor, wait, state) as pool, started("serial", wait, state) as serial:
                list(pool.map([0.0]))
                start = time.perf_counter() - began
                workers = getattr(pool, "workers", None) or len(pool.client.nthreads())  # type: ignore[attr-defined]
                for seconds in SECONDS:
                    units = [seconds] * max(2, int((1.5 if seconds < 1 else 6) / seconds))
                    ratios = []
                    for _ in range(turns):
                        here, there = (_time(lambda p=p, u=u: list(p.map(u)))
                                       for p, u in ((serial, units), (pool, units * workers)))
                        ratios.append(there / here)
                    rows.append({"executor": executor, "workers": workers, "shared_MB": megabytes, "unit_s": seconds,
                                 "start_s": round(start, 2), "overhead_percent": round(100 * (statistics.median(ratios) - 1), 1)})
                    print(rows[-1], flush=True)
    return rows


def _time(work: object) -> float:
    began = time.perf_counter()
    work()  # type: ignore[operator]
    return time.perf_counter() - began


def speedup(turns: int) -> list[dict[str, object]]:
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        numbers = iter(range(10**6))

        def fresh() -> Path:
            return Path(folder) / str(next(numbers))

        # images of CIFAR-10's size, made up: what they show does not change the time
        rng = np.random.default_rng(0)
        np.savez(Path(folder) / "images.npz", train_images=rng.integers(0, 256, (4000, 32, 32, 3), dtype=np.uint8),
                 train_labels=np.arange(4000) % 10, test_images=rng.integers(0, 256, (100, 32, 32, 3), dtype=np.uint8),
                 test_labels=np.arange(100) % 10)
        cifar = fldiag.Config.load("fedsol-cifar10-lda0.1", data__name=f"npz:{folder}/images.npz", data__augment=False,
                                   data__variant="", partition__kind="iid", clients__total=20, clients__per_round=8, rounds=4,
                                   checkpoint__every=100, checkpoint__clients="none")
        digits = fldiag.Config.load("digits", rounds=20, checkpoint__every=100, checkpoint__clients="none")
        run = fldiag.train(fldiag.Config.load("digits", rounds=2, checkpoint__clients="sampled"), out=fresh(), device="cpu")
        work = {
            "CIFAR rounds": lambda e: fldiag.train(cifar, out=fresh(), executor=e, device="cpu"),
            "runs of a sweep": lambda e: fldiag.sweep(digits, {"seed": [0, 1, 2, 3]}, out=fresh(), executor=e, device="cpu"),
            "matching": lambda e: fldiag.diagnose(run, "matching", executor=e, device="cpu"),
            "landscape": lambda e: fldiag.diagnose(run.checkpoint(), "landscape", executor=e, device="cpu", full=True, points=31),
        }
        for name, do in work.items():
            pairs = [tuple(_time(lambda e=e, do=do: do(e)) for e in ("serial", "processes:2")) for _ in range(turns)]
            rows.append({"work": name, "serial_s": round(statistics.median(a for a, _ in pairs), 2),
                         "processes_2_s": round(statistics.median(b for _, b in pairs), 2),
                         "speed_up": round(statistics.median(a / b for a, b in pairs), 2)})
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("figures/speed"))
    given = parser.parse_args()
    about = {"machine": machine(), "torch": torch.__version__, "capability": torch.backends.cpu.get_cpu_capability(),
             "threads": 1, "turns": given.turns}
    print(about)
    found = pd.concat([pd.DataFrame(overhead(given.turns)).assign(part="overhead"),
                       pd.DataFrame(speedup(given.turns)).assign(part="speed-up")]).assign(**about)
    given.out.mkdir(parents=True, exist_ok=True)
    found.to_csv(given.out / "execution.csv", index=False)
    print(given.out / "execution.csv")


if __name__ == "__main__":
    main()
