"""Residual networks: against torchvision's, and with random depth."""

import math
from itertools import pairwise

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from fldiag import FldiagError, models
from fldiag.models.network import Network
from fldiag.models.residual import BasicBlock, Bottleneck, keep_probabilities
from fldiag.params import flatten

FAMILY = [
    "resnet18_cifar",
    "resnet18_gn",
    "resnet8_p3",
    "resnet18_p3",
    "resnet56",
    "resnet18_imagenet",
    "small_resnet",
]
BLOCKS = {"resnet8_p3": 4, "resnet56": 18, "small_resnet": 3}
every = pytest.mark.parametrize("name", FAMILY)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def built(name="small_resnet", side=32, classes=10, **options):
    return models.build(name, (3, side, side), classes, options).double()


def unsettled(module):
    """Scales, shifts and running statistics that are not the initial ones."""
    generator = torch.Generator().manual_seed(5)
    for n, t in module.state_dict().items():
        if t.dim() == 1 and t.is_floating_point():
            t.copy_(
                t
                + (
                    0.3 * torch.rand(t.shape, generator=generator)
                    if "var" in n
                    else 0.3 * torch.randn(t.shape, generator=generator)
                )
            )
    return module


def same(a, b, **kwargs):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, **kwargs)


@pytest.mark.parametrize(
    ("name", "norm"), [("resnet18_imagenet", None), ("resnet18_gn", lambda c: nn.GroupNorm(2, c))]
)
@pytest.mark.parametrize("train", [True, False])
def test_torchvisions_network_with_the_same_weights(name, norm, train):
    with torch.random.fork_rng():
        peer = unsettled(
            torchvision.models.resnet18(num_classes=10, norm_layer=norm).double()
        ).train(train)
    ours = built(name).train(train)
    ours.load_state_dict(peer.state_dict())
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in peer.named_parameters()]
    seen = []
    for part in (peer.layer1, peer.layer2, peer.layer3, peer.layer4):
        part.register_forward_hook(lambda m, args, out: seen.append(out))
    peer.bn1.register_forward_hook(
        lambda m, args, out: seen.append(out.clone())
    )  # its ReLU works in place
    x = randn(3, 3, 32, 32)
    same(ours(x), peer(x))
    ours.load_state_dict(peer.state_dict())
    seen.clear()
    peer(x)
    maps = ours.stages(x)
    same(maps[0], seen[0])
    for mine, theirs in zip(maps[1:], seen[1:], strict=True):
        same(F.relu(mine), theirs)
        assert (mine < 0).any()


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (BasicBlock, torchvision.models.resnet.BasicBlock),
        (Bottleneck, torchvision.models.resnet.Bottleneck),
    ],
)
def test_torchvisions_blocks_with_the_same_weights(ours, theirs, stride):
    mine = unsettled(ours(8, 6, stride, nn.BatchNorm2d).double())
    peer = theirs(
        8,
        6,
        stride,
        downsample=nn.Sequential(
            nn.Conv2d(8, 6 * ours.expansion, 1, stride, bias=False),
            nn.BatchNorm2d(6 * ours.expansion),
        ),
    ).double()
    peer.load_state_dict(mine.state_dict())
    x = randn(2, 8, 7, 7)
    same(F.relu(mine(x)), peer(x))
    same(F.relu(mine.eval()(x)), peer.eval()(x))


@every
def test_maps_of_stem_and_stages(name):
    module = built(name).eval()
    x = randn(2, 3, 32, 32)
    maps = module.stages(x)
    assert len(maps) == {"resnet56": 4, "small_resnet": 4}.get(name, 5)
    same(module.features(x), maps[-1].clamp_min(0).mean((2, 3)))
    same(module(x), module.fc(module.pooled(maps)))
    sides = [m.shape[-1] for m in maps]
    stem = {
        "resnet18_gn": [16, 8, 4, 2, 1],
        "resnet18_imagenet": [16, 8, 4, 2, 1],
        "resnet18_cifar": [32, 32, 16, 8, 4],
        "resnet8_p3": [32, 16, 8, 4, 2],
        "resnet18_p3": [32, 16, 8, 4, 2],
    }
    assert sides == stem.get(name, [32, 32, 16, 8])


def test_the_map_before_the_last_stage_of_resnet56():
    assert [tuple(m.shape[1:]) for m in built("resnet56").stages(randn(1, 3, 32, 32))] == [
        (16, 32, 32),
        (64, 32, 32),
        (128, 16, 16),
        (256, 8, 8),
    ]


def test_small_images_of_any_depth():
    module = models.build("small_resnet", (7, 8, 11), 3)
    assert module(torch.zeros(2, 7, 8, 11)).shape == (2, 3)


def test_without_running_statistics_a_prediction_depends_on_its_batch():
    module = built("resnet18_cifar").eval()
    x = randn(4, 3, 32, 32)
    assert not list(module.buffers())
    assert Network(module).batch_dependent
    assert (module(x)[:2] - module(x[:2])).abs().max() > 1e-3
    same(module(x), module.train()(x))
    steady = built("resnet18_p3").eval()
    same(steady(x)[:2], steady(x[:2]))


def test_projection_lies_between_pool_and_classifier():
    module = built("resnet56", projection=True).eval()
    x = randn(2, 3, 16, 16)
    first, _, second = module.projection
    pooled = module.stages(x)[-1].clamp_min(0).mean((2, 3))
    same(
        module.features(x),
        (pooled @ first.weight.T + first.bias).clamp_min(0) @ second.weight.T + second.bias,
    )
    assert module.sub(x, 0.5).shape == (2, 10)
    same(module.train().sub(x, 1), module(x))


@pytest.mark.parametrize(
    ("name", "he"), [("resnet56", True), ("small_resnet", True), ("resnet18_cifar", False)]
)
def test_first_weights_of_convolutions(name, he):
    convs = [
        m
        for m in built(name).modules()
        if isinstance(m, nn.Conv2d) and m.in_channels != m.out_channels
    ]
    big = max(convs, key=lambda m: m.weight.numel())
    area = math.prod(big.kernel_size)
    expected = (
        math.sqrt(2 / (area * big.out_channels))
        if he
        else 1 / math.sqrt(3 * area * big.in_channels)
    )
    assert float(big.weight.detach().std()) == pytest.approx(expected, rel=0.03)


# Random depth.


@pytest.mark.parametrize(("rule", "first"), [("code", 1), ("paper", 1 - 0.1 / 18)])
def test_probability_of_keeping_falls_linearly(rule, first):
    p = keep_probabilities(18, 0.9, rule)
    assert p[0] == pytest.approx(first)
    assert p[-1] == pytest.approx(0.9)
    assert [a - b for a, b in pairwise(p)] == pytest.approx([(first - 0.9) / 17] * 17)
    assert keep_probabilities(1, 0.4, "paper") == pytest.approx([0.4])
    assert keep_probabilities(18, 1, rule) == [1] * 18


@every
@pytest.mark.parametrize("rule", ["code", "paper"])
def test_every_block_has_its_probability(name, rule):
    module = built(name, side=8, keep_last=0.6, keep_rule=rule)
    keeps = [b.keep for layer in module.layers for b in layer]
    assert keeps == keep_probabilities(BLOCKS.get(name, 8), 0.6, rule)


@pytest.mark.parametrize("value", [0, 1.1, -0.5])
def test_a_probability_out_of_range_is_refused(value):
    with pytest.raises(FldiagError, match="keep_last"):
        built(keep_last=value)


@every
def test_keeping_all_draws_nothing(name):
    module = built(name, keep_last=1.0, keep_rule="paper").train()
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    module(randn(2, 3, 32, 32))
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(("rule", "draws"), [("code", 2), ("paper", 3)])
def test_one_draw_a_block_and_minibatch(rule, draws):
    module = built(keep_last=0.5, keep_rule=rule).train()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module(randn(5, 3, 8, 8))
        after = torch.random.get_rng_state()
        torch.manual_seed(0)
        for _ in range(draws):
            torch.rand(())
        assert torch.equal(after, torch.random.get_rng_state())
        module.eval()(randn(5, 3, 8, 8)), module.train().sub(randn(5, 3, 8, 8), 0.5)
        assert torch.equal(after, torch.random.get_rng_state())


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kind", [BasicBlock, Bottleneck])
def test_T_SD_2_evaluation_gives_the_mean_of_the_blocks_outputs(kind, stride):
    block = unsettled(kind(8, 8, stride, lambda c: nn.GroupNorm(2, c)).double()).train()
    block.keep = 0.7
    x = randn(2, 8, 5, 5)
    block.requires_grad_(False)
    dropped, kept = block.shortcut(x), block.shortcut(x) + block.branch(x)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        draws = [block(x) for _ in range(2000)]
    share = sum(torch.equal(y, kept) for y in draws) / 2000
    assert share + sum(torch.equal(y, dropped) for y in draws) / 2000 == 1
    assert abs(share - 0.7) < 4 * math.sqrt(0.21 / 2000)
    same(block.eval()(x), 0.7 * kept + 0.3 * dropped)


@pytest.mark.parametrize("draw", [0.0, 0.75, 0.999])
def test_a_dropped_branch_neither_learns_nor_counts(monkeypatch, draw):
    """Kept are the blocks whose probability exceeds the draw; the rest of the network is the plain one."""
    module, plain = built(keep_last=0.5), built()  # p = 1, 0.75, 0.5
    plain.load_state_dict(module.state_dict())
    dropped = {0.0: [], 0.75: [1, 2], 0.999: [1, 2]}[draw]
    for i in dropped:
        block = plain.layers[i][0]
        block.branch = lambda x, width=None: 0
    monkeypatch.setattr(torch, "rand", lambda *a, **k: torch.tensor(draw))
    x = randn(3, 3, 8, 8)
    out = module(x)
    same(out, plain(x))
    out.square().sum().backward()
    for i, layer in enumerate(module.layers):
        branch = [getattr(layer[0], n) for n in ("conv1", "bn1", "conv2", "bn2")]
        assert all((p.grad is None) == (i in dropped) for m in branch for p in m.parameters())
        assert all(int(m.num_batches_tracked) == (i not in dropped) for m in branch[1::2])


def test_the_split_survives_random_depth():
    module = built(keep_last=0.5)
    net = Network(module, precision="fp64")
    net.confirm_split(
        flatten(module)[None],
        {n: b[None].clone() for n, b in net.buffers.items()},
        randn(1, 3, 3, 8, 8),
    )
    assert net.has_split
