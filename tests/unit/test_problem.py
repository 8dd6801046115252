"""A Problem's numbers, the caller's things it must not touch, and the culprits its probe must name."""

import copy
import functools
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from problems import Sliced, data, mlp
from torch import nn
from torch.nn.functional import cross_entropy as CE

from fldiag.errors import FldiagError
from fldiag.losses import half_squared_error
from fldiag.problem.diagonal import diagonal_of
from fldiag.problem.memory import DEPENDENT, batch_size
from fldiag.problem.problem import Problem

# -- numbers


def test_loss_and_standard_error_are_those_of_the_examples():
    net, (x, y) = mlp(), data(7)
    losses = CE(net(x).double(), y, reduction="none").detach()
    for given in ((x, y), (x.numpy(), y.numpy()), Sliced(x, y)):
        p = Problem(net, CE, given)
        value, stderr = p.loss()
        assert value == pytest.approx(float(losses.mean()), rel=1e-6)
        assert stderr == pytest.approx(float(losses.std() / 7**0.5), rel=1e-5)
        assert p.loss(p.w) == (value, stderr) and p.loss(p.w + 1)[0] != value
    assert (p.n, p.slice_name) == (7, "client:7/train") and Problem(
        net, CE, (x, y)
    ).slice_name == "data"


def test_batches_weigh_every_example_alike():
    net, given = mlp(), data(10)
    whole = Problem(net, CE, given, dtype=torch.float64)
    for bounds in ([(0, 4), (4, 8), (8, 10)], [(i, i + 1) for i in range(10)]):
        p = Problem(net, CE, given, dtype=torch.float64)
        p.__dict__["bounds"] = bounds
        assert p.loss() == pytest.approx(whole.loss(), rel=1e-12)
        assert torch.allclose(p.gradient(), whole.gradient(), rtol=1e-11)
        assert torch.allclose(p.outputs()[0], whole.outputs()[0]) and torch.equal(
            p.outputs()[1], given[1]
        )


def test_memory_sets_the_batch_size_by_a_rule():
    net, given = mlp(), data(200)
    size = Problem(net, CE, given).probe().graph_bytes
    assert size > 4 * (4 + 5 + 3)  # at least the activations
    bounds = Problem(net, CE, given, memory=4 * size * 60).bounds
    assert bounds == [(0, 50), (50, 100), (100, 150), (150, 200)]
    assert len(Problem(net, CE, given, memory=1).bounds) == 200
    assert Problem(net, CE, given).bounds == [(0, 200)]


def test_a_batch_is_worth_the_pass_over_the_weights_that_it_costs():
    mib, cpu = 2**20, torch.device("cpu")
    assert batch_size(mib, 4000, 2**40, cpu) == 32
    assert batch_size(mib, 64 * mib, 2**40, cpu) == 2 * 64
    assert batch_size(mib, 64 * mib, 4 * 50 * mib, cpu) == 50  # the memory goes first
    assert (
        batch_size(mib, 4000, 4 * 200 * mib, torch.device("meta")) == 200
    )  # another device has no caches to fall out of
    assert batch_size(1, 4000, 2**40, cpu) == 512 and batch_size(2**40, 4000, 1, cpu) == 1
    net, given = mlp(), data(200)
    for p in net[0].parameters():
        p.requires_grad_(False)
    some = Problem(net, CE, given, trainable=True)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "fldiag.problem.problem.batch_size",
            lambda graph, weights, memory, device: seen.append(weights) or 100,
        )
        assert len(some.bounds) == 2
    assert seen == [sum(p.nbytes for p in net.parameters())]


def test_gradient_is_the_derivative_of_the_loss():
    p = Problem(mlp(), CE, data(), dtype=torch.float64)
    d, g = torch.randn_like(p.w), p.gradient()
    slope = (p.loss(p.w + 1e-6 * d)[0] - p.loss(p.w - 1e-6 * d)[0]) / 2e-6
    assert float(g @ d) == pytest.approx(slope, rel=1e-6) and g.dtype == torch.float64


@pytest.mark.parametrize(
    "loss",
    [nn.CrossEntropyLoss(), functools.partial(CE, label_smoothing=0.1), lambda z, y: CE(z, y)],
    ids=["module", "partial", "lambda"],
)
def test_losses_are_taken_per_example_in_every_spelling(loss):
    p = Problem(mlp(), loss, data(6))
    x, y = data(6)
    one_by_one = [float(loss(p.call(p.w, x[i : i + 1]), y[i : i + 1])) for i in range(6)]
    assert p.losses().tolist() == pytest.approx(one_by_one, rel=1e-5)


def test_a_loss_that_cannot_be_taken_apart_has_no_standard_error():
    def loss(z, y):  # float() cannot be mapped over examples
        float(z.detach().sum())
        return CE(z, y)

    p = Problem(mlp(), loss, data(6))
    expected = Problem(mlp(), CE, data(6)).loss()[0]
    assert p.loss() == (pytest.approx(expected, rel=1e-6), None) and p.losses() is None
    uneven = Problem(mlp(), loss, data(6))
    uneven.__dict__["bounds"] = [(0, 5), (5, 6)]
    assert uneven.loss()[0] == pytest.approx(expected, rel=1e-6)
    assert Problem(mlp(), CE, data(1)).loss()[1] is None


def test_regression_on_several_outputs():
    x, y = data(6)[0], torch.randn(6, 3)
    p = Problem(mlp(), F.mse_loss, (x, y))
    assert p.loss()[0] == pytest.approx(float(F.mse_loss(mlp()(x), y).detach()), rel=1e-6)
    assert len(p.losses()) == 6


# -- weights and buffers


def test_weights_as_vector_dict_or_state_dict():
    net, other = mlp(), mlp()
    with torch.no_grad():
        for t in other.parameters():
            t.add_(0.5)
    w = torch.cat([t.detach().reshape(-1) for t in other.parameters()])
    expected = Problem(other, CE, data()).loss()
    for params in (w, w.double(), dict(other.named_parameters()), other.state_dict()):
        p = Problem(net, CE, data(), params=params)
        assert torch.equal(p.w, w) and p.loss() == expected
    p.w += 1
    assert torch.equal(other.state_dict()["0.weight"].reshape(-1), w[:20])  # a copy, not a view


def test_a_dict_that_does_not_fit_names_every_misfit():
    state = mlp().state_dict()
    state["0.weight"] = torch.zeros(5, 3)
    state["extra"] = state.pop("2.bias")
    with pytest.raises(
        FldiagError, match=r"missing 2\.bias; unexpected extra; wrong shape 0\.weight \[5, 3\]"
    ):
        Problem(mlp(), CE, data(), params=state)
    with pytest.raises(FldiagError, match="vector of 43 numbers"):
        Problem(mlp(), CE, data(), params=torch.zeros(42))


def test_buffers_of_a_state_dict_a_dict_or_a_vector_are_used():
    net = mlp(nn.BatchNorm1d(5)).eval()
    own = Problem(net, CE, data()).loss()
    moved = copy.deepcopy(net)
    moved[1].running_mean += 0.7
    moved[1].running_var *= 3
    expected = Problem(moved, CE, data()).loss()
    vector = torch.cat([moved[1].running_mean, moved[1].running_var])
    for options in (
        {"params": moved.state_dict()},
        {"buffers": dict(moved.named_buffers())},
        {"buffers": vector},
        {"buffers": {"1.running_mean": vector[:5], "1.running_var": vector[5:]}},
    ):
        assert Problem(net, CE, data(), **options).loss() == expected != own
    with pytest.raises(FldiagError, match=r"missing 1\.running_var"):
        Problem(net, CE, data(), buffers={"1.running_mean": vector[:5]})


def test_tied_and_frozen_weights_count_once_and_fully():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight
            self.a.weight.requires_grad_(False)

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))

    net = Tied()
    p = Problem(net, CE, data(8, 4), params=net.state_dict(), dtype=torch.float64)
    assert p.layout.size == 16 and not net.a.weight.requires_grad
    d = torch.randn_like(p.w)
    slope = (p.loss(p.w + 1e-6 * d)[0] - p.loss(p.w - 1e-6 * d)[0]) / 2e-6
    assert float(p.gradient() @ d) == pytest.approx(slope, rel=1e-6)


# -- the caller's things


class Stop(Exception):
    pass


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt, None])
@pytest.mark.parametrize("at_call", [0, 9])
def test_module_buffers_mode_and_randomness_are_untouched(error, at_call):
    calls = []

    def loss(z, y):
        calls.append(torch.rand(1))  # uses the global generators, as a careless loss might
        np.random.rand(), random.random()
        if error and len(calls) > at_call:
            raise error
        return CE(z, y)

    net = mlp(nn.BatchNorm1d(5), nn.Dropout(0.5))
    net.train()
    net[2].eval()
    before = copy.deepcopy(net.state_dict())
    modes = [m.training for m in net.modules()]
    x, y = data()
    kept = x.clone()
    state = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    try:
        p = Problem(net, loss, (x, y))
        p.loss(), p.gradient(), p.hvp(torch.ones_like(p.w))
        assert error is None
    except (Stop, KeyboardInterrupt, FldiagError):
        assert error is not None
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert modes == [m.training for m in net.modules()] and torch.equal(x, kept)
    assert all(p.grad is None and p.requires_grad for p in net.parameters())
    assert (
        torch.equal(state[0], torch.get_rng_state())
        and (state[1] == np.random.get_state()[1]).all()
    )
    assert state[2] == random.getstate()


# -- wrong use


def test_what_is_wrong_before_any_evaluation():
    x, y = data()
    for given, message in (
        ((x[:0], y[:0]), "empty"),
        ((x, y[:3]), "y has 3 rows and x has 10"),
        (x, "Tensor"),
        (Sliced(x[:0], y[:0]), "'client:7/train' is empty"),
    ):
        with pytest.raises(FldiagError, match=message):
            Problem(mlp(), CE, given)
    net = mlp()
    net.register_parameter(
        "count", nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
    )
    with pytest.raises(FldiagError, match="'count' has dtype"):
        Problem(net, CE, (x, y))
    with pytest.raises(FldiagError, match="float16"):
        Problem(mlp(), CE, (x, y), dtype=torch.float16)
    with pytest.raises(FldiagError, match="no shape yet"):
        Problem(nn.LazyLinear(3), CE, (x, y))


# -- batch statistics


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(5, track_running_stats=False), None], ids=["module", "own"]
)
def test_batch_statistics_are_allowed_with_a_fixed_batch_size(norm):
    class Centred(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    n = 2 * DEPENDENT + 1
    x, y = data(n)
    net = mlp(norm or Centred())
    p, small = Problem(net, CE, (x, y)), Problem(net, CE, (x, y), memory=1)
    assert p.batch_dependent and not Problem(mlp(nn.BatchNorm1d(5)), CE, (x, y)).batch_dependent
    assert p.bounds == small.bounds == [(0, 171), (171, 342), (342, 513)]
    parts = [float(CE(net.eval()(x[a:b]), y[a:b])) * (b - a) / n for a, b in p.bounds]
    assert p.loss()[0] == pytest.approx(sum(parts), rel=1e-5) and small.loss() == p.loss()


# -- memory format and digest


def test_channels_last_is_used_where_the_model_bears_it():
    x, y = torch.randn(6, 3, 8, 8), torch.arange(6) % 2
    seen = []

    class Look(nn.Module):
        def __init__(self, view):
            super().__init__()
            self.conv, self.fc, self.view = nn.Conv2d(3, 4, 3), nn.Linear(144, 2), view

        def forward(self, x):
            seen.append(x.is_contiguous(memory_format=torch.channels_last))
            z = self.conv(x)
            return self.fc(z.view(len(x), -1) if self.view else z.flatten(1))

    for view in (False, True):
        p = Problem(Look(view), CE, (x, y))
        assert p.probe().channels_last is not view
        seen.clear()
        loss = p.loss()[0]
        assert seen == [not view] and loss == pytest.approx(float(CE(p.module(x), y)), rel=1e-5)


def test_the_digest_follows_everything_that_decides_the_numbers():
    x, y = data()
    same = Problem(mlp(), CE, (x, y)).digest()
    assert same == Problem(mlp(), CE, Sliced(x.clone(), y), name="other", memory=1).digest()
    w = Problem(mlp(), CE, (x, y)).w
    others = [
        Problem(mlp(), CE, (x + 1e-3, y)),
        Problem(mlp(), CE, (x, y.flip(0))),
        Problem(mlp(), CE, (x, y), params=w * (1 + 1e-6)),
        Problem(mlp(), CE, (x, y), dtype=torch.float64),
        Problem(mlp(), nn.CrossEntropyLoss(), (x, y)),
        Problem(mlp(nn.Identity()), CE, (x, y)),
    ]
    assert len({same, *(p.digest() for p in others)}) == 7


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, torch.compile, lambda net: torch.compile(nn.DataParallel(net))]
)
@pytest.mark.slow
def test_a_module_that_only_wraps_another_is_taken_out_with_a_word(wrap):
    net, given = mlp(), data()
    bare, wrapped = Problem(net, CE, given), wrap(net)
    p = Problem(wrapped, CE, given, params=wrapped.state_dict())
    assert (
        p.layout.names == bare.layout.names and torch.equal(p.w, bare.w) and p.loss() == bare.loss()
    )
    assert "that wraps it" in p.remarks[0] and "before them" in p.remarks[-1] and not bare.remarks


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize(
    ("made", "words"),
    [(torch.jit.script, "TorchScript"), (lambda net: net.to("meta"), "'0.weight' of the model")],
)
def test_a_module_whose_weights_cannot_be_replaced_is_refused(made, words):
    with pytest.raises(FldiagError, match=words) as caught:
        Problem(made(mlp()), CE, data())
    assert caught.value.usage


def test_frozen_parameters_are_constants_where_only_the_trainable_ones_count():
    """Everything is that of the block of the others, also where the weights come from a file."""
    torch.manual_seed(0)
    net, other = (nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)) for _ in range(2))
    net[0].weight.requires_grad_(False)
    x, y, given = torch.randn(9, 4), torch.arange(9) % 3, other.state_dict()
    whole = Problem(net, F.cross_entropy, (x, y), given, dtype=torch.float64)
    part = Problem(net, F.cross_entropy, (x, y), given, dtype=torch.float64, trainable=True)
    kept = slice(whole.layout.slices()["0.weight"].stop, None)
    v = torch.zeros_like(whole.w)
    v[kept] = torch.randn_like(part.w)
    assert torch.equal(part.w, whole.w[kept]) and part.loss()[0] == pytest.approx(
        whole.loss()[0], rel=1e-14
    )
    assert torch.allclose(part.gradient(), whole.gradient()[kept]) and torch.allclose(
        part.hvp(v[kept]), whole.hvp(v)[kept]
    )
    assert part.digest() != whole.digest()
    exact = [diagonal_of(p, estimate="exact") for p in (part, whole)]
    assert torch.allclose(exact[0].values, exact[1].values[kept])
    given["0.weight"] = given["0.weight"] + 1
    assert (
        Problem(net, F.cross_entropy, (x, y), given, trainable=True, dtype=torch.float64).digest()
        != part.digest()
    )
    with pytest.raises(FldiagError, match="all parameters of the model are frozen"):
        Problem(net.requires_grad_(False), F.cross_entropy, (x, y), trainable=True)


@pytest.mark.parametrize(
    "loss",
    [F.mse_loss, nn.L1Loss(), half_squared_error, lambda z, y: F.smooth_l1_loss(z, y)],
    ids=["mse", "l1", "half_squared_error", "own"],
)
def test_outputs_and_targets_of_two_shapes_are_not_spread_over_each_other(loss):
    """[8, 1] against [8, 3] or [8] would be other numbers than anybody meant, and torch only warns."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    for targets in (x[:, :3], x[:, 0]):
        with pytest.raises(FldiagError, match="shape of the outputs"):
            Problem(nn.Linear(4, 1), loss, (x, targets)).loss()
    assert Problem(nn.Linear(4, 3), loss, (x, x[:, :3])).loss()[0] > 0
