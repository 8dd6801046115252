"""Rows of weights meeting inputs: a stack is its rows, plain chains are recognised and nothing else is taken for one."""

import copy

import numpy as np
import pytest
import torch
from helpers import classification, close, config, federation, images, play, setup, terms
from torch import nn
from torch.nn import functional as F

from fldiag.errors import FldiagError
from fldiag.models.network import Network, chain_of, forward_macs
from fldiag.params import flatten


def seeded(build):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build().double()


def linear_net():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 3, bias=False))


def conv_net():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, stride=2),
        nn.GELU(),
        nn.Conv2d(4, 6, 3, groups=2, dilation=1, bias=False),
        nn.Sigmoid(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 5),
    )


def nested_net():
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Identity(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(3, 4)),
    )


CHAINS = [(linear_net, (1, 4, 4)), (conv_net, (2, 9, 9)), (nested_net, (2, 8, 8))]


@pytest.mark.parametrize(("build", "shape"), CHAINS, ids=lambda v: getattr(v, "__name__", ""))
def test_a_stack_of_rows_is_each_row_alone_and_the_module_itself(build, shape):
    module = seeded(build)
    net = Network(module, precision="fp64")
    assert net.stackable
    w = flatten(module) + 0.1 * torch.randn(
        4, net.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    x = torch.randn(4, 7, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    stacked = net.bind(w)(x)
    for k in range(4):
        assert far(net.bind(w[k : k + 1])(x[k : k + 1])[0], stacked[k]) <= 1e-12
        views = {n: v[0] for n, v in net.layout.views(w[k : k + 1]).items()}
        assert far(torch.func.functional_call(module, views, (x[k],)), stacked[k]) <= 1e-12


@pytest.mark.parametrize(("build", "shape"), CHAINS, ids=lambda v: getattr(v, "__name__", ""))
def test_gradients_by_finite_differences(build, shape):
    net = Network(seeded(build), precision="fp64")
    generator = torch.Generator().manual_seed(0)
    w = flatten(net.module)[None].requires_grad_()
    x = torch.randn(1, 3, *shape, generator=generator, dtype=torch.float64)
    net.bind(w)(x).square().sum().backward()
    v = torch.randn(w.shape, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        up, down = (net.bind(w + s * 1e-6 * v)(x).square().sum() for s in (1, -1))
    assert float((up - down) / 2e-6) == pytest.approx(float((w.grad * v).sum()), rel=1e-6)


def far(a, b):
    return float((a - b).detach().abs().max())


class Own(nn.Module):
    """A user's module that is no chain: a residual sum, features and a classifier."""

    def __init__(self, norm=False):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.classifier = nn.Linear(6, 3)

    def features(self, x):
        x = torch.relu(self.first(x))
        return x + torch.relu(self.norm(self.second(x)))

    def forward(self, x):
        return self.classifier(self.features(x))


class Doubling(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


class Scaled(nn.Linear):
    def forward(self, x):
        return 3 * super().forward(x)


def hooked():
    net = linear_net()
    net[1].register_forward_hook(lambda m, a, out: out + 1)
    return net


def tied():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    return net


def parametrized():
    net = linear_net()
    torch.nn.utils.parametrizations.weight_norm(net[1])
    return net


def shared():
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer)


NOT_CHAINS = [
    Own,
    hooked,
    tied,
    parametrized,
    shared,
    lambda: Doubling(nn.Linear(2, 2)),
    lambda: nn.Sequential(Scaled(2, 2)),
    lambda: nn.Sequential(nn.Linear(2, 2), nn.Dropout()),
    lambda: nn.Sequential(nn.Linear(2, 2), nn.GroupNorm(1, 2)),
    lambda: nn.Sequential(nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect")),
    lambda: nn.Sequential(nn.Linear(2, 2), nn.Flatten(0)),
    lambda: nn.Linear(2, 2),
]


@pytest.mark.parametrize("build", NOT_CHAINS, ids=range(len(NOT_CHAINS)))
def test_what_is_not_a_plain_chain_is_not_taken_for_one(build):
    assert chain_of(build()) is None


@pytest.mark.parametrize(("build", "shape"), CHAINS, ids=lambda v: getattr(v, "__name__", ""))
def test_what_is_a_plain_chain_is(build, shape):
    assert chain_of(build()) is not None


def test_hooks_and_own_forwards_are_obeyed():
    for build in (hooked, lambda: Doubling(nn.Flatten(), nn.Linear(16, 3)), parametrized):
        module = seeded(build)
        net = Network(module, precision="fp64")
        x = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        assert far(net.bind(flatten(module)[None])(x[None])[0], module(x)) <= 1e-12


def test_the_callers_module_is_neither_kept_nor_changed():
    module = Own(norm=True).double()
    before, mode = copy.deepcopy(module.state_dict()), module.training
    net = Network(module, precision="fp64")
    buffers = {n: b.clone()[None] for n, b in net.buffers.items()}
    net.bind(flatten(module)[None], buffers, train=True)(torch.randn(1, 8, 6, dtype=torch.float64))
    assert all(torch.equal(before[k], v) for k, v in module.state_dict().items())
    assert all(p.requires_grad for p in module.parameters())
    assert module.training == mode
    assert not torch.equal(buffers["norm.running_mean"][0], before["norm.running_mean"])


def test_several_rows_of_a_module_that_cannot_be_stacked():
    net = Network(Own())
    with pytest.raises(FldiagError, match=r"cannot be stacked.*train\.stack"):
        net.bind(flatten(net.module).expand(2, -1))
    with pytest.raises(FldiagError, match=r"train\.stack = 'on', but this model cannot be stacked"):
        setup(config(stack="on"), classification(), module=Own())


def test_a_module_with_features_trains_with_head_only_perturbations():
    data = classification()
    made = federation(config("fedsol"), data, module=Own())
    assert made.setup.network.has_split
    assert not made.setup.network.stackable
    start = made.w.clone()
    play(made, 2)
    assert far(made.w, start) > 1e-3
    without = type(
        "Plain",
        (Own,),
        {"features": None, "forward": lambda self, x: self.classifier(Own.features(self, x))},
    )
    other = federation(config("fedsol"), data, module=without(), start=start)
    assert not other.setup.network.has_split
    play(other, 2)
    assert far(made.w, other.w) <= 1e-12


def test_batch_norm_trains_looped_with_every_clients_own_statistics_averaged():
    """Against a textbook loop: deepcopy, train mode, SGD, and the state_dicts averaged, statistics included."""
    data, parts = classification((16, 8))
    module = Own(norm=True)
    chosen = config(total=2, epochs=1, momentum=0.9)
    made = federation(chosen, (data, parts), module=copy.deepcopy(module))
    plan = [made.setup.schedule.batches(0, k, len(parts[k])) for k in range(2)]
    play(made)
    states = []
    for k, batches in enumerate(plan):
        model = copy.deepcopy(module).double().train()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=1e-3)
        x, y = data.train_x[parts[k]].double(), data.train_y[parts[k]]
        for batch in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        states.append(model.state_dict())
    mean = {n: (16 * states[0][n] + 8 * states[1][n]) / 24 for n in states[0]}
    assert (
        far(made.w, torch.cat([mean[n].flatten() for n, _ in module.named_parameters()])) <= 1e-12
    )
    for name in ("norm.running_mean", "norm.running_var"):
        assert far(made.buffers[name], mean[name]) <= 1e-12
    assert (
        int(made.buffers["norm.num_batches_tracked"]) == 2
    )  # the largest: client 0 has two minibatches


def test_batch_norm_without_statistics_keeps_the_batches_of_a_stack_apart():
    norm = nn.BatchNorm1d(5, track_running_stats=False)
    module = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), norm, nn.ReLU(), nn.Linear(5, 3))
    made = federation(config("fedsol", {"part": "full"}), classification(), module=module)
    assert made.setup.network.batch_dependent
    assert not made.setup.network.stackable
    play(made, 2)
    assert made.finite


def test_a_layer_used_twice_is_used_twice():
    """named_children() lists a module once, however often a Sequential runs it."""
    relu = nn.ReLU()
    module = nn.Sequential(
        nn.Flatten(), nn.Linear(6, 5), relu, nn.Linear(5, 4), relu, nn.Linear(4, 3)
    ).double()
    assert len(chain_of(module)) == 6
    x = torch.randn(1, 9, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    close(
        Network(module, precision="fp64").bind(flatten(module)[None])(x)[0],
        module(x[0]),
        terms=terms(module),
    )


class Between(nn.Module):
    """The usual layout of vision models: something lies between ``features`` and the classifier."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(6, 5), nn.ReLU())
        self.classifier = nn.Linear(5, 3)

    def forward(self, x):
        return self.classifier(5 * self.features(x).square())


class Flattened(nn.Module):
    """The classifier does not even take the features' shape."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3))
        self.classifier = nn.Linear(8, 3)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


class TiedHead(Own):
    def __init__(self):
        super().__init__()
        self.classifier = nn.Linear(6, 6)
        self.classifier.weight, self.classifier.bias = self.first.weight, self.first.bias


@pytest.mark.parametrize("build", [Between, Flattened])
@pytest.mark.parametrize("method", ["fedavg", "fedsol"])
def test_a_module_that_does_more_than_features_and_head_is_run_whole(method, build):
    data, module = classification(), build().double()
    made = federation(config(method), data, module=copy.deepcopy(module))
    assert not made.setup.network.has_split
    x = data[0].train_x[None].double()
    close(made.setup.network.bind(made.w[None])(x)[0], module(x[0]), terms=terms(module))
    play(made)
    assert made.finite


def test_a_head_tied_to_the_body_is_no_head():
    data = classification(classes=6)
    made = federation(config(), data, module=TiedHead())
    assert not made.setup.network.has_split
    play(made)
    with pytest.raises(FldiagError, match="is not the last block of parameters"):
        federation(config("fedsol"), data, module=TiedHead())


@pytest.mark.parametrize(("outputs", "message"), [(4, "returns .* numbers an example"), (3, "")])
def test_the_models_outputs_must_be_the_classes(outputs, message):
    module = nn.Sequential(nn.Flatten(), nn.Linear(6, outputs))
    if not message:
        assert setup(config(), classification(), module=module).network.size == 21
        return
    with pytest.raises(FldiagError, match=message):
        setup(config(), classification(), module=module)


def test_a_model_that_does_not_fit_the_data():
    with pytest.raises(FldiagError, match=r"does not take inputs of shape \(6,\)"):
        setup(config(), classification(), module=nn.Sequential(nn.Linear(5, 3)))


def test_multiply_adds():
    assert (
        forward_macs(nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Linear(6, 3)), (1, 4, 4))
        == 16 * 6 + 6 * 3
    )
    conv = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.Flatten(), nn.Linear(4 * 25, 7)
    )
    assert forward_macs(conv, (2, 5, 5)) == 25 * 4 * 1 * 9 + 700 == 1600


def test_small_steps_are_stacked_large_ones_are_not():
    small = setup(config(stack="auto"), classification())
    assert small.stack
    large = setup(config(stack="auto", batch_size=10**9), classification())
    assert not large.stack
    assert not setup(config(stack="auto"), classification(), module=Own()).stack


def test_bf16_stays_near_fp32_with_float32_logits():
    data = images()
    more = {"model": "small_cnn", "model_options": {}, "rounds": 1}
    full, half = (federation(config(precision=p, **more), data) for p in ("fp32", "bf16"))
    play(full)
    play(half)
    assert half.w.dtype == torch.float32
    moved = np.linalg.norm(full.w - full.setup.initial())
    assert 0 < float((half.w - full.w).norm()) < 0.2 * moved


@pytest.mark.parametrize(
    ("dtype", "beside", "split"),
    [
        (torch.float64, 0.0, True),
        (torch.float64, 1e-8, False),
        (torch.float32, 1e-8, True),
        (torch.float32, 1e-3, False),
    ],
)
def test_a_split_is_confirmed_up_to_rounding_of_outputs_of_any_size(dtype, beside, split):
    class Beside(nn.Module):
        """Something small beside head(features(x)), relative to outputs that are small themselves."""

        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

        def features(self, x):
            return 1e-4 * self.body(x)

        def forward(self, x):
            return self.head(self.features(x)) * (1 + beside)

    torch.manual_seed(0)
    module = Beside().to(dtype)
    nn.init.zeros_(module.head.bias)
    net = Network(module)
    net.confirm_split(flatten(module)[None], {}, torch.randn(1, 6, 4, dtype=dtype))
    assert net.has_split == split
