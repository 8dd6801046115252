"""What a data set is: raw arrays kept small, and the one way to turn them into model inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Generator, Tensor

from fldiag.data import arrays, augment
from fldiag.errors import FldiagError

TOKENS = (torch.int32, torch.int64)
ARRAYS = ("train_x", "train_y", "test_x", "test_y")


def rows(x: Tensor, index: Tensor | slice) -> Tensor:
    """Some of the examples; ``index`` int64 [n] or a slice."""
    # x[index] with a tensor takes six times as long.
    return x[index] if isinstance(index, slice) else x.index_select(0, index.to(x.device))


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test split of a classification or regression problem; the test split may be empty.

    Args:
        name: What tables call it.
        train_x: uint8 [n, C, H, W] pixels 0..255, float32 [n, ...], or token numbers int32 or int64 [n, T].
        train_y: int64 [n] labels in 0..classes-1, or float32 [n, classes] regression targets.
        test_x: Likewise.
        test_y: Likewise.
        classes: How many there are.
        mean: One number a channel (a feature, for [n, d]) for pixels in [0, 1]; empty: uint8 is divided by 255 and nothing else.
        std: Likewise.
        augment: Names from ``fldiag.data.augment``, applied to training batches only when a generator is given.
        repeat: Channels are repeated this often for the model, so that gray images fit a network for colour.
        words: The tokenizer of texts.
        texts: Training texts, then test texts, where these are known.
        packed: Layout of inputs that a recorded run keeps as rows.
        remarks: What a user should know of how the examples were read.

    Raises:
        FldiagError: These do not fit together.
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
    words: Any = None  # fldiag.data.text.Words
    texts: tuple[tuple[str, ...], ...] = field(default=(), repr=False)
    packed: Any = None
    remarks: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            object.__setattr__(self, name, tuple(map(float, getattr(self, name))))
        object.__setattr__(self, "augment", tuple(self.augment))
        for fault in self._faults():
            raise FldiagError(f"data set {self.name!r}: {fault}")

    @classmethod
    def of(cls, name: str, values: Sequence[Any]) -> Dataset:
        """The data set of four arrays (train_x, train_y, test_x, test_y), read as ``fldiag.data.arrays`` says.

        >>> Dataset.of("ones", (torch.ones(4, 2), [0, 1, 0, 1], torch.ones(1, 2), [0])).classes
        2
        """
        if len(values) != 4:
            raise FldiagError(f"{name}: {len(values)} arrays, not {', '.join(ARRAYS)}", usage=True)
        train_x, train_y, test_x, test_y = (
            (arrays.targets if key.endswith("y") else arrays.inputs)(array, f"{name} {key}")
            for key, array in zip(ARRAYS, values, strict=True)
        )
        classes = arrays.count_classes(train_y, test_y)
        return cls(name, train_x, train_y, test_x, test_y, classes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one model input, such as (3, 28, 28) or (4,)."""
        first, *rest = self.train_x.shape[1:]
        return (first * self.repeat, *([self.side] * 2 if self.side else rest))

    @property
    def side(self) -> int | None:
        """Pixels a side that models see of larger stored squares: the size of a ``resizedcrop`` among the augmentations."""
        sizes = (
            int(s.size) for s in sum(augment.plan(self.augment), ()) if s.kind == "resizedcrop"
        )
        return next(sizes, None)

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
        if self.tested:
            return "test", self.test_x, self.test_y
        return "train", self.train_x, self.train_y

    @property
    def regression(self) -> bool:
        """Whether targets are numbers, so that models have no accuracy."""
        return self.train_y.is_floating_point()

    @property
    def scaling(self) -> str:
        """What the stored numbers become before a model sees them, in words."""
        if self.words is not None:
            return f"texts as {self.words.length} tokens of a vocabulary of {self.words.size}"
        fields = self.packed.fields if self.packed else [(self.train_x.dtype,)]
        kinds = ", ".join({str(kind).removeprefix("torch."): 0 for *_, kind in fields})
        start = "pixels / 255" if kinds == "uint8" else f"as they are ({kinds})"
        if not self.mean:
            return start
        mean, std = (", ".join(f"{v:.4g}" for v in part[:4]) for part in (self.mean, self.std))
        more = ", ..." * (len(self.mean) > 4)
        return f"{start}, then minus mean {mean}{more} and over deviation {std}{more}"

    def normalise(self, raw: Tensor) -> Tensor:
        """A stored batch [n, ...] as model inputs [n, *shape], float32 or int64 tokens: the transform of evaluation."""
        if raw.dtype in TOKENS:
            return raw.long()
        if self.side:
            from torchvision.transforms.functional import center_crop

            raw = center_crop(raw, [self.side])
        return self._repeat(self._standardise(raw))

    def batch(self, index: Tensor, generator: Generator | None = None) -> Tensor:
        """Model inputs of training examples, augmented when a generator is given and the data set names augmentations.

        Args:
            index: Which, int64 [n].
            generator: The same state gives the same batch.

        Returns:
            float32 [n, *shape], or int64 tokens.
        """
        raw = rows(self.train_x, index)
        if generator is None or not self.augment:
            return self.normalise(raw)
        before, after = augment.plan(self.augment)
        x = self._standardise(augment.apply(raw, before, generator))
        return self._repeat(augment.apply(x, after, generator))

    def fingerprint(self) -> str:
        """16 hex digits that name the data: SHA-256 over the four arrays and the normalisation.

        Independent of the name, the device and the augmentation; computed once.
        """
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        extras = (self.side, self.words and self.words.spec, self.packed and self.packed.text)
        description = (self.classes, self.mean, self.std, self.repeat, *filter(None, extras))
        digest = hashlib.sha256(repr(description).encode())
        for x in (getattr(self, name) for name in ARRAYS):
            digest.update(f"{tuple(x.shape)} {x.dtype}".encode())
            digest.update(x.detach().cpu().contiguous().numpy().data)
        return digest.hexdigest()[:16]

    def _standardise(self, raw: Tensor) -> Tensor:
        # Divisions rather than one multiply-add, so that the bits equal torchvision's ToTensor and Normalize.
        x = raw.to(torch.float32).div_(255) if raw.dtype == torch.uint8 else raw
        if not self.mean:
            return x
        mean, std = (_column(v, x.device, x.ndim) for v in (self.mean, self.std))
        return x.sub(mean).div_(std)

    def _repeat(self, x: Tensor) -> Tensor:
        return x if self.repeat == 1 else x.repeat(1, self.repeat, *(1,) * (x.ndim - 2))

    def _faults(self) -> Iterator[str]:
        """What does not fit, the plainest first; a later check relies on the earlier ones."""
        splits = (("training", self.train_x, self.train_y), ("test", self.test_x, self.test_y))
        for split, x, y in splits:
            is_pixels = x.dtype == torch.uint8 and x.ndim == 4
            is_numbers = x.dtype in (torch.float32, *TOKENS) and x.ndim > 1
            are_labels = y.dtype == torch.int64 and y.ndim == 1
            are_numbers = y.is_floating_point() and y.shape[1:] == (self.classes,)
            if len(x) != len(y) or not len(self.train_y):
                yield f"{len(x)} {split} inputs and {len(y)} targets; each example needs both"
            if 0 in x.shape[1:] or not (is_pixels or is_numbers):
                yield f"{split} inputs are {_spell(x)}; use uint8 [n, C, H, W], float32 [n, ...] or tokens int64 [n, T]"
            if not (are_labels or (are_numbers and bool(y.isfinite().all()))):
                yield f"{split} targets are {_spell(y)}, not int64 labels [n] and not finite numbers [n, {self.classes}]"
            if not bool(x.isfinite().all()):
                yield f"{split} inputs hold a value that is not finite"
            if are_labels and len(y) and not 0 <= y.min() <= y.max() < self.classes:
                yield f"{split} labels go from {y.min()} to {y.max()}, not 0 to {self.classes - 1}"
        if len({(x.dtype, x.shape[1:], y.dtype) for _, x, y in splits}) > 1:
            yield "training and test examples differ in shape or kind"
        x = self.train_x
        channels = (len(self.mean), len(self.std))
        if channels not in ((0, 0), (x.shape[1],) * 2) or min(self.std, default=1) <= 0:
            yield f"{channels} means and deviations (above 0) for {x.shape[1]} channels"
        if x.ndim != 4 and (self.augment or self.repeat != 1):
            yield f"augment and repeat are for images, and the inputs are {_spell(x)}"


@lru_cache
def _column(values: tuple[float, ...], device: torch.device, ndim: int) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).view(-1, *(1,) * (ndim - 2))


def _spell(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
