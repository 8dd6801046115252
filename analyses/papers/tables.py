"""Tables of the papers whose cells are runs: a loop over what the paper prints, and measured numbers beside the printed ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd

import fldiag
from fldiag.plotting import style

from . import shapes
from .reported import cells, printed
from .study import Scale, Study, counted, final, protocol, stand_in, trained

#: Ends the names of numbers that are also counted as profilers of layers do, which pictures leave away.
PROFILED = "_profiled"


def table(
    name: str,
    title: str,
    caption: str,
    *,
    ask: Callable[..., pd.DataFrame] = final,
    rows: Callable[[Scale, int], Iterator[pd.DataFrame]] | None = None,
    chosen: Callable[[pd.DataFrame], Any] | None = None,
    seeds: int = 1,
) -> Study:
    """The study of a table: ``ask`` of the run of each cell, or ``rows``. ``chosen``: which of the printed rows are run."""

    def asked_of_cells(scale: Scale, seed: int) -> Iterator[pd.DataFrame]:
        for preset, over, labels in cells(name, chosen):
            yield ask(trained(scale, protocol(scale, preset, over, seed=seed)), **labels)

    def draw(table: pd.DataFrame) -> Any:
        is_shown = ~table["metric"].str.endswith((PROFILED, "_std"))
        return shapes.numbers(table[is_shown], printed(name))

    source = printed(name)["source"].iloc[0].split(" = ")[0]
    return Study(name, title, source, caption, rows or asked_of_cells, draw, seeds)


def counts(name: str, title: str, caption: str, *questions: str) -> Study:
    """The study of a table that is counted, on the paper's model, images and classes at every scale."""

    def rows(scale: Scale, seed: int) -> Iterator[pd.DataFrame]:
        for preset, over, labels in cells(name):
            names = set(printed(name).query("data == @labels['data']")["metric"])
            for question in questions:
                numbers = counted(question, fldiag.Config.load(preset, **over), **labels)
                yield numbers[numbers["metric"].str.removesuffix(PROFILED).isin(names)]

    return table(name, title, caption, rows=rows, seeds=0)


def sizes(name: str, presets: dict[str, str], caption: str) -> Study:
    """The study of how many examples data sets have: data -> a preset that loads them."""

    def rows(scale: Scale, seed: int) -> Iterator[pd.DataFrame]:
        for data, preset in presets.items():
            labels = {"setting": "", "method": "", "model": "", "data": data}
            yield counted("examples", stand_in(scale, preset, {}), **labels)

    def by_data(table: pd.DataFrame) -> pd.DataFrame:
        return table.assign(method=table["data"].map(style.display_name), data="")

    def draw(table: pd.DataFrame) -> Any:
        return shapes.numbers(by_data(table), by_data(printed(name)))

    source = printed(name)["source"].iloc[0]
    return Study(name, "Sizes of the data sets", source, caption, rows, draw, seeds=0)
