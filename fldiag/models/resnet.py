"""The residual networks of the papers. All take images of any number of channels, at least 8x8.

Options of each: ``keep_last`` < 1 trains with stochastic depth (the probability of keeping the last residual
block, the others lie on a line), ``keep_rule`` says where that line starts: 1 at the first block (code), or at the
input (paper).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import nn

from fldiag import registry
from fldiag.errors import FldiagError
from fldiag.models.residual import BasicBlock, Bottleneck, ResidualBlock, ResNet

Keep = Annotated[float, Field(gt=0, le=1)]
Rule = Literal["code", "paper"]
WIDTHS = (64, 128, 256, 512)


def network(
    name: str,
    shape: tuple[int, ...],
    classes: int,
    block: type[ResidualBlock],
    counts: Sequence[int],
    planes: Sequence[int],
    **options: Any,
) -> ResNet:
    if len(shape) != 3 or min(shape[1:]) < 8:
        raise FldiagError(
            f"model {name!r} takes images of at least 8x8, the data has shape {tuple(shape)}",
            "use model.name = 'mlp' for data that are not images, 'small_cnn' for smaller ones",
            usage=True,
        )
    return ResNet(shape[0], classes, block, counts, planes, **options)


@registry.model("resnet18_cifar")
def resnet18_cifar(
    shape: tuple[int, ...], classes: int, keep_last: Keep = 1.0, keep_rule: Rule = "code"
) -> nn.Module:
    """ResNet-18 for small images: 11,173,962 parameters with 3 channels and 10 classes.

    3x3 stem; batch-norm without running statistics, so a prediction depends on its batch also in evaluation.
    """
    return network(
        "resnet18_cifar",
        shape,
        classes,
        BasicBlock,
        (2, 2, 2, 2),
        WIDTHS,
        kaiming=False,
        norm=partial(nn.BatchNorm2d, track_running_stats=False),
        keep_last=keep_last,
        keep_rule=keep_rule,
    )


@registry.model("resnet18_gn")
def resnet18_gn(
    shape: tuple[int, ...], classes: int, keep_last: Keep = 1.0, keep_rule: Rule = "code"
) -> nn.Module:
    """ResNet-18 with the ImageNet stem and group-norm of two groups: 11,181,642 parameters (3 channels, 10 classes)."""
    return network(
        "resnet18_gn",
        shape,
        classes,
        BasicBlock,
        (2, 2, 2, 2),
        WIDTHS,
        stem=7,
        pool=True,
        norm=partial(nn.GroupNorm, 2),
        keep_last=keep_last,
        keep_rule=keep_rule,
    )


@registry.model("resnet8_p3")
def resnet8_p3(
    shape: tuple[int, ...], classes: int, keep_last: Keep = 1.0, keep_rule: Rule = "code"
) -> nn.Module:
    """The "ResNet-8" of FedProj, one basic block a stage: 4,903,242 parameters with 3 channels and 10 classes."""
    return network(
        "resnet8_p3",
        shape,
        classes,
        BasicBlock,
        (1, 1, 1, 1),
        WIDTHS,
        pool=True,
        keep_last=keep_last,
        keep_rule=keep_rule,
    )


@registry.model("resnet18_p3")
def resnet18_p3(
    shape: tuple[int, ...], classes: int, keep_last: Keep = 1.0, keep_rule: Rule = "code"
) -> nn.Module:
    """The ResNet-18 of FedProj, 3x3 stem and max-pool: 11,220,132 parameters with 3 channels and 100 classes."""
    return network(
        "resnet18_p3",
        shape,
        classes,
        BasicBlock,
        (2, 2, 2, 2),
        WIDTHS,
        pool=True,
        keep_last=keep_last,
        keep_rule=keep_rule,
    )


@registry.model("resnet56")
def resnet56(
    shape: tuple[int, ...],
    classes: int,
    projection: bool = False,
    keep_last: Keep = 1.0,
    keep_rule: Rule = "code",
) -> nn.Module:
    """The bottleneck ResNet-56 of FedAlign: 614,452 parameters with 3 channels and 100 classes.

    ``projection`` adds MOON's two linear layers between pool and classifier (131,584 parameters).
    """
    return network(
        "resnet56",
        shape,
        classes,
        Bottleneck,
        (6, 6, 6),
        (16, 32, 64),
        projection=projection,
        keep_last=keep_last,
        keep_rule=keep_rule,
    )


@registry.model("resnet18_imagenet")
def resnet18_imagenet(
    shape: tuple[int, ...], classes: int, keep_last: Keep = 1.0, keep_rule: Rule = "code"
) -> nn.Module:
    """The ResNet-18 of He et al. (CVPR 2016): 11,279,112 parameters with 3 channels and 200 classes."""
    return network(
        "resnet18_imagenet",
        shape,
        classes,
        BasicBlock,
        (2, 2, 2, 2),
        WIDTHS,
        stem=7,
        pool=True,
        keep_last=keep_last,
        keep_rule=keep_rule,
    )


@registry.model("small_resnet")
def small_resnet(
    shape: tuple[int, ...], classes: int, keep_last: Keep = 1.0, keep_rule: Rule = "code"
) -> nn.Module:
    """Three basic blocks of 16, 32 and 64 channels with batch-norm, for 8x8 digits: 77,754 parameters with 10 classes."""
    return network(
        "small_resnet",
        shape,
        classes,
        BasicBlock,
        (1, 1, 1),
        (16, 32, 64),
        keep_last=keep_last,
        keep_rule=keep_rule,
    )
