"""The culprits the probe must name, one broken model, loss or slice each."""

import functools

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy as CE

from fldiag.diagnostics import Problem
from fldiag.errors import FldiagError


def data(n=10, classes=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, generator=g), torch.arange(n) % classes


def mlp(*extra):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), *extra, nn.Tanh(), nn.Linear(5, 3))


class Sliced:
    name = "client:7/train"

    def __init__(self, x, y):
        self.x, self.y, self.n = x, y, len(x)

    def batch(self, start, stop):
        return self.x[start:stop], self.y[start:stop]


class Stubborn(nn.Dropout):
    def train(self, mode=True):
        return super().train(True)


class StubbornNorm(nn.BatchNorm1d):
    def train(self, mode=True):
        return super().train(True)


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


class Jitter(Sliced):
    def batch(self, start, stop):
        x, y = super().batch(start, stop)
        return x + torch.rand_like(x), y


class Detached(nn.Module):
    def forward(self, x):
        return x.detach()


def weighted(z, y):
    return CE(z, y, weight=torch.tensor([1.0, 2.0, 5.0]))


def labels(bad):
    y = torch.arange(400) % 3
    y[201] = bad
    return data(400)[0], y


NAN = torch.full((10, 4), float("nan"))
BROKEN = {
    "active dropout": (lambda: mlp(Stubborn(0.5)), CE, data(), r"dropout is active in 1 \(Stubborn\)"),
    "random forward": (lambda: mlp(Noisy()), CE, data(), "disagree.*torch.rand"),
    "running batch norm": (lambda: mlp(StubbornNorm(5)), CE, data(),
                           r"changes the buffers 1\.running_mean.*training mode.*1 \(StubbornNorm\)"),
    "input in place": (lambda: nn.Sequential(nn.ReLU(inplace=True), mlp()), CE, data(),
                       "changes its input in place"),
    "augmented data": (mlp, CE, Jitter(*data()), "slice 'client:7/train' change"),
    "sum": (mlp, functools.partial(CE, reduction="sum"), data(), "it is a sum"),
    "none": (mlp, functools.partial(CE, reduction="none"), data(), r"tensor \[10\] for 10 examples"),
    "class weights": (mlp, weighted, data(), "not the mean over its examples"),
    "random loss": (mlp, lambda z, y: CE(z, y) + torch.rand(()), data(), "same outputs disagree"),
    "label too large": (mlp, CE, labels(3), "example 201 .* has label 3, the model has 3 outputs"),
    "label negative": (mlp, CE, labels(-100), "example 201 .* has label -100"),
    "nan input": (mlp, CE, (NAN, data()[1]), "inputs .* NaN"),
    "nan loss": (mlp, lambda z, y: CE(z, y) * float("nan"), data(), "loss is nan .*loss alone"),
    "detached": (lambda: nn.Sequential(mlp(), Detached()), CE, data(), "does not depend on the weights"),
    "shape": (mlp, CE, (torch.zeros(6, 7), data(6)[1]), r"model failed on a batch of shape \[6, 7\]"),
    "targets": (mlp, CE, (data(6)[0], torch.zeros(6, 2)), r"loss failed on outputs a tensor \[6, 3\]"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_every_evaluation_names_the_culprit(case):
    net, loss, given, message = BROKEN[case]
    kept = given[0].clone() if isinstance(given, tuple) else given.x.clone()
    for evaluate in (Problem.probe, Problem.loss, Problem.gradient):
        with pytest.raises(FldiagError, match=message) as caught:
            evaluate(Problem(net(), loss, given))
        assert caught.value.remedy
    assert torch.equal(kept, given[0] if isinstance(given, tuple) else given.x) or case == "nan input"


def test_a_label_out_of_range_is_found_wherever_it_is():
    x, y = data(400)
    for at in (0, 17, 250, 399):
        bad = y.clone()
        bad[at] = 7
        with pytest.raises(FldiagError, match=f"example {at} .* label 7"):
            Problem(mlp(), CE, (x, bad)).loss()


def test_nan_weights_are_named():
    with pytest.raises(FldiagError, match=r"loss is nan .*weights"):
        Problem(mlp(), CE, data(), params=torch.full((43,), float("nan"))).probe()
