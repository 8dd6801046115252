"""Sets that come as folders of pictures, one folder a class: CINIC-10 and the 200-class ImageNet.

Decoding takes seconds to an hour, so it is done once: each split is packed into one uint8 array file
[n, 3, side, side] in the set's own folder, ``.fldiag/<split>-<side>-<digest>.npy``, written under another name
and renamed when complete. Later loads map that file into memory; pages are read as batches need them, so a set
may be larger than the memory. The digest is over the names, sizes and times of all pictures: a changed folder
gets a new file. The files may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fldiag.data.dataset import Dataset, preprocessed
from fldiag.data.images import need_folder, register
from fldiag.data.preprocessing import choose
from fldiag.errors import FldiagError, first_line
from fldiag.seeding import numpy_rng

Progress = Callable[[int, int, str], None]
Split = tuple[Tensor, Tensor]
SUFFIXES = (".png", ".jpg", ".jpeg")
CHUNK = 256


@dataclass(frozen=True)
class FolderSet:
    """A set's name, the folder names it goes by, its splits on disk, its number of classes, its source."""

    name: str
    folders: tuple[str, ...]
    splits: tuple[str, ...]
    classes: int
    source: str


CINIC10 = FolderSet(
    "cinic10",
    ("cinic10", "CINIC-10", "CINIC10"),
    ("train", "valid", "test"),
    10,
    "CINIC-10.tar.gz from datashare.ed.ac.uk/handle/10283/3192, unpacked",
)
IMAGENET200 = FolderSet(
    "imagenet200",
    ("imagenet200", "ImageNet-200", "ImageNet200"),
    ("train", "val"),
    200,
    "ILSVRC2012 from image-net.org, the folders of 200 classes in train and in val",
)


def cinic10(
    root: str | None = None,
    download: bool = False,
    variant: str | None = None,
    progress: Progress | None = None,
) -> Dataset:
    variant, preprocessing = choose("cinic10", variant)
    splits = ("train", "test") if variant == "fedsol" else CINIC10.splits
    parts = _read(CINIC10, splits, 32, True, root, download, progress)
    if variant == "enlarged":
        parts = [_joined(parts[:2]), parts[2]]
    elif variant == "fedproj":
        x, y = _joined(parts)
        order = torch.from_numpy(numpy_rng(0, "cinic10 split").permutation(len(y)))
        train, test = len(y) * 10 // 27, len(y) * 3 // 27
        parts = [
            (x[at], y[at])
            for at in (order[:train].sort().values, order[train : train + test].sort().values)
        ]
    arrays = (*parts[0], *parts[1])
    return preprocessed(CINIC10.name, arrays, CINIC10.classes, preprocessing)


def imagenet200(
    root: str | None = None,
    download: bool = False,
    variant: str | None = None,
    progress: Progress | None = None,
) -> Dataset:
    _, preprocessing = choose("imagenet200", variant)
    parts = _read(
        IMAGENET200,
        IMAGENET200.splits,
        preprocessing.stored_side or 256,
        False,
        root,
        download,
        progress,
    )
    arrays = (*parts[0], *parts[1])
    return preprocessed(IMAGENET200.name, arrays, IMAGENET200.classes, preprocessing)


register(
    "cinic10",
    cinic10,
    "CINIC-10 photographs, 32x32 colour, 10 classes, 90,000 train / 90,000 test.",
    """L. Darlow et al., 2018. Folders <root>/cinic10/{train,valid,test}/<class>/*.png. The official validation
split is left out; variant fedproj draws 100,000 / 30,000 at random from all 270,000 (fixed), and enlarged trains on
train and valid together, 180,000.""",
)
register(
    "imagenet200",
    imagenet200,
    "200 classes of ImageNet, 224x224 colour, about 260,000 train / 10,000 test.",
    """O. Russakovsky et al., 2015. Folders <root>/imagenet200/{train,val}/<class>/*. Stored as squares: the
shorter side resized to 256, the central 256x256 kept (about 54 GB on disk, mapped, not held in memory), so evaluation
is exactly resize 256 and centre crop 224, while the random resized crop of training draws from the stored square
instead of the whole picture. Variant small shows 64x64 of stored 72x72 (4.2 GB), which no paper does.""",
)


def scan(folder: Path) -> tuple[list[str], list[str], Tensor, str]:
    """Class names, picture paths relative to ``folder`` (both sorted), their classes int64 [n], a digest of both,
    of the sizes and of the times. Raises FldiagError for a folder without pictures in class folders."""
    from torchvision.datasets.folder import make_dataset

    classes = sorted(e.name for e in os.scandir(folder) if e.is_dir() and e.name[0] != ".")
    if not classes:
        raise FldiagError(
            f"{folder} has no class folders", f"put the pictures into {folder}/<class>/"
        )
    try:
        pictures = make_dataset(folder, {name: i for i, name in enumerate(classes)}, SUFFIXES)
    except FileNotFoundError as error:
        raise FldiagError(
            f"{folder}: {first_line(error)}",
            "put the pictures of the class there, or remove the folder",
        ) from None
    files = [Path(path).relative_to(folder).as_posix() for path, _ in pictures]
    digest = hashlib.sha256()
    for file in files:
        stat = (folder / file).stat()
        digest.update(f"{file}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return classes, files, torch.tensor([label for _, label in pictures]), digest.hexdigest()[:16]


def packed_pictures(
    folder: Path,
    files: list[str],
    digest: str,
    side: int,
    *,
    exact: bool = False,
    progress: Progress | None = None,
) -> Tensor:
    """The pictures as a mapped uint8 tensor [n, 3, side, side], decoded on the first call only.

    ``exact``: pictures must have side x side pixels already; otherwise the shorter side is resized to ``side``
    and the centre cut. Writing into the tensor does not reach the file.

    Raises FldiagError for a picture that cannot be read, a folder that cannot be written, and too small a disk.
    """
    path = folder.parent / ".fldiag" / f"{folder.name}-{side}-{digest}.npy"
    shape = (len(files), 3, side, side)
    if not _complete(path, shape):
        with _writing(path, int(np.prod(shape))) as temporary:
            array = np.lib.format.open_memmap(temporary, "w+", np.uint8, shape)
            text = f"packing {folder}"
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                for start in range(0, len(files), CHUNK):
                    chunk = files[start : start + CHUNK]
                    for i, pixels in enumerate(
                        pool.map(lambda f: decode(folder / f, side, exact=exact), chunk)
                    ):
                        array[start + i] = pixels
                    if progress:
                        progress(start + len(chunk), len(files), text)
            array.flush()
            del array
    return torch.from_numpy(np.load(path, mmap_mode="c"))


def decode(path: Path, side: int, *, exact: bool = False) -> np.ndarray:
    """One picture as uint8 [3, side, side]."""
    from PIL import Image
    from torchvision.transforms import functional as F

    try:
        with Image.open(path) as file:
            picture = file.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise FldiagError(
            f"{path} is not a readable picture ({first_line(error)})",
            "fetch it again, or remove it",
        ) from None
    if exact and picture.size != (side, side):
        raise FldiagError(
            f"{path} has {picture.size[0]}x{picture.size[1]} pixels, not {side}x{side}",
            "put the original pictures there",
        )
    if not exact:
        picture = F.center_crop(F.resize(picture, side), side)
    return np.moveaxis(np.asarray(picture), -1, 0)


def _read(
    spec: FolderSet,
    splits: tuple[str, ...],
    side: int,
    exact: bool,
    root: Any,
    download: bool,
    progress: Progress | None,
) -> list[Split]:
    """Pictures and labels of each split. Raises FldiagError where a split is not there or has other classes."""
    layout = f"{spec.folders[0]}/{{{','.join(splits)}}}/<class>/"
    at = need_folder(spec.name, root, f"{layout} (get {spec.source})")
    home = next((at / name for name in spec.folders if (at / name).is_dir()), None)
    missing = [split for split in splits if home is None or not (home / split).is_dir()]
    if home is None or missing:
        looked = (
            ", ".join(str(at / name) for name in spec.folders)
            if home is None
            else ", ".join(str(home / split) for split in missing)
        )
        note = " (fldiag does not download it)" if download else ""
        raise FldiagError(
            f"data set {spec.name!r} was not found{note}: there is no {looked}",
            f"get {spec.source}, and put it under {at} as {layout}, or set FLDIAG_DATA to the "
            "folder that has it",
        )
    parts: list[Split] = []
    names: list[str] | None = None
    for split in splits:
        classes, files, labels, digest = scan(home / split)
        if len(classes) != spec.classes or classes != (names or classes):
            fault = (
                f"{len(classes)} class folders"
                if len(classes) != spec.classes
                else "other class folders than " + splits[0]
            )
            raise FldiagError(
                f"{home / split} has {fault}, and {spec.name} has the same {spec.classes} in each split",
                "put the folder of every class there and nothing else",
            )
        names = classes
        parts.append(
            (
                packed_pictures(home / split, files, digest, side, exact=exact, progress=progress),
                labels,
            )
        )
    return parts


def _joined(parts: list[Split]) -> Split:
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def _complete(path: Path, shape: tuple[int, ...]) -> bool:
    try:
        array = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return False
    return array.shape == shape and array.dtype == np.uint8


@contextmanager
def _writing(path: Path, size: int) -> Iterator[Path]:
    """A file beside ``path`` that takes its name when the block ends well and is removed when it does not."""
    remedy = f"make {path.parent.parent} writable with {size / 1e9:.1f} GB free, or link its splits into a folder that is"
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(exist_ok=True)
        free = shutil.disk_usage(path.parent).free
        if free < size:
            raise FldiagError(
                f"{path.parent} has {free / 1e9:.1f} GB free, and the packed pictures take "
                f"{size / 1e9:.1f} GB",
                remedy,
            )
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise FldiagError(f"cannot write {path} ({error.strerror or error})", remedy) from None
    finally:
        with suppress(OSError):
            temporary.unlink()
