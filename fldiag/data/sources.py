"""From a name to a data set: registered, an npz file, or a user's own factory; and the two sets that scikit-learn carries."""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fldiag import registry, sections, user_code
from fldiag.data.arrays import form_of, inputs, labels, moments, read_npz, spread
from fldiag.data.dataset import Dataset
from fldiag.data.images import folder
from fldiag.data.preprocessing import MOST_LISTED, no_variants
from fldiag.data.text import Reading, table
from fldiag.errors import FldiagError, counted, error_text, nearest
from fldiag.sections import Normalise, moments_of, read_normalisation

#: Labels may be as large as this, however few examples there are.
MOST_CLASSES = 10_000
#: Of the digits: pixel/16 over the 1,500 training images.
DIGITS_MEAN, DIGITS_STD = 0.3053, 0.3760


def load(
    name: str,
    root: str | os.PathLike[str] | None = None,
    download: bool = False,
    variant: str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    normalise: Normalise | tuple[Any, Any] | None = None,
    reading: Reading | None = None,
    allow_code: Collection[str] = (),
) -> Dataset:
    """The data set called ``name``:

    - a registered one (``digits``, ``iris``, ``mnist``, ``cifar10``, ...; ``registry.dataset.names()``);
      image sets are looked for under ``root``, else $FLDIAG_DATA, and fetched only with ``download``;
    - ``npz:PATH``: an npz file with train_images, train_labels, test_images, test_labels, where images are
      N,H,W or N,H,W,C (uint8 pixels, or floats) or features N,D;
    - ``csv:PATH``: texts, see ``fldiag.data.text.table``;
    - any other NAME for which ``<root>/NAME.npz`` exists: that file;
    - ``pkg.mod:factory``: what the factory returns, called without arguments: a ``Dataset``, or
      (train_x, train_y, test_x, test_y) as tensors or arrays, inputs [n, C, H, W] or [n, d] as ``Dataset``
      has them: rows of int32 or int64 are tokens and stay integers, features are floats. It is imported only if it is one of
      ``allow_code``: what the user typed or consented to, never a name out of a file.

    ``normalise``: what the model sees. "none": the stored numbers; "unit": pixels of 0 to 255 (uint8) divided by 255;
    "standard": that, or the numbers themselves, minus the mean and over the deviation of each channel (feature) of the
    training split; a pair (mean, deviation), or such text as "0.1307/0.3081" or "0.49,0.48,0.45/0.25,0.24,0.26": likewise with
    these, one of each per channel or one for all, of pixels / 255. Without it a registered set and a returned ``Dataset`` keep
    their own transform, pixels of other data are divided by 255 ("unit"), and other numbers stay as they are ("none").

    ``variant``: one of the ways in which papers normalise, augment and split a registered set
    (``fldiag.data.preprocessing``); ``name@variant`` says the same. ``reading``: how texts become tokens.
    ``progress(done, total, text)`` is called while pictures are decoded for the first time.

    Raises FldiagError when the name or the variant is unknown, the data are not there, or they do not fit together; and for
    code that is not allowed.
    """
    if not isinstance(name, str) or not name:
        raise FldiagError(
            f"data set name {name!r}",
            "give a name, npz:PATH, csv:PATH or pkg.mod:factory",
            usage=True,
        )
    normalise = None if normalise is None else read_normalisation(normalise)
    name, variant = _name_and_variant(name, variant)
    return _normalised(
        _load(name, root, download, variant, progress, reading, allow_code), normalise
    )


def of(
    section: sections.DataSection, download: bool = False, allow_code: Collection[str] = ()
) -> Dataset:
    """The data set that the section ``data`` of a config describes. Raises FldiagError as ``load``."""
    return load(
        section.name,
        section.root,
        download,
        section.variant,
        normalise=section.normalise,
        reading=Reading.of(section.model_dump()),
        allow_code=allow_code,
    )


def remarks(dataset: Dataset) -> list[str]:
    """What a user should know of a data set that no registered name stands for: how a model sees it."""
    is_registered = dataset.name.partition("@")[0] in registry.dataset
    if is_registered or dataset.tokens:
        return [*dataset.remarks]
    return [
        f"inputs of {dataset.name}: {dataset.scaling} (data.normalise, --normalise)",
        *dataset.remarks,
    ]


def _load(
    name: str,
    root: str | os.PathLike[str] | None,
    download: bool,
    variant: str | None,
    progress: Callable[[int, int, str], None] | None,
    reading: Reading | None,
    allow_code: Collection[str],
) -> Dataset:
    if name.startswith("npz:"):
        return _npz(name, name.removeprefix("npz:"))
    if name.startswith("csv:"):
        return table(name.removeprefix("csv:"), reading or Reading())
    if ":" in name:
        return _dataset(
            call_loader(name, allow_code), f"data set {name!r}: {name.rpartition(':')[2]}()", name
        )
    if name not in registry.dataset:
        return _file_of_that_name(name, root)
    build = registry.dataset.get(name).build
    parameters = inspect.signature(build).parameters
    if variant is not None and "variant" not in parameters:
        raise no_variants(name, variant)
    options = {"variant": variant, "progress": progress, "reading": reading}
    options = {key: v for key, v in options.items() if v is not None and key in parameters}
    return _dataset(build(root=root, download=download, **options), f"data set {name!r}")


def _name_and_variant(name: str, variant: str | None) -> tuple[str, str | None]:
    """``name@variant`` taken apart. Only registered sets have variants."""
    base, at_sign, suffix = name.rpartition("@")
    if at_sign and base in registry.dataset:
        if variant not in (None, suffix):
            raise FldiagError(
                f"data set {name!r} and variant {variant!r}", "name one variant", usage=True
            )
        name, variant = base, suffix
    if variant is not None and (":" in name or name not in registry.dataset):
        raise no_variants(name, variant)
    return name, variant


def _file_of_that_name(name: str, root: str | os.PathLike[str] | None) -> Dataset:
    at = folder(root)
    npz = at / f"{name}.npz" if at else None
    if npz and npz.is_file():
        return _npz(name, str(npz))
    looked = f" and there is no {npz}" if npz else ""
    form = os.path.splitext(name)[1].removeprefix(".").lower()
    remedy = (
        f"a file of your own: {form}:{name}"
        if form in ("npz", "csv")
        else f"{nearest(name, registry.dataset.names())}; or npz:PATH, csv:PATH, or pkg.mod:factory"
    )
    raise FldiagError(f"unknown data set {name!r}{looked}", remedy, usage=True)


def _npz(name: str, path: str) -> Dataset:
    if not path:
        raise FldiagError("npz: without a path", "write npz:PATH", usage=True)
    path = os.path.expanduser(path)
    arrays = read_npz(path)
    train_y, test_y = arrays[1], arrays[3]
    return Dataset(
        name,
        *arrays,
        classes=train_y.shape[1]
        if train_y.is_floating_point()
        else _classes(path, train_y, test_y),
        packed=form_of(path, arrays[0][0].numel()),
    )


def _normalised(dataset: Dataset, how: Normalise | None) -> Dataset:
    if how is None or (how == "none" and dataset.tokens):
        return dataset
    pixels = dataset.train_x.dtype == torch.uint8
    if dataset.tokens:
        raise FldiagError(
            f"data set {dataset.name!r} cannot be normalised in another way",
            "leave out data.normalise",
            usage=True,
        )
    if how == "unit" and not pixels:
        raise FldiagError(
            f"data set {dataset.name!r}: normalise = 'unit' divides pixels of 0 to 255 (uint8) by 255, and these "
            "inputs are floats",
            "use none or standard",
            usage=True,
        )
    mean, std = moments(dataset.train_x) if how == "standard" else _of_channels(dataset, how)
    if how == "none" and pixels:
        dataset = replace(dataset, train_x=dataset.train_x.float(), test_x=dataset.test_x.float())
    return replace(dataset, mean=mean, std=std)


def _of_channels(dataset: Dataset, how: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The mean and deviation that ``how`` gives for every channel; none for a normalisation without. Raises FldiagError for
    another number of channels, and for means of pixels that were not divided by 255."""
    mean, std = moments_of(how) or ((), ())
    channels = dataset.train_x.shape[1]
    kind = "channel" if dataset.train_x.ndim == 4 else "feature"
    remedy = f"give {channels} of each, or one pair for all such as 0.5/0.25"
    if channels <= MOST_LISTED:
        remedy += ", or those of the training split: --normalise " + "/".join(
            ",".join(f"{v:.4g}" for v in numbers) for numbers in moments(dataset.train_x)
        )
    if len(mean) not in (0, 1, channels):
        raise FldiagError(
            f"data set {dataset.name!r}: normalise = {how!r} has {len(mean)} means and deviations, and the inputs "
            f"have {counted(channels, kind)}",
            remedy,
            usage=True,
        )
    if dataset.train_x.dtype == torch.uint8 and any(not 0 <= m <= 1 for m in mean):
        raise FldiagError(
            f"data set {dataset.name!r}: normalise = {how!r} has means outside 0..1, and pixels are divided by 255 "
            "before the mean is subtracted",
            "give mean and deviation of pixels / 255: --normalise "
            + "/".join(",".join(f"{v / 255:.4g}" for v in numbers) for numbers in (mean, std)),
            usage=True,
        )
    return (mean * channels, std * channels) if len(mean) == 1 else (mean, std)


def call_loader(name: str, allow_code: Collection[str]) -> Any:
    """What the function ``pkg.mod:loader`` returns. Raises FldiagError when it is not allowed, is not there, or fails."""
    build, function = user_code.load_user(name, allow_code, "data set"), name.rpartition(":")[2]
    try:
        return build()
    except FldiagError:
        raise
    except Exception as error:
        raise FldiagError(
            f"data set {name!r}: {function}() failed ({error_text(error)})",
            "the factory is called without arguments; fix it",
        ) from error


def _dataset(value: Any, source: str, name: str = "") -> Dataset:
    """What a builder returned as a Dataset; arrays are accepted from a factory (``name`` given)."""
    if isinstance(value, Dataset):
        return value
    if not name or not isinstance(value, (tuple, list)) or len(value) != 4:
        size = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
        also = ", or (train_x, train_y, test_x, test_y)" if name else ""
        raise FldiagError(
            f"{source} returned a {type(value).__name__}{size}", f"return fldiag.data.Dataset{also}"
        )
    parts = []
    for array, label in zip(value, ("train_x", "train_y", "test_x", "test_y"), strict=True):
        if label.endswith("x"):
            x = inputs(array, f"{source} {label}")
            parts.append(x[:, None] if x.ndim == 3 else x)
        else:
            floating = "float" in str(getattr(array, "dtype", ""))
            parts.append(
                inputs(array, f"{source} {label}")
                if floating
                else labels(array, f"{source} {label}")
            )
    train_x, train_y, test_x, test_y = parts
    if train_y.is_floating_point():
        train_y, test_y = (y[:, None] if y.ndim == 1 else y for y in (train_y, test_y))
        classes = train_y.shape[1]
    else:
        classes = _classes(source, train_y, test_y)
    return Dataset(name, train_x, train_y, test_x, test_y, classes=classes)


def _classes(source: str, *ys: torch.Tensor) -> int:
    """One more than the largest label. Raises FldiagError for one that cannot be the number of a class: models and tables have a
    column for each."""
    largest, examples = max((int(y.max()) for y in ys if len(y)), default=0), sum(map(len, ys))
    if largest >= max(MOST_CLASSES, examples):
        raise FldiagError(
            f"{source}: label {largest:,} among {examples:,} examples",
            "number the classes 0, 1, 2, ...",
        )
    return largest + 1


@registry.dataset("digits", embedded=True)
def digits(root: str | None = None, download: bool = False) -> Dataset:
    """Handwritten digits, 8x8 gray, 10 classes, 1,500 train / 297 test (embedded, from scikit-learn).

    The split is fixed and stratified: test images lie evenly spaced through each class.
    """
    table = _table_of_scikit_learn("digits.csv.gz")
    x = torch.from_numpy(table[:, :-1]).float().div(16).reshape(-1, 1, 8, 8)
    return Dataset(
        "digits",
        *_split(x, torch.from_numpy(table[:, -1]).long(), 297),
        classes=10,
        mean=(DIGITS_MEAN,),
        std=(DIGITS_STD,),
    )


@registry.dataset("iris", embedded=True)
def iris(root: str | None = None, download: bool = False) -> Dataset:
    """Iris flowers, 4 features, 3 classes, 120 train / 30 test (embedded, from scikit-learn).

    Features are standardised with the training split's mean and deviation; the split is fixed and stratified.
    """
    table = _table_of_scikit_learn("iris.csv", skiprows=1)
    x, y = torch.from_numpy(table[:, :-1].copy()), torch.from_numpy(table[:, -1]).long()
    train_x, train_y, test_x, test_y = _split(x, y, 30)
    mean, std = (torch.tensor(v, dtype=torch.float64) for v in moments(train_x))
    return Dataset(
        "iris",
        ((train_x - mean) / std).float(),
        train_y,
        ((test_x - mean) / std).float(),
        test_y,
        classes=3,
    )


def _table_of_scikit_learn(file: str, skiprows: int = 0) -> np.ndarray:
    """A table that scikit-learn carries: features, then the label. Importing the package takes a second, so it is not."""
    spec = importlib.util.find_spec("sklearn")
    assert spec is not None and spec.origin is not None  # fldiag requires it
    path = Path(spec.origin).parent / "datasets" / "data" / file
    return np.loadtxt(path, delimiter=",", skiprows=skiprows)


def _split(x: Tensor, y: Tensor, test: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    held_out = torch.zeros(len(y), dtype=torch.bool)
    held_out[spread(y, test)] = True
    return x[~held_out], y[~held_out], x[held_out], y[held_out]
