"""The Iris toy: decision regions of clients and global model, what clients forget, and protocols side by side.

After figure 1 of Chunduru et al., "FedProj".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from scipy.ndimage import binary_opening

from fldiag.plotting import style, words
from fldiag.results.select import number, only

from .iris_measures import LETTERS

SPECIES = ("setosa", "versicolor", "virginica")
#: Of classes 0, 1, 2: pale, middle and dark in greyscale too, and apart for colour-blind readers.
FILLS, INKS, MARKERS = (
    ("#FBEBC4", "#9CC8E6", "#B983A6"),
    ("#A86A00", "#003F66", "#3F0F33"),
    ("o", "s", "^"),
)
HATCH = "//////"
CLAIM: dict[str, Any] = {"color": "#444444", "linewidth": 0.8, "dashes": (4, 2)}


def classes(line: str) -> np.ndarray:
    """The classes of a line written by run length: ``"2a1c"`` -> [0, 0, 2]."""
    pairs = re.findall(r"(\d+)([a-z])", line)
    return np.repeat([LETTERS.index(c) for _, c in pairs], [int(n) for n, _ in pairs])


def regions(table: pd.DataFrame) -> Figure:
    """A row a method, a column a client after local training and one for the global model after the last round.

    ``table``: of :func:`fldiag_papers.toys.iris.run`, with the regions of one run and seed. Hatched: where a client and
    the global model disagree. A client's own flowers are filled, the others hollow.
    """
    rows, flowers = only(table, metric="region"), only(table, metric="point")
    methods = list(dict.fromkeys(rows["method"]))
    owners = [*sorted(int(c) for c in rows["client"].dropna().unique()), None]
    heights = rows.drop_duplicates("index").sort_values("index")
    y = heights["y"].to_numpy(float)
    columns = len(classes(heights["line"].iloc[0]))
    x = np.linspace(float(heights["x"].iloc[0]), float(heights["x_last"].iloc[0]), columns)
    width = style.wide()
    side = (width - 0.35) / len(owners)
    tall = side * float(np.clip((y[-1] - y[0]) / (x[-1] - x[0]), 0.55, 1.1))
    last = {"round": rows["round"].iloc[0], "seed": rows["seed"].iloc[0]}
    with style.paper():
        fig = style.figure(width, len(methods) * (tall + 0.2) + 0.75, layout="constrained")
        axes = fig.subplots(len(methods), len(owners), sharex=True, sharey=True, squeeze=False)
        for row, method in zip(axes, methods, strict=True):
            maps = {
                k: np.stack([classes(line) for line in part.sort_values("index")["line"]])
                for k in owners
                for part in [only(rows, method=method, client=k)]
            }
            for ax, k in zip(row, owners, strict=True):
                differs = maps[k] != maps[None]
                _region(ax, x, y, maps[k], differs)
                _flowers(ax, only(flowers, method=method), k)
                moment = "aggregated" if k is None else "trained"
                scope = "global" if k is None else "client"
                model = {"method": method, "moment": moment, "scope": scope, "client": k}
                accuracy = number(table, "accuracy", **model, **last)
                texts = [] if accuracy is None else [f"{100 * accuracy:.1f} % right"]
                texts += [] if k is None else [f"differs in {100 * differs.mean():.0f} %"]
                ax.set_title(", ".join(texts), fontsize=6.5, pad=2.5)
            row[0].set_ylabel(f"{style.plain(words.method(method))}\nsecond component")
        for ax in axes[-1]:
            ax.set_xlabel("first principal component")
        for ax, k in zip(axes[0], owners, strict=True):
            ax.annotate(
                "global model" if k is None else f"client {k}",
                (0.5, 1),
                xytext=(0, 15),
                xycoords="axes fraction",
                textcoords="offset points",
                ha="center",
                fontsize=8.5,
            )
        _key(fig)
    return fig


def _region(
    ax: Axes, x: np.ndarray, y: np.ndarray, predicted: np.ndarray, differs: np.ndarray
) -> None:
    dx, dy = (x[1] - x[0]) / 2, (y[1] - y[0]) / 2
    ax.imshow(
        predicted,
        cmap=ListedColormap(FILLS),
        vmin=-0.5,
        vmax=2.5,
        origin="lower",
        interpolation="nearest",
        aspect="auto",
        extent=(x[0] - dx, x[-1] + dx, y[0] - dy, y[-1] + dy),
    )
    if differs.any():
        hatch = ax.contourf(
            x, y, differs.astype(float), levels=[0.5, 1.5], colors="none", hatches=[HATCH]
        )
        hatch.set(hatchcolor="#555555", hatch_linewidth=0.45, linewidth=0)
        # Around what is one cell thin the outline would be a row of dots.
        if (thick := binary_opening(differs)).any():
            ax.contour(x, y, thick.astype(float), levels=[0.5], colors="#333333", linewidths=0.6)
    ax.set(xticks=[], yticks=[], xlim=(x[0], x[-1]), ylim=(y[0], y[-1]))
    ax.spines[:].set_visible(True)


def _flowers(ax: Axes, flowers: pd.DataFrame, k: int | None) -> None:
    """A client's own filled; in the global panel all that somebody trains on; tests are always hollow."""
    is_own = flowers["client"].notna() if k is None else flowers["client"].eq(k).fillna(False)
    for c in range(len(FILLS)):
        is_class = flowers["value"] == c
        for mask, face, size in ((~is_own, "white", 1.9), (is_own, INKS[c], 2.6)):
            points = flowers[is_class & mask]
            ax.plot(
                points["x"],
                points["y"],
                linestyle="none",
                marker=MARKERS[c],
                markersize=size,
                markerfacecolor=face,
                markeredgecolor=INKS[c] if face == "white" else "white",
                markeredgewidth=0.5 if face == "white" else 0.25,
                zorder=3,
            )


def _key(fig: Figure) -> None:
    handles: list[Patch | Line2D] = []
    texts = []
    for fill, ink, marker, name in zip(FILLS, INKS, MARKERS, SPECIES, strict=True):
        handles.append(Patch(facecolor=fill, edgecolor=ink, linewidth=0.6))
        handles.append(Line2D([], [], linestyle="none", marker=marker, markersize=3.4, color=ink))
        texts += [f"taken for {name}", f"is {name}"]
    hollow: dict[str, Any] = {"markerfacecolor": "white", "markeredgecolor": "#333333"}
    handles.append(Line2D([], [], linestyle="none", marker="o", markersize=3, **hollow))
    hatch: dict[str, Any] = {"hatch": HATCH, "hatch_linewidth": 0.45}
    handles.append(Patch(facecolor="white", edgecolor="#555555", linewidth=0.6, **hatch))
    style.legend(
        fig,
        handles,
        [*texts, "not trained on here", "differs from global model"],
        loc="outside lower center",
        ncols=4,
        columnspacing=1.4,
        handlelength=1.6,
        borderpad=0.2,
    )


def measures(
    seeds: pd.DataFrame, rounds: pd.DataFrame, reported: Mapping[str, float] = {}
) -> Figure:
    """Accuracy over the rounds (global, and mean of the clients' own models) and, after the last, what training forgets.

    ``rounds``: of :func:`fldiag_papers.toys.iris.run`; line = mean over seeds, band = one standard deviation. ``seeds``:
    of :func:`fldiag_papers.toys.iris_reported.per_seed`: a dot a seed, mean and standard deviation. ``reported``: accuracy
    by method, dashed.
    """
    rows = only(rounds, metric="accuracy", scope="global").astype({"value": float, "round": int})
    rows = rows.assign(value=100 * rows["value"])
    methods = list(dict.fromkeys(rows["method"]))
    columns = {
        "drop": "drop in\naccuracy",
        "forgetting": "loss of the\nworst class",
        "disagreement": "disagreement\nin the plane",
    }
    with style.paper():
        fig, (left, middle, right) = style.panels(3, 2.55)
        middle.sharey(left)
        for ax, moment, title in (
            (left, "aggregated", "global model"),
            (middle, "trained", "clients after training"),
        ):
            looks = style.looks(methods)
            sns.lineplot(
                only(rows, moment=moment),
                x="round",
                y="value",
                hue="method",
                palette={m: looks[m].color for m in methods},
                errorbar="sd",
                err_kws={"alpha": 0.15, "linewidth": 0},
                legend=False,
                ax=ax,
            )
            for line, method in zip(ax.lines, methods, strict=True):
                stride = max(1, np.size(line.get_xdata()) // 5)
                line.set(linestyle=looks[method].dash, marker=looks[method].marker, label=method)
                line.set(markevery=stride, markersize=3.2)
            ax.set(title=title, xlabel="round", ylabel="")
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
            ax.grid(True, axis="y")
        left.set_ylabel("accuracy [%]")
        _claims(left, reported, methods)
        long = seeds.melt(["method", "seed"], list(columns), var_name="measure")
        _dots(right, long.assign(measure=long["measure"].map(columns)), "measure", methods)
        right.set(title="after the last round", xlabel="", ylabel="points, or % of the plane")
        right.axhline(0, color="#777777", linewidth=0.6, zorder=1)
        right.grid(True, axis="y")
        _method_key(fig, methods, bool(reported))
    return fig


def protocols(seeds: pd.DataFrame, reported: Mapping[str, float] = {}) -> Figure:
    """Final accuracy by protocol (rows: ``run``), of the global model and of the clients' own, with the paper's, dashed.

    ``seeds``: of :func:`fldiag_papers.toys.iris_reported.per_seed`: a dot a seed, mean and standard deviation.
    """
    methods = list(dict.fromkeys(seeds["method"]))
    names = seeds["run"].map(lambda r: style.plain(r.replace("-", " ").replace("lr", "lr ")))
    with style.paper():
        height = 0.42 * names.nunique() + 0.75
        fig, axes = style.panels(2, height, 0.3, least=2.5, sharex=True, sharey=True)
        for ax, column, title in zip(
            axes, ("accuracy", "local"), ("global model", "clients after training"), strict=True
        ):
            _dots(ax, seeds.assign(run=names, value=seeds[column]), "run", methods, across=True)
            ax.set(xlabel="accuracy [%]", ylabel="")
            ax.set_title(title, pad=12)
            ax.grid(True, axis="x")
        _claims(axes[0], reported, methods, across=True)
        _method_key(fig, methods, bool(reported))
    return fig


def _dots(
    ax: Axes, rows: pd.DataFrame, category: str, methods: Sequence[str], across: bool = False
) -> None:
    """A dot a seed, its method's mean with one standard deviation beside it, in percent."""
    rows = rows.assign(value=100 * rows["value"].astype(float))
    looks = style.looks(methods)
    axes = {"x": "value", "y": category} if across else {"x": category, "y": "value"}
    common = {"data": rows, **axes, "hue": "method", "legend": False, "ax": ax}
    common["palette"] = {m: looks[m].color for m in methods}
    sns.stripplot(**common, hue_order=methods, dodge=True, jitter=False, size=2.5, alpha=0.45)
    sns.pointplot(
        **common,
        hue_order=methods,
        dodge=0.8 - 0.8 / len(methods),
        markers=[looks[m].marker for m in methods],
        markersize=4,
        linestyle="none",
        errorbar="sd",
        err_kws={"linewidth": 1.0},
    )


def _claims(
    ax: Axes, reported: Mapping[str, float], methods: Sequence[str], across: bool = False
) -> None:
    """Dashed lines at the paper's numbers; methods that share one share the line."""
    values = {m: v for m, v in reported.items() if m in methods}
    for value in dict.fromkeys(values.values()):
        place: dict[str, Any]
        names = ", ".join(words.method(m) for m, v in values.items() if v == value)
        if across:  # above the frame, where no dot can lie
            ax.axvline(100 * value, **CLAIM, zorder=2)
            place = {"xycoords": ax.get_xaxis_transform(), "xytext": (0, 1.5), "ha": "center"}
        else:
            ax.axhline(100 * value, **CLAIM, zorder=2)
            place = {"xycoords": ax.get_yaxis_transform(), "xytext": (-2, 2), "ha": "right"}
        ax.annotate(
            f"paper: {names}",
            (100 * value, 1) if across else (1, 100 * value),
            textcoords="offset points",
            va="bottom",
            fontsize=6,
            color="#444444",
            **place,
        )


def _method_key(fig: Figure, methods: Sequence[str], has_claims: bool) -> None:
    handles = [
        Line2D([], [], color=look.color, linestyle=look.dash, marker=look.marker, markersize=3.6)
        for look in style.looks(methods).values()
    ]
    texts = [words.method(m) for m in methods]
    if has_claims:
        handles.append(Line2D([], [], **CLAIM))
        texts.append("reported by the paper")
    style.legend(
        fig,
        handles,
        texts,
        loc="outside lower center",
        ncols=min(len(texts), 6),
        handlelength=2.6,
        borderpad=0.2,
    )
