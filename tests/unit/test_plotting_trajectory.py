"""On a landscape: how its values were found, and the trajectory or checkpoints that lie on it."""

from __future__ import annotations

import numpy as np

from fldiag.diagnostics.landscape import interactive
from fldiag.diagnostics.landscape import picture as landscape
from fldiag.diagnostics.landscape.surfaces import surfaces
from fldiag.plotting import pages
from fldiag.results.table import table


def rows(run: str, a: float, b: float, n: int = 9):
    grid = np.linspace(-1, 1, n)
    return [
        dict(metric="loss", run=run, x=x, y=y, value=1 + a * x * x / 2 + b * y * y / 2 + 0.1 * x)
        for y in grid
        for x in grid
    ]


def contours(fig):
    (ax,) = (ax for ax in fig.axes if ax.get_label().startswith("contours"))
    return ax


def page(tmp_path, frame) -> str:
    return pages.interactive(interactive.charts(frame))


def interpolated(run="A"):
    more = [
        dict(metric="evaluated", run=run, value=40),
        dict(metric="interpolation_error", run=run, value=0.0042, index=20),
    ]
    return [*rows(run, 8, 3), *more]


def walked(run="A"):
    way = [(0.8, -0.6), (0.5, 0.1), (0.1, 0.2), (0.0, 0.0)]
    return [
        *rows(run, 8, 3),
        *(
            dict(metric="trajectory", run=run, index=i, x=x, y=y, value=3.0 - i, round=10 * i)
            for i, (x, y) in enumerate(way)
        ),
    ], way


def test_the_page_says_how_the_values_were_found(tmp_path):
    frame = table(interpolated())
    lines = surfaces(frame)[0].interpolation()
    assert lines == ["interpolated from 40 of 81 points,", "error ≤ about 0.42 % of the range"]
    assert "error ≤ about 0.42 %" in page(tmp_path, frame)
    assert "all points evaluated" in page(tmp_path, table(rows("A", 8, 3)))
    assert surfaces(table(rows("A", 8, 3)))[0].interpolation() == []


def test_trajectory_lies_at_its_coordinates_in_order_whatever_the_order_of_rows():
    found, way = walked()
    fig = landscape.draw(table(found).sample(frac=1, random_state=1))
    ax = contours(fig)
    lines = {line.get_label(): np.column_stack(line.get_data()) for line in ax.lines}
    np.testing.assert_allclose(lines["trajectory"], way)
    np.testing.assert_allclose(lines["first"], way[:1])


def test_points_of_a_plane_are_marked_except_the_centre():
    found = rows("A", 8, 3) + [
        dict(metric="point", run="A", index=i, x=x, y=y, value=1.0)
        for i, (x, y) in enumerate([(0, 0), (0.8, 0), (-0.2, 0.5)])
    ]
    ax = contours(landscape.draw(table(found)))
    marks = [np.ravel(line.get_data()).tolist() for line in ax.lines if line.get_label() == "point"]
    assert marks == [[0.8, 0.0], [-0.2, 0.5]]


def test_page_lays_the_trajectory_on_the_surface(tmp_path):
    found, way = walked()
    scene, flat = interactive.charts(table(found)).charts
    trace = scene.traces[1]
    assert (
        list(zip(trace["x"], trace["y"], strict=True)) == way
        and trace["text"][1] == "round 10, loss 2"
    )
    grid = surfaces(table(found))[0]
    lift = np.array(trace["z"]) - grid.height_at(np.array(way))
    assert lift.min() >= 0 and lift.max() < 0.01 * (grid.highest - grid.lowest)
    assert (flat.traces[1]["x"], flat.traces[1]["y"]) == (trace["x"], trace["y"])


def test_height_between_grid_points_is_bilinear_and_unknown_outside():
    grid = surfaces(
        table(
            [
                dict(metric="loss", run="A", x=x, y=y, value=1 + 2 * x + 3 * y + 4 * x * y)
                for x in (0.0, 0.5, 2.0)
                for y in (-1.0, 1.0)
            ]
        )
    )[0]
    places = np.array([(0.3, 0.2), (2.0, 1.0), (1.1, -1.0), (2.1, 0.0), (0.0, -1.5)])
    known = [1 + 2 * x + 3 * y + 4 * x * y for x, y in places[:3]]
    found = grid.height_at(places)
    np.testing.assert_allclose(found[:3], known)
    assert np.isnan(found[3:]).all()
