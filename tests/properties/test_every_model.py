"""Every registered model gives a number a class, and trains, in a stack or alone, as torch itself trains it."""

import copy
import json

import pytest
import torch
from reference import build
from torch.nn.functional import cross_entropy

import fldiag
from fldiag import registry

#: A model is built for the first of these that it takes.
SHAPES = ((6,), (1, 8, 8), (3, 28, 28), (3, 32, 32))
SIZES = (4, 6)
#: Weights of a model that is not trained here: seconds each, and blocks as the smaller ones have.
LARGE = 3_000_000


def built(name, options):
    """The module and its inputs' shape; None where its package is not installed, which it says."""
    torch.manual_seed(0)
    refusals = []
    for shape in SHAPES:
        try:
            return build(name, shape, 10, **options), shape
        except fldiag.FldiagError as error:
            refusals.append(str(error))
    assert any("pip install" in text for text in refusals), refusals
    return None, ()


def inputs(net, shape, n):
    g = torch.Generator().manual_seed(1)
    if any(isinstance(m, torch.nn.Embedding) for m in net.modules()):
        return torch.randint(1, 50, (n, *shape), generator=g)
    return torch.randn(n, *shape, generator=g)


DATA = []


def data():
    """What a config calls test_every_model:data."""
    return (*DATA, *DATA)


def step(net, x, y, lr=0.1):
    net = copy.deepcopy(net).double().train()
    leaves = [p for p in net.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(cross_entropy(net(x), y), leaves)
    with torch.no_grad():
        for p, g in zip(leaves, gradients, strict=True):
            p -= lr * g
    return dict(net.state_dict())


@pytest.mark.parametrize("name", registry.model.names())
def test_outputs_and_one_step_of_two_clients(name, tmp_path):
    few = {"vocabulary": 50}.items()
    options = {k: v for k, v in few if k in registry.model.get(name).options.model_fields}
    (net, shape), n = built(name, options), sum(SIZES)
    if net is None:
        return
    x, y = inputs(net, shape, n), torch.arange(n) % 10
    DATA[:] = x, y
    with torch.no_grad():
        assert net.eval()(x).shape == (n, 10) and net(x).isfinite().all()
    if sum(p.numel() for p in net.parameters()) > LARGE:
        return
    torch.save(net.state_dict(), tmp_path / "start.pt")
    parts = {"0": [*range(SIZES[0])], "1": [*range(SIZES[0], n)]}
    (tmp_path / "parts.json").write_text(json.dumps(parts))
    for stack in ("on", "off"):
        config = fldiag.Config.load(
            "digits",
            rounds=1,
            data={"name": f"{__name__}:data", "augment": False},
            model={"name": name, **options},
            clients={"total": 2, "per_round": 2},
            partition={"kind": "file", "path": str(tmp_path / "parts.json")},
            train={"epochs": 1, "batch_size": n, "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}
            | {"precision": "fp64", "stack": stack, "initial": str(tmp_path / "start.pt")},
            checkpoint__clients="none",
        )
        try:
            run = fldiag.train(config, out=tmp_path / "run")
        except fldiag.FldiagError as error:
            assert stack == "on" and "cannot be stacked" in str(error)
        else:
            break
    x = x.double() if x.is_floating_point() else x
    steps = [step(net, x[part], y[part]) for part in parts.values()]
    for key, v in run.checkpoint(1).state.items():
        if v.is_floating_point():
            mean = sum(s * m[key].double() for s, m in zip(SIZES, steps, strict=True)) / n
            torch.testing.assert_close(v.double(), mean, rtol=1e-7, atol=1e-10)
