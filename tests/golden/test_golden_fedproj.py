"""The projection rule of FedProj's released client."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fldiag.parts.projection import project


@pytest.mark.parametrize("branch", range(4))
def test_gradients_of_the_released_client(branch):
    """0: inner product >= 0; 1: memory gradient too small; 2: projected; 3: projected with clamped coefficient."""
    with np.load(Path(__file__).parent / "fedproj_projection.npz", allow_pickle=False) as file:
        z = {k: file[k] for k in file.files}
    hyper = json.loads(str(z["hyper"]))
    rows = z["branch"] == branch
    assert rows.sum() >= 5
    g, h, theirs = (torch.from_numpy(z[k][rows]) for k in ("g_new", "g_glob", "g_proj"))
    ours = project(g, h, eps=hyper["eps"], min_norm_sq=hyper["min_norm_sq"], clamp=hyper["clamp"])
    assert float((ours - theirs).abs().max()) <= 1e-10
    assert torch.equal(ours, g) == (branch < 2)
    if branch in (1, 3):  # the thresholds decide here
        assert float((project(g, h, eps=hyper["eps"]) - theirs).abs().max()) > 1e-6
