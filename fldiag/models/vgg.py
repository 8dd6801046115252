"""VGG-11 (Simonyan & Zisserman, ICLR 2015) for 32x32 images, without batch-norm and dropout."""

from __future__ import annotations

import math
from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional as F

from fldiag import registry
from fldiag.errors import FldiagError

SIDE = 32
#: Output channels of the 3x3 convolutions; 0 is a max-pool, five of which leave one position.
PLAN = (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0)


class Upsampled(nn.Sequential):
    """A chain whose inputs [B, C, H, W] are first enlarged to 32x32 (bilinear); the last layer is the head."""

    def features(self, x: Tensor) -> Tensor:
        x = F.interpolate(x, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
        for m in list(self)[:-1]:
            x = m(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self[-1](self.features(x))
        return logits


@registry.model("vgg11")
def vgg11(shape: tuple[int, ...], classes: int) -> nn.Module:
    """VGG-11 with hidden layers of 512: 9,750,922 parameters with 3 channels and 10 classes.

    Images smaller than 32x32 are enlarged to that (bilinear). Convolutions start from N(0, 2 / (9 outputs)), bias 0.
    """
    if len(shape) != 3 or max(shape[1:]) > SIDE or min(shape[1:]) < 1:
        raise FldiagError(
            f"model 'vgg11' takes images of at most {SIDE}x{SIDE}, the data has shape {tuple(shape)}",
            "use a 'resnet18' model for larger images, 'mlp' for data that are not images",
            usage=True,
        )
    layers: list[tuple[str, nn.Module]] = []
    before, convs, pools = shape[0], 0, 0
    for width in PLAN:
        if width == 0:
            pools += 1
            layers.append((f"pool{pools}", nn.MaxPool2d(2)))
            continue
        convs += 1
        conv = nn.Conv2d(before, width, 3, padding=1)
        nn.init.normal_(conv.weight, std=math.sqrt(2 / (9 * width)))
        nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
        layers += [(f"conv{convs}", conv), (f"relu{convs}", nn.ReLU())]
        before = width
    layers += [
        ("flatten", nn.Flatten()),
        ("fc1", nn.Linear(512, 512)),
        ("relu9", nn.ReLU()),
        ("fc2", nn.Linear(512, 512)),
        ("relu10", nn.ReLU()),
        ("classifier", nn.Linear(512, classes)),
    ]
    # a plain chain wherever it will do: the rules for chains are the faster ones
    return (nn.Sequential if tuple(shape[1:]) == (SIDE, SIDE) else Upsampled)(OrderedDict(layers))
