"""Landscapes, printed and interactive: what is drawn is what the table says, on one scale, and labels are inert."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re
from importlib import resources

import matplotlib
import numpy as np
import pandas as pd
import pytest
import reports

from fldiag.diagnostics.landscape import interactive
from fldiag.diagnostics.landscape import picture as landscape
from fldiag.diagnostics.landscape.surfaces import scale, surfaces
from fldiag.errors import FldiagError, printable
from fldiag.plotting import pages, style
from fldiag.results.table import table

EVIL = "<img src=x onerror=alert(1)></script><b>$x$ & \u2028'\""


def rows(run: str, a: float, b: float, n: int = 9, low: float = 1.0, power: int = 1, **more):
    grid = np.linspace(-1, 1, n)
    out = [
        dict(
            metric="loss",
            run=run,
            x=x,
            y=y,
            value=low + (a * x * x / 2 + b * y * y / 2 + 0.1 * x) ** power,
            stderr=0.01 * a,
            slice="test",
            n_examples=1234,
            **more,
        )
        for y in grid
        for x in grid
    ]
    out += [
        dict(metric="eigenvalue", run=run, index=k, value=a / k, residual=0.25, converged=True)
        for k in range(1, 6)
    ]
    return out


def axes(fig, kind: str):
    return [ax for ax in fig.axes if ax.get_label().startswith(kind)]


def test_the_drawn_spline_is_the_surface_whatever_the_order_of_rows():
    """A cubic spline of a quadratic is that quadratic; the faces are the means of its corners."""
    frame = table(rows("A", 8, 3)).sample(frac=1, random_state=0)
    (grid,) = surfaces(frame)
    x, y, z = grid.finely(scale([grid]))
    assert len(x) >= 100 and not np.ma.getmaskarray(z).any()
    u, v = np.meshgrid(x, y)
    np.testing.assert_allclose(
        z, np.maximum(1 + 4 * u * u + 1.5 * v * v + 0.1 * u, grid.lowest), rtol=1e-9
    )
    (ax,) = axes(landscape.draw(frame), "surface")
    faces = np.asarray(ax.collections[0].get_array())
    np.testing.assert_allclose(
        faces, ((z[1:, 1:] + z[1:, :-1] + z[:-1, 1:] + z[:-1, :-1]) / 4).ravel(), rtol=1e-9
    )


def test_what_is_clipped_or_unknown_is_left_blank_and_the_rest_makes_no_waves():
    frame = table([*rows("wild", 3, 3, n=21, power=6, low=-1), *rows("flat", 1, 1, n=21, low=-1)])
    frame.loc[0, "value"] = np.inf
    grids = surfaces(frame)
    shared, grid = scale(grids), grids[0]
    x, y, z = grid.finely(shared)
    blank = np.ma.getmaskarray(z)
    assert blank[0, 0] and not blank[len(y) // 2, len(x) // 2] and z.min() >= grid.lowest
    assert shared.clip is not None and shared.clip < shared.top
    for ax in axes(landscape.draw(frame), "surface"):
        assert np.nanmax(np.ma.filled(ax.collections[0].get_array(), np.nan)) <= shared.clip


def test_contour_lines_lie_at_their_levels_with_x_along_x():
    (ax,) = axes(landscape.draw(table(rows("A", 8, 3, n=41))), "contours")
    lines = ax.collections[1]
    checked = 0
    for level, path in zip(lines.levels, lines.get_paths(), strict=True):
        x, y = path.vertices.T if len(path.vertices) else (np.array([]), np.array([]))
        # The asymmetric term 0.1 x tells left from right and x from y.
        np.testing.assert_allclose(1 + 4 * x * x + 1.5 * y * y + 0.1 * x, level, atol=0.02)
        checked += len(x)
    assert checked > 100


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6])
def test_columns_share_range_colours_and_axes(count):
    fig = landscape.draw(
        table([r for i in range(count) for r in rows(f"run {i}", 10 / (i + 1), 3, low=1 + i)])
    )
    tops, flats = axes(fig, "surface"), axes(fig, "contours")
    assert len(tops) == len(flats) == count
    assert len({ax.get_zlim() for ax in tops}) == 1
    assert (
        len({ax.get_xlim() + ax.get_ylim() for ax in tops})
        == len({ax.get_xlim() for ax in flats})
        == 1
    )
    assert len({ax.collections[0].get_clim() for ax in (*tops, *flats)}) == 1
    assert len({tuple(ax.collections[0].levels) for ax in flats}) == 1
    for ax in flats:  # the weights
        assert [np.ravel(line.get_data()).tolist() for line in ax.lines] == [[0.0, 0.0]] * 2


def boxes(fig):
    with style.paper():
        fig.canvas.draw()
    renderer = fig.canvas.get_renderer()
    texts = list(fig.texts)
    for ax in axes(fig, "contours"):
        texts += [
            t
            for t in (*ax.get_xticklabels(), *ax.get_yticklabels(), ax.xaxis.label, ax.yaxis.label)
            if t.get_visible() and t.get_text()
        ]
    return [(t.get_text(), t.get_window_extent(renderer)) for t in texts]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1.0, 1e6])
@pytest.mark.slow
def test_labels_never_overlap_nor_leave_the_page(count, size):
    names = [
        "FedAvg",
        "a very long label lr=0.01 momentum=0.9 seed=3 round=300",
        "W" * 60,
        "FedSOL",
    ]
    fig = landscape.draw(
        table([r for i in range(count) for r in rows(names[i], size * 8, size * 3)])
    )
    found = boxes(fig)
    width, height = fig.get_size_inches() * fig.dpi
    for i, (text, box) in enumerate(found):
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, text
        for other, against in found[i + 1 :]:
            assert not box.overlaps(against), (text, other)
    assert width <= style.TWO_COLUMNS * fig.dpi + 1


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_names_of_a_surface_s_axes_stand_clear_of_the_contours_below(count):
    fig = landscape.draw(
        table([r for k in range(count) for r in rows(f"run {k}", 8, 3)]),
        names=("eigenvector 1", "eigenvector 2"),
    )
    fig.canvas.draw()
    for above, below in zip(axes(fig, "surface"), axes(fig, "contours"), strict=True):
        lowest = min(axis.label.get_window_extent().y0 for axis in (above.xaxis, above.yaxis))
        assert lowest >= below.get_window_extent().y1


def test_under_the_contours_stand_sharpness_and_ratio():
    short = [t.get_text() for t in landscape.draw(table(rows("A", 8, 3))).texts]
    assert short == ["A", "λ₁ = 8, λ₁/λ₅ = 5\nspline through 9 × 9 points"]


def test_given_ratio_is_preferred_to_the_quotient():
    frame = table([*rows("A", 8, 3), dict(metric="eigenvalue_ratio", run="A", index=5, value=7.5)])
    assert surfaces(frame)[0].ratio == 7.5 and surfaces(frame)[0].centre == 1.0


def test_a_ratio_names_the_eigenvalue_that_was_computed():
    frame = table([*rows("A", 8, 3), dict(metric="eigenvalue_ratio", run="A", index=12, value=7.5)])
    assert "λ₁/λ₁₂ = 7.5" in page(frame)[0]
    assert surfaces(frame)[0].numbers()[0] == "λ₁ = 8, λ₁/λ₁₂ = 7.5"


def test_automatic_clip_spares_bowls_and_cuts_explosions_and_says_so():
    bowls = surfaces(
        table([*rows("sharp", 500, 0, low=-1), *rows("flat", 1, 1), *rows("flatter", 0.1, 0.1)])
    )
    assert scale(bowls).clip is None and not scale(bowls).log
    wild = surfaces(table([*rows("wild", 20, 20, n=21, power=6, low=-1), *rows("flat", 1, 1)]))
    found = scale(wild)
    assert found.clip is not None and found.clip < found.top == max(g.highest for g in wild)
    assert (
        found.high == found.clip and found.height(np.array([np.inf, found.top])).max() == found.clip
    )
    assert any("clipped" in note for note in found.notes())


def test_infinite_and_undefined_losses_are_drawn_at_the_top_or_left_out_and_counted():
    frame = table(rows("A", 8, 3))
    frame.loc[0, "value"], frame.loc[1, "value"] = np.inf, np.nan
    grids = surfaces(frame)
    shared = scale(grids)
    assert shared.overflows == 2 and "2 points" in " ".join(shared.notes())
    shown = shared.height(grids[0].loss)
    assert shown[0, 0] == shared.high and np.isnan(shown[0, 1])
    landscape.draw(frame)
    frame["value"] = np.nan
    with pytest.raises(FldiagError, match="finite loss"):
        landscape.draw(frame)


def test_log_heights_are_decades_and_auto_takes_them_for_wide_ranges():
    grids = surfaces(table([*rows("A", 8e5, 3), *rows("B", 1, 1)]))
    shared = scale(grids)
    assert (
        shared.log
        and shared.clip is None
        and shared.label(4.0) == "10⁴"
        and shared.label(1.0) == "10"
    )
    np.testing.assert_allclose(10 ** shared.height(grids[0].loss), grids[0].loss)
    assert not scale(surfaces(table(rows("A", 8, 3)))).log


@pytest.mark.parametrize(
    "loss", [(1.0, 70.0), (1e-9, 2e-9), (-3.0, 5.0), (1e6, 5e6), (2.0, 2.0), (1e-8, 1e9)]
)
def test_ticks_are_round_and_within(loss):
    grid = table(
        [dict(metric="loss", run="A", x=x, y=y, value=loss[x * y]) for x in (0, 1) for y in (0, 1)]
    )
    shared = scale(surfaces(grid))
    assert shared.high > shared.low
    assert all(shared.low - 1e-6 <= t <= shared.high + 1e-6 for t in shared.ticks())
    assert len(shared.ticks()) <= 9
    if loss[0] < loss[1]:
        texts = [shared.label(t) for t in shared.ticks(4)]
        assert len(texts) >= 2 and len(set(texts)) == len(texts)


def test_unfit_tables_are_refused_by_name():
    good = table(rows("A", 8, 3))
    cases = [
        (good.drop(columns=["x", "value"]), "lacks the columns x, value"),
        (good.iloc[:0], "is empty"),
        (good[good.metric == "eigenvalue"], "no rows of metric 'loss'.*eigenvalue"),
        (good.drop(index=5), "80 points, which is not a full grid of 9 x by 9 y"),
        (pd.concat([good, good.iloc[[3]]]), "2 losses at"),
        (good.assign(x=np.nan), "without coordinates"),
    ]
    for frame, message in cases:
        with pytest.raises(FldiagError, match=message):
            landscape.draw(frame)
    with pytest.raises(FldiagError, match="got list"):
        landscape.draw([1])


@pytest.mark.slow
def test_drawing_is_repeatable_to_the_byte_and_leaves_no_settings_behind(tmp_path):
    before, frame = dict(matplotlib.rcParams), table([*rows("A", 8, 3), *rows(EVIL, 2, 1)])
    kept = frame.copy()
    for ending in ("png", "pdf"):
        one, two = (
            style.save(landscape.draw(frame), tmp_path / f"{i}.{ending}")[0].read_bytes()
            for i in (1, 2)
        )
        assert one == two
    texts = [page(frame)[0] for _ in range(2)]
    assert texts[0] == texts[1] and dict(matplotlib.rcParams) == before
    pd.testing.assert_frame_equal(frame, kept)


class Reader(html.parser.HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.tags, self.words, self.handlers, self.sources = [], "", [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.handlers += [k for k, _ in attrs if k.startswith("on")]
        self.sources += [v for k, v in attrs if k in ("src", "href")]

    def handle_data(self, data):
        self.words += data


def page(frame, **options) -> tuple[str, Reader]:
    text = pages.interactive(interactive.charts(frame, **options))
    return text, Reader(text)


def charts_of(text):
    return json.loads(
        reports.unpacked(re.search(r'id="packed-charts">(.*?)</script>', text, re.S).group(1))
    )


def test_page_is_inert_and_self_contained():
    frame = table([*rows(EVIL, 8, 3), *rows("B", 2, 1)])
    frame["slice"] = EVIL
    text, read = page(frame, title=EVIL, names=(EVIL, "<i>y</i>"))
    assert (
        "img" not in read.tags
        and "b" not in read.tags
        and not read.handlers
        and all(source.startswith("#") for source in read.sources)
    )
    assert read.tags.count("script") == 3 and text.count("</script") == 3
    assert read.words.count(printable(EVIL)) >= 5  # title, heading, scene, table: shown as it is
    policy = (
        re.search('Content-Security-Policy" content="([^"]*)"', text).group(1).replace("&#39;", "'")
    )
    assert (
        "default-src 'none'" in policy
        and "eval" not in policy
        and "'unsafe-inline'" not in re.search("script-src[^;]*", policy).group()
    )
    shown = charts_of(text)[0]["layout"]["scene"]["xaxis"]["title"]["text"]
    assert "<" not in shown and "&lt;img" in shown  # plotly reads tags in its titles


def test_page_allows_exactly_the_scripts_it_holds():
    text, _ = page(table(rows("A", 8, 3)))
    policy = re.search(r"script-src ([^;]*);", text.replace("&#39;", "'")).group(1)
    (packed,) = re.findall(r'<script type="text/plain" id="packed-plotly">(.*?)</script>', text)
    scripts = [
        reports.unpacked(packed).decode(),
        *re.findall(r"<script>(.*?)</script>", text, re.S),
    ]
    digests = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    assert (
        len(scripts) == 2
        and re.findall(r"'sha256-([^']*)'", policy.replace("&#43;", "+")) == digests
    )


def test_page_holds_the_tables_numbers_one_scene_a_run_on_one_scale():
    frame = table([*rows("A", 3, 3, n=21, power=6, low=-1), *rows("B", 2, 1, low=-1)])
    frame.loc[0, "value"] = np.nan
    shared = scale(surfaces(frame))
    text, read = page(frame)
    charts = charts_of(text)
    assert [c["kind"] for c in charts] == ["scene", "map"] * 2
    assert text.count('class="plot scene"') == text.count('class="plot map"') == 2
    scenes, maps = ([c["traces"][0] for c in charts[i::2]] for i in (0, 1))
    assert (
        len({(s["cmin"], s["cmax"]) for s in scenes} | {(m["zmin"], m["zmax"]) for m in maps}) == 1
    )
    assert charts[0]["layout"]["scene"]["zaxis"]["range"][1] == shared.clip < shared.top
    for scene, flat, grid in zip(scenes, maps, surfaces(frame), strict=True):
        np.testing.assert_allclose(
            np.array(scene["z"], dtype=float), np.minimum(grid.loss, shared.clip)
        )
        assert scene["x"] == grid.x.tolist() and scene["y"] == grid.y.tolist()
        assert (flat["x"], flat["y"], flat["z"]) == (scene["x"], scene["y"], scene["z"])
    assert scenes[0]["z"][0][0] is None
    corner = scenes[0]["text"][-1][0]  # beyond the clip the true loss is still told
    true = surfaces(frame)[0].loss[-1, 0]
    assert (
        corner.startswith(f"x -1<br>y 1<br>loss {true:.6g}<br>stderr 0.03") and true > shared.clip
    )
    assert "clipped at" in read.words and "undefined loss" in read.words
    assert re.search(r"<td[^>]*>3</td><td[^>]*>0\.25</td><td[^>]*>λ₁/λ₅ = 5</td>", text)


def test_page_never_offers_to_send_the_data_away():
    script = (resources.files("fldiag.plotting") / "templates" / "page.js").read_text("utf-8")
    assert "modeBarButtons:" in script and "showSendToCloud: false" in script
    assert not re.search(r"https?://|fetch\(|XMLHttpRequest|innerHTML|eval\(", script)
