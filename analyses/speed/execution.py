"""What an executor costs and gains: overhead over serial work, start-up, and the speed-up of real work on two cores.

    python analyses/speed/execution.py [--turns N] [--out FOLDER]

Overhead: units that wait (no processor is needed, so workers do not crowd each other) for 0.03, 0.3 and 3 s, with 2 and 50 MB of
shared state, on one worker; the time of a unit beyond serial's, in percent. Start-up: until the first unit is done.
Speed-up: a round of CIFAR-sized clients, four runs of a sweep, three rounds of matching and a landscape, serial against two
processes, in turns; medians and the ratio of paired turns. The start of the workers counts, but for the round.
``convolutions alone``: what two processes of this machine gain where there is nothing to send, to start or to put together;
no work can gain more.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import joblib
import numpy as np
import pandas as pd
import torch

import fldiag
from fldiag.execution import open_pool
from fldiag.results.machine import machine

WORKS = ("convolutions alone", "CIFAR round", "four runs", "matching", "landscape")
SECONDS, SIZES = (0.03, 0.3, 3.0), (2, 50)  # of a unit; MB of shared state
EXECUTORS = ("processes:1", "dask")


def cores() -> int:
    """Workers of a Dask cluster of this machine."""
    return max(1, joblib.cpu_count() // torch.get_num_threads())


def wait(state: np.ndarray, seconds: float) -> float:
    time.sleep(seconds)
    return float(state[0])


def overhead(turns: int) -> list[dict[str, object]]:
    rows = []
    for megabytes in SIZES:
        state = np.ones(megabytes * 2**20 // 8)
        for executor in EXECUTORS:
            began = time.perf_counter()
            with (
                open_pool(executor, wait, state) as pool,
                open_pool("serial", wait, state) as serial,
            ):
                list(pool.map([0.0]))
                start = time.perf_counter() - began
                workers = 1 if executor == "processes:1" else cores()
                for seconds in SECONDS:
                    units = [seconds] * max(2, int((1.5 if seconds < 1 else 6) / seconds))
                    ratios = []
                    for _ in range(turns):
                        here, there = (
                            _time(lambda p=p, u=u: list(p.map(u)))
                            for p, u in ((serial, units), (pool, units * workers))
                        )
                        ratios.append(there / here)
                    rows.append(
                        {
                            "part": "overhead",
                            "executor": executor,
                            "workers": workers,
                            "shared_MB": megabytes,
                            "unit_s": seconds,
                            "start_s": round(start, 2),
                            "overhead_percent": round(100 * (statistics.median(ratios) - 1), 1),
                        }
                    )
                    print(rows[-1], flush=True)
    return rows


def _time(work: object) -> float:
    began = time.perf_counter()
    work()  # type: ignore[operator]
    return time.perf_counter() - began


def kernels(state: None, unit: int) -> float:
    images, weights = torch.ones(50, 64, 32, 32), torch.ones(64, 64, 5, 5)
    return float(
        sum(torch.nn.functional.conv2d(images, weights, padding=2).sum() for _ in range(5))
    )


def ceiling(executor: str) -> float:
    with open_pool(executor, kernels, None) as pool:
        list(pool.map(range(2)))
        return _time(lambda: list(pool.map(range(20))))


def works(folder: Path) -> dict[str, Callable[[str], float]]:
    """What is done in turns: (executor) -> seconds. Each takes long enough that the start of two workers is a small part."""
    numbers = iter(range(10**6))

    def fresh() -> Path:
        return folder / str(next(numbers))

    # images of CIFAR-10's size, made up: what they show does not change the time
    rng = np.random.default_rng(0)
    np.savez(
        folder / "images.npz",
        train_images=rng.integers(0, 256, (5000, 32, 32, 3), dtype=np.uint8),
        train_labels=np.arange(5000) % 10,
        test_images=rng.integers(0, 256, (500, 32, 32, 3), dtype=np.uint8),
        test_labels=np.arange(500) % 10,
    )
    cifar = fldiag.Config.load(
        "fedsol-cifar10-lda0.1",
        data__name=f"npz:{folder}/images.npz",
        data__augment=False,
        data__variant=None,
        partition__kind="iid",
        clients__total=10,
        clients__per_round=10,
        train__epochs=1,
        rounds=4,
        checkpoint__every=4,
        checkpoint__clients="none",
    )
    digits = fldiag.Config.load(
        "digits", rounds=30, checkpoint__every=30, checkpoint__clients="none"
    )

    def rounds(executor: str) -> float:
        times: list[float] = []

        def after(event: dict[str, object]) -> None:
            if event["event"] == "round":
                times.append(time.perf_counter())

        fldiag.train(cifar, out=fresh(), executor=executor, device="cpu", on_event=after)
        return float(
            np.median(np.diff(times))
        )  # from the end of the first round on: the start of the workers is not a part

    def stored(config: fldiag.Config, rounds: int = 1) -> fldiag.Run:
        return fldiag.train(
            config.replace(rounds=rounds, checkpoint__every=1, checkpoint__clients="sampled"),
            out=fresh(),
            device="cpu",
        )

    return {
        "convolutions alone": ceiling,
        "CIFAR round": rounds,
        "four runs": lambda e: _time(
            lambda: fldiag.sweep(
                digits, {"seed": [0, 1, 2, 3]}, out=fresh(), executor=e, device="cpu"
            )
        ),
        "matching": lambda e, run=stored(digits, 3): _time(
            lambda: fldiag.diagnose(  # type: ignore[misc]
                run, "matching", rounds=(1, 2, 3), executor=e, device="cpu"
            )
        ),
        "landscape": lambda e, run=stored(cifar): _time(
            lambda: fldiag.diagnose(  # type: ignore[misc]
                run.checkpoint(),
                "landscape",
                executor=e,
                device="cpu",
                directions="random",
                points=9,
                samples=1000,
            )
        ),
    }


def speedup(turns: int, only: list[str]) -> Iterator[dict[str, object]]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for name, seconds in works(Path(folder)).items():
            if name not in only:
                continue
            pairs = [(seconds("serial"), seconds("processes:2")) for _ in range(turns)]
            yield {
                "part": name,
                "serial_s": round(statistics.median(a for a, _ in pairs), 2),
                "processes_2_s": round(statistics.median(b for _, b in pairs), 2),
                "speed_up": round(statistics.median(a / b for a, b in pairs), 2),
            }


def save(rows: list[dict[str, object]], about: dict[str, object], file: Path) -> None:
    """What is measured again takes the place of what was."""
    found = pd.DataFrame(rows).assign(**about)
    if file.exists():
        former = pd.read_csv(file)
        found = pd.concat([former[~former["part"].isin(found["part"])], found])
    file.parent.mkdir(parents=True, exist_ok=True)
    found.to_csv(file, index=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--only",
        nargs="*",
        choices=["overhead", *WORKS],
        default=[],
        help="these parts (default: all)",
    )
    parser.add_argument("--out", type=Path, default=Path("figures/speed"))
    given = parser.parse_args()
    about = {
        "machine": machine(),
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": 1,
        "turns": given.turns,
    }
    print(about)
    parts = given.only or ["overhead", *WORKS]
    file = given.out / "execution.csv"
    if "overhead" in parts:
        save(overhead(given.turns), about, file)
    for row in speedup(given.turns, [part for part in parts if part != "overhead"]):
        print(row, flush=True)
        save([row], about, file)  # a part that is done stays, whatever becomes of the next
    print(file)


if __name__ == "__main__":
    main()
