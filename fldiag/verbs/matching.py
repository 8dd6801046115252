"""``fldiag matching``: how alike the clients' loss surfaces are around their trained weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from fldiag.console import Console
from fldiag.plotting import matching as picture
from fldiag.plotting import style
from fldiag.results.select import number, only
from fldiag.results.select import rounds as rounds_of
from fldiag.verbs import history

#: What is printed of every client, from its own data where they were asked for.
CLIENTS = {"client": "client", "slice": "slice", "loss": "loss", "lambda_max": "λ_max", "residual": "± residual",
           "trace": "trace H_T", "stderr": "± stderr", "overlap": "overlap with global", "share": "share of global λ1"}
PAIRS = {"round": "round", "diag_mode": "D", "data": "Hessians on", "H_N": "H_N", "H_D": "H_D", "H_N_self": "H_N with self pairs",
         "H_D_self": "H_D with self pairs", "form": "as in"}
FORMS = {("diag", "client"): "paper", ("tensor_trace", "global"): "released code (with self pairs)"}


def matching(console: Console, path: Path, out: Path | None, *, rounds: str | None, options: dict[str, Any],
             where: dict[str, Any]) -> None:
    asked = history.ask(console, path, out, chosen=rounds, **where)
    frame, name, written = history.diagnose(console, asked, "matching", **options, every_round=rounds is not None)
    last = int(frame["round"].dropna().max())
    written += style.save(picture.draw(frame, round=last), name, ("pdf", "png"))
    shown = rounds_of(frame, "H_N")
    console.say(f"round {last}, clients after local training")
    console.table(_clients(only(frame, round=last)), CLIENTS)
    console.table([row for r in shown[-12:] for row in _pairs(only(frame, round=r), r)], PAIRS)
    whole = only(frame, round=last, metric="eigenspace_overlap", scope="global")["value"].dropna()
    if len(whole):
        console.say(f"mean squared cosine between the top-{options['k']} eigenspaces of two clients: {whole.iloc[0]:.3g}")
    rough = only(frame, round=last, metric="diagonal_error").dropna(subset="value")
    if len(rough):
        who = ", ".join(sorted({"the global model" if pd.isna(c) else str(int(c)) for c in rough["client"]}))
        console.note(f"estimated diagonals (clients {who}): off by up to {rough['value'].max():.0%} in norm, so H_N and H_D with "
                     "D = diag are rough; those of tensor traces are better (raise --max-products)")
    history.remarks(console, frame)
    console.done(*written)


def _clients(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """A row a client, by the first slice of its Hessian in the table, and one of the aggregated model."""
    found = []
    trained = only(frame, moment="trained", scope="client")
    groups: list[tuple[str, pd.DataFrame]] = [(str(int(c)), part) for c, part in trained.groupby("client")]
    groups.append(("global model", only(frame, moment="aggregated", scope="global")))
    share = only(frame, metric="curvature_share", index=1)
    top = number(frame, "eigenvalue", moment="aggregated", index=1)
    for client, part in groups:
        trace = only(part, metric="trace")
        if trace.empty:
            continue
        own = part[part["slice"] == trace["slice"].iloc[0]]
        value, mine = only(own, metric="eigenvalue", index=1), only(own, metric="trace")
        part_of = None if client == "global model" else number(share, client=int(client))
        found.append({"client": client, "slice": str(trace["slice"].iloc[0]), "loss": number(own, "loss"),
                      "lambda_max": number(value), "residual": number(value, column="residual"), "trace": number(mine),
                      "stderr": number(mine, column="stderr"), "overlap": number(part, "global_overlap"),
                      "share": part_of / top if part_of is not None and top else None})
    return found


def _pairs(frame: pd.DataFrame, round: int) -> list[dict[str, Any]]:
    means = only(frame, metric=["H_N", "H_D"], scope="global")
    rows = []
    for mode, data in dict.fromkeys(zip(means["diag_mode"], means["data"], strict=True)):
        part = only(means, diag_mode=mode, data=data)
        row: dict[str, Any] = {"round": round, "diag_mode": mode, "data": data, "form": FORMS.get((mode, data))}
        for metric in ("H_N", "H_D"):
            row[metric] = number(part, metric, self_pairs=False)
            row[f"{metric}_self"] = number(part, metric, self_pairs=True)
        rows.append(row)
    return rows
