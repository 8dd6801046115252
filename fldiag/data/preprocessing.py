"""How a named set is shown to a model: normalisation and augmentation, as each paper has them.

The first variant of a set is its default. A variant is chosen with ``load(name, variant=...)``, ``data.variant``
in a config, or ``name@variant`` where only a name can be given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fldiag.errors import FldiagError, unknown


@dataclass(frozen=True)
class Preprocessing:
    """Mean and deviation per stored channel for pixels in [0, 1]; augmentation names; channel repetition.

    ``stored_side`` and ``side`` are for pictures of any size: kept as squares of ``stored_side`` pixels, of which
    evaluation shows the central ``side`` x ``side``.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: tuple[str, ...] = ()
    repeat: int = 1
    stored_side: int | None = None
    side: int | None = None


#: Zero padding after normalisation, each step for half of the images.
_FEDTOGA = ("normalise", "hflip", "crop4@0.5")
_CIFAR10 = ((0.49139968, 0.48215827, 0.44653124), (0.24703233, 0.24348505, 0.26158768))
_CINIC10 = Preprocessing(
    (0.47889522, 0.47227842, 0.43047404),
    (0.24205776, 0.23828046, 0.25874835),
    ("reflectcrop4", "hflip"),
)
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_MEDICAL_GRAY = {"fedsol": Preprocessing((0.5,), (0.5,), ("hflip",), repeat=3)}
_MEDICAL_COLOUR = {"fedsol": Preprocessing((0.5,) * 3, (0.5,) * 3, ("hflip",))}

PREPROCESSING: dict[str, dict[str, Preprocessing]] = {
    "mnist": {
        "fedsol": Preprocessing((0.1307,), (0.3081,), ("crop4", "hflip", "cutout16"), repeat=3),
        # The paper does not erase 16 x 16 of 28 x 28 pixels; its released code does.
        "fedsol_paper": Preprocessing((0.1307,), (0.3081,), ("crop4", "hflip"), repeat=3),
    },
    "cifar10": {
        "fedsol": Preprocessing(*_CIFAR10, ("crop4", "hflip", "cutout16")),
        "fedtoga": Preprocessing((0.491, 0.482, 0.447), (0.247, 0.243, 0.262), _FEDTOGA),
        "fedproj": Preprocessing((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
        "fedalign": Preprocessing(*_CIFAR10, ("crop4", "hflip")),
    },
    "cifar100": {
        "fedalign": Preprocessing(
            (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), ("crop4", "hflip")
        ),
        "fedtoga": Preprocessing((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761), _FEDTOGA),
        "fedproj": Preprocessing((0.507, 0.487, 0.441), (0.267, 0.256, 0.276)),
    },
    "svhn": {
        "fedsol": Preprocessing(
            (0.4376821, 0.4437697, 0.47280442),
            (0.19803012, 0.20101562, 0.19703614),
            ("crop4", "hflip"),
        ),
    },
    "cinic10": {"fedsol": _CINIC10, "fedproj": _CINIC10, "enlarged": _CINIC10},
    "imagenet200": {
        "fedalign": Preprocessing(
            *_IMAGENET, ("resizedcrop224", "jitter0.4", "hflip"), stored_side=256, side=224
        ),
        "small": Preprocessing(
            *_IMAGENET, ("resizedcrop64", "jitter0.4", "hflip"), stored_side=72, side=64
        ),
    },
    **{f"{name}mnist": _MEDICAL_COLOUR for name in ("path", "derma", "retina", "blood")},
    **{
        f"{name}mnist": _MEDICAL_GRAY
        for name in ("oct", "pneumonia", "breast", "tissue", "organa", "organc", "organs")
    },
}


def choose(name: str, variant: str | None) -> tuple[str, Preprocessing]:
    """The variant of set ``name``, the default one for None. Raises FldiagError for an unknown variant."""
    variants = PREPROCESSING[name]
    variant = next(iter(variants)) if variant is None else variant
    if variant not in variants:
        raise unknown(f"variant of data set {name!r}", str(variant), variants)
    return variant, variants[variant]


def sentence(name: str) -> str:
    """The variants of set ``name`` for its description."""
    default, *alternatives = PREPROCESSING[name]
    if not alternatives:
        return f"Variant: {default}."
    return f"Variants: {', '.join([f'{default} (default)', *alternatives])}."


#: The means and deviations of so many channels are named one by one.
MOST_LISTED = 4


def describe_inputs(kind: str, mean: Sequence[float] = (), std: Sequence[float] = ()) -> str:
    """What becomes of stored numbers before a model sees them, in words. ``kind``: their dtype in torch, or a text for those
    that are not normalised here.

    >>> describe_inputs("uint8", (0.1307,), (0.3081,))
    'pixels / 255, then minus mean 0.1307 and over deviation 0.3081'
    """
    start = "pixels / 255" if kind == "uint8" else f"as they are ({kind})"
    if not mean:
        return start
    start = "pixels / 255, then" if kind == "uint8" else f"{kind},"
    if len(mean) > MOST_LISTED:
        return f"{start} minus the mean and over the deviation of each of {len(mean)} channels"
    means, deviations = (", ".join(f"{v:.4g}" for v in numbers) for numbers in (mean, std))
    if len(mean) > 1:
        means, deviations = f"({means})", f"({deviations})"
    return f"{start} minus mean {means} and over deviation {deviations}"


def no_variants(name: str, variant: str) -> FldiagError:
    return FldiagError(
        f"data set {name!r} has no variants, so {variant!r} cannot be chosen",
        "remove data.variant",
        usage=True,
    )
