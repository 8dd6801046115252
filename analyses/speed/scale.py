"""What the number of clients costs: time a round, peak memory and disk for N = 100 to 100,000 clients, 100 of them sampled.

    python analyses/speed/scale.py [--clients 100,1000,10000,100000] [--methods fedavg,scaffold] [--rounds 100] [--out FOLDER]

The small CNN (46,594 parameters) on ``synthetic``: 32 examples a client, Dirichlet 0.3, one epoch in batches of 10. Every run is
a process of its own, of which another one reads the memory: PSS of it and its children, from /proc/PID/smaps_rollup (Linux).
Runs may be measured in several calls: each adds its rows to FOLDER/scale.csv, and the table is of all that are there. Aims: a
peak of at most 1.5 GB that does not grow with the rounds, and a round within 10 % of that with the fewest clients; ✗ where one
is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import fldiag
from fldiag.checkpoint import prune
from fldiag.results.machine import machine

SAMPLED, MOST_MB, MOST_TIMES, POLL = 100, 1500, 1.10, 0.2


def config(method: str, clients: int, rounds: int) -> fldiag.Config:
    return fldiag.Config.load(
        "digits", data__name="synthetic", partition__kind="dirichlet", partition__alpha=0.3, clients__total=clients,
        clients__per_round=SAMPLED, rounds=rounds, method__name=method, train__epochs=1, train__batch_size=10, train__lr=0.05)


def child(method: str, clients: int, rounds: int, folder: str) -> None:
    """Train, and say every event on standard output."""
    torch.set_num_threads(1)
    fldiag.train(config(method, clients, rounds), out=folder, device="cpu",
                 on_event=lambda event: print(json.dumps(event), flush=True))


class Memory(threading.Thread):
    """Reads the PSS of a process and its children until ``done``; ``peaks``: MB, by the round in which they were read."""

    def __init__(self, process: int):
        super().__init__(daemon=True)
        self.process, self.round, self.peaks, self.done = process, 0, dict[int, float](), threading.Event()

    def run(self) -> None:
        while not self.done.wait(POLL):
            self.peaks[self.round] = max(self.peaks.get(self.round, 0.0), pss(self.process))


def pss(process: int) -> float:
    """MB; of processes that are gone, nothing."""
    total = 0.0
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
        total = int(text.split("\nPss:")[1].split()[0]) * 1024 / 1e6
        for task in Path(f"/proc/{process}/task").iterdir():
            total += sum(pss(int(number)) for number in (task / "children").read_text().split())
    return total


def measure(method: str, clients: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        began, run = time.perf_counter(), Path(folder) / "run"
        words = [sys.executable, __file__, "--child", method, str(clients), str(rounds), str(run)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            memory, seconds, start = Memory(process.pid), list[float](), 0.0
            memory.start()
            assert process.stdout is not None
            for line in process.stdout:
                event = json.loads(line)
                memory.round = event["round"]
                if event["event"] == "start":
                    start = time.perf_counter() - began
                elif event["event"] == "round":
                    seconds.append(event["seconds"])
            memory.done.set()
        if process.returncode:
            raise SystemExit(f"{method} with {clients} clients failed")
        early = max(mb for r, mb in memory.peaks.items() if r <= max(1, rounds // 5))
        state = prune.size(run / "state") / 1e6
        return {"method": method, "clients": clients, "rounds": rounds, "start_s": start, "round_s": statistics.median(seconds),
                "early_mb": early, "peak_mb": max(memory.peaks.values()), "disk_mb": prune.size(run) / 1e6, "state_mb": state,
                "machine": machine(), "torch": torch.__version__, "threads": 1}


def table(found: pd.DataFrame) -> str:
    lines = ["| method | clients N | start s | time a round, ms (ratio to the fewest clients) "
             "| peak PSS MB (first fifth of the rounds) | disk MB (of it states) |", "|---|---|---|---|---|---|"]
    for method, rows in found.groupby("method", sort=False):
        first = rows["round_s"].iloc[0]
        for row in rows.itertuples():
            times, grown = row.round_s / first, row.peak_mb / row.early_mb
            slow = " ✗" if times > MOST_TIMES else ""
            large = " ✗" if row.peak_mb > MOST_MB or grown > MOST_TIMES else ""
            lines.append(f"| {method} | {row.clients:,} | {row.start_s:.1f} | {1000 * row.round_s:,.0f} ({times:.2f}){slow} "
                         f"| {row.peak_mb:,.0f} ({row.early_mb:,.0f}){large} | {row.disk_mb:,.0f} ({row.state_mb:,.0f}) |")
    about = found[["machine", "torch", "threads", "rounds"]].drop_duplicates()
    ends = [f"{row.rounds} rounds on {row.machine}, {row.threads} thread, torch {row.torch}." for row in about.itertuples()]
    return "\n".join([*lines, "", *ends])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", default="100,1000,10000,100000")
    parser.add_argument("--methods", default="fedavg,scaffold")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("figures/speed"))
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        method, clients, rounds, folder = given.child
        child(method, int(clients), int(rounds), folder)
        return
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "scale.csv"
    found = pd.read_csv(file) if file.is_file() else pd.DataFrame()
    for method in given.methods.split(","):
        for clients in map(int, given.clients.split(",")):
            row = measure(method, clients, given.rounds)
            print(row, flush=True)
            found = pd.concat([found, pd.DataFrame([row])]).drop_duplicates(["method", "clients"], keep="last")
            found = found.sort_values(["method", "clients"])
            found.to_csv(file, index=False)
    print(table(found))


if __name__ == "__main__":
    main()
