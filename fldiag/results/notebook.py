"""How a table of results and a thing with a name show themselves in a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import pandas as pd

from fldiag.errors import FldiagError
from fldiag.results.progress import shell
from fldiag.results.summary import number
from fldiag.results.table import COLUMNS


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
#: What tells the numbers of a metric apart, and texts beside them that do not.
DIMENSIONS = (
    "run",
    "method",
    "seed",
    "round",
    "moment",
    "client",
    "client_b",
    "slice",
    "index",
    "layer",
    "estimator",
)
REMARKS = ("note", "inputs")
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

    def to_xarray(self) -> Any:
        """The numbers over rounds, clients and whatever else tells them apart, as an ``xarray.Dataset``.

        A variable a metric (and ``METRIC_stderr``), over those of ``DIMENSIONS`` that vary; what is the same in every row is an
        attribute. Where a metric has rows of several scopes, the variables are named ``SCOPE_METRIC``; those of single classes,
        eigenvalues or layers end in ``_by_index`` or ``_by_layer``. The slice of a client's
        own data, ``client:7/train``, is ``client/train`` for every client. Masked numbers are NaN.

        Raises:
            FldiagError: xarray is not installed, or several rows have the same place.
        """
        try:
            import xarray
        except ImportError:
            raise FldiagError(
                "xarray is not installed", "pip install 'fldiag[xarray]'", usage=True
            ) from None
        frame = pd.DataFrame(self)
        slices = frame["slice"].str.replace(r"^client:\d+/", "client/", regex=True)
        frame = frame.assign(slice=slices.where(frame["client"].notna(), frame["slice"]))
        extra = frame.columns.difference([*COLUMNS, *REMARKS])
        text_columns = [
            name for name in extra if isinstance(frame[name].dropna().head(1).max(), str)
        ]
        places = [name for name in (*DIMENSIONS, *text_columns) if name in frame.columns]
        scopes = frame.groupby("metric")["scope"].nunique()
        parts = frame.assign(
            by=[_parts_of(row) for row in zip(frame["index"], frame["layer"], strict=True)]
        )
        variables = {}
        for (metric, scope, by), rows in parts.groupby(
            ["metric", "scope", "by"], sort=False, dropna=False
        ):
            name = (f"{scope}_{metric}" if scopes[metric] > 1 else metric) + by
            keys = [key for key in places if rows[key].nunique(dropna=False) > 1]
            kinds = {
                key: int if rows[key].dtype == "Int64" and rows[key].notna().all() else str
                for key in keys
            }
            rows = rows.astype(kinds)
            if rows.duplicated(keys).any() if keys else len(rows) > 1:
                raise FldiagError(
                    f"several numbers of {metric} have the same place in {', '.join(keys) or 'the table'}",
                    f"leave it out, table[table['metric'] != {metric!r}].to_xarray(), or select the rows that you mean",
                    usage=True,
                )
            for column, ending in (("value", ""), ("stderr", "_stderr")):
                numbers = rows[column].astype(float)
                if column == "stderr" and numbers.isna().all():
                    continue
                variables[name + ending] = (
                    numbers.set_axis(pd.MultiIndex.from_frame(rows[keys])).to_xarray()
                    if len(keys) > 1
                    else xarray.DataArray(
                        numbers.to_numpy(), {keys[0]: rows[keys[0]].to_numpy()}, [keys[0]]
                    )
                    if keys
                    else xarray.DataArray(numbers.iloc[0])
                )
        attributes = {
            key: str(frame[key].iloc[0])
            for key in places
            if len(frame) and frame[key].notna().all() and frame[key].nunique() == 1
        }
        return xarray.Dataset(variables, attrs=attributes)

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


def _parts_of(place: tuple[Any, Any]) -> str:
    """How the name of a variable ends whose numbers are of single classes, eigenvalues or layers."""
    return "".join(
        f"_by_{name}"
        for name, value in zip(("index", "layer"), place, strict=True)
        if pd.notna(value)
    )


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
