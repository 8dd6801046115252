"""From a name to a data set; the two sets that scikit-learn carries; and public data for distillation."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fldiag import registry
from fldiag.data import named, text
from fldiag.data.arrays import moments, read_npz
from fldiag.data.dataset import ARRAYS, Dataset, draw, spread
from fldiag.data.partition import hold_out
from fldiag.errors import FldiagError, error_text, nearest
from fldiag.sections import DataSection, moments_of
from fldiag.seeding import numpy_rng


def load(section: DataSection | str, *, download: bool = False) -> Dataset:
    """The data set that the section ``data`` of a config describes.

    Args:
        section: Or a name alone: of a known set (``fldiag list datasets``), with ``@variant`` for one of its variants, which is
            looked for under ``section.root``, else $FLDIAG_DATA; ``npz:PATH`` (``fldiag.data.arrays.read_npz``); ``csv:PATH``
            (``fldiag.data.text.find``); any other NAME for which ``<root>/NAME.npz`` exists; or ``pkg.mod:factory``, called
            without arguments, which returns a ``Dataset`` or its four arrays. ``section.normalise`` stands in place of a known
            set's own transform; pixels of other data are divided by 255, and other numbers stay as they are.
        download: Fetch a known set that is not there.

    Raises:
        FldiagError: An unknown name or variant, data that are not there or do not fit together, and code without consent.

    >>> load("digits").shape
    (1, 8, 8)
    """
    section = DataSection(name=section) if isinstance(section, str) else section
    name, _, variant = section.name.rpartition("@")
    if name in named.SETS:
        section = section.model_copy(update={"name": name, "variant": variant})
    elif section.variant and section.name not in named.SETS:
        raise FldiagError(f"data set {section.name!r} has no variants", usage=True)
    dataset = _normalised(_load(section, download), section.normalise)
    if not section.validation:
        return dataset
    x, y = dataset.train_x, dataset.train_y
    count = round(section.validation * len(y))
    if not 0 < count < len(y):
        what = f"data.validation = {section.validation} of {len(y)} training examples"
        raise FldiagError(what, usage=True)
    return replace(dataset, texts=(), **_split(x, y, draw(y, count, 0, "validation")))


def _load(section: DataSection, download: bool) -> Dataset:
    name = section.name
    form, _, path = name.partition(":")
    if form == "csv" or name in text.SETS:
        return text.find(section)
    if name in named.SETS:
        return named.find(section, download)
    is_code = path and form != "npz"
    if is_code or name in registry.dataset:
        value = (
            call_loader(name)
            if is_code
            else registry.dataset.get(name).build(root=section.root, download=download)
        )
        if isinstance(value, (tuple, list)) and len(value) == 4:
            return Dataset.of(name, value)
        if isinstance(value, Dataset):
            return value
        raise FldiagError(
            f"{name} returned a {type(value).__name__}, not a fldiag.data.Dataset or its four arrays"
        )
    home = named.root_of(section)
    file = Path(path).expanduser() if path else (home or Path()) / f"{name}.npz"
    if not path and not (home and file.is_file()):
        raise FldiagError(
            f"unknown data set {name!r}, and there is no {file}",
            f"{nearest(name, registry.dataset.names())}; or npz:PATH, csv:PATH, pkg.mod:factory",
            usage=True,
        )
    arrays, packed = read_npz(file)
    return Dataset.of(name, arrays, packed=packed)


def call_loader(name: str) -> Any:
    """What the function ``pkg.mod:loader`` returns. Raises FldiagError when it is not allowed, is not there, or fails."""
    build = registry.load_user(name, "data set")
    try:
        return build()
    except Exception as error:  # the user's function may raise anything
        raise FldiagError(f"data set {name!r}: {error_text(error)}") from error


def remarks(dataset: Dataset) -> list[str]:
    """What a user should know of a data set that no registered name stands for: how a model sees it."""
    if dataset.tokens or dataset.name in registry.dataset:
        return [*dataset.remarks]
    return [f"inputs of {dataset.name}: {dataset.scaling} (data.normalise)", *dataset.remarks]


def _normalised(dataset: Dataset, how: str | None) -> Dataset:
    """The data set as ``data.normalise`` says. Raises FldiagError for what has no meaning for these inputs."""
    x = dataset.train_x
    if how is None or (how == "none" and dataset.tokens):
        return dataset
    mean, std = (moments(x) if how == "standard" else moments_of(how)) or ((), ())
    is_unit = x.dtype == torch.uint8 and max(mean, default=0) <= 1
    if not is_unit and not (x.dtype == torch.float32 and how != "unit"):
        raise FldiagError(
            f"data set {dataset.name!r}: normalise = {how!r} does not fit its inputs ({dataset.scaling})",
            "unit divides uint8 pixels by 255, means are of pixels / 255, and tokens have none",
            usage=True,
        )
    if len(mean) == 1:
        mean, std = mean * x.shape[1], std * x.shape[1]
    if how == "none":
        dataset = replace(dataset, train_x=x.float(), test_x=dataset.test_x.float())
    return replace(dataset, mean=mean, std=std)


def load_public(
    section: DataSection, private: Dataset, seed: int, *, download: bool = False
) -> Tensor:
    """Public inputs, without labels.

    Args:
        section: ``public`` is the name of a data set: its training and test inputs, in that order, normalised by its own
            transform, as in the FedProj experiments; of texts the sentences, each once, in the private data's tokens. Or it is
            ``holdout:N``: N training examples of ``private``, each class giving its share within one example.
            ``public_size`` keeps so many of the inputs, or all when there are fewer.
        private: The clients' data.
        seed: Of both draws.
        download: Fetch a missing public data set.

    Returns:
        [M, *private.shape].

    Raises:
        FldiagError: Inputs of another shape than the private ones, and the private set itself.
    """
    name, source = str(section.public), private
    held_out = hold_out(name, private, seed)
    if len(held_out):
        x = private.train_x[held_out]
    else:
        is_known = name.partition("@")[0] in registry.dataset
        how = None if is_known else section.normalise
        update = {"name": name, "variant": None, "validation": None, "normalise": how}
        other = load(section.model_copy(update=update), download=download)
        are_texts = other.words is not None, private.words is not None
        if other.name == private.name or other.shape != private.shape or len({*are_texts}) > 1:
            raise FldiagError(
                f"public data {name!r} are {other.name!r} {other.shape}, the private data {private.name!r} {private.shape}",
                "use other data than the private ones, of the same shape, or holdout:N",
                usage=True,
            )
        if all(are_texts):
            sentences = dict.fromkeys((sentence,) for pair in other.texts for sentence in pair)
            x = private.words.numbers([*sentences])
        else:
            source, x = other, torch.cat([other.train_x, other.test_x])
    order = numpy_rng(seed, "public subset").permutation(len(x))[: section.public_size]
    return source.normalise(x[torch.from_numpy(order).sort().values])


@registry.dataset("digits", embedded=True)
def digits(root: str | None = None, download: bool = False) -> Dataset:
    """Handwritten digits, 8x8 gray, 10 classes, 1,500 train / 297 test (embedded, from scikit-learn).

    The split is fixed and stratified: test images lie evenly spaced through each class. Mean and deviation are those of
    pixel / 16 over the training images.
    """
    x, y = _table_of_scikit_learn("digits.csv.gz")
    arrays = _split(x.float().div(16).reshape(-1, 1, 8, 8), y, spread(y, 297))
    return Dataset("digits", **arrays, classes=10, mean=(0.3053,), std=(0.3760,))


@registry.dataset("iris", embedded=True)
def iris(root: str | None = None, download: bool = False) -> Dataset:
    """Iris flowers, 4 features, 3 classes, 120 train / 30 test (embedded, from scikit-learn).

    Features are standardised with the training split's mean and deviation; the split is fixed and stratified.
    """
    x, y = _table_of_scikit_learn("iris.csv", skiprows=1)
    test = spread(y, 30)
    mean, std = torch.tensor(moments(_split(x, y, test)["train_x"]), dtype=torch.float64)
    return Dataset("iris", **_split(((x - mean) / std).float(), y, test), classes=3)


def _table_of_scikit_learn(file: str, skiprows: int = 0) -> tuple[Tensor, Tensor]:
    """Features and labels. Importing the package takes a second, so it is not."""
    path = distribution("scikit-learn").locate_file(f"sklearn/datasets/data/{file}")
    table = np.loadtxt(str(path), delimiter=",", skiprows=skiprows)
    return torch.from_numpy(table[:, :-1].copy()), torch.from_numpy(table[:, -1]).long()


def _split(x: Tensor, y: Tensor, test: Tensor) -> dict[str, Any]:
    """The arrays of a data set whose test split is at ``test``."""
    is_test = torch.zeros(len(y), dtype=torch.bool)
    is_test[test] = True
    return dict(zip(ARRAYS, (x[~is_test], y[~is_test], x[is_test], y[is_test]), strict=True))


def _register(name: str, summary: str) -> None:
    def build(
        root: str | None = None, download: bool = False, variant: str | None = None
    ) -> Dataset:
        return load(DataSection(name=name, root=root, variant=variant), download=download)

    build.__doc__ = summary
    registry.dataset(name)(build)


for _name, _spec in named.SETS.items():
    _register(_name, f"{_spec.summary}\n\nVariants: {', '.join(_spec.variants)}.")
for _name, (_summary, _) in text.SETS.items():
    _register(_name, _summary)
