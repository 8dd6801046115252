"""The doctor's picture: which check found what, and in which rounds; of many runs, in which of them."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fldiag.diagnostics.doctor.findings import (
    FAULT,
    HEALTHY,
    INFORMATION,
    SEVERITIES,
    UNCHECKED,
    WARNING,
)
from fldiag.plotting import style
from fldiag.plotting.tables import compares_runs, need

#: Severity -> (marker, colour, size): shape and lightness tell them apart without colour.
MARKS = {
    FAULT: ("X", "#D55E00", 6.0),
    WARNING: ("^", "#E69F00", 5.5),
    INFORMATION: ("o", "#56B4E9", 4.0),
    HEALTHY: (".", "#888888", 3.0),
    UNCHECKED: ("_", "#bbbbbb", 5.0),
}
#: More runs than these are drawn as one column each.
PANELS = 3


def rounds_of(text: object) -> list[int]:
    """
    >>> rounds_of("1..3, 7")
    [1, 2, 3, 7]
    """
    rounds: list[int] = []
    for part in str(text).split(", ") if isinstance(text, str) else []:
        first, _, last = part.partition("..")
        rounds += range(int(first), int(last or first) + 1)
    return rounds


@compares_runs
def draw(table: pd.DataFrame) -> Figure:
    """A row a check. Of up to three runs, a panel each: at the left the check's verdict, then the rounds in which something was
    found. Of more runs, one panel with a column a run.

    Raises FldiagError for another table.
    """
    need(table, ("run", "metric", "title", "severity", "rounds", "stored"), "picture of the doctor")
    titles = dict(zip(table["metric"], table["title"], strict=True))
    runs = list(dict.fromkeys(table["run"]))
    place = {check: len(titles) - 1 - i for i, check in enumerate(titles)}
    with style.paper():
        fig = style.figure(style.wide(), 1.0 + 0.165 * len(titles), layout="constrained")
        panels = fig.subplots(
            1, len(runs) if len(runs) <= PANELS else 1, sharey=True, squeeze=False
        )[0]
        if len(runs) <= PANELS:
            for ax, run in zip(panels, runs, strict=True):
                _rounds(ax, table[table["run"] == run], place)
                ax.set_title(style.plain(style.shorten(run, 60 // len(runs))))
        else:
            _runs(panels[0], table, place, runs)
        for ax in panels:
            ax.set_ylim(-0.6, len(titles) - 0.4)
            ax.tick_params(axis="y", length=0)
            ax.grid(True, axis="y")
        panels[0].set_yticks(list(place.values()), [style.plain(titles[check]) for check in place])
        keys = [
            Line2D([], [], linestyle="none", marker=m, color=c, markersize=s)
            for m, c, s in MARKS.values()
        ]
        style.legend(fig, keys, list(MARKS), loc="outside lower center", ncols=5, columnspacing=1.4)
    return fig


def _mark(ax: Axes, x: list[float], y: float, severity: str) -> None:
    marker, colour, size = MARKS[severity]
    ax.plot(
        x,
        [y] * len(x),
        linestyle="none",
        marker=marker,
        color=colour,
        markersize=size,
        markeredgewidth=0.8,
        markeredgecolor="white" if marker in "X^o" else colour,
        zorder=9 - SEVERITIES.index(severity),
        clip_on=False,
    )


def _rounds(ax: Axes, rows: pd.DataFrame, place: dict[str, int]) -> None:
    stored_rounds = rounds_of(rows["stored"].iloc[0]) or [1]
    first, last = stored_rounds[0], stored_rounds[-1]
    left = first - max(1.0, 0.08 * (last - first + 1))
    for check, severity, rounds in zip(
        rows["metric"], rows["severity"], rows["rounds"], strict=True
    ):
        _mark(ax, [left], place[check], severity)
        if marks := [float(r) for r in rounds_of(rounds)]:
            _mark(ax, marks, place[check], severity)
    ax.axvline((left + first) / 2, color="#bbbbbb", linewidth=0.6)
    ax.set_xlim(left - (first - left) / 2, last + 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    ax.set_xticks([t for t in ax.get_xticks() if first <= t <= last and t == int(t)])
    ax.set_xlabel("verdict, then rounds")


def _runs(ax: Axes, table: pd.DataFrame, place: dict[str, int], runs: list[str]) -> None:
    at = {run: i for i, run in enumerate(runs)}
    for (run, check), part in table.groupby(["run", "metric"], sort=False):
        _mark(ax, [at[run]], place[check], min(part["severity"], key=SEVERITIES.index))
    stride = max(1, -(-len(runs) // 25))
    ticks = runs[::stride]
    ax.set_xticks(
        [at[run] for run in ticks],
        [style.plain(style.shorten(run, 22)) for run in ticks],
        rotation=60,
        ha="right",
    )
    ax.set_xlim(-0.6, len(runs) - 0.4)
