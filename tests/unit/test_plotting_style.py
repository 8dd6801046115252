"""The paper style: no traces left, same bytes twice, complete files, looks that can be told apart."""

from __future__ import annotations

import subprocess
import sys

import matplotlib
import numpy as np
import pandas as pd
import pytest

from fldiag.errors import FldiagError
from fldiag.plotting import sheet, style
from fldiag.results import files
from fldiag_papers import shapes


def simple(value: float = 1.0):
    with style.paper():
        fig = style.figure(2, 1.5)
        fig.subplots().plot([0, 1], [0, value])
    return fig


def test_paper_leaves_the_settings_of_matplotlib_alone_also_after_an_exception():
    before = dict(matplotlib.rcParams)
    with pytest.raises(ZeroDivisionError), style.paper():
        assert matplotlib.rcParams["pdf.fonttype"] == 42
        1 / 0  # noqa: B018
    assert dict(matplotlib.rcParams) == before


def test_the_users_own_settings_do_not_show_through(tmp_path):
    plain = style.save(simple(), tmp_path / "plain.png")[0].read_bytes()
    with matplotlib.rc_context({"lines.linewidth": 9.0, "font.size": 30, "axes.grid": True}):
        own = style.save(simple(), tmp_path / "own.png")[0].read_bytes()
    assert own == plain


def test_no_window_system_and_no_pyplot_is_touched():
    code = (
        "import sys; from fldiag.plotting import curves, partition, layers, style; "
        "print('matplotlib.pyplot' in sys.modules, 'plotly' in sys.modules, 'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False", "False"]


@pytest.mark.parametrize("ending", ["png", "pdf"])
@pytest.mark.slow
def test_same_figure_same_bytes_in_every_process(tmp_path, ending):
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); from test_plotting_style import simple; "
        "from fldiag.plotting import style; style.save(simple(), sys.argv[1])"
    )
    here = str(__file__).rsplit("/", 1)[0]
    other = tmp_path / f"other.{ending}"
    import os

    environment = {
        **os.environ,
        "PYTHONHASHSEED": "12345",
        "TZ": "Asia/Tokyo",
        "SOURCE_DATE_EPOCH": "1",
    }
    subprocess.run([sys.executable, "-c", code, str(other), here], check=True, env=environment)
    mine = style.save(simple(), tmp_path / f"mine.{ending}")[0]
    assert mine.read_bytes() == other.read_bytes()
    assert style.save(simple(2.0), tmp_path / f"x.{ending}")[0].read_bytes() != b""
    assert b"CreationDate" not in mine.read_bytes()


def test_png_has_300_dots_an_inch_and_pdf_holds_truetype(tmp_path):
    from matplotlib.image import imread

    pdf, png = style.save(simple(), tmp_path / "deep" / "figure")
    assert imread(png).shape[:2] == (450, 600)
    assert b"/FontType 42" in pdf.read_bytes() or b"/CIDFontType2" in pdf.read_bytes()
    assert b"/Type3" not in pdf.read_bytes()


def test_paths_with_dots_keep_their_name_when_formats_are_given(tmp_path):
    assert [p.name for p in style.save(simple(), tmp_path / "lr0.1", ["pdf"])] == ["lr0.1.pdf"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lr0.1.pdf"]


@pytest.mark.parametrize("name", ["a.gif", "a.jpg", "lr0.1"])
def test_unknown_format_is_refused_before_anything_is_written(tmp_path, name):
    with pytest.raises(FldiagError, match=r"\.pdf, \.png, \.svg") as caught:
        style.save(simple(), tmp_path / name)
    assert caught.value.usage and not list(tmp_path.iterdir())


def test_write_replaces_the_old_file_whole_or_not_at_all(tmp_path, monkeypatch):
    target = tmp_path / "a.png"
    target.write_bytes(b"old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(FldiagError, match="No space left"):
        files.write_bytes(target, b"new and long")
    assert target.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["a.png"]


def test_a_folder_that_is_a_file_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FldiagError, match="cannot write"):
        files.write_bytes(tmp_path / "file" / "a.png", b"x")


def lightness(color: str) -> float:
    r, g, b = matplotlib.colors.to_rgb(color)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def test_looks_differ_without_colour_and_known_methods_keep_theirs():
    names = [f"run {i}" for i in range(14)]
    found = style.looks(names)
    assert len({(v.marker, str(v.dash)) for v in found.values()}) == 14  # still apart in greyscale
    assert max(lightness(v.color) for v in found.values()) < 0.75  # and visible on white
    assert len(set(style.looks(map(str, range(49))).values())) == 49
    alone, crowd = (
        style.looks(["FedSOL rho=2"]),
        style.looks(["other", "FedProx", "fedsol", "FedAvg"]),
    )
    assert alone["FedSOL rho=2"] == crowd["fedsol"] == style.looks(["fed-sol"])["fed-sol"]
    assert style.looks(["FedAvgM"])["FedAvgM"] == style.look(0)  # merely the first free look ...
    assert style.looks(["FedAvgM", "FedAvg"])["FedAvg"] == style.look(
        0
    )  # ... which FedAvg itself precedes in


def test_two_runs_of_one_method_look_different():
    assert len(set(style.looks(["fedsol-1", "fedsol-2", "fedsol"]).values())) == 3


def test_colormap_is_monotone_in_lightness():
    ramp = [lightness(c) for c in matplotlib.colormaps[style.COLORMAP](np.linspace(0, 1, 64))]
    assert (np.diff(ramp) > 0).all()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (12.3456, "12.35"),
        (0.0, "0"),
        (-3.0, "−3"),
        (123456.0, "1.235×10⁵"),
        (2e-7, "2×10⁻⁷"),
        (None, "–"),
        (float("nan"), "–"),
        (float("inf"), "∞"),
    ],
)
def test_numbers_read_well(value, text):
    assert style.number(value) == text


def test_wrapped_text_fits_the_estimated_width():
    for text in (
        "W" * 90,
        "i" * 400,
        "a few words of a label",
        "one_word_that_is_far_too_long_for_its_place",
        "",
    ):
        for lines in (1, 2, 3):
            rows = style.wrap(text, 1.2, lines, 8.5)
            assert 1 <= len(rows) <= lines and all(
                style.text_width(row, 8.5) <= 1.2 for row in rows
            )
    assert " ".join(style.wrap("a few words of a label", 0.7, 3)) == "a few words of a label"
    assert style.wrap("seed=1 " + "x" * 99 + " seed=2", 1.0)[0].startswith("seed=1")
    assert style.wrap("seed=1 " + "x" * 99 + " seed=2", 1.0)[0].endswith("seed=2")


def test_shorten_keeps_both_ends_and_the_width():
    assert style.shorten("abcdefghij-seed3", 9) == "abcd…eed3"
    assert style.shorten("short\n label", 20) == "short label"
    assert all(len(style.shorten("x" * 50, n)) == n for n in range(3, 50))


def test_legend_shows_underscores_and_dollars_as_they_are(tmp_path):
    with style.paper():
        fig = style.figure(2, 2)
        (line,) = fig.subplots().plot([0, 1])
        made = style.legend(fig, [line, line], ["_hidden", "a$x_1$b^$"])
    style.save(fig, tmp_path / "a.png")  # mathematics would fail to parse here
    assert [t.get_text().replace(r"\$", "$") for t in made.get_texts()] == ["_hidden", "a$x_1$b^$"]


def rounds_of_two():
    return pd.DataFrame(
        [
            {"metric": m, "label": "a", "round": r, "value": 0.1 * r, "seed": 0}
            for m in ("accuracy", "loss")
            for r in (1, 2, 3)
        ]
    )


def two_panels():
    return shapes.curves(rounds_of_two(), "metric", {"accuracy": "accuracy", "loss": "loss"})


def test_a_sheet_sets_width_and_formats_of_all_pictures_within_it(tmp_path):
    with sheet.use_sheet("single", "svg,pdf"):
        inner = two_panels()
        written = style.write(inner, tmp_path / "lr0.1")
    outer = two_panels()
    assert [p.name for p in written] == ["lr0.1.svg", "lr0.1.pdf"]
    assert inner.get_figwidth() == style.ONE_COLUMN and outer.get_figwidth() == style.TWO_COLUMNS
    assert (
        len({ax.get_position().x0 for ax in inner.axes})
        == 1
        != len({ax.get_position().x0 for ax in outer.axes})
    )
    with sheet.use_sheet("single", "svg,pdf"):
        again = style.write(two_panels(), tmp_path / "again")
    assert [p.read_bytes() for p in again] == [p.read_bytes() for p in written]


@pytest.mark.parametrize(
    ("width", "format"), [("wide", None), ("12", None), ("nan", None), (None, "gif"), (None, "")]
)
def test_a_width_or_format_that_cannot_be_is_refused(width, format):
    with pytest.raises(FldiagError) as caught, sheet.use_sheet(width, format):
        pass
    assert caught.value.usage and caught.value.remedy


@pytest.mark.parametrize(
    ("curve", "side"),
    [
        ([0.1, 0.15, 0.17, 0.18, 0.185], "bottom"),
        ([0.1, 0.15, 0.21, 0.215, 0.22], "top"),
        ([0.3, 0.4, 0.5, 0.6, 0.7], "bottom"),
    ],
)
def test_the_name_of_the_ceiling_stands_where_fewer_points_are(curve, side):
    """Vertical alignment "top": the text is below its line."""
    ax = style.figure(2, 1.5).subplots()
    ax.plot(range(len(curve)), curve)
    ax.set_ylim(0, 0.8)
    style.ceiling(ax, 0.2)
    assert [(text.get_text(), text.get_va()) for text in ax.texts] == [
        ("ceiling of own classes", side)
    ]
