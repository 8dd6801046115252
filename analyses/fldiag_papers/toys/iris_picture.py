"""The Iris toy: decision regions of clients and global model, what clients forget, and protocols side by side.

After figure 1 of Chunduru et al., "FedProj".
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from scipy.ndimage import binary_opening

from fldiag.errors import FldiagError
from fldiag.plotting import style, words
from fldiag.plotting.tables import floats, names, need, select
from fldiag.results.select import only

PICTURE = "Iris toy"
LETTERS = "abc"
SPECIES = ("setosa", "versicolor", "virginica")
#: Of classes 0, 1, 2: pale, middle and dark in greyscale too, and apart for colour-blind readers.
FILLS, INKS, MARKERS = (
    ("#FBEBC4", "#9CC8E6", "#B983A6"),
    ("#A86A00", "#003F66", "#3F0F33"),
    ("o", "s", "^"),
)
HATCH = "//////"
_RUNS = re.compile(r"(\d+)([a-z])")


def classes(line: str) -> np.ndarray:
    """The classes of a line written by run length: ``"2a1c"`` -> [0, 0, 2]. Raises FldiagError for anything else."""
    pairs = _RUNS.findall(line)
    if (
        "".join(n + c for n, c in pairs) != line
        or not pairs
        or any(c not in LETTERS for _, c in pairs)
    ):
        raise FldiagError(
            f"region line {style.shorten(line, 40)!r} is not made of runs such as 57a143c",
            "give the table as the Iris toy wrote it",
            usage=True,
        )
    return np.repeat([LETTERS.index(c) for _, c in pairs], [int(n) for n, _ in pairs])


def regions(table: pd.DataFrame) -> Figure:
    """A row a method, a column a client after local training and one for the global model after the last round.

    ``table``: rows of one run and one seed with ``metric`` region (``method, scope, client, index, x, x_last, y, line``)
    and point (``method, x, y, value`` = class, ``client`` = owner); panels also tell ``accuracy`` (``moment, round, seed``)
    where there is some. Hatched: where a client and the global model disagree. A client's own flowers are filled, the
    others hollow. Raises FldiagError for an unfit table.
    """
    need(
        table,
        (
            "run",
            "method",
            "seed",
            "round",
            "moment",
            "scope",
            "client",
            "metric",
            "index",
            "x",
            "x_last",
            "y",
            "line",
            "value",
        ),
        PICTURE,
    )
    rows, flowers = select(table, "region", PICTURE), select(table, "point", PICTURE)
    if len(set(names(rows["run"]))) > 1 or rows["seed"].nunique() > 1:
        raise FldiagError(
            f"the table for the {PICTURE} has regions of several runs or seeds",
            "give the rows of one",
            usage=True,
        )
    methods = list(dict.fromkeys(names(rows["method"])))
    owners = sorted({int(c) for c in rows["client"].dropna()})
    with style.paper():
        maps = {(m, k): _map(rows, m, k) for m in methods for k in (*owners, None)}
        x, y = next(iter(maps.values()))[:2]
        if len({(m[2].shape, *m[0][[0, -1]], *m[1][[0, -1]]) for m in maps.values()}) > 1:
            raise FldiagError(
                f"the regions in the table for the {PICTURE} lie on different grids",
                "give the table as the toy wrote it",
                usage=True,
            )
        width = style.wide()
        side = (width - 0.35) / (len(owners) + 1)
        tall = side * float(np.clip((y[-1] - y[0]) / (x[-1] - x[0]), 0.55, 1.1))
        fig = style.figure(width, len(methods) * (tall + 0.2) + 0.75, layout="constrained")
        axes = fig.subplots(len(methods), len(owners) + 1, sharex=True, sharey=True, squeeze=False)
        for row, method in zip(axes, methods, strict=True):
            mine = flowers[np.array(names(flowers["method"])) == method]
            for ax, k in zip(row, (*owners, None), strict=True):
                other = maps[method, k][2] != maps[method, None][2]
                _panel(ax, *maps[method, k], other)
                _flowers(ax, mine, k)
                share = _accuracy(table, rows, method, k)
                share_text = [] if share is None else [f"{100 * share:.1f} % right"]
                share_text += [] if k is None else [f"differs in {100 * other.mean():.0f} %"]
                ax.set_title(", ".join(share_text), fontsize=6.5, pad=2.5)
            row[0].set_ylabel(f"{style.plain(words.method(method))}\nsecond component")
        for ax in axes[-1]:
            ax.set_xlabel("first principal component")
        for ax, k in zip(axes[0], (*owners, None), strict=True):
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


def _map(
    region_rows: pd.DataFrame, method: str, k: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x of the columns, y of the rows, and the classes [rows, columns] of a model."""
    scope = (region_rows["scope"] == "global") if k is None else (region_rows["client"] == k)
    rows = region_rows[
        (np.array(names(region_rows["method"])) == method) & scope.fillna(False).astype(bool)
    ].sort_values("index")
    who = f"{method}, {'global model' if k is None else f'client {k}'}"
    if rows.empty:
        raise FldiagError(
            f"the table for the {PICTURE} has no region of {who}",
            "give the table as the toy wrote it",
            usage=True,
        )
    decoded = [classes(str(line)) for line in rows["line"]]
    y = floats(rows["y"])
    if (
        len({len(d) for d in decoded}) > 1
        or len(y) < 2
        or len(decoded[0]) < 2
        or (np.diff(y) <= 0).any()
    ):
        raise FldiagError(
            f"the lines of the region of {who} are not a grid",
            "give the table as the toy wrote it",
            usage=True,
        )
    x = np.linspace(floats(rows["x"])[0], floats(rows["x_last"])[0], len(decoded[0]))
    return x, y, np.stack(decoded)


def _panel(ax, x: np.ndarray, y: np.ndarray, predicted: np.ndarray, other: np.ndarray) -> None:
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
    if other.any():
        hatch = ax.contourf(
            x, y, other.astype(float), levels=[0.5, 1.5], colors="none", hatches=[HATCH]
        )
        hatch.set(hatchcolor="#555555", hatch_linewidth=0.45, linewidth=0)
        if (
            thick := binary_opening(other)
        ).any():  # round what is one cell thin the outline would be a row of dots
            ax.contour(x, y, thick.astype(float), levels=[0.5], colors="#333333", linewidths=0.6)
    ax.set(xticks=[], yticks=[], xlim=(x[0], x[-1]), ylim=(y[0], y[-1]))
    ax.spines[:].set_visible(True)


def _flowers(ax, flowers: pd.DataFrame, k: int | None) -> None:
    """A client's own filled; in the global panel all that somebody trains on; tests are always hollow."""
    owner, label = floats(flowers["client"]), floats(flowers["value"])
    at = np.stack([floats(flowers["x"]), floats(flowers["y"])])
    is_own = ~np.isnan(owner) if k is None else owner == k
    for c in range(len(FILLS)):
        for mask, face, size in ((~is_own, "white", 1.9), (is_own, INKS[c], 2.6)):
            points = at[:, (label == c) & mask]
            ax.plot(
                *points,
                linestyle="none",
                marker=MARKERS[c],
                markersize=size,
                markerfacecolor=face,
                markeredgecolor=INKS[c] if face == "white" else "white",
                markeredgewidth=0.5 if face == "white" else 0.25,
                zorder=3,
            )


def _accuracy(
    table: pd.DataFrame, region_rows: pd.DataFrame, method: str, k: int | None
) -> float | None:
    rows = only(table, metric="accuracy")
    at = (floats(rows["round"]) == floats(region_rows["round"])[0]) & (
        floats(rows["seed"]) == floats(region_rows["seed"])[0]
    )
    at &= (np.array(names(rows["method"])) == method) & (
        np.array(names(rows["run"])) == names(region_rows["run"])[0]
    )
    at &= np.array(names(rows["moment"])) == ("aggregated" if k is None else "trained")
    who = floats(rows["client"])
    values = floats(rows["value"])[at & (np.isnan(who) if k is None else who == k)]
    return float(values[0]) if len(values) else None


def _key(fig: Figure) -> None:
    handles: list[Patch | Line2D] = [
        Patch(facecolor=f, edgecolor=i, linewidth=0.6) for f, i in zip(FILLS, INKS, strict=True)
    ]
    handles += [
        Line2D(
            [], [], linestyle="none", marker=m, markersize=3.4, markerfacecolor=f, markeredgecolor=i
        )
        for m, f, i in zip(MARKERS, INKS, INKS, strict=True)
    ]
    handles += [
        Line2D(
            [],
            [],
            linestyle="none",
            marker="o",
            markersize=3,
            markerfacecolor="white",
            markeredgecolor="#333333",
        ),
        Patch(
            facecolor="white", edgecolor="#555555", hatch=HATCH, linewidth=0.6, hatch_linewidth=0.45
        ),
    ]
    texts = [
        *(f"taken for {s}" for s in SPECIES),
        *(f"is {s}" for s in SPECIES),
        "not trained on here",
        "differs from global model",
    ]
    order = (0, 3, 1, 4, 2, 5, 6, 7)  # legends fill column by column
    style.legend(
        fig,
        [handles[i] for i in order],
        [texts[i] for i in order],
        loc="outside lower center",
        ncols=4,
        columnspacing=1.4,
        handlelength=1.6,
        borderpad=0.2,
    )


def measures(
    seeds: pd.DataFrame, rounds: pd.DataFrame, reported: Mapping[str, float] | None = None
) -> Figure:
    """Accuracy over the rounds (global, and mean of the clients' own models) and, after the last, what training forgets.

    ``rounds``: result rows of one run, ``metric="accuracy"``, scope global, moments aggregated and trained, with ``method,
    seed, round``; line = mean over seeds, band = one standard deviation (n - 1). ``seeds``: a row a method and seed with
    ``drop``, ``forgetting``, ``disagreement`` (shares): a dot a seed, mean and standard deviation. ``reported``: accuracy
    by method, dashed. Raises FldiagError for an unfit table.
    """
    need(seeds, ("method", "seed", "drop", "forgetting", "disagreement"), PICTURE)
    need(rounds, ("metric", "method", "seed", "round", "moment", "scope", "value"), PICTURE)
    rows = select(rounds, "accuracy", PICTURE)
    rows = rows[(rows["scope"] == "global").fillna(False).astype(bool)]
    flat = pd.DataFrame(
        {
            "method": names(rows["method"]),
            "moment": names(rows["moment"]),
            "seed": floats(rows["seed"]),
            "round": floats(rows["round"]),
            "value": 100 * floats(rows["value"]),
        }
    )
    if flat.duplicated(["method", "moment", "seed", "round"]).any():
        raise FldiagError(
            f"the table for the {PICTURE} has two accuracies of a method, seed and round",
            "give the rows of one run",
            usage=True,
        )
    methods = list(dict.fromkeys(flat["method"]))
    looks = style.looks(methods)
    with style.paper():
        fig, (left, middle, right) = style.panels(3, 2.55)
        middle.sharey(left)
        for ax, moment, title in (
            (left, "aggregated", "global model"),
            (middle, "trained", "clients after training"),
        ):
            for method in methods:
                part = flat[(flat["method"] == method) & (flat["moment"] == moment)]
                grid = part.pivot(index="round", columns="seed", values="value").sort_index()
                mean, std = grid.mean(axis=1), grid.std(axis=1, ddof=1).fillna(0.0)
                ax.plot(
                    grid.index,
                    mean,
                    color=looks[method].color,
                    linestyle=looks[method].dash,
                    marker=looks[method].marker,
                    markevery=max(1, len(mean) // 5),
                    markersize=3.2,
                    label=method,
                    zorder=3,
                )
                ax.fill_between(
                    grid.index,
                    mean - std,
                    mean + std,
                    color=looks[method].color,
                    alpha=0.15,
                    linewidth=0,
                )
            ax.set(title=title, xlabel="round")
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
            ax.grid(True, axis="y")
        left.set_ylabel("accuracy [%]")
        _claims(left, {m: v for m, v in (reported or {}).items() if m in methods}, looks)
        for place, column in enumerate(("drop", "forgetting", "disagreement")):
            _dots(right, place, seeds, column, methods, looks)
        right.set_xticks(
            range(3),
            ["drop in\naccuracy", "loss of the\nworst class", "disagreement\nin the plane"],
        )
        right.set(title="after the last round", ylabel="points, or % of the plane")
        right.axhline(0, color="#777777", linewidth=0.6, zorder=1)
        right.grid(True, axis="y")
        _method_key(fig, methods, looks, bool(reported))
    return fig


def protocols(seeds: pd.DataFrame, reported: Mapping[str, float] | None = None) -> Figure:
    """Final accuracy by protocol (rows: ``run``), of the global model and of the clients' own, with the paper's, dashed.

    ``seeds``: a row a run, method and seed with ``accuracy`` and ``local`` (shares): a dot a seed, mean and standard
    deviation. Raises FldiagError for an unfit table.
    """
    need(seeds, ("run", "method", "seed", "accuracy", "local"), PICTURE)
    runs, methods = (list(dict.fromkeys(names(seeds[c]))) for c in ("run", "method"))
    looks = style.looks(methods)
    with style.paper():
        fig, axes = style.panels(
            2, 0.42 * len(runs) + 0.75, 0.3, least=2.5, sharex=True, sharey=True
        )
        for ax, column, title in zip(
            axes, ("accuracy", "local"), ("global model", "clients after training"), strict=True
        ):
            for place, run in enumerate(runs):
                part = seeds[np.array(names(seeds["run"])) == run]
                _dots(ax, place, part, column, methods, looks, flip=True)
                if place:
                    ax.axhline(place - 0.5, color="#dddddd", linewidth=0.4, zorder=0)
            ax.set(xlabel="accuracy [%]")
            ax.set_title(title, pad=12)
            ax.grid(True, axis="x")
        _claims(
            axes[0], {m: v for m, v in (reported or {}).items() if m in methods}, looks, flip=True
        )
        axes[0].set_yticks(
            range(len(runs)), [style.plain(r.replace("-", " ").replace("lr", "lr ")) for r in runs]
        )
        axes[0].set_ylim(len(runs) - 0.5, -0.5)
        _method_key(fig, methods, looks, bool(reported))
    return fig


def _dots(
    ax,
    place: int,
    seeds: pd.DataFrame,
    column: str,
    methods: list[str],
    looks: dict[str, style.Look],
    *,
    flip: bool = False,
) -> None:
    for i, method in enumerate(methods):
        values = 100 * floats(seeds.loc[np.array(names(seeds["method"])) == method, column])
        if not len(values):
            continue
        at, look = place + ((i + 0.5) / len(methods) - 0.5) * 0.75, looks[method]
        spread = float(values.std(ddof=1)) if len(values) > 1 else 0.0
        positions = (values, np.full(len(values), at - 0.06)), (float(values.mean()), at + 0.06)
        dots, mean = positions if flip else tuple(w[::-1] for w in positions)
        ax.plot(
            *dots,
            linestyle="none",
            marker=look.marker,
            markersize=2,
            color=look.color,
            alpha=0.45,
            markeredgewidth=0,
        )
        ax.errorbar(
            *mean,
            **{"xerr" if flip else "yerr": spread},
            marker=look.marker,
            markersize=4,
            color=look.color,
            elinewidth=1.0,
            zorder=4,
        )


def _claims(
    ax, reported: Mapping[str, float], looks: dict[str, style.Look], *, flip: bool = False
) -> None:
    """Dashed lines at the paper's numbers; methods that share one share the line."""
    for value in dict.fromkeys(reported.values()):
        who = [m for m, v in reported.items() if v == value]
        line = ax.axvline if flip else ax.axhline
        line(100 * value, color="#444444", linewidth=0.8, dashes=(4, 2), zorder=2)
        text = f"paper: {', '.join(words.method(m) for m in who)}"
        if flip:  # above the frame, where no dot can lie
            ax.annotate(
                text,
                (100 * value, 1),
                xytext=(0, 1.5),
                xycoords=ax.get_xaxis_transform(),
                va="bottom",
                ha="center",
                textcoords="offset points",
                fontsize=6,
                color="#444444",
            )
        else:
            ax.annotate(
                text,
                (1, 100 * value),
                xytext=(-2, 2),
                xycoords=ax.get_yaxis_transform(),
                va="bottom",
                ha="right",
                textcoords="offset points",
                fontsize=6,
                color="#444444",
            )


def _method_key(
    fig: Figure, methods: list[str], looks: dict[str, style.Look], claims: bool
) -> None:
    handles = [
        Line2D(
            [],
            [],
            color=looks[m].color,
            linestyle=looks[m].dash,
            marker=looks[m].marker,
            markersize=3.6,
        )
        for m in methods
    ]
    texts = [words.method(m) for m in methods]
    if claims:
        handles.append(Line2D([], [], color="#444444", linewidth=0.8, dashes=(4, 2)))
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
