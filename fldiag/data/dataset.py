"""What a data set is: raw arrays kept small, and the one way to turn them into model inputs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor

from fldiag.data import augment
from fldiag.data.preprocessing import Preprocessing, describe_inputs
from fldiag.errors import FldiagError
from fldiag.losses import IGNORED

if TYPE_CHECKING:
    from fldiag.data.arrays import Packed
    from fldiag.data.words import Text, Words

TOKENS = (torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test split of a classification or regression problem; the test split may be empty.

    ``train_x``, ``test_x``: uint8 [n, C, H, W] pixels 0..255, float32 [n, d] / [n, C, H, W], or token numbers int32 or int64
    [n, T]; ``words`` made them of ``texts`` (training texts, then test texts), where these are known.
    ``train_y``, ``test_y``: int64 [n] labels in 0..classes-1, or float32 [n, classes] regression targets.
    ``mean``, ``std``: one number a channel (a feature, for [n, d]) for pixels in [0, 1]; empty: uint8 is
    divided by 255 and nothing else. ``augment``: names from ``fldiag.data.augment``, applied to training
    batches only when a generator is given. ``repeat``: channels are repeated this often for the model, so
    that gray images fit a network for colour. ``side``: the model sees side x side pixels of larger stored
    images: the central square, or what a ``resizedcrop`` among the augmentations makes of the whole.
    ``packed``: the rows of whole numbers are inputs of several tensors, laid out so. ``remarks``: how the examples were read.

    Raises FldiagError where these do not fit together.
    """

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    augment: tuple[str, ...] = ()
    repeat: int = 1
    side: int | None = None
    words: Words | None = None
    texts: tuple[Text, ...] = field(default=(), repr=False)
    packed: Packed | None = None
    remarks: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            object.__setattr__(self, name, tuple(float(v) for v in getattr(self, name)))
        object.__setattr__(self, "augment", tuple(self.augment))
        for split in ("train", "test"):
            self._check_split(split, getattr(self, f"{split}_x"), getattr(self, f"{split}_y"))
        self._check_that_splits_agree()
        self._check_normalisation()
        self._check_image_options()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one model input, such as (3, 28, 28) or (4,)."""
        first, *rest = self.train_x.shape[1:]
        if self.side is not None:
            rest = [self.side, self.side]
        return (first * self.repeat, *rest)

    @property
    def tokens(self) -> bool:
        """Whether the inputs are token numbers."""
        return self.train_x.dtype in TOKENS

    @property
    def tested(self) -> bool:
        """Whether there are test examples."""
        return len(self.test_y) > 0

    @property
    def evaluation(self) -> tuple[str, Tensor, Tensor]:
        """The split by which models are judged, with its inputs and targets: test, and train where there are no test examples."""
        return (
            ("test", self.test_x, self.test_y)
            if self.tested
            else ("train", self.train_x, self.train_y)
        )

    @property
    def regression(self) -> bool:
        """Whether an example has no label of its own, and models no accuracy: targets are numbers, or labels of positions."""
        return self.train_y.is_floating_point() or self.dense

    @property
    def dense(self) -> bool:
        """Whether targets are labels of the positions of an example (tokens, pixels)."""
        return self.train_y.ndim > 1 and not self.train_y.is_floating_point()

    @property
    def scaling(self) -> str:
        """What the stored numbers become before a model sees them, in words."""
        if self.words is not None:
            return f"texts as {self.words.length} tokens of a vocabulary of {self.words.size}"
        if self.packed is not None:  # whose rows are the bits of what the model gets
            kind = ", ".join(dict.fromkeys(kind for *_, kind in self.packed.fields))
            return describe_inputs(kind)
        kind = str(self.train_x.dtype).removeprefix("torch.")
        return describe_inputs(kind, self.mean, self.std)

    def normalise(self, raw: Tensor) -> Tensor:
        """A stored batch [n, ...] as model inputs [n, *shape], float32 or int64 tokens: the transform of evaluation."""
        if raw.dtype in TOKENS:
            return raw.long()
        return self._repeat(self._standardise(self._centre(raw)))

    def batch(self, index: Tensor, generator: Generator | None = None) -> Tensor:
        """Model inputs [len(index), *shape] of the training examples ``index`` (int64 [n]).

        Augmented when a generator is given and the data set names augmentations; then the same generator
        state gives the same batch.
        """
        raw = self.train_x.index_select(0, index.to(self.train_x.device))
        if generator is None or not self.augment:
            return self.normalise(raw)
        before, after = augment.plan(self.augment)
        if not any(step.kind == "resizedcrop" for step in before + after):
            raw = self._centre(raw)
        x = self._standardise(augment.apply(raw, before, generator))
        return self._repeat(augment.apply(x, after, generator))

    def to(self, device: str | torch.device) -> Dataset:
        """The same data on a device."""
        moved = replace(
            self,
            **{
                key: getattr(self, key).to(device)
                for key in ("train_x", "train_y", "test_x", "test_y")
            },
        )
        if "_fingerprint" in self.__dict__:
            moved.__dict__["_fingerprint"] = self._fingerprint
        return moved

    def fingerprint(self) -> str:
        """16 hex digits that name the data: SHA-256 over the four arrays and the normalisation.

        Independent of the name, the device and the augmentation; computed once.
        """
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        description = (
            self.classes,
            self.mean,
            self.std,
            self.repeat,
            *([] if self.side is None else [self.side]),
            *([] if self.words is None else [self.words.spec]),
            *([] if self.packed is None else [self.packed.text()]),
        )
        digest = hashlib.sha256(repr(description).encode())
        for array in (self.train_x, self.train_y, self.test_x, self.test_y):
            digest.update(f"{tuple(array.shape)} {array.dtype}".encode())
            digest.update(array.detach().cpu().contiguous().numpy().data)
        return digest.hexdigest()[:16]

    def _centre(self, raw: Tensor) -> Tensor:
        if self.side is None:
            return raw
        # Rounded halves, as torchvision's CenterCrop.
        top, left = (round((length - self.side) / 2) for length in raw.shape[2:])
        return raw[:, :, top : top + self.side, left : left + self.side]

    def _standardise(self, raw: Tensor) -> Tensor:
        # Divisions rather than one multiply-add, so that the bits equal torchvision's ToTensor and Normalize.
        x = raw.to(torch.float32).div_(255) if raw.dtype == torch.uint8 else raw
        if not self.mean:
            return x
        mean, std = (_column(v, x.device, x.ndim) for v in (self.mean, self.std))
        return x.sub(mean).div_(std)

    def _repeat(self, x: Tensor) -> Tensor:
        return x if self.repeat == 1 else x.repeat(1, self.repeat, *(1,) * (x.ndim - 2))

    def _error(self, message: str, remedy: str) -> FldiagError:
        return FldiagError(f"data set {self.name!r}: {message}", remedy)

    def _check_split(self, split: str, x: Tensor, y: Tensor) -> None:
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            odd = x if not isinstance(x, Tensor) else y
            raise self._error(f"{split} split holds a {type(odd).__name__}", "give torch tensors")
        self._check_inputs(split, x)
        if len(y) != len(x) or (split == "train" and len(x) == 0):
            raise self._error(
                f"{split} split has {len(x)} inputs and {len(y)} labels",
                "give one label per input, and at least one input",
            )
        if y.is_floating_point():
            self._check_targets(split, y, len(x))
        else:
            self._check_labels(split, y)

    def _check_inputs(self, split: str, x: Tensor) -> None:
        if x.ndim == 2 and x.dtype in TOKENS and x.shape[1]:
            if (
                self.words is not None
                and len(x)
                and (int(x.min()) < 0 or int(x.max()) >= self.words.size)
            ):
                raise self._error(
                    f"{split} tokens go from {int(x.min())} to {int(x.max())}",
                    f"use 0 to {self.words.size - 1}",
                )
            return
        if x.ndim not in (2, 4) or x.dtype not in (torch.uint8, torch.float32) or 0 in x.shape[1:]:
            raise self._error(
                f"{split} inputs are {_spell(x)}",
                "use uint8 [n, C, H, W], float32 [n, C, H, W] or float32 [n, d]",
            )
        if x.ndim == 2 and x.dtype == torch.uint8:
            raise self._error(
                f"{split} inputs are {_spell(x)}, and uint8 means pixels",
                "convert features to float32",
            )
        if x.is_floating_point() and not bool(torch.isfinite(x).all()):
            bad = int((~torch.isfinite(x)).flatten(1).any(1).nonzero()[0])
            raise self._error(
                f"{split} input {bad} holds a value that is not finite", "clean the data"
            )

    def _check_targets(self, split: str, y: Tensor, n: int) -> None:
        fits = y.dtype == torch.float32 and y.shape == (n, self.classes)
        if not fits or not bool(torch.isfinite(y).all()):
            raise self._error(
                f"{split} targets are {_spell(y)} for {self.classes} outputs",
                "use finite float32 [n, classes] for regression, int64 [n] for classes",
            )

    def _check_labels(self, split: str, y: Tensor) -> None:
        if y.dtype != torch.int64 or y.ndim < 1:
            raise self._error(f"{split} labels are {_spell(y)}", "use int64 [n]")
        y = y[y != IGNORED] if y.ndim > 1 else y
        if len(y) and (int(y.min()) < 0 or int(y.max()) >= self.classes):
            odd = int(y.min()) if int(y.min()) < 0 else int(y.max())
            raise self._error(
                f"{split} labels hold {odd}, outside 0..{self.classes - 1}",
                "number the classes from 0, or correct the number of classes",
            )

    def _check_that_splits_agree(self) -> None:
        if (
            self.train_x.shape[1:] != self.test_x.shape[1:]
            or self.train_x.dtype != self.test_x.dtype
        ):
            raise self._error(
                f"train inputs are {_spell(self.train_x)}, test inputs {_spell(self.test_x)}",
                "give both splits the same input shape and dtype",
            )
        if self.train_y.dtype != self.test_y.dtype:
            raise self._error(
                f"training labels are {self.train_y.dtype}, test labels {self.test_y.dtype}",
                "give both splits the same kind of labels",
            )

    def _check_normalisation(self) -> None:
        channels = self.train_x.shape[1]
        if len(self.mean) != len(self.std) or len(self.mean) not in (0, channels):
            raise self._error(
                f"{len(self.mean)} means, {len(self.std)} deviations and {channels} channels",
                "give one mean and one std per channel, or neither",
            )
        if not all(value > 0 for value in self.std):
            raise self._error(
                f"std {self.std} is not positive", "use 1.0 for a channel that is constant"
            )

    def _check_image_options(self) -> None:
        images = self.train_x.ndim == 4
        if not images and (self.augment or self.repeat != 1):
            raise self._error(
                "augment and repeat are for images, and the inputs are " + _spell(self.train_x),
                "leave them out",
            )
        if self.repeat < 1:
            raise self._error(
                f"repeat = {self.repeat}", "use 1, or 3 for gray images and a colour model"
            )
        if self.side is not None and not (images and 1 <= self.side <= min(self.train_x.shape[2:])):
            raise self._error(
                f"side = {self.side} for inputs {_spell(self.train_x)}",
                "use images of at least that height and width",
            )
        sizes = {
            step.size
            for part in augment.plan(self.augment)
            for step in part
            if step.kind == "resizedcrop"
        }
        if sizes and sizes != set(self.shape[1:]):
            raise self._error(
                f"resizedcrop{max(sizes)} for a model that sees {list(self.shape[1:])} pixels",
                "set side to the size of the crop",
            )


def preprocessed(
    name: str, arrays: tuple[Tensor, ...], classes: int, preprocessing: Preprocessing
) -> Dataset:
    """Pictures and labels of both splits, with the normalisation and augmentation of a named set."""
    train_x, train_y, test_x, test_y = arrays
    return Dataset(
        name,
        train_x,
        train_y,
        test_x,
        test_y,
        classes=classes,
        mean=preprocessing.mean,
        std=preprocessing.std,
        augment=preprocessing.augment,
        repeat=preprocessing.repeat,
        side=preprocessing.side,
    )


@lru_cache(maxsize=64)
def _column(values: tuple[float, ...], device: torch.device, ndim: int) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).view(-1, *(1,) * (ndim - 2))


def _spell(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
