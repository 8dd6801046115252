"""The small tables of Hessian matching that a person reads first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from fldiag.plotting.tables import of_clients
from fldiag.results.select import number, only, rounds
from fldiag.results.summary import Item, Note, Say, Small, missing_notes
from fldiag.results.table import Row

#: What is shown of every client, from its own data where they were asked for.
CLIENTS = {
    "client": "client",
    "slice": "slice",
    "loss": "loss",
    "lambda_max": "λ_max",
    "residual": "± residual",
    "trace": "trace H_T",
    "stderr": "± stderr",
    "overlap": "overlap with global",
}
PAIRS = {
    "round": "round",
    "diag_mode": "D",
    "data": "Hessians on",
    "H_N": "H_N",
    "H_D": "H_D",
    "H_N_self": "H_N with self pairs",
    "H_D_self": "H_D with self pairs",
    "form": "as in",
}
FORMS = {("diag", "client"): "paper", ("tensor_trace", "global"): "released code (with self pairs)"}
#: Rounds whose means are shown, the last ones.
MOST = 12


def summary(frame: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[Item]:
    last = int(frame["round"].dropna().max())
    yield Say(f"round {last}, clients after local training")
    yield Small(_clients(only(frame, round=last)), CLIENTS)
    yield Small(
        [row for r in rounds(frame, "H_N")[-MOST:] for row in _pairs(only(frame, round=r), r)],
        PAIRS,
    )
    overlap = number(frame, "eigenspace_overlap", round=last, scope="global")
    if overlap is not None:
        yield Say(
            f"mean squared cosine between the top-{options['k']} eigenspaces of two clients: {overlap:.3g}"
        )
    rough = only(frame, round=last, metric="diagonal_error").dropna(subset="value")
    if len(rough):
        who = ", ".join(
            sorted({"the global model" if pd.isna(c) else str(int(c)) for c in rough["client"]})
        )
        yield Note(
            f"estimated diagonals (clients {who}): off by up to {rough['value'].max():.0%} in norm, so H_N and H_D with "
            "D = diag are rough; those of tensor traces are better (raise --max-products)"
        )
    yield from missing_notes(frame)


def _clients(frame: pd.DataFrame) -> list[Row]:
    """A row a client, by the first slice of its Hessian in the table, and one of the aggregated model."""
    rows = []
    trained = only(frame, moment="trained", scope="client")
    groups: list[tuple[str, pd.DataFrame]] = [
        (str(int(c)), part) for c, part in trained.groupby("client")
    ]
    groups.append(("global model", only(frame, moment="aggregated", scope="global")))
    for client, part in groups:
        trace = only(part, metric="trace")
        if trace.empty:
            continue
        of_slice = only(part, slice=trace["slice"].iloc[0])
        rows.append(
            {
                "client": client,
                "slice": str(trace["slice"].iloc[0]),
                "loss": number(of_slice, "loss"),
                "lambda_max": number(of_slice, "eigenvalue", index=1),
                "residual": number(of_slice, "eigenvalue", column="residual", index=1),
                "trace": number(of_slice, "trace"),
                "stderr": number(of_slice, "trace", column="stderr"),
                "overlap": number(part, "global_overlap"),
            }
        )
    clients = [row for row in rows if row["client"] != "global model"]
    return of_clients(clients) + rows[len(clients) :]


def _pairs(frame: pd.DataFrame, round: int) -> list[Row]:
    means = only(frame, metric=("H_N", "H_D"), scope="global")
    rows = []
    for mode, data in dict.fromkeys(zip(means["diag_mode"], means["data"], strict=True)):
        part = only(means, diag_mode=mode, data=data)
        row: Row = {
            "round": round,
            "diag_mode": mode,
            "data": data,
            "form": FORMS.get((mode, data)),
        }
        for metric in ("H_N", "H_D"):
            row[metric] = number(part, metric, self_pairs=False)
            row[f"{metric}_self"] = number(part, metric, self_pairs=True)
        rows.append(row)
    return rows
