"""Learning curves: metrics of runs over the rounds, seeds as mean and spread. As Lee et al., "FedSOL" (CVPR 2024), figure 10."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fldiag.errors import FldiagError
from fldiag.plotting import style
from fldiag.plotting.curves import rounds_axis
from fldiag.plotting.tables import floats, names, need, select

PICTURE = "learning curves"
#: What a line may mix without being told: the seeds of one run (drawn as mean and spread).
_MUST_AGREE = ("slice", "moment", "scope", "client", "client_b", "layer", "index", "unit")
#: Metrics that are written otherwise than with spaces.
_METRICS = {
    "global_local_divergence": "global–local divergence",
    "local_local_divergence": "local–local divergence",
}


def draw(
    table: pd.DataFrame,
    metric: str | Sequence[str] = "accuracy",
    *,
    smooth: int = 1,
    chance: float | None = None,
    note: str = "",
    width: float | None = None,
) -> Figure:
    """Curves of one or several metrics (one panel each) over ``round``, the legend below the panels.

    ``table``: columns ``metric, run, round, value``. Several values of a run at one round (seeds) become their mean
    with a band of one standard deviation (of more than three lines: with bars), nowhere beyond what is possible, and
    the legend says of how many seeds. ``smooth`` > 1 draws the centred moving mean over so many
    rounds (fewer at the ends) over the faint raw curve, and the axis label says so. A cross: from there on values are
    not finite. ``chance``: the accuracy of guessing, a line where the curves come near it. ``note``: text above the
    legend. ``width``: inches, where the sheet says nothing.
    Raises FldiagError for an empty selection and for rows that mix slices, clients or moments.
    """
    metrics = [metric] if isinstance(metric, str) else list(metric)
    if smooth < 1 or smooth != int(smooth):
        raise FldiagError(f"smooth is {smooth}", "give a number of rounds, 1 for none", usage=True)
    need(table, ("metric", "run", "round", "value"), PICTURE)
    panels = [(m, _one(select(table, m, PICTURE), m)) for m in metrics]
    series = [(m, rows, _series(rows)) for m, rows in panels]
    labels = list(dict.fromkeys(name for _, _, lines in series for name in lines))
    looks = style.looks(labels)
    width = style.wide(width or (style.ONE_COLUMN if len(panels) == 1 else style.TWO_COLUMNS))
    texts, counts = _texts(labels, [lines for _, _, lines in series])
    heading = "; ".join(filter(None, (note, counts)))
    with style.paper():
        fig, axes = style.panels(len(panels), 2.15, 0.1, width=width)
        for ax, (name, rows, lines) in zip(axes, series, strict=True):
            for place, label in enumerate(labels):
                if label in lines:
                    turn = place, len(labels)
                    _line(ax, lines[label], looks[label], smooth, turn, _limits(name, rows))
            _frame(ax, name, rows, smooth)
            if chance is not None:
                style.chance(ax, chance)
        handles = [Line2D([], [], **looks[n].line) for n in labels]
        if any(curve.get_label() == "diverged" for ax in axes for curve in ax.lines):
            handles.append(diverged())
            texts.append("diverged")
        style.legend(fig, handles, texts, handlelength=2.6, title=heading or None)
    return fig


def diverged() -> Line2D:
    """What a legend shows of a run that diverged."""
    look = style.Look("#444444", "x", "-").point
    return Line2D([], [], **{**look, "markersize": 5, "markeredgewidth": 1.2})


def _texts(
    labels: Sequence[str], panels: Sequence[Mapping[str, pd.DataFrame]]
) -> tuple[list[str], str]:
    """The legend's texts, and of how many seeds the bands are: once where all lines have as many."""
    seeds = {n: max(int(lines[n]["count"].max()) for lines in panels if n in lines) for n in labels}
    if len(set(seeds.values())) == 1:
        (count,) = set(seeds.values())
        return list(labels), f"mean ± standard deviation of {count} seeds" if count > 1 else ""
    return [f"{n} (± std of {seeds[n]} seeds)" if seeds[n] > 1 else n for n in labels], ""


def _limits(metric: str, rows: pd.DataFrame) -> tuple[float, float]:
    """What values are possible, as far as they say so themselves: shares, percentages, cosines, what is never below 0."""
    values = floats(rows["value"])
    values = values[np.isfinite(values)]
    low = 0.0 if values.min() >= 0 else -1.0 if "cos" in metric and values.min() >= -1 else -np.inf
    percent = "unit" in rows.columns and (rows["unit"] == "%").any()
    high = (
        100.0
        if percent
        else 1.0
        if ("accuracy" in metric or "cos" in metric) and values.max() <= 1
        else np.inf
    )
    return low, high


def _one(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The rows, or FldiagError when a curve through them would join different things."""
    for column in _MUST_AGREE:
        values = rows[column].unique() if column in rows.columns else []
        if len(values) > 1:
            listing = ", ".join("none" if pd.isna(v) else str(v) for v in values[:6])
            raise FldiagError(
                f"rows of metric {metric!r} mix {len(values)} values of {column}: {listing}",
                f"choose one: table[table[{column!r}] == {str(values[0])!r}]",
                usage=True,
            )
    if rows["round"].isna().any() or not np.isfinite(floats(rows["value"])).any():
        raise FldiagError(
            f"rows of metric {metric!r} lack a round, or have no finite value",
            "give every row its round and value",
            usage=True,
        )
    return rows


def _series(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Line name -> table indexed by round with columns mean, std, count."""
    flat = pd.DataFrame(
        {"run": names(rows["run"]), "round": floats(rows["round"]), "value": floats(rows["value"])}
    )
    if "seed" in rows.columns:
        twice = rows[rows.duplicated(["run", "round", "seed"])]
        if len(twice):
            raise FldiagError(
                f"run {twice.iloc[0]['run']!r} has two values at round {twice.iloc[0]['round']}",
                "give the runs different labels or seeds",
                usage=True,
            )
    return {
        name: part.groupby("round")["value"].agg(["mean", "std", "count"]).sort_index()
        for name, part in flat.groupby("run", sort=False)
    }


def smoothed(rounds: np.ndarray, values: np.ndarray, window: int) -> np.ndarray:
    """Centred mean of the values within ``window`` rounds; the window shrinks evenly at the ends and skips nan."""
    reach = np.minimum((window - 1) / 2, np.minimum(rounds - rounds[0], rounds[-1] - rounds))
    near = np.abs(rounds[:, None] - rounds[None, :]) <= reach[:, None] + 1e-9
    near &= np.isfinite(values)[None, :]
    total = np.where(near, np.where(np.isfinite(values), values, 0.0)[None, :], 0.0).sum(1)
    return np.divide(total, near.sum(1), out=np.full(len(values), np.nan), where=near.any(1))


def _line(
    ax: Axes,
    points: pd.DataFrame,
    look: style.Look,
    smooth: int,
    turn: tuple[int, int],
    limits: tuple[float, float],
) -> None:
    """One learning curve, ``turn``: the place of its line, and of how many; a cross at the last finite value, where there are
    rounds after it without one."""
    place, lines = turn
    rounds, raw, spread = (
        points.index.to_numpy(float),
        floats(points["mean"]),
        floats(points["std"]),
    )
    values = smoothed(rounds, raw, smooth) if smooth > 1 else raw
    if smooth > 1:
        ax.plot(rounds, raw, color=look.color, linewidth=0.5, alpha=0.3, label="_raw")
    stride = max(len(rounds) // 6, 1)
    # Markers of different lines at different rounds: where lines run together both stay visible.
    at = slice(place * stride // max(lines, 1), None, stride)
    if np.isfinite(spread).any():
        band = smoothed(rounds, spread, smooth) if smooth > 1 else spread
        low, high = np.clip(values - band, *limits), np.clip(values + band, *limits)
        if lines <= 3:
            ax.fill_between(rounds, low, high, color=look.color, alpha=0.15, linewidth=0)
        else:  # bands on bands are mud
            shift = 0.012 * (place - (lines - 1) / 2) * np.ptp(rounds)
            x = np.clip(rounds[at] + shift, rounds[0], rounds[-1])
            ax.vlines(x, low[at], high[at], color=look.color, linewidth=0.7, alpha=0.8)
    ax.plot(rounds, values, markevery=at, label="curve", **look.line)
    finite = np.flatnonzero(np.isfinite(raw))
    if len(finite) and finite[-1] < len(raw) - 1:
        cross = {**look.point, "marker": "x", "markersize": 6, "markeredgewidth": 1.4}
        ax.plot(rounds[finite[-1]], raw[finite[-1]], label="diverged", zorder=5, **cross)


def _frame(ax: Axes, metric: str, rows: pd.DataFrame, smooth: int) -> None:
    def only(column: str) -> str:
        values = rows[column].dropna().unique() if column in rows.columns else []
        return str(values[0]) if len(values) else ""

    unit, slice_name = only("unit"), only("slice")
    text = _METRICS.get(metric, metric.replace("_", " "))
    text += (f" on {slice_name}" if slice_name else "") + (f" [{unit}]" if unit else "")
    text += f"\n(moving mean over {smooth} rounds)" if smooth > 1 else ""
    ax.set_ylabel("\n".join(map(style.plain, text.split("\n"))))
    rounds_axis(ax)
    ax.grid(True)
    ax.margins(x=0.02)
