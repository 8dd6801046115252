"""The small tables of fairness that a person reads first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from fldiag.results.select import number, only, spread_rounds
from fldiag.results.summary import Item, Note, Say, Small, missing_notes
from fldiag.results.table import Row

ROUNDS = {
    "round": "round",
    "mean_accuracy": "mean over clients",
    "worst_decile": "worst decile",
    "std": "std",
    "accuracy_gini": "Gini",
    "ece": "ECE",
    "floor": "ECE by chance",
}
NUMBERS = {
    "what": "last round",
    "value": "value",
    "low": "95 % from",
    "high": "to",
}
NAMES = {
    "accuracy": "accuracy, all examples",
    "mean_accuracy": "accuracy, mean over clients",
    "worst_decile": "accuracy, worst tenth of clients",
    "accuracy_variance": "variance over clients",
    "accuracy_gini": "Gini coefficient over clients",
    "ece": "calibration error (ECE)",
}


def summary(frame: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[Item]:
    rows = only(frame, scope="global", index=None)
    rounds = spread_rounds(rows, "mean_accuracy")
    if len(rounds) > 1:
        yield Small([_round(rows, r) for r in rounds], ROUNDS)
    if rounds:
        last = only(rows, round=rounds[-1])
        yield Small(
            [_number(last, name) for name in NAMES if len(only(last, metric=name))], NUMBERS
        )
        if (chance := number(last, "ece_floor")) is not None:
            yield Say(
                f"A perfectly calibrated model would show an ECE of about {chance:.2g} on these examples."
            )
        small = only(frame, scope="client", metric="accuracy", round=rounds[-1], value=None)
        if len(small):
            yield Note(
                f"left out, with fewer than {options.get('min_count', '?')} examples: clients "
                + ", ".join(str(int(c)) for c in small["client"][:12])
                + ("…" if len(small) > 12 else "")
            )
    yield from missing_notes(frame)


def _round(rows: pd.DataFrame, r: int) -> Row:
    part = only(rows, round=r)
    variance = number(part, "accuracy_variance")
    return {
        "round": r,
        "std": None if variance is None else variance**0.5,
        "floor": number(part, "ece_floor"),
        **{
            name: number(part, name, estimator="bayesian bootstrap")
            for name in ("mean_accuracy", "worst_decile", "accuracy_gini", "ece")
        },
    }


def _number(last: pd.DataFrame, name: str) -> Row:
    part = only(last, metric=name, estimator=["bayesian bootstrap", "exact"])
    return {
        "what": NAMES[name],
        **{c: number(part, column=c) for c in ("value", "low", "high")},
    }
