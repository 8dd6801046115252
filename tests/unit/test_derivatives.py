"""Gradient and products are the derivatives of the loss, or it is said; sound models and losses are never refused."""

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from problems import data, mlp
from torch import nn
from torch.nn.functional import cross_entropy as CE
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm

import fldiag
from fldiag import models
from fldiag.errors import FldiagError
from fldiag.problem.problem import Problem

CLASSES = 3


def images(n=12, channels=2, size=8):
    """With a black border, as images of digits have it: at zero biases the first layer's ReLU lies at its kink."""
    g = torch.Generator().manual_seed(0)
    x = torch.zeros(n, channels, size, size)
    x[..., 2:-2, 2:-2] = torch.rand(n, channels, size - 4, size - 4, generator=g)
    return x


def sequences(n=12, channels=2, length=10):
    return torch.randn(n, channels, length, generator=torch.Generator().manual_seed(0))


def labels(x):
    return torch.arange(len(x)) % CLASSES


class Wrapped(nn.Module):
    """A module, what is done with its output, and a linear layer."""

    def __init__(self, module, pick, width):
        super().__init__()
        self.module, self.pick, self.head = module, pick, nn.Linear(width, CLASSES)

    def forward(self, x):
        return self.head(self.pick(self.module(x)))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.head(self.attend(x, x, x)[0].mean(1))


class Shared(nn.Module):
    """One layer is used twice."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.head(torch.relu(self.inner(torch.relu(self.inner(x)))))


class Rezero(nn.Module):
    """A residual branch that starts at zero."""

    def __init__(self):
        super().__init__()
        self.inner, self.scale, self.head = nn.Linear(4, 4), nn.Parameter(torch.zeros(())), nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.head(torch.relu(x + self.scale * torch.relu(self.inner(x))))


class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.a, self.b = nn.Linear(4, CLASSES), nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.zeros(CLASSES, 2))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


class Experts(nn.Module):
    """The best of three experts by a hard choice, which jumps."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 3), nn.ModuleList(nn.Linear(4, CLASSES) for _ in range(3))

    def forward(self, x):
        gate = self.gate(x).softmax(1)
        chosen = F.one_hot(gate.argmax(1), 3).to(x)
        return sum((chosen * gate)[:, i:i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Rounded(nn.Module):
    """Rounds without a straight-through estimator: the gradient is zero, as the slope almost everywhere."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(4, 5), nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.head((4 * self.inner(x)).round())


class Stable(nn.Module):
    """A softmax whose maximum is detached, which changes nothing."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x):
        z = self.inner(x)
        return z - z.amax(1, keepdim=True).detach() - 0.0


class Single(nn.Module):
    """Layer norm in single precision, as language models do."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, CLASSES)

    def forward(self, x):
        h = self.inner(x).float()
        h = F.layer_norm(h, (6,), self.norm.weight.float(), self.norm.bias.float())
        return self.head(h.to(self.head.weight.dtype))


def body(*layers, width):
    torch.manual_seed(0)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width, CLASSES))


def zero_biases(net):
    for name, p in net.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(p)
    return net


def recurrent(kind):
    return Wrapped(kind(10, 5, batch_first=True), lambda out: out[0][:, -1], 5)


def activated(activation):
    return lambda: nn.Sequential(nn.Linear(4, 8), copy.deepcopy(activation), nn.Linear(8, CLASSES))


MIXED = {name: (activated(a), data) for name, a in {
    "relu": nn.ReLU(), "leaky relu": nn.LeakyReLU(), "prelu": nn.PReLU(), "elu": nn.ELU(), "celu": nn.CELU(), "selu": nn.SELU(),
    "gelu": nn.GELU(), "gelu tanh": nn.GELU("tanh"), "silu": nn.SiLU(), "mish": nn.Mish(), "softplus": nn.Softplus(),
    "hardtanh": nn.Hardtanh(), "hardswish": nn.Hardswish(), "hardsigmoid": nn.Hardsigmoid(), "relu6": nn.ReLU6(),
    "sigmoid": nn.Sigmoid(), "tanh": nn.Tanh(), "softshrink": nn.Softshrink(0.1), "hardshrink": nn.Hardshrink(0.1),
    "threshold": nn.Threshold(0.1, 0.0), "softsign": nn.Softsign(), "logsigmoid": nn.LogSigmoid(), "rrelu": nn.RReLU(),
    "glu": nn.Sequential(nn.Linear(8, 16), nn.GLU()), "dropout": nn.Dropout(0.5), "softmax": nn.Softmax(1)}.items()}
LAYERS = {
    **MIXED,
    "linear": (lambda: nn.Linear(4, CLASSES), data),
    "linear at zero": (lambda: torch.nn.utils.skip_init(nn.Linear, 4, CLASSES).apply(lambda m: [nn.init.zeros_(p) for p in m.parameters()]), data),
    "zero biases": (lambda: zero_biases(body(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2), nn.ReLU(), width=16)),
                    images),
    "dead": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Hardtanh(5.0, 6.0), nn.ReLU(), nn.Linear(5, CLASSES)), data),
    "conv1d": (lambda: body(nn.Conv1d(2, 3, 3), nn.ReLU(), nn.MaxPool1d(2), width=12), sequences),
    "conv2d": (lambda: body(nn.Conv2d(2, 3, 3, padding=1), nn.GELU(), nn.AvgPool2d(2), width=48), images),
    "grouped, dilated": (lambda: body(nn.Conv2d(2, 4, 3, groups=2, dilation=2), nn.Tanh(), nn.AdaptiveMaxPool2d(2), width=16), images),
    "conv3d": (lambda: body(nn.Conv3d(1, 2, (1, 2, 2)), nn.ReLU(), nn.MaxPool3d(2), width=18), lambda: images()[:, None]),
    "conv transpose": (lambda: body(nn.ConvTranspose2d(2, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), width=8), images),
    "upsampled": (lambda: body(nn.Conv2d(2, 2, 3), nn.Upsample(scale_factor=2, mode="bilinear"), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
                               width=8), images),
    "batch norm": (lambda: body(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), width=108), images),
    "batch statistics": (lambda: body(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, track_running_stats=False), nn.ReLU(), width=108), images),
    "group norm": (lambda: body(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), width=144), images),
    "instance norm": (lambda: body(nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3, affine=True), nn.ReLU(), width=108), images),
    "local response": (lambda: body(nn.Conv2d(2, 3, 3), nn.LocalResponseNorm(2), width=108), images),
    "layer norm": (activated(nn.LayerNorm(8)), data),
    "rms norm": (activated(nn.RMSNorm(8)), data),
    "lp pool": (lambda: body(nn.Conv2d(2, 3, 3), nn.LPPool2d(2, 2), width=27), images),
    "embedding": (lambda: Wrapped(nn.Embedding(11, 4), lambda e: e.mean(1), 4), lambda: torch.arange(60).reshape(12, 5) % 11),
    "lstm": (lambda: recurrent(nn.LSTM), sequences), "gru": (lambda: recurrent(nn.GRU), sequences),
    "rnn": (lambda: recurrent(lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k)), sequences),
    "attention": (Attention, lambda: torch.randn(12, 5, 4, generator=torch.Generator().manual_seed(0))),
    "transformer": (lambda: Wrapped(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), lambda h: h.mean(1), 4),
                    lambda: torch.randn(12, 5, 4, generator=torch.Generator().manual_seed(0))),
    "bilinear": (lambda: Wrapped(nn.Identity(), lambda x: x[:, :2] * x[:, 2:], 2), data),
    "shared weights": (Shared, data), "rezero": (Rezero, data), "lora": (Lora, data), "experts": (Experts, data),
    "rounded": (Rounded, data), "detached maximum": (Stable, data), "single precision inside": (Single, data),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, CLASSES)), data),
    "spectral norm": (lambda: spectral_norm(nn.Linear(4, CLASSES)), data),
}


def inputs_of(make):
    made = make()
    return made[0] if isinstance(made, tuple) else made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("memory", [2 * 2**30, 1], ids=["double", "own precision"])
@pytest.mark.parametrize("name", LAYERS)
def test_sound_layers_are_never_refused(name, memory, dtype):
    make, given = LAYERS[name]
    torch.manual_seed(0)
    x = inputs_of(given)
    problem = Problem(make(), CE, (x, labels(x)), dtype=dtype)
    problem.memory = memory
    derivatives = problem.probe().derivatives
    assert not derivatives.wrong_products and not derivatives.not_finite and derivatives.slopes is None
    assert not problem.remarks


def focal(z, y):
    p = z.softmax(1).gather(1, y[:, None])
    return -((1 - p) ** 2 * p.log()).mean()


def ctc(z, y):
    logs = z[None].expand(4, -1, -1).log_softmax(2)
    return F.ctc_loss(logs, y[:, None].clamp_min(1), torch.full((len(y),), 4), torch.ones(len(y), dtype=torch.long),
                      reduction="none").mean()


def cosine(z, y):
    return 1 - F.cosine_similarity(z, y).mean()


def hinge(z, y):
    return (1 - z[:, 0] * (2.0 * (y > 0) - 1)).clamp_min(0).mean()


def zeros(z):
    """Targets at which the loss of a zero output lies at its kink."""
    return torch.zeros(len(z), CLASSES)


def numbers(z):
    return torch.randn(len(z), CLASSES, generator=torch.Generator().manual_seed(3))


def signs(z):
    return (numbers(z) > 0).float()


def shares(z):
    return numbers(z).softmax(1)


class Learned(nn.Module):
    """A loss with weights of its own, which are constants here."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, z, y):
        return CE(z * self.temperature, y)


LOSSES = {
    "cross entropy": (CE, labels), "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), labels), "focal": (focal, labels),
    "weighted": (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])), labels),
    "nll": (lambda z, y: F.nll_loss(z.log_softmax(1), y), labels), "soft targets": (CE, shares),
    "mse": (nn.MSELoss(), numbers), "mse at its minimum": (nn.MSELoss(), zeros), "huber": (nn.HuberLoss(delta=0.3), numbers),
    "huber at its kink": (nn.HuberLoss(delta=1.0), lambda z: torch.ones(len(z), CLASSES)),
    "smooth l1": (nn.SmoothL1Loss(), numbers), "l1": (nn.L1Loss(), numbers), "l1 at its kink": (nn.L1Loss(), zeros),
    "bce": (nn.BCEWithLogitsLoss(), signs),
    "bce, weighted": (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0])), signs),
    "kl": (lambda z, y: F.kl_div(z.log_softmax(1), y, reduction="batchmean"), shares), "hinge": (hinge, labels),
    "margin": (nn.MultiMarginLoss(), labels), "multilabel": (nn.MultiLabelSoftMarginLoss(), signs), "ctc": (ctc, labels),
    "poisson": (nn.PoissonNLLLoss(), lambda z: numbers(z).abs().round()), "cosine": (cosine, numbers),
    "gaussian": (lambda z, y: F.gaussian_nll_loss(z, y, F.softplus(z) + 0.1), numbers),
    "log cosh": (lambda z, y: (z - y).cosh().log().mean(), numbers),
    "pinball": (lambda z, y: torch.maximum(0.1 * (z - y), 0.9 * (y - z)).mean(), numbers),
    "clipped": (lambda z, y: (z - y).square().clamp_max(0.5).mean(), numbers), "learned": (Learned(), labels),
}


@pytest.mark.parametrize("memory", [2 * 2**30, 1], ids=["double", "own precision"])
@pytest.mark.parametrize("zero", [False, True], ids=["", "zero head"])
@pytest.mark.parametrize("name", LOSSES)
def test_sound_losses_are_never_refused(name, zero, memory):
    loss, targets = LOSSES[name]
    net, (x, _) = mlp(), data(12)
    if zero:
        [nn.init.zeros_(p) for p in net[-1].parameters()]
    problem = Problem(net, loss, (x, targets(x)))
    problem.memory = memory
    derivatives = problem.probe().derivatives
    assert not derivatives.wrong_products and derivatives.slopes is None
    assert not derivatives.not_finite or (name == "cosine" and zero)  # the norm of a zero output


def test_a_loss_may_ask_the_model_for_its_precision():
    net = mlp()
    Problem(net, lambda z, y: next(net.parameters()).new_zeros(()) + CE(z, y), data()).probe()
