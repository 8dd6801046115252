"""How alike the clients' loss surfaces are: norms and directions of their Hessians, their sharpest directions.

H_N and H_D of Mendieta et al., "Local Learning Matters" (CVPR 2022), equations 3 and 4, as the paper defines them and as
its released code computes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import pandas as pd
from pydantic import Field

from fldiag.diagnostics.matching.summary import summary
from fldiag.registry import diagnostic
from fldiag.results.table import table

if TYPE_CHECKING:
    from fldiag.runs.history import History


@diagnostic(
    "matching",
    on="clients",
    draw={
        "": "fldiag.diagnostics.matching.picture:draw",
        "-curvature": "fldiag.diagnostics.matching.picture:curvature",
    },
    summary=summary,
    example="checkpoints/digits-fedavg-s0-1a2b3c4d --samples 500",
)
def matching(
    history: History,
    *,
    on: Annotated[
        Literal["both", "client", "global"],
        Field(
            description="Whose data to take the Hessians on: each client's own (client), all clients' "
            "(global), or both."
        ),
    ] = "both",
    k: Annotated[int, Field(ge=0, description="Number of eigenvectors (0: none).")] = 5,
    every_round: Annotated[
        bool | None,
        Field(
            description="Use all rounds instead of only the last (default if --rounds is given)."
        ),
    ] = None,
    rtol: Annotated[
        float,
        Field(
            gt=0, lt=1, description="Allowed relative standard error where diagonals are estimated."
        ),
    ] = 0.02,
    max_products: Annotated[
        int,
        Field(
            ge=2,
            description="Maximum number of Hessian-vector products for an estimate or a spectrum.",
        ),
    ] = 200,
    tol: Annotated[
        float, Field(gt=0, lt=1, description="Allowed relative error of each eigenvalue.")
    ] = 1e-3,
    seed: Annotated[int, Field(description="Random seed.")] = 0,
) -> pd.DataFrame:
    """Measure how similar the clients' Hessians are: H_N, H_D, top eigenvalues, traces, overlap of eigenspaces.

    Hessians H_k of the clients' trained weights, on each client's own training data (``on`` client) or on all clients'
    (global); by default both. Rows:

    - ``H_N`` (||D_k|| - ||D_j||)^2 and ``H_D`` <D_k, D_j> / (||D_k|| ||D_j||) of every pair (scope pair), and their means
      over ordered pairs (scope global) without and with the pairs k = j (column ``self_pairs``; they add 0 and 1, so
      with C clients H_N shrinks by (C-1)/C). Column ``diag_mode``: D is the ``diag``onal (the paper's form), or has one
      trace for every parameter tensor (``tensor_trace``; the released code's form, with global data and self pairs).
    - of every client, and of the aggregated model on global data: ``loss``, the top ``k`` ``eigenvalue`` with residuals
      (lambda_max is index 1), ``eigenvalue_ratio``, ``trace`` (H_T), ``diagonal_norm``.
    - ``eigenspace_overlap`` of the top-k eigenspaces on own data (global if not asked for): the mean squared cosine of their
      principal angles; 1 for the same space, about k / P by chance, P weights. Of every pair and its mean; of every client with
      the aggregated model as ``global_overlap``. None (``masked``, and not in the mean) where one of the k eigenvalues is zero:
      its eigenvector is arbitrary.

    Diagonals and traces are exact where ``spectrum --trace`` has them so; else estimates with the same random probes for all
    clients (``rtol``, ``max_products``), and the entries of a diagonal are then rough: column ``converged``, and rows
    ``diagonal_error``, the relative error of D; norms, also those in H_N and H_D, are without the part that noise
    adds. Of the last round with client weights, or all with ``every_round``. Cost a client: about 4 Hessian-vector
    products on own and on global data, and one spectrum.

    Raises FldiagError when no round has client weights, or no client's Hessian can be computed.
    """
    from fldiag.diagnostics.matching.hessians import Data, Settings, round_rows

    settings = Settings(k, tol, rtol, max_products, seed)
    places: list[Data] = ["client", "global"] if on == "both" else [on]
    rows = history.each_round(
        lambda stored: round_rows(history, stored, places, settings),
        every_round=every_round,
    )
    rows = [{"masked": row["value"] is None, **row} for row in rows]
    return table([*rows, *history.notes], **history.common)
