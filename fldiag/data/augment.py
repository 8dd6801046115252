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

A suffix ``@q`` applies crops, flips and cutout to each image with probability q (``crop4@0.5``). Steps act in the order
written. Normalisation stands before the first cutout, or last, unless ``normalise`` places it: so by default crops pad with
black pixels and cutout erases to zero after normalisation, which is what torchvision's RandomCrop(32, padding=4),
RandomHorizontalFlip, ToTensor, Normalize, then Cutout do.

Random numbers are drawn on the generator's device, so a CPU generator gives the same images whatever device the batch is on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from fldiag.errors import FldiagError

_NAME = re.compile(
    r"(crop|reflectcrop|resizedcrop|cutout|jitter|hflip|normalise)(\d*(?:\.\d+)?)(?:@(\d*\.?\d+))?"
)


class Augmentation(NamedTuple):
    """One step: its kind, its size in pixels (of jitter its strength), and the probability that an image gets it."""

    kind: str
    size: float
    probability: float


Steps = tuple[Augmentation, ...]


@lru_cache
def plan(names: tuple[str, ...]) -> tuple[Steps, Steps]:
    """The steps before and after normalisation. Raises FldiagError for what has no meaning."""
    found = [match.groups() for match in map(_NAME.fullmatch, names) if match]
    steps = tuple(
        Augmentation(kind, float(size or 0), float(q or (0.5 if kind == "hflip" else 1)))
        for kind, size, q in found
    )
    kinds = [step.kind for step in steps]
    places = (kinds.index(kind) for kind in ("normalise", "cutout") if kind in kinds)
    cut = next(places, len(kinds))
    before, after = steps[:cut], steps[cut + ("normalise" in kinds) :]
    if len(found) < len(names) or any(step.kind in ("jitter", "normalise") for step in after):
        raise FldiagError(
            f"augmentation {list(names)}",
            "use crop4, reflectcrop4, cutout16 (any size), hflip, and @0.5 after these for a probability; resizedcrop224, "
            "jitter0.4; normalise once, where colours have changed",
            usage=True,
        )
    return before, after


def apply(x: Tensor, steps: Iterable[Augmentation], generator: Generator) -> Tensor:
    """The batch [n, C, H, W] of any dtype with the steps applied; ``x`` is not changed, and its shape only by ``resizedcrop``."""

    random: dict[str, Any] = {"generator": generator, "device": generator.device}

    def coins(probability: float) -> Tensor:
        return (torch.rand(len(x), **random) < probability).to(x.device)

    def places(sizes: Iterable[int], other: int, probability: float) -> Tensor:
        """Rows and columns [2, n], uniform below ``sizes``; ``other`` where the image does not get the step."""
        draws = [torch.randint(high, (len(x),), **random) for high in sizes]
        drawn = torch.stack(draws).to(x.device)
        return torch.where(coins(probability), drawn, other) if probability < 1 else drawn

    for kind, size, probability in steps:
        pixels = int(size)
        if kind == "hflip":
            x = torch.where(coins(probability)[:, None, None, None], x.flip(-1), x)
        elif kind == "cutout":
            # A centre this far out leaves the whole image inside its border.
            x = cutout(x, places(x.shape[-2:], -2 * pixels, probability), pixels)
        elif kind in ("crop", "reflectcrop"):
            offsets = places([2 * pixels + 1] * 2, pixels, probability)
            x = crop(x, offsets, pixels, "constant" if kind == "crop" else "reflect")
        else:
            from torchvision import transforms

            change = (
                transforms.ColorJitter(*[size] * 3)
                if kind == "jitter"
                else transforms.RandomResizedCrop(pixels, antialias=True)
            )
            seed = torch.randint(2**62, (1,), **random)
            # It draws from torch's global state, which is put back.
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(int(seed))
                x = torch.stack([change(image) for image in x])
    return x


def crop(x: Tensor, offsets: Tensor, padding: int, mode: str) -> Tensor:
    """Pads [n, C, H, W] by ``padding`` and cuts [H, W] back, its corner at ``offsets`` [2, n] (row, column).

    Offsets lie in 0..2*padding; offset ``padding`` gives the image back.
    """
    height, width = x.shape[2:]
    padded = F.pad(x.float(), [padding] * 4, mode).to(x.dtype)  # reflection knows no integers
    corners = zip(padded, *offsets.tolist(), strict=True)
    return torch.stack([image[:, i : i + height, j : j + width] for image, i, j in corners])


def cutout(x: Tensor, centres: Tensor, side: int) -> Tensor:
    """Zeroes a square in every image of [n, C, H, W]; ``centres`` [2, n] are (row, column).

    About centre c it covers c - side//2 .. c - side//2 + side - 1, as far as that is inside the image.
    """
    inside = []
    for centre, length in zip(centres, x.shape[-2:], strict=True):
        position = torch.arange(length, device=x.device) - (centre[:, None] - side // 2)
        inside.append((position >= 0) & (position < side))
    return x.masked_fill((inside[0][:, :, None] & inside[1][:, None, :])[:, None], 0)
