"""Augmented batches keep the bits they had when the first runs were trained: those runs resume."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fldiag.data import Dataset
from fldiag.data.named import SETS
from fldiag.seeding import torch_rng

with np.load(Path(__file__).parent / "augment.npz", allow_pickle=False) as _file:
    GOLDEN = {key: _file[key] for key in _file.files}


@pytest.mark.parametrize("name", [key for key in GOLDEN if "@" in key and " " not in key])
def test_crops_flips_and_cutout_keep_their_bits(name):
    """Six images as a training batch, drawn as those of client 0 in round 0 of a run of seed 7."""
    base, _, variant = name.partition("@")
    look = vars(SETS[base].variants[variant]) | {"repeat": 1}
    x, y = torch.from_numpy(GOLDEN["images"]), torch.zeros(6, dtype=torch.int64)
    batch = Dataset("golden", x, y, x, y, 1, **look).batch(
        torch.arange(6), torch_rng(7, "augment", 0, 0)
    )
    assert np.array_equal(batch.numpy(), GOLDEN[name])
