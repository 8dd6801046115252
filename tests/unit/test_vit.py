"""SL-ViT, VGG-11 and LeNet: what their layers do, one at a time."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fldiag import models
from fldiag.models.network import Network
from fldiag.models.vgg import Enlarged
from fldiag.models.vit import LocalityAttention, ShiftedPatches, SLViT
from fldiag.params import Layout, flatten


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def small():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return SLViT(
            (3, 8, 8), 5, patch=2, dim=12, depth=2, heads=2, per_head=6, hidden=12
        ).double()


def attention(heads=3, per_head=4):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LocalityAttention(8, heads, per_head).double()


def test_a_token_holds_its_patch_and_the_four_shifted_ones():
    x = torch.arange(1.0, 65).view(1, 1, 8, 8)
    tokens = ShiftedPatches(1, 4, 6).patches(x)
    assert tokens.shape == (1, 4, 5 * 16)
    token = tokens[0, 1].view(4, 4, 5)  # the upper right patch: rows 0-3, columns 4-7
    whole = x[0, 0]
    assert torch.equal(token[..., 0], whole[:4, 4:])
    seen = {tuple(token[..., i].flatten().tolist()) for i in range(1, 5)}
    padded = F.pad(whole, (1, 1, 1, 1))
    expected = {
        tuple(padded[1 + a : 5 + a, 5 + b : 9 + b].flatten().tolist())
        for a, b in ((0, 1), (0, -1), (1, 0), (-1, 0))
    }
    assert seen == expected
    assert torch.equal(tokens[0, 2].view(4, 4, 5)[..., 0], whole[4:, :4])


def test_channels_stay_apart_in_a_token():
    x = randn(2, 3, 8, 8)
    tokens = ShiftedPatches(3, 2, 6).double().patches(x).view(2, 16, 2, 2, 15)
    assert torch.equal(tokens[0, 0, 1, 0, :3], x[0, :, 1, 0])
    assert torch.equal(tokens[1, 5, 0, 1, :3], x[1, :, 2, 3])


def test_attention_is_the_masked_one_of_torch():
    m, x = attention(), randn(2, 5, 8)
    q, k, v = (t.view(2, 5, 3, 4).transpose(1, 2) for t in m.qkv(m.norm(x)).chunk(3, dim=-1))
    others = ~torch.eye(5, dtype=torch.bool)
    y = F.scaled_dot_product_attention(
        q, k, v, attn_mask=others
    )  # its scale is that of the first temperature
    torch.testing.assert_close(m(x), m.out(y.transpose(1, 2).reshape(2, 5, 12)))
    with torch.no_grad():
        m.temperature.fill_(math.log(1.7))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=others, scale=1.7)
    torch.testing.assert_close(m(x), m.out(y.transpose(1, 2).reshape(2, 5, 12)))


def test_no_token_attends_to_itself():
    m, x = attention(), randn(1, 2, 8)
    v = m.qkv(m.norm(x)).chunk(3, dim=-1)[2]
    torch.testing.assert_close(m(x), m.out(v.flip(1)))  # of two tokens each sees the other alone


def test_attention_follows_a_permutation_of_the_tokens():
    m, x = attention(), randn(2, 6, 8)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    torch.testing.assert_close(m(x[:, order]), m(x)[:, order])


def test_only_positions_tell_the_tokens_apart():
    model, x = small(), randn(2, 16, 12)
    model.tokens = nn.Identity()
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    before, moved = model(x), model(x[:, order])
    assert (before - moved).abs().max() > 1e-3
    with torch.no_grad():
        model.position[:, 1:] = model.position[:, 1:][:, order]
    torch.testing.assert_close(model(x[:, order]), before)


def test_features_are_the_residual_stream_of_the_class_token():
    model, x = small(), randn(2, 3, 8, 8)
    with torch.no_grad():
        for m in [*model.attention, *model.mlp]:
            last = m.out if isinstance(m, LocalityAttention) else m[-1]
            last.weight.zero_(), last.bias.zero_()
    torch.testing.assert_close(
        model.features(x), (model.first + model.position[:, :1]).expand(2, -1, -1)[:, 0]
    )
    norm, fc = model.head
    torch.testing.assert_close(model(x), fc(norm(model.features(x))))


def test_every_weight_of_the_transformer_matters():
    model = small()
    model(randn(2, 3, 8, 8)).square().sum().backward()
    assert all(p.grad.abs().max() > 0 for p in model.parameters())


@pytest.mark.parametrize(
    ("side", "patch", "tokens"), [(32, 8, 16), (28, 7, 16), (8, 2, 16), (64, 16, 16), (128, 16, 64)]
)
def test_patches_of_a_quarter_of_the_side(side, patch, tokens):
    model = models.build("sl_vit", (1, side, side), 4)
    assert model.tokens.patch == patch
    assert model.position.shape == (1, tokens + 1, 192)
    assert (
        len(model.attention),
        model.attention[0].heads,
        model.attention[0].qkv.out_features,
    ) == (9, 12, 3 * 768)
    assert model.attention[4].temperature.item() == pytest.approx(math.log(64**-0.5))
    assert Layout.of(model).head_size == 2 * 192 + 192 * 4 + 4


def test_vgg_is_a_plain_chain_at_32_pixels_and_enlarges_smaller_images():
    plain, other = models.build("vgg11", (3, 32, 32), 10), models.build("vgg11", (3, 28, 28), 10)
    assert Network(plain).stackable and Network(other).has_split and type(other) is Enlarged
    assert list(plain.state_dict()) == list(other.state_dict())
    x = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        other(x), plain(F.interpolate(x, scale_factor=32 / 28, mode="bilinear"))
    )
    net = Network(other)
    torch.testing.assert_close(net.bind(flatten(other)[None])(x[None])[0], other(x))


def test_vgg_starts_from_normal_weights_and_no_bias():
    for m in models.build("vgg11", (3, 32, 32), 10):
        if isinstance(m, nn.Conv2d):
            assert float(m.weight.detach().std()) == pytest.approx(
                math.sqrt(2 / (9 * m.out_channels)), rel=0.06
            )
            assert not m.bias.any()


def test_sides_of_lenet():
    for shape in ((1, 28, 28), (3, 16, 40)):
        assert models.build("lenet", shape, 4)(torch.zeros(2, *shape)).shape == (2, 4)
    assert Network(models.build("lenet", (3, 32, 32), 10)).stackable
