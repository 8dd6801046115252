"""A layer type is one entry of one table: with it, a made-up layer is stacked, and its squares are summed up."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fldiag.errors import FldiagError
from fldiag.models.layers import (
    LAYERS,
    Layer,
    apply_layer,
    apply_slim,
    inherited_rules,
    no_obstacle,
    rules,
)
from fldiag.models.network import Network, chain_of, forward_macs
from fldiag.params import flatten
from fldiag.problem.diagonal import diagonal_of
from fldiag.problem.exact_curvature import inexact
from fldiag.problem.problem import Problem


class Gain(nn.Module):
    """Every feature times a weight of its own."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size))

    def forward(self, x):
        return x * self.weight


class Folded(nn.Module):
    def forward(self, x):
        return x.abs()


def gain_squares(m, a, g, total):
    each = (g * a.unsqueeze(1)).square().sum((0, 1)).double()
    return {"weight": each.sum() if total else each}


GAIN = Layer(
    stacked=lambda m, name, views, x, rows: x * views[f"{name}.weight"].unsqueeze(1),
    squares=gain_squares,
    obstacle=no_obstacle,
)
FOLDED = Layer(stacked=apply_layer, obstacle=no_obstacle)


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setitem(LAYERS, Gain, GAIN)
    monkeypatch.setitem(LAYERS, Folded, FOLDED)


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(6, 5), Folded(), Gain(5), nn.ReLU(), nn.Linear(5, 3)
    ).double()


def problem(module=None):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 1, 2, 3, dtype=torch.float64, generator=generator)
    return Problem(module or net(), cross_entropy, (x, torch.arange(12) % 3), dtype=torch.float64)


def dense(p):
    x, y = p.read(0, p.n)
    return torch.func.hessian(lambda w: p.user_loss(p.call(w, x), y))(p.w)


def test_without_an_entry_everything_goes_the_general_way():
    p = problem()
    assert chain_of(net()) is None and not Network(net()).stackable
    assert "(Gain) holds weights outside affine layers" in inexact(p)
    assert (
        diagonal_of(p, max_products=30).estimator.startswith("hutchinson")
        and forward_macs(net(), (1, 2, 3)) == 6 * 5 + 5 * 3
    )


def test_models_are_stacked_by_the_entry(known):
    module = net()
    network = Network(module, precision="fp64")
    assert network.stackable
    rows = flatten(module) + 0.1 * torch.randn(4, network.size, dtype=torch.float64)
    x = torch.randn(4, 7, 1, 2, 3, dtype=torch.float64)
    found = network.bind(rows)(x)
    for k in range(4):
        alone = torch.func.functional_call(module, network.layout.views(rows[k]), (x[k],))
        assert torch.allclose(found[k], alone, rtol=1e-12, atol=1e-13)


def test_the_diagonal_is_computed_by_the_entry(known):
    p = problem()
    expected = dense(p)
    d = diagonal_of(p)
    assert inexact(p) is None and d.estimator == "exact"
    assert torch.allclose(d.values, expected.diagonal(), rtol=1e-9, atol=1e-12)
    assert diagonal_of(p, entries=False).trace == pytest.approx(float(expected.trace()), rel=1e-12)


def test_a_sub_network_is_cut_by_the_entry(known, monkeypatch):
    m, x = Gain(5), torch.ones(2, 3)
    with pytest.raises(FldiagError, match="Gain has no slim form"):
        apply_slim(m, x, 0.5)
    monkeypatch.setitem(
        LAYERS, Gain, dataclasses.replace(GAIN, slim=lambda m, x, width: x * m.weight[: x.shape[1]])
    )
    assert torch.equal(apply_slim(m, x, 0.5), m.weight[:3].expand(2, 3))


def test_the_entry_says_what_the_layer_does_to_a_batch(known, monkeypatch):
    assert not Network(net()).batch_dependent
    monkeypatch.setitem(LAYERS, Folded, dataclasses.replace(FOLDED, mixes_examples=lambda m: True))
    assert Network(net()).batch_dependent


def test_the_entry_says_whether_a_layer_draws_random_numbers(known, monkeypatch):
    class Restless(Folded):
        def forward(self, x):
            return x + torch.rand_like(x)

        def train(self, mode=True):
            return super().train(True)

    wrong = nn.Sequential(nn.Linear(6, 5), Restless(), nn.Linear(5, 3)).double()
    for random, says in (
        (False, "still in training mode after eval"),
        (True, r"dropout is active in 1\.1 \(Restless\)"),
    ):
        monkeypatch.setitem(LAYERS, Folded, dataclasses.replace(FOLDED, random=random))
        with pytest.raises(FldiagError, match=says):
            problem(nn.Sequential(nn.Flatten(), wrong)).probe()


def test_a_rule_left_out_falls_back_alone(known, monkeypatch):
    monkeypatch.setitem(LAYERS, Gain, dataclasses.replace(GAIN, squares=None))
    assert Network(net()).stackable and inexact(problem()) is not None


def test_settings_that_do_not_fit_fall_back(known, monkeypatch):
    monkeypatch.setitem(LAYERS, Gain, dataclasses.replace(GAIN, fits=lambda m: len(m.weight) > 5))
    assert chain_of(net()) is None


def test_a_subclass_has_no_rules_but_counts_as_its_parent():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 3 * super().forward(x)

    assert rules(Scaled(2, 2)) == Layer() and inherited_rules(Scaled(2, 2)) is LAYERS[nn.Linear]
    assert forward_macs(nn.Sequential(Scaled(4, 2)), (4,)) == 8


def test_a_convolution_that_pads_one_side_more_is_named():
    module = nn.Sequential(
        nn.Conv2d(1, 2, 2, padding="same"), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)
    ).double()
    assert (
        inexact(problem(module))
        == "padding = 'same' with a kernel of size [2, 2] pads one side more than the other"
    )
