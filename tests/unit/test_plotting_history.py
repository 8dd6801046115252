"""Pictures of forgetting, drift and the account: what they show is in the table, and odd tables are refused or drawn."""

import numpy as np
import pandas as pd
import pytest
from histories import always, history, identity, linear, separable, stored
from matplotlib.collections import PolyCollection

import fldiag
from fldiag.diagnostics import account
from fldiag.diagnostics.drift import picture as drift
from fldiag.diagnostics.forgetting import picture as forgetting
from fldiag.errors import FldiagError
from fldiag.plotting import style

PARTS = [np.arange(0, 60), np.arange(60, 120)]


@pytest.fixture(scope="module")
def made():
    rounds = [
        stored(identity(), [always(r % 4), identity() * 0.5], identity(), round=r)
        for r in (1, 2, 3, 5)
    ]
    damaged = FldiagError("round 4 is damaged", "")
    return history(
        linear(), separable(test_per_class=(25, 25, 25, 3)), PARTS, *rounds[:3], damaged, rounds[3]
    )


@pytest.fixture(scope="module")
def tables(made):
    return {n: fldiag.diagnose(made, n) for n in ("forgetting", "drift", "account")}


def drawn(fig, tmp_path, name="x"):
    (path,) = style.save(fig, tmp_path / f"{name}.png")
    again = path.read_bytes()
    assert again[:4] == b"\x89PNG" and len(again) > 5000
    return fig


def test_curves_show_the_means_and_leave_gaps(tables, tmp_path):
    fig = drawn(forgetting.curves(tables["forgetting"]), tmp_path)
    left, right = fig.axes
    lines = [
        line for line in left.get_lines() if len(line.get_xdata()) == 5
    ]  # without those of chance and ceiling
    assert (
        len(lines) == 3
        and len(right.get_lines()) == 3
        and sum(isinstance(c, PolyCollection) for c in left.collections) == 3
    )
    rows = tables["forgetting"].query(
        "metric == 'accuracy' and moment == 'trained' and scope == 'global' and slice == 'test'"
    )
    x, y = lines[1].get_data()
    assert list(x) == [1, 2, 3, 4, 5] and np.isnan(y[3])  # round 4 cannot be read
    assert y[[0, 1, 2, 4]] == pytest.approx(rows.sort_values("round").value.astype(float).tolist())


def test_heatmap_cells_masks_and_unseen_classes(tables, tmp_path):
    fig = drawn(forgetting.heatmap(tables["forgetting"]), tmp_path)
    ax = fig.axes[0]
    cells = np.ma.filled(ax.images[0].get_array().astype(float), np.nan)
    assert (
        cells.shape == (2, 4)
        and cells[0, :3] == pytest.approx([1, 0, 1])
        and np.isnan(cells[:, 3]).all()
    )  # answers class 1
    assert len(ax.patches) == 2  # hatched, one a client
    x, y = ax.get_lines()[0].get_data()
    assert sorted(zip(y, x, strict=True)) == [(0, 2), (0, 3), (1, 0), (1, 1)]
    assert (
        "round 5" in ax.get_title()
        and "round 2" in forgetting.heatmap(tables["forgetting"], round=2).axes[0].get_title()
    )
    assert ax.images[0].norm.vmin == -ax.images[0].norm.vmax


@pytest.mark.slow
def test_drift_panels_follow_what_was_computed(made, tables, tmp_path):
    fig = drawn(drift.draw(tables["drift"]), tmp_path)
    assert len(fig.axes) == 3
    bare = fldiag.diagnose(made, "drift", gradients=False, representation=False, rho=())
    assert len(drawn(drift.draw(bare), tmp_path, "bare").axes) == 2  # no CKA
    conflict = (drift.conflict_if_any(tables["drift"]), drift.conflict_if_any(bare))
    assert [len(f.axes) for f in conflict] == [2, 1]  # no cosine of g_u and g_p
    lines = [ax.get_lines() for ax in fig.axes[:2]]
    assert (
        len(lines[0]) == 2 and len(lines[1]) == 3
    )  # updates, gradients and the zero: the server did not move
    wanted = (
        tables["drift"]
        .query(
            "metric == 'local_local_divergence' and scope == 'global' and layer.isna() and round == 3"
        )
        .value.iloc[0]
    )
    assert lines[0][1].get_ydata()[2] == pytest.approx(float(wanted))


def with_steps(frame, rounds=(1, 2, 3)):
    """The table with rows of local steps that training recorded."""
    common = {
        "run": "made",
        "scope": "global",
        "moment": "trained",
        "estimator": "steps",
        "proximal": "kl:3",
        "stderr": 0.01,
    }
    rows = [
        {
            **common,
            "round": r,
            "metric": metric,
            "layer": layer,
            "value": value + r,
            "scaled": scaled,
        }
        for r in rounds
        for metric, layer, value, scaled in (
            ("cos_gu_gp", None, -0.2, None),
            ("cos_gu_gp", "part:head", -0.3, None),
            ("proximal_loss", None, 5.0, None),
            ("lambda_mean", "0", 0.1, 0.1 * r + 0.5),
        )
    ]
    return pd.concat([frame, pd.DataFrame(rows)], ignore_index=True)


@pytest.mark.slow
def test_drift_shows_recorded_steps_beside_the_recomputed(tables, tmp_path):
    frame = with_steps(tables["drift"], (1, 2, 3, 5))
    fig = drawn(drift.conflict_if_any(frame), tmp_path, "steps")
    labels = {ax.get_ylabel(): ax for ax in fig.axes}
    assert len(fig.axes) == 4 and "proximal loss, KL, τ = 3\n(mean over local steps)" in labels
    angles = labels["cosine of $g_u$ and $g_p$\n(mean over local steps)"]
    whole, head = angles.get_lines()[:2]
    assert whole.get_ydata()[[0, 1, 2, 4]] == pytest.approx([0.8, 1.8, 2.8, 4.8]) and np.isnan(
        whole.get_ydata()[3]
    )
    assert head.get_ydata()[0] == pytest.approx(0.7)
    csv = tmp_path / "steps.csv"
    frame.to_csv(csv, index=False)
    again = drawn(drift.conflict_if_any(pd.read_csv(csv)), tmp_path, "again")
    assert len(again.axes) == 4


@pytest.mark.slow
def test_the_same_table_gives_the_same_bytes(tables, tmp_path):
    for name, draw in (
        ("forgetting", forgetting.heatmap),
        ("drift", drift.draw),
        ("account", account.draw),
    ):
        a, b = (
            style.save(draw(tables[name]), tmp_path / f"{i}.png")[0].read_bytes() for i in (1, 2)
        )
        assert a == b


@pytest.mark.slow
def test_odd_tables(tables, tmp_path):
    with pytest.raises(FldiagError, match="no rows of metric 'accuracy'"):
        forgetting.curves(tables["drift"].query("metric != 'accuracy'"))
    with pytest.raises(FldiagError, match="no class_forgetting of round 4"):
        forgetting.heatmap(tables["forgetting"], round=4)
    with pytest.raises(FldiagError, match="lacks the columns"):
        drift.draw(pd.DataFrame({"metric": ["x"]}))
    csv = tmp_path / "f.csv"
    tables["forgetting"].to_csv(csv, index=False)
    drawn(forgetting.heatmap(pd.read_csv(csv)), tmp_path, "csv")
    drawn(forgetting.curves(pd.read_csv(csv)), tmp_path, "csv2")
    everything = tables["forgetting"].assign(
        value=lambda f: f.value.mask(f.metric == "class_forgetting")
    )
    drawn(forgetting.heatmap(everything), tmp_path, "masked")


@pytest.mark.slow
def test_many_clients_and_one_round(tmp_path):
    clients, parts = 60, [np.arange(k, k + 60) for k in range(60)]
    rounds = stored(identity(), [always(k % 4) for k in range(clients)], identity())
    made = history(linear(), separable(), parts, rounds)
    frame = fldiag.diagnose(made, "forgetting")
    drawn(forgetting.heatmap(frame), tmp_path)
    drawn(forgetting.curves(frame), tmp_path, "curves")
    drawn(account.draw(fldiag.diagnose(made, "account", k=2)), tmp_path, "account")
