"""Image sets known by name: found as npz, else in torchvision's layout, else downloaded when asked to."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fldiag import registry
from fldiag.data.arrays import inputs, labels, read_npz
from fldiag.data.dataset import Dataset
from fldiag.errors import FldiagError

Arrays = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class ImageSet:
    """What a named set must look like, how it is normalised and augmented, and its class in torchvision."""

    name: str
    torchvision: str
    shape: tuple[int, int, int]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: tuple[str, ...]
    repeat: int = 1


MNIST = ImageSet("mnist", "MNIST", (1, 28, 28), 10, (0.1307,), (0.3081,),
                 ("crop4", "hflip", "cutout16"), repeat=3)
CIFAR10 = ImageSet("cifar10", "CIFAR10", (3, 32, 32), 10, (0.49139968, 0.48215827, 0.44653124),
                   (0.24703233, 0.24348505, 0.26158768), ("crop4", "hflip", "cutout16"))
CIFAR100 = ImageSet("cifar100", "CIFAR100", (3, 32, 32), 100, (0.5071, 0.4865, 0.4409),
                    (0.2673, 0.2564, 0.2762), ("crop4", "hflip"))
SVHN = ImageSet("svhn", "SVHN", (3, 32, 32), 10, (0.4376821, 0.4437697, 0.47280442),
                (0.19803012, 0.20101562, 0.19703614), ("crop4", "hflip"))


@registry.dataset("mnist")
def mnist(root: str | None = None, download: bool = False) -> Dataset:
    """MNIST digits, 28x28 gray (shown as 3 channels), 10 classes, 60,000 train / 10,000 test.

    Y. LeCun, C. Cortes and C. Burges. Normalisation and augmentation of the FedSOL experiments.
    """
    return find(MNIST, root, download)


@registry.dataset("cifar10")
def cifar10(root: str | None = None, download: bool = False) -> Dataset:
    """CIFAR-10 photographs, 32x32 colour, 10 classes, 50,000 train / 10,000 test.

    A. Krizhevsky, 2009. Normalisation and augmentation of the FedSOL experiments.
    """
    return find(CIFAR10, root, download)


@registry.dataset("cifar100")
def cifar100(root: str | None = None, download: bool = False) -> Dataset:
    """CIFAR-100 photographs, 32x32 colour, 100 classes, 50,000 train / 10,000 test.

    A. Krizhevsky, 2009. Normalisation and augmentation of the FedAlign experiments.
    """
    return find(CIFAR100, root, download)


@registry.dataset("svhn")
def svhn(root: str | None = None, download: bool = False) -> Dataset:
    """Street view house numbers, 32x32 colour, 10 classes, 73,257 train / 26,032 test.

    Y. Netzer et al., 2011. Normalisation and augmentation of the FedSOL experiments.
    """
    return find(SVHN, root, download)


def folder(root: str | os.PathLike[str] | None) -> Path | None:
    """The data folder: the argument, else $FLDIAG_DATA, else none."""
    chosen = root or os.environ.get("FLDIAG_DATA")
    return Path(chosen).expanduser() if chosen else None


def find(spec: ImageSet, root: str | os.PathLike[str] | None, download: bool) -> Dataset:
    """The data set ``spec`` from ``<root>/<name>.npz``, torchvision's layout under root, or a download.

    Raises FldiagError that lists every place looked at and how to get the data, or says what is wrong with a
    file that is there.
    """
    at = folder(root)
    if at is None:
        raise FldiagError(f"data set {spec.name!r} needs a data folder, and none is set",
                          f"set FLDIAG_DATA (or data.root) to a folder that holds {spec.name}.npz or "
                          f"torchvision's {spec.torchvision} files, or to an empty one and pass --download",
                          usage=True)
    npz = at / f"{spec.name}.npz"
    if npz.exists():
        return _build(spec, read_npz(npz), str(npz))
    arrays, why = _torchvision(spec, at, download)
    if arrays is None:
        tried = " and its download failed" if download else ""
        raise FldiagError(f"data set {spec.name!r} was not found{tried}: looked for {npz} and for "
                          f"torchvision's {spec.torchvision} files under {at} ({why})",
                          f"put {spec.name}.npz there (uint8 arrays train_images, train_labels, test_images, "
                          "test_labels), set FLDIAG_DATA to the folder that has it, or pass --download")
    return _build(spec, arrays, f"torchvision's {spec.torchvision} under {at}")


def _torchvision(spec: ImageSet, at: Path, download: bool) -> tuple[Arrays | None, str]:
    """The arrays, or None and torchvision's reason.

    torchvision unpickles CIFAR's official batches only after their MD5 sums matched.
    """
    from torchvision import datasets

    out: list[Tensor] = []
    for train in (True, False):
        split: dict[str, Any] = {"split": "train" if train else "test"} if spec.torchvision == "SVHN" \
            else {"train": train}
        try:
            source = getattr(datasets, spec.torchvision)(str(at), download=download, **split)
        except Exception as error:  # whatever stops it, the user needs the list of places and this reason
            return None, (str(error) or type(error).__name__).splitlines()[0].strip()
        images = np.asarray(source.data)
        if images.ndim == 3:
            images = images[:, None]
        elif images.shape[1:] != spec.shape:
            images = np.moveaxis(images, -1, 1)
        target = source.labels if spec.torchvision == "SVHN" else source.targets
        out += [inputs(images, spec.name), labels(target, spec.name)]
    return (out[0], out[1], out[2], out[3]), ""


def _build(spec: ImageSet, arrays: Arrays, where: str) -> Dataset:
    for split, x, y in (("train", *arrays[:2]), ("test", *arrays[2:])):
        found = (str(x.dtype).removeprefix("torch."), tuple(x.shape[1:]))
        if found != ("uint8", spec.shape):
            raise FldiagError(f"{where}: {split} images are {found[0]} {found[1]} (channels first), and "
                              f"{spec.name} has uint8 {spec.shape}",
                              "store the original pixels, or load the file as npz:PATH")
        if int(y.max()) >= spec.classes:
            raise FldiagError(f"{where}: {split} labels go up to {int(y.max())}, and {spec.name} has "
                              f"{spec.classes} classes", "store labels from 0, or load the file as npz:PATH")
    return Dataset(spec.name, *arrays, classes=spec.classes, mean=spec.mean, std=spec.std,
                   augment=spec.augment, repeat=spec.repeat)
