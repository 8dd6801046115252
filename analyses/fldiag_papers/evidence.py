"""Whether a difference is beyond the noise, and whether models are trained far enough to be compared.

A paired t-test over the seeds of the statement's own runs decides (95 %), from two seeds on. One seed decides nothing: what a
repetition of these runs would change is then not known, and no other runs' deviation stands in for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd

from fldiag.results.uncertainty import paired_t
from fldiag_papers import shapes

Outcome = Literal["holds", "does not hold", "undecided"]

#: Percentage points from chance within which a model counts as not trained.
NEAR = 3.0
ACCURACIES = ("accuracy", "personal_accuracy")


def accuracy_facts(rows: pd.DataFrame) -> dict[str, Any]:
    """What is known of the accuracies in ``rows`` (nothing where they are other numbers).

    Returns:
        ``percent``: factor that makes them percentages; ``floor``: percentage up to which a model counts as untrained.
    """
    if not set(rows["metric"]) <= {*ACCURACIES}:
        return {}
    units = set(rows["unit"].dropna()) if "unit" in rows else set()
    return {
        "percent": 1.0 if "%" in units or rows["value"].max() > 1 else 100.0,
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
    interval = paired_t(high - low)
    pair = " and ".join(map(str, labels))
    if len(low) < 2:
        return "undecided", f"{pair}: difference {interval.value:.2g}, one seed"
    least, most = (
        interval.value if end is None else end for end in (interval.low, interval.high)
    )  # all alike: no spread
    if least > 0 or (equal and least >= -1e-9):
        return "holds", ""
    if most < 0:
        return "does not hold", ""
    return (
        "undecided",
        f"{pair}: difference {interval.value:.2g} ± {most - interval.value:.2g} (95 %, paired t)",
    )


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
