"""The numbers of a run that can be compared: what training writes, and what diagnostics declare of their tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fldiag import registry
from fldiag.results.table import WHOLE


@dataclass(frozen=True)
class Number:
    """A number by the name that conditions use.

    ``better``: which way is better. ``row``: which row of the diagnostic's table, asked with ``options``. ``share``: of 1, so
    that points and percent have a meaning. ``needs``: what two sides must have in common (model, partition).

    In the report's first table it has the heading ``column`` ("": it is not there); its error is that of its own row or the
    value of the metric ``spread``, and it is also taken from the tables of the diagnostics ``within``.

    ``source``: the diagnostic (metrics: what training wrote), which is filled in.
    """

    name: str
    text: str
    better: Literal["higher", "lower"]
    row: Mapping[str, Any]
    share: bool = False
    needs: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    column: str = ""
    spread: str = ""
    within: tuple[str, ...] = ()
    source: str = "metrics"


_TEST = {**WHOLE, "moment": "aggregated", "slice": "test"}
TRAINING = (
    Number(
        "accuracy",
        "test accuracy of the global model",
        "higher",
        {"metric": "accuracy", **_TEST},
        share=True,
    ),
    Number("loss", "test loss of the global model", "lower", {"metric": "loss", **_TEST}),
)


def numbers() -> dict[str, Number]:
    """All by name: those of training, then those of the diagnostics in the order of a report's sections."""
    declared = [
        replace(n, source=entry.name) for entry in registry.diagnostics() for n in entry.numbers
    ]
    return {n.name: n for n in (*TRAINING, *declared)}
