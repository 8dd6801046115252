"""Public unlabelled data: another set, or a part of the private one that leaves it."""

from functools import partial

import numpy as np
import pytest
import torch

from fldiag import data
from fldiag.data.public import deal, load_public
from fldiag.errors import FldiagError
from fldiag.sections import PartitionSection


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    monkeypatch.delenv("FLDIAG_DATA", raising=False)


@pytest.fixture
def private():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (130, 3, 32, 32), dtype=torch.uint8, generator=generator)
    y = torch.arange(130).clamp(max=99) // 25  # classes of 25, 25, 25 and 55
    order = torch.randperm(130, generator=generator)
    return data.Dataset(
        "private",
        x[order],
        y[order],
        x[:4],
        y[:4],
        4,
        mean=(0.5,) * 3,
        std=(0.25,) * 3,
        augment=("hflip",),
    )


@pytest.fixture
def root(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "cifar100.npz",
        train_images=rng.integers(0, 256, (20, 32, 32, 3), dtype=np.uint8),
        train_labels=np.arange(20),
        test_images=rng.integers(0, 256, (10, 32, 32, 3), dtype=np.uint8),
        test_labels=np.arange(10),
    )
    return tmp_path


@pytest.mark.parametrize("spec", ["cifar100", "cifar100@fedproj", "npz"])
def test_another_set_gives_all_its_inputs_by_its_own_transform(private, root, spec):
    spec = f"npz:{root / 'cifar100.npz'}" if spec == "npz" else spec
    inputs, mine = load_public(spec, private, root)
    other = data.load(spec, root)
    assert list(mine) == list(range(130))
    assert inputs.shape == (30, *private.shape) and inputs.dtype == torch.float32
    assert torch.equal(inputs, other.normalise(torch.cat([other.train_x, other.test_x])))


def test_a_factory_can_give_public_data():
    iris = data.load("iris")
    inputs, _ = load_public(
        f"{__name__}:flowers", iris, find=partial(data.load, allow_code={f"{__name__}:flowers"})
    )
    assert torch.equal(inputs, torch.cat([torch.ones(5, 4), torch.zeros(2, 4)]))


def flowers():
    return torch.ones(5, 4), torch.zeros(5).long(), torch.zeros(2, 4), torch.zeros(2).long()


@pytest.mark.parametrize("size", [1, 7, 29])
def test_size_keeps_a_seeded_subset_in_order(private, root, size):
    every, _ = load_public("cifar100", private, root)
    some, again, other = (
        load_public("cifar100", private, root, size=size, seed=s)[0] for s in (3, 3, 4)
    )
    assert len(some) == size and torch.equal(some, again) and not torch.equal(some, other)
    where = [next(i for i, e in enumerate(every) if torch.equal(e, x)) for x in some]
    assert where == sorted(set(where))
    assert torch.equal(load_public("cifar100", private, root, size=100)[0], every)


def test_a_subset_covers_both_splits_evenly(private, root):
    every, _ = load_public("cifar100", private, root)
    test = sum(
        int(
            (load_public("cifar100", private, root, size=6, seed=s)[0][:, None] == every[20:])
            .flatten(2)
            .all(2)
            .sum()
        )
        for s in range(60)
    )
    assert test == pytest.approx(120, abs=5 * np.sqrt(60 * 6 * 2 / 9))


def keys(x):
    return [row.numpy().tobytes() for row in x]


@pytest.mark.parametrize("n", [1, 13, 40, 129])
def test_a_holdout_leaves_the_clients_and_is_stratified(private, n):
    inputs, mine = load_public(f"holdout:{n}", private, seed=5)
    assert inputs.shape == (n, 3, 32, 32) and len(mine) == 130 - n and mine.dtype == np.int64
    every = keys(private.normalise(private.train_x))
    taken = [every.index(key) for key in keys(inputs)]
    assert taken == sorted(taken) and sorted({*taken, *mine.tolist()}) == list(range(130))
    assert mine.tolist() == sorted(set(mine.tolist()))
    counts = np.bincount(private.train_y[taken], minlength=4)
    assert np.abs(counts - n * np.array([25, 25, 25, 55]) / 130).max() < 1


def test_a_holdout_is_drawn_by_its_seed(private):
    (a, _), (b, _), (c, _) = (load_public("holdout:20", private, seed=s) for s in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c)
    some, mine = load_public("holdout:20", private, size=5)
    assert len(some) == 5 and len(mine) == 110 and set(keys(some)) < set(keys(a))


def test_a_holdout_draws_within_a_class_at_random(private):
    times = np.zeros(130)
    for seed in range(200):
        times[np.setdiff1d(np.arange(130), load_public("holdout:26", private, seed=seed)[1])] += 1
    assert times.min() > 15 and times.max() < 70  # 40 times each, deviation 5.7


def test_a_holdout_of_a_regression_set():
    x, y = torch.randn(10, 2), torch.randn(10, 3)
    inputs, mine = load_public("holdout:4", data.Dataset("line", x, y, x, y, 3))
    assert inputs.shape == (4, 2) and len(mine) == 6


@pytest.mark.parametrize(
    "spec, size, message",
    [
        (
            "digits",
            None,
            r"'digits' has inputs of shape \(1, 8, 8\), and the private data 'private' \(3, 32, 32\); .*holdout:N",
        ),
        ("holdout:0", None, "holdout:N with N from 1 to 129"),
        ("holdout:130", None, "N from 1 to 129"),
        ("holdout", None, "N from 1 to 129"),
        ("holdout:x", None, "'holdout:x'"),
        ("holdout:-3", None, "N from 1"),
        ("cifar100", 0, "size = 0"),
        ("cifar100", True, "size = True"),
        ("cifar100", 2.5, "size = 2.5"),
        ("cifr100", None, "did you mean 'cifar100'"),
    ],
)
def test_what_cannot_be_public_is_explained(private, root, spec, size, message):
    with pytest.raises(FldiagError, match=message) as caught:
        load_public(spec, private, root, size=size)
    assert caught.value.remedy


def test_the_private_set_itself_is_refused(root):
    for spec in ("cifar100", "cifar100@fedtoga"):
        with pytest.raises(FldiagError, match="are the private data themselves"):
            load_public(spec, data.load("cifar100", root), root)


def test_dealing_leaves_out_what_is_held_out():
    digits = data.load("digits")
    spec = PartitionSection(kind="iid")
    everything = deal(digits, spec, 7)
    assert sorted(np.concatenate(everything)) == list(range(len(digits.train_y)))
    parts = deal(digits, spec, 7, "holdout:100")
    _, private = load_public("holdout:100", digits, seed=spec.seed)
    assert np.array_equal(np.sort(np.concatenate(parts)), private)
    with pytest.raises(FldiagError, match="more than the 1 training"):
        deal(digits, spec, 2, f"holdout:{len(digits.train_y) - 1}")
