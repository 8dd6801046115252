"""``fldiag forgetting``: what local training forgets and averaging restores, and with ``--why`` what it was due to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from fldiag.console import Console
from fldiag.plotting import account as reasons
from fldiag.plotting import forgetting as picture
from fldiag.plotting import style
from fldiag.results.select import WHOLE, last_round, number, only, spread_rounds
from fldiag.verbs import history, output

COLUMNS = {"round": "round", "received": "received", "trained": "trained", "std": "± (clients)", "aggregated": "aggregated",
           "drop": "drop", "forgetting": "max over classes", "restored": "restored"}
LOSSES = {"round": "round", "loss_received": "loss received", "loss_trained": "trained", "loss_aggregated": "aggregated"}
WHY = {"client": "client", "change": "change", "linear": "linear", "quadratic": "quadratic", "rest": "rest"}


def forgetting(console: Console, path: Path, out: Path | None, *, rounds: str | None, options: dict[str, Any], why: bool,
               slice_: str, k: int, seed: int, where: dict[str, Any]) -> None:
    asked = history.ask(console, path, out, chosen=rounds, **where)
    frame, name, written = history.diagnose(console, asked, "forgetting", **options)
    classes = bool((frame["metric"] == "accuracy").any())
    if classes:
        if (frame["metric"] == "class_forgetting").any():
            written += style.save(picture.heatmap(frame), output.beside(name, "-classes"), ("pdf", "png"))
        written += style.save(picture.curves(frame), name, ("pdf", "png"))
    console.table([_row(frame, r) for r in spread_rounds(frame, "loss")], COLUMNS if classes else LOSSES)
    history.remarks(console, frame)
    if why:
        table, stem, more = history.diagnose(console, asked, "account", slice=slice_, k=k, seed=seed,
                                             every_round=rounds is not None)
        more += style.save(reasons.draw(table), stem, ("pdf", "png"))
        console.say(f"why: change of the {slice_} loss by every update = linear + quadratic + rest")
        console.table(_why(table), WHY)
        written += more
    console.done(*written)


def _row(frame: pd.DataFrame, r: int) -> dict[str, Any]:
    def of(metric: str, moment: str) -> float | None:
        return number(frame, metric, round=r, moment=moment, slice="test", **WHOLE)

    row: dict[str, Any] = {"round": r, "std": of("accuracy_std", "trained")}
    for moment in ("received", "trained", "aggregated"):
        row |= {moment: of("accuracy", moment), f"loss_{moment}": of("loss", moment)}
    return row | {m: of(m, "trained") for m in ("drop", "forgetting", "restored")}


def _why(table: pd.DataFrame) -> list[dict[str, Any]]:
    exact = only(table, estimator="exact", round=last_round(table), metric=list(WHY))
    found = []
    for client, part in exact.groupby("client", dropna=False):
        values = dict(zip(part["metric"], part["value"].astype(float), strict=True))
        found.append({"client": "all" if pd.isna(client) else str(int(client)), **values})
    return found
