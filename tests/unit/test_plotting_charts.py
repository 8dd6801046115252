"""Bubbles, curves and spectra: artists hold the table's numbers; unfit tables are named."""

from __future__ import annotations

from itertools import pairwise

import matplotlib
import numpy as np
import pandas as pd
import pytest

from fldiag.diagnostics import spectrum
from fldiag.errors import FldiagError
from fldiag.plotting import partition, style
from fldiag.results.table import table


# --- partition -------------------------------------------------------------------------------------------------
def counts(clients: int, classes: int, seed: int = 0, **more) -> pd.DataFrame:
    draw = np.random.default_rng(seed).integers(0, 400, (clients, classes))
    return pd.DataFrame(
        [
            {"client": k, "class": c, "count": int(draw[k, c]), **more}
            for k in range(clients)
            for c in range(classes)
        ]
    )


def test_bubble_areas_are_proportional_to_counts_and_stand_at_their_client_and_class():
    frame = counts(10, 4)
    frame.loc[3, "count"] = 0
    (points,) = partition.draw_counts(frame).axes[0].collections
    held = frame[frame["count"] > 0]
    np.testing.assert_allclose(points.get_offsets(), held[["client", "class"]].to_numpy(float))
    shown = points.get_sizes() > partition.LEAST  # of one example there is still a dot to see
    ratio = (points.get_sizes() / held["count"].to_numpy(float))[shown]
    np.testing.assert_allclose(ratio, ratio[0])
    assert points.get_sizes().min() >= partition.LEAST and shown.sum() > 30


def test_panels_share_places_and_the_scale_of_areas():
    frame = pd.concat(
        [counts(8, 5, run="Sharding"), counts(8, 3, 1, run="LDA $a$").assign(count=7)]
    )
    fig = partition.draw_counts(frame)
    one, two = fig.axes
    assert one.get_xlim() == two.get_xlim() and one.get_ylim() == two.get_ylim()
    per_count = one.collections[0].get_sizes().max() / frame["count"].max()
    np.testing.assert_allclose(two.collections[0].get_sizes(), 7 * per_count)
    assert [ax.get_title() for ax in fig.axes] == ["Sharding", r"LDA \$a\$"]


def test_legend_bubbles_are_to_scale():
    fig = partition.draw_counts(counts(10, 10))
    points = fig.axes[0].collections[0]
    area = points.get_sizes()[0] / counts(10, 10)["count"][0]
    (legend,) = fig.legends
    for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=True):
        assert handle.get_markersize() ** 2 == pytest.approx(
            area * float(text.get_text().removesuffix(" examples").replace(",", ""))
        )


@pytest.mark.parametrize(
    ("clients", "classes"), [(10, 3), (10, 10), (100, 3), (100, 10), (100, 100), (30, 100)]
)
@pytest.mark.slow
def test_ticks_are_legible_for_all_sizes(clients, classes):
    fig = partition.draw_counts(counts(clients, classes))
    with style.paper():
        fig.canvas.draw()
    renderer, ax = fig.canvas.get_renderer(), fig.axes[0]
    for labels in (ax.get_xticklabels(), ax.get_yticklabels()):
        found = [t.get_window_extent(renderer) for t in labels if t.get_text()]
        assert len(found) >= 2
        assert not any(a.overlaps(b) for a, b in pairwise(found))
    assert fig.get_size_inches()[0] in (style.ONE_COLUMN, style.TWO_COLUMNS)
    if max(clients, classes) <= 30:  # big bubbles touch their neighbours at most
        points = ax.transData.transform([(0, 0), (1, 1)]) * 72 / fig.dpi
        assert (
            np.sqrt(ax.collections[0].get_sizes().max())
            <= 1.1 * np.abs(points[1] - points[0]).min()
        )


def test_client_without_examples_keeps_its_place_and_names_keep_their_order():
    frame = counts(6, 3)
    ax = partition.draw_counts(frame[frame["client"] != 2]).axes[0]
    assert [t.get_text() for t in ax.get_xticklabels()] == list("012345")
    assert 2.0 not in ax.collections[0].get_offsets()[:, 0]
    named = counts(3, 2).replace({"class": {0: "zebra", 1: "ape"}})
    assert [t.get_text() for t in partition.draw_counts(named).axes[0].get_yticklabels()] == [
        "zebra",
        "ape",
    ]
    sparse = pd.DataFrame({"client": [900, 7], "class": [0, 0], "count": [1, 2]})
    assert [t.get_text() for t in partition.draw_counts(sparse).axes[0].get_xticklabels()] == [
        "7",
        "900",
    ]


def test_unfit_counts_are_refused():
    frame = counts(3, 2)
    for bad, message in [
        (frame.drop(columns="class"), "lacks the columns class"),
        (frame.iloc[:0], "empty"),
        (frame.assign(count=-1), "client 0 has count -1"),
        (frame.assign(count=np.nan), "client 0 has count nan"),
        (pd.concat([frame, frame.iloc[[4]]]), "client 2 has two counts of class 0"),
    ]:
        with pytest.raises(FldiagError, match=message):
            partition.draw_counts(bad)
    assert partition.draw_counts(
        frame.assign(count=0)
    ).axes  # nobody holds anything: an empty chart, no crash


# --- curves ----------------------------------------------------------------------------------------------------
def metrics(names=("FedAvg", "FedSOL"), seeds=(0,), rounds=30, **more):
    rng = np.random.default_rng(3)
    return table(
        [
            dict(
                metric=m, run=n, method=n, round=t, seed=s, slice="test", value=rng.normal(), **more
            )
            for m in ("accuracy", "loss")
            for n in names
            for s in seeds
            for t in range(1, rounds + 1)
        ]
    )


def drawn(fig, panel: int = 0):
    return [line for line in fig.axes[panel].lines if line.get_label() == "curve"]


# --- spectrum --------------------------------------------------------------------------------------------------
def eigen(**runs):
    return table(
        [
            dict(
                metric="eigenvalue",
                run=r,
                index=i + 1,
                value=v,
                residual=0.1 * (i + 1),
                converged=i != 2,
            )
            for r, values in runs.items()
            for i, v in enumerate(values)
        ]
    )


@pytest.mark.parametrize(
    "picture",
    [
        lambda: partition.draw_counts(counts(10, 5)),
        lambda: spectrum.draw(eigen(A=[9, 5, 3])),
    ],
    ids=["partition", "spectrum"],
)
@pytest.mark.slow
def test_same_table_same_bytes_and_no_settings_left_behind(picture, tmp_path):
    before = dict(matplotlib.rcParams)
    for ending in ("png", "pdf"):
        one, two = (
            style.save(picture(), tmp_path / f"{i}.{ending}")[0].read_bytes() for i in (1, 2)
        )
        assert one == two
    assert dict(matplotlib.rcParams) == before


def test_a_crowd_is_shown_by_percentiles():
    """Of 1,000 clients, of which one in ten has examples of class 0."""
    frame = pd.DataFrame(
        [
            (k, c, (50 if k % 10 == 0 else 0) if c == 0 else 7)
            for k in range(1000)
            for c in range(2)
        ],
        columns=["client", "class", "count"],
    )
    ax = partition.draw_counts(frame).axes[0]
    (points,) = ax.collections
    shown = {
        tuple(at): size
        for at, size in zip(np.asarray(points.get_offsets()), points.get_sizes(), strict=True)
    }
    assert (
        "percentile" in ax.get_xlabel()
        and {at for at, k in shown if k == 0} == {9, 10}
        and len(shown) == 2 + 11
    )
    assert shown[10, 0] == pytest.approx(shown[5, 1] * 50 / 7)
