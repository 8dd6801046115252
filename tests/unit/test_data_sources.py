"""Data sets from every source, on tiny files written here; nothing is read from outside the test."""

import struct

import numpy as np
import pytest
import torch
import torchvision
from torchvision import transforms

from fldiag import Config, data, registry
from fldiag.errors import FldiagError


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    monkeypatch.delenv("FLDIAG_DATA", raising=False)


def write(path, shape=(32, 32, 3), classes=10, n=(20, 12), **change):
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in zip(("train", "test"), n, strict=True):
        arrays[f"{split}_images"] = rng.integers(0, 256, (count, *shape), dtype=np.uint8)
        arrays[f"{split}_labels"] = (np.arange(count) % classes).astype(np.uint8)
    arrays = {key: value for key, value in {**arrays, **change}.items() if value is not None}
    np.savez(path, **arrays)
    return arrays


def test_digits():
    digits = data.load("digits")
    assert digits.train_x.shape == (1500, 1, 8, 8) and digits.test_x.shape == (297, 1, 8, 8)
    assert digits.shape == (1, 8, 8) and digits.classes == 10
    pixels = digits.train_x * 16
    assert torch.equal(pixels, pixels.round()) and pixels.min() == 0 and pixels.max() == 16
    x = digits.normalise(digits.train_x).double()
    assert abs(float(x.mean())) < 1e-3 and float(x.std(correction=0)) == pytest.approx(1, abs=1e-3)
    assert torch.equal(digits.train_x, data.load("digits").train_x)


@pytest.mark.parametrize("name, per_class", [("digits", None), ("iris", 10)])
def test_embedded_splits_are_stratified_and_lose_nothing(name, per_class):
    from sklearn.datasets import load_digits, load_iris

    every = {"digits": load_digits, "iris": load_iris}[name]()
    loaded = data.load(name)
    total, test = np.bincount(every.target), torch.bincount(loaded.test_y).numpy()
    assert np.array_equal(torch.bincount(loaded.train_y).numpy() + test, total)
    assert np.abs(test - total * len(loaded.test_y) / total.sum()).max() <= 1
    if per_class:
        assert set(test) == {per_class}
    if name == "digits":
        both = np.concatenate([loaded.train_x, loaded.test_x]).reshape(1797, 64) * 16
        assert sorted(map(tuple, both)) == sorted(map(tuple, every.data))


def test_iris_is_standardised_by_its_training_split():
    iris = data.load("iris")
    assert iris.shape == (4,) and iris.classes == 3 and iris.train_x.dtype == torch.float32
    assert torch.allclose(iris.train_x.mean(0), torch.zeros(4), atol=1e-6)
    assert torch.allclose(iris.train_x.std(0, correction=0), torch.ones(4), atol=1e-6)
    assert not torch.allclose(iris.test_x.mean(0), torch.zeros(4), atol=1e-3)


def test_descriptions_are_one_sentence():
    for name in ("digits", "iris", "mnist", "cifar10", "cifar100", "svhn"):
        assert registry.dataset.get(name).headline.endswith(".")


@pytest.mark.parametrize(
    "name, shape, classes, seen",
    [
        ("mnist", (28, 28), 10, (3, 28, 28)),
        ("cifar10", (32, 32, 3), 10, (3, 32, 32)),
        ("cifar100", (32, 32, 3), 100, (3, 32, 32)),
        ("svhn", (32, 32, 3), 10, (3, 32, 32)),
    ],
)
@pytest.mark.parametrize("by_environment", [False, True])
def test_image_sets_from_npz(tmp_path, monkeypatch, name, shape, classes, seen, by_environment):
    arrays = write(tmp_path / f"{name}.npz", shape, classes)
    if by_environment:
        monkeypatch.setenv("FLDIAG_DATA", str(tmp_path))
    loaded = data.load(name, root=None if by_environment else tmp_path)
    assert (loaded.shape, loaded.classes, loaded.train_x.dtype) == (seen, classes, torch.uint8)
    images = arrays["test_images"].reshape(12, *shape[:2], -1)
    finish = transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize(loaded.mean, loaded.std)]
    )
    expected = torch.stack([finish(image) for image in images]).expand(-1, seen[0], -1, -1)
    assert torch.equal(loaded.normalise(loaded.test_x), expected)
    assert loaded.test_y.tolist() == arrays["test_labels"].tolist()
    assert loaded.batch(torch.tensor([3, 3, 0]), torch.Generator()).shape == (3, *seen)


def test_the_argument_wins_over_the_environment(tmp_path, monkeypatch):
    for folder, count in (("a", 20), ("b", 30)):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "mnist.npz", (28, 28), n=(count, 10))
    monkeypatch.setenv("FLDIAG_DATA", str(tmp_path / "a"))
    assert len(data.load("mnist", root=tmp_path / "b").train_y) == 30


def write_idx(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()
    )


def test_mnist_from_torchvisions_files(tmp_path):
    arrays = write(tmp_path / "x.npz", (28, 28))
    for ours, theirs in (("train", "train"), ("test", "t10k")):
        write_idx(tmp_path / f"MNIST/raw/{theirs}-images-idx3-ubyte", arrays[f"{ours}_images"])
        write_idx(tmp_path / f"MNIST/raw/{theirs}-labels-idx1-ubyte", arrays[f"{ours}_labels"])
    loaded = data.load("mnist", root=tmp_path)
    assert np.array_equal(loaded.train_x[:, 0].numpy(), arrays["train_images"])
    assert np.array_equal(loaded.test_x[:, 0].numpy(), arrays["test_images"])
    assert loaded.test_y.tolist() == arrays["test_labels"].tolist()


@pytest.mark.parametrize(
    "name, theirs, classes",
    [("cifar10", "CIFAR10", 10), ("cifar100", "CIFAR100", 100), ("svhn", "SVHN", 10)],
)
@pytest.mark.parametrize("download", [False, True])
def test_colour_sets_through_torchvision(tmp_path, monkeypatch, name, theirs, classes, download):
    arrays = write(tmp_path / "x.npz", classes=classes)
    asked = []

    class Fake:
        def __init__(self, root, train=None, split=None, download=None):
            key = split or ("train" if train else "test")
            asked.append((root, key, download))
            self.data, self.targets = arrays[f"{key}_images"], arrays[f"{key}_labels"].tolist()
            if name == "svhn":  # torchvision gives SVHN channels first, with an array of labels
                self.data = np.moveaxis(self.data, -1, 1)
                self.labels = arrays[f"{key}_labels"].astype(np.int64)
                del self.targets

    monkeypatch.setattr(torchvision.datasets, theirs, Fake)
    loaded = data.load(name, root=tmp_path, download=download)
    assert asked == [(str(tmp_path), "train", download), (str(tmp_path), "test", download)]
    assert np.array_equal(loaded.train_x.permute(0, 2, 3, 1).numpy(), arrays["train_images"])
    assert loaded.test_y.tolist() == arrays["test_labels"].tolist()


@pytest.mark.parametrize("name", ["mnist", "cifar10", "cifar100", "svhn"])
def test_an_image_set_that_is_nowhere_names_every_place_and_the_way_out(tmp_path, name):
    with pytest.raises(FldiagError) as caught:
        data.load(name, root=tmp_path)
    assert str(tmp_path / f"{name}.npz") in caught.value.what and "torchvision" in caught.value.what
    for word in (f"{name}.npz", "train_images", "FLDIAG_DATA", "--download"):
        assert word in caught.value.remedy
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FldiagError, match="needs a data folder, and none is set; set FLDIAG_DATA"):
        data.load(name)


def test_a_failed_download_is_told(tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise OSError("host unreachable")

    monkeypatch.setattr(torchvision.datasets, "MNIST", refuse)
    with pytest.raises(FldiagError, match=r"its download failed.*host unreachable"):
        data.load("mnist", root=tmp_path, download=True)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"shape": (28, 28, 3)},
            r"train images are uint8 \(3, 28, 28\).*cifar10 has uint8 \(3, 32, 32\)",
        ),
        ({"classes": 11}, "labels go up to 10, and cifar10 has 10 classes"),
        ({"test_images": np.zeros((12, 32, 32, 3), dtype=np.float32)}, "test images are float32"),
    ],
)
def test_a_named_file_with_other_data_is_refused(tmp_path, change, message):
    write(tmp_path / "cifar10.npz", **change)
    with pytest.raises(FldiagError, match=message):
        data.load("cifar10", root=tmp_path)


@pytest.mark.parametrize(
    "shape, seen", [((9, 7), (1, 9, 7)), ((9, 7, 3), (3, 9, 7)), ((9, 7, 5), (5, 9, 7))]
)
def test_npz_images_are_normalised_by_their_training_split(tmp_path, shape, seen):
    arrays = write(tmp_path / "own.npz", shape, classes=4)
    loaded = data.load(f"npz:{tmp_path / 'own.npz'}", normalise="standard")
    assert (loaded.shape, loaded.classes, loaded.train_x.dtype) == (seen, 4, torch.uint8)
    x = loaded.normalise(loaded.train_x).double()
    assert torch.allclose(x.mean((0, 2, 3)), torch.zeros(seen[0], dtype=torch.float64), atol=1e-5)
    assert torch.allclose(
        x.std((0, 2, 3), correction=0), torch.ones(seen[0], dtype=torch.float64), atol=1e-5
    )
    mean, std = arrays["train_images"].mean() / 255, arrays["train_images"].std() / 255
    if len(shape) == 2:
        assert loaded.mean == pytest.approx((mean,)) and loaded.std == pytest.approx((std,))


def test_own_data_are_normalised_only_as_far_as_it_is_said(tmp_path):
    pixels = write(tmp_path / "pixels.npz", (9, 7), classes=4)["train_images"]
    floats = np.arange(40.0, dtype=np.float32).reshape(10, 4)
    write(
        tmp_path / "floats.npz", n=(10, 5), classes=2, train_images=floats, test_images=floats[:5]
    )

    def seen(name, **how):
        loaded = data.load(f"npz:{tmp_path / name}.npz", **how)
        return loaded.normalise(loaded.train_x).numpy()

    assert np.array_equal(seen("pixels")[:, 0], pixels.astype(np.float32) / 255)
    assert np.array_equal(seen("pixels", normalise="unit"), seen("pixels"))
    assert np.array_equal(seen("pixels", normalise="none")[:, 0], pixels.astype(np.float32))
    assert np.array_equal(seen("floats"), floats) and np.array_equal(
        seen("floats", normalise="none"), floats
    )
    assert np.allclose(
        seen("floats", normalise="standard"), (floats - floats.mean(0)) / floats.std(0)
    )
    with pytest.raises(FldiagError, match="these inputs are floats"):
        seen("floats", normalise="unit")
    digits = data.load("digits")
    assert (
        data.load("digits", normalise="standard").mean
        and digits.fingerprint() == data.load("digits").fingerprint()
    )


def test_npz_features_with_a_constant_column(tmp_path):
    train, test = np.arange(40.0).reshape(10, 4), np.ones((5, 4))
    train[:, 2] = 7
    write(tmp_path / "f.npz", n=(10, 5), classes=2, train_images=train, test_images=test)
    loaded = data.load(f"npz:{tmp_path / 'f.npz'}", normalise="standard")
    x = loaded.normalise(loaded.train_x)
    assert loaded.shape == (4,) and loaded.std[2] == 1
    assert torch.allclose(x[:, [0, 1, 3]].std(0, correction=0), torch.ones(3))
    assert torch.equal(x[:, 2], torch.zeros(10))
    assert float(loaded.normalise(loaded.test_x)[0, 0]) == pytest.approx(
        (1 - 18) / train[:, 0].std()
    )


def test_npz_labels_as_a_column_and_a_bare_name_under_the_data_folder(tmp_path):
    write(
        tmp_path / "chest.npz",
        (8, 8),
        2,
        (6, 4),
        train_labels=np.array([[0], [1], [1], [0], [1], [0]]),
    )
    assert data.load("chest", root=tmp_path).train_y.tolist() == [0, 1, 1, 0, 1, 0]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"train_labels": None}, "lacks train_labels"),
        ({"test_images": None, "test_labels": None}, "lacks test_images, test_labels"),
        ({"train_labels": np.arange(19)}, "20 train_images and 19 train_labels"),
        (
            {"test_images": np.zeros((0, 32, 32, 3), np.uint8), "test_labels": np.zeros(0, int)},
            "0 test_images",
        ),
        ({"train_labels": np.r_[np.zeros(19, int), -1]}, "holds -1 at position 19"),
        ({"train_labels": np.linspace(0, 1, 20)}, "train_labels is float64"),
        ({"train_labels": np.zeros((20, 2), int)}, r"train_labels is int64 \[20, 2\]"),
        ({"train_images": np.array([None] * 20)}, "train_images is an array of Python objects"),
        ({"train_images": np.array(["a"] * 20)[:, None]}, "train_images is an array of <U1"),
        ({"train_images": np.zeros(20)}, r"train_images has shape \[20\]"),
        ({"train_images": np.zeros((20, 3, 32, 32), np.uint8)}, "looks like N,C,H,W"),
        ({"test_images": np.zeros((12, 16, 16, 3), np.uint8)}, "same input shape"),
        (
            {"train_images": np.full((20, 4), np.nan), "test_images": np.zeros((12, 4))},
            "input 0 holds a value",
        ),
        ({"train_images": np.array(3)}, "single number"),
    ],
)
def test_faulty_npz_files_are_explained(tmp_path, change, message):
    write(tmp_path / "bad.npz", **change)
    with pytest.raises(FldiagError, match=message) as caught:
        data.load(f"npz:{tmp_path / 'bad.npz'}")
    assert caught.value.remedy


def test_unreadable_npz_files_are_explained(tmp_path):
    with pytest.raises(FldiagError, match="no file"):
        data.load(f"npz:{tmp_path / 'none.npz'}")
    with pytest.raises(FldiagError, match="without a path"):
        data.load("npz:")
    write(tmp_path / "cut.npz")
    whole = (tmp_path / "cut.npz").read_bytes()
    flipped = bytearray(whole)
    flipped[5000] ^= 255
    np.save(tmp_path / "one.npy", np.zeros(3))
    for content in (
        b"",
        b"hello",
        whole[:3000],
        bytes(flipped),
        (tmp_path / "one.npy").read_bytes(),
    ):
        (tmp_path / "cut.npz").write_bytes(content)
        with pytest.raises(FldiagError, match=r"not a readable npz file|not an npz archive"):
            data.load(f"npz:{tmp_path / 'cut.npz'}")
    with pytest.raises(FldiagError, match="not a readable npz file"):
        data.load(f"npz:{tmp_path}")


def test_unknown_names_are_refused(tmp_path):
    told = r"unknown data set 'cifr10' and there is no .*cifr10\.npz.*mean 'cifar10'"
    with pytest.raises(FldiagError, match=told):
        data.load("cifr10", root=tmp_path)
    for name in ("", None, 3):
        with pytest.raises(FldiagError, match="data set name"):
            data.load(name)


def test_a_registered_builder_must_return_a_dataset(monkeypatch):
    monkeypatch.setitem(
        registry.dataset.entries,
        "odd",
        registry.Entry("dataset", "odd", lambda root, download: (1, 2, 3, 4)),
    )
    with pytest.raises(
        FldiagError, match=r"'odd' returned a tuple of 4; return fldiag\.data\.Dataset$"
    ):
        data.load("odd")


@pytest.mark.parametrize(
    "value",
    [
        "0.5,0.4,0.3/0.25,0.2,0.1",
        " 0.5, 0.4,0.3 /0.25,0.20,0.1",
        ((0.5, 0.4, 0.3), (0.25, 0.2, 0.1)),
        [[0.5, 0.4, 0.3], np.array([0.25, 0.2, 0.1])],
    ],
)
def test_own_mean_and_deviation(tmp_path, value):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 2, 2, 3), dtype=np.uint8)
    np.savez(
        tmp_path / "f.npz",
        train_images=pixels,
        test_images=pixels,
        train_labels=np.arange(6),
        test_labels=np.arange(6),
    )
    loaded = data.load(f"npz:{tmp_path / 'f.npz'}", normalise=value)
    expected = (pixels / 255 - [0.5, 0.4, 0.3]) / [0.25, 0.2, 0.1]
    assert np.allclose(
        loaded.normalise(loaded.train_x).numpy(), np.moveaxis(expected, -1, 1), atol=1e-5
    )
    text = "0.5,0.4,0.3/0.25,0.2,0.1"
    assert Config.load("digits", data__normalise=value).data.normalise == text
    assert (
        Config.load("digits", data__normalise=value).hash
        == Config.load("digits", data__normalise=text).hash
    )


@pytest.mark.parametrize(
    "value, words",
    [
        ("abc", "not a known normalisation"),
        ("0.5", "not a known normalisation"),
        ("0.5/x", "not a known normalisation"),
        (0.5, "not a known normalisation"),
        ("1/2/3", "not a known normalisation"),
        ("0.5,0.5/0.2", "2 means and 1 deviations"),
        ("0.5/0", "above 0"),
        ("0.5/-1", "above 0"),
        ("nan/1", "finite"),
        ("0.5/inf", "finite"),
        ((0.5, 0.0), "above 0"),
        ("0.5,0.5/0.2,0.2", "have 3 channels"),
        ("125.3,123,113.9/63,62,66.7", "divided by 255"),
    ],
)
def test_a_normalisation_that_is_wrong_has_a_remedy_that_works(tmp_path, value, words):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 2, 2, 3), dtype=np.uint8)
    np.savez(
        tmp_path / "f.npz",
        train_images=pixels,
        test_images=pixels,
        train_labels=np.arange(6),
        test_labels=np.arange(6),
    )
    name = f"npz:{tmp_path / 'f.npz'}"
    with pytest.raises(FldiagError, match=words) as caught:
        data.load(name, normalise=value)
    remedies = [
        text.rstrip(",")
        for text in caught.value.remedy.split()
        if text.count("/") == 1 and "," in text
    ]
    assert remedies and data.load(name, normalise=remedies[-1]).mean
