"""Image sets known by name, in one file each: torchvision's (as npz, else in its layout, else downloaded on request) and
MedMNIST's (from their official npz files)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fldiag import registry
from fldiag.data.arrays import inputs, labels, read_npz
from fldiag.data.dataset import Dataset, preprocessed
from fldiag.data.preprocessing import PREPROCESSING, choose, sentence
from fldiag.errors import FldiagError, first_line

Arrays = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class ImageSet:
    """What a named set must look like, its class in torchvision, and its source in words."""

    name: str
    torchvision: str
    shape: tuple[int, int, int]
    classes: int
    summary: str
    source: str
    url: str


SETS = (
    ImageSet(
        "mnist",
        "MNIST",
        (1, 28, 28),
        10,
        "MNIST digits, 28x28 gray (shown as 3 channels), 10 classes, 60,000 train / 10,000 test.",
        "Y. LeCun, C. Cortes and C. Burges.",
        "yann.lecun.com/exdb/mnist",
    ),
    ImageSet(
        "cifar10",
        "CIFAR10",
        (3, 32, 32),
        10,
        "CIFAR-10 photographs, 32x32 colour, 10 classes, 50,000 train / 10,000 test.",
        "A. Krizhevsky, 2009.",
        "www.cs.toronto.edu/~kriz/cifar.html",
    ),
    ImageSet(
        "cifar100",
        "CIFAR100",
        (3, 32, 32),
        100,
        "CIFAR-100 photographs, 32x32 colour, 100 classes, 50,000 train / 10,000 test.",
        "A. Krizhevsky, 2009.",
        "www.cs.toronto.edu/~kriz/cifar.html",
    ),
    ImageSet(
        "svhn",
        "SVHN",
        (3, 32, 32),
        10,
        "Street view house numbers, 32x32 colour, 10 classes, 73,257 train / 26,032 test.",
        "Y. Netzer et al., 2011.",
        "ufldl.stanford.edu/housenumbers",
    ),
)


def register(
    name: str,
    build: Any,
    summary: str,
    text: str,
) -> None:
    """Registers ``build(root, download, variant)`` under ``name`` with a description that lists the variants."""
    build.__doc__ = f"{summary}\n\n{text} {sentence(name)}"
    build.__name__ = name
    registry.dataset(name)(build)


def _builder(spec: ImageSet) -> Any:
    def build(
        root: str | None = None, download: bool = False, variant: str | None = None
    ) -> Dataset:
        return find(spec, root, download, variant)

    return build


for _spec in SETS:
    register(
        _spec.name,
        _builder(_spec),
        _spec.summary,
        _spec.source,
    )


def folder(root: str | os.PathLike[str] | None) -> Path | None:
    """The data folder: the argument, else $FLDIAG_DATA, else none."""
    path = root or os.environ.get("FLDIAG_DATA")
    return Path(path).expanduser() if path else None


def need_folder(name: str, root: str | os.PathLike[str] | None, holds: str) -> Path:
    """The data folder. Raises FldiagError, telling what it should hold, where none is set."""
    at = folder(root)
    if at is None:
        raise FldiagError(
            f"data set {name!r} needs a data folder, and none is set",
            f"set FLDIAG_DATA (or data.root) to a folder that holds {holds}",
            usage=True,
        )
    return at


def find(
    spec: ImageSet, root: str | os.PathLike[str] | None, download: bool, variant: str | None = None
) -> Dataset:
    """The data set ``spec`` from ``<root>/<name>.npz``, torchvision's layout under root, or a download.

    Raises FldiagError for an unknown variant, and one that lists every place looked at and how to get the
    data, or says what is wrong with a file that is there.
    """
    choose(spec.name, variant)
    at = need_folder(
        spec.name,
        root,
        f"{spec.name}.npz or torchvision's {spec.torchvision} files, "
        "or to an empty one and pass --download",
    )
    npz = at / f"{spec.name}.npz"
    if npz.exists():
        return build(spec.name, spec.shape, spec.classes, read_npz(npz), str(npz), variant)
    arrays, why = _torchvision(spec, at, download)
    if arrays is None:
        tried = " and its download failed" if download else ""
        raise FldiagError(
            f"data set {spec.name!r} was not found{tried}: looked for {npz} and for "
            f"torchvision's {spec.torchvision} files under {at} ({why})",
            f"put {spec.name}.npz there (uint8 arrays train_images, train_labels, test_images, "
            "test_labels), set FLDIAG_DATA to the folder that has it, or pass --download "
            f"(the official files are at {spec.url})",
        )
    return build(
        spec.name,
        spec.shape,
        spec.classes,
        arrays,
        f"torchvision's {spec.torchvision} under {at}",
        variant,
    )


def build(
    name: str,
    shape: tuple[int, ...],
    classes: int,
    arrays: Arrays,
    source: str,
    variant: str | None,
) -> Dataset:
    """The arrays as data set ``name``. Raises FldiagError where they are not uint8 of that shape and labels."""
    for split, x, y in (("train", *arrays[:2]), ("test", *arrays[2:])):
        kind = (str(x.dtype).removeprefix("torch."), tuple(x.shape[1:]))
        if kind != ("uint8", shape):
            raise FldiagError(
                f"{source}: {split} images are {kind[0]} {kind[1]} (channels first), and "
                f"{name} has uint8 {shape}",
                "store the original pixels, or load the file as npz:PATH",
            )
        if int(y.max()) >= classes:
            raise FldiagError(
                f"{source}: {split} labels go up to {int(y.max())}, and {name} has "
                f"{classes} classes",
                "store labels from 0, or load the file as npz:PATH",
            )
    _, preprocessing = choose(name, variant)
    return preprocessed(name, arrays, classes, preprocessing)


def _torchvision(spec: ImageSet, at: Path, download: bool) -> tuple[Arrays | None, str]:
    """The arrays, or None and torchvision's reason.

    torchvision unpickles CIFAR's official batches only after their MD5 sums matched.
    """
    from torchvision import datasets

    out: list[Tensor] = []
    for train in (True, False):
        split: dict[str, Any] = (
            {"split": "train" if train else "test"}
            if spec.torchvision == "SVHN"
            else {"train": train}
        )
        try:
            source = getattr(datasets, spec.torchvision)(str(at), download=download, **split)
        except (
            Exception
        ) as error:  # whatever stops it, the user needs the list of places and this reason
            return None, first_line(error).strip()
        images = np.asarray(source.data)
        if images.ndim == 3:
            images = images[:, None]
        elif images.shape[1:] != spec.shape:
            images = np.moveaxis(images, -1, 1)
        target = source.labels if spec.torchvision == "SVHN" else source.targets
        out += [inputs(images, spec.name), labels(target, spec.name)]
    return (out[0], out[1], out[2], out[3]), ""


# MedMNIST (Yang et al., Scientific Data 2023), the single-label 2-D sets. As in the FedSOL experiments the training split is the
# official one and the validation split together; a file without val_images and val_labels is taken as it is. ChestMNIST is
# not here: its labels are not one class an image.

#: name -> (what it shows, classes, examples to train and to test on)
MEDMNIST: dict[str, tuple[str, int, tuple[int, int]]] = {
    "pathmnist": ("PathMNIST colon tissue", 9, (100_000, 7_180)),
    "dermamnist": ("DermaMNIST skin lesions", 7, (8_010, 2_005)),
    "octmnist": ("OCTMNIST retinal scans", 4, (108_309, 1_000)),
    "pneumoniamnist": ("PneumoniaMNIST chest X-rays", 2, (5_232, 624)),
    "retinamnist": ("RetinaMNIST fundus photographs", 5, (1_200, 400)),
    "breastmnist": ("BreastMNIST ultrasound", 2, (624, 156)),
    "bloodmnist": ("BloodMNIST blood cells", 8, (13_671, 3_421)),
    "tissuemnist": ("TissueMNIST kidney cortex cells", 8, (189_106, 47_280)),
    "organamnist": ("OrganAMNIST axial abdominal CT", 11, (41_000, 17_800)),
    "organcmnist": ("OrganCMNIST coronal abdominal CT", 11, (15_400, 8_200)),
    "organsmnist": ("OrganSMNIST sagittal abdominal CT", 11, (16_400, 8_800)),
}
MEDMNIST_SOURCE = "medmnist.com (Zenodo record 10519652)"


def find_medmnist(
    name: str,
    root: str | os.PathLike[str] | None = None,
    download: bool = False,
    variant: str | None = None,
) -> Dataset:
    """The set ``name`` from ``<root>/<name>.npz``. Raises FldiagError for a missing or foreign file."""
    choose(name, variant)
    at = need_folder(name, root, f"{name}.npz from {MEDMNIST_SOURCE}")
    path = at / f"{name}.npz"
    if not path.exists():
        note = " (fldiag does not download it)" if download else ""
        raise FldiagError(
            f"data set {name!r} was not found{note}: looked for {path}",
            f"get {name}.npz (28x28) from {MEDMNIST_SOURCE} and put it there, or set FLDIAG_DATA to the "
            "folder that has it",
        )
    channels = len(PREPROCESSING[name][choose(name, variant)[0]].mean)
    return build(
        name,
        (channels, 28, 28),
        MEDMNIST[name][1],
        read_npz(path, join_val=True),
        str(path),
        variant,
    )


def _medmnist_builder(name: str) -> Any:
    def build_set(
        root: str | None = None, download: bool = False, variant: str | None = None
    ) -> Dataset:
        return find_medmnist(name, root, download, variant)

    return build_set


for _name, (_subject, _classes, _sizes) in MEDMNIST.items():
    _kind = (
        "colour" if len(PREPROCESSING[_name]["fedsol"].mean) == 3 else "gray (shown as 3 channels)"
    )
    _about = "about " if _name.startswith("organ") else ""  # their releases differ by a few
    register(
        _name,
        _medmnist_builder(_name),
        f"{_subject}, 28x28 {_kind}, {_classes} classes, {_about}{_sizes[0]:,} train / "
        f"{_sizes[1]:,} test (MedMNIST).",
        "J. Yang et al., MedMNIST v2, 2023. Training is the official training and validation split.",
    )
