"""Random augmentation of a whole batch at once, described by names that a data set carries.

=================  ============================================================================
``crop{p}``        pad p black pixels on every side, cut the old size at a random place
``reflectcrop{p}`` the same with p mirrored pixels (the border itself is not repeated)
``hflip``          mirror left-right, for half of the images
``resizedcrop{s}`` a random part of 8 to 100 % of the area, 3/4 to 4/3 as wide as high, resized to s x s
                   (bilinear with antialiasing: torchvision's RandomResizedCrop; Szegedy et al., 2015)
``jitter{v}``      brightness, contrast and saturation in random order, each times a factor uniform in
                   1-v..1+v (torchvision's ColorJitter without hue), on pixels before normalisation
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

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from fldiag.errors import FldiagError

_NAME = re.compile(
    r"(?:(?P<sized>reflectcrop|crop|cutout)(?P<size>[1-9]\d*)|(?P<flip>hflip)|"
    r"jitter(?P<strength>0?\.\d+|1))(?:@(?P<q>[\d.]+))?"
    r"|(?P<whole>normalise)|resizedcrop(?P<side>[1-9]\d*)"
)
_NAMES = (
    "crop4, reflectcrop4, cutout16, resizedcrop224 (any size), jitter0.4, hflip, normalise, and @0.5 after "
    "a name for a probability (not of resizedcrop)"
)
#: What RandomResizedCrop draws from: share of the area, and width over height.
AREA, ASPECT, TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10


@dataclass(frozen=True)
class Augmentation:
    """One augmentation: its kind, its size in pixels, the probability that an image gets it, its strength."""

    kind: str
    size: int = 0
    probability: float = 1.0
    strength: float = 0.0


@lru_cache
def parse(name: str) -> Augmentation:
    """The step a name stands for. Raises FldiagError for a name or a probability that is not understood."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise FldiagError(f"unknown augmentation {name!r}", f"use {_NAMES}", usage=True)
    groups = match.groupdict()
    kind = (
        groups["sized"]
        or groups["flip"]
        or groups["whole"]
        or ("jitter" if groups["strength"] else "resizedcrop")
    )
    try:
        probability = float(groups["q"] or (0.5 if kind == "hflip" else 1.0))
    except ValueError:
        probability = -1.0
    if not 0 <= probability <= 1:
        raise FldiagError(
            f"augmentation {name!r} has no valid probability",
            "write a number from 0 to 1 after @",
            usage=True,
        )
    size = int(groups["size"] or groups["side"] or 0)
    return Augmentation(kind, size, probability, float(groups["strength"] or 0))


@lru_cache
def plan(names: tuple[str, ...]) -> tuple[tuple[Augmentation, ...], tuple[Augmentation, ...]]:
    """The steps before and after normalisation.

    Raises FldiagError for an unknown name, ``normalise`` written twice, or jitter after normalisation.
    """
    steps = [parse(name) for name in names]
    kinds = [step.kind for step in steps]
    if kinds.count("normalise") > 1:
        raise FldiagError(
            f"augmentation {list(names)} normalises {kinds.count('normalise')} times",
            "write normalise once, or leave it out",
            usage=True,
        )
    if "normalise" in kinds:
        cut = kinds.index("normalise")
        before, after = tuple(steps[:cut]), tuple(steps[cut + 1 :])
    else:
        cut = kinds.index("cutout") if "cutout" in kinds else len(kinds)
        before, after = tuple(steps[:cut]), tuple(steps[cut:])
    if any(step.kind == "jitter" for step in after):
        raise FldiagError(
            f"augmentation {list(names)} changes colours after normalisation, but colour changes "
            "need pixels",
            "write jitter before normalise and cutout",
            usage=True,
        )
    return before, after


def apply(x: Tensor, steps: Iterable[Augmentation], generator: Generator) -> Tensor:
    """The batch [n, C, H, W] of any dtype with the steps applied; ``x`` is not changed, and its shape only by
    ``resizedcrop``.

    Random numbers are drawn on the generator's device, so a CPU generator gives the same images whatever
    device the batch is on.
    """
    for step in steps:
        x = _STEPS[step.kind](x, step, generator)
    return x


def crop(x: Tensor, offsets: Tensor, padding: int, *, reflect: bool = False) -> Tensor:
    """Pads [n, C, H, W] by ``padding`` and cuts [H, W] back, its corner at ``offsets`` [2, n] (row, column).

    Offsets lie in 0..2*padding; offset ``padding`` gives the image back. Raises FldiagError for a mirror wider than
    the image.
    """
    height, width = x.shape[2:]
    if not reflect:
        padded = F.pad(x, (padding,) * 4)
    elif padding < min(height, width):
        padded = _torchvision().pad(x, [padding] * 4, padding_mode="reflect")
    else:
        raise FldiagError(
            f"reflectcrop{padding} mirrors {padding} pixels, and the image has {min(height, width)}",
            f"use at most reflectcrop{min(height, width) - 1}",
            usage=True,
        )
    return torch.stack(
        [
            image[:, top : top + height, left : left + width]
            for image, top, left in zip(padded, *offsets.tolist(), strict=True)
        ]
    )


def cutout(x: Tensor, centres: Tensor, side: int) -> Tensor:
    """Zeroes a square in every image of [n, C, H, W]; ``centres`` [2, n] are (row, column).

    About centre c it covers c - side//2 .. c - side//2 + side - 1, as far as that is inside the image.
    """
    inside = []
    for centre, length in zip(centres, x.shape[-2:], strict=True):
        position = torch.arange(length, device=x.device) - (centre[:, None] - side // 2)
        inside.append((position >= 0) & (position < side))
    return x.masked_fill((inside[0][:, :, None] & inside[1][:, None, :])[:, None], 0)


def windows(n: int, height: int, width: int, generator: Generator) -> Tensor:
    """Parts of an image [n, 4] (top, left, height, width), distributed as RandomResizedCrop's: up to ten tries,
    then the largest central part of an allowed shape.

    Drawn here because RandomResizedCrop draws from torch's global state, which no client owns.
    """

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(
            shape, dtype=torch.float64, generator=generator, device=generator.device
        )

    area = uniform(*AREA, n, TRIES) * (height * width)
    aspect = uniform(math.log(ASPECT[0]), math.log(ASPECT[1]), n, TRIES).exp()
    high, wide = (area / aspect).sqrt().round(), (area * aspect).sqrt().round()
    fits = (high >= 1) & (wide >= 1) & (high <= height) & (wide <= width)
    first = fits.to(torch.uint8).argmax(1, keepdim=True)  # the first of the largest
    high, wide = (v.gather(1, first)[:, 0].long() for v in (high, wide))
    corner = uniform(0, 1, 2, n)
    top, left = (corner[0] * (height - high + 1)).long(), (corner[1] * (width - wide + 1)).long()
    random = torch.stack([top, left, high, wide], 1)
    ratio = min(max(width / height, ASPECT[0]), ASPECT[1])
    rest_h, rest_w = min(height, round(width / ratio)), min(width, round(height * ratio))
    fallback = torch.tensor(
        [(height - rest_h) // 2, (width - rest_w) // 2, rest_h, rest_w], device=random.device
    )
    return torch.where(fits.any(1)[:, None], random, fallback)


def resize(x: Tensor, parts: Tensor, side: int) -> Tensor:
    """The ``parts`` [n, 4] (top, left, height, width) of the images [n, C, H, W] as [n, C, side, side].

    Bilinear with antialiasing; uint8 comes back rounded.
    """
    cut = _torchvision().resized_crop
    return torch.stack(
        [
            cut(image, *part, [side, side], antialias=True)
            for image, part in zip(x, parts.tolist(), strict=True)
        ]
    )


def jitter(x: Tensor, factors: Tensor, order: Tensor) -> Tensor:
    """Colours of pixels in [0, 1], float [n, C, H, W], changed by ``factors`` [n, 3] of brightness (0), contrast
    (1) and saturation (2), applied to each image in its ``order`` [n, 3] and clipped after each."""
    library = _torchvision()
    change = (library.adjust_brightness, library.adjust_contrast, library.adjust_saturation)
    images = list(x)
    for i, (strengths, turns) in enumerate(zip(factors.tolist(), order.tolist(), strict=True)):
        for j in turns:
            images[i] = change[j](images[i], strengths[j])
    return torch.stack(images)


def _torchvision() -> ModuleType:
    # Imported when a step needs it: most runs do not, and the import takes longer than that of fldiag.
    # These functions rather than those of v2, which round resized pixels in a way that depends on the processor.
    from torchvision.transforms import functional

    return functional


def _coin(x: Tensor, probability: float, generator: Generator) -> Tensor:
    return (torch.rand(len(x), generator=generator, device=generator.device) < probability).to(
        x.device
    )


def _uniform(x: Tensor, high: int, generator: Generator) -> Tensor:
    return torch.randint(high, (len(x),), generator=generator, device=generator.device).to(x.device)


def _crop(x: Tensor, step: Augmentation, generator: Generator) -> Tensor:
    offsets = torch.stack([_uniform(x, 2 * step.size + 1, generator) for _ in range(2)])
    if step.probability < 1:
        offsets = torch.where(_coin(x, step.probability, generator), offsets, step.size)
    return crop(x, offsets, step.size, reflect=step.kind == "reflectcrop")


def _hflip(x: Tensor, step: Augmentation, generator: Generator) -> Tensor:
    return torch.where(_coin(x, step.probability, generator)[:, None, None, None], x.flip(-1), x)


def _cutout(x: Tensor, step: Augmentation, generator: Generator) -> Tensor:
    centres = torch.stack([_uniform(x, length, generator) for length in x.shape[-2:]])
    if step.probability < 1:
        # A centre this far out leaves the whole image inside its border.
        centres = torch.where(_coin(x, step.probability, generator), centres, -2 * step.size)
    return cutout(x, centres, step.size)


def _resizedcrop(x: Tensor, step: Augmentation, generator: Generator) -> Tensor:
    return resize(x, windows(len(x), x.shape[2], x.shape[3], generator).to(x.device), step.size)


def _jitter(x: Tensor, step: Augmentation, generator: Generator) -> Tensor:
    if x.shape[1] not in (1, 3):
        raise FldiagError(
            f"jitter{step.strength:g} changes colours, and the images have {x.shape[1]} channels",
            "use it for gray or RGB images",
            usage=True,
        )
    n, device = len(x), generator.device
    factors = 1 + step.strength * (2 * torch.rand((n, 3), generator=generator, device=device) - 1)
    order = torch.rand((n, 3), generator=generator, device=device).argsort(1).to(x.device)
    factors = factors.to(x.device)
    if step.probability < 1:
        factors = torch.where(_coin(x, step.probability, generator)[:, None], factors, 1.0)
    if x.dtype != torch.uint8:
        return jitter(x, factors, order)
    return jitter(x.float() / 255, factors, order).mul_(255).round_().to(torch.uint8)


_STEPS = {
    "crop": _crop,
    "reflectcrop": _crop,
    "hflip": _hflip,
    "cutout": _cutout,
    "resizedcrop": _resizedcrop,
    "jitter": _jitter,
}
