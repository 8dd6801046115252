"""How far the loss rises around weights, in the worst case and on average, each weight in its own scale and plain.

With a scale T (a diagonal) and delta = T u, the worst case is max over ||u||_2 <= rho of F(w + T u) - F(w), the average case the
mean over u ~ N(0, rho^2 I). T = diag(|w|) is adaptive sharpness (Kwon et al., "ASAM", ICML 2021; Andriushchenko et al., "A
modern look at the relationship between sharpness and generalization", ICML 2023, arXiv 2302.07011), T = I the plain one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

import numpy as np
import pandas as pd
import torch
from pydantic import Field
from torch import Tensor

from fldiag.plotting import style
from fldiag.plotting.style import bars
from fldiag.problem.problem import Problem
from fldiag.registry import diagnostic
from fldiag.results.table import Note, Options, Row, SmallTable, Summary, only, table
from fldiag.sections import Seed
from fldiag.seeding import torch_rng

KINDS = {"adaptive": "each weight in its own scale", "plain": "all weights in one scale"}
COLUMNS = {
    "run": "checkpoint",
    "metric": "measure",
    "rho": "ρ",
    "value": "rise of the loss",
    "stderr": "± (stderr)",
    "converged": "converged",
}
#: Length of an ascent's first step in radii: so long that the projection leaves little of the start, as in the power method. A
#: step that does not rise is shortened.
LONGEST, SHORTENED = 8.0, 0.25
#: An ascent ends when a step adds less than this share of the rise.
TOL = 1e-3


# The measure


def adaptive_scale(problem: Problem) -> Tensor:
    """|w| [P] in float64: a weight of exactly 0 stays where it is; biases and norm parameters are weights like the others."""
    return problem.w.double().abs()


def climb(
    rise: Callable[[Tensor], float],
    gradient: Callable[[Tensor], Tensor],
    radius: float,
    start: Tensor,
    *,
    steps: int,
    tol: float,
) -> tuple[float, Tensor, bool]:
    """The largest rise f(u) - f(0) over ||u||_2 <= radius that an ascent meets: a lower bound of the maximum, at least 0.

    A step goes from u to the projection of u + s g / ||g|| on the ball, and counts only if it rises; else s is shortened. On a
    convex quadratic long steps are those of the power method, so they end at the maximum but for starts of measure zero.

    Args:
        rise: u [P] -> f(u) - f(0).
        gradient: u [P] -> the gradient of f [P].
        radius: of the ball.
        start: [P], where the ascent begins; it is projected on the ball, too.
        steps: gradients at most.
        tol: an ascent ends when a step adds less than this share of the rise.

    Returns:
        The rise, its place u [P], and whether the last step added less than ``tol``.

    >>> curvatures = torch.tensor([4.0, 1.0, -9.0])
    >>> top = climb(lambda u: float(curvatures @ u**2) / 2, lambda u: curvatures * u, 0.5, torch.ones(3), steps=50, tol=1e-6)
    >>> round(top[0], 3), top[2]
    (0.5, True)
    """

    def project(u: Tensor) -> Tensor:
        return u * min(1.0, radius / max(float(u.norm()), 1e-300))

    u, step, new = project(start), LONGEST * radius, 0.0
    height, converged = rise(u), False
    for _ in range(steps if math.isfinite(height) else 0):
        g = gradient(u)
        size = float(g.norm())
        if not math.isfinite(size):
            break
        step = step if size else 0.0  # there is no way up
        while step > tol * radius:
            ahead = project(u + step / size * g)
            if (new := rise(ahead)) > height:
                break
            step *= SHORTENED
        else:
            converged = True
            break
        converged = new - height <= tol * new
        u, height = ahead, new
        if converged:
            break
    return (height, u, converged) if height > 0 else (0.0, torch.zeros_like(start), converged)


def worst_case(problem: Problem, scale: Tensor, rho: float, *, steps: int, seed: int) -> Row:
    """max over ||u||_2 <= rho of F(w + scale u) - F(w), as far as two ascents from opposite random starts climb: a lower bound.

    Near a minimum the largest rises lie along an eigenvector on either side, of which one is higher: so there are two.

    Args:
        problem: the loss F and the weights w.
        scale: [P].
        rho: radius.
        steps: gradients of each ascent at most.
        seed: of the starts.

    Returns:
        ``value``; ``stderr`` over the examples with delta as it is; ``residual``, a bound for rounding; ``converged``.
    """
    w, centre = problem.w.double(), problem.centre

    def rise(u: Tensor) -> float:
        value = problem.loss(w + scale * u)[0] - centre.loss
        return math.inf if math.isnan(value) else value  # overflow, as infinity is

    def gradient(u: Tensor) -> Tensor:
        return scale * problem.gradient(w + scale * u)

    start = _random_point(problem, "start of an ascent", seed)
    ascents = [climb(rise, gradient, rho, s, steps=steps, tol=TOL) for s in (start, -start)]
    height, u, converged = max(ascents, key=lambda ascent: ascent[0])
    each, moved = centre.each, problem.scores(w + scale * u).each
    stderr = None if each is None or moved is None else centre.stderr_of(moved - each)
    row = {"estimator": "ascent", "converged": converged, "stderr": stderr}
    return {**_row(problem, height, rho), **row}


def average_case(problem: Problem, scale: Tensor, rho: float, draws: int, seed: int) -> Row:
    """The mean of F(w + scale u) - F(w) over u ~ N(0, rho^2 I), with its standard error over the draws."""
    points = (_random_point(problem, "perturbation", seed, i) for i in range(draws))
    losses = np.array([problem.loss(problem.w.double() + rho * scale * u)[0] for u in points])
    stderr = float(losses.std(ddof=1)) / math.sqrt(draws) if draws > 1 else None
    row = _row(problem, float(losses.mean()) - problem.centre.loss, rho)
    return {**row, "estimator": "gaussian", "stderr": stderr}


def _random_point(problem: Problem, purpose: str, seed: int, number: int = 0) -> Tensor:
    """A standard normal vector [P] in float64."""
    rng = torch_rng(seed, purpose, number)
    return torch.randn(problem.layout.size, dtype=torch.float64, generator=rng).to(problem.device)


def _row(problem: Problem, rise: float, rho: float) -> Row:
    """A rise, with what rounding can add to a difference of two losses; masked where the loss overflows."""
    if not math.isfinite(rise):
        note = "the loss is not finite within this radius"
        return {"rho": rho, "value": None, "masked": True, "note": note}
    size = 2 * abs(problem.centre.loss) + abs(rise)
    return {"rho": rho, "value": rise, "residual": torch.finfo(problem.dtype).eps * size}


# Picture and summary


def draw(frame: pd.DataFrame) -> style.Figure:
    """Bars of the worst case and of the average case with standard errors: adaptive on the left, plain on the right, a colour a
    checkpoint."""
    looks = style.looks(frame["run"])
    with style.paper():
        fig, axes = style.panels(2, 0.9 + 0.34 * max(2, len(looks)))
        for ax, (kind, title) in zip(axes, KINDS.items(), strict=True):
            cases = {f"{kind}_sharpness": "worst case", f"{kind}_average": "average case"}
            rows = only(frame, metric=list(cases))
            bars(ax, rows.assign(case=rows["metric"].map(cases)), looks, category="case")
            ax.set(title=title, xlabel="rise of the loss (bars: ± standard error)")
        style.legend_of_runs(fig, looks)
    return fig


def summary(frame: pd.DataFrame, options: Options) -> Summary:
    rows = frame[frame["rho"].notna()].astype(object)
    yield SmallTable(rows.where(rows.notna(), None)[list(COLUMNS)].to_dict("records"), COLUMNS)
    if rows["converged"].eq(False).any():
        yield Note("where converged is no, the ascent still rose: more --steps")
    for note in dict.fromkeys(only(frame, masked=True).get("note", [])):
        yield Note(f"{note}: choose a smaller one")


# The diagnostic

Radius = Annotated[float, Field(gt=0, le=1e6)]


@diagnostic(
    "sharpness",
    meta={"read": "Kwon et al., Andriushchenko et al.: excerpts, and the measures in their code"},
    draw=draw,
    summary=summary,
    example="checkpoints/example/fedsol-digits.pt checkpoints/example/fedavg-digits.pt",
)
def sharpness(
    problem: Problem,
    *,
    rho: Annotated[
        Radius, Field(description="Radius of the adaptive worst case: ‖δ/|w|‖₂ ≤ ρ.")
    ] = 0.5,
    plain_rho: Annotated[
        Radius, Field(description="Radius of the plain worst case: ‖δ‖₂ ≤ ρ.")
    ] = 0.05,
    deviation: Annotated[
        Radius,
        Field(description="Deviation in the adaptive average case, as a share of each weight."),
    ] = 0.1,
    plain_deviation: Annotated[
        Radius, Field(description="Deviation of every weight in the plain average case.")
    ] = 0.01,
    steps: Annotated[
        int, Field(ge=1, description="Maximum number of gradients of each ascent.")
    ] = 5,
    draws: Annotated[
        int, Field(ge=1, description="Random perturbations of each average case.")
    ] = 20,
    seed: Seed = 0,
) -> pd.DataFrame:
    """Measure how far the loss rises around the weights: worst and average case, each weight in its own scale, and plain.

    With F the loss on the slice:

    - ``adaptive_sharpness`` max over ||delta / |w|||_2 <= ``rho`` of F(w + delta) - F(w) (Kwon et al. 2021, their definition of
      adaptive sharpness with T_w = diag(|w|); the S_max of Andriushchenko et al. 2023 with c = |w| and the 2-norm), and
      ``plain_sharpness`` with ||delta||_2 <= ``plain_rho``. By projected ascent in the coordinates delta / |w| from two opposite
      random starts, each of at most ``steps`` gradients: the largest rise that was met, a lower bound, and 0 where nothing
      rises. ``converged``: the last step of the higher ascent added less than 0.1 % of it. ``stderr``: over the examples, with
      delta as it is.
    - ``adaptive_average`` mean of F(w + delta) - F(w) over delta ~ N(0, ``deviation``^2 diag(w^2)) (their S_avg), and
      ``plain_average`` over N(0, ``plain_deviation``^2 I); ``stderr`` over the ``draws``.

    Multiplying a ReLU layer (with its bias) by a and dividing the next by a leaves the function and the adaptive numbers alone,
    while plain ones and eigenvalues change. A weight of exactly 0 stays, as delta / |w| is not defined there.
    Biases and the weights of norms are weights like the others (the ASAM code leaves biases in plain
    units, and adds 0.01 to |w|). The definitions are those of the papers' released code, of which the measure was read; of
    the texts excerpts were read.

    Args:
        problem: A loss around weights.
        rho: Relative to the weights, without unit.
        plain_rho: In units of the weights.
        deviation: Relative to each weight.
        plain_deviation: In units of the weights.
        steps: Gradients on the whole slice, of each ascent.
        draws: Evaluations of each average case.
        seed: Of starts and perturbations.

    Returns:
        A row a number, and loss and accuracy at the weights; values in units of the loss.

    Raises:
        FldiagError: the loss at the weights is not finite.

    >>> from torch import nn, ones
    >>> net = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.constant_(net.weight, 2.0)
    >>> at_minimum = Problem(net, nn.functional.mse_loss, (ones(4, 1), 2 * ones(4, 1)))
    >>> rows = sharpness(at_minimum, rho=0.5).set_index("metric")["value"]
    >>> round(float(rows["adaptive_sharpness"]), 4)  # (0.5 |w|)^2
    1.0
    """
    rows = problem.centre.rows(problem)
    weights = adaptive_scale(problem)
    for kind, scale, radius, spread in (
        ("adaptive", weights, rho, deviation),
        ("plain", torch.ones_like(weights), plain_rho, plain_deviation),
    ):
        worst = worst_case(problem, scale, radius, steps=steps, seed=seed)
        average = average_case(problem, scale, spread, draws, seed)
        rows.append({**worst, "metric": f"{kind}_sharpness"})
        rows.append({**average, "metric": f"{kind}_average"})
    return table(rows, **problem.common)
