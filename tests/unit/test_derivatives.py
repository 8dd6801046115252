"""Gradient and products are the derivatives of the loss, or it is said; sound models and losses are never refused."""

import contextlib
import copy
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from problems import data, double_backward, mlp
from torch import nn
from torch.nn.functional import cross_entropy as CE
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

import fldiag
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
        self.attend, self.head = (
            nn.MultiheadAttention(4, 2, batch_first=True),
            nn.Linear(4, CLASSES),
        )

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
        self.inner, self.scale, self.head = (
            nn.Linear(4, 4),
            nn.Parameter(torch.zeros(())),
            nn.Linear(4, CLASSES),
        )

    def forward(self, x):
        return self.head(torch.relu(x + self.scale * torch.relu(self.inner(x))))


class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.a, self.b = (
            nn.Linear(4, CLASSES),
            nn.Parameter(torch.randn(2, 4)),
            nn.Parameter(torch.zeros(CLASSES, 2)),
        )

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


class Experts(nn.Module):
    """The best of three experts by a hard choice, which jumps."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = (
            nn.Linear(4, 3),
            nn.ModuleList(nn.Linear(4, CLASSES) for _ in range(3)),
        )

    def forward(self, x):
        gate = self.gate(x).softmax(1)
        chosen = F.one_hot(gate.argmax(1), 3).to(x)
        return sum(
            (chosen * gate)[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts)
        )


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


MIXED = {
    name: (activated(a), data)
    for name, a in {
        "relu": nn.ReLU(),
        "leaky relu": nn.LeakyReLU(),
        "prelu": nn.PReLU(),
        "elu": nn.ELU(),
        "celu": nn.CELU(),
        "selu": nn.SELU(),
        "gelu": nn.GELU(),
        "gelu tanh": nn.GELU("tanh"),
        "silu": nn.SiLU(),
        "mish": nn.Mish(),
        "softplus": nn.Softplus(),
        "hardtanh": nn.Hardtanh(),
        "hardswish": nn.Hardswish(),
        "hardsigmoid": nn.Hardsigmoid(),
        "relu6": nn.ReLU6(),
        "sigmoid": nn.Sigmoid(),
        "tanh": nn.Tanh(),
        "softshrink": nn.Softshrink(0.1),
        "hardshrink": nn.Hardshrink(0.1),
        "threshold": nn.Threshold(0.1, 0.0),
        "softsign": nn.Softsign(),
        "logsigmoid": nn.LogSigmoid(),
        "rrelu": nn.RReLU(),
        "glu": nn.Sequential(nn.Linear(8, 16), nn.GLU()),
        "dropout": nn.Dropout(0.5),
        "softmax": nn.Softmax(1),
    }.items()
}
LAYERS = {
    **MIXED,
    "linear": (lambda: nn.Linear(4, CLASSES), data),
    "linear at zero": (
        lambda: torch.nn.utils.skip_init(nn.Linear, 4, CLASSES).apply(
            lambda m: [nn.init.zeros_(p) for p in m.parameters()]
        ),
        data,
    ),
    "zero biases": (
        lambda: zero_biases(
            body(
                nn.Conv2d(2, 4, 3),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(4, 4, 2),
                nn.ReLU(),
                width=16,
            )
        ),
        images,
    ),
    "dead": (
        lambda: nn.Sequential(
            nn.Linear(4, 5), nn.Hardtanh(5.0, 6.0), nn.ReLU(), nn.Linear(5, CLASSES)
        ),
        data,
    ),
    "conv1d": (lambda: body(nn.Conv1d(2, 3, 3), nn.ReLU(), nn.MaxPool1d(2), width=12), sequences),
    "conv2d": (
        lambda: body(nn.Conv2d(2, 3, 3, padding=1), nn.GELU(), nn.AvgPool2d(2), width=48),
        images,
    ),
    "grouped, dilated": (
        lambda: body(
            nn.Conv2d(2, 4, 3, groups=2, dilation=2), nn.Tanh(), nn.AdaptiveMaxPool2d(2), width=16
        ),
        images,
    ),
    "conv3d": (
        lambda: body(nn.Conv3d(1, 2, (1, 2, 2)), nn.ReLU(), nn.MaxPool3d(2), width=18),
        lambda: images()[:, None],
    ),
    "conv transpose": (
        lambda: body(nn.ConvTranspose2d(2, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), width=8),
        images,
    ),
    "upsampled": (
        lambda: body(
            nn.Conv2d(2, 2, 3),
            nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            width=8,
        ),
        images,
    ),
    "batch norm": (
        lambda: body(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), width=108),
        images,
    ),
    "batch statistics": (
        lambda: body(
            nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, track_running_stats=False), nn.ReLU(), width=108
        ),
        images,
    ),
    "group norm": (
        lambda: body(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), width=144),
        images,
    ),
    "instance norm": (
        lambda: body(nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3, affine=True), nn.ReLU(), width=108),
        images,
    ),
    "local response": (
        lambda: body(nn.Conv2d(2, 3, 3), nn.LocalResponseNorm(2), width=108),
        images,
    ),
    "layer norm": (activated(nn.LayerNorm(8)), data),
    "rms norm": (activated(nn.RMSNorm(8)), data),
    "lp pool": (lambda: body(nn.Conv2d(2, 3, 3), nn.LPPool2d(2, 2), width=27), images),
    "embedding": (
        lambda: Wrapped(nn.Embedding(11, 4), lambda e: e.mean(1), 4),
        lambda: torch.arange(60).reshape(12, 5) % 11,
    ),
    "padding": (
        lambda: Wrapped(nn.Embedding(11, 4, padding_idx=0), lambda e: e.mean(1), 4),
        lambda: torch.arange(60).reshape(12, 5) % 11,
    ),
    "padded bag": (
        lambda: Wrapped(nn.EmbeddingBag(11, 4, mode="sum", padding_idx=0), torch.tanh, 4),
        lambda: torch.arange(60).reshape(12, 5) % 11,
    ),
    "lstm": (lambda: recurrent(nn.LSTM), sequences),
    "gru": (lambda: recurrent(nn.GRU), sequences),
    "rnn": (lambda: recurrent(lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k)), sequences),
    "attention": (
        Attention,
        lambda: torch.randn(12, 5, 4, generator=torch.Generator().manual_seed(0)),
    ),
    "transformer": (
        lambda: Wrapped(
            nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), lambda h: h.mean(1), 4
        ),
        lambda: torch.randn(12, 5, 4, generator=torch.Generator().manual_seed(0)),
    ),
    "bilinear": (lambda: Wrapped(nn.Identity(), lambda x: x[:, :2] * x[:, 2:], 2), data),
    "shared weights": (Shared, data),
    "rezero": (Rezero, data),
    "lora": (Lora, data),
    "experts": (Experts, data),
    "rounded": (Rounded, data),
    "detached maximum": (Stable, data),
    "single precision inside": (Single, data),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, CLASSES)), data),
    "spectral norm": (lambda: spectral_norm(nn.Linear(4, CLASSES)), data),
}


def inputs_of(make):
    made = make()
    return made[0] if isinstance(made, tuple) else made


#: Layers and losses that torch differentiates once only.
ONCE = ("hardsigmoid", "padded bag", "margin", "ctc")


@pytest.mark.parametrize(
    "dtype, memory",
    [(torch.float32, 2 * 2**30), (torch.float32, 1), (torch.float64, 1)],
    ids=["in double", "float32", "float64"],
)
@pytest.mark.parametrize("name", LAYERS)
def test_sound_layers_are_never_refused(name, memory, dtype):
    make, given = LAYERS[name]
    torch.manual_seed(0)
    x = inputs_of(given)
    problem = Problem(make(), CE, (x, labels(x)), dtype=dtype)
    problem.memory = memory
    derivatives = problem.probe().derivatives
    assert not derivatives.not_finite and derivatives.slopes is None
    assert derivatives.wrong_products == (name in ONCE)
    assert bool(problem.remarks) == (name in ONCE)


def focal(z, y):
    p = z.softmax(1).gather(1, y[:, None])
    return -((1 - p) ** 2 * p.log()).mean()


def ctc(z, y):
    logs = z[None].expand(4, -1, -1).log_softmax(2)
    return F.ctc_loss(
        logs,
        y[:, None].clamp_min(1),
        torch.full((len(y),), 4),
        torch.ones(len(y), dtype=torch.long),
        reduction="none",
    ).mean()


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
    "cross entropy": (CE, labels),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), labels),
    "focal": (focal, labels),
    "weighted": (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])), labels),
    "nll": (lambda z, y: F.nll_loss(z.log_softmax(1), y), labels),
    "soft targets": (CE, shares),
    "mse": (nn.MSELoss(), numbers),
    "mse at its minimum": (nn.MSELoss(), zeros),
    "huber": (nn.HuberLoss(delta=0.3), numbers),
    "huber at its kink": (nn.HuberLoss(delta=1.0), lambda z: torch.ones(len(z), CLASSES)),
    "smooth l1": (nn.SmoothL1Loss(), numbers),
    "l1": (nn.L1Loss(), numbers),
    "l1 at its kink": (nn.L1Loss(), zeros),
    "bce": (nn.BCEWithLogitsLoss(), signs),
    "bce, weighted": (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0])), signs),
    "kl": (lambda z, y: F.kl_div(z.log_softmax(1), y, reduction="batchmean"), shares),
    "hinge": (hinge, labels),
    "margin": (nn.MultiMarginLoss(), labels),
    "multilabel": (nn.MultiLabelSoftMarginLoss(), signs),
    "ctc": (ctc, labels),
    "poisson": (nn.PoissonNLLLoss(), lambda z: numbers(z).abs().round()),
    "cosine": (cosine, numbers),
    "gaussian": (lambda z, y: F.gaussian_nll_loss(z, y, F.softplus(z) + 0.1), numbers),
    "log cosh": (lambda z, y: (z - y).cosh().log().mean(), numbers),
    "pinball": (lambda z, y: torch.maximum(0.1 * (z - y), 0.9 * (y - z)).mean(), numbers),
    "clipped": (lambda z, y: (z - y).square().clamp_max(0.5).mean(), numbers),
    "learned": (Learned(), labels),
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
    assert derivatives.slopes is None and derivatives.wrong_products == (name in ONCE)
    assert not derivatives.not_finite or (name == "cosine" and zero)  # the norm of a zero output


def test_a_loss_may_ask_the_model_for_its_precision():
    net = mlp()
    Problem(net, lambda z, y: next(net.parameters()).new_zeros(()) + CE(z, y), data()).probe()


# -- a loss that reads the weights


def penalised(term):
    """Cross entropy plus a term of the model's parameters."""
    return lambda net: lambda z, y: CE(z, y) + 0.1 * term(net)


class Penalised(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, z, y):
        return CE(z, y) + 0.1 * sum(p.square().sum() for p in self.net.parameters())


def hooked(with_graph):
    def make(net):
        terms = {}

        def keep(module, inputs, output):
            with torch.set_grad_enabled(with_graph and torch.is_grad_enabled()):
                terms["penalty"] = module.weight.square().sum()

        net[0].register_forward_hook(keep)
        return lambda z, y: CE(z, y) + 0.1 * terms["penalty"]

    return make


def normed(net):
    net[0] = weight_norm(net[0])
    return lambda z, y: CE(z, y) + 0.1 * net[0].weight.square().sum()


def anchored(net):
    """A proximal term, whose value and gradient are zero at the anchor."""
    anchor = [p.detach().clone() for p in net.parameters()]
    return lambda z, y: (
        CE(z, y)
        + sum((p - a).square().sum() for p, a in zip(net.parameters(), anchor, strict=True))
    )


READING = {
    "L2": penalised(lambda net: sum(p.square().sum() for p in net.parameters())),
    "L1": penalised(lambda net: sum(p.abs().sum() for p in net.parameters())),
    "of one layer": penalised(lambda net: net[0].bias.square().sum()),
    "spectral": penalised(lambda net: torch.linalg.matrix_norm(net[0].weight, 2)),
    "orthogonality": penalised(
        lambda net: (net[0].weight @ net[0].weight.T - torch.eye(5)).square().sum()
    ),
    "detached": penalised(lambda net: net[0].weight.detach().square().sum()),
    "by .data": penalised(lambda net: net[0].weight.data.square().sum()),
    "as a number": penalised(lambda net: float(net[0].weight.square().sum())),
    "by numpy": penalised(lambda net: float((net[0].weight.detach().numpy() ** 2).sum())),
    "by asarray": penalised(lambda net: float(np.abs(np.asarray(net[0].weight.detach())).sum())),
    "by a list": penalised(lambda net: sum(abs(v) for v in net[0].weight.flatten().tolist())),
    "by state_dict": penalised(
        lambda net: sum(v.square().sum() for v in net.state_dict().values())
    ),
    "of what is trained": penalised(
        lambda net: sum(p.abs().sum() for p in net.parameters() if p.requires_grad)
    ),
    "of rows": penalised(lambda net: sum(row.norm() for row in net[0].weight)),
    "at an anchor": anchored,
    "module": Penalised,
    "hook": hooked(True),
    "hook without a graph": hooked(False),
    "computed by a hook": normed,
}


@pytest.mark.parametrize("name", READING)
def test_a_loss_that_reads_the_weights_is_refused(name):
    net = mlp()
    loss = READING[name](net)
    net(data()[0])
    before = [p.clone() for p in net.parameters()]
    for problem in (Problem(net, loss, data()), Problem(net, loss, data(), dtype=torch.float64)):
        with pytest.raises(FldiagError, match="reads the model's weights") as caught:
            problem.probe()
        assert "weight_decay" in caught.value.remedy
    assert all(torch.equal(p, q) for p, q in zip(before, net.parameters(), strict=True))


def test_a_term_that_the_model_returns_is_sound():
    class Returning(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, x):
            return self.inner(x), torch.linalg.matrix_norm(self.inner[0].weight, 2)

    p = Problem(
        Returning(), lambda out, y: CE(out[0], y) + 0.1 * out[1], data(), dtype=torch.float64
    )
    assert not p.remarks
    v = torch.randn(p.layout.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    difference = (p.gradient(p.w + 1e-6 * v) - p.gradient(p.w - 1e-6 * v)) / 2e-6
    assert torch.allclose(p.hvp(v), difference, rtol=1e-5, atol=1e-7)


# -- a gradient that is not the derivative


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return -g


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, g):
        return g.clone()


def scaled(h):
    if h.requires_grad:
        h.register_hook(lambda g: 0.5 * g)
    return h


class Step(nn.Module):
    def __init__(self, take):
        super().__init__()
        self.take = take

    def forward(self, x):
        return self.take(x)


class Quantised(nn.Module):
    """Weights on a grid, with gradients as if they were not."""

    def __init__(self, width):
        super().__init__()
        self.inner, self.head = nn.Linear(4, width), nn.Linear(width, CLASSES)

    def forward(self, x):
        w = self.inner.weight
        return self.head(
            torch.tanh(F.linear(x, w + ((w * 4).round() / 4 - w).detach(), self.inner.bias))
        )


class Unmoved(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, CLASSES)

    def forward(self, x):
        with torch.no_grad():
            h = torch.tanh(self.body(x))
        return self.head(h)


def stepped(take):
    return lambda: mlp(Step(take))


CUT = {
    "half detached": stepped(lambda h: torch.cat([h[:, :2].detach(), h[:, 2:]], 1)),
    "no_grad": Unmoved,
    "reversal": stepped(Reversed.apply),
    "sign": stepped(Sign.apply),
    "scaled by a hook": stepped(scaled),
    "straight through": stepped(lambda h: h + ((4 * h).round() / 4 - h).detach()),
    "fake quantisation": stepped(
        lambda h: (
            torch.fake_quantize_per_tensor_affine(h, 0.1, 0, -128, 127)
            if h.dtype == torch.float32
            else h + ((10 * h).round() / 10 - h).detach()
        )
    ),
    "weights on a grid": lambda: Quantised(5),
    "many weights on a grid": lambda: Quantised(4000),
}


#: In single precision steps are too long to tell the jumps of a grid from a slope.
SMOOTH = ["half detached", "no_grad", "reversal", "scaled by a hook"]


@pytest.mark.parametrize(
    ("name", "memory"), [*((name, 2 * 2**30) for name in CUT), *((name, 1) for name in SMOOTH)]
)
def test_a_gradient_that_is_not_the_derivative_is_refused(name, memory):
    torch.manual_seed(0)
    net = CUT[name]()
    problem = Problem(net, CE, data())
    problem.memory = memory
    with pytest.raises(FldiagError, match=r"not the derivative of the loss.*detach"):
        problem.probe()


def test_frozen_layers_without_gradient_are_constants_where_they_are_no_weights():
    net = Unmoved()
    net.body.requires_grad_(False)
    with pytest.raises(FldiagError) as caught:
        Problem(net, CE, data()).probe()
    assert "trainable = True" in caught.value.remedy
    assert not Problem(net, CE, data(), trainable=True).probe().derivatives.remark


# -- products that are not derivatives of the gradient


class Cubed(torch.autograd.Function):
    """A right gradient, and a second derivative that is twice too large."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * Slope.apply(x)


class Slope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 3 * x**2

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 12 * x


def convolutions(norm):
    return lambda: nn.Sequential(
        norm(nn.Conv1d(2, 4, 3)),
        nn.Tanh(),
        norm(nn.Conv1d(4, 4, 3)),
        nn.Tanh(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(4, CLASSES),
    )


OFF = {
    "weight norm": (convolutions(parametrizations.weight_norm), sequences),
    "old weight norm": (convolutions(weight_norm), sequences),
    "a function of one's own": (lambda: mlp(Step(Cubed.apply)), lambda: data(12)[0]),
}


@pytest.mark.parametrize("name", OFF)
def test_wrong_double_backward_gives_way_to_differences(name):
    make, given = OFF[name]
    torch.manual_seed(0)
    x = given()
    p = Problem(make(), CE, (x, labels(x)), dtype=torch.float64)
    size = p.layout.size
    columns = [
        (p.gradient(p.w + 1e-5 * e) - p.gradient(p.w - 1e-5 * e)) / 2e-5
        for e in torch.eye(size, dtype=torch.float64)
    ]
    h = torch.stack(columns)
    expected = torch.linalg.eigvalsh((h + h.T) / 2).flip(0)
    u, v = torch.randn(2, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    honest = p.probe().derivatives.wrong_products
    assert honest or name != "a function of one's own"  # torch may mend its own
    assert float(u @ p.hvp(v)) == pytest.approx(
        float(v @ p.hvp(u)), rel=1e-4, abs=1e-4 * float(h.norm())
    )
    table = fldiag.diagnose(p, "spectrum", k=3)
    rows = table[table.metric == "eigenvalue"]
    for value, residual, true in zip(rows.value, rows.residual, expected.tolist(), strict=False):
        assert abs(value - true) <= max(1e-3 * abs(true), 2 * residual)
    if honest:
        assert (
            any("double backward" in text for text in p.remarks)
            and rows.estimator.str.contains("differences").all()
        )
        assert fldiag.diagnose(p, "trace")["estimator"].iloc[0] != "exact"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(3))
def test_probabilities_of_0_and_1_are_not_refused(seed, dtype):
    """torch bounds the binary cross entropy and its gradient there, each in its own way."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1), nn.Sigmoid())
    with torch.no_grad():
        for weight in net.parameters():
            weight.mul_(100)
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    p = Problem(net, nn.BCELoss(), (x, (torch.arange(16) % 3 > 0).float()[:, None]), dtype=dtype)
    assert math.isfinite(p.loss()[0]) and bool(p.gradient().isfinite().all())
    assert any("BCEWithLogitsLoss" in text for text in p.remarks)


# -- products that are not finite


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.group = nn.Linear(4, CLASSES), nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return self.inner(x) * (1 + self.group.norm())


class Rooted(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.inner, self.eps = nn.Linear(4, CLASSES), eps
        nn.init.zeros_(self.inner.weight), nn.init.zeros_(self.inner.bias)

    def forward(self, x):
        return (self.inner(x).square() + self.eps).sqrt()


@pytest.mark.parametrize("question", ["spectrum", "trace", "density", "diagonal"])
def test_products_that_are_not_finite_are_named(question):
    with pytest.raises(
        FldiagError,
        match=r"product is not finite although loss and gradient are.*norm or square root at 0",
    ):
        fldiag.diagnose(Problem(Normed(), CE, data()), question)
    with pytest.raises(FldiagError, match=r"gradient is not.*square root"):
        fldiag.diagnose(Problem(Rooted(0.0), CE, data()), question)


def test_the_remedies_for_products_that_are_not_finite_work():
    assert np.isfinite(
        fldiag.diagnose(Problem(Rooted(1e-6), CE, data()), "spectrum", k=1).value
    ).all()
    with pytest.raises(FldiagError, match="gradient is not"):
        Problem(Rooted(0.0), CE, data()).gradient()
    assert np.isfinite(Problem(Rooted(0.0), CE, data()).loss()[0])


@pytest.mark.parametrize("make", [lambda: Rooted(0.0), Normed], ids=["gradient", "product"])
def test_what_is_not_finite_is_so_at_these_weights_alone(make):
    bad = Problem(make(), CE, data())
    w = torch.linspace(0.1, 1, bad.layout.size)
    v = torch.ones(bad.layout.size)
    assert bad.probe().derivatives.not_finite
    for problem, at in ((bad, w), (bad.at(w), None)):
        assert problem.gradient(at).isfinite().all() and problem.hessian(at)(v).isfinite().all()
    good = Problem(make(), CE, data(), params=w)
    good.probe()
    with pytest.raises(FldiagError, match="is not"):
        good.at(bad.w).gradient(), good.at(bad.w).hvp(v)


# -- what is on around the call


@pytest.mark.parametrize("make", [mlp, lambda: Attention()], ids=["mlp", "attention"])
@pytest.mark.parametrize("question", ["spectrum", "trace", "landscape", "paths"])
def test_autocast_and_no_grad_around_the_call_change_nothing(question, make):
    torch.manual_seed(0)
    net = make()
    x = torch.randn(12, 5, 4) if isinstance(net, Attention) else data(12)[0]
    few = {"landscape": {"points": 3}, "paths": {"points": 3}, "trace": {"rtol": 0.5}}
    options = few.get(question, {"k": 1})

    def answer():
        return fldiag.diagnose(Problem(net, CE, (x, labels(x))), question, **options)

    expected = answer()
    for context in (torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad()):
        with context:
            assert answer().equals(expected)


def test_autocast_around_parts_changes_nothing():
    def parts(p, v):
        return [
            p.loss()[0],
            *p.gradient().tolist(),
            *p.hvp(v).tolist(),
            *double_backward(p)(v).tolist(),
            *p.outputs()[0].flatten().tolist(),
        ]

    v = torch.randn(43, generator=torch.Generator().manual_seed(0))
    expected = parts(Problem(mlp(), CE, data()), v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert parts(Problem(mlp(), CE, data()), v) == expected


def test_inference_mode_is_refused_by_name():
    problem = Problem(mlp(), CE, data())
    with torch.inference_mode(), pytest.raises(FldiagError, match="inference_mode"):
        fldiag.diagnose(problem, "spectrum", k=1)
    fldiag.diagnose(problem, "spectrum", k=1)


@pytest.mark.parametrize("make", [mlp, lambda: mlp(Step(Reversed.apply))], ids=["sound", "refused"])
def test_the_comparisons_leave_randomness_alone(make):
    net = make()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    with contextlib.suppress(FldiagError):
        Problem(net, CE, data()).probe()
    assert torch.equal(before[0], torch.get_rng_state()) and before[2] == random.getstate()
    assert (before[1] == np.random.get_state()[1]).all()


@pytest.mark.parametrize("error", [RuntimeError, AssertionError, type("Unheard", (Exception,), {})])
def test_a_comparison_that_cannot_be_made_is_a_remark(error):
    class Picky(nn.Module):
        """Fails wherever it is evaluated beside its own weights."""

        def __init__(self):
            super().__init__()
            self.inner = mlp()
            self.size = float(self.inner[0].weight.detach().double().square().sum())

        def forward(self, x):
            if (
                abs(float(self.inner[0].weight.detach().double().square().sum()) - self.size)
                > 1e-12
            ):
                raise error("other weights")
            return self.inner(x)

    p = Problem(Picky(), CE, data())
    p.probe()
    assert any("not checked: other weights" in text for text in p.remarks)


def test_clients_of_a_model_and_loss_are_compared_once(monkeypatch):
    from fldiag.problem import probe

    calls = []
    monkeypatch.setattr(
        probe, "compare_derivatives", lambda *a: calls.append(1) or probe.Derivatives()
    )
    p = Problem(mlp(), CE, data())
    p.probe()
    p.at(2 * p.w).probe()
    p.probe()
    assert len(calls) == 1


# -- weight decay

DECAY = 0.3


def pair(make=mlp, **options):
    x = (
        torch.randn(12, 5, 4, generator=torch.Generator().manual_seed(0))
        if make is Attention
        else data(12)[0]
    )
    torch.manual_seed(0)
    net = make()
    return [
        Problem(net, CE, (x, labels(x)), dtype=torch.float64, weight_decay=decay, **options)
        for decay in (0.0, DECAY)
    ]


@pytest.mark.parametrize(
    "make",
    [mlp, Attention, lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))],
    ids=["tanh", "attention", "relu"],
)
def test_weight_decay_enters_loss_gradient_and_curvature(make):
    bare, decayed = pair(make)
    w, size = bare.w, bare.layout.size
    assert decayed.loss()[0] == pytest.approx(bare.loss()[0] + DECAY / 2 * float(w @ w), rel=1e-12)
    assert decayed.loss()[1] == pytest.approx(bare.loss()[1], rel=1e-9)
    assert float(decayed.losses().mean()) == pytest.approx(decayed.loss()[0], rel=1e-12)
    assert torch.allclose(decayed.gradient(), bare.gradient() + DECAY * w, rtol=1e-12)
    v = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for product in (Problem.hessian, lambda p: p.hessian(matrix="ggn"), double_backward):
        assert torch.allclose(
            product(decayed)(v), product(bare)(v) + DECAY * v, rtol=1e-9, atol=1e-12
        )
    for question, metric, added in (
        ("spectrum", "eigenvalue", DECAY),
        ("trace", "trace", DECAY * size),
    ):
        values = [
            t[(t.metric == metric) & t.layer.isna()].value.iloc[0]
            for t in (
                fldiag.diagnose(
                    p,
                    question,
                    **({"k": 2, "tol": 1e-8} if question == "spectrum" else {"rtol": 2e-3}),
                )
                for p in (bare, decayed)
            )
        ]
        assert values[1] == pytest.approx(
            values[0] + added, rel=1e-2 if question == "trace" else 1e-7
        )
    assert bare.digest() != decayed.digest()
    assert any("weight decay" in text for text in decayed.remarks)


def test_weight_decay_is_in_exact_diagonals_per_tensor():
    from fldiag.problem.diagonal import diagonal_of

    bare, decayed = (
        diagonal_of(p)
        for p in pair(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))
    )
    assert bare.estimator == decayed.estimator == "exact"
    assert torch.allclose(decayed.values, bare.values + DECAY, rtol=1e-12)
    assert decayed.traces["0.weight"] == pytest.approx(
        bare.traces["0.weight"] + 24 * DECAY, rel=1e-12
    )


def test_weight_decay_is_added_once():
    net, given = mlp(), data(400)
    bare, decayed = (
        Problem(net, CE, given, dtype=torch.float64, weight_decay=decay, memory=2**20)
        for decay in (0.0, DECAY)
    )
    assert decayed.loss()[0] - bare.loss()[0] == pytest.approx(
        DECAY / 2 * float(bare.w @ bare.w), rel=1e-9
    )


def test_weight_decay_counts_the_weights_alone():
    net = mlp()
    net[0].requires_grad_(False)
    p = Problem(net, CE, data(), trainable=True, weight_decay=DECAY, dtype=torch.float64)
    expected = DECAY / 2 * sum(float(q.double().square().sum()) for q in net[2].parameters())
    assert p.penalty(p.w) == pytest.approx(expected, rel=1e-6)
    with pytest.raises(FldiagError, match="weight_decay = -1"):
        Problem(net, CE, data(), weight_decay=-1)


@pytest.mark.parametrize("make", [mlp, Attention], ids=["chain", "any"])
@pytest.mark.parametrize("counted", [False, True])
def test_surfaces_hold_weight_decay(make, counted):
    from fldiag.landscape.evaluator import Evaluator

    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])) if counted else CE
    bare, decayed = pair(make)
    bare, decayed = (
        Problem(p.module, loss, p.read(0, p.n), dtype=torch.float64, weight_decay=p.weight_decay)
        for p in (bare, decayed)
    )
    d = torch.randn(
        bare.layout.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    surfaces = [Evaluator(p, [d]) for p in (bare, decayed)]
    for c in (0.0, 0.4):
        w = bare.w + c * d
        values = [surface(c) for surface in surfaces]
        assert values[1][0] == pytest.approx(values[0][0] + DECAY / 2 * float(w @ w), rel=1e-9)
        assert values[1][1] == pytest.approx(values[0][1], rel=1e-6)
        assert surfaces[1].scores(c).loss == pytest.approx(values[1][0], rel=1e-9)


def test_refusing_a_penalty_leads_to_the_answer():
    """λ/2 ‖w‖² in the loss is refused; with weight_decay in its place λ1 is that of loss and penalty."""
    net, given = mlp(), data(30)
    penalised_loss = penalised(
        lambda net: DECAY / 0.2 * sum(p.square().sum() for p in net.parameters())
    )(net)
    with pytest.raises(FldiagError, match="weight_decay"):
        fldiag.diagnose(Problem(net, penalised_loss, given), "spectrum", k=1)
    values = [
        fldiag.diagnose(Problem(net, CE, given, weight_decay=decay), "spectrum", k=1, tol=1e-6)
        for decay in (0.0, DECAY)
    ]
    bare, decayed = (t[t.metric == "eigenvalue"].value.iloc[0] for t in values)
    assert (
        decayed == pytest.approx(bare + DECAY, rel=1e-4)
        and (values[1]["weight_decay"] == DECAY).all()
    )
