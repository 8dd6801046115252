"""The images and classes of the papers' data sets, and the classes of texts, known without the data."""

from __future__ import annotations

from fldiag.data import text
from fldiag.data.images import SETS

#: Name -> shape that a model sees (channels first), number of classes.
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    **{s.name: ((3, *s.shape[1:]), s.classes) for s in SETS},
    "cinic10": ((3, 32, 32), 10),
    "imagenet200": ((3, 224, 224), 200),
    "pathmnist": ((3, 28, 28), 9),
    "tissuemnist": ((3, 28, 28), 8),
    "digits": ((1, 8, 8), 10),
    "iris": ((4,), 3),
}


def shape_of(name: str) -> tuple[tuple[int, ...], int] | None:
    """Shape and classes of a data set, also of a reduced one or a variant; None where nobody knows.

    >>> shape_of("mnist-2000")
    ((3, 28, 28), 10)
    """
    base = name.partition("@")[0]
    return SHAPES.get(base) or SHAPES.get(base.rpartition("-")[0])


def classes(name: str) -> int | None:
    """How many classes a data set has; None where nobody knows.

    >>> classes("mnist-2000"), classes("snli")
    (10, 3)
    """
    shape = shape_of(name)
    return shape[1] if shape else {s.name: s.classes for s in text.SETS}.get(name)
