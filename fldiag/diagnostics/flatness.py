"""Flatness of the whole and of its parts: the global model against the clients' own, round by round.

Operational definitions of ours, in the spirit of Lee & Yoon, "Rethinking the flat minima searching in federated learning" (FedGF,
ICML 2024; the gap): only its abstract and opening were read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
from pydantic import Field

from fldiag.diagnostics.matching import Unit, norm_and_trace, on_surfaces
from fldiag.diagnostics.sharpness import adaptive_scale, worst_case
from fldiag.diagnostics.spectrum import eigenvalue_rows
from fldiag.errors import FldiagError
from fldiag.execution import workspace
from fldiag.losses import noise_floor
from fldiag.plotting import style
from fldiag.plotting.style import dots, floats, lines, wide_range
from fldiag.problem.hessian import diagonal, eigenpairs
from fldiag.problem.problem import Problem
from fldiag.registry import diagnostic
from fldiag.results.table import (
    Options,
    Row,
    Sentence,
    SmallTable,
    Summary,
    last_round,
    number,
    only,
)
from fldiag.runs.history import History
from fldiag.sections import Products, Rtol, Seed, Tol

#: Metric -> how tables and panels call it.
MEASURES = {
    "sharpness": "sharpness",
    "adaptive_sharpness": "adaptive sharpness",
    "eigenvalue": "largest eigenvalue λ₁",
    "trace": "trace",
}
#: Column of the error that comes from computing, not from the choice of clients or examples.
ERRORS = {"eigenvalue": "bound", "trace": "stderr"}
CURVES = (
    "whole: F at w",
    "parts: mean of Fₖ at wₖ",
    "parts at one point: mean of Fₖ at w",
)


# Of one model


def sharpness(problem: Problem, rho: float) -> Row:
    """F(w + rho G / ||G||) - F(w); masked where the gradient G is rounding noise."""
    row: Row = {"metric": "sharpness", "estimator": "exact", "rho": rho, "value": None}
    g, before = problem.gradient(), problem.centre
    size = float(g.norm())
    if size < noise_floor(problem.dtype):
        return {**row, "note": f"the gradient has norm {size:.1e}, rounding noise"}
    after = problem.scores(problem.w.double() + rho / size * g)
    if not math.isfinite(after.loss):
        return {**row, "note": f"the loss after the step is {after.loss}"}
    rounding = torch.finfo(problem.dtype).eps * (abs(before.loss) + abs(after.loss))
    row |= {"value": after.loss - before.loss, "residual": rounding}
    if before.each is not None and after.each is not None:
        change = after.each - before.each
        row |= {"value": float(change.mean()), "stderr": before.stderr_of(change)}
    return row


def flatness_rows(
    problem: Problem,
    unit: Unit,
    *,
    step: float | None,
    radii: tuple[float, float],
    steps: int,
    tol: float,
    rtol: float,
    max_products: int,
    seed: int,
) -> list[Row]:
    """The rows of a model; of a trained client's with the stability of its gradient ``step``."""
    options: dict[str, Any] = {"seed": seed, "progress": workspace().show}
    adaptive = worst_case(problem, adaptive_scale(problem), radii[1], steps=steps, seed=seed)
    pairs = eigenpairs(problem, 1, tol=tol, max_products=max(100, max_products), **options)
    result = diagonal(problem, rtol=rtol, max_products=max_products, **options)
    eigenvalue = {**eigenvalue_rows(problem, pairs)[0], "bound": float(pairs.bounds[0])}
    rows = [
        *problem.centre.rows(problem),
        sharpness(problem, radii[0]),
        {**adaptive, "metric": "adaptive_sharpness"},
        eigenvalue,
        norm_and_trace(result, rtol)[-1],  # the trace
    ]
    if step is not None and unit[1] == "trained":
        scaled = {key: step / 2 * eigenvalue[key] for key in ("value", "residual", "bound")}
        rows.append({**eigenvalue, **scaled, "metric": "stability", "index": None})
    return [{**problem.common, **row} for row in rows]


# The whole against its parts


def gap_rows(rows: Sequence[Row]) -> list[Row]:
    """``…_parts`` and ``…_gap`` of every measure of a round, at the trained weights and at one point."""
    gaps: list[Row] = []
    for metric, moment in product(MEASURES, ("trained", "aggregated")):
        group = [row for row in rows if row["metric"] == metric and row["value"] is not None]
        whole = next((row for row in group if row["client"] is None), None)
        parts = [r for r in group if r["client"] is not None and r["moment"] == moment]
        mean = {"scope": "global", "moment": moment, **mean_of_parts(parts)}
        mean["index"] = 1 if metric == "eigenvalue" else None
        # at one point the whole is of the same clients: other clients would move both
        gap = {**mean, "stderr": mean["stderr"] if moment == "trained" else None}
        if whole is None:
            gap |= {"value": None, "stderr": None, "note": "the global model could not be measured"}
        elif parts:
            gap["value"] = whole["value"] - mean["value"]
            gap["residual"] = mean["residual"] + error(whole)
        gaps.append({**mean, "metric": f"{metric}_parts", "slice": "client:*/train"})
        gaps.append({**gap, "metric": f"{metric}_gap", "slice": "train"})
    return gaps


def mean_of_parts(parts: Sequence[Row]) -> Row:
    """sum p_k v_k of the clients' rows of a measure, with its standard error over clients as a sample (of a ratio, to first
    order) and what the errors of computing add up to; a reason where there are no rows."""
    m = len(parts)
    if not m:
        return {
            "value": None,
            "stderr": None,
            "n_clients": 0,
            "estimator": "exact",
            "note": "no client of this round could be measured",
        }
    n, values, errors = np.array([(r["n_examples"], r["value"], error(r)) for r in parts]).T.copy()
    p = n / n.sum()
    value = math.fsum(p * values)
    squares = np.sum((p * (values - value)) ** 2)
    return {
        "value": value,
        "stderr": float(np.sqrt(m / (m - 1) * squares)) if m > 1 else None,
        "residual": float(p @ errors),
        "n_clients": m,
        "n_examples": n.sum(),
        "estimator": " and ".join(sorted({row["estimator"] for row in parts})),
    }


def error(row: Row) -> float:
    """The numerical error of a measure: an eigenvalue's bound, an estimated trace's standard error, rounding of a sharpness."""
    return float(row.get(ERRORS.get(row["metric"], "residual")) or 0.0)


# Picture and summary


def draw(frame: pd.DataFrame) -> style.Figure:
    """Every measure of the whole, of its parts at their trained weights (band: standard error over the clients; a dot a client)
    and of its parts at the whole's weights, over the rounds."""
    looks = style.looks(CURVES)
    with style.paper():
        fig, axes = style.panels(len(MEASURES), 2.1, across=4, least=1.6)
        for ax, (metric, title) in zip(axes, MEASURES.items(), strict=True):
            rows, parts = only(frame, metric=metric), only(frame, metric=f"{metric}_parts")
            whole = only(rows, scope="global").assign(stderr=None)  # over examples
            curves = whole, *(only(parts, moment=m) for m in ("trained", "aggregated"))
            dots(ax, only(rows, scope="client", moment="trained"), style.look(1).color)
            lines(ax, dict(zip(CURVES, curves, strict=True)), looks)
            wide_range(ax, floats(pd.concat([rows, parts])["value"].dropna()))
            ax.set_title(title)
        style.legend_of_runs(fig, looks)
    return fig


def summary(frame: pd.DataFrame, options: Options) -> Summary:
    """Whole, parts and gaps of the last round."""
    last = only(frame, scope="global", round=last_round(frame, "trace_gap"))
    yield Sentence(
        "F: all clients' training loss, F_k: client k's; w: aggregated, w_k: trained weights"
    )
    cells: list[Row] = []
    for metric, text in MEASURES.items():
        cell: Row = {"measure": text, "F at w": number(last, metric)}
        for moment, at in (("trained", "w_k"), ("aggregated", "w")):
            cell[f"F_k at {at}"] = number(last, f"{metric}_parts", moment=moment)
            cell[f"gap at {at}"] = number(last, f"{metric}_gap", moment=moment)
        cell["± at w_k"] = number(last, f"{metric}_gap", column="stderr", moment="trained")
        cells.append(cell)
    yield SmallTable.of(cells)


# The diagnostic


@diagnostic(
    "flatness",
    meta={"read": "FedGF: abstract and opening"},
    on="run",
    draw=draw,
    summary=summary,
    example="checkpoints/digits-fedavg-s0-1a2b3c4d --every 5",
)
def flatness(
    history: History,
    *,
    rho: Annotated[
        float, Field(gt=0, description="Length of the ascent step that defines the sharpness.")
    ] = 0.05,
    adaptive_rho: Annotated[
        float, Field(gt=0, description="Radius of the adaptive sharpness: ‖δ/|w|‖₂ ≤ ρ.")
    ] = 0.5,
    steps: Annotated[
        int, Field(ge=1, description="Most gradients of each ascent of an adaptive sharpness.")
    ] = 5,
    every: Annotated[
        int, Field(ge=1, description="Measure flatness in every N-th round and the last.")
    ] = 5,
    tol: Tol = 1e-3,
    rtol: Rtol = 0.02,
    max_products: Products = 200,
    seed: Seed = 0,
) -> pd.DataFrame:
    """Compare how flat the global model and the clients' models are: sharpness, lambda_1 and trace.

    F is the mean loss on all clients' training data and F_k on client k's, so F = sum p_k F_k with p_k its share of the
    examples; w_k a trained client's, w the aggregated weights. In every measured round:

    - ``loss`` and ``accuracy`` of every model on these data.
    - ``sharpness`` F(w + rho G / ||G||) - F(w) with G = grad F(w) (paired ``stderr`` over the examples; ``residual``: a bound
      for rounding), ``adaptive_sharpness`` max over ||delta / |w|||_2 <= ``adaptive_rho`` of F(w + delta) - F(w), which a
      rescaling of the layers leaves alone (two ascents of at most ``steps`` gradients, as in the diagnostic ``sharpness``), the
      largest ``eigenvalue`` (index 1, with ``residual``) and the ``trace`` of the Hessian: of F at w (moment aggregated, scope
      global), of every F_k at its w_k (moment trained), and of every F_k at w (moment aggregated).
    - ``sharpness_parts``, ``adaptive_sharpness_parts``, ``eigenvalue_parts``, ``trace_parts``: the p-weighted means over the
      clients (p_k adding up to 1 over those there are), at the w_k (moment trained) and at the one point w (moment aggregated);
      and the flatness gaps ``sharpness_gap``, ``adaptive_sharpness_gap``, ``eigenvalue_gap``, ``trace_gap``: F at w minus these.
      Below zero the whole is flatter than its parts. At one point the gap of the trace is 0, and that of the eigenvalue at
      most 0. ``stderr``: over the clients as a sample, the whole as it is (none of a gap at one point, where other clients
      would move the whole with its parts); ``residual``: what the errors of all eigenvalues, or of estimated traces, can add
      up to.
    - ``stability``: lr lambda_1 / 2 of every trained client at w_k (lr: that of the round). Above 1, gradient descent without
      momentum on the quadratic that fits F_k there diverges (Cohen et al., ICLR 2021; excerpts were read). None where the run
      does not say lr, or its optimizer is not SGD.

    Cost of a measured round: a spectrum, a trace and some gradients on all data for the whole, as much for the parts at w, and
    again the trained clients' share of it.

    Args:
        history: A run with client weights and training examples.
        rho: In units of the weights.
        adaptive_rho: Relative to each weight.
        steps: Gradients on a whole slice.
        every: Rounds whose number it divides are measured, and the last.
        tol: Of the eigenvalues.
        rtol: Of traces where they are not exact.
        max_products: Hessian-vector products of a trace, and of an eigenvalue (of that at least 100).
        seed: Of starts and probes.

    Returns:
        A row a number, in units of the loss; ``masked``, with a reason in ``note``, where rounding noise would decide.

    Raises:
        FldiagError: no round has client weights, or in no round the curvature can be computed.
    """
    training, rows = history.training, list[Row]()
    is_sgd = "lr" in training and training.get("optimizer", "sgd") == "sgd"
    for stored in history.each():
        r = stored.round
        if r % every and r != history.rounds[-1]:
            continue
        units: list[Unit] = [
            (r, "aggregated", None, "global"),
            *((r, "aggregated", k, "client") for k, part in enumerate(history.parts) if len(part)),
            *((r, "trained", k, "client") for k in stored.ids),
        ]
        decay = training.get("lr_decay", 1.0) ** (r - 1)
        results = on_surfaces(
            history,
            units,
            flatness_rows,
            step=training["lr"] * decay if is_sgd else None,
            radii=(rho, adaptive_rho),
            steps=steps,
            tol=tol,
            rtol=rtol,
            max_products=max_products,
            seed=seed,
        )
        models = [row for result in results for row in result]
        rows += [*models, *({"round": r, **row} for row in gap_rows(models))]
    if all(row["value"] is None for row in rows):
        reason = history.notes[-1]["note"] if rows else "no measured round has client weights"
        raise FldiagError(f"no round has a flatness: {reason}", "choose other rounds")
    return history.table(rows)
