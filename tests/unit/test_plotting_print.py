"""Every kind of picture, as it is printed: no text on another, none cut off, none below 6 points, colours apart for every eye."""

from __future__ import annotations

import io
import itertools

import kinds
import matplotlib
import numpy as np
import pytest
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.colors import to_rgb
from matplotlib.container import BarContainer
from matplotlib.text import Text

from fldiag.diagnostics import landscape
from fldiag.plotting import sheet, style
from fldiag.results.table import table

#: Pictures whose names stand on the line that they name, on purpose.
ON_WHAT_IT_NAMES = ("plane",)


def words_of(fig):
    """Texts that are drawn, with their corners [4, 2] in pixels, slanted as they are; ticks beyond the ends of their axis are
    not."""
    fig.canvas.draw()
    renderer = fig.canvas.get_renderer()
    axes = [
        axis
        for ax in fig.axes
        for axis in (ax.xaxis, ax.yaxis, *([ax.zaxis] if ax.name == "3d" else []))
    ]
    hidden = {
        id(t)
        for axis in axes
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
        for t in (tick.label1, tick.label2)
        if not min(axis.get_view_interval()) - 1e-9
        <= tick.get_loc()
        <= max(axis.get_view_interval()) + 1e-9
    }
    return [
        (t, corners(t, renderer))
        for t in fig.findobj(Text)
        if t.get_text().strip() and t.get_visible() and id(t) not in hidden
    ]


def corners(text, renderer):
    box, angle = text.get_window_extent(renderer), text.get_rotation()
    text.set_rotation(0)
    flat = text.get_window_extent(renderer)
    text.set_rotation(angle)
    half = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * [flat.width / 2, flat.height / 2]
    c, s = np.cos(np.radians(angle)), np.sin(np.radians(angle))
    return half @ np.array([[c, s], [-s, c]]) + [(box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2]


def depth(one, other):
    """How many pixels two convex shapes overlap; negative: they are apart by a line along a side of the first or second."""
    found = np.inf
    for shape in (one, other):
        for side in np.roll(shape, -1, axis=0) - shape:
            if (size := np.hypot(*side)) > 0:
                a, b = (each @ np.array([-side[1], side[0]]) / size for each in (one, other))
                found = min(found, min(a.max(), b.max()) - max(a.min(), b.min()))
    return found


def meetings(ones, others):
    """Index pairs of shapes whose upright boxes overlap."""
    if not ones or not others:
        return []
    low, high = (np.array([bound(s, 0) for s in ones])[:, None] for bound in (np.min, np.max))
    least, most = (np.array([bound(s, 0) for s in others]) for bound in (np.min, np.max))
    return np.argwhere(((high >= least) & (most >= low)).all(-1))


def marks_of(fig):
    """What lies in a pair of axes and can be covered by a word: (axes, corners) of every mark, and of every piece of a line that
    is not a grid line, an axis line or a line of reference."""
    for ax in fig.axes:
        if ax.name == "3d":
            continue
        for line in ax.lines:
            if (
                not line.get_visible()
                or line.get_transform() != ax.transData
                or line.get_label() == "_reference"
            ):
                continue
            places = ax.transData.transform(np.column_stack(line.get_data()).astype(float))
            if line.get_linestyle() not in ("None", " ", ""):
                yield from (
                    (ax, np.array(piece))
                    for piece in itertools.pairwise(places)
                    if np.isfinite(piece).all()
                )
            if line.get_marker() not in ("None", None, "", " "):
                yield from (
                    (ax, square(p, line.get_markersize() * fig.dpi / 72 * 0.8)) for p in places
                )
        for group in ax.collections:
            if isinstance(group, LineCollection):
                pieces = (piece for piece in group.get_segments() if len(piece))
                yield from ((ax, ax.transData.transform(piece)) for piece in pieces)
            elif isinstance(group, PathCollection):
                sizes = np.resize(group.get_sizes(), len(group.get_offsets()))
                yield from (
                    (ax, square(ax.transData.transform(p), 0.8 * size**0.5 * fig.dpi / 72))
                    for p, size in zip(group.get_offsets(), sizes, strict=True)
                )

        for bars in ax.containers:
            for bar in bars if isinstance(bars, BarContainer) else ():
                box = bar.get_window_extent()
                yield (
                    ax,
                    np.array(
                        [[box.x0, box.y0], [box.x1, box.y0], [box.x1, box.y1], [box.x0, box.y1]]
                    ),
                )


def square(place, side):
    return place + np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * side / 2


@pytest.mark.parametrize("width", [None, "single"])
@pytest.mark.parametrize("kind", kinds.KINDS)
@pytest.mark.slow
def test_a_picture_can_be_printed_as_it_is(kind, width):
    with sheet.use_sheet(width):
        fig = kinds.KINDS[kind]()
    with style.paper():
        found = words_of(fig)
    page, slack = fig.bbox, 1.0  # a pixel of a hundred an inch
    assert len(found) > 5
    for text, box in found:
        assert text.get_fontsize() >= 6, text
        assert (box >= -slack).all() and (box <= [page.x1 + slack, page.y1 + slack]).all(), (
            text,
            box,
        )
    texts, boxes = zip(*found, strict=True)
    for i, j in meetings(boxes, boxes):
        if i < j:
            assert depth(boxes[i], boxes[j]) <= slack, (
                f"{texts[i].get_text()!r} lies on {texts[j].get_text()!r}"
            )
    assert fig.get_figwidth() <= (style.ONE_COLUMN if width else style.TWO_COLUMNS) + 0.01
    rounds = [ax.get_xticks() for ax in fig.axes if ax.get_xlabel() == "round"]
    assert all(float(tick).is_integer() for ticks in rounds for tick in ticks)
    if kind in ON_WHAT_IT_NAMES:
        return
    marks = list(marks_of(fig))
    for i, j in meetings(boxes, [mark for _, mark in marks]):
        text, (ax, mark) = texts[i], marks[j]
        if text.axes is ax or text.axes is None:
            assert depth(boxes[i], mark) <= slack, (
                f"{text.get_text()!r} lies on a mark at {mark.mean(0)}"
            )


#: Red, green or blue cones missing (Machado, Oliveira and Fernandes, 2009, severity 1), in linear light.
EYES = {
    "all cones": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def linear(colour):
    c = np.array(to_rgb(colour))
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def lab(light):
    xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    ) @ np.clip(light, 0, 1)
    f = np.cbrt(np.maximum(xyz / [0.9505, 1.0, 1.089], 1e-6))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("eye", EYES)
def test_colours_are_apart_and_visible_on_white(eye):
    """CIE76 distances: 2.3 is just noticeable."""
    seen = [lab(np.asarray(EYES[eye]) @ linear(style.look(i).color)) for i in range(7)]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 10
    more = [lab(np.asarray(EYES[eye]) @ linear(style.look(i).color)) for i in range(9)]
    assert min(np.linalg.norm(c - lab(np.ones(3))) for c in more) > 25
    assert (
        len(
            {
                (style.look(i).marker, str(style.look(i).dash), style.look(i).color)
                for i in range(60)
            }
        )
        == 60
    )
    assert (
        sum(style.look(i).color == style.look(0).color for i in range(60)) == 1
    )  # two methods are never both black


@pytest.mark.slow
def test_a_large_png_is_light_and_fonts_are_in_the_pdf(tmp_path):
    fig = landscape.draw(kinds.surface(True))
    pdf, png = style.save(fig, tmp_path / "x", ("pdf", "png"))
    assert png.stat().st_size < 300_000 and pdf.stat().st_size < 300_000
    assert b"/Type3" not in pdf.read_bytes()
    raw = io.BytesIO()
    with style.paper():
        fig.savefig(raw, format="png", dpi=style.DPI)
    exact, light = (matplotlib.image.imread(f)[..., :3] for f in (io.BytesIO(raw.getvalue()), png))
    assert exact.shape == light.shape and np.abs(exact - light).mean() < 0.02


def compared_rows():
    return table(
        [
            dict(
                origin=o,
                setting="",
                method=m,
                model="lenet",
                data="cifar10",
                metric="accuracy",
                value=v,
                seed=0,
            )
            for o in ("measured", "reported")
            for m, v in (("fedavg", 50.0), ("fedsol", 60.0))
        ]
    )
