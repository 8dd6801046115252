"""Which networks count as piecewise linear in each layer's weights, read off their graph and checked against
dense Hessians: the blocks of Hessian and Gauss-Newton matrix agree where the claim is made."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fldiag.curvature.piecewise_linear import obstacle
from fldiag.problem.problem import Problem


def normed(channels=3):
    norm = nn.BatchNorm2d(channels)
    nn.init.normal_(norm.running_mean), nn.init.uniform_(norm.running_var, 0.5, 2), nn.init.normal_(norm.weight)
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
    "residual": Residual, "tokens": Mean,
    "chain": lambda: nn.Sequential(nn.Conv2d(1, 3, 3), normed(), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3, 3)),
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
    return lambda: nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), *layers, nn.Flatten(), nn.Linear(48, 3))


BAD = {
    "GELU": chain(nn.GELU()), "Tanh": chain(nn.Tanh()), "Sigmoid": chain(nn.Sigmoid()), "Softmax": chain(nn.Softmax(1)),
    "GroupNorm": chain(nn.GroupNorm(1, 3)), "LayerNorm": chain(nn.LayerNorm((3, 4, 4))),
    "statistics of the batch": chain(nn.BatchNorm2d(3, track_running_stats=False)),
    "pads in mode": lambda: nn.Sequential(nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(16, 3)),
    "PReLU": chain(nn.PReLU()), "tied": tied, "hooks": hooked, r"a product of activations \(mul\)": Gate, "mul": Square,
    "mix is used twice": Twice, "mix.weight is used outside": Outside, "used outside its layer": Functional,
    r"in place on what does not depend on weights \(add_\)": Writes, r"does not depend on weights \(iadd\)": Adds,
    r"does not depend on weights \(add\)": Out, "a division": Divides, "cannot be traced": Branches, "holds weights outside": OwnWeight, "the operation amax": Tokens,
    "MultiheadAttention": lambda: nn.MultiheadAttention(4, 2),
    "Parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
}


def blocks(net):
    """Largest difference between a layer's block of the Hessian and of the Gauss-Newton matrix, and their size."""
    p = Problem(net, F.cross_entropy, (torch.randn(7, 1, 4, 4), torch.arange(7) % 3), dtype=torch.float64)
    x, y = p.read(0, p.n)
    h = torch.func.jacrev(torch.func.jacrev(lambda w: F.cross_entropy(p.call(w, x), y)))(p.w)
    j = torch.func.jacrev(lambda w: p.call(w, x).reshape(-1))(p.w)
    inner = torch.func.hessian(lambda z: F.cross_entropy(z.reshape(7, 3), y))(p.call(p.w, x).reshape(-1))
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
