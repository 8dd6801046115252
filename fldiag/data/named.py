"""Sets of images known by name, and how each paper shows them to a model: one table, and the places where their files may lie.

The first variant of a set is its default. Every set may lie in ``<root>/<name>.npz``. torchvision's sets are also looked for in
torchvision's layout, and downloaded on request. MedMNIST's (Yang et al., Scientific Data 2023) are its official npz files, whose
validation split is trained on, as in the FedSOL experiments. CINIC-10 (Darlow et al., 2018) and the 200-class ImageNet
(Russakovsky et al., 2015) are folders with one folder a class: ``<root>/<name>/<split>/<class>/*``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fldiag.data.arrays import read_npz
from fldiag.data.dataset import Dataset
from fldiag.errors import FldiagError, first_line, unknown
from fldiag.sections import DataSection
from fldiag.seeding import numpy_rng


@dataclass(frozen=True)
class Preprocessing:
    """Mean and deviation per stored channel for pixels in [0, 1]; augmentation names; channel repetition."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: tuple[str, ...] = ()
    repeat: int = 1


class ImageSet(NamedTuple):
    """What a set shows, the shape of a stored image, its classes, its variants, and its source: a class of torchvision, or the
    folders of its splits, or else a file."""

    summary: str
    shape: tuple[int, int, int]
    classes: int
    variants: dict[str, Preprocessing]
    torchvision: str = ""
    splits: tuple[str, ...] = ()


CIFAR10 = ((0.49139968, 0.48215827, 0.44653124), (0.24703233, 0.24348505, 0.26158768))
CROP = ("crop4", "hflip")
#: Zero padding after normalisation, each step for half of the images.
LATE_CROP = ("normalise", "hflip", "crop4@0.5")
CINIC10 = Preprocessing(
    (0.47889522, 0.47227842, 0.43047404),
    (0.24205776, 0.23828046, 0.25874835),
    ("reflectcrop4", "hflip"),
)
#: Sets of MedMNIST.
colour = partial(
    ImageSet,
    shape=(3, 28, 28),
    variants={"fedsol": Preprocessing((0.5,) * 3, (0.5,) * 3, ("hflip",))},
)
gray = partial(
    ImageSet, shape=(1, 28, 28), variants={"fedsol": Preprocessing((0.5,), (0.5,), ("hflip",), 3)}
)
SETS = {
    "mnist": ImageSet(
        "MNIST digits, 28x28 gray (shown as 3 channels), 10 classes, 60,000 train / 10,000 test.",
        (1, 28, 28),
        10,
        {
            "fedsol": Preprocessing((0.1307,), (0.3081,), (*CROP, "cutout16"), 3),
            # The paper does not erase 16 x 16 of 28 x 28 pixels; its released code does.
            "fedsol_paper": Preprocessing((0.1307,), (0.3081,), CROP, 3),
        },
        "MNIST",
    ),
    "cifar10": ImageSet(
        "CIFAR-10 photographs, 32x32 colour, 10 classes, 50,000 train / 10,000 test.",
        (3, 32, 32),
        10,
        {
            "fedsol": Preprocessing(*CIFAR10, (*CROP, "cutout16")),
            "fedtoga": Preprocessing((0.491, 0.482, 0.447), (0.247, 0.243, 0.262), LATE_CROP),
            "fedproj": Preprocessing((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
            "fedalign": Preprocessing(*CIFAR10, CROP),
        },
        "CIFAR10",
    ),
    "cifar100": ImageSet(
        "CIFAR-100 photographs, 32x32 colour, 100 classes, 50,000 train / 10,000 test.",
        (3, 32, 32),
        100,
        {
            "fedalign": Preprocessing((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), CROP),
            "fedtoga": Preprocessing((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761), LATE_CROP),
            "fedproj": Preprocessing((0.507, 0.487, 0.441), (0.267, 0.256, 0.276)),
        },
        "CIFAR100",
    ),
    "svhn": ImageSet(
        "Street view house numbers, 32x32 colour, 10 classes, 73,257 train / 26,032 test.",
        (3, 32, 32),
        10,
        {
            "fedsol": Preprocessing(
                (0.4376821, 0.4437697, 0.47280442),
                (0.19803012, 0.20101562, 0.19703614),
                CROP,
            )
        },
        "SVHN",
    ),
    "cinic10": ImageSet(
        "CINIC-10 photographs, 32x32 colour, 10 classes, 90,000 train / 90,000 test; variants of other splits.",
        (3, 32, 32),
        10,
        {"fedsol": CINIC10, "fedproj": CINIC10, "enlarged": CINIC10},
        splits=("train", "valid", "test"),
    ),
    "imagenet200": ImageSet(
        "200 classes of ImageNet, 224x224 of stored 256x256 colour (54 GB), about 260,000 train / 10,000 test.",
        (3, 256, 256),
        200,
        {
            "fedalign": Preprocessing(
                (0.485, 0.456, 0.406),
                (0.229, 0.224, 0.225),
                ("resizedcrop224", "jitter0.4", "hflip"),
            )
        },
        splits=("train", "val"),
    ),
    "pathmnist": colour("PathMNIST colon tissue, 28x28 colour, 9 classes (MedMNIST).", classes=9),
    "dermamnist": colour("DermaMNIST skin lesions, 28x28 colour, 7 classes (MedMNIST).", classes=7),
    "octmnist": gray("OCTMNIST retinal scans, 28x28 gray, 4 classes (MedMNIST).", classes=4),
    "pneumoniamnist": gray("PneumoniaMNIST X-rays, 28x28 gray, 2 classes (MedMNIST).", classes=2),
    "retinamnist": colour(
        "RetinaMNIST photographs, 28x28 colour, 5 classes (MedMNIST).", classes=5
    ),
    "breastmnist": gray("BreastMNIST ultrasound, 28x28 gray, 2 classes (MedMNIST).", classes=2),
    "bloodmnist": colour("BloodMNIST blood cells, 28x28 colour, 8 classes (MedMNIST).", classes=8),
    "tissuemnist": gray("TissueMNIST kidney cells, 28x28 gray, 8 classes (MedMNIST).", classes=8),
    "organamnist": gray("OrganAMNIST axial CT, 28x28 gray, 11 classes (MedMNIST).", classes=11),
    "organcmnist": gray("OrganCMNIST coronal CT, 28x28 gray, 11 classes (MedMNIST).", classes=11),
    "organsmnist": gray("OrganSMNIST sagittal CT, 28x28 gray, 11 classes (MedMNIST).", classes=11),
}


def root_of(section: DataSection) -> Path | None:
    """The folder of data: ``data.root``, else $FLDIAG_DATA, else none."""
    path = section.root or os.environ.get("FLDIAG_DATA")
    return Path(path).expanduser() if path else None


def folder(section: DataSection) -> Path:
    """The folder of data. Raises FldiagError where none is set."""
    if path := root_of(section):
        return path
    raise FldiagError(
        f"data set {section.name!r} needs a data folder, and none is set",
        f"set FLDIAG_DATA (or data.root) to a folder that holds {section.name}.npz, or an empty one and pass --download",
        usage=True,
    )


def find(section: DataSection, download: bool) -> Dataset:
    """A set of ``SETS`` in its variant.

    Raises:
        FldiagError: An unknown variant, data that are not there, and files that hold something else.
    """
    name, spec = section.name, SETS[section.name]
    variant = section.variant or next(iter(spec.variants))
    if variant not in spec.variants:
        raise unknown(f"variant of data set {name!r}", variant, spec.variants)
    file = folder(section) / f"{name}.npz"
    if file.is_file():
        arrays: Sequence[Any] = read_npz(file, join_validation=not spec.torchvision)[0]
    elif spec.torchvision:
        arrays = _of_torchvision(spec.torchvision, file, download)
    elif spec.splits:
        arrays = _of_folders(spec, file.with_suffix(""), variant)
    else:
        raise FldiagError(f"data set {name!r}: no file {file}", "get it from medmnist.com (28x28)")
    dataset = Dataset.of(name, arrays)
    x = dataset.train_x
    if (x.dtype, x.shape[1:]) != (torch.uint8, spec.shape) or dataset.classes > spec.classes:
        raise FldiagError(
            f"data set {name!r}: the files under {file.parent} hold {dataset.classes} classes of {x.dtype} "
            f"{list(x.shape[1:])} (channels first), not {spec.classes} of uint8 {list(spec.shape)}",
            "put the original there, or load the file as npz:PATH",
        )
    return replace(dataset, classes=spec.classes, **vars(spec.variants[variant]))


def _of_torchvision(name: str, file: Path, download: bool) -> list[Any]:
    """The arrays. torchvision unpickles CIFAR's official batches only after their MD5 sums matched."""
    from torchvision import datasets

    arrays: list[Any] = []
    is_svhn = name == "SVHN"
    for split in ("train", "test"):
        part = split if is_svhn else split == "train"
        try:
            source = getattr(datasets, name)(file.parent, part, download=download)
        except Exception as error:  # whatever stops it, the user needs the places and the reason
            raise FldiagError(
                f"neither {file} nor torchvision's {name} under {file.parent} ({first_line(error)})",
                "pass --download, or set FLDIAG_DATA to the folder that has it",
            ) from None
        x, y = np.asarray(source.data), source.labels if is_svhn else source.targets
        arrays += [np.moveaxis(x, -1, 1) if x.shape[-1] == 3 else x, y]
    return arrays


def _of_folders(spec: ImageSet, home: Path, variant: str) -> Sequence[Tensor]:
    xs, ys, classes = zip(
        *(_decode(home / name, spec.shape[-1]) for name in spec.splits), strict=True
    )
    if any(names != classes[0] or len(names) != spec.classes for names in classes):
        raise FldiagError(f"{home} has not the same {spec.classes} class folders in every split")
    if variant == "fedproj":
        x, y = torch.cat(xs), torch.cat(ys)
        order = torch.from_numpy(numpy_rng(0, "cinic10 split").permutation(len(y)))
        sizes = [len(y) * share // 27 for share in (10, 3)]
        train, test = (part.sort().values for part in order[: sum(sizes)].split(sizes))
        return x[train], y[train], x[test], y[test]
    if variant == "enlarged":
        return torch.cat(xs[:-1]), torch.cat(ys[:-1]), xs[-1], ys[-1]
    return xs[0], ys[0], xs[-1], ys[-1]


def _decode(home: Path, side: int) -> tuple[Tensor, Tensor, list[str]]:
    """Pictures uint8 [n, 3, side, side] and classes [n] of a folder with one folder a class, and the names of these.

    A picture's shorter side is resized to ``side`` and the centre kept. Decoding takes seconds to an hour, so it is done once,
    into ``.fldiag/`` beside the folder, and the file is mapped into memory: a set may be larger than the memory. A digest of
    the names, sizes and times of all pictures is part of its name, so a changed folder gets a new file.
    """
    from torchvision import datasets, transforms

    steps = (transforms.Resize(side), transforms.CenterCrop(side), transforms.PILToTensor())
    try:
        pictures = datasets.ImageFolder(str(home), transforms.Compose(steps))
        stats = [(file, os.stat(file)) for file, _ in pictures.samples]
        mark = repr([(file, stat.st_size, stat.st_mtime_ns) for file, stat in stats]).encode()
        digest = hashlib.sha256(mark).hexdigest()[:16]
        path = home.parent / ".fldiag" / f"{home.name}-{side}-{digest}.npy"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}.part")
            array = np.lib.format.open_memmap(part, "w+", np.uint8, (len(pictures), 3, side, side))
            for i, (picture, _) in enumerate(pictures):
                array[i] = picture
            array.flush()
            os.replace(part, path)
    except Exception as error:  # Pillow can raise anything, and a disk be full
        raise FldiagError(f"cannot read the pictures {home}/<class>/* ({error})") from None
    x = torch.from_numpy(np.load(path, mmap_mode="c"))
    return x, torch.tensor(pictures.targets), pictures.classes
