"""Where a result stands: loss and accuracy of the weights that it is about, how their inputs were normalised, and whether a
guess does as well."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fldiag.results.summary import number
from fldiag.results.table import Row

#: The metric of an accuracy that stands beside a loss, by the metric of that.
METRICS = {"loss": "accuracy", "model_loss": "model_accuracy"}
#: A number is better than a guess's only if it is so by so many standard errors.
ERRORS = 2.0
#: Models that one sentence names.
MOST = 3


def guess_accuracy(shares: Sequence[float], slice_name: str, loss: float = math.inf) -> float:
    """The accuracy of a guess: always the most frequent label, or one of the classes, all alike.

    All alike on a client's examples (a global model need not know how often a client has which), and for a model whose loss is
    below that of the labels' frequencies: it knows more than these, however often it says the most frequent label.

    Args:
        shares: how often each class is the label, as a share of 1.
        slice_name: of the examples.
        loss: an upper bound of the cross entropy, where the loss is that.

    >>> guess_accuracy([0.75, 0.25], "test"), guess_accuracy([0.75, 0.25], "client:3/train")
    (0.75, 0.5)
    """
    alike = 1 / len(shares)
    entropy = -sum(p * math.log(p) for p in shares if p)
    return alike if slice_name.startswith("client:") or loss < entropy else max(alike, *shares)


def at_centre(rows: Sequence[Row], scored: Sequence[Row], **place: float) -> list[Row]:
    """Rows of losses at many weights; ``scored`` holds loss and accuracy of those at ``place``."""
    loss, *accuracy = scored
    marks = {key: loss[key] for key in ("guess", "inputs")}

    def is_there(row: Row) -> bool:
        return row["metric"] == "loss" and all(row[key] == value for key, value in place.items())

    return [
        *({**row, **marks} if is_there(row) else row for row in rows),
        *({**row, **place} for row in accuracy),
    ]


def standing(table: pd.DataFrame) -> list[Row]:
    """Loss and accuracy (of a classification) of the models that a table is about, and what a guess gives.

    Of a run these are the global models of the last round.

    Args:
        table: a result table; the rows that count have ``inputs``.

    Returns:
        For each model and slice ``run``, ``slice``, ``n_examples``, ``inputs``, ``round``, ``client``, ``scope``, ``moment``, and
        as far as they are known ``loss`` and ``accuracy``, each with ``_stderr`` and ``_guess``.
    """
    if "inputs" not in table.columns:
        return []
    rows = table[table["inputs"].notna() & table["value"].notna()]
    rows = rows[rows["metric"].isin([*METRICS, *METRICS.values()])]
    entries: list[Row] = []
    for _, part in rows.groupby("run", sort=False, dropna=False):
        for column, best in (
            ("scope", "global"),
            ("round", part["round"].max()),
            ("moment", "aggregated"),
        ):
            if (mask := part[column].eq(best).fillna(False).astype(bool)).any():
                part = part[mask]
        for _, same in part.groupby(["slice", "client"], sort=False, dropna=False):
            entries.append(_of_rows(same))
    return entries


def _of_rows(rows: pd.DataFrame) -> Row:
    keys = ("run", "slice", "n_examples", "inputs", "round", "client", "scope", "moment")
    entry = {key: rows[key].iloc[0] for key in keys}
    for metrics in METRICS.items():
        for name, metric in zip(("loss", "accuracy"), metrics, strict=True):
            for _, row in rows[rows["metric"] == metric].head(1).iterrows():
                entry |= {
                    name: row["value"],
                    f"{name}_stderr": row["stderr"],
                    f"{name}_guess": row.get("guess"),
                }
    return {key: None if pd.isna(value) else value for key, value in entry.items()}


def sentences(table: pd.DataFrame) -> list[str]:
    """Loss, accuracy and inputs of every model that a table is about, a sentence each."""
    return _sentences(standing(table))


def _sentences(entries: Sequence[Row]) -> list[str]:
    lines = []
    for row in entries:
        who = f"{row['run']}: " if len({r["run"] for r in entries}) > 1 else ""
        of_round = row["moment"] == "aggregated" and row["round"] is not None
        model = f"the global model of round {row['round']:.0f} on " if of_round else ""
        parts = [f"{model}{int(row['n_examples']):,} examples of {row['slice']}"]
        parts += [f"loss {_with_error(row, 'loss')}"] if "loss" in row else []
        parts += [f"accuracy {row['accuracy']:.1%}"] if "accuracy" in row else []
        lines.append(f"{who}{', '.join(parts)}; inputs {row['inputs']}")
    return lines


def _with_error(row: Row, name: str) -> str:
    error = row.get(f"{name}_stderr")
    return number(row[name]) + ("" if error is None else f" ± {number(error, 2)}")


@dataclass
class Standing:
    """Where the models of a table stand: the ``rows`` of ``standing``, in ``sentences``, and what is doubtful of them."""

    rows: list[Row]
    sentences: list[str]
    doubts: list[str]

    @staticmethod
    def of(table: pd.DataFrame) -> Standing:
        rows = standing(table)
        return Standing(rows, _sentences(rows), _doubts(rows))

    def about(self) -> dict[str, Any]:
        """What the json beside a table says of this: ``standing`` and, where there are some, ``warnings``."""
        rows = [
            {key: getattr(value, "item", lambda value=value: value)() for key, value in row.items()}
            for row in self.rows
        ]
        return {"standing": rows, **({"warnings": self.doubts} if self.doubts else {})}


def doubts(table: pd.DataFrame) -> list[str]:
    """A warning where models of a table are no better than a guess; one for all of them.

    A loss is no better than that of outputs that favour no class, and an accuracy no better than that of a guess
    (``guess_accuracy``), unless it is so by ``ERRORS`` of its standard errors. Of a global model one of the two suffices; of a
    client's, which knows little of other clients' classes, both must be so.
    """
    return _doubts(standing(table))


def _doubts(entries: Sequence[Row]) -> list[str]:
    doubtful = []
    for row in entries:
        reasons = _reasons(row)
        if reasons and (row["scope"] != "client" or len(reasons) == 2):
            who = row["run"] or "the model"
            doubtful.append(
                (row, f"{who} is no better than a guess on {row['slice']}: {' and '.join(reasons)}")
            )
    if not doubtful:
        return []
    models = "; ".join(text for _, text in doubtful[:MOST])
    models += f"; and {len(doubtful) - MOST} more" if len(doubtful) > MOST else ""
    inputs = list(dict.fromkeys(str(row["inputs"]) for row, _ in doubtful))
    in_memory = all(text.startswith("as passed") for text in inputs)
    normalise, other = (
        ("normalise them before you pass them", "")
        if in_memory
        else ("--normalise with --data, in Python normalise=", " (--slice, in Python slice=)")
    )
    return [
        f"{models}. Either the model is untrained, or its inputs are not normalised as in training (here: "
        f"{' | '.join(inputs)}; {normalise}), or these are other examples or labels than it was trained for{other}"
    ]


def _reasons(row: Row) -> list[str]:
    """In what a model is no better than a guess.

    Where the examples are too few, or too much alike, to tell even a perfect model from a guess by its accuracy, only a loss that
    is surely worse counts.
    """
    reasons = []
    guess, value = row.get("accuracy_guess"), row.get("accuracy")
    bound = (
        -math.inf
        if guess is None
        else guess + ERRORS * math.sqrt(guess * (1 - guess) / row["n_examples"])
    )
    if value is not None and value <= bound < 1:
        reasons.append(f"accuracy {value:.1%} (a guess gives {guess:.1%})")
    guess, value, stderr = row.get("loss_guess"), row.get("loss"), row.get("loss_stderr")
    margin = (stderr or 0.0) if bound < 1 else -math.inf if stderr is None else -stderr
    if guess is not None and value is not None and value >= guess - ERRORS * margin:
        reasons.append(f"loss {number(value)} (equal probabilities give {number(guess)})")
    return reasons
