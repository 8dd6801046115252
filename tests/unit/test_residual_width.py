"""Sub-networks and slim last stages of residual networks: against networks built that small."""

import pytest
import torch
from test_residual import FAMILY, built, randn, same, unsettled
from torch import nn
from torch.nn import functional as F

from fldiag.models.residual import BasicBlock, Bottleneck, ResNet

every = pytest.mark.parametrize("name", FAMILY)


@every
def test_full_width_is_the_network_in_training(name):
    module = unsettled(built(name)).train()
    x = randn(3, 3, 16, 16)
    full = module(x)
    before = {n: b.clone() for n, b in module.named_buffers()}
    same(module.sub(x, 1), full)
    same(module.eval().sub(x, 1), full)
    with torch.no_grad():
        module.train().sub(x, 0.8)
    assert all(torch.equal(b, before[n]) for n, b in module.named_buffers())


@every
def test_last_stage_at_full_width_is_the_last_map(name):
    module = unsettled(built(name)).train()
    maps = module.stages(randn(3, 3, 16, 16))
    before = {n: b.clone() for n, b in module.named_buffers()}
    same(module.last_stage(F.relu(maps[-2]), 1), F.relu(maps[-1]))
    assert all(torch.equal(b, before[n]) for n, b in module.named_buffers())


@pytest.mark.parametrize(
    ("block", "norm"),
    [
        (BasicBlock, nn.BatchNorm2d),
        (Bottleneck, nn.BatchNorm2d),
        (BasicBlock, lambda c: nn.GroupNorm(2, c)),
    ],
)
@pytest.mark.parametrize("projection", [False, True])
def test_a_sub_network_is_the_network_built_that_small(block, norm, projection):
    options = {"norm": norm, "projection": projection, "pool": True}
    full = unsettled(ResNet(3, 5, block, (2, 1, 2), (16, 32, 64), **options).double()).train()
    small = ResNet(3, 5, block, (2, 1, 2), (8, 16, 32), **options).double().train()
    weights = full.state_dict()
    small.load_state_dict(
        {n: weights[n][tuple(slice(0, s) for s in t.shape)] for n, t in small.state_dict().items()}
    )
    x = randn(4, 3, 16, 16)
    same(full.sub(x, 0.5), small(x))
    f = randn(4, small.layers[-1][0].conv1.in_channels, 6, 6).abs()
    same(full.last_stage(f, 0.5), F.relu(small._stage(small.layers[-1], f)))


def test_gradient_of_a_sub_network_is_that_of_its_slice_alone():
    module = built(classes=5)
    module.sub(randn(4, 3, 8, 8), 0.5).square().sum().backward()
    small = ResNet(3, 5, BasicBlock, (1, 1, 1), (8, 16, 32))
    for n, p in module.named_parameters():
        inside = torch.zeros_like(p, dtype=torch.bool)
        inside[tuple(slice(0, s) for s in small.get_parameter(n).shape)] = True
        assert (p.grad[~inside] == 0).all(), n
        assert (p.grad[inside] != 0).double().mean() > 0.5, n


def test_gradient_of_a_slim_last_stage_is_that_of_its_slice_alone():
    module = built("resnet56")
    module.last_stage(randn(2, 32, 8, 8), 0.25).square().sum().backward()
    for n, p in module.named_parameters():
        if not n.startswith("layer3."):
            assert p.grad is None, n
            continue
        inside = torch.zeros_like(p, dtype=torch.bool)
        # 64 and 256 channels become 16 and 64; 128 that enter the stage become 32
        inside[tuple(slice(0, s // 4 if s > 3 else s) for s in p.shape)] = True
        assert (p.grad[~inside] == 0).all(), n
        assert (p.grad[inside] != 0).any(), n


@pytest.mark.parametrize(("method", "channels"), [("sub", 3), ("last_stage", 16)])
def test_sub_networks_of_other_weights(method, channels):
    """Under functional_call the weights passed are those that are used and differentiated."""

    class Call(nn.Module):
        def __init__(self, m):
            super().__init__()
            self.m = m

        def forward(self, x):
            return getattr(self.m, method)(x, 0.5)

    module = built()
    call, x = Call(module), randn(3, channels, 8, 8)
    names = [n for n, _ in call.named_parameters()]
    w = [
        (p.detach() + 0.05 * randn(*p.shape, seed=i)).requires_grad_()
        for i, p in enumerate(call.parameters())
    ]
    target = randn(*call(x).shape, seed=9)

    def loss(weights):
        return (
            torch.func.functional_call(call, dict(zip(names, weights, strict=True)), (x,)) * target
        ).sum()

    grads = torch.autograd.grad(loss(w), w, allow_unused=True)
    direction = [randn(*p.shape, seed=50 + i) for i, p in enumerate(w)]
    with torch.no_grad():
        up, down = (
            loss([p + s * 1e-6 * d for p, d in zip(w, direction, strict=True)]) for s in (1, -1)
        )
    slope = sum(
        float((g * d).sum()) for g, d in zip(grads, direction, strict=True) if g is not None
    )
    assert float(up - down) / 2e-6 == pytest.approx(slope, rel=1e-5)
    assert all(p.grad is None for p in module.parameters())
