"""How sure the difference of a number is: over pairs of seeds for methods, over examples and clients for two given models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fldiag.choices import BINS
from fldiag.compare.reading import Reader, no_classes, no_numbers
from fldiag.compare.sides import Member, Sides, seed
from fldiag.diagnostics import fairness
from fldiag.errors import FldiagError, counted
from fldiag.results import select, uncertainty
from fldiag.results.numbers import Number
from fldiag.results.select import only
from fldiag.results.uncertainty import SEEDS, Interval
from fldiag.runs.run import Run, same_model

EXAMPLES = "bootstrap over examples"


@dataclass(frozen=True)
class Evidence:
    """``a`` and ``b``: the number of each side. ``between(scale, offset)``: the interval of a - (scale * b + offset). ``why``:
    what stands against an interval, or against the number itself; ``remedy``: what can be done where there is no number."""

    a: float | None
    b: float | None = None
    between: Callable[[float, float], Interval] | None = None
    estimator: str = ""
    n: int = 0
    why: str = ""
    remedy: str = ""
    #: The candidate's weights give no numbers: nothing that is asked of it can be kept.
    broken: bool = False


def of(number: Number, sides: Sides, reader: Reader, level: float) -> Evidence:
    """The evidence on a number; masked, with the reason, where the sides cannot be compared by it."""
    for a, b in zip(sides.a, sides.b, strict=bool(sides.b)):
        if why := unlike(number, a, b):
            return Evidence(
                None,
                why=why,
                remedy=f"leave out this condition, or compare runs of the same "
                f"{' and '.join(number.needs)}",
            )
    broken = [m for m in sides.a if isinstance(m, Run) and m.status == "diverged"]
    if broken:
        return Evidence(
            None, why=f"{broken[0].path.name} diverged: its weights give no numbers", broken=True
        )
    try:
        if sides.methods:
            return _finite(_over_seeds(number, sides, reader, level))
        over = {
            "examples": _over_examples,
            "examples of clients": _over_examples_of_clients,
            "clients": _over_clients,
            "residuals": _certified,
        }[number.over]
        return _finite(over(number, sides.a[0], sides.b[0] if sides.b else None, reader, level))
    except FldiagError as error:
        return Evidence(None, why=error.what, remedy=error.remedy)


def _finite(evidence: Evidence) -> Evidence:
    """The evidence, without its number where that is NaN or infinite on a side."""
    values = [value for value in (evidence.a, evidence.b) if value is not None]
    return (
        evidence
        if np.isfinite(values).all()
        else Evidence(
            None,
            why=f"the number is {values[0]:g}"
            + "".join(f", and that of the baseline {value:g}" for value in values[1:]),
        )
    )


def unlike(number: Number, a: Member, b: Member) -> str:
    """Why the number of one is not that of the other, or nothing."""
    if "model" in number.needs and not same_model(a, b):
        return "the models are different, and the number depends on how a model is parametrised"
    if "partition" not in number.needs:
        return ""
    for m in (a, b):
        if not isinstance(m, Run):
            return f"{m.path.name} is a checkpoint, which has no clients"
    parts = [m.files.get("partition.npz") for m in (a, b) if isinstance(m, Run)]
    if None in parts or parts[0] != parts[1]:
        return "the data are divided differently among the clients, or a run does not say how"
    return ""


# -- methods


def _over_seeds(number: Number, sides: Sides, reader: Reader, level: float) -> Evidence:
    columns: list[np.ndarray] = []
    for side in (sides.a, sides.b):
        values = []
        for member in side:
            try:
                values.append(reader.value(member, number))
            except FldiagError as error:
                return Evidence(
                    None,
                    why=f"{member.path.name} (seed {seed(member)}): {error.what}",
                    remedy=error.remedy,
                )
        columns.append(np.array(values))
    a, b = columns[0], columns[1] if sides.b else np.zeros(len(columns[0]))
    shortage = (
        "" if len(a) >= SEEDS else f"{counted(len(a), 'seed')}; {SEEDS} are needed for a decision"
    )
    return Evidence(
        float(a.mean()),
        float(b.mean()) if sides.b else None,
        n=len(a),
        why=shortage,
        estimator="paired t over seeds" if sides.b else "t over seeds",
        between=lambda scale, offset: uncertainty.paired_t(a - (scale * b + offset), level),
    )


# -- two given models


def _over_examples(
    number: Number, a: Member, b: Member | None, reader: Reader, level: float
) -> Evidence:
    """Paired bootstrap over the test examples; McNemar's exact test where equal accuracies are asked about."""
    members = [m for m in (a, b) if m is not None]
    scores = [reader.tested(m) for m in members]
    if len({t.y.tobytes() for t in scores}) > 1:
        raise FldiagError(
            "the test examples of the two are not the same", "compare runs on the same data set"
        )
    rights = [t.right for t in scores]
    if number.name == "accuracy" and any(r is None for r in rights):
        raise no_classes()
    each = [t.loss if number.name == "loss" else t.right.astype(float) for t in scores]  # type: ignore[union-attr]
    broken = [m for m, t in zip(members, scores, strict=True) if not np.isfinite(t.loss).all()]
    if broken:
        raise no_numbers(broken[0].path.name)
    draws = uncertainty.means(np.stack(each, 1))
    same = len(each) == 2 and bool((each[0] == each[1]).all())

    def between(scale: float, offset: float) -> Interval:
        value = float(each[0].mean()) - offset - (scale * float(each[1].mean()) if scale else 0.0)
        if same and (scale, offset) == (1.0, 0.0):
            return Interval(0.0, 0.0, 0.0, 1.0)
        interval = uncertainty.basic(
            value, draws[:, 0] - offset - (scale * draws[:, 1] if scale else 0.0), level
        )
        if number.name == "accuracy" and (scale, offset) == (1.0, 0.0):
            p = uncertainty.mcnemar(rights[0], rights[1])  # type: ignore[arg-type]
            return Interval(value, interval.low, interval.high, p, "McNemar's exact test")
        return interval

    return Evidence(
        float(each[0].mean()),
        float(each[1].mean()) if b is not None else None,
        between,
        EXAMPLES,
        len(each[0]),
    )


def _over_examples_of_clients(
    number: Number, a: Member, b: Member | None, reader: Reader, level: float
) -> Evidence:
    """Paired bootstrap over the test examples, the clients fixed: both models on the same draws."""
    served = [reader.served(m) for m in (a, b) if m is not None]
    groups = served[0][0]
    if any(not np.array_equal(x.y, served[0][1].y) for _, x in served):
        raise FldiagError(
            "the test examples of the two are not the same", "compare runs on the same data set"
        )
    resamples = fairness.resampled([model for _, model in served], groups, BINS)
    ones = np.ones((1, groups.n))
    values = [
        float(fairness.spreads(model, groups, BINS, ones)[number.name][0]) for _, model in served
    ]
    both = [d[number.name] for d in resamples]

    def between(scale: float, offset: float) -> Interval:
        value = values[0] - offset - (scale * values[1] if scale else 0.0)
        return uncertainty.basic(
            value, both[0] - offset - (scale * both[1] if scale else 0.0), level
        )

    return Evidence(values[0], values[1] if b is not None else None, between, EXAMPLES, groups.n)


def _over_clients(
    number: Number, a: Member, b: Member | None, reader: Reader, level: float
) -> Evidence:
    """Over the clients of the last round: paired where both sides have the same ones."""
    sides = []
    for member in (a, b):
        if member is not None:
            value = reader.value(member, number)
            rows = only(reader.table(member, number), scope="client", **number.row).dropna(
                subset=["value"]
            )
            sides.append(
                (
                    value,
                    dict(zip(rows["client"].astype(int), rows["value"].astype(float), strict=True)),
                )
            )
    ids = [sorted(clients) for _, clients in sides]
    each = [np.array([clients[k] for k in sorted(clients)]) for _, clients in sides]
    paired = len(sides) == 1 or ids[0] == ids[1]

    def between(scale: float, offset: float) -> Interval:
        if not scale:
            return uncertainty.paired_t(each[0] - offset, level)
        if paired:
            return uncertainty.paired_t(each[0] - (scale * each[1] + offset), level)
        return uncertainty.independent_t(each[0], scale * each[1] + offset, level)

    how = (
        "t over clients"
        if b is None
        else "paired t over clients"
        if paired
        else "Welch's t over clients"
    )
    return Evidence(
        sides[0][0], sides[1][0] if b is not None else None, between, how, min(map(len, each))
    )


def _certified(
    number: Number, a: Member, b: Member | None, reader: Reader, level: float
) -> Evidence:
    """A fact of the weights and the training data, known up to the residuals: there is no chance in it."""
    values, residuals, open_ = [], [], False
    for member in (a, b):
        if member is not None:
            values.append(reader.value(member, number))
            rows = only(reader.table(member, number), **number.row)
            residuals.append(select.number(rows, column="residual") or 0.0)
            open_ |= (
                rows["converged"].iloc[0] is not True and bool(rows["converged"].iloc[0]) is False
            )

    def between(scale: float, offset: float) -> Interval:
        value = values[0] - offset - (scale * values[1] if scale else 0.0)
        reach = residuals[0] + (abs(scale) * residuals[1] if scale else 0.0)
        return Interval(value, value - reach, value + reach, certain=True)

    why = (
        f"an eigenvalue did not converge; raise --max-products of {number.source}" if open_ else ""
    )
    return Evidence(
        values[0],
        values[1] if b is not None else None,
        None if open_ else between,
        "residuals",
        1,
        why=why,
    )
