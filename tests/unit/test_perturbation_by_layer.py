"""analyses/perturbation_by_layer.py: the two norms of Lambda on tensors worked out by hand."""

import pandas as pd
import pytest
import torch
from helpers import analysis
from torch import nn

from fldiag.params import Layout


@pytest.fixture(scope="module")
def script():
    return analysis("perturbation_by_layer")


@pytest.fixture(scope="module")
def norms(script):
    """Two layers without bias: first [2, 2] moved by ((3, 0), (4, 5)), second [1, 2] by (-1, 1)."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    d = torch.tensor([3.0, 0, 4, 5, -1, 1])
    g_p = torch.tensor([1.0, 2, 0, 2, 0, 4])
    rows = pd.DataFrame(script.perturbation_norms(g_p, d, Layout.of(model)))
    return rows.set_index(["layer", "norm", "part"])["value"]


@pytest.mark.parametrize(
    ("layer", "norm", "alone", "full"),
    [
        # |d| / sqrt(50); g_p is (1, 2, 0, 2) / 3 alone, / 5 with the other layer's 4
        ("0", "layer", (9 + 100) ** 0.5 / 50**0.5 / 3, (9 + 100) ** 0.5 / 50**0.5 / 5),
        # the columns (3, 4) and (0, 5) have norm 5 each: Lambda is (0.6, 0, 0.8, 1)
        ("0", "dim0", (0.36 + 4) ** 0.5 / 3, (0.36 + 4) ** 0.5 / 5),
        ("1", "layer", 0.5**0.5, 0.5**0.5 * 4 / 5),
        # a column with one entry: Lambda is 1 whatever it moved by
        ("1", "dim0", 1.0, 4 / 5),
    ],
)
def test_norms_by_hand(norms, layer, norm, alone, full):
    assert norms[layer, norm, "alone"] == pytest.approx(alone)
    assert norms[layer, norm, "full"] == pytest.approx(full)


def test_the_layers_of_a_full_perturbation_share_one_length(norms):
    """With one norm of all, squares of the layers add up to at most rho^2 (Lambda is at most 1)."""
    for norm in ("layer", "dim0"):
        assert sum(norms[layer, norm, "full"] ** 2 for layer in ("0", "1")) <= 1


def test_every_run_and_norm_has_a_panel_with_the_layers(script):
    rows = [
        {"run": run, "round": round, "layer": layer, "norm": norm, "part": part}
        for run in ("a", "b")
        for round in (10, 20)
        for layer in ("conv1", "fc")
        for norm in ("layer", "dim0")
        for part in ("alone", "full")
    ]
    table = pd.DataFrame(rows).assign(value=0.5, std=0.1, n_clients=10)
    axes = script.draw(table).axes
    assert len(axes) == 4 and all(len(ax.lines) == 2 for ax in axes)
