"""Flatness of the whole and of its parts: the global model against the clients' own, round by round.

Operational definitions of ours, in the spirit of Lee & Yoon, "Rethinking the flat minima searching in federated learning" (FedGF,
ICML 2024; the gap): only its abstract and opening were read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import pandas as pd
from pydantic import Field

from fldiag.choices import Products, Rtol
from fldiag.diagnostics.flatness.summary import summary
from fldiag.execution import workspace
from fldiag.registry import diagnostic
from fldiag.results.table import Row, table

if TYPE_CHECKING:
    from fldiag.runs.history import History


@diagnostic(
    "flatness",
    meta={"read": "FedGF: abstract and opening"},
    on="clients",
    draw="fldiag.diagnostics.flatness.picture:draw",
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
        int,
        Field(
            ge=1,
            description="Maximum number of gradients of each of the two ascents of an adaptive sharpness.",
        ),
    ] = 5,
    every: Annotated[
        int,
        Field(
            ge=1,
            description="Measure flatness in every N-th round and the last.",
        ),
    ] = 5,
    tol: Annotated[
        float, Field(gt=0, lt=1, description="Allowed relative error of each eigenvalue.")
    ] = 1e-3,
    rtol: Rtol = 0.02,
    max_products: Products = 200,
    seed: Annotated[int, Field(description="Random seed.")] = 0,
) -> pd.DataFrame:
    """Compare how flat the global model and the clients' models are: sharpness, lambda_1 and trace.

    F is the mean loss on all clients' training data and F_k on client k's, so F = sum p_k F_k with p_k its share of the
    examples; w_k a trained client's, w the aggregated weights. In every measured round:

    - ``loss`` and ``accuracy`` of every model on these data.
    - ``sharpness`` F(w + rho G / ||G||) - F(w) with G = grad F(w) (paired ``stderr`` over the examples; ``residual``: a bound
      for rounding), ``adaptive_sharpness`` max over ||delta / |w|||_2 <= ``adaptive_rho`` of F(w + delta) - F(w), which a
      rescaling of the layers leaves alone (two ascents of at most ``steps`` gradients, as in the diagnostic of that name), the
      largest ``eigenvalue`` (index 1, with ``residual``) and the ``trace`` of the Hessian: of F at w (moment aggregated, scope
      global), of every F_k at its w_k (moment trained), and of every F_k at w (moment aggregated).
    - ``sharpness_parts``, ``adaptive_sharpness_parts``, ``eigenvalue_parts``, ``trace_parts``: the p-weighted means over the
      clients (p_k adding up to 1 over those there are), at the w_k (moment trained) and at the one point w (moment aggregated);
      and the flatness gaps ``sharpness_gap``, ``adaptive_sharpness_gap``, ``eigenvalue_gap``, ``trace_gap``: F at w minus these.
      Below zero the whole is flatter than its parts. At one point the gap of the trace is 0, and that of the eigenvalue at
      most 0. ``stderr``: over the clients as a sample, the whole as it is (none of a gap at one point, where other clients
      would move the whole with its parts); ``residual``: what the errors of all eigenvalues, or of estimated traces, can add
      up to.
    - ``stability``: lr lambda_1 / 2 of every trained client at w_k (lr: that of the round), and its mean. Above 1, gradient
      descent without momentum on the quadratic that fits F_k there diverges (Cohen et al., ICLR 2021; excerpts were read).
      None where the run does not say lr, or its optimizer is not SGD.

    What a gradient of rounding noise would decide is ``masked``, with its reason in the column ``note``. Rounds whose number
    ``every`` divides, and the last, are measured. Traces are exact where ``trace`` has them exact. Cost of a
    measured round: a spectrum, a trace and some gradients on all data for the whole, as much for the parts at w, and again
    the trained clients' share of it.

    Raises FldiagError when no round has client weights, or in no round the curvature can be computed.
    """
    from fldiag.diagnostics.flatness.one_round import Settings, check_measured, round_rows

    settings = Settings(rho, adaptive_rho, steps, tol, rtol, max_products, seed)
    rounds = sorted({r for r in history.rounds if r % every == 0} | {history.rounds[-1]})
    rows: list[Row] = []
    for record in history.each():
        r = record.round
        if record.complete and r in rounds:
            with workspace().part(rounds.index(r), len(rounds), f"round {r}"):
                rows += round_rows(history, history.finite(record), settings)
    check_measured(rows, history.notes)
    rows = [{"masked": row["value"] is None, **row} for row in rows]
    return table([*rows, *history.notes], **history.common)
