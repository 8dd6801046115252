"""Multi-layer perceptron (and, with no hidden layer, softmax or linear regression)."""

from __future__ import annotations

import math
from collections import OrderedDict
from itertools import pairwise
from typing import Annotated

from pydantic import Field
from torch import nn

from fldiag import registry
from fldiag.models.lora import Alpha, Head, Rank, with_adapters


@registry.model("mlp")
def mlp(
    shape: tuple[int, ...],
    classes: int,
    hidden: tuple[Annotated[int, Field(ge=1)], ...] = (64, 64),
    bias: bool = True,
    lora_rank: Rank = 0,
    lora_alpha: Alpha = 16.0,
    lora_head: Head = True,
) -> nn.Module:
    """MLP with ReLU; two hidden layers of 64 by default (2->64->64->3: the Iris net of FedProj, 4,547 parameters)."""
    sizes = [math.prod(shape), *hidden]
    layers: list[tuple[str, nn.Module]] = [("flatten", nn.Flatten())]
    for i, (a, b) in enumerate(pairwise(sizes), start=1):
        layers += [(f"fc{i}", nn.Linear(a, b, bias=bias)), (f"relu{i}", nn.ReLU())]
    model = nn.Sequential(
        OrderedDict([*layers, ("classifier", nn.Linear(sizes[-1], classes, bias=bias))])
    )
    return with_adapters(model, lora_rank, lora_alpha, ("fc*",), "classifier" if lora_head else "")


@registry.model("mlp_iris")
def mlp_iris(shape: tuple[int, ...], classes: int) -> nn.Module:
    """The MLP of FedProj's Iris example, two hidden layers of 64: 4,547 parameters with 2 inputs and 3 classes."""
    return mlp(shape, classes, hidden=(64, 64))
