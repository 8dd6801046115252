"""What every picture asks of its table before drawing, with errors that name what is missing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from fldiag.errors import FldiagError
from fldiag.results.select import only


def need(table: pd.DataFrame, columns: Iterable[str], picture: str) -> pd.DataFrame:
    """The table, or FldiagError saying that it is none, is empty, or which of the columns it lacks."""
    missing = [c for c in columns if c not in getattr(table, "columns", ())]
    if missing or table.empty:
        what = f"lacks the columns {', '.join(missing)}" if missing else "is empty"
        remedy = "give the table of a diagnostic, such as pandas.read_csv reads it"
        raise FldiagError(f"the table for the {picture} {what}", remedy, usage=True)
    return table


def select(table: pd.DataFrame, metric: str, picture: str) -> pd.DataFrame:
    """The rows of one metric, or FldiagError naming the metrics that there are."""
    rows = only(table, metric=metric)
    if rows.empty:
        metrics = ", ".join(sorted(table["metric"].dropna().unique()))
        what = f"the table for the {picture} has no rows of metric {metric!r}"
        raise FldiagError(what, f"its metrics: {metrics}", usage=True)
    return rows


def compares_runs(draw: Any) -> Any:
    """Decorator of a drawing function: of a table with several runs it draws them together, told apart by ``run``."""
    draw.compares_runs = True
    return draw


def several_runs(draw: Any) -> bool:
    """Whether the drawing function is marked with ``compares_runs``."""
    return bool(getattr(draw, "compares_runs", False))


#: With more clients than this, pictures show how a number is spread over them instead of one place a client.
MANY = 50


def percentiles(cells: pd.DataFrame) -> pd.DataFrame:
    """Of a table with a row a client: 0, 10, ..., 100 % of the clients have at most so much, each column by itself.

    >>> percentiles(pd.DataFrame({"a": range(101), "b": 3})).loc[[0, 70], ["a", "b"]].to_numpy().tolist()
    [[0.0, 3.0], [70.0, 3.0]]
    """
    quantiles = cells.quantile(np.linspace(0, 1, 11))
    return quantiles.set_axis(range(0, 101, 10), axis="index")


def of_clients(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with numbers of one ``client`` each, as they are; of many clients the percentiles of every number by itself.

    >>> [row["client"] for row in of_clients([{"client": i, "loss": i / 100} for i in range(101)])][:2]
    ['smallest', '10 %']
    """
    if len(rows) <= MANY:
        return rows
    cells = percentiles(pd.DataFrame(rows).drop(columns="client").apply(pd.to_numeric))
    names = ["smallest", *(f"{p} %" for p in range(10, 100, 10)), "largest"]
    names[5] = "median"
    cells = cells.astype(object).where(cells.notna(), None)
    cells.insert(0, "client", names)
    return list(cells.to_dict("records"))


def floats(column: pd.Series) -> np.ndarray:
    """A column as float64, missing values as nan."""
    return pd.to_numeric(column, errors="coerce").to_numpy(dtype=float, na_value=np.nan)


def names(column: pd.Series) -> list[str]:
    """The column as text; a missing label reads ``unnamed``."""
    return ["unnamed" if pd.isna(v) else str(v) for v in column]
