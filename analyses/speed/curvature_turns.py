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

from curvature_peers import Answer

#: The head of the table that ``compare`` prints.
HEAD = (
    "| job | tool | s | ratio (min–max) | largest error | products | notes |\n" + "|---" * 7 + "|"
)


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


def compare(job: str, sides: list[Timed], args: argparse.Namespace) -> None:
    """The sides in turns, and a line for each; ratios turn by turn to the first, which is ours."""
    turns(sides, args.runs, args.limit, args.patience)
    for side in sides:
        ratios = [a / b for a, b in zip(side.seconds, sides[0].seconds, strict=False)]
        cells = "– | –"
        if ratios:
            cells = f"{statistics.median(side.seconds):.3g} | {statistics.median(ratios):.2f} "
            cells += f"({min(ratios):.2f}–{max(ratios):.2f})"
        notes = " ".join([*side.notes, side.failed])
        print(
            f"| {job} | {side.name} | {cells} | {side.error} | {side.spent} | {notes} |", flush=True
        )
