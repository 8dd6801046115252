"""The two data sets that need no file and no network: scikit-learn carries them."""

from __future__ import annotations

import torch
from torch import Tensor

from fldiag import registry
from fldiag.data.arrays import moments, spread
from fldiag.data.dataset import Dataset

#: Of pixel/16 over the 1,500 training images.
DIGITS_MEAN, DIGITS_STD = 0.3053, 0.3760


@registry.dataset("digits", embedded=True)
def digits(root: str | None = None, download: bool = False) -> Dataset:
    """Handwritten digits, 8x8 gray, 10 classes, 1,500 train / 297 test (embedded, from scikit-learn).

    The split is fixed and stratified: test images lie evenly spaced through each class.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = torch.from_numpy(bunch.images).float().div(16)[:, None]
    return Dataset(
        "digits",
        *_split(x, torch.from_numpy(bunch.target).long(), 297),
        classes=10,
        mean=(DIGITS_MEAN,),
        std=(DIGITS_STD,),
    )


@registry.dataset("iris", embedded=True)
def iris(root: str | None = None, download: bool = False) -> Dataset:
    """Iris flowers, 4 features, 3 classes, 120 train / 30 test (embedded, from scikit-learn).

    Features are standardised with the training split's mean and deviation; the split is fixed and stratified.
    """
    from sklearn.datasets import load_iris

    bunch = load_iris()
    x, y = torch.from_numpy(bunch.data), torch.from_numpy(bunch.target).long()
    train_x, train_y, test_x, test_y = _split(x, y, 30)
    mean, std = (torch.tensor(v, dtype=torch.float64) for v in moments(train_x))
    return Dataset(
        "iris",
        ((train_x - mean) / std).float(),
        train_y,
        ((test_x - mean) / std).float(),
        test_y,
        classes=3,
    )


def _split(x: Tensor, y: Tensor, test: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    held_out = torch.zeros(len(y), dtype=torch.bool)
    held_out[spread(y, test)] = True
    return x[~held_out], y[~held_out], x[held_out], y[held_out]
