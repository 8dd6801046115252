"""Why it forgot: a second-order account of what each client's update does to the loss on everybody's data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pandas as pd
from pydantic import Field

from fldiag.registry import diagnostic
from fldiag.results.select import only
from fldiag.results.summary import Item, Say, Small
from fldiag.results.table import table

if TYPE_CHECKING:
    from fldiag.runs.history import History


WHY = {
    "client": "client",
    "change": "change",
    "linear": "linear",
    "quadratic": "quadratic",
    "rest": "rest",
    "effect": "without it",
}


def summary(table: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[Item]:
    """The terms of every client's update in the last round."""
    yield Say(
        f"why: change of the {options['slice']} loss by every update = linear + quadratic + rest; change of the loss of the "
        "average when a client is left out"
    )
    last = only(table, round=table["round"].max())
    exact = only(last, estimator="exact", metric=list(WHY))
    lines = []
    for client, part in exact.groupby("client", dropna=False):
        values = dict(zip(part["metric"], part["value"].astype(float), strict=True))
        lines.append({"client": "all" if pd.isna(client) else str(int(client)), **values})
    yield Small(lines, WHY)


@diagnostic(
    "account",
    on="clients",
    draw="fldiag.diagnostics.account.picture:draw",
    summary=summary,
    example="checkpoints/digits-fedavg-s0-1a2b3c4d",
)
def account(
    history: History,
    *,
    slice: Annotated[
        Literal["train", "test"],
        Field(description="Examples on which the loss is taken: train or test."),
    ] = "train",
    k: Annotated[int, Field(ge=0, description="Number of Hessian eigenvectors.")] = 5,
    layers: Annotated[bool, Field(description="Also report by layer.")] = True,
    tol: Annotated[
        float, Field(gt=0, lt=1, description="Allowed relative error of each eigenvalue.")
    ] = 1e-3,
    max_products: Annotated[
        int,
        Field(ge=1, description="Maximum number of Hessian-vector products for the eigenvalues."),
    ] = 100,
    every_round: Annotated[
        bool | None,
        Field(
            description="Use all rounds instead of only the last (default if --rounds is given)."
        ),
    ] = None,
    seed: Annotated[int, Field(description="Random seed.")] = 0,
) -> pd.DataFrame:
    """Explain forgetting: decompose each update's change of the global loss to second order.

    At the received weights, with g and H gradient and Hessian of the loss on ``slice`` (all clients' training data, or
    the test split) and d a client's update: L(w + d) - L(w) = g'd + d'Hd / 2 + rest. Rows of each client (moment trained)
    and of the aggregated update (moment aggregated), with ``estimator``:

    - ``exact``: ``loss`` and ``accuracy`` (of the received and the aggregated model), ``change`` (the true one), ``linear``,
      ``quadratic``, ``rest`` = change - linear - quadratic.
    - ``eigen``: ``linear`` and ``quadratic`` along the top ``k`` Hessian eigenvectors (index from 1; ``residual`` of the
      eigenpair as in the spectrum), and along everything else (index 0), which sums up to the totals.
    - ``layer``: ``linear`` of every layer, ``quadratic`` of its diagonal block, and (layer "between layers") what the
      blocks leave of the quadratic term.
    - ``client``: how much each client's update contributes to the aggregated one by its aggregation weight p: linear
      p g'd, quadratic p d'H(aggregated update) / 2; client NA: what the server added beyond the weighted mean.

    - ``effect`` (moment aggregated, ``exact``): the loss of the mean of all other clients minus that of the aggregated model,
      with a paired ``stderr`` over the examples. Above 0 the client helps, below 0 it harms. Masked where the aggregated model
      is not the weighted mean, and for a client that is alone.

    Of the last round with client weights, or of all with ``every_round``. Cost a round: one spectrum, one
    Hessian-vector product an update, and one a layer and update.

    Raises FldiagError when no round has client weights or a loss is not finite.
    """
    from fldiag.diagnostics.account import measure

    rows = history.map_rounds(
        measure.round_rows,
        every_round=every_round,
        slice_name=slice,
        k=k,
        layers=layers,
        tol=tol,
        max_products=max_products,
        seed=seed,
    )
    rows = [
        {"masked": row["value"] is None or not np.isfinite(row["value"]), **row} for row in rows
    ]
    return table([*rows, *history.notes], **history.common)
