"""The diagnostic ``partition`` against scipy, its masks, and the check of a partition file."""

import numpy as np
import pytest
import torch
from histories import one
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.spatial.distance import jensenshannon

from fldiag.diagnostics import partition
from fldiag.diagnostics.partition import measure, summary


def measured(cells):
    """The table of clients with these numbers of examples of every class."""
    labels = np.concatenate([np.repeat(range(len(row)), row) for row in cells])
    # an example of nobody says how many classes there are
    labels = np.append(labels, len(cells[0]) - 1)
    ends = np.cumsum([sum(row) for row in cells])
    parts = [np.arange(end - sum(row), end) for row, end in zip(cells, ends, strict=True)]
    return measure(parts, torch.from_numpy(labels), "cells")


counts = st.lists(
    st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any), min_size=2, max_size=5
)


@settings(max_examples=15, deadline=None)
@given(cells=counts)
def test_distances_are_scipys(cells):
    rows = measured(cells)
    p = np.array(cells) / np.sum(cells, axis=1, keepdims=True)
    q = np.sum(cells, axis=0) / np.sum(cells)

    def close(value):  # the root of what rounding leaves of 0
        return pytest.approx(np.nan_to_num(value), rel=1e-9, abs=1e-7)

    for k in range(len(cells)):
        assert one(rows, "jensen_shannon", client=k).value == close(jensenshannon(p[k], q, 2))
        entropy = stats.entropy(p[k])
        assert one(rows, "effective_classes", client=k).value == close(np.exp(entropy))
        assert one(rows, "classes", client=k).value == np.count_nonzero(cells[k])
        for c in range(4):
            assert one(rows, "count", client=k, index=c).value == cells[k][c]
        for j in range(k):
            pair = one(rows, "pair_jensen_shannon", client=j, client_b=k)
            assert pair.value == close(jensenshannon(p[j], p[k], 2))
    values = [one(rows, "jensen_shannon", client=k).value for k in range(len(cells))]
    row = one(rows, "jensen_shannon", scope="global")
    assert row.value == close(np.mean(values)) and row.stderr == close(stats.sem(values))
    sizes = np.sum(cells, axis=1)
    assert [one(rows, "size", client=k).value for k in range(len(cells))] == sizes.tolist()
    gini = np.abs(sizes[:, None] - sizes).mean() / (2 * sizes.mean())
    assert one(rows, "size_gini").value == close(gini)


def test_a_client_without_examples_is_masked_with_its_reason():
    rows = measured([[2, 3], [0, 0], [4, 1]])
    empty = rows[rows["client"] == 1].set_index("metric")
    assert empty.loc["jensen_shannon", "note"] == "the client has no examples"
    assert empty.loc["size", "value"] == 0 and not empty.loc["size", "masked"]
    pairs = rows[(rows["scope"] == "pair")]
    assert pairs[["client", "client_b"]].to_numpy().tolist() == [[0, 2]]
    alone = one(measured([[2, 3], [0, 0]]), "pair_jensen_shannon", scope="global")
    assert alone.masked and alone.note == "fewer than two clients have examples"


def test_shared_and_unused_examples_are_counted_and_said():
    parts = [np.array([0, 1, 1, 2]), np.array([2, 3]), np.array([4])]
    rows = measure(parts, torch.tensor([0, 1, 0, 1, 1, 0]), "mine")
    assert (one(rows, "shared").value, one(rows, "unused").value) == (1, 1)
    texts = [getattr(item, "text", "") for item in summary(rows, {})]
    assert "mine: 1 training examples belong to several clients" in texts


def test_of_many_clients_a_spread_is_compared_and_drawn(monkeypatch):
    monkeypatch.setattr(partition, "MANY", 3)
    rows = measured([[k, 1] for k in range(1, 8)])
    pairs = rows[rows["scope"] == "pair"]
    assert pairs[["client", "client_b"]].to_numpy().tolist() == [[0, 3], [0, 6], [3, 6]]
    (points,) = partition.draw(rows).axes[0].collections
    assert points.get_offsets().tolist() == [[k, c] for k in (0, 3, 6) for c in (0, 1)]
    areas = np.array([[k + 1, 1] for k in (0, 3, 6)]).ravel()
    np.testing.assert_allclose(points.get_sizes() / points.get_sizes().max(), areas / 7)
