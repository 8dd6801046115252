"""The one style of every picture, and the one way to write it.

Colours are those of Okabe and Ito ("Color Universal Design", 2008) without yellow, which is lost on white, and with a grey and
a brown; each comes with a marker and a dash pattern, so that lines stay apart in greyscale too.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import FuncFormatter

from fldiag.plotting import sheet, words
from fldiag.results.files import render, write_pictures
from fldiag.results.summary import number as number  # also known here, where pictures look for it

ONE_COLUMN, TWO_COLUMNS = sheet.WIDTHS["single"], sheet.WIDTHS["double"]
#: Perceptually uniform, monotone in lightness (so it survives greyscale), safe for colour-blind readers.
COLORMAP = "viridis"
#: From one sign to the other through white, safe for colour-blind readers: orange is above zero, purple below.
DIVERGING = "PuOr_r"
DPI = 300
#: No picture of several panels is higher, but for its legend: it fits on a page (inches).
PAGE = 8.8
#: Width of a letter and of a capital as shares of the font size: a little above the mean, and the widest.
LETTER, CAPITAL = 0.6, 1.0

#: Where the style is not matplotlib's own.
_RC: dict[Any, Any] = {
    # DejaVu ships with matplotlib, so the same table gives the same bytes on every machine.
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8.0,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8.0,
    "xtick.labelsize": 7.0,
    "ytick.labelsize": 7.0,
    "legend.fontsize": 7.0,
    "legend.title_fontsize": 7.0,
    "legend.frameon": False,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.linewidth": 0.4,
    "grid.color": "#dddddd",
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.width": 0.4,
    "ytick.minor.width": 0.4,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.minor.size": 1.5,
    "ytick.minor.size": 1.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 4.0,
    "errorbar.capsize": 1.8,
    "savefig.facecolor": "white",
    "savefig.dpi": DPI,
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
    "svg.hashsalt": "fldiag",
}

_COLOURS = (
    "#000000",
    "#D55E00",
    "#0072B2",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#7F7F7F",
    "#661100",
)
_MARKERS = ("o", "D", "s", "^", "v", "P", "X", "p", "*")
_DASHES: tuple[Any, ...] = (
    "-",
    "-",
    (0, (4, 1.5)),
    (0, (1, 1)),
    (0, (5, 1, 1, 1)),
    (0, (2, 1)),
    (0, (3, 1, 1, 1, 1, 1)),
    (0, (7, 1.5)),
    (0, (6, 1, 2, 1)),
)
#: A method looks the same in every picture in which these names meet.
_OWN = {
    "fedavg": 0,
    "fedsol": 1,
    "fedprox": 2,
    "scaffold": 3,
    "fedntd": 4,
    "fedsam": 5,
    "fedasam": 6,
}


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
        return {"color": self.color, "linestyle": "none", "marker": self.marker, "markersize": 4}


def look(position: int) -> Look:
    """The look of the given position; colour and marker together repeat only after 73, and black never does."""
    turn, colour = divmod(max(position - 1, 0), len(_COLOURS) - 1)
    colour += position > 0
    return Look(
        _COLOURS[colour],
        _MARKERS[(colour + turn) % len(_MARKERS)],
        _DASHES[(colour + 3 * turn) % len(_DASHES)],
    )


def looks(labels: Iterable[str]) -> dict[str, Look]:
    """One look a label, all different; a label that starts with a well-known method's name gets that method's."""
    labels = list(dict.fromkeys(labels))
    indices: dict[str, int] = {}
    for label in labels:
        (first,) = re.findall(r"^(?:fed-)?[a-z0-9]*", label.lower())
        default = _OWN.get(first.replace("-", ""))
        if default is not None and default not in indices.values():
            indices[label] = default
    free = (i for i in range(len(labels) + len(_OWN)) if i not in indices.values())
    for label in labels:
        if label not in indices:
            indices[label] = next(free)
    return {label: look(indices[label]) for label in labels}


@contextmanager
def paper() -> Iterator[None]:
    """The style, for the length of a ``with`` block; matplotlib's global settings are as before afterwards."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # else a user's own matplotlibrc would show through, and change the bytes
        matplotlib.rcParams.update(_RC)
        yield


def figure(width: float, height: float, **options: Any) -> Figure:
    """An empty figure (inches) that no window knows of; call within ``paper()``."""
    fig = Figure(figsize=(width, height), **options)
    FigureCanvasAgg(fig)
    return fig


def wide(natural: float = TWO_COLUMNS) -> float:
    """The width of a picture in inches: the sheet's, or else its own."""
    return sheet.current().width or natural


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
    """A figure with so many panels, at most ``across`` in a row and, of several, none narrower than ``least`` inches; call within
    ``paper()``.

    ``row``: height of a row; ``foot``: of what stands below all rows; ``width``: where the sheet says nothing. ``options``: of
    ``Figure.subplots``."""
    width = wide(width)
    across = max(1, min(count, across, int(width / least + 1e-9)))
    down = -(-count // across)
    fig = figure(width, min(row * down + foot, PAGE), layout="constrained")
    axes = list(fig.subplots(down, across, squeeze=False, **options).flat)
    for ax in axes[count:]:
        ax.remove()
    return fig, axes[:count]


@contextmanager
def panel(
    ax: Axes | None, width: float, height: float
) -> Iterator[tuple[Axes, Axes | Figure, str]]:
    """The axes of a picture that has one pair of them, what its legend belongs to, and where that stands: the axes given, in
    the style of their figure, or those of a new one (inches)."""
    if ax is not None:
        yield ax, ax, "best"
        return
    with paper():
        fig = figure(width, height, layout="constrained")
        yield fig.subplots(), fig, "outside lower center"


def plain(text: object) -> str:
    """Foreign text (a run's label) on one line with display names, so that a dollar sign in it is one, not mathematics."""
    return words.label(" ".join(str(text).split())).replace("$", r"\$")


def shorten(text: object, width: int) -> str:
    """Text on one line of at most ``width`` characters, the middle left out: run labels differ at both ends."""
    text = " ".join(str(text).split())
    if len(text) <= width:
        return text
    head = max((width - 1) // 2, 1)
    return text[:head] + "…" + text[len(text) - max(width - 1 - head, 1) :]


def text_width(text: str, size: float = 7.0) -> float:
    """Width of one line of text in inches, estimated from the number of its letters and capitals."""
    return sum(CAPITAL if letter.isupper() else LETTER for letter in text) * size / 72


def wrap(text: object, inches: float, lines: int = 1, size: float = 7.0) -> list[str]:
    """The text in at most ``lines`` lines of about ``inches``; what is too long loses its middle."""
    text = " ".join(str(text).split())
    across = max(
        int(inches * len(text) / (text_width(text, size) or 1.0)), 1
    )  # of letters as wide as its own
    for room in range(min(len(text), lines * across), 0, -1):
        rows = textwrap.wrap(shorten(text, room), across)
        if len(rows) <= lines:
            return rows
    return [""]


def columns(texts: Sequence[str], inches: float, handle: float = 0.4) -> int:
    """How many columns a legend of such texts has in so much room, its rows as even as they can be."""
    most = max(1, min(len(texts), int(inches / (max(text_width(t) for t in texts) + handle))))
    return -(-len(texts) // -(-len(texts) // most))


def heading(fig: Figure, text: str) -> None:
    """At most two lines above all panels; the figure grows by them."""
    if text:
        lines = wrap(text, fig.get_figwidth() - 0.2, 2, 8)
        fig.set_figheight(fig.get_figheight() + 0.15 * len(lines))
        fig.suptitle("\n".join(lines), x=0.04, ha="left", fontsize=8)


def empty(ax: Axes, text: str) -> None:
    """A panel without axes that says why it has nothing."""
    ax.text(0.5, 0.5, text, ha="center", va="center", transform=ax.transAxes)
    ax.set_axis_off()


def names_down(ax: Axes, names: Sequence[str], width: int = 24) -> None:
    """A name a row, the first on top."""
    ax.set_yticks(range(len(names)), [plain(shorten(name, width)) for name in names])
    ax.set_ylim(len(names) - 0.5, -0.5)


def chance(ax: Axes, value: float, name: bool = True) -> None:
    """A line at the accuracy of guessing, where the curves come near it; the axis then reaches down to it."""
    low, high = ax.get_ylim()
    if low > 3 * value:
        return
    ax.set_ylim(bottom=min(low, value - 0.06 * (high - value)))
    level(ax, value, "chance" if name else "")


def ceiling(ax: Axes, value: float) -> None:
    """A line at the highest accuracy of models that know their clients' classes only, where the curves come near it; the axis
    then reaches up to it. Its name, at the right, stands on the side that has fewer points of the curves."""
    low, high = ax.get_ylim()
    if not low < value < 1.5 * high:
        return
    ax.set_ylim(top=max(high, value + 0.08 * (value - low)))
    curves = [np.asarray(line.get_xydata(), dtype=float) for line in ax.lines]
    points = np.concatenate([np.empty((0, 2)), *(curve for curve in curves if len(curve) > 2)])
    gaps = points[points[:, 0] > sum(ax.get_xlim()) / 2, 1] - value
    near = gaps[np.abs(gaps) < 0.1 * (high - low)]
    level(ax, value, "ceiling of own classes", below=bool((near > 0).sum() > len(near) / 2))


def level(ax: Axes, value: float, name: str, below: bool = False) -> None:
    """A dotted line across, with its name upon it or below."""
    dots: dict[str, Any] = {
        "color": "#666666",
        "linewidth": 0.7,
        "linestyle": (0, (1, 2)),
        "zorder": 1,
    }
    ax.axhline(value, label=f"_{name or 'level'}", **dots)
    ax.annotate(
        name,
        (1, value),
        xycoords=ax.get_yaxis_transform(),
        xytext=(0, -1 if below else 1),
        textcoords="offset points",
        ha="right",
        va="top" if below else "bottom",
        fontsize=6,
        color="#555555",
        zorder=6,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.3, "alpha": 0.75},
    )


def percents(*axes: Any) -> None:
    """Tick labels of shares of 1 in percent: 40 %, 2.5 %."""
    for axis in axes:
        axis.set_major_formatter(FuncFormatter(lambda v, _: f"{round(100 * v, 6) + 0.0:g} %"))


def legend(owner: Any, handles: Sequence[Any], labels: Sequence[str], **options: Any) -> Legend:
    """A legend that also shows labels with a leading underscore (matplotlib drops those) or with dollars.

    A figure's stands below its panels, in as many columns as fit (at most ``ncols``), and the figure grows by its rows.
    """
    if isinstance(owner, Figure):
        room, handle = owner.get_figwidth() - 0.1, options.get("handlelength", 2.0) * 7 / 72 + 0.3
        labels = [wrap(label, room - 0.5)[0] for label in labels]
        across = min(options.get("ncols", len(labels)), columns(labels, room, handle))
        rows = -(-len(labels) // across) + bool(options.get("title"))
        owner.set_figheight(owner.get_figheight() + 0.15 * rows)
        options = {"loc": "outside lower center", **options, "ncols": across}
    defaults: dict[str, Any] = {"borderpad": 0.2, "columnspacing": 1.2, "labelspacing": 0.3}
    artist = owner.legend(list(handles), ["x"] * len(labels), **{**defaults, **options})
    for text, label in zip(artist.get_texts(), labels, strict=True):
        text.set_text(plain(label))
    return artist


def save(fig: Figure, path: str | Path, formats: Sequence[str] | None = None) -> list[Path]:
    """Write the figure; returns the paths written. The same figure gives the same bytes.

    ``path`` with the ending of a format is one file. Otherwise each of ``formats`` (default: the sheet's) is appended to
    ``path``: ``pdf`` (TrueType fonts, no date), ``png`` (300 dpi), or ``svg`` (letters as outlines). Every file is complete
    or not there: written beside its place, then renamed. Raises FldiagError for another format, or a folder that cannot be
    written.
    """
    path = Path(path)
    if formats is None and path.suffix:
        targets = [path]
    else:
        targets = [path.with_name(f"{path.name}.{f}") for f in formats or sheet.current().formats]
    with paper():
        return write_pictures(fig, targets, DPI)


def write(fig: Figure, path: Path) -> list[Path]:
    """Write the figure in every format of the sheet, each ending appended to ``path``; as ``save``."""
    return save(fig, path, sheet.current().formats)


def image(fig: Figure, kind: str) -> bytes:
    """The figure for a page: ``svg`` as ``save`` writes it, or a small ``png`` (200 dpi, 64 colours); the same figure gives the
    same bytes."""
    with paper():
        fig.draw_without_rendering()
        fig.set_layout_engine("none")  # laid out again with a colour bar, it would differ by a hair
        return render(fig, "svg", DPI) if kind == "svg" else render(fig, "png", 200, 64)
