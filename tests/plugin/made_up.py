"""A package of somebody else's: with ``stride.py`` three diagnostics, and nothing else of fldiag knows of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pandas as pd
from pydantic import Field

from fldiag.plotting import style
from fldiag.registry import diagnostic, table
from fldiag.results.table import Sentence, SmallTable


def draw(frame, ax=None):
    if ax is None:
        fig = style.figure(3.0, 2.0)
        ax = fig.subplots()
    ax.plot(range(len(frame)), frame["value"].astype(float), "o")
    return ax.figure


def summary(frame, options):
    yield Sentence(f"power {options['power']}")
    yield SmallTable(
        [{"metric": m, "value": v} for m, v in zip(frame["metric"], frame["value"], strict=True)],
        {"metric": "metric", "value": "value"},
    )


@diagnostic(
    "roughness",
    draw=draw,
    summary=summary,
    example="ckpt.pt --power 3",
)
def roughness(
    weights,
    *,
    power: Annotated[int, Field(ge=1, description="Which norm of the gradient.")] = 2,
    called: Annotated[str | None, Field(description="A file that counts the calls.")] = None,
) -> pd.DataFrame:
    """A norm of the gradient at the weights."""
    _count(called)
    value = float(weights.gradient().abs().pow(power).sum() ** (1 / power))
    return table([{"metric": "roughness", "value": value, "estimator": "exact"}], **weights.common)


@diagnostic("tallest", on="runs", draw=draw)
def tallest(runs) -> pd.DataFrame:
    """The largest global weight of each run."""
    values = [max(float(w.abs().max()) for w in run.checkpoint().state.values()) for run in runs]
    return table(
        [
            {"metric": "tallest", "run": run.path.name, "value": v, "estimator": "exact"}
            for run, v in zip(runs, values, strict=True)
        ]
    )


def _count(called):
    if called:
        with Path(called).open("a") as f:
            f.write("x")
