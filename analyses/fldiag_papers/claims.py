"""Statements of the papers as checks of measured tables."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pandas as pd

from fldiag.errors import FldiagError
from fldiag.results.select import only
from fldiag_papers import evidence, reported
from fldiag_papers.evidence import Outcome
from fldiag_papers.study import one_question

REMEDY = "see why in the figure's json"


@dataclass(frozen=True)
class Verdict:
    """``votes``: for each seed, whether it shows what is claimed; ``numbers``: what was compared, in words.

    ``outcome`` asks more than the votes: whether the difference is beyond the noise. ``why``: what stands against a decision.
    ``labels``: those whose difference decides, which the ledger checks for models that are not trained yet."""

    votes: tuple[bool, ...]
    numbers: str
    outcome: Outcome = "undecided"
    why: str = ""
    labels: tuple[Any, ...] = ()
    unit: str = "seeds"

    @property
    def text(self) -> str:
        counted = f"{sum(self.votes)} of {len(self.votes)} {self.unit}"
        return f"{self.outcome} ({'; '.join(filter(None, (counted, self.why)))})"

    def undecided(self, why: str) -> Verdict:
        """The same without a decision."""
        return replace(self, outcome="undecided", why=why)


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
    """Those of every paper, from its ``claims.py``."""
    names = [f"fldiag_papers.{paper}.{reported.CLAIMS}" for paper in reported.papers()]
    return tuple(claim for name in names for claim in importlib.import_module(name).CLAIMS)


def per_seed(table: pd.DataFrame, by: str = "label", **where: Any) -> pd.DataFrame:
    """Mean value of the rows chosen: a row for each seed, a column for each ``by``. None as a value: missing entries.

    Its ``attrs`` say what :mod:`fldiag_papers.evidence` needs to know of accuracies.
    Raises FldiagError when nothing is left, or answers to several questions."""
    selection = {"origin": "measured", **where}
    absent = [
        column
        for column, value in selection.items()
        if column not in table.columns and value is not None
    ]
    if absent:
        raise FldiagError(f"the table has no column {absent[0]!r}", "make the figure again")
    rows = one_question(only(table, **selection))
    numbers = rows.assign(value=pd.to_numeric(rows["value"]))
    values = numbers.pivot_table(index="seed", columns=by, values="value", aggfunc="mean")
    if values.empty:
        raise FldiagError("the table has no rows for this claim", "make the figure again")
    values.attrs = evidence.accuracy_facts(rows)
    return values


def need(values: pd.DataFrame, labels: Iterable[Any]) -> None:
    """Raises FldiagError where nothing was measured of a label."""
    absent = [str(label) for label in labels if label not in values]
    if absent:
        raise FldiagError(f"nothing was measured of {', '.join(absent)}", REMEDY)


def _complete(values: pd.DataFrame, labels: Sequence[Any]) -> pd.DataFrame:
    """The seeds that have all labels. Raises FldiagError where there is none."""
    need(values, labels)
    rows = values[list(labels)].dropna()
    if rows.empty:
        raise FldiagError("no seed has all that is compared", REMEDY)
    return rows.astype(float)


def ordered(values: pd.DataFrame, labels: Sequence[Any], *, equal: Sequence[bool] = ()) -> Verdict:
    """Whether labels[0] < labels[1] < ...; ``equal[i]``: also equal (up to 1e-9) at that place.

    Raises FldiagError when a label is not among the columns."""
    rows = _complete(values, labels)
    soft = [*equal, *[False] * (len(labels) - 1 - len(equal))]
    votes = np.where(soft, (steps := np.diff(rows, axis=1)) >= -1e-9, steps > 0).all(1)
    stds = rows.std() if len(rows) > 1 else rows.mean() * np.nan
    text = ", ".join(
        f"{label} {rows[label].mean():.3g}"
        + ("" if np.isnan(stds[label]) else f" ± {stds[label]:.2g}")
        for label in labels
    )
    lost = len(values) - len(rows)
    text += f"; {lost} seeds without a number" if lost else ""
    steps = [
        evidence.step(
            rows[low].to_numpy(), rows[high].to_numpy(), (low, high), values.attrs, equal=is_soft
        )
        for low, high, is_soft in zip(labels, labels[1:], soft, strict=False)
    ]
    return Verdict(tuple(map(bool, votes)), text, *_all(steps), tuple(labels))


def lowest(
    values: pd.DataFrame,
    label: Any,
    among: Sequence[Any],
    *,
    highest: bool = False,
) -> Verdict:
    """Whether ``label`` is below (``highest``: above) all others of ``among``, over the seeds that have them all.

    What decides is its difference from each of the others: one that is clearly better refutes it.
    Raises FldiagError when one of them is missing everywhere, or no seed has all."""
    complete = _complete(values, among)
    sign = -1 if highest else 1
    rivals = sign * complete.drop(columns=label)
    value = sign * complete[label]
    best = rivals.mean().idxmin()
    means = (
        f"{label} {complete[label].mean():.3g}, best of the others {best} "
        f"{complete[best].mean():.3g}"
    )
    steps = [
        evidence.step(
            value.to_numpy(),
            rivals[other].to_numpy(),
            (label, other),
            values.attrs,
            ceiling=other == best,
        )
        for other in rivals
    ]
    votes = tuple(map(bool, value < rivals.min(axis=1)))
    return Verdict(votes, means, *_all(steps), (label, best))


def everywhere(parts: Mapping[str, Verdict], unit: str = "columns", total: int = 0) -> Verdict:
    """One statement on several columns of a table: holds where every one holds, does not hold where one clearly does not.

    The votes are those of the columns. Raises FldiagError when there is none, and when it is not refuted and fewer than ``total``
    were measured."""
    outcome, why = _all([(part.outcome, part.why) for part in parts.values()])
    numbers = "; ".join(f"{name}: {part.numbers} ({part.outcome})" for name, part in parts.items())
    if not parts or (outcome != "does not hold" and len(parts) < total):
        measured = f"measured in {len(parts)} of {total} {unit}"
        raise FldiagError("; ".join(filter(None, (measured, numbers))), REMEDY)
    labels = tuple(dict.fromkeys(label for part in parts.values() for label in part.labels))
    return Verdict(
        tuple(all(part.votes) for part in parts.values()), numbers, outcome, why, labels, unit
    )


def settings(
    table: pd.DataFrame,
    check: Callable[[pd.DataFrame], Verdict],
    methods: Collection[str],
    by: Sequence[str] = ("setting", "model", "data"),
    begins: str = "",
) -> Verdict:
    """The check in every column (setting, model and data) in which the study has trials of these methods and of at least two;
    ``begins``: whose setting begins so. ``table.attrs["cells"]``: the keys of the trials.

    Raises FldiagError where no column has all that is compared, and where some have and the others would be needed, too."""
    table = table[table["setting"].astype(str).str.startswith(begins)]
    rows = table[table["origin"] == "measured"]
    keys = [k for k in by if k in rows]
    verdicts = {}
    for key, _ in rows.groupby(keys, dropna=False, sort=False):
        part = table
        for column, value in zip(keys, key, strict=True):
            part = part[part[column].eq(value) | (part[column].isna() if value != value else False)]
        try:
            verdicts[", ".join(str(k) for k in key if k == k)] = check(part)
        except FldiagError:
            continue
    columns: dict[tuple[str, ...], set[str]] = {}
    for cell in table.attrs.get("cells", ()):
        if cell["setting"].startswith(begins):
            columns.setdefault(tuple(cell[k] for k in keys), set()).add(cell["method"])
    total = sum({*methods} <= names and len(names) > 1 for names in columns.values())
    return everywhere(verdicts, total=total)


def top(table: pd.DataFrame, method: str, metric: str = "accuracy") -> Verdict:
    """Everywhere: ``method`` above all others that were measured there. Raises FldiagError where nothing was."""

    def check(part: pd.DataFrame) -> Verdict:
        values = per_seed(part, "method", metric=metric)
        if method not in values or len(values.columns) < 2:
            raise FldiagError(f"nothing beside {method} was measured", REMEDY)
        return lowest(values, method, list(values.columns), highest=True)

    return settings(table, check, (method,))


def of_gains(columns: Mapping[str, pd.Series], about: Mapping[str, Any]) -> pd.DataFrame:
    """Values that are differences of two accuracies, and no accuracies themselves."""
    values = pd.DataFrame(columns)
    values.attrs = {**about, "floor": None} if about else {}
    return values


def trained(values: pd.DataFrame, names: Sequence[Any]) -> None:
    """Raises FldiagError where one of them was not measured, or is near chance: a gain over it says nothing."""
    need(values, names)
    limit = values.attrs.get("floor")
    if limit is not None and (values[list(names)].mean() <= limit).any():
        raise FldiagError(
            "models that are not trained far enough", "train longer, or on easier data"
        )


def counted(right: bool, numbers: str, labels: tuple[Any, ...]) -> Verdict:
    """The verdict on numbers that are counted: they have no noise."""
    outcome: Outcome = "holds" if right else "does not hold"
    return Verdict((right,), numbers, outcome, "counted", labels, "counts")


def _all(steps: Sequence[tuple[Outcome, str]]) -> tuple[Outcome, str]:
    """The outcome of a statement all of whose parts must hold; the reasons of the undecided ones, each once."""
    outcomes = {outcome for outcome, _ in steps}
    if "does not hold" in outcomes:
        return "does not hold", ""
    if "undecided" not in outcomes:
        return "holds", ""
    return "undecided", "; ".join(dict.fromkeys(reason for _, reason in steps if reason))
