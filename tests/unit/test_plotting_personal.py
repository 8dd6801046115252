"""The picture of personal accuracy shows the clients of the table, and refuses what it cannot show."""

from itertools import pairwise

import numpy as np
import pandas as pd
import pytest

from fldiag.diagnostics import personalise as personal
from fldiag.errors import FldiagError
from fldiag.plotting import style


def table(run="fedavg", epochs=(0, 1), clients=5, shift=0.0):
    rows = [
        {
            "metric": "personal_accuracy",
            "run": run,
            "scope": "client",
            "client": i,
            "index": e,
            "value": 0.3 + 0.1 * i + 0.05 * e + shift,
        }
        for e in epochs
        for i in range(clients)
    ]
    rows += [
        {
            "metric": "personal_accuracy",
            "run": run,
            "scope": "global",
            "client": None,
            "index": e,
            "value": 0.99,
        }
        for e in epochs
    ]
    return pd.DataFrame(rows)


def dots(ax):
    return [
        line
        for line in ax.lines
        if line.get_marker() not in ("None", None, "") and line.get_linestyle() == "None"
    ]


def test_every_client_is_a_dot_and_the_mean_a_line():
    ax = personal.draw(table()).axes[0]
    shown = dots(ax)
    assert len(shown) == 2
    for e, line in enumerate(shown):
        np.testing.assert_allclose(line.get_ydata(), 0.3 + 0.1 * np.arange(5) + 0.05 * e)
        assert (np.abs(line.get_xdata() - e) < 0.5).all() and len(set(line.get_xdata())) == 5
    means = [line.get_ydata()[0] for line in ax.lines if line.get_linewidth() == personal.MEAN]
    np.testing.assert_allclose(means, [0.5, 0.55])
    assert [t.get_text() for t in ax.get_xticklabels()] == ["0\n50.0 ± 14.1 %", "1\n55.0 ± 14.1 %"]


def test_runs_stand_side_by_side_without_overlap():
    both = pd.concat([table(), table("fedbabu", shift=0.02)])
    fig = personal.draw(both)
    shown = dots(fig.axes[0])
    spans = sorted((min(line.get_xdata()), max(line.get_xdata())) for line in shown)
    assert len(spans) == 4 and all(a[1] < b[0] for a, b in pairwise(spans))
    assert [t.get_text() for t in fig.legends[0].get_texts()] == [
        "FedAvg",
        "FedBABU",
        "mean",
        "median",
    ]


def test_the_same_table_gives_the_same_bytes(tmp_path):
    [a], [b] = (style.save(personal.draw(table()), tmp_path / n, ["png"]) for n in ("a", "b"))
    assert a.read_bytes() == b.read_bytes()


def test_clients_without_a_value_are_left_out():
    frame = table()
    frame.loc[0, "value"] = np.nan
    assert [len(line.get_xdata()) for line in dots(personal.draw(frame).axes[0])] == [4, 5]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda f: f.drop(columns="client"), "lacks the columns client"),
        (lambda f: f.assign(metric="loss"), "no rows of metric"),
        (lambda f: f[f["scope"] == "global"], "no client"),
        (lambda f: f.iloc[:0], "empty"),
    ],
)
def test_unfit_tables(change, expected):
    with pytest.raises(FldiagError, match=expected):
        personal.draw(change(table()))
