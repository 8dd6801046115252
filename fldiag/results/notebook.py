"""How a table of results and a thing with a name show themselves in a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import pandas as pd

from fldiag.results.progress import shell
from fldiag.results.summary import number


def card(title: str, facts: Mapping[str, object]) -> str:
    """HTML without style or script; names and values are escaped, None is left out.

    >>> card("Run", {"rounds": 3, "method": "<fedavg>", "seed": None})
    '<table><caption>Run</caption><tr><th>rounds</th><td>3</td></tr><tr><th>method</th><td>&lt;fedavg&gt;</td></tr></table>'
    """
    rows = "".join(
        f"<tr><th>{escape(str(k))}</th><td>{escape(str(v))}</td></tr>"
        for k, v in facts.items()
        if v is not None
    )
    return f"<table><caption>{escape(title)}</caption>{rows}</table>"


#: Rows that are shown; the last line says how many more there are.
MOST = 30
#: What the numbers of a metric, their mean over the parts and their standard deviation are counted in, where the table does not
#: say it.
UNITS = {
    **dict.fromkeys(("accuracy", "personal_accuracy", "drop", "forgotten"), "share of 1"),
    **dict.fromkeys(("loss", "barrier", "sharpness"), "loss"),
    **dict.fromkeys(("eigenvalue", "trace"), "loss / weight²"),
}
_NUMBERS = ("value", "stderr", "residual", "low", "high")
#: Shown within the cell of the value, or never.
_OWN = (*_NUMBERS, "unit", "converged")


class Results(pd.DataFrame):
    """A table of results; in all but its look in a notebook a pandas table, and so is what is selected from it."""

    @property
    def _constructor(self) -> type[Results]:
        return Results

    def _repr_html_(self) -> str | None:
        """Without columns in which nothing stands; what is the same in every row stands above. What was made another table of,
        with rows that have names or columns that are no texts, is shown as pandas shows it; None where pandas is told not to."""
        if not self._is_ours() or not pd.get_option("display.notebook_repr_html"):
            return pd.DataFrame(self)._repr_html_()  # type: ignore[operator,no-any-return]
        filled = [c for c in self.columns if c not in _OWN and self[c].notna().any()]
        same = [
            c
            for c in filled
            if len(self) > 1 and self[c].notna().all() and self[c].astype(str).nunique() == 1
        ]
        columns = [c for c in filled if c not in same]
        head = "".join(f"<th>{escape(c)}</th>" for c in [*columns, "value", "unit"])
        rows = pd.DataFrame(self).head(MOST).to_dict("records")
        body = "".join(
            "<tr>"
            + "".join(f"<td>{escape(_text(row[c]))}</td>" for c in columns)
            + f"<td>{escape(_value(row))}</td><td>{escape(_unit(row))}</td></tr>"
            for row in rows
        )
        footer = f"<p>{len(self) - MOST:,} more rows</p>" if len(self) > MOST else ""
        constants = ", ".join(f"{c} {_text(self[c].iloc[0])}" for c in same)
        caption = f"<caption>{escape(constants)}</caption>" if constants else ""
        return f"<table>{caption}<tr>{head}</tr>{body}</table>{footer}"

    def _is_ours(self) -> bool:
        """Whether there are numbers in it, and nothing stands in the names of rows."""
        rows, columns = self.index, self.columns
        return (
            len(self) > 0
            and all(isinstance(c, str) for c in columns)
            and columns.is_unique
            and "value" in columns
            and all(
                pd.api.types.is_numeric_dtype(self[c].dropna().infer_objects())
                for c in {*_NUMBERS} & {*columns}
            )
            and rows.nlevels == 1
            and rows.name is None
            and pd.api.types.is_integer_dtype(rows)
        )


def as_results(table: pd.DataFrame) -> Results:
    """The same table, which shows itself."""
    results = Results(table, copy=False)
    results.attrs = dict(table.attrs)
    return results


def _text(value: Any) -> str:
    if pd.api.types.is_scalar(value) and pd.isna(value):
        return ""
    return number(float(value)) if isinstance(value, float) else str(value)


def _value(row: dict[Any, Any]) -> str:
    """The number, and how far it can be trusted: an interval, else a standard error, else an eigenvalue's residual."""
    numbers = {key: float(row[key]) for key in _NUMBERS if pd.notna(row.get(key))}
    if "value" not in numbers:
        return "–"
    text = number(numbers["value"])
    if "low" in numbers and "high" in numbers:
        text += f" ({number(numbers['low'])} to {number(numbers['high'])})"
    elif "stderr" in numbers:
        text += f" ± {number(numbers['stderr'], 2)}"
    elif "residual" in numbers:
        text += f", residual {number(numbers['residual'], 2)}"
    return text + (
        ", not converged"
        if row.get("converged") is False or str(row.get("converged")) == "False"
        else ""
    )


def _unit(row: dict[Any, Any]) -> str:
    if pd.notna(row.get("unit")):
        return str(row["unit"])
    return UNITS.get(str(row.get("metric", "")).removesuffix("_parts").removesuffix("_std"), "")


def show_figures() -> None:
    """A figure that a notebook's cell returns is shown without ``%matplotlib inline`` too; formats that the user chose stay."""
    if (running := shell()) is None:
        return
    from IPython.core.pylabtools import select_figure_formats
    from matplotlib.figure import Figure

    try:
        running.display_formatter.formatters["image/png"].lookup_by_type(Figure)
    except KeyError:
        select_figure_formats(running, {"png"})
