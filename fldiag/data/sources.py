"""From a name to a data set: registered, an npz file, or a user's own factory."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, get_args

import torch

from fldiag import registry, sections
from fldiag.data.arrays import form_of, inputs, labels, moments, read_npz
from fldiag.data.dataset import Dataset
from fldiag.data.images import folder
from fldiag.data.preprocessing import choose, no_variants
from fldiag.data.text import Reading, table
from fldiag.errors import FldiagError, nearest, unknown
from fldiag.sections import Normalise

#: Labels may be as large as this, however few examples there are.
MOST_CLASSES = 10_000


def load(name: str, root: str | os.PathLike[str] | None = None, download: bool = False,
         variant: str | None = None, progress: Callable[[int, int, str], None] | None = None,
         normalise: Normalise | None = None, reading: Reading | None = None) -> Dataset:
    """The data set called ``name``:

    - a registered one (``digits``, ``iris``, ``mnist``, ``cifar10``, ...; ``registry.dataset.names()``);
      image sets are looked for under ``root``, else $FLDIAG_DATA, and fetched only with ``download``;
    - ``npz:PATH``: an npz file with train_images, train_labels, test_images, test_labels, where images are
      N,H,W or N,H,W,C (uint8 pixels, or floats) or features N,D;
    - ``csv:PATH``: texts, see ``fldiag.data.text.table``;
    - any other NAME for which ``<root>/NAME.npz`` exists: that file;
    - ``pkg.mod:factory``: what the factory returns, called without arguments: a ``Dataset``, or
      (train_x, train_y, test_x, test_y) as tensors or arrays, inputs [n, C, H, W] or [n, d] as ``Dataset``
      has them: rows of int32 or int64 are tokens and stay integers, features are floats.

    ``normalise``: what the model sees. "none": the stored numbers; "unit": pixels of 0 to 255 (uint8) divided by 255;
    "standard": that, or the numbers themselves, minus the mean and over the deviation of each channel (feature) of the
    training split. Without it a registered set and a returned ``Dataset`` keep their own transform, pixels of other
    data are divided by 255 ("unit"), and other numbers stay as they are ("none").

    ``variant``: one of the ways in which papers normalise, augment and split a registered set
    (``fldiag.data.preprocessing``); ``name@variant`` says the same. ``reading``: how texts become tokens.
    ``progress(done, total, text)`` is told about
    pictures that are decoded for the first time.

    Raises FldiagError when the name or the variant is unknown, the data are not there, or they do not fit together.
    """
    if not isinstance(name, str) or not name:
        raise FldiagError(f"data set name {name!r}", "give a name, npz:PATH, csv:PATH or pkg.mod:factory", usage=True)
    if normalise not in (None, *get_args(Normalise)):
        raise unknown("normalise", str(normalise), get_args(Normalise))
    name, variant = _name_and_variant(name, variant)
    return _normalised(_load(name, root, download, variant, progress, reading), normalise)


def of(section: sections.Data, download: bool = False) -> Dataset:
    """The data set that the section ``data`` of a config describes. Raises FldiagError as ``load``."""
    return load(section.name, section.root, download, section.variant, normalise=section.normalise,
                reading=Reading.of(section.model_dump()))


def blank(name: str, variant: str | None = None) -> Dataset | None:
    """Black pictures in the number and shape of a registered set, their classes evenly spread: for a forecast where the set
    is not there. None for a name that does not say its shape. They take no memory.

    Raises FldiagError for an unknown variant.
    """
    name, variant = _name_and_variant(name, variant)
    meta = registry.dataset.get(name).meta if ":" not in name and name in registry.dataset else {}
    if "examples" not in meta:
        return None
    chosen, look = choose(name, variant)
    channels, *sides = meta["shape"]
    shape = (channels, *([look.stored] * 2 if look.stored else sides))
    examples = meta["examples"][chosen] if isinstance(meta["examples"], dict) else meta["examples"]
    train, test = (torch.zeros(1, *shape, dtype=torch.uint8).expand(n, *shape) for n in examples)
    train_y, test_y = (torch.arange(n) % meta["classes"] for n in examples)
    return Dataset(name, train, train_y, test, test_y, classes=meta["classes"], mean=look.mean, std=look.std,
                   augment=look.augment, repeat=look.repeat, side=look.side)


def remarks(dataset: Dataset) -> list[str]:
    """What a user should know of a data set that no registered name stands for: how a model sees it."""
    known = dataset.name.partition("@")[0] in registry.dataset
    if known or dataset.tokens:
        return [*dataset.remarks]
    return [f"inputs of {dataset.name}: {dataset.scaling} (data.normalise, --normalise)", *dataset.remarks]


def _load(name: str, root: str | os.PathLike[str] | None, download: bool, variant: str | None,
          progress: Callable[[int, int, str], None] | None, reading: Reading | None) -> Dataset:
    if name.startswith("npz:"):
        return _npz(name, name.removeprefix("npz:"))
    if name.startswith("csv:"):
        return table(name.removeprefix("csv:"), reading or Reading())
    if ":" in name:
        return _dataset(made(name), f"data set {name!r}: {name.rpartition(':')[2]}()", name)
    if name not in registry.dataset:
        return _file_of_that_name(name, root)
    build = registry.dataset.get(name).build
    takes = inspect.signature(build).parameters
    if variant is not None and "variant" not in takes:
        raise no_variants(name, variant)
    asked = {"variant": variant, "progress": progress, "reading": reading}
    more = {key: value for key, value in asked.items() if value is not None and key in takes}
    return _dataset(build(root=root, download=download, **more), f"data set {name!r}")


def _name_and_variant(name: str, variant: str | None) -> tuple[str, str | None]:
    """``name@variant`` taken apart. Only registered sets have variants."""
    base, at_sign, suffix = name.rpartition("@")
    if at_sign and base in registry.dataset:
        if variant not in (None, suffix):
            raise FldiagError(f"data set {name!r} and variant {variant!r}", "name one variant", usage=True)
        name, variant = base, suffix
    if variant is not None and (":" in name or name not in registry.dataset):
        raise no_variants(name, variant)
    return name, variant


def _file_of_that_name(name: str, root: str | os.PathLike[str] | None) -> Dataset:
    at = folder(root)
    own = at / f"{name}.npz" if at else None
    if own and own.is_file():
        return _npz(name, str(own))
    looked = f" and there is no {own}" if own else ""
    raise FldiagError(f"unknown data set {name!r}{looked}",
                      f"{nearest(name, registry.dataset.names())}; or npz:PATH, csv:PATH, or pkg.mod:factory", usage=True)


def _npz(name: str, path: str) -> Dataset:
    if not path:
        raise FldiagError("npz: without a path", "write npz:PATH", usage=True)
    path = os.path.expanduser(path)
    arrays = read_npz(path)
    return Dataset(name, *arrays, classes=_classes(path, arrays[1], arrays[3]), packed=form_of(path, arrays[0][0].numel()))


def _normalised(dataset: Dataset, how: Normalise | None) -> Dataset:
    if how is None or (how == "none" and dataset.tokens):
        return dataset
    pixels = dataset.train_x.dtype == torch.uint8
    if dataset.made or dataset.tokens:
        raise FldiagError(f"data set {dataset.name!r} cannot be normalised in another way", "leave out data.normalise",
                          usage=True)
    if how == "unit" and not pixels:
        raise FldiagError(f"data set {dataset.name!r}: normalise = 'unit' divides pixels of 0 to 255 (uint8) by 255, and these "
                          "inputs are floats", "use none or standard", usage=True)
    mean, std = moments(dataset.train_x) if how == "standard" else ((), ())
    if how == "none" and pixels:
        dataset = replace(dataset, train_x=dataset.train_x.float(), test_x=dataset.test_x.float())
    return replace(dataset, mean=mean, std=std)


def made(name: str) -> Any:
    """What the function ``pkg.mod:loader`` returns. Raises FldiagError when it is not there or fails."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise FldiagError(f"data set {name!r} is not pkg.mod:factory",
                          "write an importable module, a colon and the name of a function in it", usage=True)
    with _working_directory_importable():
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            missing = (isinstance(error, ModuleNotFoundError)
                       and f"{module_name}.".startswith(f"{error.name}."))
            raise FldiagError(f"data set {name!r}: cannot import {module_name} ({_spell(error)})",
                              "run from its folder or install it" if missing else
                              "the module fails when imported; fix it", usage=missing) from error
        build = getattr(module, attribute, None)
        if not callable(build):
            public = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
            what = "has no function" if build is None else "has something that cannot be called"
            raise FldiagError(f"data set {name!r}: module {module_name} {what} {attribute!r}",
                              nearest(attribute, public) if public else "define it there", usage=True)
        try:
            return build()
        except FldiagError:
            raise
        except Exception as error:
            raise FldiagError(f"data set {name!r}: {attribute}() failed ({_spell(error)})",
                              "the factory is called without arguments; fix it") from error


def _dataset(found: Any, where: str, name: str = "") -> Dataset:
    """What a builder returned as a Dataset; arrays are accepted from a factory (``name`` given)."""
    if isinstance(found, Dataset):
        return found
    if not name or not isinstance(found, (tuple, list)) or len(found) != 4:
        size = f" of {len(found)}" if isinstance(found, (tuple, list)) else ""
        also = ", or (train_x, train_y, test_x, test_y)" if name else ""
        raise FldiagError(f"{where} returned a {type(found).__name__}{size}",
                          f"return fldiag.data.Dataset{also}")
    parts = []
    for value, label in zip(found, ("train_x", "train_y", "test_x", "test_y"), strict=True):
        if label.endswith("x"):
            x = inputs(value, f"{where} {label}")
            parts.append(x[:, None] if x.ndim == 3 else x)
        else:
            floating = "float" in str(getattr(value, "dtype", ""))
            parts.append(inputs(value, f"{where} {label}") if floating else labels(value, f"{where} {label}"))
    train_x, train_y, test_x, test_y = parts
    if train_y.is_floating_point():
        train_y, test_y = (y[:, None] if y.ndim == 1 else y for y in (train_y, test_y))
        classes = train_y.shape[1]
    else:
        classes = _classes(where, train_y, test_y)
    return Dataset(name, train_x, train_y, test_x, test_y, classes=classes)


def _classes(where: str, *ys: torch.Tensor) -> int:
    """One more than the largest label. Raises FldiagError for one that cannot be the number of a class: models and tables have a
    column for each."""
    largest, examples = max((int(y.max()) for y in ys if len(y)), default=0), sum(map(len, ys))
    if largest >= max(MOST_CLASSES, examples):
        raise FldiagError(f"{where}: label {largest:,} among {examples:,} examples", "number the classes 0, 1, 2, ...")
    return largest + 1


@contextlib.contextmanager
def _working_directory_importable() -> Iterator[None]:
    """A console script does not search the folder it is run from, where a user's factory usually lies."""
    here = os.getcwd()
    added = not {"", here} & set(sys.path)
    if added:
        sys.path.append(here)
    try:
        yield
    finally:
        if added and here in sys.path:
            sys.path.remove(here)


def _spell(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
