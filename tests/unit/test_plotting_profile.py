"""Profiles and paths: the curves are the table's, and the legend says curvature and barrier."""

import numpy as np
import pandas as pd
import pytest

from fldiag.diagnostics.profile import picture as profile
from fldiag.errors import FldiagError
from fldiag.plotting import style
from fldiag.results.table import table


def line(run="A", index=1, bend=4.0, top=0.0):
    x = np.linspace(-1, 1, 11)
    rows = [
        dict(
            metric="loss",
            run=run,
            index=index,
            x=v,
            value=1 + bend * v * v / 2 + top * v**4,
            stderr=0.1,
            slice="train",
            n_examples=1234,
        )
        for v in x
    ]
    rows += [
        dict(metric="parabola", run=run, index=index, x=v, value=1 + bend * v * v / 2) for v in x
    ]
    return [*rows, dict(metric="curvature", run=run, index=index, value=bend, residual=0.02)]


def way(run="A", index=1, client=None, barrier=0.5, scale=1.0, **more):
    t = np.linspace(0, 1, 11)
    who = {} if client is None else {"client": client}
    rows = [
        dict(
            metric="loss",
            run=run,
            index=index,
            x=v,
            value=scale * (1 + v + 4 * barrier * v * (1 - v)),
            **who,
        )
        for v in t
    ]
    place = {"x": 0.5, "stderr": 0.03} if barrier else {}
    return [
        *rows,
        dict(metric="barrier", run=run, index=index, value=scale * barrier, **place, **who, **more),
    ]


def texts(fig, panel=0):
    return [t.get_text() for t in fig.axes[panel].get_legend().get_texts()]


def curves(ax, label):
    return [np.column_stack(found.get_data()) for found in ax.lines if found.get_label() == label]


def test_curves_and_parabolas_are_the_tables_whatever_the_order_of_rows():
    frame = table([*line(top=3.0), *line(index=2, bend=1.0)]).sample(frac=1, random_state=0)
    fig = profile.draw(frame)
    x = np.linspace(-1, 1, 11)
    for drawn, expected in zip(
        curves(fig.axes[0], "loss"), (1 + 2 * x**2 + 3 * x**4, 1 + x**2 / 2), strict=True
    ):
        np.testing.assert_allclose(drawn, np.column_stack([x, expected]))
    np.testing.assert_allclose(curves(fig.axes[0], "parabola")[0][:, 1], 1 + 2 * x**2)
    assert (
        texts(fig)[:2] == ["direction 1: curvature 4", "direction 2: curvature 1 ± 0.02"]
        and "n = 1,234" in fig.axes[0].get_xlabel()
    )


def test_steep_parabolas_do_not_flatten_the_loss_and_panels_share_the_axis():
    frame = table([*line(bend=4.0), *line("B", bend=1000.0)])
    frame.loc[(frame.run == "B") & (frame.metric == "loss"), "value"] = 2.0
    fig = profile.draw(frame)
    assert fig.axes[0].get_ylim() == fig.axes[1].get_ylim() and fig.axes[0].get_ylim()[1] < 4


def test_barriers_stand_at_their_place_and_height():
    fig = profile.draw(table([*way(client=3), *way(index=2, client=8, barrier=0)]))
    (dot,) = curves(fig.axes[0], "barrier")
    np.testing.assert_allclose(dot, [[0.5, 2.0]])
    assert texts(fig) == ["client 3: barrier 0.5 ± 0.03", "client 8: no barrier"]
    assert "client" in fig.axes[0].get_xlabel() and fig.axes[0].get_yscale() == "linear"
    assert texts(profile.draw(table(way())))[0] == "way 1: barrier 0.5 ± 0.03"


def test_of_many_ways_the_largest_barrier_stands_out():
    rows = [
        r
        for i in range(9)
        for r in way(index=i + 1, client=10 * i, barrier=0.1 * i, buffers="interpolated")
    ]
    found = texts(profile.draw(table(rows)))
    assert found == [
        "median of 9 clients",
        "half of them",
        "all",
        "client 80: barrier 0.8 ± 0.03",
        "mean barrier of all 0.4",
        "batch-norm statistics: interpolated",
    ]
    flat = [r for i in range(9) for r in way(index=i + 1, client=i, barrier=0)]
    assert texts(profile.draw(table(flat)))[-1] == "no barrier on any"


def test_wide_ranges_of_ways_are_logarithmic():
    assert profile.draw(table([*way(), *way(index=2, scale=100)])).axes[0].get_yscale() == "log"


def test_runs_get_panels_and_labels_stay_text():
    frame = table([r for name in ("$x$ <b>", "B" * 90, "C", "D") for r in line(name)])
    fig = profile.draw(frame)
    with style.paper():
        fig.canvas.draw()
    assert len(fig.axes) == 4 and fig.axes[0].get_title() == r"\$x\$ <b>"


def test_drawing_is_repeatable_and_leaves_the_table_alone(tmp_path):
    frame = table([*line(), *line(index=2)])
    kept = frame.copy()
    one, two = (
        style.save(profile.draw(frame), tmp_path / f"{i}.png")[0].read_bytes() for i in (1, 2)
    )
    assert one == two
    pd.testing.assert_frame_equal(frame, kept)


def test_unfit_tables_are_refused():
    with pytest.raises(FldiagError, match="lacks the columns x"):
        profile.draw(table([dict(metric="loss", run="A", index=1, value=1.0)]))
    with pytest.raises(FldiagError, match="no rows of metric 'loss'"):
        profile.draw(table([dict(metric="barrier", run="A", index=1, x=1.0, value=1.0)]))
    with pytest.raises(FldiagError, match="finite loss"):
        profile.draw(table([dict(metric="loss", run="A", index=1, x=1.0, value=np.nan)]))
