"""Weights as rows: names, slices, layers, head, and row algebra."""

import pytest
import torch
from torch import nn

from fldiag import params
from fldiag.errors import FldiagError
from fldiag.params import Layout, flatten


def net():
    return nn.ModuleDict(
        {
            "body": nn.Linear(3, 4),
            "norm": nn.BatchNorm1d(4),
            "act": nn.ReLU(),
            "head": nn.Linear(4, 2),
        }
    )


def test_views_are_the_named_tensors():
    module = net()
    layout, w = Layout.of(module), flatten(module)
    assert layout.size == len(w) == 12 + 4 + 8 + 8 + 2
    views = layout.views(w)
    assert list(views) == [n for n, _ in module.named_parameters()]
    assert all(torch.equal(views[n], p) for n, p in module.named_parameters())
    assert all(
        torch.equal(w[s], dict(module.named_parameters())[n].flatten())
        for n, s in layout.slices().items()
    )
    rows = torch.stack([w, 2 * w])
    assert all(torch.equal(v[1], 2 * views[n]) for n, v in layout.views(rows).items())


def test_the_vector_is_a_copy():
    module = net()
    w = flatten(module)
    w.zero_()
    assert any(bool(p.any()) for p in module.parameters())


def test_views_share_memory_and_carry_gradients():
    layout, w = Layout.of(net()), torch.ones(34)
    layout.views(w)["head.bias"].fill_(5)
    assert w[-2:].tolist() == [5, 5]
    leaf = torch.ones(2, 34, requires_grad=True)
    (layout.views(leaf)["body.bias"] * 3).sum().backward()
    assert leaf.grad[:, 12:16].eq(3).all()
    assert leaf.grad.sum() == 3 * 8


def test_layers_are_modules():
    assert Layout.of(net()).layers == {
        "body": ("body.weight", "body.bias"),
        "norm": ("norm.weight", "norm.bias"),
        "head": ("head.weight", "head.bias"),
    }


def test_head_and_body():
    layout = Layout.of(net())
    assert (layout.head_name, layout.head_size, layout.has_head) == ("head", 10, True)
    head, body, full = (layout.span(p) for p in ("head", "body", "full"))
    assert (body[0], body[1], head[1]) == (full[0], head[0], full[1])
    assert head[1] - head[0] == 10
    assert full == (0, layout.size)
    with pytest.raises(FldiagError, match="part = 'tail' is not one of full, body, head"):
        layout.span("tail")


def test_models_without_a_head():
    single = Layout.of(nn.Sequential(nn.Flatten(), nn.Linear(3, 2)))
    assert not single.has_head
    with pytest.raises(FldiagError, match="the model has no head"):
        _ = single.head_size


@pytest.mark.parametrize(("module", "message"), [(nn.ReLU(), "has no parameters")])
def test_models_that_cannot_be_trained(module, message):
    with pytest.raises(FldiagError, match=message):
        Layout.of(module)
    integer = nn.Module()
    integer.w = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
    with pytest.raises(FldiagError, match=r"'w' has dtype torch\.int64"):
        Layout.of(integer)


def test_row_algebra():
    a, b = torch.randn(2, 3, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for k in range(3):
        assert torch.allclose(params.dot(a, b)[k], a[k] @ b[k])
        assert torch.allclose(params.norm(a)[k], a[k].norm())
