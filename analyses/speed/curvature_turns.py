"""Tools in turns, with time limits, and a line of the table for each of them beside fldiag."""

from __future__ import annotations

import argparse
import contextlib
import gc
import signal
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from curvature_cases import Case
from curvature_peers import Answer

#: Smallest ratio aimed for: (job, tool) -> (small CNN, CIFAR CNN).
TARGETS = {
    ("top5", "PyHessian"): (5, 3),
    ("top5", "curvlinops + eigsh"): (2.5, 2),
    ("top5", "hessian-eigenthings"): (2.2, 1.8),
    ("top1", "PyHessian"): (1.5, 1.5),
    ("top1", "curvlinops + eigsh"): (4, 4),
    ("top1", "hessian-eigenthings"): (3.5, 3.5),
    ("density", "curvlinops + eigsh"): (5, 5),
    ("density", "hessian-eigenthings"): (2, 2),
    ("trace", "PyHessian"): (5, 5),
    ("trace", "curvlinops + eigsh"): (5, 5),
    ("trace", "hessian-eigenthings"): (15, 15),
    ("diagonal", "curvlinops + eigsh"): (5, 5),
}
#: Largest error allowed to ours.
ACCURACY = {
    "top5": 1e-3,
    "top1": 1e-3,
    "trace": 1e-5,
    "diagonal": 1e-5,
}


class OutOfTime(Exception):
    pass


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises OutOfTime between two Python operations (a product takes seconds at most)."""

    def stop(*_: Any) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Timed:
    """What a tool answered, and how long each answer took; ``failed``: why there will be no more."""

    def __init__(
        self,
        name: str,
        prepare: Callable[[int], Callable[[], Answer]],
        truth: Callable[[Answer], float] | None,
        factor: float = 1.0,
    ):
        self.name, self.prepare, self.truth, self.factor = name, prepare, truth, factor
        self.seconds: list[float] = []
        self.errors: list[float] = []
        self.products: list[int] = []
        self.notes: set[str] = set()
        self.failed = ""

    def turn(self, seed: int, limit: float) -> None:
        try:
            run = self.prepare(seed)
            gc.collect()
            began = time.perf_counter()
            with limited(limit), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                answer = run()
            self.seconds.append((time.perf_counter() - began) * self.factor)
        except OutOfTime:
            self.failed = f"stopped after {limit:.0f} s"
            return
        except Exception as error:  # a peer may fail in any way
            self.failed = f"fails: {type(error).__name__}: {str(error).strip().splitlines()[0][:60] if str(error) else ''}"
            return
        if self.truth:
            self.errors.append(self.truth(answer))
        if answer.products:
            self.products.append(answer.products)
        if answer.note:
            self.notes.add(answer.note)

    @property
    def error(self) -> str:
        return f"{max(self.errors):.1e}" if self.errors else "–"

    @property
    def spent(self) -> str:
        return f"{statistics.median(self.products):.0f}" if self.products else "–"


def turns(sides: list[Timed], runs: int, limit: float, patience: float) -> None:
    """Each side once a turn, beginning with another one every time; ours is sides[0]."""
    began = time.perf_counter()
    for turn in range(runs):
        for i in range(len(sides)):
            side = sides[(i + turn) % len(sides)]
            if not side.failed:
                side.turn(turn, limit)
        if turn + 1 < runs and time.perf_counter() - began > patience:
            print(f"({patience:.0f} s are over: {turn + 1} of {runs} turns)")
            break


def compare(job: str, label: str, case: Case, sides: list[Timed], args: argparse.Namespace) -> None:
    turns(sides, args.runs, args.limit, args.patience)
    ours, *others = sides
    for peer in others:
        goal = (
            TARGETS.get((job, peer.name), (None, None))[case.name == "cifar"]
            if case.name != "resnet"
            else None
        )
        ratios = [a / b for a, b in zip(peer.seconds, ours.seconds, strict=False)]
        if ratios:
            ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
            verdict = (
                "–"
                if goal is None
                else f"≥ {goal:g}: {'met' if statistics.median(ratios) >= goal else 'MISSED'}"
            )
        elif peer.failed.startswith("stopped") and ours.seconds:
            ratio, verdict = (
                f"> {args.limit * peer.factor / statistics.median(ours.seconds):.1f}",
                f"≥ {goal:g}" if goal else "–",
            )
        else:
            ratio, verdict = "–", "–"
        notes = [
            *sorted(peer.notes),
            *(f"ours: {n}" for n in sorted(ours.notes)),
            *([peer.failed] if peer.failed else []),
        ]
        time_ = [f"{statistics.median(s.seconds):.3g}" if s.seconds else "–" for s in (peer, ours)]
        print(
            f"| {label} | {peer.name} | {time_[0]} | {time_[1]} | {ratio} | {verdict} | {peer.error} | {ours.error}"
            f"{flag(job, ours)} | {peer.spent} / {ours.spent} | {'; '.join(notes)} |",
            flush=True,
        )
    if ours.failed:
        print(f"| {label} | – | – | – | – | – | – | – | – | fldiag {ours.failed} |", flush=True)


def flag(job: str, ours: Timed) -> str:
    allowed = ACCURACY.get(job)
    return " TOO LARGE" if allowed and ours.errors and not max(ours.errors) <= allowed else ""
