"""The one style of every picture: the looks of runs and methods, the sheet that pictures are made for, how they write names,
files that are equal for equal tables, and the shapes that pictures share.

Colours are those of Okabe and Ito ("Color Universal Design", 2008) without yellow, which is lost on white, and with a grey and
a brown; each comes with a marker and a dash pattern, so that lines stay apart in greyscale too.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fldiag.errors import FldiagError
from fldiag.results.files import write_bytes

if TYPE_CHECKING:  # half a second, which a table from the store does not need
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Inches: one column and both columns of a two-column paper; and the height of its page.
ONE_COLUMN, TWO_COLUMNS, PAGE = 3.35, 6.9, 8.8
WIDTHS = {"single": ONE_COLUMN, "double": TWO_COLUMNS}
#: Perceptually uniform, monotone in lightness, safe for colour-blind readers; and from one sign to the other through white.
COLORMAP, DIVERGING = "viridis", "PuOr_r"
#: Picture formats, and the metadata that would make two files of one figure differ.
FORMATS: dict[str, dict[str, Any]] = {
    "pdf": {"CreationDate": None},
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
}
#: Where the style is not matplotlib's own, whose DejaVu ships with it: the same bytes on every machine.
RC: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.title_fontsize": 7,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": "#dddddd",
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "errorbar.capsize": 1.5,
    "pdf.fonttype": 42,
    "svg.hashsalt": "fldiag",
}
# fmt: off
COLOURS = (
    "#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#661100",
)
MARKERS = "oDs^vPXp*"
DASHES = (
    None, None, (4, 1.5), (1, 1), (5, 1, 1, 1), (2, 1), (3, 1, 1, 1, 1, 1), (7, 1.5), (6, 1, 2, 1),
)
# fmt: on
#: These have the same look in every picture in which they meet: that of their place.
METHODS = ("fedavg", "fedsol", "fedprox", "scaffold", "fedntd", "fedsam", "fedasam")
#: Clients that a heatmap or a summary shows at most.
MANY = 50


# Looks


@dataclass(frozen=True)
class Look:
    """How one run or method is drawn: colour, marker and dash pattern (matplotlib values)."""

    color: str
    marker: str
    dash: Any

    @property
    def line(self) -> dict[str, Any]:
        """Options of ``Axes.plot`` and ``Line2D`` for a line with marks."""
        edge = {"markeredgecolor": "white", "markeredgewidth": 0.4, "markersize": 3.5}
        return {"color": self.color, "linestyle": self.dash, "marker": self.marker, **edge}

    @property
    def point(self) -> dict[str, Any]:
        """Options of ``Axes.plot`` and ``Line2D`` for marks without a line."""
        return {"color": self.color, "linestyle": "none", "marker": self.marker}


def look(place: int) -> Look:
    """The look of a place; colour and marker together repeat only after 73, and black never does."""
    turn, colour = divmod(max(place - 1, 0), len(COLOURS) - 1)
    colour += place > 0
    marker, dash = (colour + turn) % len(MARKERS), (colour + 3 * turn) % len(DASHES)
    return Look(COLOURS[colour], MARKERS[marker], (0, DASHES[dash]))


def looks(labels: Iterable[str]) -> dict[str, Look]:
    """A look of its own for every label; one that begins with a well-known method's name has that method's.

    >>> looks(["mine", "FedSOL, seed 0"])["FedSOL, seed 0"] == look(1)
    True
    """
    labels = list(dict.fromkeys(labels))
    methods: dict[int, str] = {}
    for label in labels:
        method = re.split("[^a-z0-9]", label.lower().replace("fed-", "fed"), maxsplit=1)[0]
        if method in METHODS:
            methods.setdefault(METHODS.index(method), label)
    places = {label: place for place, label in methods.items()}
    free = (place for place in itertools.count() if place not in methods)
    return {label: look(places[label] if label in places else next(free)) for label in labels}


# The sheet


#: What pictures are made for: a width in inches (None: each picture's own) and formats of their files, of which people look at
#: the last one first.
SHEET: ContextVar[tuple[float | None, tuple[str, ...]]] = ContextVar(
    "sheet", default=(None, ("pdf", "png"))
)


@contextmanager
def use_sheet(width: str | float | None = None, format: str | None = None) -> Iterator[None]:
    """All pictures that are drawn and written within have this width and these formats.

    Args:
        width: ``single``, ``double``, or 60 to 400 millimetres; None: each picture's own.
        format: one or more of pdf, png and svg, by comma; None: pdf and png.

    Raises:
        FldiagError: another width or format.
    """
    size, formats = SHEET.get()
    if width is not None:
        size = inches(width)
    if format is not None:
        formats = tuple(format.lower().split(","))
    if not set(formats) <= FORMATS.keys():
        raise FldiagError(f"format = {format!r} is not of {', '.join(FORMATS)}", usage=True)
    token = SHEET.set((size, formats))
    try:
        yield
    finally:
        SHEET.reset(token)


def inches(width: str | float) -> float:
    """A width in inches.

    >>> inches("single"), inches("140mm") == 140 / 25.4
    (3.35, True)
    """
    number = re.fullmatch(r"(\d+(?:\.\d+)?)(?:mm)?", str(width))
    value = float(number[1]) / 25.4 if number else WIDTHS.get(str(width), 0.0)
    if not 60 / 25.4 <= value <= 400 / 25.4:
        what = f"width = {width!r} is not a picture's width"
        raise FldiagError(what, "give single, double or 60 to 400 millimetres", usage=True)
    return value


def wide(natural: float = TWO_COLUMNS) -> float:
    """The width of a picture in inches: the sheet's, or else its own."""
    return SHEET.get()[0] or natural


# Figures


@contextmanager
def paper() -> Iterator[None]:
    """The style, for the length of a ``with`` block; matplotlib's global settings are as before afterwards."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a user's own matplotlibrc would change the bytes
        matplotlib.rcParams.update(RC)
        yield


def compares_runs(draw: Any) -> Any:
    """Decorator of a drawing function: of a table with several runs it draws them together, told apart by ``run``."""
    draw.compares_runs = True
    return draw


def figure(width: float, height: float, **options: Any) -> Figure:
    """An empty figure (inches) that no window knows of; call within ``paper()``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    fig = Figure(figsize=(width, height), **options)
    FigureCanvasAgg(fig)
    return fig


def panels(
    count: int,
    row: float,
    foot: float = 0.0,
    *,
    across: int = 3,
    least: float = 2.0,
    width: float = TWO_COLUMNS,
    **options: Any,
) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels; call within ``paper()``.

    Args:
        count: of panels.
        row: inches of a row's height.
        foot: inches of what stands above or below all rows.
        across: panels in a row, at most.
        least: inches that a panel has at least, where there are several.
        width: where the sheet says none.
        **options: of ``Figure.subplots``.
    """
    width = wide(width)
    across = max(1, min(count, across, int(width / least)))
    down = -(-count // across)
    fig = figure(width, min(row * down + foot, PAGE), layout="constrained")
    axes = list(fig.subplots(down, across, squeeze=False, **options).flat)
    for ax in axes[count:]:
        ax.remove()
    return fig, axes[:count]


def legend(
    fig: Figure, handles: Sequence[Any], labels: Iterable[str], *, ncols: int = 4, **options: Any
) -> None:
    """A legend below all panels, in as many columns as fit (at most ``ncols``); the figure grows by its rows."""
    labels = [plain(shorten(label, int(14 * fig.get_figwidth()))) for label in labels]
    for columns in range(min(ncols, len(labels)) or 1, 0, -1):
        artist = fig.legend(handles, labels, ncols=columns, loc="outside lower center", **options)
        box = artist.get_window_extent()
        if columns == 1 or box.width <= fig.bbox.width:
            break
        artist.remove()
    fig.set_figheight(fig.get_figheight() + box.height / fig.dpi)


def legend_of_runs(fig: Figure, palette: Mapping[str, Look]) -> None:
    """The figure's legend: a line a run."""
    from matplotlib.lines import Line2D

    legend(fig, [Line2D([], [], **palette[run].line) for run in palette], palette, ncols=3)


def chance(ax: Axes, value: float, name: bool = True) -> None:
    """A dotted line at the accuracy of guessing, where the curves come near it; the axis then reaches down to it."""
    if ax.get_ylim()[0] > 3 * value:
        return
    ax.axhline(value, color="#666666", linewidth=0.7, linestyle=":", label="_chance")
    if name:
        place = ax.get_yaxis_transform()
        ax.text(
            1,
            value,
            "chance",
            transform=place,
            ha="right",
            va="bottom",
            fontsize=6,
            color="#555555",
        )


def percents(*axes: Any) -> None:
    """Tick labels of shares of 1 in percent: 40 %, 2.5 %."""
    for axis in axes:
        axis.set_major_formatter(lambda v, _: f"{round(100 * v, 6) + 0.0:g} %")


# Text: FedAvg for ``fedavg``, ρ for ``rho``, MNIST for ``mnist``; tables keep the registry's names

_WRITTEN = """
FedACG FedAdam FedAlign FedASAM FedAvg FedAvgM FedBABU FedCM FedDC FedDF FedDyn FedET FedGAMMA FedLESAM FedNova FedNTD
FedProj FedProx FedRCL FedSAM FedSMOO FedSOL FedSpeed FedTOGA FedYogi GradAug Mixup MoFedSAM MOON SCAFFOLD
MNIST SVHN PathMNIST TissueMNIST Iris MARC MNLI SNLI LDA IID Dirichlet
"""
#: A registered name of a method, a data set, a partition or an option -> how it is written, where not by its own words.
NAMES = {name.lower(): name for name in _WRITTEN.split()} | {
    "fedavg_ft": "FedAvg + fine-tuning",
    "fedlesam_d": "FedLESAM-D",
    "fedlesam_s": "FedLESAM-S",
    "fedsol_ft": "FedSOL + fine-tuning",
    "knnper": "kNN-Per",
    "perfedavg": "Per-FedAvg",
    "stochdepth": "stochastic depth",
    "agnews": "AG News",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "cinic10": "CINIC-10",
    "imagenet200": "ImageNet-200",
    "sst2": "SST-2",
    "lda_fedsol": "LDA",
    "file": "from a file",
    "given": "as recorded",
    "rho": "ρ",
    "lam": "λ",
    "beta": "β",
    "beta_dual": "β (dual)",
    "kappa": "κ",
    "mu": "μ",
    "alpha": "α",
    "tau": "τ",
    "gamma": "γ",
    "lr": "learning rate",
    "lr_decay": "decay of the learning rate",
}
#: What is surely a name within other people's text: a method's, and an option's before its value.
_METHOD = re.compile(r"(?<!\w)(\w*fed\w*|scaffold)(?!\w)")
_OPTION = re.compile(r"(?<!\w)(rho|beta|kappa|mu|alpha|tau|lam)(?: ?= ?| (?=\d))")


def display_name(registered: str) -> str:
    """The display name of what is registered; of ``pkg.mod:function`` the function, of others the words.

    A number at the end of a data set's name is how many training images were kept of it.

    >>> [display_name(method) for method in ("fedlesam_d", "strategy:A1", "pkg.mine:steady", "local_only")]
    ['FedLESAM-D', 'strategy A1', 'steady', 'local only']
    >>> display_name("cifar10"), display_name("mnist-2000")
    ('CIFAR-10', 'MNIST (2,000 images)')
    """
    head, _, id = registered.rpartition(":")
    short = f"strategy {id}" if head == "strategy" else id.partition("@")[0]
    base, _, size = short.rpartition("-")
    if base in NAMES and size.isdigit():
        return f"{NAMES[base]} ({int(size):,} images)"
    return NAMES.get(short, short.replace("_", " "))


def plain(text: object) -> str:
    """Foreign text (a run's label) on one line with display names; a dollar sign in it is one, and begins no mathematics.

    >>> plain("fedsol-1 rho=2.0"), plain("FedSOL, rho 0.5"), plain("my_fedavg_run")
    ('FedSOL-1 ρ = 2.0', 'FedSOL, ρ = 0.5', 'my_fedavg_run')
    """
    line = " ".join(str(text).split())
    line = _METHOD.sub(lambda match: NAMES.get(match[0], match[0]), line)
    line = _OPTION.sub(lambda match: f"{NAMES[match[1]]} = ", line)
    return line.replace("$", r"\$")


def shorten(text: object, width: int) -> str:
    """Text on one line of at most ``width`` characters, the middle left out: run labels differ at both ends.

    >>> shorten("fedavg round 30", 9)
    'feda…d 30'
    """
    text = " ".join(str(text).split())
    tail = width // 2
    return text if len(text) <= width else f"{text[: width - 1 - tail]}…{text[-tail:]}"


# Files


def image(fig: Figure, kind: str, dpi: int = 300) -> bytes:
    """The figure as the bytes of a pdf, png or svg; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    with paper():
        if engine := fig.get_layout_engine():
            engine.execute(fig)
            # laid out again with a colour bar, it would differ by a hair
            fig.set_layout_engine("none")
        fig.savefig(buffer, format=kind, dpi=dpi, metadata=FORMATS[kind])
    return buffer.getvalue()


def save(fig: Figure, path: str | Path, formats: Iterable[str] = ()) -> list[Path]:
    """Write the figure as PATH.FORMAT; the same figure gives the same bytes.

    Args:
        fig: the figure.
        path: without the ending.
        formats: of pdf, png and svg; by default those of the sheet.

    Returns:
        The paths.

    Raises:
        FldiagError: the folder cannot be written.
    """
    return [write_bytes(f"{path}.{kind}", image(fig, kind)) for kind in formats or SHEET.get()[1]]


# Tables


def floats(column: pd.Series) -> np.ndarray:
    """A column as float64, missing values as nan."""
    return column.astype(float).to_numpy()


def square(rows: pd.DataFrame) -> pd.DataFrame:
    """The value of every pair ``client``, ``client_b`` in both halves of a square table; nan for one with itself."""
    rows = rows.astype({"client": int, "client_b": int, "value": float})
    matrix = rows.pivot(index="client", columns="client_b", values="value")
    upper, lower = matrix.align(matrix.T)
    return upper.fillna(lower)


# Shapes


def lines(
    ax: Axes,
    tables: Mapping[str, pd.DataFrame],
    palette: Mapping[str, Look] | None = None,
) -> None:
    """The values of each table over its rounds, with a band of one standard error where it is known and there are at most four
    tables. A round that is not there is a gap.

    Args:
        ax: the panel.
        tables: name of a line -> its rows.
        palette: name -> look, where the figure has one legend for all panels; else several lines get a legend below the panel.
    """
    from matplotlib.ticker import MaxNLocator

    has_legend, handles = palette is None and len(tables) > 1, list[Any]()
    palette = palette or looks(tables)
    for name, rows in tables.items():
        points = rows.dropna(subset=["round", "value"])
        points = points.astype({"round": int, "value": float, "stderr": float})
        points = points.set_index("round").sort_index()
        if 1 in np.diff(points.index):
            points = points.reindex(range(points.index[0], points.index[-1] + 1))
        value, error, look = points["value"], points["stderr"], palette[name]
        if len(tables) <= 4:
            band = value - error, value + error
            ax.fill_between(points.index, *band, color=look.color, alpha=0.15, linewidth=0)
        handles += ax.plot(points.index, value, markevery=max(len(points) // 8, 1), **look.line)
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    ax.set_xlabel("round")
    ax.grid(True)
    if has_legend:
        ax.legend(
            handles,
            map(plain, tables),
            ncols=1 if max(map(len, tables)) > 12 else 2,
            loc="upper center",
            bbox_to_anchor=(0.5, 0),
            borderaxespad=4.0,
        )


def dots(ax: Axes, rows: pd.DataFrame, color: str) -> None:
    """A faint dot for every row: the clients of each round, under their mean."""
    ax.plot(
        floats(rows["round"]), floats(rows["value"]), ".", ms=3, color=color, alpha=0.4, zorder=1
    )


def is_wide(values: np.ndarray) -> bool:
    """Whether values are positive and spread over more than a factor of 30: their logarithms are drawn."""
    return bool(len(values) and 0 < 30 * values.min() < values.max())


def wide_range(ax: Axes, values: np.ndarray) -> None:
    """A logarithmic axis where values spread wide."""
    if is_wide(values):
        ax.set_yscale("log")


def cells(ax: Axes, matrix: pd.DataFrame, **options: Any) -> None:
    """A heatmap with the table's index and columns at the axes; what is not there is blank.

    ``options``: of ``seaborn.heatmap``.
    """
    import seaborn  # a second, which a table from the store does not need

    options = {"cmap": COLORMAP, "cbar_kws": {"pad": 0.02}, **options}
    seaborn.heatmap(matrix.astype(float), ax=ax, **options)
    ax.tick_params(length=0)
    ax.tick_params(axis="y", rotation=0)


def bars(
    ax: Axes,
    table: pd.DataFrame,
    palette: Mapping[str, Look],
    category: str = "layer",
) -> None:
    """Bars from the left by ``category``, the first on top, side by side for every run, each with its standard error."""
    order = list(dict.fromkeys(table[category]))
    value, errors = (
        table.astype({column: float})
        .pivot(index=category, columns="run", values=column)
        .reindex(index=order, columns=palette)
        for column in ("value", "stderr")
    )
    errors = errors.where(errors > 5e-3 * value.abs().max(axis=None))  # others are specks
    colors = [palette[run].color for run in palette]
    marks = {"elinewidth": 0.7, "ecolor": "#888888"}
    value.plot.barh(ax=ax, xerr=errors, color=colors, width=0.8, legend=False, error_kw=marks)
    names_down(ax, order)
    ax.axvline(0, color="black", linewidth=0.5)
    ax.grid(True, axis="x")


def names_down(ax: Axes, names: Sequence[str], width: int = 24) -> None:
    """A name a row, the first on top."""
    ax.set_yticks(range(len(names)), [plain(shorten(name, width)) for name in names])
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_ylabel("")
