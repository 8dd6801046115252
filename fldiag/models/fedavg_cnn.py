"""The CNN of McMahan et al. (AISTATS 2017) in the sizes that FedSOL uses, and a small form for 8x8 digits."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from fldiag import registry
from fldiag.errors import FldiagError


def two_convolutions(
    shape: tuple[int, ...], classes: int, *, widths: tuple[int, int], kernel: int, hidden: int
) -> nn.Sequential:
    """conv-ReLU-pool twice, one hidden layer (its output is the feature z), classifier."""
    channels, height, width = shape
    a, b = widths
    flat = b * (height // 4) * (width // 4)
    return nn.Sequential(
        OrderedDict(
            [
                ("conv1", nn.Conv2d(channels, a, kernel, padding=kernel // 2)),
                ("relu1", nn.ReLU()),
                ("pool1", nn.MaxPool2d(2)),
                ("conv2", nn.Conv2d(a, b, kernel, padding=kernel // 2)),
                ("relu2", nn.ReLU()),
                ("pool2", nn.MaxPool2d(2)),
                ("flatten", nn.Flatten()),
                ("fc", nn.Linear(flat, hidden)),
                ("relu3", nn.ReLU()),
                ("classifier", nn.Linear(hidden, classes)),
            ]
        )
    )


def need(shape: tuple[int, ...], expected: tuple[int, ...], name: str) -> None:
    if tuple(shape) != expected:
        raise FldiagError(
            f"model {name!r} takes inputs of shape {expected}, the data has {tuple(shape)}",
            "choose the model that fits the data (fldiag list models), or model.name = 'mlp'",
            usage=True,
        )


@registry.model("fedavg_cifar")
def fedavg_cifar(shape: tuple[int, ...], classes: int) -> nn.Module:
    """FedAvg CNN for 32x32x3 images: 2,156,490 parameters with 10 classes."""
    need(shape, (3, 32, 32), "fedavg_cifar")
    return two_convolutions(shape, classes, widths=(32, 64), kernel=5, hidden=512)


@registry.model("fedavg_mnist")
def fedavg_mnist(shape: tuple[int, ...], classes: int) -> nn.Module:
    """FedAvg CNN for 28x28 images, gray repeated to 3 channels: 1,664,970 parameters with 10 classes."""
    need(shape, (3, 28, 28), "fedavg_mnist")
    return two_convolutions(shape, classes, widths=(32, 64), kernel=5, hidden=512)


@registry.model("small_cnn")
def small_cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """The FedAvg CNN design for small images (3x3 kernels, hidden layer of 104): 46,594 parameters on 8x8 digits."""
    if len(shape) != 3 or min(shape[1:]) < 4:
        raise FldiagError(
            f"model 'small_cnn' takes images of at least 4x4, the data has shape {tuple(shape)}",
            "use model.name = 'mlp' for data that are not images",
            usage=True,
        )
    return two_convolutions(shape, classes, widths=(32, 64), kernel=3, hidden=104)
