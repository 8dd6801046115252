"""The culprits the probe must name, one broken model, loss or slice each."""

import functools

import pytest
import torch
import torch.nn.functional as F
from problems import Sliced, data, mlp
from torch import nn
from torch.nn.functional import cross_entropy as CE

import fldiag
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
    "active dropout": (
        lambda: mlp(Stubborn(0.5)),
        CE,
        data(),
        r"dropout is active in 1 \(Stubborn\)",
    ),
    "random forward": (lambda: mlp(Noisy()), CE, data(), "disagree.*torch.rand"),
    "running batch norm": (
        lambda: mlp(StubbornNorm(5)),
        CE,
        data(),
        r"changes the buffers 1\.running_mean.*training mode.*1 \(StubbornNorm\)",
    ),
    "input in place": (
        lambda: nn.Sequential(nn.ReLU(inplace=True), mlp()),
        CE,
        data(),
        "changes its input in place",
    ),
    "augmented data": (mlp, CE, Jitter(*data()), "slice 'client:7/train' change"),
    "sum": (mlp, functools.partial(CE, reduction="sum"), data(), "it is a sum"),
    "none": (
        mlp,
        functools.partial(CE, reduction="none"),
        data(),
        r"tensor \[10\] for 10 examples",
    ),
    "class weights": (mlp, weighted, data(), "not the mean over its examples"),
    "class weights, alike": (uniform, weighted, data(), "not the mean over its examples"),
    "coupled examples, alike": (uniform, coupled, data(), "not the mean over its examples"),
    "broadcast mean": (
        single,
        lambda z, y: (z - y).square().mean(),
        (data()[0], torch.randn(10)),
        r"outputs \[10, 1\] with targets \[10\]: broadcasting.*reshape the targets to \[n, 1\]",
    ),
    "broadcast sum": (
        single,
        lambda z, y: (z - y).square().sum(1).mean(),
        (data()[0], torch.randn(10)),
        "broadcasting",
    ),
    "broadcast counts": (
        single,
        nn.PoissonNLLLoss(),
        (data()[0], torch.arange(10) % 4),
        r"outputs \[10, 1\] .* broadcasting",
    ),
    "random loss": (mlp, lambda z, y: CE(z, y) + torch.rand(()), data(), "same outputs disagree"),
    "label too large": (mlp, CE, labels(3), "example 201 .* has label 3, the model has 3 outputs"),
    "label negative": (mlp, CE, labels(-1), "example 201 .* has label -1"),
    "nan input": (mlp, CE, (NAN, data()[1]), "inputs .* NaN"),
    "nan loss": (mlp, lambda z, y: CE(z, y) * float("nan"), data(), "loss is nan .*loss alone"),
    "detached": (
        lambda: nn.Sequential(mlp(), Detached()),
        CE,
        data(),
        "does not depend on the weights",
    ),
    "shape": (
        mlp,
        CE,
        (torch.zeros(6, 7), data(6)[1]),
        r"model failed on a batch of shape \[6, 7\]",
    ),
    "targets": (
        mlp,
        CE,
        (data(6)[0], torch.zeros(6, 2)),
        r"loss failed on outputs a tensor \[6, 3\]",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_every_evaluation_names_the_culprit(case):
    net, loss, given, message = BROKEN[case]
    kept = given[0].clone() if isinstance(given, tuple) else given.x.clone()
    for evaluate in (Problem.probe, Problem.loss, Problem.gradient):
        with pytest.raises(FldiagError, match=message) as caught:
            evaluate(Problem(net(), loss, given))
        assert caught.value.remedy
    assert (
        torch.equal(kept, given[0] if isinstance(given, tuple) else given.x) or case == "nan input"
    )


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
    "cross entropy": (uniform, CE, data()),
    "smoothed": (uniform, nn.CrossEntropyLoss(label_smoothing=0.1), data()),
    "squares": (single, nn.MSELoss(), (data()[0], torch.randn(10, 1))),
    "squares of large targets": (single, nn.MSELoss(), (data()[0], 1e6 + 1e5 * torch.randn(10, 1))),
    "reshaped by the loss": (
        single,
        lambda z, y: (z.squeeze(1) - y).square().mean(),
        (data()[0], torch.randn(10)),
    ),
    "probabilities": (
        lambda: nn.Sequential(mlp(), nn.Sigmoid()),
        odds,
        (data()[0], (ALIKE + 0.2).round()),
    ),
    "logarithms": (
        lambda: nn.Sequential(mlp(), nn.Softmax(1)),
        lambda z, y: F.nll_loss(z.log(), y),
        data(),
    ),
    "of both signs": (uniform, lambda z, y: z.sum(1).mean(), data()),
    "overflows": (mlp, lambda z, y: z.mul(99).exp().mean(), data()),
}


@pytest.mark.parametrize("name", FAIR)
def test_means_over_the_examples_are_accepted_whatever_outputs_they_take(name):
    net, loss, given = FAIR[name]
    Problem(net(), loss, given).probe()


def test_the_number_of_outputs_is_known():
    assert Problem(mlp(), CE, data()).probe().outputs == 3
    assert (
        Problem(
            nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (2, 3))),
            lambda z, y: z.square().mean(),
            data(),
        )
        .probe()
        .outputs
        == 6
    )


def test_nan_weights_are_named():
    with pytest.raises(FldiagError, match=r"loss is nan .*weights"):
        Problem(mlp(), CE, data(), params=torch.full((43,), float("nan"))).probe()


# -- integers that are no class numbers


def outputs(count):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, count))


def negative_binomial(z, y):
    return (
        -torch.distributions.NegativeBinomial(F.softplus(z[:, 0]) + 1e-3, logits=z[:, 1])
        .log_prob(y)
        .mean()
    )


def survival(z, y):
    return F.binary_cross_entropy_with_logits(z, (torch.arange(z.shape[1]) >= y[:, None]).to(z))


def expected_rank(z, y):
    return ((z.softmax(1) * torch.arange(z.shape[1]).to(z)).sum(1) - y).square().mean()


COUNTS, RANKS = torch.arange(20) * 7 % 9, torch.arange(20) * 7 % 4
#: loss, outputs, targets, whether these are class numbers.
INTEGERS = {
    "counts": (negative_binomial, 2, COUNTS, False),
    "rates": (lambda z, y: F.poisson_nll_loss(z.sum(1), y), 3, COUNTS, False),
    "times": (survival, 4, COUNTS, False),
    "times within range": (survival, 4, RANKS, False),
    "ranks": (expected_rank, 4, RANKS, False),
    "mean and variance": (
        lambda z, y: F.gaussian_nll_loss(z[:, 0], y.to(z), z[:, 1].exp()),
        2,
        COUNTS,
        False,
    ),
    "classes": (CE, 4, RANKS, True),
    "classes in a function": (lambda z, y: F.cross_entropy(z, y), 4, RANKS, True),
    "classes, squared": (lambda z, y: F.mse_loss(z, F.one_hot(y, 4).to(z)), 4, RANKS, True),
    "classes, focal": (
        lambda z, y: (lambda log: ((1 - log.exp()) ** 2 * -log).mean())(
            z.log_softmax(1).gather(1, y[:, None])
        ),
        4,
        RANKS,
        True,
    ),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_targets_are_what_the_loss_takes_them_for(name):
    """The loss is that of the same numbers as floats; an accuracy only where they are class numbers."""
    loss, count, y, classes = INTEGERS[name]
    x = data(20)[0]
    p = Problem(outputs(count), loss, (x, y), dtype=torch.float64)
    expected = Problem(
        outputs(count), lambda z, y: loss(z, y.long()), (x, y.double()), dtype=torch.float64
    )
    assert p.loss()[0] == pytest.approx(expected.loss()[0], rel=1e-12)
    v = torch.ones(p.layout.size, dtype=torch.float64)
    assert torch.allclose(p.hvp(v), expected.hvp(v), rtol=1e-9, atol=1e-12)
    assert (p.scores().accuracy is not None) is classes and expected.scores().accuracy is None
    path = fldiag.diagnose([p, p.at(p.w + 0.1)], "paths", points=3)
    assert ("accuracy" in set(path["metric"])) is classes


@pytest.mark.parametrize("at", [2, 201, 399])
@pytest.mark.parametrize(
    "loss",
    [
        lambda z, y: F.cross_entropy(z, y),
        lambda z, y: F.nll_loss(z.log_softmax(1), y),
        lambda z, y: -(F.one_hot(y, 3) * z.log_softmax(1)).sum(1).mean(),
    ],
)
def test_a_label_on_which_the_loss_fails_is_named_wherever_it_is(loss, at):
    x, y = data(400)
    y[at] = 3
    with pytest.raises(
        FldiagError, match=f"example {at} .* label 3, the model has 3 outputs"
    ) as caught:
        Problem(mlp(), loss, (x, y)).loss()
    assert caught.value.remedy == "labels must lie in 0..2"


def test_a_loss_that_fails_for_another_reason_does_not_blame_the_labels():
    with pytest.raises(FldiagError, match=r"loss failed on outputs .*: index 5 is out of bounds"):
        Problem(mlp(), lambda z, y: z[:, 5].mean() + y.sum(), (data()[0], torch.arange(10))).loss()


# -- losses that couple the examples of a batch


def contrastive(z, y):
    similar = F.normalize(z) @ F.normalize(z).T / 0.5 - 1e9 * torch.eye(len(z)).to(z)
    positive = (y[:, None] == y) & ~torch.eye(len(z), dtype=torch.bool)
    return -(similar.log_softmax(1) * positive).sum() / positive.sum().clamp_min(1)


def views(z, y):
    if len(z) % 2:
        raise ValueError("an odd number of views")
    return CE(z[::2] @ z[1::2].T, torch.arange(len(z) // 2))


def dice(z, y):
    return 1 - 2 * (z.sigmoid() * y).sum() / (z.sigmoid().sum() + y.sum())


def correlation(z, y):
    return 1 - torch.corrcoef(torch.cat([z, y], 1).T)[0, 1]


def ranking(z, y):
    return (F.softplus(z.T - z) * (y > y.T)).sum() / (y > y.T).sum().clamp_min(1)


def cox(z, y):
    order = y.argsort(descending=True)
    return -(z[order, 0] - z[order, 0].logcumsumexp(0)).mean()


REAL = torch.linspace(-1, 2, 40).sin()[:, None]
COUPLED = {
    "contrastive": (contrastive, 3, torch.arange(40) % 4),
    "pairs of views": (views, 3, torch.arange(40)),
    "Dice": (dice, 3, (torch.arange(120) % 7 < 3).reshape(40, 3).float()),
    "root mean square": (lambda z, y: (z - y).square().mean().sqrt(), 1, REAL),
    "correlation": (correlation, 1, REAL),
    "ranking": (ranking, 1, REAL),
    "ranking by hinges": (lambda z, y: (F.relu(1 + z.T - z) * (y > y.T)).mean(), 1, REAL),
    "proportional hazards": (cox, 1, REAL[:, 0]),
    "a variance": (lambda z, y: -z.var(0).mean(), 3, REAL),
}


@pytest.mark.parametrize("name", COUPLED)
def test_a_loss_that_couples_examples_is_refused(name):
    loss, count, y = COUPLED[name]
    x = data(40)[0]
    with pytest.raises(FldiagError, match="couples them"):
        Problem(outputs(count), loss, (x, y)).loss()


def test_a_pair_whose_count_depends_on_the_outputs_has_a_remedy():
    def pair(z, y):
        return -2 * (z.sigmoid() * y).sum(), z.sigmoid().sum() + y.sum()

    given = data(40)[0], (torch.arange(120) % 7 < 3).reshape(40, 3).float()
    with pytest.raises(FldiagError, match="depends on the outputs"):
        Problem(mlp(), pair, given).loss()
