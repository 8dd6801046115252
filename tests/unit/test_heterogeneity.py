"""Heterogeneity of a partition against scipy, and the check of a partition file."""

import json

import numpy as np
import pytest
import torch
from commands import run as typed
from histories import one
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.spatial.distance import jensenshannon

from fldiag.diagnosis import heterogeneity
from fldiag.diagnosis.dealt_partition import count
from fldiag.diagnosis.heterogeneity import measure


def measured(cells):
    """The table of clients with these numbers of examples of every class."""
    labels = np.concatenate([np.repeat(range(len(row)), row) for row in cells])
    labels = np.append(
        labels, len(cells[0]) - 1
    )  # an example of nobody says how many classes there are
    ends = np.cumsum([sum(row) for row in cells])
    parts = [np.arange(end - sum(row), end) for row, end in zip(cells, ends, strict=True)]
    return measure(count(parts, torch.from_numpy(labels)), parts)


counts = st.lists(
    st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any), min_size=2, max_size=5
).filter(lambda cells: np.count_nonzero(np.sum(cells, axis=0)) > 1)


@settings(max_examples=15, deadline=None)
@given(cells=counts)
def test_distances_are_scipys(cells):
    table = measured(cells)
    p = np.array(cells) / np.sum(cells, axis=1, keepdims=True)
    q = np.sum(cells, axis=0) / np.sum(cells)

    def expected(a, b):
        return {"jensen_shannon": jensenshannon(a, b, base=2)}

    def close(value):  # the root of what rounding leaves of 0
        return pytest.approx(value, rel=1e-9, abs=1e-7)

    for k in range(len(cells)):
        for name, value in expected(p[k], q).items():
            assert one(table, name, client=k).value == close(value)
        entropy = stats.entropy(p[k])
        assert one(table, "effective_classes", client=k).value == close(np.exp(entropy))
        assert one(table, "classes", client=k).value == np.count_nonzero(cells[k])
        for j in range(k):
            for name, value in expected(p[j], p[k]).items():
                assert one(table, f"pair_{name}", client=j, client_b=k).value == close(value)
    for name in expected(p[0], q):
        values = [one(table, name, client=k).value for k in range(len(cells))]
        row = one(table, name, scope="global")
        assert row.value == close(np.mean(values)) and row.stderr == close(stats.sem(values))
    sizes = np.sum(cells, axis=1)
    gini = np.abs(sizes[:, None] - sizes).mean() / (2 * sizes.mean())
    assert one(table, "size_gini").value == close(gini)
    assert one(table, "effective_classes_of_all").value == close(np.exp(stats.entropy(q)))


def test_equal_and_disjoint_clients_are_the_ends_of_the_scales():
    alike = measured([[3, 3], [5, 5]])
    apart = measured([[4, 0], [0, 4]])
    name = "pair_jensen_shannon"
    assert one(alike, name, scope="pair").value == pytest.approx(0, abs=1e-7)
    assert one(apart, name, scope="pair").value == pytest.approx(1)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ([[2, 3]], "fewer than two clients have examples"),
        ([[2, 3], [0, 0]], "fewer than two clients have examples"),
        ([[2, 0], [3, 0]], "all examples are of one class"),
        ([[0, 0], [0, 0]], "fewer than two clients have examples"),
    ],
)
def test_what_cannot_be_compared_is_masked_with_its_reason(cells, reason):
    table = measured(cells)
    rows = table[table["metric"].str.contains("jensen")]
    rows = rows[rows["n_examples"] > 0]
    assert rows["masked"].all() and (rows["note"] == reason).all()
    assert (one(table, "jensen_shannon", scope="global").note) == reason
    assert any(reason in text for text in heterogeneity.remarks(table))


def test_an_empty_client_alone_is_masked():
    table = measured([[2, 3], [0, 0], [4, 1]])
    empty = table[table["client"] == 1].set_index("metric")
    assert empty.loc["jensen_shannon", "note"] == "the client has no examples"
    assert empty.loc["size", "value"] == 0 and not empty.loc["size", "masked"]
    assert one(table, "jensen_shannon", scope="global").n_clients == 2
    pairs = table[(table["scope"] == "pair") & (table["metric"] == "pair_jensen_shannon")]
    assert pairs[["client", "client_b"]].to_numpy().tolist() == [[0, 2]]


def test_repeated_and_shared_examples_are_counted():
    parts = [np.array([0, 1, 1, 2]), np.array([2, 3]), np.array([4])]
    table = measure(count(parts, torch.tensor([0, 1, 0, 1, 1])), parts)
    for name, values in {"repeated": [1, 0, 0], "shared": [1, 1, 0], "size": [4, 2, 1]}.items():
        assert [one(table, name, client=k).value for k in range(3)] == values


def test_pairs_of_many_clients_are_a_spread_of_them(monkeypatch):
    monkeypatch.setattr(heterogeneity, "PAIRED", 3)
    table = measured([[k, 1] for k in range(1, 8)])
    pairs = table[(table["scope"] == "pair") & (table["metric"] == "pair_jensen_shannon")]
    assert pairs[["client", "client_b"]].to_numpy().tolist() == [[0, 3], [0, 6], [3, 6]]
    assert "pairs are those of 3 of 7 clients, evenly spread" in heterogeneity.remarks(table)


def test_a_file_is_checked_before_any_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = [list(range(k, 120, 3)) for k in range(3)]
    (tmp_path / "good.json").write_text(json.dumps(good))
    bad = {"0": [1, 2, 3, 3], "1": [], "2": [4, 119, 120], "4": [1]}
    (tmp_path / "bad.json").write_text(json.dumps(bad))
    fine = typed("partition", "good.json", "--data", "iris", "--format", "png", "--json")
    assert json.loads(fine.stdout)["faults"] == []
    assert (tmp_path / "fldiag-out" / "partition-iris-file-good-heterogeneity.csv").is_file()
    ill = typed("partition", "bad.json", "--data", "iris", "--format", "png", code=3)
    for words in (
        "has 4 clients, from 0 to 4",
        "1 of 120 training examples belong to several clients",
    ):
        assert words in ill.stderr
    counts = (tmp_path / "fldiag-out" / "partition-iris-file-bad.csv").read_text()
    assert "\n1,0,0\n1,1,0\n1,2,0\n" in counts  # the empty client stands in the table


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["p.json"], "--data NAME"),
        (["digits", "--data", "iris"], "partition digits is not there"),
        (["p.json", "--data", "iris", "--set", "rounds=2"], "--set partition.path=FILE"),
        (["p.json", "--data", "no"], "no"),
    ],
)
def test_wrong_use_is_said(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.json").write_text("[[1, 2], [3]]")
    result = typed("partition", *words, code=2)
    assert message in result.stderr
