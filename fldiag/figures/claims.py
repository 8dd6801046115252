"""Statements of the papers as checks of measured tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pandas as pd

from fldiag.errors import FldiagError
from fldiag.figures import reported
from fldiag.results.select import only


@dataclass(frozen=True)
class Verdict:
    """``votes``: of every seed whether it shows what is claimed; ``numbers``: what was compared, in words."""

    votes: tuple[bool, ...]
    numbers: str

    @property
    def text(self) -> str:
        yes, all_ = sum(self.votes), len(self.votes)
        word = "holds" if yes == all_ else "does not hold" if 2 * yes <= all_ else "undecided"
        return f"{word} ({yes} of {all_} seeds)"


@dataclass(frozen=True)
class Claim:
    """``check`` gets the csv of the study; it raises FldiagError where that lacks what is needed."""

    id: str
    text: str
    source: str
    study: str
    check: Callable[[pd.DataFrame], Verdict]


@cache
def claims() -> tuple[Claim, ...]:
    """Those of ``analyses/claims.py``."""
    file = reported.folder() / "claims.py"
    return tuple(reported.module(file).CLAIMS) if file.is_file() else ()


def per_seed(table: pd.DataFrame, by: str = "label", **where: Any) -> pd.DataFrame:
    """Mean value of the rows chosen: a row for each seed, a column for each ``by``. None as a value: missing entries.

    Raises FldiagError when nothing is left."""
    where = {"origin": "measured", **where}
    absent = [column for column, wanted in where.items() if column not in table.columns and wanted is not None]
    if absent:
        raise FldiagError(f"the table has no column {absent[0]!r}", "make the figure again")
    rows = only(table, **where)
    numbers = rows.assign(value=pd.to_numeric(rows["value"]))
    found = numbers.pivot_table(index="seed", columns=by, values="value", aggfunc="mean")
    if found.empty:
        raise FldiagError("the table has no rows for this claim", "make the figure again")
    return found


def ordered(values: pd.DataFrame, labels: Sequence[Any], *, equal: Sequence[bool] = (), digits: int = 3) -> Verdict:
    """Votes for labels[0] < labels[1] < ...; ``equal[i]``: also equal (up to 1e-9) at that place.

    Raises FldiagError when a label is not among the columns."""
    absent = [str(n) for n in labels if n not in values.columns]
    if absent:
        raise FldiagError(f"nothing was measured of {', '.join(absent)}", "see why in the figure's json")
    rows = values[list(labels)].dropna().to_numpy(float)
    if not len(rows):
        raise FldiagError("no seed has all that is compared", "see why in the figure's json")
    soft = np.array([*equal, *[False] * (len(labels) - 1 - len(equal))])
    steps = np.diff(rows, axis=1)
    votes = np.where(soft, steps >= -1e-9, steps > 0).all(1)
    means, stds = rows.mean(0), rows.std(0, ddof=1) if len(rows) > 1 else np.full(len(labels), np.nan)
    text = ", ".join(f"{n} {m:.{digits}g}" + ("" if np.isnan(s) else f" ± {s:.2g}")
                     for n, m, s in zip(labels, means, stds, strict=True))
    text += f"; {lost} seeds without a number" if (lost := len(values) - len(rows)) else ""
    return Verdict(tuple(bool(v) for v in votes), text)


def lowest(values: pd.DataFrame, label: Any, among: Sequence[Any], *, highest: bool = False, digits: int = 3) -> Verdict:
    """Votes for ``label`` being below (``highest``: above) all others of ``among``, over the seeds that have them all.

    Raises FldiagError when one of them is missing everywhere, or no seed has all."""
    absent = [str(n) for n in among if n not in values.columns]
    if absent:
        raise FldiagError(f"nothing was measured of {', '.join(absent)}", "see why in the figure's json")
    whole = values[list(among)].dropna()
    if whole.empty:
        raise FldiagError("no seed has all that is compared", "see why in the figure's json")
    sign = -1 if highest else 1
    others = whole.drop(columns=label)
    votes = sign * whole[label] < (sign * others).min(axis=1)
    best = (sign * others.mean()).idxmin()
    means = f"{label} {whole[label].mean():.{digits}g}, best of the others {best} {others[best].mean():.{digits}g}"
    return Verdict(tuple(map(bool, votes)), means)
