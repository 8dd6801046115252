"""Loss landscapes of 41x41 points: the engine against a plain loop, and coarse to fine against all points."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from curvature_cases import Case
from curvature_peers import Answer
from curvature_turns import Timed, compare, turns
from torch import Tensor
from torch.nn.functional import cross_entropy

from fldiag.diagnostics.landscape import landscape
from fldiag.landscape.evaluator import Evaluator
from fldiag.landscape.grid import axis
from fldiag.problem.eigenpairs import eigenpairs
from fldiag.problem.problem import Problem

POINTS = 41
ROWS = 3  # of them are timed where every point is evaluated


def plain(case: Case, directions: Tensor, places: list[tuple[float, float]]) -> list[float]:
    """The loop everybody writes: set the weights, evaluate the batches."""
    params, batches = (
        list(case.module.parameters()),
        list(zip(case.x.split(500), case.y.split(500), strict=True)),
    )
    start, found = torch.nn.utils.parameters_to_vector(params).detach(), []
    with torch.no_grad():
        try:
            for a, b in places:
                torch.nn.utils.vector_to_parameters(
                    start + a * directions[0] + b * directions[1], params
                )
                found.append(
                    sum(float(cross_entropy(case.module(x), y)) * len(y) for x, y in batches)
                    / len(case.y)
                )
        finally:
            torch.nn.utils.vector_to_parameters(start, params)
    return found


def landscapes(case: Case, args: argparse.Namespace) -> None:
    d, grid = case.vectors[:2].float(), axis(POINTS, 1.0)
    rows = grid[np.linspace(0, POINTS - 1, ROWS).astype(int)]
    places = [(float(a), float(b)) for b in rows for a in grid]
    true = np.array(
        [
            case.double.loss(case.double.w + a * case.vectors[0] + b * case.vectors[1])[0]
            for a, b in places[::5]
        ]
    )
    low, high = float(true.min()), float(true.max())

    def truth(a: Answer) -> float:
        return float(np.max(np.abs(np.array(a.value[::5]) - true)) / (high - low))

    def engine() -> Answer:
        evaluate = Evaluator(Problem(case.module, cross_entropy, (case.x, case.y)), [d[0], d[1]])
        return Answer([evaluate(a, b)[0] for a, b in places])

    factor = POINTS / ROWS
    loop = Timed("plain loop", lambda seed: lambda: Answer(plain(case, d, places)), truth, factor)
    full = Timed("fldiag", lambda seed: engine, truth, factor)
    compare(
        "landscape",
        f"41x41 landscape, all points, float32 ({ROWS} of {POINTS} rows timed)",
        case,
        [full, loop],
        args,
    )

    def coarse(seed: int) -> Callable[[], Answer]:
        def run() -> Answer:
            p = Problem(case.module, cross_entropy, (case.x, case.y))
            frame = landscape(p, directions="eigen", points=POINTS, span=1.0, k=2, seed=seed)
            surface = frame[frame.metric == "loss"].value.to_numpy(float).reshape(POINTS, POINTS)
            points = (
                int(frame[frame.metric == "evaluated"].value.iloc[0])
                if (frame.metric == "evaluated").any()
                else POINTS**2
            )
            return Answer(surface, points, f"{points} of {POINTS**2} points evaluated")

        return run

    def of_range(a: Answer) -> float:
        # eigenvectors come with either sign: the surface may be mirrored
        at = [
            (round((b + 1) * (POINTS // 2)), round((x + 1) * (POINTS // 2))) for x, b in places[::5]
        ]
        mirrored = [
            s[tuple(np.array(at).T)]
            for s in (a.value, a.value[::-1], a.value[:, ::-1], a.value[::-1, ::-1])
        ]
        return float(min(np.max(np.abs(s - true)) for s in mirrored) / (high - low))

    def everything(seed: int) -> Callable[[], Answer]:
        def run() -> Answer:
            p = Problem(case.module, cross_entropy, (case.x, case.y))
            pairs = eigenpairs(p, 2, seed=seed, strict=True)
            began = time.perf_counter()
            evaluate = Evaluator(p, [pairs.vectors[0], pairs.vectors[1]])
            losses = [evaluate(a, b)[0] for a, b in places]
            rest.append((time.perf_counter() - began) * (factor - 1))
            return Answer(losses)

        return run

    rest: list[float] = []
    whole = Timed("all points", everything, None)
    fine = Timed("fldiag", coarse, of_range)
    turns([fine, whole], args.runs, args.limit, args.patience)
    # the rows that were not evaluated, at the speed of those that were
    whole.seconds = [s + r for s, r in zip(whole.seconds, rest, strict=False)]
    compare(
        "coarse",
        "41x41 landscape, coarse to fine / all points (both with their eigenvectors)",
        case,
        [fine, whole],
        argparse.Namespace(**{**vars(args), "runs": 0}),
    )
