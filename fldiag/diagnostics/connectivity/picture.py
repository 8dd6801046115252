"""Pictures of paths between models, of the barriers of many pairs, and of the simplex that several models span."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fldiag.errors import FldiagError
from fldiag.plotting import style
from fldiag.plotting.curves import barrier
from fldiag.plotting.heatmap import draw_cells, of_pairs
from fldiag.plotting.tables import floats, need
from fldiag.results.select import number, only

PICTURE = "picture of connectivity"
#: Of more pairs than this the paths are grey, only the one with the largest barrier stands out; the barriers have a panel.
MANY = 6
GREY = "#8a8a8a"
DASH: dict[str, Any] = {"straight": "-", "curve": (0, (4, 1.5))}


def draw(table: pd.DataFrame) -> Figure:
    """Up to three panels: the loss along the paths, with barriers; the barriers of all pairs where these are many and some are
    above zero; and how far
    mixtures of three or more models lie above the mixture of their losses (the simplex of three).

    Raises FldiagError for a table without paths and mixtures.
    """
    need(table, ("metric", "run", "value"), PICTURE)
    straight = only(table, metric="barrier", path="straight")
    panels: list[Callable[[Figure, Axes, pd.DataFrame], None]] = []
    if len(only(table, metric="loss")):
        panels.append(_paths)
    if len(straight) > MANY and (straight["value"].fillna(0) > 0).any():
        panels.append(_pairs)
    if len(only(table, metric="mixture")):
        panels.append(_simplex if len(_shares(table)[0]) == 3 else _mixtures)
    if not panels:
        raise FldiagError(
            f"the table for the {PICTURE} has neither paths nor mixtures",
            "ask for pairs or mixtures",
            usage=True,
        )
    with style.paper():
        natural = style.ONE_COLUMN * 1.2 if len(panels) == 1 else style.TWO_COLUMNS
        fig, axes = style.panels(len(panels), 3.6, width=natural, least=3.2)
        for ax, panel in zip(axes, panels, strict=True):
            panel(fig, ax, table)
    return fig


def _slice_label(table: pd.DataFrame) -> str:
    first = table.dropna(subset=["n_examples"]).head(1)
    return (
        f"{first['slice'].iloc[0]}, n = {int(first['n_examples'].iloc[0]):,}" if len(first) else ""
    )


def _paths(fig: Figure, ax: Axes, table: pd.DataFrame) -> None:
    losses = only(table, metric="loss")
    numbers = list(dict.fromkeys(losses["index"]))
    heights = only(table, metric="barrier", path="straight").set_index("index")["value"]
    is_crowded = len(numbers) > MANY
    worst = heights.astype(float).idxmax() if is_crowded and (heights.fillna(0) > 0).any() else None
    handles, texts = [], []
    for place, index in enumerate(numbers):
        quiet = is_crowded and index != worst
        look = style.Look(GREY, "o", "-") if quiet else style.look(1 if is_crowded else place)
        for path, rows in only(losses, index=index).groupby("path", sort=False):
            rows = rows.sort_values("x")
            x, value, error = (floats(rows[c]) for c in ("x", "value", "stderr"))
            ax.plot(
                x,
                value,
                color=look.color,
                linestyle=DASH[str(path)],
                linewidth=0.6 if quiet else 1.3,
                zorder=2 if quiet else 3,
            )
            if not quiet:
                ax.fill_between(
                    x,
                    value - np.nan_to_num(error),
                    value + np.nan_to_num(error),
                    color=look.color,
                    alpha=0.15,
                    linewidth=0,
                )
                at, height = (
                    number(table, "barrier", index=index, path=str(path), column=c)
                    for c in ("x", "value")
                )
                barrier(ax, value, at, height, look)
                handles.append(Line2D([], [], **{**look.line, "linestyle": DASH[str(path)]}))
                texts.append(_path_label(table, index, str(path), rows))
    if is_crowded:
        handles.append(Line2D([], [], color=GREY, linewidth=0.6))
        texts.append(
            f"{'the other ' if worst is not None else ''}{len(numbers) - (worst is not None)} pairs"
            f"{'' if worst is not None else ', no barrier on any'}"
        )
    ax.set(
        xlabel=f"along the path (t)\n{style.plain(_slice_label(table))}",
        ylabel="loss",
        title="Paths between models",
    )
    ax.margins(x=0.02)
    ax.grid(True)
    style.legend(
        ax,
        handles,
        texts,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.24),
        handlelength=2.8,
        borderpad=0.1,
        labelspacing=0.3,
    )


def _path_label(table: pd.DataFrame, index: int, path: str, rows: pd.DataFrame) -> str:
    first = rows.iloc[0]
    clients = pd.notna(first["client"]) and pd.notna(first["client_b"])
    ends = (
        f"clients {int(first['client'])}, {int(first['client_b'])}"
        if clients
        else f"{style.shorten(first['run'], 22)} – {style.shorten(first['run_b'], 22)}"
    )
    height, error = (
        number(table, "barrier", index=index, path=path, column=c) for c in ("value", "stderr")
    )
    text = (
        "no barrier"
        if not height
        else f"barrier {style.number(height, 3)}"
        + (f" ± {style.number(error, 2)}" if error is not None else "")
    )
    return f"{ends}, {path}: {text}"


def _pairs(fig: Figure, ax: Axes, table: pd.DataFrame) -> None:
    """The barrier between each two models."""
    rows = only(table, metric="barrier", path="straight")
    clients: dict[str, Any] = {}
    for run, client in (("run", "client"), ("run_b", "client_b")):
        clients.update(zip(rows[run], rows[client], strict=True))
    names = list(dict.fromkeys([*rows["run"], *rows["run_b"]]))
    cells = of_pairs(rows, "run", "run_b").loc[names, names]
    image = draw_cells(ax, cells, Normalize(0, np.nanmax(cells.to_numpy(), initial=0.0)))
    fig.colorbar(image, ax=ax, shrink=0.8, label="barrier")
    labels = [
        str(int(clients[n])) if pd.notna(clients[n]) else style.plain(style.shorten(n, 14))
        for n in names
    ]
    numbered = all(pd.notna(clients[n]) for n in names)
    ax.set_xticks(
        range(len(names)),
        labels,
        rotation=0 if numbered else 60,
        ha="center" if numbered else "right",
    )
    ax.set_yticks(range(len(names)), labels)
    ax.set(
        title="Barriers on straight paths",
        **({"xlabel": "client", "ylabel": "client"} if numbered else {}),
    )


def layers_if_any(table: pd.DataFrame) -> Figure | None:
    """The barrier of each layer alone, the others being those of the first or the second model of a pair, and the barrier of all
    layers together (dashed: the mean over pairs). None where single layers were not interpolated."""
    need(table, ("metric", "run", "value"), PICTURE)
    rows = only(table, metric="layer_barrier").dropna(subset=["value"])
    if rows.empty:
        return None
    layers = list(dict.fromkeys(map(str, rows["layer"])))
    looks = {"first": style.look(1), "second": style.look(2)}
    with style.paper():
        fig, (ax,) = style.panels(1, 0.9 + 0.2 * len(layers), width=style.ONE_COLUMN * 1.2)
        for rest, look in looks.items():
            part = only(rows, rest=rest)
            places = [layers.index(str(layer)) for layer in part["layer"]]
            shift = -0.12 if rest == "first" else 0.12
            ax.errorbar(
                floats(part["value"]),
                np.array(places) + shift,
                xerr=np.nan_to_num(floats(part["stderr"])),
                elinewidth=0.7,
                **look.point,
            )
        all_layers = only(table, metric="barrier", path="straight")["value"].astype(float).mean()
        ax.axvline(all_layers, color="black", linewidth=0.7, linestyle=(0, (4, 1.5)))
        style.names_down(ax, layers)
        ax.set_xlabel(f"barrier of the layer alone\n{style.plain(_slice_label(table))}")
        ax.grid(True)
        handles = [Line2D([], [], **look.point) for look in looks.values()]
        handles.append(Line2D([], [], color="black", linewidth=0.7, linestyle=(0, (4, 1.5))))
        texts = [f"rest of the {rest} model" for rest in looks]
        style.legend(fig, handles, [*texts, "all layers"], ncols=3)
    return fig


def _shares(table: pd.DataFrame) -> np.ndarray:
    """The mixtures' shares [M, K]."""
    return np.array(
        [[float(a) for a in str(text).split()] for text in only(table, metric="mixture")["shares"]]
    )


def _simplex(fig: Figure, ax: Axes, table: pd.DataFrame) -> None:
    """The triangle of three models, its corners the models."""
    shares, value = _shares(table), floats(only(table, metric="mixture")["value"])
    corners = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, np.sqrt(3) / 2]])
    x, y = (shares @ corners).T
    size = float(np.abs(value[np.isfinite(value)]).max()) or 1.0
    contours = ax.tricontourf(
        x,
        y,
        np.clip(np.nan_to_num(value, nan=size, posinf=size), -size, size),
        16,
        cmap=style.DIVERGING,
        vmin=-size,
        vmax=size,
    )
    ax.plot(x[4:], y[4:], ".", color="black", markersize=1.2)
    ax.plot(
        x[3], y[3], "*", color="white", markeredgecolor="black", markersize=8, markeredgewidth=0.7
    )
    models = only(table, metric="model_loss").dropna(subset=["value"])
    for (cx, cy), row, place in zip(
        corners, models.itertuples(), ("top", "top", "bottom"), strict=True
    ):
        name = f"client {int(row.client)}" if pd.notna(row.client) else style.shorten(row.run, 20)
        ax.plot(cx, cy, "o", color="white", markeredgecolor="black", markersize=5, clip_on=False)
        ax.text(
            cx,
            cy + (0.05 if place == "bottom" else -0.05),
            style.plain(name),
            ha="center",
            va=place,
            fontsize=7,
        )
    ax.set(title="Mixtures of three models", xlim=(-0.1, 1.1), ylim=(-0.15, 1.0), aspect="equal")
    ax.axis("off")
    fig.colorbar(
        contours, ax=ax, shrink=0.8, label="loss above the mixture of losses", ticks=MaxNLocator(6)
    )


def _mixtures(fig: Figure, ax: Axes, table: pd.DataFrame) -> None:
    """How far mixtures of many models lie above the mixture of losses, over how many models they really mix."""
    shares, value = _shares(table), floats(only(table, metric="mixture")["value"])
    count = shares.shape[1]
    mixed = 1 / (shares**2).sum(1)
    ax.axhline(0, color=GREY, linewidth=0.8)
    ax.plot(
        mixed[count + 1 :],
        value[count + 1 :],
        "o",
        color=style.look(2).color,
        markersize=2.6,
        markeredgewidth=0,
        alpha=0.7,
    )
    ax.plot(mixed[:count], value[:count], "s", color="black", markersize=3.6)
    ax.plot(mixed[count], value[count], "*", color=style.look(1).color, markersize=8)
    handles = [
        Line2D([], [], linestyle="", marker=m, color=c, markersize=s)
        for m, c, s in (
            ("s", "black", 3.6),
            ("*", style.look(1).color, 7),
            ("o", style.look(2).color, 3),
        )
    ]
    ax.set(
        title=f"Mixtures of {count} models",
        xlabel="models mixed (1 / Σ a²)",
        ylabel="loss above the mixture of losses",
    )
    ax.grid(True)
    style.legend(
        ax,
        handles,
        ["the models", "their mean", "uniform on the simplex"],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.24),
        ncols=3,
        handletextpad=0.3,
        columnspacing=1.0,
    )
