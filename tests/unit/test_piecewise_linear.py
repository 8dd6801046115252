"""Networks that are piecewise linear in each layer's weights: which are recognised, read off their graph, and what spectra make
of it. Checked against dense Hessians: the blocks of Hessian and Gauss-Newton matrix agree where the claim is made."""

import dataclasses
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fldiag.curvature.layer_rules import LAYERS, LINEAR
from fldiag.curvature.piecewise_linear import obstacle
from fldiag.diagnostics.spectrum import spectrum
from fldiag.problem.diagonal import diagonal_of
from fldiag.problem.eigenpairs import eigenpairs
from fldiag.problem.exact_curvature import inexact, within_a_layer
from fldiag.problem.problem import Problem
from fldiag.results.table import check


def normed(channels=3):
    norm = nn.BatchNorm2d(channels)
    (
        nn.init.normal_(norm.running_mean),
        nn.init.uniform_(norm.running_var, 0.5, 2),
        nn.init.normal_(norm.weight),
    )
    return norm


class Residual(nn.Module):
    """In-place operations, sums, concatenation, functional pooling and dropout: all of it qualifies."""

    def __init__(self):
        super().__init__()
        self.a, self.na = nn.Conv2d(1, 3, 3, padding=1, bias=False), normed()
        self.b, self.nb = nn.Conv2d(3, 3, 3, padding=1, groups=3), normed()
        self.act, self.fc = nn.ReLU(inplace=True), nn.Linear(6, 3)
        self.register_buffer("gain", torch.tensor(0.7))

    def forward(self, x):
        x = (x - x.mean()) * x.std()  # whatever is done to the inputs
        out = self.act(self.na(self.a(x)))
        more = self.nb(self.b(out))
        more += out * self.gain
        both = torch.cat([F.leaky_relu(more, 0.1), -out / 2], 1)
        both = F.dropout(F.avg_pool2d(both, 2), 0.5, self.training)
        return self.fc(both.mean((2, 3)).view(x.size(0), -1))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.out = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(F.relu(self.mix(x.flatten(1).reshape(x.shape[0], 4, 4))).amax(1))


class Mean(Tokens):
    def forward(self, x):
        return self.out(F.relu(self.mix(x.flatten(1).reshape(x.shape[0], 4, 4))).mean(1))


GOOD = {
    "residual": Residual,
    "tokens": Mean,
    "chain": lambda: nn.Sequential(
        nn.Conv2d(1, 3, 3), normed(), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3, 3)
    ),
    "one layer": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)),
}


class Gate(Tokens):
    def forward(self, x):
        z = self.mix(x.flatten(1)[:, :4])
        return self.out(z * F.relu(z))


class Square(Gate):
    def forward(self, x):
        z = self.mix(x.flatten(1)[:, :4])
        return self.out(z * z)


class Twice(Tokens):
    def forward(self, x):
        return self.out(F.relu(self.mix(F.relu(self.mix(x.flatten(1)[:, :4])))))


class Outside(Tokens):
    def forward(self, x):
        return self.out(F.relu(self.mix(x.flatten(1)[:, :4]))) + self.mix.weight.sum()


class Functional(Tokens):
    def forward(self, x):
        return self.out(F.relu(F.linear(F.relu(self.mix(x.flatten(1)[:, :4])), self.mix.weight)))


class Divides(Tokens):
    def forward(self, x):
        return self.out(1 / (2 + F.relu(self.mix(x.flatten(1)[:, :4]))))


class Branches(Tokens):
    def forward(self, x):
        z = self.mix(x.flatten(1)[:, :4])
        return self.out(z if float(z.sum()) > 0 else z * z)


class Writes(Tokens):
    def forward(self, x):
        z = torch.zeros_like(x.flatten(1)[:, :4])
        z.add_(self.mix(x.flatten(1)[:, :4]))
        return self.out(z * z)


class Adds(Tokens):
    def forward(self, x):
        z = torch.zeros_like(x.flatten(1)[:, :4])
        kept = z
        z += self.mix(x.flatten(1)[:, :4])
        return self.out(kept * kept)


class Out(Tokens):
    def forward(self, x):
        z = torch.zeros_like(x.flatten(1)[:, :4])
        torch.add(self.mix(x.flatten(1)[:, :4]), 1.0, out=z)
        return self.out(z * z)


class OwnWeight(Tokens):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.out(self.mix(x.flatten(1)[:, :4]) * self.scale)


def tied():
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    net[3].weight = net[1].weight
    return net


def hooked():
    net = GOOD["one layer"]()
    net[1].register_forward_hook(lambda m, i, o: o.sin())
    return net


def chain(*layers):
    return lambda: nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), *layers, nn.Flatten(), nn.Linear(48, 3)
    )


BAD = {
    "GELU": chain(nn.GELU()),
    "Tanh": chain(nn.Tanh()),
    "Sigmoid": chain(nn.Sigmoid()),
    "Softmax": chain(nn.Softmax(1)),
    "GroupNorm": chain(nn.GroupNorm(1, 3)),
    "LayerNorm": chain(nn.LayerNorm((3, 4, 4))),
    "statistics of the batch": chain(nn.BatchNorm2d(3, track_running_stats=False)),
    "pads in mode": lambda: nn.Sequential(
        nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(16, 3)
    ),
    "PReLU": chain(nn.PReLU()),
    "tied": tied,
    "hooks": hooked,
    r"a product of activations \(mul\)": Gate,
    "mul": Square,
    "mix is used twice": Twice,
    "mix.weight is used outside": Outside,
    "used outside its layer": Functional,
    r"in place on what does not depend on weights \(add_\)": Writes,
    r"does not depend on weights \(iadd\)": Adds,
    r"does not depend on weights \(add\)": Out,
    "a division": Divides,
    "cannot be traced": Branches,
    "holds weights outside": OwnWeight,
    "the operation amax": Tokens,
    "MultiheadAttention": lambda: nn.MultiheadAttention(4, 2),
    "Parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
}


def blocks(net):
    """Largest difference between a layer's block of the Hessian and of the Gauss-Newton matrix, and their size."""
    p = Problem(
        net, F.cross_entropy, (torch.randn(7, 1, 4, 4), torch.arange(7) % 3), dtype=torch.float64
    )
    x, y = p.read(0, p.n)
    h = torch.func.jacrev(torch.func.jacrev(lambda w: F.cross_entropy(p.call(w, x), y)))(p.w)
    j = torch.func.jacrev(lambda w: p.call(w, x).reshape(-1))(p.w)
    inner = torch.func.hessian(lambda z: F.cross_entropy(z.reshape(7, 3), y))(
        p.call(p.w, x).reshape(-1)
    )
    g, worst, start = j.T @ inner @ j, 0.0, 0
    for names in p.layout.layers.values():
        stop = start + sum(p.layout.sizes[p.layout.names.index(n)] for n in names)
        worst = max(worst, float((h - g)[start:stop, start:stop].abs().max()))
        start = stop
    return worst, float(g.abs().max())


@pytest.mark.parametrize("name", GOOD)
def test_piecewise_linear_networks_are_recognised_and_their_blocks_agree(name):
    torch.manual_seed(0)
    net = GOOD[name]().eval()
    assert obstacle(net) is None
    worst, size = blocks(net)
    assert worst <= 1e-12 * size


@pytest.mark.parametrize("name", BAD)
def test_anything_else_is_refused_with_its_reason(name):
    torch.manual_seed(0)
    why = obstacle(BAD[name]().eval())
    assert why is not None
    assert re.search(name, why)


@pytest.mark.parametrize("name", ["GELU", "Tanh", "GroupNorm", r"a product of activations \(mul\)"])
def test_the_blocks_of_refused_networks_do_differ(name):
    torch.manual_seed(0)
    worst, size = blocks(BAD[name]().eval())
    assert worst > 1e-4 * size


def test_training_mode_is_an_obstacle():
    net = GOOD["chain"]().eval()
    net[1].train()
    assert "1 is in training mode" in obstacle(net)


def test_names_do_not_matter():
    class ResNet(nn.Sequential):
        pass

    assert obstacle(ResNet(nn.Flatten(), nn.Linear(16, 3)).eval()) is None
    assert "Tanh" in obstacle(ResNet(nn.Flatten(), nn.Linear(16, 3), nn.Tanh()).eval())


# -- what spectra make of it


def problem(bend=nn.ReLU, scale=1.0, **options):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3),
        bend(),
        nn.Flatten(),
        nn.Linear(12, 5),
        bend(),
        nn.Linear(5, 3),
    )
    nn.init.normal_(net[1].running_mean), nn.init.uniform_(net[1].running_var, 0.5, 2)
    data = torch.randn(20, 1, 4, 4), torch.arange(20) % 3
    return Problem(net, lambda z, y: scale * F.cross_entropy(z, y), data, **options)


def dense(p):
    x, y = p.read(0, p.n)
    return torch.func.jacrev(torch.func.jacrev(lambda w: p.user_loss(p.call(w, x), y)))(p.w)


def eigenvalues(frame):
    return frame[frame.metric == "eigenvalue"].reset_index(drop=True)


@pytest.mark.parametrize("which", ["largest", "smallest"])
def test_blocks_of_layers_are_those_of_the_dense_hessian_and_said_to_be_gauss_newton(which):
    p = problem(dtype=torch.float64)
    h, slices = dense(p), p.layout.slices()
    found = eigenvalues(check(spectrum(p, k=2, tol=1e-9, which=which, per_layer=True)))
    assert found[found.layer.isna()].estimator.tolist() == ["lanczos"] * 2 and set(
        found.matrix
    ) == {"hessian"}
    end = -1 if which == "largest" else 0
    for layer, names in p.layout.layers.items():
        index = torch.cat([torch.arange(slices[n].start, slices[n].stop) for n in names])
        row = found[(found.layer == layer).fillna(False)].iloc[0]
        assert row.estimator == "lanczos-ggn"
        values = torch.linalg.eigvalsh(h[index][:, index])
        near_zero = 1e-9 * float(values.abs().max())  # the tolerance, of the norm
        assert row.value == pytest.approx(float(values[end]), rel=1e-8, abs=near_zero)
    for params, estimator in (
        ("4.weight", "lanczos-ggn"),
        ("4.*", "lanczos-ggn"),
        ("[04].weight", "lanczos"),
        ("*", "lanczos"),
    ):
        frame = eigenvalues(spectrum(p, k=2, tol=1e-9, which=which, params=params))
        assert set(frame.estimator) == {estimator}, params


def test_a_layers_block_of_the_whole_hessian_is_not_its_gauss_newton_block_where_the_net_bends():
    p = problem(nn.Tanh, dtype=torch.float64)
    h, where = dense(p), p.layout.slices()["4.weight"]
    frame = eigenvalues(spectrum(p, k=2, tol=1e-9, params="4.weight", which="smallest"))
    assert set(frame.estimator) == {"lanczos"} and frame.value[0] < 0
    assert frame.value.tolist() == pytest.approx(
        torch.linalg.eigvalsh(h[where, where])[:2].tolist(), rel=1e-8
    )
    assert not within_a_layer(p, ["4.weight"]) and within_a_layer(problem(), ["4.weight", "4.bias"])
    assert not within_a_layer(problem(), ["4.weight", "6.bias"])


def test_in_single_precision_no_layer_has_negative_curvature_beyond_rounding():
    p = problem()
    for label, names in p.layout.layers.items():
        lowest, top = (
            eigenpairs(p, 1, which=end, params=list(names)).values[0]
            for end in ("smallest", "largest")
        )
        assert lowest >= -1e-7 * top, label


# -- the comparison with products has no unit


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-8, 1e-20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_wrong_rule_is_found_out_however_small_the_loss(scale, dtype, monkeypatch):
    assert inexact(problem(scale=scale, dtype=dtype)) is None
    right = diagonal_of(problem(dtype=dtype)).trace
    assert diagonal_of(problem(scale=scale, dtype=dtype)).trace == pytest.approx(
        scale * right, rel=1e-5
    )
    monkeypatch.setitem(
        LAYERS,
        nn.Linear,
        dataclasses.replace(
            LINEAR,
            squares=lambda m, a, g, total: {
                k: 1.01 * v for k, v in LINEAR.squares(m, a, g, total).items()
            },
        ),
    )
    assert "disagrees with a Hessian-vector product" in inexact(problem(scale=scale, dtype=dtype))
