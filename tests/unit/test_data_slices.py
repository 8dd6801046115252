"""Slices: which examples, in which order, and what is said when there are none."""

import numpy as np
import pytest
import torch

from fldiag.data import Dataset, partition, take
from fldiag.data.slices import personal_test
from fldiag.errors import FldiagError


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (90, 1, 4, 4), dtype=torch.uint8, generator=generator)
    y = torch.arange(90) % 3
    return Dataset(
        "toy",
        x[:60],
        y[:60],
        x[60:],
        y[60:],
        3,
        mean=(0.5,),
        std=(0.2,),
        augment=("hflip",),
        repeat=3,
    )


@pytest.fixture
def parts():
    return [np.arange(0, 20), np.arange(20, 59), np.array([], dtype=np.int64), np.array([5, 5, 59])]


def test_whole_splits(data):
    train, test = take(data, "train"), take(data, "test")
    assert (train.name, train.n, test.name, test.n) == ("train", 60, "test", 30)
    assert torch.equal(train.x_raw, data.train_x) and torch.equal(test.y, data.test_y)


@pytest.mark.parametrize("spec", ["client:1", "client:1/train"])
def test_a_client_slice_holds_its_training_examples(data, parts, spec):
    piece = take(data, spec, parts)
    assert (piece.name, piece.n) == ("client:1/train", 39)
    assert torch.equal(piece.x_raw, data.train_x[20:59]) and torch.equal(
        piece.y, data.train_y[20:59]
    )


def test_examples_that_a_partition_repeats_stay_repeated(data, parts):
    assert torch.equal(take(data, "client:3", parts).x_raw, data.train_x[[5, 5, 59]])


def test_batches_are_normalised_never_augmented_and_make_up_the_whole(data):
    piece = take(data, "test")
    x, y = piece.tensors()
    expected = (data.test_x.float() / 255 - 0.5) / 0.2
    assert torch.allclose(x, expected.expand(-1, 3, -1, -1), atol=1e-6) and torch.equal(
        y, data.test_y
    )
    xs, ys = zip(*(piece.batch(start, start + 7) for start in range(0, piece.n, 7)), strict=True)
    assert torch.equal(torch.cat(xs), x) and torch.equal(torch.cat(ys), y)


@pytest.mark.parametrize("samples", [1, 2, 10, 29, 30, 500])
def test_samples_keep_each_class_share_within_one(data, samples):
    piece = take(data, "test", samples=samples)
    again = take(data, "test", samples=samples)
    assert piece.n == min(samples, 30) and torch.equal(piece.x_raw, again.x_raw)
    counts = torch.bincount(piece.y, minlength=3)
    assert (counts - piece.n / 3).abs().max() < 1


def test_samples_keep_data_order_and_spread_over_a_class(data):
    single = Dataset(
        "one",
        data.train_x,
        torch.zeros(60, dtype=torch.int64),
        data.test_x,
        torch.zeros(30, dtype=torch.int64),
        1,
    )
    assert torch.equal(
        take(single, "train", samples=6).x_raw, data.train_x[[5, 15, 25, 35, 45, 55]]
    )


def test_samples_of_a_skewed_split():
    y = torch.tensor([0] * 70 + [1] * 20 + [2] * 10)
    x = torch.randn(100, 2)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    data = Dataset("skewed", x[order], y[order], x, y, 3)
    assert torch.bincount(take(data, "train", samples=10).y).tolist() == [7, 2, 1]


def test_a_regression_set_has_slices_too():
    x, y = torch.randn(10, 2), torch.randn(10, 3)
    data = Dataset("line", x, y, x, y, 3)
    assert torch.equal(take(data, "train", samples=5).y, y[[1, 3, 5, 7, 9]])
    with pytest.raises(FldiagError, match="no classes to mix"):
        take(data, "client:0/test", [np.arange(3)])


def test_a_personal_test_set_mirrors_the_clients_mixture():
    pool = np.repeat(np.arange(4), [2000, 2000, 2000, 50])
    mine = np.repeat([0, 1, 3], [57, 33, 10])
    chosen = personal_test(mine, pool, client=4)
    # 1000 * 0.57 is 569.99... in floating point; class 3 would give 100 and has 50.
    assert np.bincount(pool[chosen], minlength=4).tolist() == [570, 330, 0, 50]
    assert len(np.unique(chosen)) == len(chosen) and (np.diff(chosen) > 0).all()
    assert np.array_equal(
        chosen, personal_test(torch.from_numpy(mine), torch.from_numpy(pool), client=4)
    )
    assert not np.array_equal(chosen, personal_test(mine, pool, client=5))


def test_the_test_slice_of_a_client_holds_its_classes_of_the_test_split(data):
    parts = [np.flatnonzero(data.train_y.numpy() == 1), np.arange(60)]
    piece = take(data, "client:0/test", parts)
    assert (piece.name, piece.n) == ("client:0/test", 10)
    assert torch.equal(piece.x_raw, data.test_x[data.test_y == 1])
    assert take(data, "client:1/test", parts).n == 30


def test_the_own_slice_holds_all_test_examples_of_the_clients_classes(data):
    parts = [np.flatnonzero(data.train_y.numpy() != 1), np.array([0])]
    piece = take(data, "client:0/own", parts)
    assert (piece.name, piece.n) == ("client:0/own", 20)
    assert torch.equal(piece.x_raw, data.test_x[data.test_y != 1])
    assert take(data, "client:1/own", parts).y.tolist() == [0] * 10
    assert take(data, "client:0/own", parts, samples=4).n == 4


def test_own_takes_all_where_the_personal_test_takes_a_thousand():
    y = torch.arange(3000) % 2
    data = Dataset("many", torch.randn(4, 2), y[:4], torch.randn(3000, 2), y, 2)
    assert [take(data, f"client:0/{kind}", [np.arange(4)]).n for kind in ("own", "test")] == [
        3000,
        1000,
    ]


@pytest.mark.parametrize(
    "spec, message",
    [
        ("client:2/own", "client:2/own of data set 'toy' is empty"),
        ("trian", "did you mean 'train'"),
        ("client:x", "unknown slice"),
        ("client:1/valid", "unknown slice"),
        ("client:-1", "unknown slice"),
        ("", "unknown slice"),
        (7, "unknown slice"),
        ("client:4", "has 4 clients; use client:0 to client:3"),
        ("client:2", "client:2/train of data set 'toy' is empty"),
        ("client:2/test", "client:2/test of data set 'toy' is empty"),
    ],
)
def test_wrong_slices_are_explained(data, parts, spec, message):
    with pytest.raises(FldiagError, match=message) as caught:
        take(data, spec, parts)
    assert caught.value.remedy


def test_a_client_slice_without_or_with_a_foreign_partition(data):
    with pytest.raises(FldiagError, match="needs a partition"):
        take(data, "client:0")
    with pytest.raises(FldiagError, match="example 60, and data set 'toy' has 60"):
        take(data, "client:0", [np.array([3, 60])])


@pytest.mark.parametrize("samples", [0, -3, 1.5, True])
def test_samples_must_be_a_positive_whole_number(data, samples):
    with pytest.raises(FldiagError, match="samples = "):
        take(data, "test", samples=samples)


def test_slices_of_a_made_partition(data):
    parts = partition.make("iid", data.train_y, 4, 0)
    together = torch.cat([take(data, f"client:{k}", parts).x_raw for k in range(4)])
    assert torch.equal(together.flatten(1).sort(0).values, data.train_x.flatten(1).sort(0).values)
