"""Whether a difference is beyond the noise, and whether models are trained far enough to be compared.

With three seeds or more a paired t-test decides (95 %). With fewer, accuracies are compared with the noise of a test set and
of a repetition: the paper's own deviation (:data:`REPEAT` points where it prints none) or that of the run's last rounds,
whichever is larger. Nothing else is decided by fewer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd

from fldiag.results.select import only
from fldiag.results.uncertainty import SEEDS, paired_t
from fldiag_papers import shapes

Outcome = Literal["holds", "does not hold", "undecided"]

#: Percentage points by which an accuracy changes when training is repeated, where the paper prints no deviation.
REPEAT = 1.5
#: Percentage points from chance within which a model counts as not trained.
NEAR = 3.0
ACCURACIES = ("accuracy", "personal_accuracy")


def accuracy_facts(
    table: pd.DataFrame, rows: pd.DataFrame, by: str, selection: Mapping[str, Any]
) -> dict[str, Any]:
    """What is known of the accuracies in ``rows`` (nothing where they are other numbers).

    Returns:
        ``percent``: factor that makes them percentages; ``examples``: test examples, None where nobody noted it; ``floor``:
        percentage up to which a model counts as untrained; ``stds``: the deviation of a repetition by label, the paper's or
        that of the last rounds (``table.attrs["last_rounds"]``, by method) where it is larger; ``repeat``: that of any method
        of which no more is known.
    """
    if not set(rows["metric"]) <= {*ACCURACIES}:
        return {}
    units = set(rows["unit"].dropna()) if "unit" in rows else set()
    counts = (
        pd.to_numeric(rows["n_examples"]).dropna()
        if "n_examples" in rows
        else pd.Series(dtype=float)
    )
    stds: dict[Any, float] = {}
    if "std" in table:
        cell = {k: v for k, v in selection.items() if k in ("metric", "setting", "data", "model")}
        printed = only(table, origin="reported", **cell).dropna(subset=["std"])
        stds = {str(name): float(std) for name, std in printed.groupby(by)["std"].max().items()}
    swings = table.attrs.get("last_rounds", {})
    for name, swing in swings.items():
        stds[name] = max(stds.get(name, REPEAT), swing)
    return {
        "percent": 1.0 if "%" in units or rows["value"].max() > 1 else 100.0,
        "stds": stds,
        "repeat": max([REPEAT, *swings.values()]),
        "examples": int(counts.min()) if len(counts) else None,
        "floor": floor_of(rows),
    }


def floor(name: str) -> float | None:
    """The accuracy in percent up to which a model on this data set counts as not trained yet; None for unknown data.

    Chance, or two classes of all (as far as a client that holds two classes gets), plus :data:`NEAR`.

    >>> floor("mnist-2000"), floor("cifar100")
    (23.0, 5.0)
    """
    classes = shapes.classes(name)
    return None if classes is None else 100 * min(2, classes - 1) / classes + NEAR


def floor_of(table: pd.DataFrame) -> float | None:
    """The highest ``floor`` of the data sets that were trained on."""
    names = table["trained_on"].dropna().unique() if "trained_on" in table else ()
    return max((f for name in names if (f := floor(str(name))) is not None), default=None)


def step(
    low: np.ndarray,
    high: np.ndarray,
    labels: Sequence[Any],
    about: Mapping[str, Any],
    *,
    equal: bool = False,
    ceiling: bool = True,
) -> tuple[Outcome, str]:
    """Whether ``low`` lies below ``high`` (``equal``: or at it), value by value of the same seeds.

    ``about``: as of :func:`accuracy_facts`, for accuracies; ``ceiling``: whether untrained models among them leave it undecided.
    Returns the outcome and, where it is undecided, why."""
    if ceiling and (why := _untrained((low, high), labels, about)):
        return "undecided", why
    differences = high - low
    if len(differences) < SEEDS:
        return _compare_few_seeds(low, high, labels, about)
    interval = paired_t(differences)
    least, most = (
        interval.value if end is None else end for end in (interval.low, interval.high)
    )  # all alike: no spread
    if least > 0 or (equal and least >= -1e-9):
        return "holds", ""
    if most < 0:
        return "does not hold", ""
    return (
        "undecided",
        f"{_pair(labels)}: difference {interval.value:.2g} ± {most - interval.value:.2g} (95 %, paired t)",
    )


def _compare_few_seeds(
    low: np.ndarray, high: np.ndarray, labels: Sequence[Any], about: Mapping[str, Any]
) -> tuple[Outcome, str]:
    seeds = f"{len(low)} seed{'s' * (len(low) > 1)}"
    if not about:
        return "undecided", f"{seeds}, and no deviation is known"
    factor, examples = about["percent"], about["examples"]
    shares = [min(max(abs(float(v.mean())) * factor / 100, 0.0), 1.0) for v in (low, high)]
    of_tests = sum(1e4 * p * (1 - p) / examples for p in shares) if examples else 0.0
    of_training = sum(about["stds"].get(str(label), REPEAT) ** 2 for label in labels)
    noise = 2 * math.sqrt(of_tests + of_training)
    difference = factor * float((high - low).mean())
    if abs(difference) > noise:
        return ("holds", "") if difference > 0 else ("does not hold", "")
    return "undecided", f"{_pair(labels)}: {seeds}, difference {difference:.2g}, noise {noise:.2g}"


def _untrained(
    values: Sequence[np.ndarray], labels: Sequence[Any], about: Mapping[str, Any]
) -> str:
    if not about or about["floor"] is None:
        return ""
    low = [
        f"{label} {percent:.3g} %"
        for label, v in zip(labels, values, strict=True)
        if (percent := abs(float(v.mean())) * about["percent"]) <= about["floor"]
    ]
    return f"not trained far enough: {', '.join(low)}" if low else ""


def _pair(labels: Sequence[Any]) -> str:
    return " and ".join(map(str, labels))
