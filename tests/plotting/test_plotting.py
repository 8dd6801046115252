"""The style: looks that every eye can tell apart, files that are equal for equal figures, and no text on another."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from matplotlib.lines import Line2D
from matplotlib.text import Text

import fldiag
from fldiag import registry
from fldiag.errors import FldiagError
from fldiag.plotting import curves, sheet, style, words
from fldiag.plotting.heatmap import of_pairs
from fldiag.plotting.tables import need, of_clients, select
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


def test_every_method_has_a_display_name():
    assert set(words.METHODS) == set(registry.method.names())
    for text in ("my_fedavg_thing", "fedavgx", "the rho of it", "moon", "conv1.weight"):
        assert words.label(text) == text
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
    (plain,) = style.save(simple(), tmp_path / "plain.png")
    with matplotlib.rc_context({"lines.linewidth": 9.0, "font.size": 30, "axes.grid": True}):
        (other,) = style.save(simple(), tmp_path / "other.png")
    assert plain.read_bytes() == other.read_bytes()


@pytest.mark.slow
def test_equal_figures_give_equal_bytes_in_every_process(tmp_path):
    code = "import sys; sys.path.insert(0, sys.argv[2]); from test_plotting import *; style.save(simple(), sys.argv[1])"
    odd = {"PYTHONHASHSEED": "12345", "TZ": "Asia/Tokyo", "SOURCE_DATE_EPOCH": "1"}
    for ending in ("png", "pdf", "svg"):
        paths = [tmp_path / f"{name}.{ending}" for name in ("mine", "other")]
        style.save(simple(), paths[0])
        command = [sys.executable, "-c", code, str(paths[1]), str(Path(__file__).parent)]
        environment = {**os.environ, **odd, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run(command, check=True, env=environment)
        assert paths[0].read_bytes() == paths[1].read_bytes()
    figure = simple()
    assert style.image(figure, "svg") == style.image(figure, "svg") == style.image(simple(), "svg")


def test_what_is_written(tmp_path):
    pdf, png = style.save(simple(), tmp_path / "deep" / "lr0.1", ("pdf", "png"))
    assert pdf.name == "lr0.1.pdf" and imread(png).shape[:2] == (450, 600)  # 300 dots an inch
    assert b"/FontType 42" in pdf.read_bytes() or b"/CIDFontType2" in pdf.read_bytes()
    with sheet.use_sheet("single", "svg,pdf"):
        assert style.wide() == style.ONE_COLUMN == style.panels(1, 2)[0].get_figwidth()
        assert [p.suffix for p in style.write(simple(), tmp_path / "x")] == [".svg", ".pdf"]
    for name in ("a.gif", "lr0.2"):
        with pytest.raises(FldiagError, match=r"\.pdf, \.png, \.svg"):
            style.save(simple(), tmp_path / name)


@pytest.mark.parametrize("wrong", [{"width": "59"}, {"width": "wide"}, {"format": "png,gif"}])
def test_what_is_no_sheet_is_refused(wrong):
    with pytest.raises(FldiagError, match=next(iter(wrong))), sheet.use_sheet(**wrong):
        pass


# Shapes


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_a_legend_fits_below_its_figure(columns):
    labels = ["_hidden $x$", *(f"a run with a long name {i}" * (4 - columns) for i in range(4))]
    with style.paper():
        fig, _ = style.panels(2, 2.0)
        height = fig.get_figheight()
        legend = style.legend(fig, [Line2D([], [])] * 5, labels, ncols=columns)
        fig.canvas.draw()
    assert legend.get_window_extent().width <= fig.bbox.width + 1
    assert fig.get_figheight() > height
    assert legend.get_texts()[0].get_text() == r"_hidden \$x\$"


def test_long_text_is_cut_in_the_middle_or_wrapped():
    text = "digits-fedsol-s0-1a2b3c4d round 30 client 7"
    assert style.shorten(text, 11) == "digit…ent 7" and style.shorten("abc", 3) == "abc"
    for inches, lines in ((1.0, 1), (1.5, 2), (9.0, 1)):
        rows = style.wrap(text, inches, lines)
        assert len(rows) <= lines and all(style.text_width(r) <= inches * 1.1 for r in rows)
    assert style.wrap(text, 9.0) == [text]


def test_a_line_has_a_gap_where_a_round_is_not_there():
    rows = table([{"metric": "m", "round": r, "value": r / 10, "stderr": 0.1} for r in (1, 2, 4)])
    with style.paper():
        ax = style.figure(2, 2).subplots()
        curves.mean_line(ax, rows, style.look(1))
        curves.rounds_axis(ax)
    np.testing.assert_equal(ax.lines[0].get_xydata(), [[1, 0.1], [2, 0.2], [3, np.nan], [4, 0.4]])
    assert all(float(tick).is_integer() for tick in ax.get_xticks())


def test_pairs_fill_both_halves_and_crowds_become_percentiles():
    rows = pd.DataFrame({"client": [1, 1, 4], "client_b": [4, 7, 7], "value": [0.1, 0.2, 0.3]})
    cells = of_pairs(rows).to_numpy()
    np.testing.assert_array_equal(cells, cells.T)
    assert np.isnan(np.diag(cells)).all() and cells[0].tolist()[1:] == [0.1, 0.2]
    crowd = of_clients([{"client": i, "loss": i / 100, "gap": None} for i in range(101)])
    assert [row["client"] for row in crowd[::5]] == ["smallest", "median", "largest"]
    assert [row["loss"] for row in crowd[::5]] == [0, 0.5, 1] and crowd[0]["gap"] is None


def test_a_table_that_does_not_fit_is_one_sentence():
    rows = table([{"metric": "loss", "value": 1}])
    for call, text in (
        (lambda: need(rows, ("x", "value"), "plane"), "plane lacks the columns x"),
        (lambda: need(rows[:0], ("value",), "plane"), "is empty"),
        (lambda: need(None, ("value",), "plane"), "lacks the columns value"),
        (lambda: select(rows, "trace", "plane"), "no rows of metric 'trace'"),
    ):
        with pytest.raises(FldiagError, match=text):
            call()


# Print


def texts_of(fig):
    """Texts that are drawn, with their boxes; ticks beyond the ends of their axis are not."""
    fig.canvas.draw()
    hidden = {
        label
        for ax in fig.axes
        for axis in (ax.xaxis, ax.yaxis)
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
        for label in (tick.label1, tick.label2)
    }
    drawn = [t for t in fig.findobj(Text) if t.get_text().strip() and t.get_visible()]
    return [(t, t.get_window_extent()) for t in drawn if t not in hidden]


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    folder = Path(__file__).parents[2] / "checkpoints" / "example"
    names = [str(folder / f"{method}-digits.pt") for method in ("fedsol", "fedavg")]
    few = {"samples": 60}
    return {
        "spectrum": fldiag.diagnose(names, "spectrum", k=3, per_layer=True, **few),
        "sharpness": fldiag.diagnose(names, "sharpness", **few),
        "paths": fldiag.diagnose(names, "paths", points=5, **few),
        "diff": fldiag.diff(*names, numbers=["accuracy", "loss", "lambda_1"]),
    }


@pytest.mark.parametrize("width", [None, "single"])
@pytest.mark.parametrize("name", ["spectrum", "sharpness", "paths", "diff", "layers"])
def test_no_text_lies_on_another_or_off_the_page(name, width, tables):
    with sheet.use_sheet(width), style.paper():
        if name == "layers":
            fig = registry.diagnostic.get("spectrum").drawings["-layers"](tables["spectrum"])
        else:
            fig = fldiag.draw(tables[name])
        texts = texts_of(fig)
    assert len(texts) > 5 and all(text.get_fontsize() >= 6 for text, _ in texts)
    for text, box in texts:
        assert min(box.x0, box.y0, fig.bbox.x1 - box.x1, fig.bbox.y1 - box.y1) > -1, text
    for (one, a), (other, b) in itertools.combinations(texts, 2):
        across, down = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert min(across, down) <= 1, f"{one.get_text()!r} lies on {other.get_text()!r}"
