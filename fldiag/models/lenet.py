"""The LeNet of the FedDyn family of papers (Acar et al., ICLR 2021)."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from fldiag import registry
from fldiag.errors import FldiagError


@registry.model("lenet")
def lenet(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two unpadded 5x5 convolutions of 64 channels, hidden layers of 384 and 192: 797,962 parameters (32x32x3, 10 classes)."""
    if len(shape) != 3 or min(shape[1:]) < 16:
        raise FldiagError(
            f"model 'lenet' takes images of at least 16x16, the data has shape {tuple(shape)}",
            "use model.name = 'small_cnn' for smaller images, 'mlp' for data that are not images",
            usage=True,
        )
    channels, height, width = shape
    flat = 64 * (((height - 4) // 2 - 4) // 2) * (((width - 4) // 2 - 4) // 2)
    return nn.Sequential(
        OrderedDict(
            [
                ("conv1", nn.Conv2d(channels, 64, 5)),
                ("relu1", nn.ReLU()),
                ("pool1", nn.MaxPool2d(2)),
                ("conv2", nn.Conv2d(64, 64, 5)),
                ("relu2", nn.ReLU()),
                ("pool2", nn.MaxPool2d(2)),
                ("flatten", nn.Flatten()),
                ("fc1", nn.Linear(flat, 384)),
                ("relu3", nn.ReLU()),
                ("fc2", nn.Linear(384, 192)),
                ("relu4", nn.ReLU()),
                ("classifier", nn.Linear(192, classes)),
            ]
        )
    )
