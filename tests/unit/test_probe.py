"""The culprits the probe must name, one broken model, loss or slice each."""

import functools

import pytest
import torch
import torch.nn.functional as F
from problems import Sliced, data, mlp
from torch import nn
from torch.nn.functional import cross_entropy as CE

from fldiag.errors import FldiagError
from fldiag.problem.problem import Problem


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


def uniform():
    """As at an initialisation with a small last layer: all outputs alike, so all losses too."""
    net = mlp()
    with torch.no_grad():
        net[2].weight.mul_(1e-4), net[2].bias.zero_()
    return net


def coupled(z, y):  # every example is drawn to the mean of the batch
    return (z - z.mean(0)).square().mean()


def single():
    return nn.Linear(4, 1)


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
    "class weights, alike": (uniform, weighted, data(), "not the mean over its examples"),
    "coupled examples, alike": (uniform, coupled, data(), "not the mean over its examples"),
    "broadcast mean": (single, lambda z, y: (z - y).square().mean(), (data()[0], torch.randn(10)),
                       r"outputs \[10, 1\] with targets \[10\]: broadcasting.*reshape the targets to \[n, 1\]"),
    "broadcast sum": (single, lambda z, y: (z - y).square().sum(1).mean(), (data()[0], torch.randn(10)), "broadcasting"),
    "random loss": (mlp, lambda z, y: CE(z, y) + torch.rand(()), data(), "same outputs disagree"),
    "label too large": (mlp, CE, labels(3), "example 201 .* has label 3, the model has 3 outputs"),
    "label negative": (mlp, CE, labels(-1), "example 201 .* has label -1"),
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


def odds(z, y):
    return F.binary_cross_entropy(z, y)


ALIKE = torch.full((10, 3), 0.5)
FAIR = {
    "cross entropy": (uniform, CE, data()), "smoothed": (uniform, nn.CrossEntropyLoss(label_smoothing=0.1), data()),
    "squares": (single, nn.MSELoss(), (data()[0], torch.randn(10, 1))),
    "squares of large targets": (single, nn.MSELoss(), (data()[0], 1e6 + 1e5 * torch.randn(10, 1))),
    "reshaped by the loss": (single, lambda z, y: (z.squeeze(1) - y).square().mean(), (data()[0], torch.randn(10))),
    "probabilities": (lambda: nn.Sequential(mlp(), nn.Sigmoid()), odds, (data()[0], (ALIKE + 0.2).round())),
    "logarithms": (lambda: nn.Sequential(mlp(), nn.Softmax(1)), lambda z, y: F.nll_loss(z.log(), y), data()),
    "of both signs": (uniform, lambda z, y: z.sum(1).mean(), data()), "overflows": (mlp, lambda z, y: z.mul(99).exp().mean(), data()),
}


@pytest.mark.parametrize("name", FAIR)
def test_means_over_the_examples_are_accepted_whatever_outputs_they_take(name):
    net, loss, given = FAIR[name]
    Problem(net(), loss, given).probe()


def test_the_number_of_outputs_is_known():
    assert Problem(mlp(), CE, data()).probe().outputs == 3
    assert Problem(nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (2, 3))),
                   lambda z, y: z.square().mean(), data()).probe().outputs == 6


def test_nan_weights_are_named():
    with pytest.raises(FldiagError, match=r"loss is nan .*weights"):
        Problem(mlp(), CE, data(), params=torch.full((43,), float("nan"))).probe()
