"""The local learning coefficient: how fast the volume of low loss around the weights shrinks, sampled by Langevin dynamics.

Lau et al. (arXiv 2308.12108): the abstract and a released sampler were read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from pydantic import Field

from fldiag.errors import FldiagError
from fldiag.execution.workspace import workspace
from fldiag.plotting import style
from fldiag.plotting.tables import compares_runs, floats, names, need, select
from fldiag.registry import diagnostic
from fldiag.results.select import number, only
from fldiag.results.summary import Item, Note, Say, Small
from fldiag.results.table import Row, table
from fldiag.seeding import torch_rng

if TYPE_CHECKING:
    from torch import Tensor

    from fldiag.problem.problem import Problem

PICTURE = "picture of the local learning coefficient"
COLUMNS = {
    "run": "checkpoint",
    "value": "λ̂",
    "stderr": "± stderr",
    "r_hat": "R-hat",
    "nbeta": "nβ",
    "gamma": "γ",
    "step": "step",
    "below": "draws below the checkpoint",
    "step_bias": "bias of the step at most",
}
#: Chains whose R-hat is above this disagree.
AGREEMENT = 1.1
#: The default step times the largest curvature that a first chain met: it inflates the variance in that direction by a ninth.
STABLE = 0.4
#: A first chain that leaves is begun again with a tenth of the step, at most so often.
ATTEMPTS = 8
#: Its number.
PILOT = -1
#: A larger bias of the step than this is remarked.
BIASED = 0.2
#: Minibatches from which the variance of their gradient is estimated.
MINIBATCHES = 20


@compares_runs
def draw(frame: pd.DataFrame) -> Figure:
    """A panel a checkpoint: n beta (L(w) - L(w*)) along each chain, burn-in shaded, with the estimate and its standard error.
    Raises FldiagError for another table."""
    need(frame, ("metric", "run", "index", "chain", "value", "stderr"), PICTURE)
    select(frame, "excess", PICTURE)
    frame = frame.assign(run=names(frame["run"]))
    runs = list(dict.fromkeys(frame["run"]))
    with style.paper():
        fig, axes = style.panels(len(runs), 2.1, across=min(2, len(runs)))
        for ax, run in zip(axes, runs, strict=True):
            traces = only(frame, run=run, metric="excess")
            steps = floats(traces["index"])
            for place, (_, trace) in enumerate(traces.groupby("chain")):
                ax.plot(
                    floats(trace["index"]),
                    floats(trace["value"]),
                    linewidth=0.6,
                    alpha=0.8,
                    color=style.look(place).color,
                )
            ax.axvspan(0, steps.max() / 2, color="#888888", alpha=0.15, linewidth=0)
            for row in only(frame, run=run, metric="llc").dropna(subset=["value"]).itertuples():
                value, error = float(row.value), float(row.stderr)
                ax.axhline(value, color="black", linewidth=0.9)
                ax.axhspan(value - error, value + error, color="black", alpha=0.2, linewidth=0)
            ax.set_title(run)
            ax.set_xlabel("step")
            ax.set_xlim(0, steps.max())
            ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            ax.grid(True, axis="y")
        axes[0].set_ylabel("nβ (L(w) − L(w*))")
        handles = [
            Line2D([], [], color=style.look(0).color, linewidth=0.6),
            Line2D([], [], color="black", linewidth=0.9),
        ]
        style.legend(fig, handles, ["a colour a chain; shaded: burn-in", "λ̂ ± stderr"], ncols=2)
    return fig


def summary(frame: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[Item]:
    rows: list[Row] = []
    for run, part in frame.groupby("run", sort=False):
        (estimate,) = only(part, metric="llc").to_dict("records")
        cells = ("value", "stderr", "r_hat", "nbeta", "gamma", "step")
        rows.append(
            {
                "run": run,
                **{name: None if pd.isna(v := estimate.get(name)) else v for name in cells},
                **{metric: number(part, metric) for metric in ("below", "step_bias")},
            }
        )
    yield Small(rows, COLUMNS)
    yield Say(
        "λ̂ is that of this n, β and γ: compare checkpoints at the same ones; half the number of weights is what a regular model "
        "has, less is degenerate"
    )
    for note in frame["note"].dropna().unique() if "note" in frame.columns else ():
        yield Note(str(note))


@dataclass(frozen=True)
class Sampler:
    """What chains sample: exp(-n beta L(w) - gamma / 2 ||w - w*||^2), every ``thin``-th state, from minibatches of ``m``."""

    nbeta: float
    gamma: float
    thin: int
    m: int | None
    tol: float
    seed: int


def gradient_of_minibatches(
    problem: Problem, size: int, seed: int, chain: int
) -> Callable[[Tensor], Tensor]:
    """w [P] -> the gradient of the mean loss of other ``size`` examples at each call, drawn without replacement."""
    import torch

    from fldiag.curvature.hvp import derivative
    from fldiag.problem.trees import cut

    x, y = problem.read(0, problem.n)
    rng = torch_rng(seed, "minibatches of a chain", chain)

    def gradient(w: Tensor) -> Tensor:
        index = torch.randperm(problem.n, generator=rng)[:size].to(problem.device)
        at = w.to(problem.w).detach().requires_grad_()
        with torch.enable_grad(), problem.guarded():
            loss = problem.criterion(problem.call(at, cut(x, index)), cut(y, index)).reshape(())
            (part,) = derivative(loss, [at])
        total = torch.zeros_like(w) if part is None else part.to(w)
        return total + problem.weight_decay * w

    return gradient


def largest_eigenvalue(
    problem: Problem, w: Tensor | None, tol: float, seed: int
) -> tuple[float, Tensor]:
    """Of the Hessian at w, at least 0, with its eigenvector [P]."""
    from fldiag.problem.eigenpairs import eigenpairs

    operator = problem.hessian(w)
    pairs = eigenpairs(problem, 1, tol=tol, max_products=100, seed=seed, operator=operator)
    return max(float(pairs.values[0]), 0.0), pairs.vectors[0]


def run_chain(
    problem: Problem, chain: int, *, sampler: Sampler, step: float, draws: int
) -> dict[str, Any]:
    """n beta (L(w) - L(w*)) at ``draws`` states of a chain, the largest curvature where it ends and the variance of the gradient
    along it (both None where the chain left)."""
    import torch

    from fldiag.curvature.langevin import langevin
    from fldiag.problem.eigenpairs import finite_scores

    nbeta, thin, m, seed = sampler.nbeta, sampler.thin, sampler.m, sampler.seed
    gradient: Callable[[Tensor], Tensor] = problem.gradient
    if m is not None:
        gradient = gradient_of_minibatches(problem, m, seed, chain)
    centre = finite_scores(problem).loss
    rng = torch_rng(seed, "noise of a chain", chain)
    states = langevin(lambda w: nbeta * gradient(w), problem.w.double(), step, sampler.gamma, rng)
    excess = np.full(draws, np.nan)
    for i, w in enumerate(islice(states, thin - 1, draws * thin, thin)):
        excess[i] = nbeta * (problem.loss(w)[0] - centre)
        workspace().show(i + 1, draws, f"chain {chain}")
        if not math.isfinite(excess[i]):
            excess[i] = np.nan
            return {"excess": excess, "curvature": None, "variance": None}
    top, direction = largest_eigenvalue(problem, w, sampler.tol, seed)
    variance = 0.0
    if m is not None:
        slopes = torch.stack([gradient(w) @ direction.to(w) for _ in range(MINIBATCHES)])
        variance = nbeta**2 * float(slopes.var())
    return {"excess": excess, "curvature": nbeta * top + sampler.gamma, "variance": variance}


def default_step(problem: Problem, sampler: Sampler, draws: int) -> float:
    """``STABLE`` over the largest curvature at the weights and where a first chain ends, which is as long as a burn-in.

    Raises FldiagError where chains leave at all lengths that are tried.
    """
    top, _ = largest_eigenvalue(problem, None, sampler.tol, sampler.seed)
    curvature = sampler.nbeta * top + sampler.gamma
    for _ in range(ATTEMPTS):
        pilot = run_chain(problem, PILOT, sampler=sampler, step=STABLE / curvature, draws=draws)
        end = pilot["curvature"]
        if end is not None:
            return STABLE / max(curvature, end)
        curvature *= 10
    raise FldiagError(
        f"chains leave the weights at every step down to {10 * STABLE / curvature:.1g}",
        "choose a larger gamma: --gamma",
    )


def estimate_rows(results: Sequence[Mapping[str, Any]], draws: int, step: float) -> list[Row]:
    """lambda-hat from the last ``draws`` of chains, or why there is none."""
    import torch

    from fldiag.curvature.langevin import inflation, split_r_hat

    excess = np.array([result["excess"][-draws:] for result in results])
    bias = max(
        math.inf if r["curvature"] is None else inflation(r["curvature"], step, r["variance"])
        for r in results
    )
    if not math.isfinite(bias):
        text = f"a chain left the weights at a step of {step:.3g}: choose a shorter one, --step {step / 10:.1g}"
        return [{"metric": "llc", "value": None, "note": text}]
    means = excess.mean(1)
    value, stderr = float(means.mean()), float(means.std(ddof=1)) / math.sqrt(len(means))
    r_hat = split_r_hat(torch.from_numpy(excess))
    row: Row = {"metric": "llc", "value": value, "stderr": stderr, "r_hat": r_hat}
    row["converged"] = r_hat <= AGREEMENT
    if not row["converged"]:
        text = (
            f"chains disagree, with means from {means.min():.4g} to {means.max():.4g} (R-hat {r_hat:.3g}, "
            f"allowed {AGREEMENT:g}): more --draws, a larger --thin or a larger --gamma"
        )
        row |= {"value": None, "stderr": None, "note": text}
    elif value < -stderr:
        text = (
            f"the loss around the weights is lower than at them (nβ times the difference {value:.4g} ± {stderr:.2g}), "
            "so they are no minimum on this slice: take the slice they were trained on, or a larger --gamma"
        )
        row |= {"value": None, "stderr": None, "note": text}
    elif bias > BIASED:
        row["note"] = (
            f"the step of {step:.3g} (and minibatches) inflate variances by up to {bias:.0%}: a shorter --step, or a larger --m"
        )
    below: Row = {"metric": "below", "value": float((excess < 0).mean())}
    chains: list[Row] = [
        {"metric": "chain_mean", "index": i, "chain": i, "value": float(mean)}
        for i, mean in enumerate(means)
    ]
    return [row, below, {"metric": "step_bias", "value": bias}, *chains]


@diagnostic(
    "llc",
    meta={"read": "Lau et al.: abstract, and a released sampler"},
    draw=draw,
    summary=summary,
    example="checkpoints/example/fedsol-digits.pt --samples 200",
)
def llc(
    problem: Problem,
    *,
    chains: Annotated[int, Field(ge=2, description="Independent chains.")] = 4,
    draws: Annotated[
        int, Field(ge=4, description="Draws of each chain, after as many of burn-in.")
    ] = 100,
    thin: Annotated[int, Field(ge=1, description="Steps from one draw to the next.")] = 5,
    step: Annotated[
        float | None,
        Field(gt=0, description="Length of a step (default: 0.4 / (nβ λ₁ + γ), see below)."),
    ] = None,
    gamma: Annotated[
        float, Field(gt=0, description="Strength of the pull γ/2 ‖w − w*‖² to the weights.")
    ] = 100.0,
    m: Annotated[
        int | None, Field(ge=1, description="Examples of the gradient of a step (default: all).")
    ] = None,
    tol: Annotated[
        float,
        Field(gt=0, lt=1, description="Allowed relative error of the eigenvalues for the step."),
    ] = 1e-2,
    seed: Annotated[int, Field(description="Random seed.")] = 0,
) -> pd.DataFrame:
    """Estimate the local learning coefficient: how degenerate a minimum is, also where its Hessian is singular.

    With L the mean loss on the slice of n examples, w* the weights and beta = 1 / ln n:

    - ``llc`` lambda-hat = n beta (E[L(w)] - L(w*)) over w ~ exp(-n beta L(w) - gamma/2 ||w - w*||^2) (Lau et al. 2023, their
      estimator of the local learning coefficient), by stochastic-gradient Langevin dynamics w <- w - eps/2 (n beta grad L(w) +
      gamma (w - w*)) + N(0, eps I) from w*. ``stderr`` over the ``chains``; ``r_hat``: split R-hat, ``converged`` where it is at
      most 1.1.
    - ``below`` share of the draws whose loss is below L(w*): of a minimum none, but for noise of the slice.
    - ``step_bias`` largest share by which ``step`` (and minibatches) inflate the variance of the chains in the sharpest direction
      where they end, exact for a quadratic; lambda-hat is inflated by less.
    - ``chain_mean`` of each chain (``index``), and ``excess`` n beta (L(w) - L(w*)) of each draw with burn-in (``index``: the
      step; ``chain``).

    ``step`` is by default 0.4 / (n beta lambda_1 + gamma), with lambda_1 the largest eigenvalue of the Hessian at w* and where a
    first chain, as long as a burn-in, ends; its draws do not count.

    For a regular model lambda is half the number of weights. At finite n lambda-hat depends on n, beta and gamma: weights along
    which n beta times the curvature is small against gamma hardly count. L is the loss as it stands, weight decay included, and
    stands for a negative log-likelihood. Of the source the abstract and a released sampler were read.

    Args:
        problem: A loss around weights.
        chains: Chains, each with noise of its own.
        draws: Of each chain; the loss of a draw is that of the whole slice.
        thin: Steps a draw; a chain takes 2 draws * thin gradients.
        step: In units of squared weights.
        gamma: In units of one over squared weights.
        m: Examples of a minibatch, drawn without replacement.
        tol: Relative.
        seed: Of noise and minibatches.

    Returns:
        A row a number, and loss and accuracy at the weights. ``llc`` is masked, with the reason in ``note``, where chains
        disagree or leave, and where the mean loss of the draws is below L(w*) by more than its standard error.

    Raises:
        FldiagError: one example, a loss that is a sum, minibatches of a loss that couples its examples, or a loss that is not
            finite at the weights.

    >>> from torch import nn, zeros
    >>> from fldiag.problem.problem import Problem
    >>> net = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.zeros_(net.weight)
    >>> flat = Problem(net, nn.functional.mse_loss, (zeros(9, 1), zeros(9, 1)))
    >>> rows = llc(flat, draws=4).set_index("metric")["value"]
    >>> float(rows["llc"])  # no weight matters
    0.0
    """
    from fldiag.problem.eigenpairs import loss_rows

    if problem.n < 2:
        raise FldiagError(
            "beta = 1 / ln n is undefined for one example", "give more examples", usage=True
        )
    if problem.reduction == "sum":
        raise FldiagError(
            "the loss is the sum over the slice, and the local learning coefficient is that of the mean",
            "leave out reduction = 'sum'",
            usage=True,
        )
    m = None if m is not None and m >= problem.n else m
    if m is not None and problem.batch_dependent:
        raise FldiagError(
            "the loss couples the examples of a batch: minibatches would have another loss",
            "leave out --m",
            usage=True,
        )
    rows: list[Row] = loss_rows(problem)
    nbeta = problem.n / math.log(problem.n)
    sampler = Sampler(nbeta, gamma, thin, m, tol, seed)
    if step is None:
        step = default_step(problem, sampler, draws)
    results = list(
        workspace().map(
            run_chain,
            problem,
            range(chains),
            name=lambda chain: f"chain {chain}",
            step=step,
            draws=2 * draws,
            sampler=sampler,
        )
    )
    common: Row = {"estimator": "sgld", "nbeta": nbeta, "gamma": gamma, "step": step, "m": m}
    rows += [{**common, **row} for row in estimate_rows(results, draws, step)]
    rows += [
        {
            "metric": "excess",
            "estimator": f"sgld, chain {chain}",
            "chain": chain,
            "index": (i + 1) * thin,
            "value": float(value) if math.isfinite(value) else None,
        }
        for chain, result in enumerate(results)
        for i, value in enumerate(result["excess"])
    ]
    return table([{"masked": row["value"] is None, **row} for row in rows], **problem.common)
