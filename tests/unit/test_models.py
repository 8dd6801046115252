"""Models: rows of weights meeting inputs, slim forms, published sizes, and what other programs call the weights."""

import copy
import math
from itertools import pairwise

import pytest
import torch
import torchvision
from helpers import HERE, classification, config, federation, play, setup
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fldiag import FldiagError, models, registry
from fldiag.models.network import Network, batch_dependent, forward_macs
from fldiag.models.residual import BasicBlock, Bottleneck, ResNet, keep_probabilities
from fldiag.models.slim import apply_slim, channels, divisible
from fldiag.models.stacked import chain_of
from fldiag.models.vit import LocalityAttention, ShiftedPatches
from fldiag.params import Layout, flatten


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def seeded(build, *args):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build(*args).double()


def same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


# -- chains


def conv_net():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, stride=2),
        nn.GELU(),
        nn.Sequential(nn.Conv2d(4, 6, 3, groups=2, bias=False), nn.Sigmoid(), nn.MaxPool2d(2)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Identity(),
        nn.Linear(6, 5),
    )


def linear_net():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 3, bias=False))


CHAINS = [
    (linear_net, (1, 4, 4)),
    (conv_net, (2, 12, 12)),
    (lambda: models.build("small_cnn", (1, 8, 8), 10), (1, 8, 8)),
    (lambda: models.build("mlp", (6,), 10), (6,)),
]


@pytest.mark.parametrize(("build", "shape"), CHAINS)
def test_a_stack_is_each_row_alone_and_the_module_itself(build, shape):
    """Outputs, and gradients by torch's own functional call."""
    module = seeded(build)
    net, x = Network(module, precision="fp64"), randn(3, 5, *shape, seed=1)
    w = (flatten(module) + 0.1 * randn(3, net.size)).requires_grad_()
    stacked = net.bind(w)(x)
    (slope,) = torch.autograd.grad(stacked.square().sum(), w)
    for k in range(3):
        row = w[k].detach().requires_grad_()
        out = torch.func.functional_call(module, net.layout.views(row), (x[k],))
        same(stacked[k], out)
        same(net.bind(row[None])(x[k : k + 1])[0], out)
        same(slope[k], torch.autograd.grad(out.square().sum(), row)[0])


class Doubling(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


class Scaled(nn.Linear):
    def forward(self, x):
        return 3 * super().forward(x)


def hooked():
    net = linear_net()
    net[1].register_forward_hook(lambda m, args, out: out + 1)
    return net


def tied():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    return net


def shared():
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer)


def parametrized():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)))


#: A module, and the shape of its inputs.
NOT_CHAINS = [
    (hooked, (1, 4, 4)),
    (tied, (4,)),
    (shared, (4,)),
    (parametrized, (4,)),
    (lambda: Doubling(nn.Linear(4, 2)), (4,)),
    (lambda: nn.Sequential(Scaled(4, 2)), (4,)),
    (lambda: nn.Sequential(nn.Linear(4, 2), nn.Dropout()), (4,)),
    (lambda: nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4)), (4,)),
    (lambda: nn.Sequential(nn.Linear(4, 2), nn.Flatten(0)), (4,)),
    (lambda: nn.Sequential(nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect")), (1, 4, 4)),
    (lambda: models.build("mlp", (4,), 3, {"lora_rank": 2}), (4,)),
]


@pytest.mark.parametrize(("build", "shape"), NOT_CHAINS)
def test_what_is_no_plain_chain_is_called_as_it_is(build, shape):
    module, x = seeded(build).eval(), randn(5, *shape)
    net = Network(module, precision="fp64")
    assert chain_of(module) is None and not net.stackable
    same(net.bind(flatten(module)[None])(x[None])[0], module(x))
    with pytest.raises(FldiagError, match=r"cannot be stacked.*train\.stack"):
        net.bind(flatten(module).expand(2, -1))


def test_a_layer_used_twice_is_used_twice_and_pooling_goes_before_relu_to_the_bit():
    relu = nn.ReLU()
    assert len(chain_of(nn.Sequential(nn.Linear(6, 5), relu, nn.Linear(5, 4), relu))) == 4
    module = models.build("small_cnn", (1, 8, 8), 10)
    fast, plain = Network(module), Network(module)
    plain.chain = chain_of(plain.module)
    assert [n for n, _ in fast.chain] != [n for n, _ in plain.chain]
    w, x = flatten(module)[None].requires_grad_(), randn(1, 30, 1, 8, 8).float()
    outputs = [n.bind(w)(x) for n in (fast, plain)]
    gradients = [torch.autograd.grad(o.square().sum(), w)[0] for o in outputs]
    assert torch.equal(*outputs) and torch.equal(*gradients)


# -- other modules


class Own(nn.Module):
    """head(features(x)), with a dropout between the two, something beside them, or layers evaluated again in the backward."""

    def __init__(self, dropout=0.0, beside=0.0, again=None, norm=False):
        super().__init__()
        self.body, self.norm, self.head = (
            nn.Linear(6, 6),
            nn.BatchNorm1d(6) if norm else nn.Identity(),
            nn.Linear(6, 3),
        )
        self.dropout, self.beside, self.again = dropout, beside, again

    def features(self, x):
        h = self.norm(self.body(x))
        again = self.again is not None
        return checkpoint(self.body, h, use_reentrant=self.again) if again else torch.relu(h)

    def forward(self, x):
        z = F.dropout(self.features(x), self.dropout, self.training)
        return self.head(z) * (1 + self.beside)


class TiedHead(Own):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 6)
        self.head.weight, self.head.bias = self.body.weight, self.body.bias


@pytest.mark.parametrize(
    ("module", "dtype", "has_split"),
    [
        (Own(), torch.float64, True),
        (Own(norm=True), torch.float64, True),
        (Own(beside=1e-8), torch.float64, False),
        (Own(beside=1e-8), torch.float32, True),
        (Own(beside=1e-3), torch.float32, False),
        (Own(dropout=0.5), torch.float32, False),
        (TiedHead(), torch.float64, False),
        (models.build("small_resnet", (6, 8, 8), 3, {"keep_last": 0.5}), torch.float32, True),
    ],
)
def test_a_split_is_kept_where_it_is_the_whole_model_up_to_rounding(module, dtype, has_split):
    module = module.to(dtype)
    before, net = copy.deepcopy(module.state_dict()), Network(module)
    x = randn(1, 8, 6).to(dtype) if isinstance(module, Own) else randn(1, 8, 6, 8, 8).to(dtype)
    buffers = {n: b[None].clone() for n, b in net.buffers.items()}
    net.confirm(flatten(module)[None], buffers, x)
    assert net.has_split == has_split
    assert all(torch.equal(b[0], net.buffers[n]) for n, b in buffers.items())
    for one in (module, net.module):
        assert all(torch.equal(v, before[n]) for n, v in one.state_dict().items())


def test_only_the_first_pass_in_training_mode_moves_the_statistics_that_it_was_given():
    module = Own(norm=True).double()
    net = Network(module)
    buffers = {n: b[None].clone() for n, b in net.buffers.items()}
    net.bind(flatten(module)[None], buffers)(randn(1, 8, 6))
    assert not buffers["norm.running_mean"].any()
    net.bind(flatten(module)[None], buffers, train=True)(randn(1, 8, 6))
    assert buffers["norm.running_mean"].any() and not module.norm.running_mean.any()


class Aside(Own):
    """Its weights are reached by another way than their name."""

    def __init__(self):
        super().__init__()
        self.matrix = [self.body.weight]

    def features(self, x):
        return x @ self.matrix[0].T


@pytest.mark.parametrize("module", [Own(again=False), Own(again=True), Aside()])
def test_a_model_that_is_evaluated_at_its_own_weights_is_not_trained(module):
    module = module.double()
    with pytest.raises(FldiagError, match="weights that the module itself holds"):
        Network(module).confirm(flatten(module)[None], {}, randn(1, 8, 6))


def test_dropout_trains_with_the_runs_own_seed_and_leaves_the_global_state():
    torch.manual_seed(3)
    module, before = Own(dropout=0.5), torch.get_rng_state()
    first, again = (federation(config(), classification(), module=module) for _ in range(2))
    play(first)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    play(again)
    assert torch.equal(first.w, again.w)


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(6, 4)), "returns .* numbers an example"),
        (nn.Sequential(nn.Linear(5, 3)), r"does not take inputs of shape \(6,\)"),
        (
            nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)),
            "client 1 has a minibatch of 1, and",
        ),
    ],
)
def test_a_model_that_does_not_fit_the_data(module, says):
    with pytest.raises(FldiagError, match=says):
        setup(config(batch_size=8), classification((20, 17, 7)), module=module)


# -- slim layers


def test_channels_are_the_next_multiple_of_eight_that_loses_at_most_a_tenth():
    values = {0.5: 1, 1.1: 1, 1.2: 9, 4: 8, 8.8: 8, 9: 16, 14.4: 16, 51.2: 48, 60: 64, 256: 256}
    assert {v: divisible(v) for v in values} == values
    assert [channels(17, 1), channels(17, 0.99), channels(3, 0.9)] == [17, 16, 3]
    for bad in (0, -0.5, 1.01, math.nan):
        with pytest.raises(FldiagError, match="is not a fraction of the channels"):
            channels(64, bad)


def test_slim_layers_are_the_full_ones_on_absent_channels():
    for m, x in (
        (nn.Conv2d(16, 24, 3, stride=2, padding=1).double(), randn(2, 16, 9, 9)),
        (nn.Linear(16, 24, bias=False).double(), randn(3, 16)),
    ):
        absent = torch.cat([x[:, :8], torch.zeros_like(x[:, 8:])], dim=1)
        same(apply_slim(m, x[:, :8], 0.6), m(absent)[:, :16])
    batch, group = nn.BatchNorm2d(16, eps=0.1).double(), nn.GroupNorm(2, 16).double()
    nn.init.constant_(batch.running_mean, 3)
    x = 2 + randn(4, 8, 3, 3)
    for mode in (True, False):
        slim = apply_slim(batch.train(mode), x, 1)
        same(slim, F.batch_norm(x, None, None, training=True, eps=0.1))
    assert bool((batch.running_mean == 3).all())
    same(apply_slim(group, x, 1), F.group_norm(x, 2))
    for m, says in (
        (nn.InstanceNorm2d(8, affine=True), "InstanceNorm2d has no slim form"),
        (group, "9 channels do not split into the 2 groups"),
    ):
        with pytest.raises(FldiagError, match=says):
            apply_slim(m, randn(4, 9, 3, 3), 1)


# -- architectures


def unsettled(module):
    """Scales, shifts and running statistics that are not the initial ones."""
    for i, (n, t) in enumerate(module.state_dict().items()):
        if t.dim() == 1 and t.is_floating_point():
            noise = 0.3 * randn(*t.shape, seed=i)
            t += noise.abs() if "var" in n else noise
    return module


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    ("name", "norm"), [("resnet18_imagenet", None), ("resnet18_gn", lambda c: nn.GroupNorm(2, c))]
)
def test_a_resnet_is_torchvisions_with_the_same_weights(name, norm, train):
    peer = seeded(lambda: torchvision.models.resnet18(num_classes=10, norm_layer=norm))
    peer, ours = unsettled(peer).train(train), models.build(name, (3, 32, 32), 10).double()
    ours.train(train).load_state_dict(peer.state_dict())
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in peer.named_parameters()]
    x = randn(3, 3, 32, 32)
    maps = [F.relu(m) for m in ours.eval().stages(x)]
    z = peer.eval().maxpool(F.relu(peer.bn1(peer.conv1(x))))
    for part, ours_map in zip((peer.layer1, peer.layer2), maps[1:3], strict=True):
        same(ours_map, z := part(z))
    same(ours.train(train)(x), peer.train(train)(x))


@pytest.mark.parametrize(("kind", "stride"), [(BasicBlock, 1), (BasicBlock, 2), (Bottleneck, 2)])
def test_a_block_is_torchvisions_and_is_evaluated_as_the_mean_over_random_depth(kind, stride):
    block = unsettled(kind(8, 6, stride, nn.BatchNorm2d).double()).eval().requires_grad_(False)
    out, norm = 6 * kind.expansion, nn.BatchNorm2d(6 * kind.expansion)
    shortcut = nn.Sequential(nn.Conv2d(8, out, 1, stride, bias=False), norm)
    peer = getattr(torchvision.models.resnet, kind.__name__)(8, 6, stride, shortcut).double()
    x = randn(2, 8, 7, 7)
    if block.downsample is not None:
        peer.load_state_dict(block.state_dict())
        same(F.relu(block(x)), peer.eval()(x))
    dropped, whole = block.shortcut(x), block(x)
    block.keep = 0.7
    same(block(x), 0.7 * whole + 0.3 * dropped)
    for m in block.modules():
        m.training = isinstance(m, kind)  # the block draws, its norms do not learn
    torch.manual_seed(0)
    draws = [block(x) for _ in range(1000)]
    share = sum(torch.equal(y, whole) for y in draws) / 1000
    assert share + sum(torch.equal(y, dropped) for y in draws) / 1000 == 1
    assert abs(share - 0.7) < 4 * math.sqrt(0.21 / 1000)


@pytest.mark.parametrize(
    ("block", "norm"),
    [(BasicBlock, lambda c: nn.GroupNorm(2, c)), (Bottleneck, nn.BatchNorm2d)],
)
def test_a_sub_network_is_the_network_built_that_small(block, norm):
    """Outputs and gradients, of the whole and of the last stage alone; running statistics are left alone."""
    options = {"norm": norm, "projection": True, "pool": True}
    full = unsettled(ResNet(3, 5, block, (2, 1, 2), (16, 32, 64), **options).double()).train()
    small = ResNet(3, 5, block, (2, 1, 2), (8, 16, 32), **options).double().train()
    parts = {n: tuple(slice(0, s) for s in t.shape) for n, t in small.state_dict().items()}
    small.load_state_dict({n: full.state_dict()[n][part] for n, part in parts.items()})
    before, x = copy.deepcopy(dict(full.named_buffers())), randn(4, 3, 16, 16)
    f = randn(4, small.layers[-1][0].conv1.in_channels, 6, 6).abs()
    out, last = full.sub(x, 0.5), full.last_stage(f, 0.5)
    (out.square().sum() + last.sum()).backward()
    assert all(torch.equal(b, before[n]) for n, b in full.named_buffers())
    small_out, small_last = small(x), F.relu(small._stage(small.layers[-1], f))
    (small_out.square().sum() + small_last.sum()).backward()
    same(out, small_out)
    same(last, small_last)
    for n, p in full.named_parameters():
        inside = torch.zeros_like(p)
        inside[parts[n]] = small.get_parameter(n).grad
        same(p.grad, inside)
    same(full.sub(x, 1), full(x))


@pytest.mark.parametrize(("rule", "first"), [("code", 1), ("paper", 1 - 0.1 / 18)])
def test_probabilities_of_keeping_fall_linearly_and_1_draws_nothing(rule, first):
    p = keep_probabilities(18, 0.9, rule)
    assert (p[0], p[-1]) == (pytest.approx(first), pytest.approx(0.9))
    assert [a - b for a, b in pairwise(p)] == pytest.approx([(first - 0.9) / 17] * 17)
    options = {"keep_last": 1.0, "keep_rule": rule}
    module, before = models.build("small_resnet", (3, 8, 8), 4, options), torch.get_rng_state()
    module.train()(torch.zeros(2, 3, 8, 8))
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(FldiagError, match="keep_last"):
        models.build("small_resnet", (3, 8, 8), 4, {"keep_last": 1.1})


def test_of_two_tokens_each_attends_to_the_other_and_of_more_as_torch_does():
    m, x = seeded(LocalityAttention, 8, 3, 4), randn(2, 5, 8)
    q, k, v = (t.view(2, 5, 3, 4).transpose(1, 2) for t in m.qkv(m.norm(x)).chunk(3, dim=-1))
    others = ~torch.eye(5, dtype=torch.bool)
    with torch.no_grad():
        m.temperature.fill_(math.log(1.7))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=others, scale=1.7)
    same(m(x), m.out(y.transpose(1, 2).reshape(2, 5, 12)))
    v = m.qkv(m.norm(x[:, :2])).chunk(3, dim=-1)[2]
    same(m(x[:, :2]), m.out(v.flip(1)))


def test_a_token_holds_its_patch_and_the_four_shifted_ones():
    x = torch.arange(1.0, 65).view(1, 1, 8, 8)
    token = ShiftedPatches(1, 4, 6).patches(x)[0, 1].view(4, 4, 5)  # upper right: rows 0-3
    assert torch.equal(token[..., 0], x[0, 0, :4, 4:])
    padded = F.pad(x[0, 0], (1, 1, 1, 1))
    shifts = [padded[1 + a : 5 + a, 5 + b : 9 + b] for a, b in ((0, 1), (0, -1), (1, 0), (-1, 0))]
    images = {tuple(t.flatten().tolist()) for t in token[..., 1:].unbind(-1)}
    assert images == {tuple(s.flatten().tolist()) for s in shifts}


def test_vgg_enlarges_smaller_images():
    plain, other = (models.build("vgg11", (3, side, side), 10) for side in (32, 28))
    x = randn(2, 3, 28, 28).float()
    enlarged = F.interpolate(x, scale_factor=32 / 28, mode="bilinear")
    torch.testing.assert_close(other(x), plain(enlarged))


#: (name, shape, classes, options) -> parameters, as printed in the papers or counted by hand.
COUNTS = [
    ("fedavg_cifar", (3, 32, 32), 10, {}, 2_156_490),
    ("fedavg_mnist", (3, 28, 28), 10, {}, 1_664_970),
    ("mlp", (2,), 3, {}, 4_547),
    ("mlp", (4,), 1, {"hidden": (), "bias": False}, 4),
    ("small_cnn", (1, 8, 8), 10, {}, 46_594),
    ("mlp_iris", (2,), 3, {}, 4_547),
    ("lenet", (3, 32, 32), 10, {}, 797_962),
    ("vgg11", (3, 32, 32), 10, {}, 9_750_922),
    ("sl_vit", (3, 32, 32), 10, {}, 6_176_275),
    ("sl_vit", (3, 28, 28), 9, {}, 6_132_432),
    ("resnet18_cifar", (3, 32, 32), 10, {}, 11_173_962),
    ("resnet18_gn", (3, 32, 32), 10, {}, 11_181_642),
    ("resnet8_p3", (3, 32, 32), 10, {}, 4_903_242),
    ("resnet18_p3", (3, 32, 32), 100, {}, 11_220_132),
    ("resnet56", (3, 32, 32), 100, {}, 614_452),
    ("resnet56", (3, 32, 32), 100, {"projection": True}, 746_036),
    ("resnet18_imagenet", (3, 64, 64), 200, {}, 11_279_112),
    ("small_resnet", (1, 8, 8), 10, {}, 77_754),
    ("bert_tiny", (64,), 3, {}, 4_385_920 + 387),
]
#: (name, shape, classes) -> multiply-adds of one forward pass for one example.
COSTS = [
    ("fedavg_cifar", (3, 32, 32), 10, 17_667_072),
    ("fedavg_mnist", (3, 28, 28), 10, 13_527_552),
    ("resnet56", (3, 32, 32), 100, 87_237_632),
    # 1,814,073,344 with ImageNet's 1000 classes
    ("resnet18_imagenet", (3, 224, 224), 200, 1_814_073_344 - 800 * 512),
]


@pytest.mark.parametrize(("name", "shape", "classes", "options", "count"), COUNTS)
def test_number_of_parameters(name, shape, classes, options, count):
    assert Layout.of(models.build(name, shape, classes, options)).size == count


@pytest.mark.parametrize(("name", "shape", "classes", "count"), COSTS)
def test_multiply_adds(name, shape, classes, count):
    assert forward_macs(models.build(name, shape, classes), shape) == count


def test_which_models_stack_have_a_head_and_depend_on_their_batch():
    shapes = ((3, 32, 32), (3, 28, 28), (1, 8, 8), (6,))
    stackable, dependent = set(), set()
    for name in HERE:
        for shape in shapes:
            try:
                module = models.build(name, shape, 10)
                break
            except FldiagError as refusal:
                assert (
                    "takes" in refusal.what and "mlp" in refusal.remedy
                ) or "text" in refusal.what
        net = Network(module)
        head = getattr(module, net.layout.head_name)
        assert net.has_split and net.size - net.cut == sum(p.numel() for p in head.parameters())
        stackable |= {name} if net.stackable else set()
        dependent |= {name} if batch_dependent(module) else set()
    chains = {"fedavg_cifar", "fedavg_mnist", "lenet", "mlp", "mlp_iris", "small_cnn", "vgg11"}
    assert (stackable, dependent) == (chains, {"resnet18_cifar"})


def test_user_code_runs_only_when_the_user_says_so():
    with pytest.raises(FldiagError, match="does not import it because a file says so"):
        models.build("torch.nn:Identity", (3,), 2)
    registry.allow("collections:OrderedDict")
    with pytest.raises(FldiagError, match="returned OrderedDict; return a torch"):
        models.build("collections:OrderedDict", (3,), 2)


# -- names of other programs


def net():
    return seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)))


class Wrapping(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = net()


STATE = dict(net().state_dict())


def behind(prefix, state=STATE):
    return {prefix + n: t for n, t in state.items()}


@pytest.mark.parametrize(
    ("state", "module"),
    [
        (STATE, net()),
        ({n: t for n, t in STATE.items() if "batches" not in n}, net()),
        ({**behind("model."), "loss.weight": torch.ones(3)}, net()),
        (behind("model._orig_mod."), net()),
        (behind("module.body."), Wrapping()),
        (behind("body.module."), Wrapping()),
        (behind("net._orig_mod.body.module."), Wrapping()),
        (behind("module."), nn.ModuleDict({"module": net()})),
        ({f"arr_{i}": t for i, t in enumerate(STATE.values())}, net()),
    ],
)
def test_a_state_dict_under_the_models_own_names(state, module):
    fitted = models.fit_weights(state, module)
    own = module.state_dict()
    assert set(fitted) >= models.required_names(module)
    assert all(torch.equal(t, own[n]) for n, t in fitted.items())


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({**behind("a."), **behind("b.")}, r"behind each of 'a\.', 'b\.'.*--key b"),
        ({**STATE, "0.weight": torch.ones(5, 4)}, r"0\.weight is \[5, 4\] there and \[3, 4\]"),
        ({n: t for n, t in STATE.items() if n != "2.bias"}, r"it lacks 2\.bias"),
        ({**STATE, "3.bias": torch.ones(2)}, r"the model has no 3\.bias"),
        (
            {"arr_0": STATE["0.bias"], "arr_1": STATE["0.weight"]},
            r"\[3\] where 0.weight is \[3, 4\]",
        ),
    ],
)
def test_a_state_dict_that_does_not_fit_names_the_tensor(state, says):
    with pytest.raises(FldiagError, match=says):
        models.fit_weights(state, net())
