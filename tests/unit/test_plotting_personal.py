"""The picture of personal accuracy shows the clients of the table, and refuses what it cannot show."""

import numpy as np
import pandas as pd
import pytest

from fldiag.diagnostics import personalise as personal
from fldiag.errors import FldiagError


def table(run="fedavg", shift=0.0):
    common = {"metric": "personal_accuracy", "run": run}
    rows = [
        {**common, "scope": "client", "client": i, "index": e, "value": 0.3 + 0.1 * i + e / 20}
        for e in (0, 1)
        for i in range(5)
    ]
    rows += [{**common, "scope": "global", "index": e, "value": 0.99} for e in (0, 1)]
    return pd.DataFrame(rows).assign(value=lambda rows: rows["value"] + shift)


def test_every_client_is_a_dot_beside_mean_and_deviation():
    frame = table()
    frame.loc[0, "value"] = np.nan  # without test examples
    (ax,) = personal.draw(frame).axes
    dots = ax.get_lines()[0]
    assert dots.get_xdata().tolist() == [0] * 4 + [1] * 5
    expected = [0.4, 0.5, 0.6, 0.7, 0.35, 0.45, 0.55, 0.65, 0.75]
    assert dots.get_ydata() == pytest.approx(expected)
    means, _, (bars,) = ax.containers[0].lines
    assert means.get_ydata() == pytest.approx([0.55, 0.55])
    ends = np.array(bars.get_segments())[:, :, 1]
    deviations = [np.std(expected[:4]), np.std(expected[4:])]
    assert np.diff(ends, axis=1)[:, 0] / 2 == pytest.approx(deviations)


def test_runs_stand_side_by_side_without_overlap():
    fig = personal.draw(pd.concat([table(), table("fedbabu", shift=0.02)]))
    places = [v for c in fig.axes[0].containers for v in c.lines[0].get_xdata()]
    assert len(set(places)) == 4 and max(places[0], places[2]) < min(places[1], places[3])
    texts = [t.get_text() for t in fig.legends[0].get_texts()]
    assert texts == ["FedAvg", "FedBABU"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda f: f.assign(metric="loss"), "no rows of metric"),
        (lambda f: f[f["scope"] == "global"], "no client"),
    ],
)
def test_unfit_tables(change, expected):
    with pytest.raises(FldiagError, match=expected):
        personal.draw(change(table()))
