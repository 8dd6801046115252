"""Random augmentation of a whole batch at once, described by names that a data set carries.

=================  ============================================================================
``crop{p}``        pad p black pixels on every side, cut the old size at a random place
``reflectcrop{p}`` the same with p mirrored pixels (the border itself is not repeated)
``hflip``          mirror left-right, for half of the images
``cutout{s}``      a square of side s turns zero, its centre uniform over the image, clipped at the
                   border (DeVries and Taylor, 2017)
``normalise``      where the normalisation happens
=================  ============================================================================

A suffix ``@q`` applies a step to each image with probability q (``crop4@0.5``). Steps act in the order
written. Normalisation stands before the first cutout, or last, unless ``normalise`` places it: so by
default crops pad with black pixels and cutout erases to zero after normalisation, which is what
torchvision's RandomCrop(32, padding=4), RandomHorizontalFlip, ToTensor, Normalize, then Cutout do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from fldiag.errors import FldiagError

_NAME = re.compile(r"(reflectcrop|crop|cutout)([1-9]\d*)(?:@([\d.]+))?|(hflip)(?:@([\d.]+))?|(normalise)")
_KNOWN = "crop4, reflectcrop4, cutout16 (any size), hflip, normalise, and @0.5 after a name for a probability"


@dataclass(frozen=True)
class Step:
    """One augmentation: its kind, its size in pixels, and the probability that an image gets it."""

    kind: str
    size: int = 0
    probability: float = 1.0


@lru_cache
def parse(name: str) -> Step:
    """The step a name stands for. Raises FldiagError for a name or a probability that is not understood."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise FldiagError(f"unknown augmentation {name!r}", f"use {_KNOWN}", usage=True)
    sized, size, sized_q, flip, flip_q, _ = match.groups()
    kind = sized or flip or "normalise"
    default = 0.5 if flip else 1.0
    try:
        probability = float(sized_q or flip_q or default)
    except ValueError:
        probability = -1.0
    if not 0 <= probability <= 1:
        raise FldiagError(f"augmentation {name!r} has no valid probability",
                          "write a number from 0 to 1 after @", usage=True)
    return Step(kind, int(size or 0), probability)


@lru_cache
def plan(names: tuple[str, ...]) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """The steps before and after normalisation.

    Raises FldiagError for an unknown name, or ``normalise`` written twice.
    """
    steps = [parse(name) for name in names]
    kinds = [step.kind for step in steps]
    if kinds.count("normalise") > 1:
        raise FldiagError(f"augmentation {list(names)} normalises {kinds.count('normalise')} times",
                          "write normalise once, or leave it out", usage=True)
    if "normalise" in kinds:
        cut = kinds.index("normalise")
        return tuple(steps[:cut]), tuple(steps[cut + 1:])
    cut = kinds.index("cutout") if "cutout" in kinds else len(kinds)
    return tuple(steps[:cut]), tuple(steps[cut:])


def apply(x: Tensor, steps: Iterable[Step], generator: Generator) -> Tensor:
    """The batch [n, C, H, W] of any dtype with the steps applied; the shape stays, ``x`` is not changed.

    Random numbers are drawn on the generator's device, so a CPU generator gives the same images whatever
    device the batch is on.
    """
    for step in steps:
        x = _STEPS[step.kind](x, step, generator)
    return x


def crop(x: Tensor, offsets: Tensor, padding: int, *, reflect: bool = False) -> Tensor:
    """Pads [n, C, H, W] by ``padding`` and cuts [H, W] back, its corner at ``offsets`` [2, n] (row, column).

    Offsets lie in 0..2*padding; offset ``padding`` gives the image back.
    """
    n, channels, height, width = x.shape
    padded = _reflect(x, padding) if reflect else F.pad(x, (padding,) * 4)
    stride = width + 2 * padding
    rows = torch.arange(height, device=x.device) * stride
    corner = offsets[0] * stride + offsets[1]
    index = corner[:, None, None] + rows[:, None] + torch.arange(width, device=x.device)
    # One gather over flat pixels takes half the time of indexing rows and columns separately.
    flat = padded.flatten(2).gather(2, index.reshape(n, 1, -1).expand(-1, channels, -1))
    return flat.view(n, channels, height, width)


def cutout(x: Tensor, centres: Tensor, side: int) -> Tensor:
    """Zeroes a square in every image of [n, C, H, W]; ``centres`` [2, n] are (row, column).

    About centre c it covers c - side//2 .. c - side//2 + side - 1, as far as that is inside the image.
    """
    inside = []
    for centre, length in zip(centres, x.shape[-2:], strict=True):
        position = torch.arange(length, device=x.device) - (centre[:, None] - side // 2)
        inside.append((position >= 0) & (position < side))
    return x.masked_fill((inside[0][:, :, None] & inside[1][:, None, :])[:, None], 0)


def _reflect(x: Tensor, padding: int) -> Tensor:
    for axis in (-2, -1):
        length = x.shape[axis]
        if padding >= length:
            raise FldiagError(f"reflectcrop{padding} mirrors {padding} pixels, and the image has {length}",
                              f"use at most reflectcrop{length - 1}", usage=True)
        position = torch.arange(-padding, length + padding, device=x.device).abs()
        x = x.index_select(axis, torch.where(position < length, position, 2 * (length - 1) - position))
    return x


def _coin(x: Tensor, probability: float, generator: Generator) -> Tensor:
    return (torch.rand(len(x), generator=generator, device=generator.device) < probability).to(x.device)


def _uniform(x: Tensor, high: int, generator: Generator) -> Tensor:
    return torch.randint(high, (len(x),), generator=generator, device=generator.device).to(x.device)


def _crop(x: Tensor, step: Step, generator: Generator) -> Tensor:
    offsets = torch.stack([_uniform(x, 2 * step.size + 1, generator) for _ in range(2)])
    if step.probability < 1:
        offsets = torch.where(_coin(x, step.probability, generator), offsets, step.size)
    return crop(x, offsets, step.size, reflect=step.kind == "reflectcrop")


def _hflip(x: Tensor, step: Step, generator: Generator) -> Tensor:
    return torch.where(_coin(x, step.probability, generator)[:, None, None, None], x.flip(-1), x)


def _cutout(x: Tensor, step: Step, generator: Generator) -> Tensor:
    centres = torch.stack([_uniform(x, length, generator) for length in x.shape[-2:]])
    if step.probability < 1:
        # A centre this far out leaves the whole image inside its border.
        centres = torch.where(_coin(x, step.probability, generator), centres, -2 * step.size)
    return cutout(x, centres, step.size)


_STEPS = {"crop": _crop, "reflectcrop": _crop, "hflip": _hflip, "cutout": _cutout}
