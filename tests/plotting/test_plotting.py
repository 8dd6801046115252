"""The style: looks that every eye can tell apart, files that are equal for equal figures, and no text on another."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import kinds
import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.colors import to_rgb
from matplotlib.container import BarContainer
from matplotlib.image import imread
from matplotlib.lines import Line2D
from matplotlib.text import Text

import fldiag
from fldiag import registry
from fldiag.diagnostics import forgetting
from fldiag.errors import FldiagError
from fldiag.plotting import style
from fldiag.results.table import table

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
XYZ = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]


def lab(light):
    f = np.cbrt(np.maximum(XYZ @ np.clip(light, 0, 1) / [0.9505, 1.0, 1.089], 1e-6))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def seen(place, eye):
    c = np.array(to_rgb(style.look(place).color))
    light = np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
    return lab(np.asarray(EYES[eye]) @ light)


@pytest.mark.parametrize("eye", EYES)
def test_colours_are_apart_and_visible_on_white(eye):
    """CIE76 distances: 2.3 is just noticeable."""
    pairs = itertools.combinations([seen(i, eye) for i in range(7)], 2)
    assert min(np.linalg.norm(a - b) for a, b in pairs) > 10
    assert min(np.linalg.norm(seen(i, eye) - lab(np.ones(3))) for i in range(9)) > 25


def test_looks_differ_and_known_methods_keep_theirs():
    looks = [style.look(i) for i in range(60)]
    assert len(set(looks)) == 60 and sum(look.color == looks[0].color for look in looks) == 1
    assert len({(look.marker, str(look.dash)) for look in looks[:14]}) == 14  # in grey, too
    alone, crowd = style.looks(["FedSOL rho=2"]), style.looks(["x", "FedProx", "fedsol", "FedAvg"])
    assert alone["FedSOL rho=2"] == crowd["fedsol"] == style.looks(["fed-sol"])["fed-sol"]
    assert len(set(crowd.values())) == 4
    assert style.looks(["FedAvg, seed 0", "FedAvg, seed 1"])["FedAvg, seed 0"] == style.look(0)


def test_every_method_has_a_display_name():
    plain = {"gradient_projection", "local_only", "strategy"}
    assert set(registry.method.names()) - plain <= set(style.NAMES)
    assert (
        style.display_name("fedtoga") == "FedTOGA"
        and style.display_name("local_only") == "local only"
    )
    for text in ("my_fedavg_thing", "fedavgx", "the rho of it", "moon", "conv1.weight"):
        assert style.plain(text) == text
    assert style.plain("fedsol $x$,\nrho=2") == r"FedSOL \$x\$, ρ = 2"


# Files


def simple(value=1.0):
    with style.paper():
        fig = style.figure(2, 1.5)
        fig.subplots().plot([0, 1], [0, value])
    return fig


def test_the_style_leaves_no_trace_and_takes_none(tmp_path):
    before = dict(matplotlib.rcParams)
    with pytest.raises(ZeroDivisionError), style.paper():
        raise ZeroDivisionError
    assert dict(matplotlib.rcParams) == before
    plain, _ = style.save(simple(), tmp_path / "plain", ("png", "svg"))
    with matplotlib.rc_context({"lines.linewidth": 9.0, "font.size": 30, "axes.grid": True}):
        (other,) = style.save(simple(), tmp_path / "other", ("png",))
    assert plain.read_bytes() == other.read_bytes()


@pytest.mark.slow
def test_equal_figures_give_equal_bytes_in_every_process(tmp_path, monkeypatch, users_dots):
    monkeypatch.setattr(style.image, "__defaults__", users_dots)
    code = "import sys; sys.path.insert(0, sys.argv[2]); from test_plotting import *; style.save(simple(), sys.argv[1], style.FORMATS)"
    odd = {"PYTHONHASHSEED": "12345", "TZ": "Asia/Tokyo", "SOURCE_DATE_EPOCH": "1"}
    mine = style.save(simple(), tmp_path / "mine", list(style.FORMATS))
    command = [sys.executable, "-c", code, str(tmp_path / "other"), str(Path(__file__).parent)]
    environment = {**os.environ, **odd, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(command, check=True, env=environment)
    for path in mine:
        assert path.read_bytes() == (tmp_path / f"other{path.suffix}").read_bytes()
    figure = simple()
    assert style.image(figure, "svg") == style.image(figure, "svg") == style.image(simple(), "svg")


def test_what_is_written(tmp_path, monkeypatch, users_dots):
    monkeypatch.setattr(style.image, "__defaults__", users_dots)
    pdf, png = style.save(simple(), tmp_path / "deep" / "lr0.1", ("pdf", "png"))
    assert pdf.name == "lr0.1.pdf" and imread(png).shape[:2] == (450, 600)  # 300 dots an inch
    assert b"/FontType 42" in pdf.read_bytes() or b"/CIDFontType2" in pdf.read_bytes()
    with style.use_sheet("single", "svg,pdf"):
        assert style.wide() == style.ONE_COLUMN == style.panels(1, 2)[0].get_figwidth()
        assert [p.suffix for p in style.save(simple(), tmp_path / "x")] == [".svg", ".pdf"]


@pytest.mark.parametrize("wrong", [{"width": "59"}, {"width": "wide"}, {"format": "png,gif"}])
def test_what_is_no_sheet_is_refused(wrong):
    with pytest.raises(FldiagError, match=next(iter(wrong))), style.use_sheet(**wrong):
        pass


# Shapes


@pytest.mark.parametrize("length", [1, 3])
def test_a_legend_fits_below_its_figure(length):
    labels = ["_hidden $x$", *(f"a run with a long name {i}" * length for i in range(4))]
    with style.paper():
        fig, _ = style.panels(2, 2.0)
        height = fig.get_figheight()
        style.legend(fig, [Line2D([], [])] * 5, labels)
        fig.canvas.draw()
    (legend,) = fig.legends
    assert legend.get_window_extent().width <= fig.bbox.width + 1
    assert fig.get_figheight() > height
    assert legend.get_texts()[0].get_text() == r"_hidden \$x\$"


def test_long_text_loses_its_middle():
    text = "digits-fedsol-s0-1a2b3c4d round 30 client 7"
    assert style.shorten(text, 11) == "digit…ent 7" and style.shorten("abc", 3) == "abc"


def test_a_line_has_a_gap_where_a_round_is_not_there():
    rows = table([{"metric": "m", "round": r, "value": r / 10, "stderr": 0.1} for r in (1, 2, 4)])
    with style.paper():
        ax = style.figure(2, 2).subplots()
        style.lines(ax, {"m": rows})
    np.testing.assert_equal(ax.lines[0].get_xydata(), [[1, 0.1], [2, 0.2], [3, np.nan], [4, 0.4]])
    band = np.concatenate([path.vertices for path in ax.collections[0].get_paths()])
    assert {(x, round(float(y), 6)) for x, y in band} >= {(1, 0.0), (1, 0.2), (2, 0.1), (2, 0.3)}
    assert all(float(tick).is_integer() for tick in ax.get_xticks())


def test_pairs_fill_both_halves_of_the_cells():
    rows = pd.DataFrame({"client": [1, 1, 4], "client_b": [4, 7, 7], "value": [0.1, 0.2, 0.3]})
    wide = style.square(rows)
    values = wide.to_numpy()
    np.testing.assert_array_equal(values, values.T)
    assert np.isnan(np.diag(values)).all() and values[0].tolist()[1:] == [0.1, 0.2]
    with style.paper():
        ax = style.figure(2, 2).subplots()
        style.cells(ax, wide, square=True)
    np.testing.assert_equal(np.ma.filled(ax.collections[0].get_array(), np.nan), values)
    assert [t.get_text() for t in ax.get_yticklabels()] == ["1", "4", "7"]


def test_bars_are_the_rows_with_their_errors():
    rows = table(
        [
            {"run": r, "layer": n, "value": v, "stderr": error}
            for r, n, v, error in (
                ("a", "conv", 1.0, 0.1),
                ("a", "fc", 3.0, 0.3),
                ("b", "conv", 2.0, 0.0),
            )
        ]
    )
    with style.paper():
        ax = style.figure(2, 2).subplots()
        style.bars(ax, rows, style.looks(rows["run"]))
    assert {bar.get_width() for bar in ax.patches if bar.get_width() > 0} == {1.0, 2.0, 3.0}
    assert [t.get_text() for t in ax.get_yticklabels()] == ["conv", "fc"]
    assert ax.get_ylim() == (1.5, -0.5)  # the first on top
    segments = [segment for group in ax.collections for segment in group.get_segments()]
    spans = [np.ptp(segment[:, 0]) for segment in segments if len(segment)]
    np.testing.assert_allclose(sorted(spans), [0.2, 0.6])  # none of an error of zero


@pytest.mark.parametrize(
    "name", ["matching", "forgetting", "drift", "lora", "personalise", "spectrum", "paths"]
)
def test_a_table_of_something_else_is_one_sentence(name):
    rows = table([{"metric": "loss", "value": 1, "run": "a"}])
    with pytest.raises(FldiagError, match=f"has not what the picture of '{name}' shows"):
        fldiag.draw(rows, name=name)


def test_a_run_may_have_the_name_of_a_moment():
    kinds_of = [("accuracy", m) for m in ("received", "trained", "aggregated")]
    rows = pd.concat([table(kinds.over_rounds(kinds_of), run=r) for r in ("trained", "other")])
    rows["run"] = np.repeat(["trained", "other"], len(rows) // 2)
    few = [{"metric": m, "round": 8, "client": 0, "index": 0, "value": 0.1, "run": r}
        for m in ("class_forgetting", "class_examples") for r in ("trained", "other")]  # fmt: skip
    fig = fldiag.draw(pd.concat([rows, table(few)]), name="forgetting")
    assert [ax.get_title() for ax in fig.axes[:3]] == list(forgetting.MOMENTS.values())
    assert all(len(ax.lines) == 2 for ax in fig.axes[1:3])


# Print

#: Pictures whose names stand on the line that they name, on purpose.
ON_WHAT_IT_NAMES = ("plane",)


def words_of(fig):
    """Texts that are drawn, with their corners [4, 2] in pixels, slanted as they are; ticks beyond the ends of their axis are
    not."""
    fig.draw_without_rendering()
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
def test_no_text_lies_on_another_on_a_mark_or_off_the_page(kind, width):
    with style.use_sheet(width):
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
