"""Sharpness that a rescaling of the weights leaves alone, beside the plain one.

Adaptive sharpness: Kwon et al., "ASAM" (ICML 2021); Andriushchenko et al. (ICML 2023, arXiv 2302.07011).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from pydantic import Field

from fldiag.execution import workspace
from fldiag.plotting import style
from fldiag.plotting.tables import compares_runs, floats, names, need
from fldiag.registry import diagnostic
from fldiag.results.select import only
from fldiag.results.summary import Item, Note, Say, Small
from fldiag.results.table import Row, table

if TYPE_CHECKING:
    from fldiag.problem.problem import Problem

PICTURE = "picture of sharpness"
KINDS = {"adaptive": "adaptive: ‖δ / |w|‖₂ ≤ ρ", "plain": "plain: ‖δ‖₂ ≤ ρ"}
CASES = {"sharpness": "worst case", "average": "average case"}
COLUMNS = {
    "run": "checkpoint",
    "kind": "scale of the weights",
    "case": "case",
    "rho": "ρ",
    "value": "rise of the loss",
    "stderr": "± stderr",
    "converged": "converged",
}


def metric_rows(frame: pd.DataFrame, kind: str, case: str) -> pd.DataFrame:
    return only(frame, metric=f"{kind}_{case}")


@compares_runs
def draw(frame: pd.DataFrame) -> Figure:
    """Bars of the worst case and of the average case, with standard errors: adaptive on
    the left, plain on the right, a colour a checkpoint. Raises FldiagError for another table."""
    need(frame, ("metric", "run", "value", "stderr"), PICTURE)
    frame = frame.assign(run=names(frame["run"]))
    cases = [c for c in CASES if any(len(metric_rows(frame, kind, c)) for kind in KINDS)]
    runs = list(dict.fromkeys(frame["run"]))
    looks = style.looks(runs)
    with style.paper():
        fig, axes = style.panels(2, 0.9 + 0.17 * len(cases) * max(2, len(runs)))
        for ax, (kind, title) in zip(axes, KINDS.items(), strict=True):
            for place, run in enumerate(runs):
                shift = 0.8 / len(runs) * (place - (len(runs) - 1) / 2)
                part = only(frame, run=run)
                bars(ax, part, kind, cases, shift, 0.8 / len(runs), looks[run].color)
            ax.set_title(title)
            ax.set_xlabel("rise of the loss")
            ax.set_yticks(range(len(cases)), [CASES[case] for case in cases])
            ax.set_ylim(len(cases) - 0.4, -0.6)
            ax.axvline(0, color="black", linewidth=0.5)
            ax.xaxis.set_major_locator(MaxNLocator(4))
            ax.grid(True, axis="x")
        style.legend(fig, [Patch(color=looks[run].color) for run in runs], runs, ncols=3)
    return fig


def bars(
    ax: Axes,
    frame: pd.DataFrame,
    kind: str,
    cases: list[str],
    shift: float,
    width: float,
    color: str,
) -> None:
    """A bar a case, with its standard error."""
    for y, case in enumerate(cases):
        rows = metric_rows(frame, kind, case).dropna(subset=["value"])
        error = np.nan_to_num(floats(rows["stderr"]))
        marks = {"elinewidth": 0.7, "capsize": 1.2, "ecolor": "#888888"}
        ax.barh(
            np.full(len(rows), y + shift),
            floats(rows["value"]),
            width,
            color=color,
            xerr=error if len(error) else None,
            error_kw=marks,
        )


def summary(frame: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[Item]:
    rows = [
        {
            "run": run,
            "kind": kind,
            "case": text,
            **{
                name: None if pd.isna(value := row[name]) else value
                for name in ("rho", "value", "stderr", "converged")
            },
        }
        for run, part in frame.groupby("run", sort=False)
        for kind in KINDS
        for case, text in CASES.items()
        for row in metric_rows(part, kind, case).to_dict("records")
    ]
    yield Small(rows, COLUMNS)
    ascents = "ascents"  # older tables lack the column
    if "starts" in frame.columns:
        ascents = f"{frame['starts'].max():.0f} ascents from opposite starts"
    yield Say(
        f"worst cases are the largest rise that {ascents} met, so lower bounds (--restarts looks "
        "elsewhere); adaptive numbers stay where a rescaling "
        "of the layers leaves the model alone, plain ones do not"
    )
    if frame["converged"].eq(False).fillna(False).any():
        yield Note("where converged is no, the ascent still rose: more --steps or --restarts")
    for note in frame["note"].dropna().unique() if "note" in frame.columns else ():
        yield Note(str(note))


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
    restarts: Annotated[
        int,
        Field(
            ge=1,
            description="Pairs of opposite random starts of each worst case; the largest rise counts.",
        ),
    ] = 1,
    draws: Annotated[
        int, Field(ge=1, description="Random perturbations of each average case.")
    ] = 20,
    tol: Annotated[
        float,
        Field(gt=0, lt=1, description="An ascent ends when a step adds less than this share."),
    ] = 1e-3,
    seed: Annotated[int, Field(description="Random seed.")] = 0,
) -> pd.DataFrame:
    """Measure how far the loss rises around the weights: worst and average case, each weight in its own scale, and plain.

    With F the loss on the slice:

    - ``adaptive_sharpness`` max over ||delta / |w|||_2 <= ``rho`` of F(w + delta) - F(w) (Kwon et al. 2021, their definition of
      adaptive sharpness with T_w = diag(|w|); the S_max of Andriushchenko et al. 2023 with c = |w| and the 2-norm), and
      ``plain_sharpness`` with ||delta||_2 <= ``plain_rho``. By projected ascent in the coordinates delta / |w| from random
      ``starts``, two opposite ones a restart, each of at most ``steps`` gradients: the largest rise that was met, a lower
      bound, and 0 where nothing rises. ``converged``: the last step of the highest ascent added less than ``tol`` of it.
      ``stderr``: over the examples, with delta as it is.
    - ``adaptive_average`` mean of F(w + delta) - F(w) over delta ~ N(0, ``deviation``^2 diag(w^2)) (their S_avg), and
      ``plain_average`` over N(0, ``plain_deviation``^2 I); ``stderr`` over the ``draws``.

    Multiplying a ReLU layer (with its bias) by a and dividing the next by a leaves the function and the adaptive numbers alone,
    while plain ones and eigenvalues change. A weight of exactly 0 stays, as delta / |w| is not defined there; how many there are
    is said in ``note``. Biases and the weights of norms are weights like the others (the ASAM code leaves biases in plain
    units, and adds 0.01 to |w|). The definitions are those of the papers' released code, of which the measure was read; of
    the texts excerpts were read.

    Args:
        problem: A loss around weights.
        rho: Relative to the weights, without unit.
        plain_rho: In units of the weights.
        deviation: Relative to each weight.
        plain_deviation: In units of the weights.
        steps: Gradients on the whole slice, of each ascent.
        restarts: Pairs of ascents of each worst case.
        draws: Evaluations of each average case.
        tol: Share of the rise.
        seed: Of starts and perturbations.

    Returns:
        A row a number, and loss and accuracy at the weights; values in units of the loss.

    Raises:
        FldiagError: the loss at the weights is not finite.

    >>> from torch import nn, ones, tensor
    >>> from fldiag.problem.problem import Problem
    >>> net = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.constant_(net.weight, 2.0)
    >>> at_minimum = Problem(net, nn.functional.mse_loss, (ones(4, 1), 2 * ones(4, 1)))
    >>> rows = sharpness(at_minimum, rho=0.5).set_index("metric")["value"]
    >>> round(float(rows["adaptive_sharpness"]), 4)  # (0.5 |w|)^2
    1.0
    """
    import torch

    from fldiag.problem.worst_case import (
        Climb,
        adaptive_scale,
        average_row,
        resting,
        worst_case_row,
    )

    how = Climb(steps, restarts, tol, seed)
    weights = adaptive_scale(problem)
    kinds = (
        ("adaptive", weights, rho, deviation, resting(problem)),
        ("plain", torch.ones_like(weights), plain_rho, plain_deviation, None),
    )
    rows: list[Row] = problem.centre.rows(problem)
    for i, (kind, scale, radius, spread, note) in enumerate(kinds):
        workspace().show(i, len(kinds), f"{kind} sharpness")
        measured = [
            worst_case_row(problem, f"{kind}_sharpness", scale, radius, how),
            average_row(problem, f"{kind}_average", scale, spread, draws, seed),
        ]
        rows += [{"note": note, **row} for row in measured]
    workspace().show(len(kinds), len(kinds), "sharpness")
    return table([{"masked": row["value"] is None, **row} for row in rows], **problem.common)
