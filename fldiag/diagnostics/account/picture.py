"""Why local training harmed the global loss: the terms of the second-order account."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from fldiag.plotting import style
from fldiag.plotting.tables import floats, need, select
from fldiag.results.select import only

PICTURE = "picture of the account"
COLUMNS = [
    "metric",
    "round",
    "moment",
    "scope",
    "client",
    "estimator",
    "index",
    "layer",
    "value",
]
_TERMS = {
    "linear": r"linear $g^\top d$",
    "quadratic": r"quadratic $d^\top H d\,/\,2$",
    "rest": "rest",
}
_HATCH = ("", "", "////")
#: The mark of the true change of the loss.
_TRUE = {**style.Look("black", "D", "-").point, "markerfacecolor": "white"}


def draw(table: pd.DataFrame) -> Figure:
    """Three panels of the last round: the terms of every update beside the true change of the loss; the
    terms along the top Hessian eigenvectors and the rest of space, and by layer (means over the clients).
    ``table``: what the diagnostic ``account`` returns.

    Raises FldiagError for a table without the account.
    """
    need(table, COLUMNS, PICTURE)
    round = int(select(table, "change", PICTURE)["round"].max())
    rows = only(table, round=round)
    slice_ = str(only(rows, metric="change")["slice"].iloc[0])
    looks = [style.look(place) for place in (2, 5, 4)]
    with style.paper():
        fig, (terms, eigen, layer) = style.panels(3, 2.4, least=2.0)
        _terms(terms, rows, looks, f"change of the {slice_} loss")
        _split(
            eigen,
            only(rows, estimator="eigen"),
            "index",
            looks[:2],
            "by eigenvector (mean of clients)",
        )
        _split(
            layer, only(rows, estimator="layer"), "layer", looks[:2], "by layer (mean of clients)"
        )
        keys = [
            Patch(facecolor=look.color, hatch=hatch, edgecolor="white")
            for look, hatch in zip(looks, _HATCH, strict=True)
        ]
        fig.legend(
            [*keys, Line2D([], [], **_TRUE)],
            [*_TERMS.values(), "true change"],
            loc="outside lower center",
            ncols=4 if style.wide() > 4.5 else 2,
        )
        fig.suptitle(f"round {round}: effect of each update on the loss", fontsize=8.5)
    return fig


def _terms(ax, rows: pd.DataFrame, looks: list[style.Look], label: str) -> None:
    exact = only(rows, estimator="exact", metric=["change", *_TERMS])
    names = [*(str(int(k)) for k in sorted(exact["client"].dropna().unique())), "all"]
    who = ["all" if pd.isna(k) else str(int(k)) for k in exact["client"]]
    cells = pd.DataFrame(
        {"who": who, "metric": exact["metric"].astype(str), "value": floats(exact["value"])}
    )
    wide = cells.pivot(index="who", columns="metric", values="value").reindex(names)
    x = np.arange(len(names))
    values = np.concatenate([wide[m].to_numpy() for m in ("change", *_TERMS)])
    size = np.abs(values[np.isfinite(values)])
    near = float(np.median(size)) if len(size) else 0.0
    far = bool(len(size)) and size.max() > 20 * max(near, 1e-12)
    # Lengths add up only where the axis is linear.
    _bars(ax, x, [wide[m].to_numpy() for m in _TERMS], looks, stacked=not far)
    ax.plot(x, wide["change"].to_numpy(), **_TRUE, zorder=4)
    stride = max(1, -(-len(names) // 14))
    ticks = [i for i in range(0, len(names) - 1, stride) if i <= len(names) - 1 - stride]
    ax.set_xticks([*ticks, x[-1]], [*(names[i] for i in ticks), names[-1]])
    ax.set(
        xlabel="client (all: the aggregated update)", ylabel=label, title="terms of every update"
    )
    _frame(ax)
    if far:
        ax.set_yscale("symlog", linthresh=near)
        ax.set_ylim(
            *(
                s * (1.6 * max(s * v, near))
                for s, v in ((-1, values[np.isfinite(values)].min()), (1, size.max()))
            )
        )
        ax.yaxis.set_major_locator(FixedLocator(_decades(near, float(size.max()))))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: style.number(v, 1)))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.set_ylabel(f"{label}\n(logarithmic beyond ±{style.number(near, 2)})")
    ax.margins(y=0.08)


def _decades(near: float, reach: float) -> list[float]:
    """0 and a few powers of ten on both sides, none so near that its number would meet that of 0."""
    low, high = int(np.ceil(np.log10(near) + 0.3)), int(np.floor(np.log10(reach)))
    powers = [10.0**p for p in range(low, high + 1, max(1, -(-(high + 1 - low) // 3)))] or [reach]
    return [*(-p for p in reversed(powers)), 0.0, *powers]


def _bars(
    ax, x: np.ndarray, series: list[np.ndarray], looks: list[style.Look], *, stacked: bool
) -> None:
    up, down = np.zeros(len(x)), np.zeros(len(x))
    wide = 0.72 if stacked else 0.76 / max(len(series), 1)
    for i, values in enumerate(series):
        v = np.nan_to_num(values)
        bottom = np.where(v >= 0, up, down) if stacked else 0.0
        at = x if stacked else x + (i - (len(series) - 1) / 2) * wide
        ax.bar(
            at,
            v,
            wide,
            bottom=bottom,
            color=looks[i].color,
            hatch=_HATCH[i] if stacked else "",
            edgecolor="white",
            linewidth=0.3,
        )
        up, down = up + np.maximum(v, 0), down + np.minimum(v, 0)


def _split(ax, rows: pd.DataFrame, by: str, looks: list[style.Look], title: str) -> None:
    rows = only(rows, moment="trained").dropna(subset=[by])
    if rows.empty:
        style.empty(ax, "not computed")
        return
    cells = pd.DataFrame(
        {
            "by": rows[by].to_numpy(object),
            "metric": rows["metric"].astype(str).to_numpy(),
            "value": floats(rows["value"]),
        }
    )
    order = list(dict.fromkeys(cells["by"]))
    wide = cells.pivot_table(index="by", columns="metric", values="value", aggfunc="mean").reindex(
        order
    )
    _bars(
        ax,
        np.arange(len(order)),
        [wide[m].to_numpy() for m in ("linear", "quadratic")],
        looks,
        stacked=False,
    )
    texts = [style.shorten(_name(by, v), 14) for v in order]
    ax.set_xticks(
        range(len(order)),
        [style.plain(t) for t in texts],
        rotation=0 if max(map(len, texts)) < 5 else 30,
        ha="center" if max(map(len, texts)) < 5 else "right",
    )
    ax.set(title=title)
    _frame(ax)


def _name(by: str, value: object) -> str:
    if by == "layer":
        return str(value)
    return "others" if value == 0 else f"{float(str(value)):g}"


def _frame(ax) -> None:
    ax.axhline(0, color="black", linewidth=0.6)
    ax.grid(True, axis="y")
    ax.yaxis.set_major_locator(MaxNLocator(6))
