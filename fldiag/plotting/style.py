"""The one style of every picture, and the one way to write it.

Colours are those of Okabe and Ito ("Color Universal Design", 2008) without yellow, which is lost on white, and with a grey and
a brown; each comes with a marker and a dash pattern, so that lines stay apart in greyscale too.
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.textpath import TextPath
from matplotlib.ticker import FuncFormatter

from fldiag.plotting import sheet, words
from fldiag.results.files import render, write_pictures
from fldiag.results.summary import number as number  # also known here, where pictures look for it

ONE_COLUMN, TWO_COLUMNS = sheet.WIDTHS["single"], sheet.WIDTHS["double"]
#: No picture of several panels is higher, but for its legend: it fits on a page (inches).
PAGE = 8.8
#: Perceptually uniform, monotone in lightness, safe for colour-blind readers; and from one sign to the other through white.
COLORMAP, DIVERGING = "viridis", "PuOr_r"
DPI = 300
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
    head = max((width - 1) // 2, 1)
    tail = max(width - 1 - head, 1)
    return text if len(text) <= width else f"{text[:head]}…{text[-tail:]}"


def text_width(text: str, size: float = 7.0) -> float:
    """Width of one line of text in inches."""
    if not text.strip():
        return 0.0
    with paper():
        return float(TextPath((0, 0), text.replace("$", "S"), size).get_extents().x1) / 72


def wrap(text: object, inches: float, lines: int = 1, size: float = 7.0) -> list[str]:
    """The text in at most ``lines`` lines of about ``inches``; what is too long for one line loses its middle."""
    text = " ".join(str(text).split())
    across = max(int(inches / (text_width(text, size) or 1) * len(text)), 2)
    if lines == 1:
        return [shorten(text, across)]
    return textwrap.wrap(text, across, max_lines=lines, placeholder="…") or [""]


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
    if low <= 3 * value:
        ax.set_ylim(bottom=min(low, value - 0.06 * (high - value)))
        level(ax, value, "chance" if name else "")


def ceiling(ax: Axes, value: float) -> None:
    """A line at the highest accuracy of models that know their clients' classes only, where the curves come near it."""
    low, high = ax.get_ylim()
    if low < value < 1.5 * high:
        ax.set_ylim(top=max(high, value + 0.08 * (value - low)))
        level(ax, value, "ceiling of own classes")


def level(ax: Axes, value: float, text: str) -> None:
    """A dotted line across, with its name upon it."""
    dots: dict[str, Any] = {"color": "#666666", "linewidth": 0.7, "linestyle": (0, (1, 2))}
    ax.axhline(value, label=f"_{text or 'level'}", zorder=1, **dots)
    place: dict[str, Any] = {"xycoords": ax.get_yaxis_transform(), "ha": "right", "va": "bottom"}
    ax.annotate(text, (1, value), fontsize=6, color="#555555", zorder=6, **place)


def percents(*axes: Any) -> None:
    """Tick labels of shares of 1 in percent: 40 %, 2.5 %."""
    for axis in axes:
        axis.set_major_formatter(FuncFormatter(lambda v, _: f"{round(100 * v, 6) + 0.0:g} %"))


def legend(owner: Any, handles: Sequence[Any], labels: Sequence[str], **options: Any) -> Legend:
    """A legend that also shows labels with a leading underscore (matplotlib drops those) or with dollars.

    A figure's stands below its panels, in as many columns as fit (at most ``ncols``), and the figure grows by its rows.
    """
    options = {"borderpad": 0.2, "columnspacing": 1.2, "labelspacing": 0.3, **options}
    most = options.pop("ncols", len(labels) if isinstance(owner, Figure) else 1)
    if isinstance(owner, Figure):
        options = {"loc": "outside lower center", **options}
        labels = [wrap(label, owner.get_figwidth() - 0.6)[0] for label in labels]
    for columns in range(min(most, len(labels)), 0, -1):
        artist = owner.legend(list(handles), ["x"] * len(labels), ncols=columns, **options)
        for text, label in zip(artist.get_texts(), labels, strict=True):
            text.set_text(plain(label))
        if not isinstance(owner, Figure):
            break
        box = artist.get_window_extent()
        if columns == 1 or box.width <= owner.bbox.width:
            owner.set_figheight(owner.get_figheight() + box.height / owner.dpi)
            break
        artist.remove()
    return artist


def save(fig: Figure, path: str | Path, formats: Sequence[str] | None = None) -> list[Path]:
    """Write the figure; the same figure gives the same bytes.

    Args:
        fig: The figure.
        path: With the ending of a format one file; else each of the formats is appended.
        formats: Of pdf, png and svg; by default those of the sheet.

    Returns:
        The paths.

    Raises:
        FldiagError: Another format, or a folder that cannot be written.
    """
    path = Path(path)
    targets = [path.with_name(f"{path.name}.{f}") for f in formats or sheet.current().formats]
    with paper():
        return write_pictures(fig, [path] if formats is None and path.suffix else targets, DPI)


def write(fig: Figure, path: Path) -> list[Path]:
    """Write the figure in every format of the sheet, each ending appended to ``path``; as ``save``."""
    return save(fig, path, sheet.current().formats)


def image(fig: Figure, kind: str) -> bytes:
    """The figure for a page: ``svg`` as ``save`` writes it, or a small ``png`` (200 dpi, 64 colours)."""
    with paper():
        fig.draw_without_rendering()
        fig.set_layout_engine("none")  # laid out again with a colour bar, it would differ by a hair
        return render(fig, "svg", DPI) if kind == "svg" else render(fig, "png", 200, 64)
