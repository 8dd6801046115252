"""Augmented batches keep the bits they had when the first runs were trained: those runs resume."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fldiag.data import Dataset
from fldiag.data.preprocessing import PREPROCESSING
from fldiag.seeding import torch_rng

with np.load(Path(__file__).parent / "augment.npz", allow_pickle=False) as _file:
    GOLDEN = {key: _file[key] for key in _file.files}


def augmented(**options):
    """The six images as a training batch, drawn as those of client 0 in round 0 of a run of seed 7."""
    x, y = torch.from_numpy(GOLDEN["images"]), torch.zeros(6, dtype=torch.int64)
    return Dataset("golden", x, y, x, y, 1, **options).batch(
        torch.arange(6), torch_rng(7, "augment", 0, 0)
    )


@pytest.mark.parametrize("name", [key for key in GOLDEN if "@" in key and " " not in key])
def test_crops_flips_and_cutout_keep_their_bits(name):
    look = PREPROCESSING[name.partition("@")[0]][name.partition("@")[2]]
    found = augmented(mean=look.mean, std=look.std, augment=look.augment)
    assert np.array_equal(found.numpy(), GOLDEN[name])


def test_resized_and_jittered_pixels_keep_their_draws():
    # Resizing sums in another order than the code that wrote the file did: a value halfway between two pixels may round
    # the other way, and jitter multiplies that by up to 1.4 * 1.4.
    names = "resizedcrop12 jitter0.4@0.5 hflip"
    off = (
        augmented(side=12, augment=tuple(names.split())) * 255 - torch.from_numpy(GOLDEN[names])
    ).abs()
    assert off.max() <= 2.5 and (off > 0.5).double().mean() < 0.02
