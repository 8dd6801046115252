"""From a name to a data set; and the two sets that scikit-learn carries."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fldiag import registry, user_code
from fldiag.data import named, text
from fldiag.data.arrays import moments, read_npz, spread
from fldiag.data.dataset import Dataset
from fldiag.data.packed import layout_of
from fldiag.errors import FldiagError, error_text, nearest
from fldiag.sections import DataSection, moments_of
from fldiag.seeding import numpy_rng


def load(section: DataSection | str, *, download: bool = False) -> Dataset:
    """The data set that the section ``data`` of a config describes.

    Args:
        section: Or a name alone: of a known set (``fldiag list datasets``), with ``@variant`` for one of its variants, which is
            looked for under ``section.root``, else $FLDIAG_DATA; ``npz:PATH`` (``fldiag.data.arrays.read_npz``); ``csv:PATH``
            (``fldiag.data.text.table``); any other NAME for which ``<root>/NAME.npz`` exists; or ``pkg.mod:factory``, called
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
    dataset = normalise(_load(section, download), section.normalise)
    return _validation(dataset, section.validation) if section.validation else dataset


def _load(section: DataSection, download: bool) -> Dataset:
    name = section.name
    form, _, path = name.partition(":")
    if form == "csv":
        return text.table(section)
    if path and form != "npz":
        return _own(name, call_loader(name))
    if name in named.SETS:
        return named.find(section, download)
    if name in text.SETS:
        return text.find(section)
    if name in registry.dataset:
        return _own(name, registry.dataset.get(name).build(root=section.root, download=download))
    home = named.root_of(section)
    file = Path(path).expanduser() if path else (home or Path()) / f"{name}.npz"
    if not path and not (home and file.is_file()):
        raise FldiagError(
            f"unknown data set {name!r}, and there is no {file}",
            f"{nearest(name, registry.dataset.names())}; or npz:PATH, csv:PATH, pkg.mod:factory",
            usage=True,
        )
    return replace(Dataset.of(name, read_npz(file)), packed=layout_of(file))


def _own(name: str, value: object) -> Dataset:
    if isinstance(value, (tuple, list)):
        return Dataset.of(name, value)
    if not isinstance(value, Dataset):
        raise FldiagError(f"{name} returned a {type(value).__name__}, not a fldiag.data.Dataset")
    return value


def call_loader(name: str) -> Any:
    """What the function ``pkg.mod:loader`` returns. Raises FldiagError when it is not allowed, is not there, or fails."""
    build = user_code.load_user(name, "data set")
    try:
        return build()
    except Exception as error:  # the user's function may raise anything
        raise FldiagError(f"data set {name!r}: {error_text(error)}") from error


def remarks(dataset: Dataset) -> list[str]:
    """What a user should know of a data set that no registered name stands for: how a model sees it."""
    if dataset.tokens or dataset.name in registry.dataset:
        return [*dataset.remarks]
    return [f"inputs of {dataset.name}: {dataset.scaling} (data.normalise)", *dataset.remarks]


def normalise(dataset: Dataset, how: str | None) -> Dataset:
    """The data set as ``data.normalise`` says. Raises FldiagError for what has no meaning for these inputs."""
    x = dataset.train_x
    if how is None or (how == "none" and dataset.tokens):
        return dataset
    mean, std = moments_of(how) or ((), ())
    is_unit = x.dtype == torch.uint8 and max(mean, default=0) <= 1
    if not is_unit and not (x.dtype == torch.float32 and how != "unit"):
        raise FldiagError(
            f"data set {dataset.name!r}: normalise = {how!r} does not fit its inputs ({dataset.scaling})",
            "unit divides uint8 pixels by 255, means are of pixels / 255, and tokens have none",
            usage=True,
        )
    if how == "standard":
        mean, std = moments(x)
    elif len(mean) == 1:
        mean, std = mean * x.shape[1], std * x.shape[1]
    if how == "none":
        dataset = replace(dataset, train_x=x.float(), test_x=dataset.test_x.float())
    return replace(dataset, mean=mean, std=std)


def _validation(dataset: Dataset, share: float) -> Dataset:
    """The data set whose test split is this share of its training examples, each class giving its own; the test examples are
    in neither split."""
    x, y = dataset.train_x, dataset.train_y
    count = round(share * len(y))
    if not 0 < count < len(y):
        raise FldiagError(f"data.validation = {share} of {len(y)} training examples", usage=True)
    order = torch.from_numpy(numpy_rng(0, "validation").permutation(len(y)))
    train_x, train_y, test_x, test_y = _split(x, y, order[spread(y[order], count)])
    return replace(
        dataset, train_x=train_x, train_y=train_y, test_x=test_x, test_y=test_y, texts=()
    )


@registry.dataset("digits", embedded=True)
def digits(root: str | None = None, download: bool = False) -> Dataset:
    """Handwritten digits, 8x8 gray, 10 classes, 1,500 train / 297 test (embedded, from scikit-learn).

    The split is fixed and stratified: test images lie evenly spaced through each class. Mean and deviation are those of
    pixel / 16 over the training images.
    """
    x, y = _table_of_scikit_learn("digits.csv.gz")
    arrays = _split(x.float().div(16).reshape(-1, 1, 8, 8), y, spread(y, 297))
    return Dataset("digits", *arrays, classes=10, mean=(0.3053,), std=(0.3760,))


@registry.dataset("iris", embedded=True)
def iris(root: str | None = None, download: bool = False) -> Dataset:
    """Iris flowers, 4 features, 3 classes, 120 train / 30 test (embedded, from scikit-learn).

    Features are standardised with the training split's mean and deviation; the split is fixed and stratified.
    """
    x, y = _table_of_scikit_learn("iris.csv", skiprows=1)
    train_x, train_y, test_x, test_y = _split(x, y, spread(y, 30))
    mean, std = (torch.tensor(v, dtype=torch.float64) for v in moments(train_x))
    train_x, test_x = (((x - mean) / std).float() for x in (train_x, test_x))
    return Dataset("iris", train_x, train_y, test_x, test_y, classes=3)


def _table_of_scikit_learn(file: str, skiprows: int = 0) -> tuple[Tensor, Tensor]:
    """Features and labels. Importing the package takes a second, so it is not."""
    spec = importlib.util.find_spec("sklearn")
    path = Path(spec.origin).parent / "datasets" / "data" / file  # type: ignore[union-attr, arg-type]
    table = np.loadtxt(path, delimiter=",", skiprows=skiprows)
    return torch.from_numpy(table[:, :-1].copy()), torch.from_numpy(table[:, -1]).long()


def _split(x: Tensor, y: Tensor, test: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    is_test = torch.zeros(len(y), dtype=torch.bool)
    is_test[test] = True
    return x[~is_test], y[~is_test], x[is_test], y[is_test]


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
