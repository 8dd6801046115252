"""Everything that depends on the type of a layer: one table, one entry a type.

Stacked evaluation (``models/network.py``), slim sub-networks, curvature by the R-operator, exact diagonals, the proof that a
network is piecewise linear, the probe of a Problem and fast loss surfaces look here. A new type is one entry, also for a
layer of one's own::

    LAYERS[Gain] = Layer(stacked=..., links=..., squares=..., obstacle=no_obstacle)

``Layer`` says what each rule means.
"""

from __future__ import annotations

from torch import nn

from fldiag.models.layers.activation import CLIPPED, LEAKY_RELU, RELU, SMOOTH
from fldiag.models.layers.arrangement import (
    DROPOUT,
    FLATTEN,
    IDENTITY,
    PADDING,
    UNFLATTEN,
    UPSAMPLE,
)
from fldiag.models.layers.convolution import CONV2D
from fldiag.models.layers.entry import Layer
from fldiag.models.layers.linear import LINEAR
from fldiag.models.layers.normalisation import ANY_BATCH_NORM, BATCH_NORM, GROUP_NORM
from fldiag.models.layers.pooling import ADAPTIVE_MAX_POOL, AVERAGE_POOL, MAX_POOL

#: By the exact type: a subclass may compute anything.
LAYERS: dict[type[nn.Module], Layer] = {
    nn.Linear: LINEAR,
    nn.Conv2d: CONV2D,
    nn.BatchNorm1d: BATCH_NORM,
    nn.BatchNorm2d: BATCH_NORM,
    nn.modules.batchnorm._BatchNorm: ANY_BATCH_NORM,
    nn.GroupNorm: GROUP_NORM,
    nn.ReLU: RELU,
    nn.LeakyReLU: LEAKY_RELU,
    nn.ReLU6: CLIPPED,
    nn.Hardtanh: CLIPPED,
    nn.Tanh: SMOOTH,
    nn.GELU: SMOOTH,
    nn.Sigmoid: SMOOTH,
    nn.MaxPool2d: MAX_POOL,
    nn.AvgPool2d: AVERAGE_POOL,
    nn.AdaptiveAvgPool2d: AVERAGE_POOL,
    nn.AdaptiveMaxPool2d: ADAPTIVE_MAX_POOL,
    nn.Flatten: FLATTEN,
    nn.Unflatten: UNFLATTEN,
    nn.ZeroPad2d: PADDING,
    nn.Upsample: UPSAMPLE,
    nn.Identity: IDENTITY,
    nn.Dropout: DROPOUT,
    nn.Dropout1d: DROPOUT,
    nn.Dropout2d: DROPOUT,
    nn.Dropout3d: DROPOUT,
    nn.AlphaDropout: DROPOUT,
    nn.FeatureAlphaDropout: DROPOUT,
}
_NOTHING_KNOWN = Layer()


def rules(m: nn.Module) -> Layer:
    """The entry of a layer's type, without any rule for a type that is not in the table."""
    return LAYERS.get(type(m), _NOTHING_KNOWN)


def kin(m: nn.Module) -> Layer:
    """The entry of the nearest of a layer's classes: for what a subclass has in common with its parent."""
    return next((LAYERS[kind] for kind in type(m).__mro__ if kind in LAYERS), _NOTHING_KNOWN)


def batch_dependent(module: nn.Module) -> bool:
    """Whether an example's output depends on the others of its batch, also in eval mode, as far as the layers tell."""
    return any(kin(m).mixes_examples(m) for m in module.modules())
