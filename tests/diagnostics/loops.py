"""Small training loops that a Recorder watched, and what numpy and torch say of their modules."""

import copy
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fldiag

WHO = [[0, 1, 2], [2, 0], [1, 2, 0]]


def step(net, x, y, steps):
    net = copy.deepcopy(net).train()
    optimiser = torch.optim.SGD(net.parameters(), lr=0.4)
    for _ in range(steps if len(y) else 0):
        optimiser.zero_grad()
        cross_entropy(net(x), y).backward()
        optimiser.step()
    return net.eval()


def mean(nets, n):
    """The mean of weights and buffers, weighted by n."""
    states, new = [net.state_dict() for net in nets], copy.deepcopy(nets[0])
    new.load_state_dict(
        {
            name: sum(k * s[name].double() for k, s in zip(n, states, strict=True)) / sum(n)
            if v.is_floating_point()
            else v
            for name, v in states[0].items()
        }
    )
    return new


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh())
        self.head = nn.Linear(3, 4)

    def features(self, x):
        return self.body(x)

    def forward(self, x):
        return self.head(self.features(x))


def record(out, sizes=(12, 20, 31), tested=(0, 1, 2), who=WHO, build=Net):
    """Clients with classes 0 to 2 train a batch-norm net in turn; ``tested``: the test examples' classes."""
    torch.manual_seed(11)
    net, n = build().eval(), sum(sizes)
    with torch.no_grad():
        [*net.parameters()][-1][0] += 3  # the initial model knows class 0, and forgets it
    x, y = torch.randn(n, 4), torch.arange(n) % 3
    test = torch.randn(36, 4), torch.tensor(tested * 36)[:36]
    for a, b in ((x, y), test):
        a[torch.arange(len(b)), b] += 0.7
    ends = np.cumsum(sizes)
    parts = [list(range(e - k, e)) for e, k in zip(ends, sizes, strict=True)]
    past, trained = [net], []
    with fldiag.Recorder(out, net, data=(x, y), clients=parts, test=test) as recorder:
        for t, ids in enumerate(who):
            nets = {k: step(past[-1], x[parts[k]], y[parts[k]], 8 + k + t) for k in ids}
            new = mean([nets[k] for k in ids], [sizes[k] for k in ids]).eval()
            recorder.round(received=past[-1], clients=nets, aggregated=new)
            trained.append(nets)
            past.append(new)
    data = [(x[p], y[p]) for p in parts]
    return SimpleNamespace(
        run=fldiag.load(out), net=net, past=past, trained=trained, data=data, all=(x, y), test=test
    )


def ask(loop, name, **options):
    """In float64, so that only the loop's own weights are rounded."""
    return fldiag.diagnose(loop.run, name, model=loop.net, precision="fp64", **options)


@torch.no_grad()
def outputs(net, x, of=""):
    """In float64; of the whole net, or of a module within."""
    net, seen = copy.deepcopy(net).double(), []
    module = net.get_submodule(of)
    module.register_forward_hook(lambda *call: seen.append(call[-1]))
    net(x.double())
    return seen[0]


def right(net, data):
    return (outputs(net, data[0]).argmax(1) == data[1]).double()


def accuracy(net, data):
    return float(right(net, data).mean())


def loss(net, data):
    return float(cross_entropy(outputs(net, data[0]), data[1]))


def by_class(net, data):
    return [float(right(net, data)[data[1] == c].mean()) for c in data[1].unique()]


def flat(net):
    return torch.cat([p.detach().double().flatten() for p in net.parameters()])


def cosine(a, b):
    return float(a @ b / (a.norm() * b.norm()))
