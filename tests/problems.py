"""Small problems of the tests of Problem and of what it finds out about a model."""

import torch
from torch import nn


def data(n=10, classes=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, generator=g), torch.arange(n) % classes


def mlp(*extra):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), *extra, nn.Tanh(), nn.Linear(5, 3))


class Sliced:
    """The least a data slice must offer."""

    name = "client:7/train"

    def __init__(self, x, y):
        self.x, self.y, self.n = x, y, len(x)

    def batch(self, start, stop):
        return self.x[start:stop], self.y[start:stop]
