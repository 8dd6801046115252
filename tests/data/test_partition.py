"""Partitions: their defining properties, on many shapes; their messages."""

import json
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fldiag.data import partition
from fldiag.errors import FldiagError

BALANCED = np.tile(np.arange(10), 100)
SKEWED = np.repeat(np.arange(5), [400, 200, 100, 60, 40])
OPTIONS = {
    "iid": {},
    "sharding": {"shards": 2},
    "lda": {"alpha": 0.5, "min_size": 10},
    "lda_fedsol": {"alpha": 0.5, "min_size": 10},
    "dirichlet": {"alpha": 0.3},
    "pathological": {"classes": 3},
}


def assert_cover(parts, n):
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(n))


@pytest.mark.parametrize("kind", OPTIONS)
def test_every_kind_gives_sorted_indices_fixed_by_its_seed_alone(kind):
    def make(labels, seed):
        return partition.make(kind, labels, 10, seed, **OPTIONS[kind])

    first = make(BALANCED, 5)
    torch.manual_seed(2)  # the training seed reaches global generators at most
    np.random.seed(2)
    again, other = make(torch.from_numpy(BALANCED), 5), make(BALANCED, 6)
    for part in first:
        assert part.dtype == np.int64 and (np.diff(part) >= 0).all()
        assert part[0] >= 0 and part[-1] < 1000
    assert len(first) == 10 and partition.same(first, again) and not partition.same(first, other)


@given(
    classes=st.integers(2, 6),
    shards=st.integers(1, 4),
    blocks=st.integers(1, 4),
    extra=st.integers(0, 30),
    seed=st.integers(0, 999),
)
def test_sharding_covers_once_with_at_most_s_classes_a_client(classes, shards, blocks, extra, seed):
    labels = np.repeat(np.arange(classes), blocks * shards + extra)
    labels = np.random.default_rng(seed).permutation(labels)
    parts = partition.make("sharding", labels, classes * blocks, seed, shards=shards)
    assert_cover(parts, len(labels))
    assert max(len(np.unique(labels[part])) for part in parts) <= shards
    assert np.ptp([*map(len, parts)]) <= shards


def test_shards_are_runs_of_a_class_in_data_order_with_the_tail_dealt_to_the_first_shards():
    # One class of 11 in 4 shards: 0 1 | 2 3 | 4 5 | 6 7 and the tail 8, 9, 10 to the first three.
    parts = partition.make("sharding", np.zeros(11, dtype=int), 4, 3, shards=1)
    assert sorted(part.tolist() for part in parts) == [[0, 1, 8], [2, 3, 9], [4, 5, 10], [6, 7]]


def test_of_shards_that_do_not_divide_the_last_clients_get_fewer():
    labels = np.repeat(np.arange(9), 40)
    parts = partition.make("sharding", labels, 20, 0, shards=2)
    assert_cover(parts, len(labels))
    assert [len(part) for part in parts] == [20] * 16 + [10] * 4


@settings(max_examples=30)
@given(
    alpha=st.floats(0.05, 10),
    clients=st.integers(1, 8),
    min_size=st.integers(1, 40),
    seed=st.integers(0, 999),
)
def test_lda_covers_once_and_respects_the_minimum(alpha, clients, min_size, seed):
    parts = partition.make("lda", SKEWED, clients, seed, alpha=alpha, min_size=min_size)
    assert_cover(parts, len(SKEWED))
    assert min(map(len, parts)) >= min_size


def test_fedsol_s_clients_are_those_of_its_released_code():
    """The numbers that FedSOL's own functions gave for CIFAR-10's 50,000 training labels with the code's seed. Only the classes'
    sizes decide how many a client gets, so the labels may stand in any order."""
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 5000))
    parts = partition.make("lda_fedsol", labels, 100, 19940817, alpha=0.1, min_size=10)
    sizes = [len(part) for part in parts]
    assert sizes[:12] == [2670, 305, 157, 161, 807, 571, 185, 917, 457, 533, 70, 65]
    assert (min(sizes), max(sizes)) == (18, 2670)
    counts = zip(*np.unique(labels[parts[0]], return_counts=True), strict=True)
    assert dict(counts) == {0: 18, 4: 34, 6: 41, 8: 2577}


@pytest.mark.parametrize(
    ("seed", "alpha", "clients"), [(1, 0.1, 20), (2, 0.1, 20), (3, 0.3, 30), (4, 1.0, 10)]
)
def test_fedsol_s_lda_draws_as_the_plain_loop_over_lists_does(seed, alpha, clients):
    """Here a draw that is not kept matters: it takes its part of the generator's stream, the clients' shuffles included."""
    rng, draws, parts = np.random.RandomState(seed), 0, [[]]
    pools = [np.flatnonzero(label == SKEWED).tolist() for label in range(5)]
    while min(map(len, parts)) < 5:
        draws, parts = draws + 1, [[] for _ in range(clients)]
        for pool in pools:
            rng.shuffle(pool)
            is_open = [len(part) < len(SKEWED) // clients for part in parts]
            weight = rng.dirichlet([alpha] * clients) * is_open
            ends = (np.cumsum(weight / weight.sum()) * len(pool)).astype(int)[:-1]
            for part, piece in zip(parts, np.split(pool, ends), strict=True):
                part.extend(piece)
        for part in parts:
            rng.shuffle(part)
    assert draws > 1 or alpha == 1.0
    own = partition.make("lda_fedsol", SKEWED, clients, seed, alpha=alpha, min_size=5)
    assert partition.same(own, list(map(sorted, parts)))


def test_each_client_follows_its_own_dirichlet_prior():
    # A client's shares are Dirichlet: mean 1/C, variance (1/C)(1 - 1/C)/(C a + 1), plus counting noise.
    alpha, size = 0.4, 100
    draws = (partition.make("dirichlet", BALANCED, 10, seed, alpha=alpha) for seed in range(40))
    counts = np.stack(
        [np.bincount(BALANCED[part], minlength=10) for parts in draws for part in parts]
    )
    shares, mean = counts / size, 0.1
    assert shares.mean() == pytest.approx(mean)
    dirichlet = mean * (1 - mean) / (10 * alpha + 1)
    variance = dirichlet + (mean * (1 - mean) - dirichlet) / size
    assert shares.var() == pytest.approx(variance, rel=0.1)
    # Clients of one partition draw independently, so their mean varies ten times less.
    together = shares.reshape(40, 10, 10).mean(axis=1)
    assert together.var() == pytest.approx(variance / 10, rel=0.25)


@settings(max_examples=40)
@given(
    alpha=st.floats(0.01, 100),
    classes=st.integers(1, 10),
    clients=st.integers(1, 100),
    seed=st.integers(0, 999),
)
def test_all_clients_get_floor_n_over_clients_and_pathological_ones_c_classes(
    alpha, classes, clients, seed
):
    size = len(BALANCED) // clients
    classes = min(classes, size)
    even = partition.make("dirichlet", BALANCED, clients, seed, alpha=alpha)
    few = partition.make("pathological", BALANCED, clients, seed, classes=classes)
    assert [len(part) for part in even] == [size] * clients
    assert {(len(part), len(np.unique(BALANCED[part]))) for part in few} == {(size, classes)}


def test_classes_that_do_not_occur_are_left_out_and_numbers_can_be_split_iid():
    labels = np.repeat([2, 7], 50)
    parts = partition.make("pathological", labels, 5, 0, classes=2)
    assert all(set(labels[part]) == {2, 7} for part in parts)
    assert_cover(partition.make("sharding", labels, 5, 0, shards=2), 100)
    assert_cover(partition.make("iid", torch.randn(12, 2), 3, 0), 12)


@pytest.mark.parametrize(
    ("kind", "labels", "clients", "options", "words"),
    [
        ("shardin", BALANCED, 5, {}, "did you mean 'sharding'"),
        ("lda", BALANCED, 101, {"alpha": 1, "min_size": 10}, "101 clients cannot share 1000"),
        # draws whose weights all vanish, and one that is too uneven
        ("lda", BALANCED, 10, {"alpha": 1e-6, "min_size": 10}, "at least 10 each"),
        ("lda_fedsol", BALANCED, 50, {"alpha": 1e-6, "min_size": 15}, "at least 15 each"),
        ("lda_fedsol", BALANCED, 50, {"alpha": 0.01, "min_size": 15}, "at least 15 each"),
        ("sharding", np.repeat(np.arange(9), 40), 40, {"shards": 1}, "40 clients cannot share 360"),
        ("sharding", BALANCED, 3, {"shards": 2}, "make 0 shards of every class"),
        ("sharding", SKEWED, 250, {"shards": 1}, "the smallest of the 5 classes has 40"),
        ("pathological", BALANCED, 5, {"classes": 11}, "there are 10 classes"),
        ("pathological", BALANCED, 400, {"classes": 3}, "2 examples for each client"),
        ("iid", BALANCED, 1001, {}, "1001 clients cannot share 1000"),
        ("lda", np.zeros((5, 2)), 2, {"alpha": 1, "min_size": 1}, "needs class labels"),
    ],
)
def test_wrong_use_is_explained(kind, labels, clients, options, words, monkeypatch):
    monkeypatch.setattr(partition, "LDA_MAX_TRIES", 1000)
    monkeypatch.setattr(partition, "FEDSOL_MAX_TRIES", 50)
    signals = {"all": "raise"} if kind == "lda" else {}
    with np.errstate(**signals), pytest.raises(FldiagError, match=words) as error:
        partition.make(kind, labels, clients, 0, **options)
    assert error.value.usage and error.value.remedy


# -- files


THREE = [[3, 1], [4, 5, 9], [0]]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (THREE, ""),
        ({"2": [0], "1": [9, 4, 5], "0": [1, 3]}, ""),
        ([*THREE, [7]], "has 4 clients, from 0 to 3"),
        ({"a": [1], "b": [2], "c": [3]}, "has 3 clients, from a to c"),
        ([[3, 1], [4, 5, 10], [0]], r"client 1 has 3 examples \[4\] to \[10\]"),
        ([[3, 1], [], [0]], "client 1 has 0 examples"),
        ([[3, 1], [-1], [0]], r"client 1 has 1 examples \[-1\]"),
        ([[3, 1], [0.5], [0]], "is not a partition"),
        ({"0": 3}, "is not a partition"),
    ],
)
def test_a_file_is_a_partition_or_one_sentence(content, words, tmp_path):
    (tmp_path / "p.json").write_text(json.dumps(content))
    with pytest.raises(FldiagError, match=words) if words else nullcontext():
        parts = partition.from_file(str(tmp_path / "p.json"), 3, np.arange(10))
        assert partition.same(parts, list(map(sorted, THREE)))


def test_a_flipped_byte_anywhere_is_one_error_or_nothing(tmp_path):
    parts, file = partition.make("iid", np.zeros(40, dtype=int), 3, 1), tmp_path / "p.npz"
    partition.save(file, parts)
    assert partition.same(partition.load_parts(file), parts)
    content = file.read_bytes()
    flipped = (
        content[:i] + bytes([content[i] ^ 0xFF]) + content[i + 1 :] for i in range(len(content))
    )
    objects = tmp_path / "objects.npz"  # reading these would execute what they say
    np.savez(objects, indices=np.arange(40).astype(object), offsets=[0, 40])
    for damage in (*flipped, b"", objects.read_bytes(), content[: len(content) // 2]):
        file.write_bytes(damage)
        try:  # some bytes are of no consequence, such as a date
            assert partition.same(partition.load_parts(file), parts)
        except FldiagError as error:
            assert "is not a partition" in error.what
