"""The one style of every picture, and the one way to write it.

Colours are those of Okabe and Ito ("Color Universal Design", 2008) without yellow, which is lost on white, and with a grey and
a brown; each comes with a marker and a dash pattern, so that lines stay apart in greyscale too.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from fldiag.plotting import sheet, words
from fldiag.results.files import write_bytes
from fldiag.results.summary import number as number  # also known here, where pictures look for it

ONE_COLUMN, TWO_COLUMNS = sheet.WIDTHS["single"], sheet.WIDTHS["double"]
#: No picture of several panels is higher, but for its legend: it fits on a page (inches).
PAGE = 8.8
#: Perceptually uniform, monotone in lightness, safe for colour-blind readers; and from one sign to the other through white.
COLORMAP, DIVERGING = "viridis", "PuOr_r"
#: Of pngs: in files, and on a page.
DPI, SCREEN = 300, 150
#: Metadata that would make two files of one figure differ.
METADATA: dict[str, dict[str, Any]] = {
    "pdf": {"CreationDate": None},
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
}
#: Where the style is not matplotlib's own. DejaVu ships with matplotlib: the same bytes on every machine.
RC: dict[Any, Any] = {
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8,
    "axes.titlesize": 8.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.title_fontsize": 7,
    "legend.frameon": False,
    "legend.borderpad": 0.2,
    "legend.columnspacing": 1.2,
    "legend.handlelength": 2.6,
    "legend.labelspacing": 0.3,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.linewidth": 0.4,
    "grid.color": "#dddddd",
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "errorbar.capsize": 1.8,
    "pdf.fonttype": 42,
    "svg.hashsalt": "fldiag",
}
COLOURS = (
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
MARKERS = "oDs^vPXp*"
DASHES: tuple[Any, ...] = (
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
#: These have the same look in every picture in which they meet: that of their place.
METHODS = ("fedavg", "fedsol", "fedprox", "scaffold", "fedntd", "fedsam", "fedasam")


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


def look(place: int) -> Look:
    """The look of a place; colour and marker together repeat only after 73, and black never does."""
    turn, colour = divmod(max(place - 1, 0), len(COLOURS) - 1)
    colour += place > 0
    marker, dash = (colour + turn) % len(MARKERS), (colour + 3 * turn) % len(DASHES)
    return Look(COLOURS[colour], MARKERS[marker], DASHES[dash])


def looks(labels: Iterable[str]) -> dict[str, Look]:
    """A look of its own for every label; one that begins with a well-known method's name has that method's.

    >>> looks(["mine", "FedSOL, seed 0"])["FedSOL, seed 0"] == look(1)
    True
    """
    labels = list(dict.fromkeys(labels))
    places: dict[str, int] = {}
    for label in labels:
        method = re.split("[^a-z0-9]", label.lower().replace("fed-", "fed"), maxsplit=1)[0]
        if method in METHODS and METHODS.index(method) not in places.values():
            places[label] = METHODS.index(method)
    for label in labels:
        if label not in places:
            places[label] = next(i for i in itertools.count() if i not in places.values())
    return {label: look(places[label]) for label in labels}


@contextmanager
def paper() -> Iterator[None]:
    """The style, for the length of a ``with`` block; matplotlib's global settings are as before afterwards."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a user's own matplotlibrc would change the bytes
        matplotlib.rcParams.update(RC)
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
    """A figure with so many panels; call within ``paper()``.

    Args:
        count: Of panels.
        row: Inches of a row's height.
        foot: Inches of what stands below all rows.
        across: Panels in a row, at most.
        least: Inches that a panel has at least, where there are several.
        width: Where the sheet says none.
        **options: Of ``Figure.subplots``.
    """
    width = wide(width)
    across = max(1, min(count, across, int(width / least + 1e-9)))
    down = -(-count // across)
    fig = figure(width, min(row * down + foot, PAGE), layout="constrained")
    axes = list(fig.subplots(down, across, squeeze=False, **options).flat)
    for ax in axes[count:]:
        ax.remove()
    return fig, axes[:count]


def plain(text: object) -> str:
    """Foreign text (a run's label) on one line with display names; a dollar sign in it is one, and begins no mathematics."""
    return words.label(" ".join(str(text).split())).replace("$", r"\$")


def shorten(text: object, width: int) -> str:
    """Text on one line of at most ``width`` characters, the middle left out: run labels differ at both ends.

    >>> shorten("fedavg round 30", 9)
    'feda…d 30'
    """
    text = " ".join(str(text).split())
    tail = width // 2
    return text if len(text) <= width else f"{text[: width - 1 - tail]}…{text[-tail:]}"


def chance(ax: Axes, value: float, name: bool = True) -> None:
    """A dotted line at the accuracy of guessing, where the curves come near it; the axis then reaches down to it."""
    low, high = ax.get_ylim()
    if low > 3 * value:
        return
    ax.set_ylim(bottom=min(low, value - 0.06 * (high - value)))
    ax.axhline(value, color="#666666", linewidth=0.7, linestyle=(0, (1, 2)), label="_chance")
    if name:
        place: dict[str, Any] = {
            "xycoords": ax.get_yaxis_transform(),
            "ha": "right",
            "va": "bottom",
        }
        ax.annotate("chance", (1, value), fontsize=6, color="#555555", zorder=6, **place)


def percents(*axes: Any) -> None:
    """Tick labels of shares of 1 in percent: 40 %, 2.5 %."""
    for axis in axes:
        axis.set_major_formatter(FuncFormatter(lambda v, _: f"{round(100 * v, 6) + 0.0:g} %"))


def legend(
    fig: Figure, handles: Sequence[Any], labels: Iterable[str], *, ncols: int = 4, **options: Any
) -> Legend:
    """A legend below all panels, in as many columns as fit (at most ``ncols``); the figure grows by its rows."""
    labels = [plain(shorten(label, int(14 * fig.get_figwidth()))) for label in labels]
    options = {"loc": "outside lower center", **options}
    for columns in range(min(ncols, len(labels)) or 1, 0, -1):
        artist = fig.legend(handles, labels, ncols=columns, **options)
        box = artist.get_window_extent()
        if columns == 1 or box.width <= fig.bbox.width:
            break
        artist.remove()
    fig.set_figheight(fig.get_figheight() + box.height / fig.dpi)
    return artist


def legend_of_runs(fig: Figure, looks: Mapping[str, Look]) -> Legend:
    """The figure's legend: a line a run."""
    return legend(fig, [Line2D([], [], **look.line) for look in looks.values()], looks, ncols=3)


def image(fig: Figure, kind: str, dpi: int = DPI) -> bytes:
    """The figure as the bytes of a pdf, png or svg; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    with paper():
        fig.draw_without_rendering()
        fig.set_layout_engine("none")  # laid out again with a colour bar, it would differ by a hair
        fig.savefig(buffer, format=kind, dpi=dpi, metadata=METADATA[kind])
    return buffer.getvalue()


def save(fig: Figure, path: str | Path, formats: Sequence[str] = ()) -> list[Path]:
    """Write the figure as PATH.FORMAT; the same figure gives the same bytes.

    Args:
        fig: The figure.
        path: Without the ending.
        formats: Of pdf, png and svg; by default those of the sheet.

    Returns:
        The paths.

    Raises:
        FldiagError: The folder cannot be written.
    """
    formats = formats or sheet.current().formats
    return [write_bytes(f"{path}.{kind}", image(fig, kind)) for kind in formats]
