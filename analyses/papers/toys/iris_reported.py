"""The Iris toy beside the numbers of the paper: means and spreads over seeds, and whether the two agree."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from fldiag.results.select import only

#: Accuracy of the global model after 20 rounds (Chunduru et al., FedProj, figure 1).
REPORTED = {"fedavg": 0.64, "feddf": 0.64, "fedproj": 140 / 150}
REPORTED_ROUNDS, REPORTED_LR = 20, 1e-3
LATE = 5  # last rounds over which accuracies are also averaged: single rounds scatter
CONFIDENCE = 0.95
MEASURES = ("accuracy", "late", "local", "drop", "forgetting", "disagreement")


def per_seed(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a run, method and seed: shares after the last round.

    ``accuracy`` of the global model, ``late`` = its mean over the last 5 rounds, and means over the clients' trained
    models: ``local`` (accuracy), ``drop``, ``forgetting``, ``disagreement`` with the aggregated model.
    """
    rows = only(frame, scope="global").astype({"value": float})
    last = rows["round"].max()
    final, late = rows[rows["round"] == last], rows[rows["round"] > last - LATE]
    parts = {
        "accuracy": only(final, metric="accuracy", moment="aggregated"),
        "late": only(late, metric="accuracy", moment="aggregated"),
        "local": only(final, metric="accuracy", moment="trained"),
        "drop": only(final, metric="drop"),
        "forgetting": only(final, metric="forgetting"),
        "disagreement": only(final, metric="disagreement", reference="aggregated"),
    }
    keys = ["run", "method", "seed"]
    means = {m: part.groupby(keys, sort=False)["value"].mean() for m, part in parts.items()}
    return pd.DataFrame(means).reset_index()


def interval(values: np.ndarray, step: float, *, single: bool = False) -> tuple[float, float]:
    """The 95 % interval of the mean over seeds by Student's t, or with ``single`` the wider one in which a further run
    lies: mean -+ t std sqrt(1/n), or sqrt(1 + 1/n); and half a ``step`` (the grain of an accuracy) on either side.
    Unbounded for one value, which has no spread."""
    n = len(values)
    if n < 2:
        return -math.inf, math.inf
    room = (
        stats.t.ppf((1 + CONFIDENCE) / 2, n - 1) * values.std(ddof=1) * math.sqrt(single + 1 / n)
        + step / 2
    )
    return float(values.mean() - room), float(values.mean() + room)


def agreement(values: np.ndarray, reported: float, step: float) -> str:
    """``mean``: the reported number may be the mean over seeds; ``run``: only that of a single run; ``none``: neither."""
    for word, single in (("mean", False), ("run", True)):
        low, high = interval(values, step, single=single)
        if low <= reported <= high:
            return word
    return "none"


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a run and method: mean and ``_std`` (n - 1; none for one seed) over ``seeds`` of what ``per_seed`` has, the
    mean accuracy's interval ``low``..``high``, the ``lowest`` and ``highest`` accuracy, and of the paper ``reported`` and
    its ``agreement`` (none without a reported number, and for one seed)."""
    step = 1 / float(only(frame, metric="accuracy")["n_examples"].max())
    rows = []
    for (run, method), part in per_seed(frame).groupby(["run", "method"], sort=False):
        row: dict[str, Any] = {"run": run, "method": method, "seeds": len(part)}
        for m in MEASURES:
            row[m] = float(part[m].mean())
            row[f"{m}_std"] = float(part[m].std(ddof=1)) if len(part) > 1 else None
        values, reported = part["accuracy"].to_numpy(), REPORTED.get(str(method))
        low, high = interval(values, step)
        verdict = None if reported is None or len(part) < 2 else agreement(values, reported, step)
        rows.append(
            {
                **row,
                "low": max(low, 0.0),
                "high": min(high, 1.0),
                "lowest": values.min(),
                "highest": values.max(),
                "reported": reported,
                "agreement": verdict,
            }
        )
    return pd.DataFrame(rows)


def statements(frame: pd.DataFrame) -> list[str]:
    """What the numbers say about the paper's, in plain words: of one run method by method and as differences from
    FedAvg, paired by seed; of several runs which give all reported numbers at once."""
    table = summary(frame)
    rounds = int(frame["round"].max())
    begin = (
        []
        if rounds == REPORTED_ROUNDS
        else [f"The paper's numbers are those after {REPORTED_ROUNDS} rounds; here are {rounds}."]
    )
    judged = table[table["reported"].notna()]
    if judged.empty:
        return begin
    if (judged["seeds"] < 2).any():
        return [
            *begin,
            "One seed has no spread, so nothing is said about agreement with the paper: give --seeds 2 or more.",
        ]
    if table["run"].nunique() > 1:
        return begin + _several(judged)
    sentences = [_one(row) for _, row in judged.iterrows()] + _paired(per_seed(frame))
    texts = {
        "mean": "fits the mean of this protocol",
        "run": "is not the mean of this protocol, though a single run may give it",
        "none": "is not what this protocol gives, not even in a single run",
    }
    for word, text in texts.items():
        if methods := list(judged.loc[judged["agreement"] == word, "method"]):
            sentences.append(f"The paper's accuracy of {', '.join(methods)} {text}.")
    return [*begin, *sentences]


def _one(row: pd.Series) -> str:
    mean, std, low, high, lowest, highest, reported = (
        100 * row[c]
        for c in ("accuracy", "accuracy_std", "low", "high", "lowest", "highest", "reported")
    )
    return (
        f"{row['method']}: {mean:.1f} ± {std:.1f} % over {row['seeds']} seeds ({lowest:.1f} to {highest:.1f}; "
        f"95 % interval of the mean {low:.1f} to {high:.1f}); the paper has {reported:.2f} %."
    )


def _paired(seeds: pd.DataFrame) -> list[str]:
    table = seeds.set_index(["seed", "method"])
    sentences = []
    for method in REPORTED:
        if method == "fedavg" or not {method, "fedavg"} <= set(seeds["method"]):
            continue
        gap, local = (
            100 * (table[m].xs(method, level=1) - table[m].xs("fedavg", level=1)).to_numpy()
            for m in ("accuracy", "local")
        )
        claim = 100 * (REPORTED[method] - REPORTED["fedavg"])
        sentences.append(
            f"{method} against fedavg, seed by seed: global accuracy {gap.mean():+.1f} ± {gap.std(ddof=1):.1f} points "
            f"(paper {claim:+.1f}), local models {local.mean():+.1f} ± {local.std(ddof=1):.1f} points."
        )
    return sentences


def _several(judged: pd.DataFrame) -> list[str]:
    sentences = []
    for method, part in judged.groupby("method", sort=False):
        runs = {word: list(part.loc[part["agreement"] == word, "run"]) for word in ("mean", "run")}
        sentences.append(
            f"{method}: the paper's {100 * REPORTED[str(method)]:.2f} % may be the mean of "
            f"{', '.join(runs['mean']) or 'none of these protocols'}"
            + (f"; a single run of {', '.join(runs['run'])}" if runs["run"] else "")
            + "."
        )
    methods = ", ".join(dict.fromkeys(judged["method"]))
    for words, text in ((("mean",), "as means"), (("mean", "run"), "at least in single runs")):
        good = judged.groupby("run", sort=False)["agreement"].apply(
            lambda v, w=words: bool(v.isin(w).all())
        )
        sentences.append(
            f"All the paper's numbers for {methods}, each by itself {text}: "
            f"{', '.join(good[good].index) or 'no protocol here'}."
        )
    return sentences


def for_reading(table: pd.DataFrame) -> tuple[list[dict[str, str]], dict[str, str]]:
    """Rows and heads of ``summary`` for a terminal, in percent."""
    heads = {"run": "protocol"} if table["run"].nunique() > 1 else {}
    heads |= {"method": "method", "accuracy": "global (%)", "paper": "paper (%)"}
    heads |= {"late": "last 5 rounds", "local": "clients (%)", "drop": "drop"}
    heads |= {"forgetting": "worst class", "disagreement": "differs (%)"}
    rows = []
    for _, row in table.iterrows():
        paper = "–" if pd.isna(row["reported"]) else f"{100 * row['reported']:.2f}"
        cells = {"run": row["run"], "method": row["method"], "paper": paper}
        for m in MEASURES:
            spread = "" if pd.isna(row[f"{m}_std"]) else f" ± {100 * row[f'{m}_std']:.1f}"
            cells[m] = f"{100 * row[m]:.1f}{spread}"
        rows.append(cells)
    return rows, heads
