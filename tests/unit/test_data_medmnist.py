"""MedMNIST files in the official layout and as plain npz."""

import numpy as np
import pytest
import torch

from fldiag import data
from fldiag.data.images import MEDMNIST
from fldiag.data.preprocessing import PREPROCESSING
from fldiag.errors import FldiagError


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    monkeypatch.delenv("FLDIAG_DATA", raising=False)


def write(path, shape, classes, counts=(9, 6, 5), column=True, **change):
    """The official layout: three splits, labels [n, 1] of uint8."""
    rng = np.random.default_rng(1)
    arrays = {}
    for split, count in zip(("train", "val", "test"), counts, strict=True):
        arrays[f"{split}_images"] = rng.integers(0, 256, (count, *shape), dtype=np.uint8)
        labels = rng.integers(0, classes, (count, 1) if column else count).astype(np.uint8)
        arrays[f"{split}_labels"] = labels
    arrays = {key: value for key, value in {**arrays, **change}.items() if value is not None}
    np.savez(path, **arrays)
    return arrays


@pytest.mark.parametrize("name", MEDMNIST)
def test_the_training_split_is_train_then_validation(tmp_path, name):
    gray = PREPROCESSING[name]["fedsol"].repeat == 3
    classes = MEDMNIST[name][1]
    arrays = write(tmp_path / f"{name}.npz", (28, 28) if gray else (28, 28, 3), classes)
    loaded = data.load(name, root=tmp_path)
    assert (loaded.shape, loaded.classes, loaded.augment, len(loaded.train_y)) == (
        (3, 28, 28),
        classes,
        ("hflip",),
        15,
    )
    expected = np.concatenate([arrays["train_labels"], arrays["val_labels"]])[:, 0]
    assert (
        loaded.train_y.tolist() == expected.tolist()
        and loaded.test_y.tolist() == arrays["test_labels"][:, 0].tolist()
    )
    images = np.concatenate([arrays["train_images"], arrays["val_images"]]).reshape(15, 28, 28, -1)
    pixels = torch.from_numpy(np.moveaxis(images, -1, 1)).float().expand(-1, 3, -1, -1)
    assert torch.allclose(loaded.normalise(loaded.train_x), pixels / 127.5 - 1, atol=1e-6)


@pytest.mark.parametrize("column", [False, True])
def test_a_file_without_validation_split_is_taken_as_it_is(tmp_path, column):
    arrays = write(
        tmp_path / "pneumoniamnist.npz",
        (28, 28),
        2,
        column=column,
        val_images=None,
        val_labels=None,
    )
    loaded = data.load("pneumoniamnist", root=tmp_path)
    assert loaded.train_y.tolist() == arrays["train_labels"].ravel().tolist() and loaded.shape == (
        3,
        28,
        28,
    )


def test_other_npz_files_keep_their_validation_split_out(tmp_path):
    write(tmp_path / "pneumoniamnist.npz", (28, 28), 2)
    assert len(data.load(f"npz:{tmp_path / 'pneumoniamnist.npz'}").train_y) == 9


@pytest.mark.parametrize(
    "change, message",
    [
        ({"val_labels": None}, "lacks val_labels, the other half"),
        ({"val_images": None}, "lacks val_images"),
        (
            {"val_images": np.zeros((6, 14, 14), np.uint8)},
            r"val_images uint8 \[6, 14, 14\]; store both splits alike",
        ),
        ({"val_labels": np.zeros(6, np.uint8)}, "store both splits alike"),
        ({"val_images": np.zeros((7, 28, 28), np.uint8)}, "16 train_images and 15 train_labels"),
        ({"train_labels": np.zeros((8, 1), np.uint8)}, "9 train_images and 8 train_labels"),
        (
            {"train_labels": np.full((9, 1), 2, np.uint8)},
            "labels go up to 2, and pneumoniamnist has 2 classes",
        ),
    ],
)
def test_faulty_files_are_explained(tmp_path, change, message):
    write(tmp_path / "pneumoniamnist.npz", (28, 28), 2, **change)
    with pytest.raises(FldiagError, match=message) as caught:
        data.load("pneumoniamnist", root=tmp_path)
    assert caught.value.remedy


def test_other_sizes_of_the_images_are_refused(tmp_path):
    write(tmp_path / "pathmnist.npz", (64, 64, 3), 9)
    with pytest.raises(
        FldiagError,
        match=r"train images are uint8 \(3, 64, 64\).*pathmnist has uint8 \(3, 28, 28\)",
    ):
        data.load("pathmnist", root=tmp_path)


@pytest.mark.parametrize("download", [False, True])
def test_a_missing_file_names_the_place_and_the_source(tmp_path, download):
    with pytest.raises(FldiagError) as caught:
        data.load("tissuemnist", root=tmp_path, download=download)
    assert str(tmp_path / "tissuemnist.npz") in caught.value.what
    assert ("does not download" in caught.value.what) == download
    assert "medmnist.com" in caught.value.remedy and "FLDIAG_DATA" in caught.value.remedy
    with pytest.raises(
        FldiagError, match=r"none is set; set FLDIAG_DATA .*tissuemnist.npz from medmnist.com"
    ):
        data.load("tissuemnist")
