"""Layers at a fraction of their channels: against zero-padded inputs and against layers built that small."""

import pytest
import torch
from helpers import multiply_adds
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fldiag import models
from fldiag.errors import FldiagError
from fldiag.models.layers import apply_slim, channels, divisible


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("v", "n"),
    [
        (0.5, 1),
        (1.1, 1),
        (1.2, 9),
        (3.9, 9),
        (4, 8),
        (8.8, 8),
        (9, 16),
        (11.9, 16),
        (12.8, 16),
        (14.4, 16),
        (51.2, 48),
        (57.6, 56),
        (60, 64),
        (256, 256),
    ],
)
def test_divisible(v, n):
    assert divisible(v) == n


@given(st.floats(4, 2000))
def test_divisible_is_a_near_multiple_of_eight_that_loses_at_most_a_tenth(v):
    n = divisible(v)
    assert n % 8 == 0
    assert 0.9 * v <= n < v + 8
    assert n == divisible(n)


def test_full_width_keeps_every_channel_and_no_width_more_than_there_are():
    assert [channels(17, 1), channels(17, 0.99), channels(3, 0.9), channels(64, 0.25)] == [
        17,
        16,
        3,
        16,
    ]
    for bad in (0, -0.5, 1.01, float("nan")):
        with pytest.raises(FldiagError, match="is not a fraction of the channels"):
            channels(64, bad)


@pytest.mark.parametrize("bias", [True, False])
def test_a_slim_convolution_is_the_full_one_on_absent_channels(bias):
    m = nn.Conv2d(16, 24, 3, stride=2, padding=1, bias=bias).double()
    x = randn(2, 16, 9, 9)
    absent = torch.cat([x[:, :8], torch.zeros_like(x[:, 8:])], dim=1)
    torch.testing.assert_close(apply_slim(m, x[:, :8], 0.6), m(absent)[:, :16])
    torch.testing.assert_close(apply_slim(m, x, 1), m(x))


def test_a_slim_linear_layer_is_the_full_one_on_absent_features():
    m, x = nn.Linear(16, 24).double(), randn(3, 16)
    absent = torch.cat([x[:, :5], torch.zeros_like(x[:, 5:])], dim=1)
    torch.testing.assert_close(apply_slim(m, x[:, :5], 1), m(absent))
    torch.testing.assert_close(apply_slim(m, x[:, :5], 0.6), m(absent)[:, :16])


def test_slim_batch_norm_takes_the_batch_and_leaves_the_running_statistics():
    m = nn.BatchNorm2d(16, eps=0.1).double()
    with torch.no_grad():
        m.weight.copy_(randn(16)), m.bias.copy_(randn(16, seed=1)), m.running_mean.fill_(3)
    before = {n: b.clone() for n, b in m.named_buffers()}
    x = 2 + randn(4, 8, 3, 3)
    mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), unbiased=False, keepdim=True)
    expected = (x - mean) / (var + 0.1).sqrt() * m.weight[:8].view(-1, 1, 1) + m.bias[:8].view(
        -1, 1, 1
    )
    for mode in (True, False):
        torch.testing.assert_close(apply_slim(m.train(mode), x, 1), expected)
    assert all(torch.equal(b, before[n]) for n, b in m.named_buffers())


def test_slim_group_norm_keeps_the_number_of_groups():
    m = nn.GroupNorm(2, 16).double()
    with torch.no_grad():
        m.weight.copy_(randn(16)), m.bias.copy_(randn(16, seed=1))
    small = nn.GroupNorm(2, 8).double()
    small.load_state_dict({n: p[:8] for n, p in m.state_dict().items()})
    x = randn(4, 8, 3, 3)
    torch.testing.assert_close(apply_slim(m, x, 1), small(x))
    with pytest.raises(FldiagError, match="9 channels do not split into the 2 groups"):
        apply_slim(m, randn(4, 9, 3, 3), 1)


def test_a_layer_without_a_slim_form_is_named():
    with pytest.raises(FldiagError, match="InstanceNorm2d has no slim form"):
        apply_slim(nn.InstanceNorm2d(8, affine=True), torch.zeros(2, 8, 3, 3), 0.5)
    assert apply_slim(nn.ReLU(), torch.tensor([-1.0, 2]), 0.5).tolist() == [0, 2]


def test_multiply_adds_count_the_batch_and_both_operands():
    m = nn.Conv2d(3, 16, 3, padding=1)
    x = torch.zeros(2, 3, 8, 8)
    assert multiply_adds(m, x) == 2 * 64 * 16 * 27
    assert multiply_adds(apply_slim, m, x[:, :1], 0.5) == 2 * 64 * 8 * 9
    assert multiply_adds(torch.matmul, torch.zeros(5, 2, 3), torch.zeros(5, 3, 4)) == 5 * 2 * 3 * 4


@pytest.mark.parametrize(
    ("width", "costs"),
    [(0.8, (59.4, 45.5, 33.4, 23.2)), (0.9, (76.8, 58.8, 43.2, 30.0)), (1, (87.2,))],
)
def test_cost_of_the_sub_networks_of_resnet56(width, costs):
    """Millions of multiply-adds at 32, 28, 24 and 20 pixels a side, as the paper's table of costs counts them."""
    module = models.build("resnet56", (3, 32, 32), 100)
    for side, cost in zip((32, 28, 24, 20), costs, strict=False):
        assert multiply_adds(
            module.sub, torch.zeros(1, 3, side, side), width
        ) / 1e6 == pytest.approx(cost, abs=0.05)


def test_cost_of_the_slim_last_stage_of_resnet56():
    module = models.build("resnet56", (3, 32, 32), 100)
    assert multiply_adds(module.last_stage, torch.zeros(1, 32, 16, 16), 0.25) == 1_867_776
