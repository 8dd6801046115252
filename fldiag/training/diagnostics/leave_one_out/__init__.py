"""Which clients harm, verified: what the global model would be without each.

In the spirit of influence functions for federations (arXiv 2605.20341; definitions of ours, the paper's abstract was read).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import Field

from fldiag.choices import Data, Device, Download, Model, Root
from fldiag.execution.workspace import workspace
from fldiag.plotting.tables import of_clients
from fldiag.registry import diagnostic
from fldiag.results.select import number, only
from fldiag.results.summary import Item, Say, Small, missing_notes
from fldiag.results.table import Row, table
from fldiag.runs.run import Run

Window = Annotated[int, Field(ge=1)]
RANKS = {
    "run": "run",
    "left": "left out of",
    "estimator": "predicted by",
    "value": "Spearman",
    "interval": "95 % interval",
    "n": "clients",
}
EFFECTS = {
    "client": "client",
    "aggregate": "aggregate",
    "predicted": "predicted",
    "training": "training",
    "rounds": "of the last",
}


def summary(frame: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[Item]:
    """The rank correlations, and every client's effect where there is one run."""
    yield Say(
        f"change of the {options['slice']} loss when a client is left out: above 0 the client helps, below 0 it harms"
    )
    runs = list(only(frame, scope="client")["run"].unique())
    if len(runs) == 1:
        yield Small(_effects(frame, int(only(frame, metric="effect")["index"].max())), EFFECTS)
    ranks = only(frame, metric="rank_correlation")
    yield Small(
        [
            {
                "run": row["run"],
                "left": _of(int(row["index"])),
                "estimator": row["estimator"],
                "value": row["value"],
                "interval": None
                if pd.isna(row["low"])
                else f"{row['low']:.2f} to {row['high']:.2f}",
                "n": int(row["n_clients"]),
            }
            for _, row in ranks.iterrows()
        ],
        RANKS,
    )
    yield from missing_notes(frame)


def _effects(frame: pd.DataFrame, last: int) -> list[Row]:
    clients = sorted(only(frame, metric="effect")["client"].dropna().unique())
    return of_clients(
        [
            {
                "client": int(k),
                "aggregate": number(frame, "effect", client=k, index=0),
                "predicted": number(
                    frame, "predicted_effect", client=k, index=0, estimator="quadratic"
                ),
                "training": number(frame, "effect", client=k, index=last),
                "rounds": last,
            }
            for k in clients
        ]
    )


def _of(index: int) -> str:
    return (
        "the aggregate"
        if index == 0
        else f"the last {index} rounds"
        if index > 1
        else "the last round"
    )


@diagnostic(
    "leave-one-out",
    meta={"read": "arXiv 2605.20341: abstract only"},
    on="runs",
    draw="fldiag.training.diagnostics.leave_one_out.picture:draw",
    summary=summary,
    example="checkpoints/digits-fedavg-s0-1a2b3c4d --last 1 --last 5",
)
def leave_one_out(
    runs: Sequence[Run],
    *,
    last: Annotated[
        tuple[Window, ...],
        Field(description="Leave each client out of the training of this many last rounds."),
    ] = (1, 5, 10),
    slice: Annotated[
        Literal["train", "test"],
        Field(
            description="Examples on which the loss is taken: train (all "
            "clients' training examples) or test."
        ),
    ] = "train",
    model: Model = None,
    data: Data = None,
    root: Root = None,
    download: Download = False,
    device: Device = "auto",
    seed: Annotated[int, Field(description="Random seed of the bootstrap.")] = 0,
) -> pd.DataFrame:
    """Leave each client out of the last aggregate, and of the last rounds of training, and measure what changes.

    F is the loss on ``slice``, w the final weights, w_k a client's trained ones, p_k its aggregation weight. The last rounds are
    trained again, with all clients and without each in turn: the schedule stays, the client's updates are dropped and the
    other weights of its rounds add up to 1. ``index``: 0 for the aggregate of the last round, R for the last R rounds. Rows:

    - ``effect`` F(without the client) - F(w), of every client: above 0 it helps, below 0 it harms (paired ``stderr`` over the
      examples). Of the aggregate it is exact, by w + c (w - w_k), c = p_k / (1 - p_k); estimator retrained otherwise. Only
      clients that are sampled in the rounds left out, and at least twice where these are several; the others are masked.
    - ``predicted_effect``, without training: g'd + d'Hd / 2 with d the displacement c (w - w_k) summed over the rounds, and g
      and H of F at w (estimator quadratic); or the same with g and H of each round's own new weights, added up
      (rounds-quadratic). ``linear``, ``rounds-linear``: without the second term.
    - ``rank_correlation``: Spearman's, of predicted and true over the clients, of all runs together (column run: pooled, where
      there are several), with a 95 % bootstrap interval over clients (``low``, ``high``); a client's numbers of several runs
      stay together.

    Methods whose server does more than the weighted mean have no prediction. Methods with state are trained again from the
    start; others from the stored weights. Cost: training R rounds for every client and R.

    Raises FldiagError when a run cannot be trained again, or does not aggregate.
    """
    from fldiag.training.diagnostics.leave_one_out import measure
    from fldiag.training.setup import setup_of

    tables = []
    for i, run in enumerate(runs):
        setup = setup_of(run, device=device, root=root, download=download, model=model, data=data)
        with workspace().part(i, len(runs), ""):
            rows = measure.of_run(run, setup, sorted(set(last)), slice)
        tables.append(table(rows, **run.common))
    frame = pd.concat(tables, ignore_index=True)
    ranks = measure.rank_correlations(frame, seed)
    return pd.concat(
        [
            frame,
            table(
                ranks, run=runs[0].name if len(runs) == 1 else "pooled", scope="global", slice=slice
            ),
        ],
        ignore_index=True,
    )
