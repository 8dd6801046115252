"""A round and its local steps as result tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from fldiag.method import Round
from fldiag.results.table import Row, columns
from fldiag.training.client import Trained


def step_rows(t: int, notes: pd.DataFrame, **common: Any) -> pd.DataFrame:
    """The recorded steps of round t (``Recorder.rows``) as a result table."""
    about = {"round": t, "moment": "trained", "scope": "client", "estimator": "minibatch"}
    if notes.empty:
        return columns({"round": np.empty(0)}, **common)
    slices = ("client:" + notes["client"].astype(str) + "/train").to_numpy()
    return columns(
        {**{name: notes[name].to_numpy() for name in notes}, "slice": slices}, **about, **common
    )


def round_rows(
    t: int, scores: dict[str, float], seen: Round, trained: Trained, *, isolated: bool
) -> list[Row]:
    """The round's numbers: test accuracy and loss, mean local loss, bytes a client sends and receives (none when isolated)."""
    n, item = int(scores["n"]), seen.w_g.element_size()
    buffers = sum(b[0].numel() * b.element_size() for b in trained.buffers.values())
    up = (
        item * seen.w_g.numel()
        + buffers
        + sum(u[0].numel() * u.element_size() for u in seen.uploads.values())
    )
    down = (
        item * seen.w_g.numel()
        + buffers
        + sum(s.numel() * s.element_size() for s in seen.sent.values())
    )
    if isolated:
        up = down = 0
    rows: list[Row] = [
        {
            "round": t,
            "moment": "aggregated",
            "scope": "global",
            "slice": "test",
            "metric": m,
            "value": scores[m],
            "n_examples": n,
            "estimator": "exact",
        }
        for m in ("accuracy", "loss")
        if m in scores
    ]
    rows.append(
        {
            "round": t,
            "moment": "trained",
            "scope": "global",
            "slice": "train",
            "metric": "minibatch_loss",
            "value": float(trained.loss @ seen.p.to(trained.loss.device)),
            "n_examples": int(seen.n.sum()),
        }
    )
    rows += [
        {
            "round": t,
            "moment": "trained",
            "scope": "client",
            "metric": metric,
            "value": float(value),
            "unit": "bytes",
        }
        for metric, value in (("uplink", up), ("downlink", down))
    ]
    return rows
