"""Cross entropy of many classes: the curvature in closed form is torch's, and one tensor as large as the outputs is kept."""

import functools
import weakref

import pytest
import torch
import torch.nn.functional as F
from problems import double_backward
from torch import nn

from fldiag.curvature import cross_entropy
from fldiag.curvature.hvp import twice_differentiable
from fldiag.problem.problem import Problem

N, T, V, D = 5, 4, cross_entropy.MANY, 3
torch.manual_seed(0)
TOKENS = torch.randint(0, V, (N, T))
NEXT = TOKENS.roll(-1, 1)
NEXT[1], NEXT[3, 1:] = -100, -100
WEIGHT = torch.rand(V, generator=torch.Generator().manual_seed(1))


class Language(nn.Module):
    def __init__(self, classes_first=False):
        super().__init__()
        torch.manual_seed(2)
        self.table, self.mix, self.head, self.first = (
            nn.Embedding(V, D),
            nn.Linear(D, D),
            nn.Linear(D, V),
            classes_first,
        )

    def forward(self, tokens, labels=None):
        h = self.table(tokens)
        z = self.head(torch.tanh(self.mix(h + h.mean(1, keepdim=True))))
        if labels is not None:
            return {"loss": F.cross_entropy(z.flatten(0, 1), labels.flatten()), "logits": z}
        return z.transpose(1, 2) if self.first else z


LOSSES = {
    "plain": F.cross_entropy,
    "a module": nn.CrossEntropyLoss(label_smoothing=0.1),
    "weights and smoothing": functools.partial(F.cross_entropy, weight=WEIGHT, label_smoothing=0.2),
    "masked": lambda z, y: (
        (F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none") * (y.flatten() % 3)).sum(),
        ((y.flatten() % 3) * (y.flatten() >= 0)).sum(),
    ),
    "squared": lambda z, y: (
        F.cross_entropy(z.transpose(1, 2), y, reduction="none").square().sum(1).mean()
    ),
}


def products(made, matrix="hessian"):
    p = made()
    v = torch.randn(p.layout.size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return double_backward(p, matrix=matrix)(v)


def by_torch(monkeypatch, of, *args):
    with monkeypatch.context() as patch:
        patch.setattr(cross_entropy, "MANY", V + 1)
        return of(*args)


@pytest.mark.parametrize("matrix", ["hessian", "ggn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss", LOSSES)
def test_products_are_those_of_automatic_differentiation(loss, dtype, matrix, monkeypatch):
    def made(net=Language):
        return Problem(net(), LOSSES[loss], (TOKENS, NEXT), dtype=dtype)

    expected = by_torch(monkeypatch, products, made, matrix)
    assert (products(made, matrix) - expected).norm() <= V * torch.finfo(
        dtype
    ).eps * expected.norm()


@pytest.mark.parametrize("net", [functools.partial(Language, True), Language])
def test_wherever_the_classes_are_and_whoever_takes_the_loss(net, monkeypatch):
    def own():
        return Problem(
            net(),
            lambda out, batch: out["loss"],
            {"tokens": TOKENS, "labels": NEXT},
            dtype=torch.float64,
        )

    def given():
        return Problem(net(), F.cross_entropy, (TOKENS, NEXT), dtype=torch.float64)

    expected = by_torch(monkeypatch, products, given)
    assert (expected - products(given)).norm() <= 1e-12 * expected.norm()
    assert (expected - products(own)).norm() <= 1e-12 * expected.norm()


def test_third_derivatives_are_right():
    z, y = torch.randn(4, V, dtype=torch.float64, requires_grad=True), torch.tensor([1, 7, -100, 3])
    u = torch.randn(2, 4, V, dtype=torch.float64)

    def third():
        (g,) = torch.autograd.grad(F.cross_entropy(z, y), z, create_graph=True)
        (h,) = torch.autograd.grad(g, z, u[0], create_graph=True)
        return torch.autograd.grad(h, z, u[1])[0]

    expected = third()
    with twice_differentiable():
        assert torch.allclose(third(), expected, rtol=1e-9, atol=1e-15)


def kept(made):
    """How many tensors as large as the outputs the graph of a gradient holds on to."""

    class Box:
        def __init__(self, held):
            self.held = held

    alive = weakref.WeakSet()

    def pack(t):
        box = Box(t)
        alive.add(box)
        return box

    p = made()
    p.probe()
    h = double_backward(p)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.held):
        h(torch.ones(h.size, dtype=torch.float64))
    sizes = {
        box.held.untyped_storage().data_ptr(): box.held.untyped_storage().nbytes() for box in alive
    }
    return sum(size >= 4 * N * T * V for size in sizes.values())


def language():
    return Problem(Language(), F.cross_entropy, (TOKENS, NEXT))


def classes_first():
    return Problem(Language(True), nn.CrossEntropyLoss(weight=WEIGHT), (TOKENS, NEXT))


def own_loss():
    return Problem(Language(), lambda out, batch: out["loss"], {"tokens": TOKENS, "labels": NEXT})


@pytest.mark.parametrize("made", [language, classes_first, own_loss])
def test_one_tensor_as_large_as_the_outputs_is_kept(made, monkeypatch):
    assert kept(made) == 1 and by_torch(monkeypatch, kept, made) >= 3
    assert made().probe().graph_bytes < 0.75 * by_torch(
        monkeypatch, lambda: made().probe().graph_bytes
    )
