"""What a model sees of stored examples, which examples a slice holds, and what does not fit together."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits, load_iris
from torchvision import transforms

from fldiag.data import Dataset, load, take
from fldiag.data.arrays import moments, ready
from fldiag.data.dataset import spread
from fldiag.errors import FldiagError
from fldiag.seeding import torch_rng

PIXELS = torch.randint(0, 256, (12, 3, 6, 8), generator=torch.Generator().manual_seed(0)).byte()
LABELS = torch.arange(12) % 4
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)


def dataset(x=PIXELS, y=LABELS, classes=4, **options):
    """A data set that is tested on its first four examples, if nothing else is said."""
    options = {"name": "mine", "test_x": x[:4], "test_y": y[:4], **options}
    return Dataset(train_x=x, train_y=y, classes=classes, **options)


def test_a_model_sees_what_torchvision_makes_of_pixels():
    shown = dataset(mean=MEAN, std=STD).batch(torch.tensor([3, 3, 0]))
    steps = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    true = [steps(PIXELS[i].permute(1, 2, 0).numpy()) for i in (3, 3, 0)]
    assert torch.equal(shown, torch.stack(true))
    gray = dataset(PIXELS[:, :1], repeat=3)
    assert torch.equal(gray.batch(torch.arange(12)), PIXELS[:, :1].repeat(1, 3, 1, 1) / 255)
    assert gray.shape == (3, 6, 8)


def test_tokens_stay_as_they_are():
    data, index = dataset(torch.arange(24).reshape(12, 2)), torch.tensor([5])
    assert data.batch(index).tolist() == [[10, 11]] and data.tokens
    assert ready(data.batch(index), "cpu", torch.float64).dtype == torch.int64
    assert take(data, "test").batch(1, 3)[0].tolist() == [[2, 3], [4, 5]]


def test_a_fingerprint_names_what_a_model_can_learn_and_nothing_else():
    alike = [{}, {"name": "yours"}, {"augment": ("hflip",)}]
    changes = [{"x": PIXELS.flip(0)}, {"test_y": LABELS[1:5]}, {"classes": 5}, {"repeat": 2}]
    changes.append({"mean": MEAN, "std": STD})
    marks = [dataset(**options).fingerprint() for options in alike + changes]
    assert len({*marks[:3]}) == 1 and len({*marks[2:]}) == 6


NAN = torch.full((12, 4), torch.nan)
FAULTS = {
    "inputs and 11 targets": {"y": LABELS[:11]},
    "each example needs both": {"x": PIXELS[:0], "y": LABELS[:0]},
    "labels go from 0 to 3": {"classes": 3},
    "labels go from -1": {"y": LABELS - 1},
    "targets are int32": {"y": LABELS.int()},
    "targets are float32": {"y": LABELS.float()},
    "training examples hold a value that is not finite": {"y": NAN, "test_y": torch.ones(4, 4)},
    "inputs are uint8": {"x": PIXELS[:, 0, 0]},
    "examples hold a value that is not finite": {"x": NAN},
    "have different forms": {"test_x": PIXELS[:4, :1]},
    "training and test examples": {"test_y": torch.ones(4, 4)},
    "means and deviations": {"mean": (0.5,), "std": (0.5,)},
    "above 0": {"mean": MEAN, "std": (0.2, 0.3, 0.0)},
    "augment and repeat": {"x": torch.ones(12, 3), "augment": ("hflip",)},
}


@pytest.mark.parametrize("words", FAULTS)
def test_what_does_not_fit_is_one_sentence(words):
    with pytest.raises(FldiagError, match=words):
        dataset(**FAULTS[words])


def test_moments_are_numpys_and_a_constant_channel_has_deviation_1():
    x = torch.from_numpy(np.random.default_rng(0).normal(3, 2, (5000, 4, 3))).float()
    x[:, 1] = 7
    mean, std = moments(x)
    flat = x.double().numpy().transpose(1, 0, 2).reshape(4, -1)
    assert np.allclose(mean, flat.mean(1), rtol=1e-13)
    assert np.allclose(std, np.where([0, 1, 0, 0], 1, flat.std(1)), rtol=1e-12)
    assert np.allclose(moments(PIXELS)[0], PIXELS.double().mean((0, 2, 3)) / 255, rtol=1e-13)


def test_a_few_examples_keep_the_shares_of_the_classes():
    y = torch.from_numpy(np.random.default_rng(1).choice(4, 1000, p=[0.5, 0.3, 0.15, 0.05]))
    chosen = spread(y, 60)
    counts = torch.bincount(y[chosen], minlength=4)
    assert ((counts - 60 * torch.bincount(y) / 1000).abs() <= 1).all()
    assert (chosen.diff() > 0).all() and torch.equal(spread(y, 1000), torch.arange(1000))
    assert spread(y.float()[:, None], 4).tolist() == [125, 375, 625, 875]


PARTS = [np.array([0, 4, 8]), np.array([1, 2, 3, 5]), np.array([], dtype=np.int64)]


def test_slices_hold_the_examples_that_they_name():
    data, augmented = dataset(), dataset(augment=("hflip@1",))
    for spec, index in {
        "train": range(12),
        "test": range(4),
        "client:1": [1, 2, 3, 5],
        "client:0/train": [0, 4, 8],
        "client:0/own": [0],  # its examples are all of class 0
        "client:0/test": [0],
    }.items():
        part, x = take(data, spec, PARTS), PIXELS[list(index)]
        assert torch.equal(part.x_raw, x) and torch.equal(part.y, LABELS[list(index)])
        assert part.n == len(index) and torch.equal(part.batch(0, part.n)[0], x / 255)
        assert torch.equal(take(augmented, spec, PARTS).batch(0, part.n)[0], x / 255)
    assert take(data, "client:1/test", PARTS, tests=[[], [3]]).y.tolist() == [3]
    assert take(data, "train").x_raw.data_ptr() == PIXELS.data_ptr()  # not copied
    assert not torch.equal(augmented.batch(torch.arange(12), torch_rng(0, "x")), PIXELS / 255)


def test_a_personal_test_has_the_clients_own_mixture():
    train, pool = torch.tensor([0] * 57 + [1] * 43), torch.arange(4000) % 4
    data = Dataset("x", torch.ones(100, 1), train, torch.ones(4000, 1), pool, 4)
    parts = [np.arange(100)] * 2
    first, again, other = (take(data, f"client:{k}/test", parts).y for k in (0, 0, 1))
    assert torch.bincount(first).tolist() == [570, 430]
    assert torch.equal(first, again) and not torch.equal(first, other)


NUMBERS = {"y": torch.ones(12, 4), "test_x": PIXELS[:0], "test_y": torch.ones(0, 4)}


def test_without_test_examples_a_model_is_judged_by_training_examples():
    data = dataset(**NUMBERS)
    assert data.regression and not data.tested and data.evaluation[0] == "train"


@pytest.mark.parametrize(
    ("options", "spec", "parts", "words"),
    [
        ({}, "trian", None, "unknown slice"),
        ({}, "client:x", None, "unknown slice"),
        ({}, "client:0", None, "needs a partition .* has 0 clients"),
        ({}, "client:3", PARTS, "has 3 clients"),
        ({}, "client:2", PARTS, "is empty"),
        (NUMBERS, "client:0/own", PARTS, "no classes"),
        (NUMBERS, "test", None, "slice test .* is empty"),
    ],
)
def test_slices_that_do_not_exist(options, spec, parts, words):
    with pytest.raises(FldiagError, match=words):
        take(dataset(**options), spec, parts)


def test_the_embedded_sets_are_scikit_learns():
    digits, iris = load("digits"), load("iris")
    for data, source, size in ((digits, load_digits(), 1500), (iris, load_iris(), 120)):
        labels = torch.cat([data.train_y, data.test_y]).bincount()
        assert labels.tolist() == np.bincount(source.target).tolist() and len(data.train_y) == size
    both = torch.cat([digits.train_x, digits.test_x]).flatten(1).mul(16).numpy()
    assert sorted(map(tuple, both)) == sorted(map(tuple, load_digits().data))
    x = iris.train_x.double()
    assert x.mean(0).abs().max() < 1e-6 and (x.std(0, correction=0) - 1).abs().max() < 1e-6
