"""The small table of forgetting that a person reads first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from fldiag.results.select import SPLITS, WHOLE, last_round, number, only, split_of, spread_rounds
from fldiag.results.summary import Item, Note, Say, Small, missing_notes, plus_minus
from fldiag.results.table import Row

COLUMNS = {
    "round": "round",
    "received": "received",
    "trained": "trained",
    "std": "± (clients)",
    "aggregated": "aggregated",
    "drop": "drop",
    "forgetting": "max over classes",
    "restored": "restored",
}
CLIENTS = {
    "client": "client",
    "trained": "trained",
    "drop": "drop",
    "error": "±",
    "forgetting": "max over classes",
    "forgotten": "forgotten",
    "learned": "learned",
    "restored": "restored",
    "seen": "on its classes",
    "unseen": "on others",
}
#: Clients that the table of clients shows.
MOST = 50
LOSSES = {
    "round": "round",
    "loss_received": "loss received",
    "loss_trained": "trained",
    "loss_aggregated": "aggregated",
}


def summary(frame: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[Item]:
    classes = bool((frame["metric"] == "accuracy").any())
    if options.get("by") == "client" and classes:
        yield from _by_client(frame)
        yield from missing_notes(frame)
        return
    rows = only(frame, slice=split_of(frame), **WHOLE).dropna(subset="value")
    keys = zip(rows["round"], rows["metric"], rows["moment"], strict=True)
    values = dict(zip(keys, rows["value"], strict=True))
    yield Small(
        [_row(values, r) for r in spread_rounds(frame, "loss")], COLUMNS if classes else LOSSES
    )
    yield from _average_forgetting(frame)
    yield from missing_notes(frame)


def _by_client(frame: pd.DataFrame) -> Iterator[Item]:
    """The clients of the last round, who lost most first."""
    split = split_of(frame)
    of_clients = only(frame, scope="client", slice=split, index=None, layer=None)
    r = last_round(of_clients, "drop")
    rows = []
    for client, part in only(of_clients, round=r).groupby("client"):
        trained = only(part, moment="trained")
        rows.append(
            {
                "client": int(client),
                "trained": number(trained, "accuracy"),
                "error": number(trained, "drop", column="stderr"),
                "seen": number(trained, "accuracy_seen"),
                "unseen": number(trained, "accuracy_unseen"),
                **{
                    metric: number(trained, metric)
                    for metric in ("drop", "forgetting", "forgotten", "learned", "restored")
                },
            }
        )
    rows.sort(key=lambda row: -math.inf if row["drop"] is None else row["drop"], reverse=True)
    yield Small(rows[:MOST], CLIENTS)
    rest = f", the {MOST} that lost most" if len(rows) > MOST else ""
    yield Say(f"round {r}, {len(rows)} clients{rest}; accuracies on {SPLITS[split]} examples")


def _average_forgetting(frame: pd.DataFrame) -> Iterator[Item]:
    row = only(frame, metric="average_forgetting", **WHOLE)
    if row.empty:
        return
    value, error, classes = (number(row, column=c) for c in ("value", "stderr", "n_classes"))
    note = row["note"].iloc[0] if "note" in row else None
    words = f"{classes:.0f} class{'' if classes == 1 else 'es'}" if classes else f"none: {note}"
    yield Say(
        f"after round {last_round(frame, 'average_forgetting')}: average forgetting (Chaudhry) "
        f"{plus_minus(value, error, share=True)} ({words})"
    )
    if classes and pd.notna(note):
        yield Note(f"average forgetting is from {note}")


def _row(values: Mapping[tuple[int, str, str], float], r: int) -> Row:
    def of(metric: str, moment: str) -> float | None:
        return values.get((r, metric, moment))

    row: Row = {"round": r, "std": of("accuracy_std", "trained")}
    for moment in ("received", "trained", "aggregated"):
        row |= {moment: of("accuracy", moment), f"loss_{moment}": of("loss", moment)}
    return row | {m: of(m, "trained") for m in ("drop", "forgetting", "restored")}
