"""What the number of clients costs: time a round, peak memory and disk for N = 100 to 100,000 clients, 100 of them sampled.

    python analyses/speed/scale.py [--clients 100,1000,10000,100000] [--methods fedavg,scaffold] [--rounds 100] [--turns 40]
                                   [--only memory|time] [--out FOLDER]

The small CNN (46,594 parameters) on noisy patterns: 32 examples a client, Dirichlet 0.3, one epoch in batches of 10. Every run
is a process of its own. Memory and disk: runs of ``--rounds``, one after the other, of which another process reads the PSS
(with children, from /proc/PID/smaps_rollup, Linux). Time: shorter runs side by side, a round of each in turn, so that what else
the machine does meets all of them; medians, and the median ratio to the fewest clients in the same turn. ``--only memory`` or
``time`` makes one of the two; each call adds to FOLDER/scale.csv, and the table is of all that is there. Aims: a peak of at
most 1.5 GB that does not grow with the rounds, and a round within 10 % of that with the fewest clients; ✗ where one is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import fldiag
from fldiag.results.machine import machine
from fldiag.runs.run import folder_size

SAMPLED, MOST_MB, MOST_TIMES, POLL = 100, 1500, 1.10, 0.2
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


def child(method: str, clients: int, rounds: int, folder: str, paced: str) -> None:
    """Train, and say every event on standard output; a ``paced`` one then waits for a line on standard input."""
    torch.set_num_threads(1)
    os.environ[VARIABLE] = str(clients)

    def tell(event: dict[str, Any]) -> None:
        print(json.dumps(event), flush=True)
        if paced == "paced":
            sys.stdin.readline()

    fldiag.train(config(method, clients, rounds), out=folder, device="cpu", on_event=tell)


def started(
    method: str, clients: int, rounds: int, folder: Path, pace: str
) -> subprocess.Popen[str]:
    words = [
        sys.executable,
        __file__,
        "--child",
        method,
        str(clients),
        str(rounds),
        str(folder),
        pace,
    ]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")


class Memory(threading.Thread):
    """Reads the PSS of a process and its children until ``done``; ``peaks``: MB, by the round in which they were read."""

    def __init__(self, process: int):
        super().__init__(daemon=True)
        self.process, self.round, self.peaks, self.done = (
            process,
            0,
            dict[int, float](),
            threading.Event(),
        )

    def run(self) -> None:
        while not self.done.wait(POLL):
            self.peaks[self.round] = max(self.peaks.get(self.round, 0.0), pss(self.process))


def pss(process: int) -> float:
    """MB; of processes that are gone, nothing."""
    total = 0.0
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{process}/smaps_rollup").read_text("utf-8")
        total = int(text.split("\nPss:")[1].split()[0]) * 1024 / 1e6
        for task in Path(f"/proc/{process}/task").iterdir():
            total += sum(
                pss(int(number)) for number in (task / "children").read_text("utf-8").split()
            )
    return total


def memory(method: str, clients: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        with started(method, clients, rounds, run, "free") as process:
            watch = Memory(process.pid)
            watch.start()
            for line in process.stdout or ():
                watch.round = json.loads(line)["round"]
            watch.done.set()
        if process.returncode:
            raise SystemExit(f"{method} with {clients} clients failed")
        early = max(mb for r, mb in watch.peaks.items() if r <= max(1, rounds // 5))
        return {
            "method": method,
            "clients": clients,
            "rounds": rounds,
            "early_mb": early,
            "peak_mb": max(watch.peaks.values()),
            "disk_mb": folder_size(run) / 1e6,
            "state_mb": folder_size(run / "state") / 1e6,
        }


def times(method: str, clients: list[int], turns: int) -> list[dict[str, Any]]:
    """Rounds of all numbers of clients in turn; the first one of each is left out."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        every = [
            stack.enter_context(started(method, n, turns + 1, Path(folder) / str(n), "paced"))
            for n in clients
        ]
        starts = [json.loads(process.stdout.readline()) for process in every]  # type: ignore[union-attr]
        assert all(event["event"] == "start" for event in starts)
        seconds: list[list[float]] = []
        for _ in range(turns + 1):
            seconds.append([])
            for process in every:
                print(file=process.stdin, flush=True)
                seconds[-1].append(json.loads(process.stdout.readline())["seconds"])  # type: ignore[union-attr]
        for process in every:
            process.communicate("\n" * 9)
    columns = list(zip(*seconds[1:], strict=True))
    return [
        {
            "method": method,
            "clients": n,
            "turns": turns,
            "round_s": statistics.median(mine),
            "ratio": statistics.median(a / b for a, b in zip(mine, columns[0], strict=True)),
        }
        for n, mine in zip(clients, columns, strict=True)
    ]


def table(found: pd.DataFrame) -> str:
    lines = [
        "| method | clients N | time a round, ms (ratio to the fewest clients) | peak PSS MB (first fifth of the rounds) "
        "| disk MB (of it states) |",
        "|---|---|---|---|---|",
    ]
    for (method, clients), row in found.iterrows():
        other = "" if 1 / MOST_TIMES <= row["ratio"] <= MOST_TIMES else " ✗"
        large = "" if row["peak_mb"] <= min(MOST_MB, MOST_TIMES * row["early_mb"]) else " ✗"
        time = (
            "not measured"
            if pd.isna(row["ratio"])
            else f"{1000 * row['round_s']:,.0f} ({row['ratio']:.2f}){other}"
        )
        mb = (
            "not measured"
            if pd.isna(row["peak_mb"])
            else f"{row['peak_mb']:,.0f} ({row['early_mb']:,.0f}){large}"
        )
        disk = (
            "not measured"
            if pd.isna(row["disk_mb"])
            else f"{row['disk_mb']:,.0f} ({row['state_mb']:,.0f})"
        )
        lines.append(f"| {method} | {clients:,} | {time} | {mb} | {disk} |")
    rounds, turns = (
        ", ".join(sorted({f"{n:g}" for n in found[key].dropna()})) for key in ("rounds", "turns")
    )
    where = (
        f"{', '.join(set(found['machine']))}, one thread, torch {', '.join(set(found['torch']))}"
    )
    return "\n".join(
        [*lines, "", f"Memory and disk: {rounds} rounds; time: {turns} turns. {where}."]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", default="100,1000,10000,100000")
    parser.add_argument("--methods", default="fedavg,scaffold")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--only", choices=("memory", "time"))
    parser.add_argument("--out", type=Path, default=Path("figures/speed"))
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        method, number, rounds, folder, pace = given.child
        child(method, int(number), int(rounds), folder, pace)
        return
    given.out.mkdir(parents=True, exist_ok=True)
    file, key = given.out / "scale.csv", ["method", "clients"]
    clients = [int(n) for n in given.clients.split(",")]
    for method in given.methods.split(","):
        rows = times(method, clients, given.turns) if given.only != "memory" else []
        for n in clients if given.only != "time" else ():
            rows.append(memory(method, n, given.rounds))
        for row in rows:
            print(row, flush=True)
            new = pd.DataFrame(
                [{**row, "machine": machine(), "torch": torch.__version__}]
            ).set_index(key)
            found = new.combine_first(pd.read_csv(file).set_index(key)) if file.is_file() else new
            found.to_csv(file)
    print(
        table(
            found.reindex(
                columns=[
                    "round_s",
                    "ratio",
                    "early_mb",
                    "peak_mb",
                    "disk_mb",
                    "state_mb",
                    "rounds",
                    "turns",
                    "machine",
                    "torch",
                ]
            )
        )
    )


if __name__ == "__main__":
    main()
