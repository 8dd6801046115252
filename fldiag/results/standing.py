"""Whether a model is better than a guess: accuracy, loss and inputs of the models that a table is about, in one line each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pandas as pd

from fldiag.results.select import number, only
from fldiag.results.summary import Item, Note, Say, percent, plus_minus
from fldiag.results.table import Row

#: An accuracy is better than a guess's only if it is so by so many standard errors.
ERRORS = 2.0


def guess_accuracy(shares: Sequence[float], slice_name: str) -> float:
    """The accuracy of a guess: always the most frequent label, or one of the classes, all alike.

    All alike on a client's examples: a global model need not know how often a client has which.

    Args:
        shares: how often each class is the label, as a share of 1.
        slice_name: of the examples.

    >>> guess_accuracy([0.75, 0.25], "test"), guess_accuracy([0.75, 0.25], "client:3/train")
    (0.75, 0.5)
    """
    alike = 1 / len(shares)
    return alike if slice_name.startswith("client:") else max(alike, *shares)


def at_centre(rows: Sequence[Row], scored: Sequence[Row], **place: float) -> list[Row]:
    """Rows of losses at many weights; ``scored`` holds loss and accuracy of those at ``place``."""
    loss, *accuracy = scored

    def is_there(row: Row) -> bool:
        return row["metric"] == "loss" and all(row[key] == value for key, value in place.items())

    return [
        *({**row, "inputs": loss["inputs"]} if is_there(row) else row for row in rows),
        *({**row, **place} for row in accuracy),
    ]


def standing(table: pd.DataFrame) -> list[Item]:
    """Where the models of a table stand: of a run its global model of the last round, else every model.

    Args:
        table: a result table; the rows that count have ``inputs``.

    Returns:
        A sentence a model and slice, and a note where its accuracy is not above that of a guess (``guess_accuracy``) by
        ``ERRORS`` standard errors.
    """
    if "inputs" not in table.columns:
        return []
    rows = table[table["inputs"].notna() & table["value"].notna()]
    items: list[Item] = []
    for run, part in rows.groupby("run", sort=False, dropna=False):
        best = {"scope": "global", "round": part["round"].max(), "moment": "aggregated"}
        for column, value in best.items():
            chosen = only(part, **{column: value})
            part = part if chosen.empty else chosen
        who = "" if pd.isna(run) or not run else f"{run}: "
        for (of, _), model in part.groupby(["slice", "client"], sort=False, dropna=False):
            items += _of_model(who, str(of), model)
    return items


def _of_model(who: str, slice_name: str, rows: pd.DataFrame) -> Iterator[Item]:
    n, inputs = rows["n_examples"].iloc[0], rows["inputs"].iloc[0]
    losses, answers = (only(rows, metric=(m, f"model_{m}")) for m in ("loss", "accuracy"))
    loss = plus_minus(number(losses), number(losses, column="stderr"))
    accuracy, guess = number(answers), number(answers, column="guess")
    told = f"accuracy {percent(accuracy)}, a guess {percent(guess)}"
    of_classes = "" if accuracy is None else f", {told}"
    yield Say(f"{who}{n:,.0f} examples of {slice_name}, loss {loss}{of_classes}; inputs {inputs}")
    bound = 1.0 if guess is None else guess + ERRORS * math.sqrt(guess * (1 - guess) / n)
    if accuracy is not None and accuracy <= bound < 1:
        doubt = (
            f"{who}no better than a guess on {slice_name}: {told}. The model is untrained, its inputs are not normalised as in "
            f"training (here: {inputs}; --normalise), or these are other examples or labels than it was trained for"
        )
        yield Note(doubt, {"warnings": doubt})
