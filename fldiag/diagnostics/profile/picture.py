"""The loss along lines: through the weights beside its parabola, or on the straight way from one model to others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fldiag.errors import FldiagError
from fldiag.plotting import style
from fldiag.plotting.curves import barrier
from fldiag.plotting.tables import floats, names, need, select
from fldiag.results.select import number, only

PICTURE = "loss profile"
#: Of more lines than this: their median and spread, and by name those that stand out, at most so many.
_MAX_LINES, _MAX_LABELS = 6, 3


def draw(table: pd.DataFrame) -> Figure:
    """One panel a run with its lines (column ``index``), all panels on one loss axis.

    ``table``: rows ``metric="loss"`` with ``run, index, x, value`` (and ``stderr``: a band), and for lines through
    the weights rows ``"parabola"`` (dashed) and ``"curvature"``; for ways to other models rows ``"barrier"`` (a dot
    where it is) and the column ``client``, on a logarithmic axis when the loss spans more than a factor of 50.
    Raises FldiagError for an unfit table.
    """
    need(table, ("metric", "run", "index", "x", "value"), PICTURE)
    select(table, "loss", PICTURE)
    table = table.assign(run=names(table["run"]))
    runs = [
        run for run, rows in table.groupby("run", sort=False) if (rows["metric"] == "loss").any()
    ]
    width = style.wide(style.ONE_COLUMN if len(runs) == 1 else style.TWO_COLUMNS)
    across = min(len(runs), 3, int(width / 2))
    down = -(-len(runs) // across)
    finite = floats(only(table, metric="loss")["value"])
    finite = finite[np.isfinite(finite)]
    if not len(finite):
        raise FldiagError(
            "no point of the profile has a finite loss", "choose a smaller span around the weights"
        )
    low, high = float(finite.min()), float(finite.max())
    room = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
    wide = (table["metric"] == "barrier").any() and low > 0 and high > 50 * low
    with style.paper():
        # Room for the legends, so that the panels keep their height and the legends their distance.
        longest = (
            max(min(table.loc[table["run"] == run, "index"].nunique(), _MAX_LINES) for run in runs)
            + 2
        )
        fig = style.figure(
            width, (2.5 + 0.155 * longest) * down, layout=ConstrainedLayoutEngine(h_pad=0.08)
        )
        axes = fig.subplots(down, across, squeeze=False, sharey=True)
        for ax, run in zip(axes.flat, runs, strict=False):
            rows = table[table["run"] == run]
            paths = (rows["metric"] == "barrier").any()
            (_ways if paths else _lines)(ax, rows)
            ax.set_title(
                "\n".join(map(style.plain, style.wrap(run, width / across - 0.6, 2, 9.5))),
                weight="bold",
            )
            ax.set_xlabel(
                _axis_label(
                    rows,
                    "from the global weights (0) to a client's (1)"
                    if _clients(rows)
                    else "from the weights (0) to others (1)",
                )
                if paths
                else _axis_label(rows, "coefficient")
            )
            ax.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
            if wide:
                ax.set_yscale("log")
                ax.set_ylim(low / 1.2, high * 1.2)
                ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: style.number(v, 2)))
            else:
                ax.set_ylim(low - room, high + room)
            ax.grid(True)
            ax.margins(x=0.02)
        for ax in axes[:, 0]:
            ax.set_ylabel("loss")
        for ax in axes.flat[len(runs) :]:
            ax.remove()
    return fig


def _axis_label(rows: pd.DataFrame, text: str) -> str:
    parts = [str(v) for v in rows["slice"].dropna().unique()[:1]] if "slice" in rows.columns else []
    count = rows["n_examples"].dropna().unique() if "n_examples" in rows.columns else []
    parts += [f"n = {int(count[0]):,}"] if len(count) else []
    return style.plain(text) + (f"\n({style.plain(', '.join(parts))})" if parts else "")


def _clients(rows: pd.DataFrame) -> bool:
    return "client" in rows.columns and bool(only(rows, metric="barrier")["client"].notna().all())


def _curves(rows: pd.DataFrame, metric: str) -> dict[int, pd.DataFrame]:
    part = only(rows, metric=metric).sort_values("x")
    return {int(i): line for i, line in part.groupby("index", sort=True)}


def _value(rows: pd.DataFrame, metric: str, index: int, column: str = "value") -> float:
    value = number(rows, metric, index=index, column=column)
    return float("nan") if value is None else value


def _curve(
    ax,
    line: pd.DataFrame,
    look: style.Look,
    width: float = 1.2,
    alpha: float = 1.0,
    band: bool = True,
) -> None:
    x, value = floats(line["x"]), floats(line["value"])
    if band and "stderr" in line.columns:
        error = np.nan_to_num(floats(line["stderr"]))
        ax.fill_between(x, value - error, value + error, color=look.color, alpha=0.18, linewidth=0)
    ax.plot(x, value, color=look.color, linewidth=width, alpha=alpha, label="loss")


def _lines(ax, rows: pd.DataFrame) -> None:
    parabolas, handles, texts = _curves(rows, "parabola"), [], []
    for place, (index, line) in enumerate(_curves(rows, "loss").items()):
        look = style.look(place)
        _curve(ax, line, look)
        if index in parabolas:
            bowl = parabolas[index]
            ax.plot(
                floats(bowl["x"]),
                floats(bowl["value"]),
                color=look.color,
                linestyle=(0, (3, 2)),
                linewidth=0.9,
                label="parabola",
            )
        bend, error = _value(rows, "curvature", index), _value(rows, "curvature", index, "residual")
        text = f"direction {index}: curvature {style.number(bend)}"
        handles.append(Line2D([], [], color=look.color))
        is_unsure = error > 5e-3 * abs(bend)  # a small residual would be read as a standard error
        texts.append(text + (f" ± {style.number(error, 2)}" if is_unsure else ""))
    if parabolas:
        handles.append(Line2D([], [], color="#555555", linestyle=(0, (3, 2)), linewidth=0.9))
        texts.append("parabola of slope and curvature")
    _legend(ax, handles, texts)


def _ways(ax, rows: pd.DataFrame) -> None:
    """The loss along every way with its barrier; of many ways median and spread, and by name those with the largest barriers."""
    curves = _curves(rows, "loss")
    barriers = {i: _value(rows, "barrier", i) for i in curves}
    is_crowded = len(curves) > _MAX_LINES
    handles: list[Any] = []
    texts: list[str] = []
    labelled = _outliers(barriers) if is_crowded else list(curves)
    if is_crowded:
        handles, texts = _spread(ax, curves, "clients" if _clients(rows) else "ways")
    for place, index in enumerate(labelled):
        line, look = curves[index], style.look(place + is_crowded)
        _curve(ax, line, look, 1.3, 1.0, band=not is_crowded)
        at = _value(rows, "barrier", index, "x")
        barrier(ax, floats(line["value"]), at, barriers[index], look)
        handles.append(Line2D([], [], color=look.color, marker=look.marker, markersize=3.6))
        texts.append(_describe_barrier(rows, line, index, barriers[index]))
    if is_crowded:
        mean = style.number(
            float(np.mean([b for b in barriers.values() if np.isfinite(b)] or [np.nan])), 3
        )
        handles.append(Line2D([], [], linestyle=""))
        texts.append(f"mean barrier of all {mean}" if labelled else "no barrier on any")
    buffers = (
        only(rows, metric="barrier")["buffers"].dropna().unique()
        if "buffers" in rows.columns
        else []
    )
    if len(buffers):
        handles.append(Line2D([], [], linestyle=""))
        texts.append(f"batch-norm statistics: {buffers[0]}")
    _legend(ax, handles, texts)


def _outliers(barriers: Mapping[int, float]) -> list[int]:
    """The ways whose barriers are beyond Tukey's fence, the largest first; at least the largest, where there is a barrier."""
    ways = sorted((i for i in barriers if barriers[i] > 0), key=lambda i: -barriers[i])
    lower, upper = np.nanquantile(list(barriers.values()), [0.25, 0.75]) if ways else (0.0, 0.0)
    return [
        i
        for place, i in enumerate(ways[:_MAX_LABELS])
        if not place or barriers[i] > upper + 1.5 * (upper - lower)
    ]


def _spread(ax, curves: Mapping[int, pd.DataFrame], who: str) -> tuple[list, list[str]]:
    """Median, quartiles and extremes over the ways, at the places of the first."""
    x = floats(next(iter(curves.values()))["x"])
    values = np.stack(
        [np.interp(x, floats(line["x"]), floats(line["value"])) for line in curves.values()]
    )
    low, first, middle, third, high = np.nanquantile(values, [0, 0.25, 0.5, 0.75, 1], axis=0)
    shades = [
        ax.fill_between(x, low, high, color="#e2e2e2", linewidth=0, label="range"),
        ax.fill_between(x, first, third, color="#b5b5b5", linewidth=0, label="quartiles"),
    ]
    (line,) = ax.plot(x, middle, color="#555555", linewidth=1.2, label="median")
    return [line, shades[1], shades[0]], [f"median of {len(curves)} {who}", "half of them", "all"]


def _describe_barrier(rows: pd.DataFrame, line: pd.DataFrame, index: int, height: float) -> str:
    who = f"client {int(line['client'].iloc[0])}" if _clients(rows) else f"way {index}"
    if not height:
        return f"{who}: no barrier"
    error = _value(rows, "barrier", index, "stderr")
    return f"{who}: barrier {style.number(height, 3)}" + (
        f" ± {style.number(error, 2)}" if np.isfinite(error) else ""
    )


def _legend(ax, handles: list, texts: list[str]) -> None:
    # Below the panel: inside, a legend would lie on a steep curve.
    style.legend(
        ax,
        handles,
        texts,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.28),
        handlelength=2.2,
        borderpad=0.1,
        labelspacing=0.3,
    )
