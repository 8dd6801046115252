"""Every diagnostic and method on a pretended accelerator, where tensors of host and device never meet, and on a GPU if any."""

import numpy as np
import pandas as pd
import pytest
import torch
from accelerator import DEVICE, DEVICES, Accelerated, accelerator, there
from helpers import classification, config, needs, play, stacks, world
from histories import history, moved, stored, tanh_net
from torch import nn
from torch.nn.functional import cross_entropy

import fldiag
from fldiag import registry
from fldiag.models.lora import with_adapters
from fldiag.problem.problem import Problem
from fldiag.training.server import Federation
from fldiag.training.setup import Setup

#: Options that make an answer quick, where a diagnostic has them; and fewer products, where their number is not the subject.
SMALL = {"points": 3, "k": 3, "steps": 5}
FEW = {
    "matching": {"k": 1, "rtol": 0.5, "max_products": 20},
    "flatness": {"rtol": 0.9, "max_products": 4, "tol": 0.5},
}


def network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.4), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(48, 3))


def examples():
    g = torch.Generator().manual_seed(1)
    return torch.randn(13, 1, 6, 6, generator=g), torch.arange(13) % 3


def federation(name, **options):
    """Two rounds of three clients; with adapters for the diagnostic of adapters."""
    data, parts = classification((20, 13, 17))
    net = with_adapters(tanh_net(), 2, 4.0, ("*",), "") if name == "lora" else tanh_net()
    w, clients = moved(net)
    rounds = [stored(w, clients, round=1), stored(clients[0], [w, clients[1]], round=2, ids=[0, 2])]
    return history(net, data, parts, *rounds, dtype=torch.float64, **options)


def diagnostics(on):
    return [n for n in registry.diagnostic.names() if registry.diagnostic.get(n).on == on]


#: Kinds of subjects of weights or runs; of each there is a quick diagnostic among the quick tests.
KINDS = ("problem", "checkpoints", "run")
QUICK = ("spectrum", "paths", "fairness", "forgetting", "geometry")


#: A stack of clients, or one after the other where a method's model cannot be stacked.
TRAINED = [
    (n, s) for n in registry.method.names() for s in ("off", "on") if s == "off" or stacks(n)
]


def test_host_and_device_tensors_do_not_meet(monkeypatch):
    with accelerator(monkeypatch):
        x = torch.ones(3, device=DEVICE)
        assert isinstance(x, Accelerated) and isinstance((x * 2.0).sum(), Accelerated)
        assert not isinstance(x.cpu(), Accelerated)
        for mistake in (
            lambda: x + torch.ones(3),
            lambda: torch.stack([x, torch.ones(3)]),
            lambda: torch.rand(3, device=DEVICE, generator=torch.Generator()),
            lambda: x.numpy(),
        ):
            with pytest.raises((RuntimeError, TypeError)):
                mistake()


def close(a, b):
    """Same rows; the same numbers but for the order of sums."""
    numbers = [c for c in a.columns if a[c].dtype.kind == "f" and c != "residual"]
    plain = [c for c in a.columns if c not in (*numbers, "residual", "device")]
    pd.testing.assert_frame_equal(a[plain], b[plain])
    for column in numbers:
        np.testing.assert_allclose(a[column], b[column], rtol=1e-7, atol=1e-9, err_msg=column)


def problem(device, seed=0):
    module = network()
    with torch.no_grad():
        for weights in module.parameters():
            weights += 0.1 * torch.randn(
                weights.shape, generator=torch.Generator().manual_seed(seed)
            )
    return Problem(module, cross_entropy, examples(), device=device, dtype=torch.float64)


def test_each_kind_of_subject_is_among_the_quick_tests():
    assert all(set(diagnostics(on)) & set(QUICK) for on in KINDS)


@pytest.mark.parametrize("device", DEVICES)
def test_float32_is_float32_also_in_convolutions(device, monkeypatch):
    """A GPU rounds their inputs to 10 bits, an error of 1e-3, unless it is told otherwise."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 32, 5), nn.ReLU(), nn.Flatten(), nn.Linear(512, 3))
    data = torch.randn(20, 3, 8, 8), torch.arange(20) % 3

    def eigenvalue(device, dtype):
        problem = Problem(net, cross_entropy, data, device=device, dtype=dtype)
        table = fldiag.diagnose(problem, "spectrum", k=1)
        return table.loc[table["metric"] == "eigenvalue", "value"].item()

    exact = eigenvalue("cpu", torch.float64)
    with there(device, monkeypatch):
        first, second = (eigenvalue(device, torch.float32) for _ in range(2))
    assert first == second == pytest.approx(exact, rel=2e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_clients_train_side_by_side_also_where_a_step_is_long(device, monkeypatch):
    settings = fldiag.Config.load("digits", train__batch_size=1_000_000)
    assert not Setup(settings, device="cpu").stack
    with there(device, monkeypatch):
        assert Setup(settings, device=device).stack


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.slow
def test_training_twice_gives_the_same_bits(device, tmp_path, monkeypatch):
    settings = fldiag.Config.load("digits", rounds=2, method__name="fedsol", clients__per_round=2)
    with there(device, monkeypatch):
        first, second = (
            fldiag.train(settings, out=tmp_path / name, setup=Setup(settings, device=device))
            for name in ("first", "second")
        )
    for a, b in zip(
        first.checkpoint().state.values(), second.checkpoint().state.values(), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "stack"), TRAINED)
@pytest.mark.slow
def test_training(name, stack, device, monkeypatch):
    settings = config(name, stack=stack, precision="fp64", **needs(name))

    def weights(device):
        dataset, parts = world(name)
        trained = Federation(Setup(settings, dataset=dataset, parts=parts, device=device))
        play(trained, 2)
        return trained.w.cpu()

    expected = weights("cpu")
    with there(device, monkeypatch):
        torch.testing.assert_close(weights(device), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name",
    [
        n if n in QUICK else pytest.param(n, marks=pytest.mark.slow)
        for on in KINDS
        for n in diagnostics(on)
    ],
)
def test_diagnostics(name, device, monkeypatch):
    entry = registry.diagnostic.get(name)
    small = {k: v for k, v in SMALL.items() if k in entry.options.model_fields}
    options = {**small, **FEW.get(name, {})}

    def table(device):
        several = [problem(device, 0), problem(device, 1)]
        subject = several if entry.on == "checkpoints" else several[0]
        return fldiag.diagnose(
            federation(name, device=device) if entry.on == "run" else subject,
            name,
            **options,
        )

    expected = table("cpu")
    with there(device, monkeypatch):
        computed = table(device)
    close(computed, expected)
