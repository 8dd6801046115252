"""How much the loss rises around weights, in the worst case and on average, with each weight moved in its own scale.

With scale T (a diagonal) and delta = T u: the worst case is max over ||u||_2 <= rho of F(w + T u) - F(w), the average case the
mean over u ~ N(0, rho^2 I). T = diag(|w|) is adaptive sharpness (Kwon et al., "ASAM", ICML 2021; Andriushchenko et al., "A modern
look at the relationship between sharpness and generalization", ICML 2023, arXiv 2302.07011), T = I the plain one. Of both
papers the measure in the authors' released code was read, of the text excerpts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fldiag.curvature.ascent import Ascent, climb, project
from fldiag.problem.problem import Problem
from fldiag.results.table import Row
from fldiag.seeding import torch_rng

AT_ZERO = "all weights are 0: no share of them moves the model"


@dataclass(frozen=True)
class Climb:
    """How a worst case is sought: at most ``steps`` gradients from each of ``restarts`` pairs of opposite random starts, to the
    share ``tol``."""

    steps: int = 5
    restarts: int = 1
    tol: float = 1e-3
    seed: int = 0


def adaptive_scale(problem: Problem) -> Tensor:
    """|w| [P] in float64: a weight of exactly 0 stays where it is, biases and norm parameters are weights like the others."""
    return problem.w.double().abs()


def resting(problem: Problem) -> str | None:
    """What is said of weights that are exactly 0, which adaptive perturbations leave alone; None where there are none."""
    count = int((problem.w == 0).sum())
    return f"{count:,} of {len(problem.w):,} weights are exactly 0 and stay" if count else None


def random_point(problem: Problem, purpose: str, seed: int, number: int = 0) -> Tensor:
    """A standard normal vector [P] in float64."""
    rng = torch_rng(seed, purpose, number)
    return torch.randn(problem.layout.size, dtype=torch.float64, generator=rng).to(problem.device)


def worst_case(problem: Problem, scale: Tensor, rho: float, how: Climb) -> Ascent:
    """max over ||u||_2 <= rho of F(w + scale u) - F(w), as far as ``how`` climbs: a lower bound.

    Near a minimum the largest rises lie along an eigenvector on either side, of which one is higher: so starts come in pairs.

    Raises FldiagError where the loss at the weights is not finite.
    """
    w, centre = problem.w.double(), problem.centre.loss

    def rise(u: Tensor) -> float:
        value = problem.loss(w + scale * u)[0] - centre
        return math.inf if math.isnan(value) else value  # overflow, as infinity is

    def gradient(u: Tensor) -> Tensor:
        return scale * problem.gradient(w + scale * u)

    points = (random_point(problem, "start of an ascent", how.seed, i) for i in range(how.restarts))
    ascents = [
        climb(rise, gradient, rho, project(start, rho), steps=how.steps, tol=how.tol)
        for point in points
        for start in (point, -point)
    ]
    best = max(ascents, key=lambda ascent: ascent.rise)
    return replace(best, gradients=sum(ascent.gradients for ascent in ascents))


def worst_case_row(problem: Problem, metric: str, scale: Tensor, rho: float, how: Climb) -> Row:
    """``worst_case`` as a row; ``stderr`` over the examples with delta as it is, ``residual``: a bound for rounding."""
    row: Row = {"metric": metric, "estimator": "ascent", "rho": rho, "starts": 2 * how.restarts}
    if not bool(scale.any()):
        return {**row, "value": None, "note": AT_ZERO}
    ascent = worst_case(problem, scale, rho, how)
    if not math.isfinite(ascent.rise):
        text = f"the loss is not finite within rho = {rho:g}: choose a smaller one"
        return {**row, "value": None, "note": text}
    centre = problem.centre
    displaced = problem.scores(problem.w.double() + scale * ascent.point).each
    stderr = None
    if centre.each is not None and displaced is not None:
        stderr = centre.stderr_of(displaced - centre.each)
    return {
        **row,
        "value": ascent.rise,
        "stderr": stderr,
        "residual": rounding(problem, ascent.rise),
        "gradients": ascent.gradients,
        "converged": ascent.converged,
    }


def rounding(problem: Problem, rise: float) -> float:
    """What rounding can add to a difference of two losses."""
    centre = problem.centre.loss
    return torch.finfo(problem.dtype).eps * (2 * abs(centre) + abs(rise))


def average_row(
    problem: Problem, metric: str, scale: Tensor, rho: float, draws: int, seed: int
) -> Row:
    """The mean of F(w + scale u) - F(w) over u ~ N(0, rho^2 I) as a row, with its standard error over the draws."""
    row: Row = {"metric": metric, "estimator": "gaussian", "rho": rho, "draws": draws}
    if not bool(scale.any()):
        return {**row, "value": None, "note": AT_ZERO}
    centre, w = problem.centre.loss, problem.w.double()
    rises = torch.tensor(
        [
            problem.loss(w + rho * scale * random_point(problem, "perturbation", seed, i))[0]
            for i in range(draws)
        ],
        dtype=torch.float64,
    )
    rises -= centre
    if not bool(rises.isfinite().all()):
        text = f"the loss is not finite at weights moved by a deviation of {rho:g}"
        return {**row, "value": None, "note": text}
    value = float(rises.mean())
    stderr = float(rises.std()) / math.sqrt(draws) if draws > 1 else None
    return {**row, "value": value, "stderr": stderr, "residual": rounding(problem, value)}
