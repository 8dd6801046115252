"""What a data set is: raw arrays kept small, the one way to turn them into model inputs, named slices of it, and which of its
examples are chosen."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import torch
from torch import Generator, Tensor

from fldiag.data import arrays, augment
from fldiag.errors import FldiagError, nearest
from fldiag.seeding import numpy_rng

TOKENS = (torch.int32, torch.int64)
ARRAYS = ("train_x", "train_y", "test_x", "test_y")


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
        packed: Layout of inputs that a recorded run keeps as rows (``fldiag.data.arrays.pack``).
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
    texts: tuple[tuple[str, ...], ...] = ()
    packed: str | None = None
    remarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, kind in (("mean", float), ("std", float), ("augment", str)):
            object.__setattr__(self, name, tuple(map(kind, getattr(self, name))))
        for fault in self._faults():
            raise FldiagError(f"data set {self.name!r}: {fault}")

    @classmethod
    def of(cls, name: str, values: Sequence[Any], **options: Any) -> Dataset:
        """The data set of four arrays (train_x, train_y, test_x, test_y), read as ``fldiag.data.arrays`` says.

        >>> Dataset.of("ones", (torch.ones(4, 2), [0, 1, 0, 1], torch.ones(1, 2), [0])).classes
        2
        """
        x, y, test_x, test_y = values
        x, test_x = map(arrays.inputs, (x, test_x))
        y, test_y = map(arrays.targets, (y, test_y))
        return cls(name, x, y, test_x, test_y, arrays.count_classes(y, test_y), **options)

    def save(self, file: IO[bytes]) -> None:
        """Write the four arrays as npz, as they are, and the layout of packed inputs."""
        content: dict[str, Any] = {arrays.FORM: [self.packed or ""]}
        for key, name in zip(arrays.KEYS, ARRAYS, strict=True):
            content[key] = getattr(self, name).cpu()
        np.savez(file, **content)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one model input, such as (3, 28, 28) or (4,)."""
        first, *rest = self.train_x.shape[1:]
        return (first * self.repeat, *([self.side] * 2 if self.side else rest))

    @property
    def side(self) -> int | None:
        """Pixels a side that models see of larger stored squares: the size of a ``resizedcrop`` among the augmentations."""
        size = re.search(r"resizedcrop(\d+)", " ".join(self.augment))
        return int(size[1]) if size else None

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
        kinds = [str(self.train_x.dtype).removeprefix("torch.")]
        if self.packed:
            kinds = list(dict.fromkeys(kind for *_, kind in json.loads(self.packed)))
        start = "pixels / 255" if kinds == ["uint8"] else f"as they are ({', '.join(kinds)})"
        if not self.mean:
            return start
        mean, std = (", ".join(f"{v:.4g}" for v in part[:4]) for part in (self.mean, self.std))
        more = ", ..." * (len(self.mean) > 4)
        return f"{start}, then minus mean {mean}{more} and over deviation {std}{more}"

    def batch(self, index: Tensor, generator: Generator | None = None) -> Tensor:
        """Model inputs of training examples ``index``, int64 [n]; see ``normalise``."""
        # x[index] takes six times as long.
        x = self.train_x.index_select(0, index.to(self.train_x.device))
        return self.normalise(x, generator)

    def normalise(self, raw: Tensor, generator: Generator | None = None) -> Tensor:
        """A stored batch as model inputs.

        Args:
            raw: [n, ...].
            generator: Draws the augmentations that the data set names; the same state gives the same batch. Without one the batch
                is as for evaluation.

        Returns:
            float32 [n, *shape], or int64 tokens.
        """
        if raw.dtype in TOKENS:
            return raw.long()
        if generator is not None:
            before, after = augment.plan(self.augment)
            raw = augment.apply(raw, before, generator)
        elif self.side:
            from torchvision.transforms.functional import center_crop

            raw = center_crop(raw, [self.side])
        x = raw.to(torch.float32).div_(255) if raw.dtype == torch.uint8 else raw
        if self.mean:
            moments = torch.tensor((self.mean, self.std), dtype=torch.float32, device=x.device)
            mean, std = moments.view(2, -1, *(1,) * (x.ndim - 2))
            x = x.sub(mean).div_(std)
        if generator is not None:
            x = augment.apply(x, after, generator)
        return x if self.repeat == 1 else x.repeat(1, self.repeat, *(1,) * (x.ndim - 2))

    def fingerprint(self) -> str:
        """16 hex digits that name the data: SHA-256 over the four arrays and the normalisation.

        Independent of the name, the device and the augmentation.
        """
        extras = filter(None, (self.side, self.words and self.words.spec, self.packed))
        description = (self.classes, self.mean, self.std, self.repeat, *extras)
        digest = hashlib.sha256(repr(description).encode())
        for x in (getattr(self, name) for name in ARRAYS):
            digest.update(f"{tuple(x.shape)} {x.dtype}".encode())
            digest.update(x.detach().cpu().contiguous().numpy().data)
        return digest.hexdigest()[:16]

    def _faults(self) -> Iterator[str]:
        """What does not fit, the plainest first; a later check relies on the earlier ones."""
        splits = (
            ("training", self.train_x, self.train_y),
            ("test", self.test_x, self.test_y),
        )
        for split, x, y in splits:
            if len(x) != len(y) or not len(self.train_y):
                yield f"{len(x)} {split} inputs and {len(y)} targets; each example needs both"
        _, x, y = splits[0]
        is_pixels = x.dtype == torch.uint8 and x.ndim == 4
        is_numbers = x.dtype in (torch.float32, *TOKENS) and x.ndim > 1
        if 0 in x.shape[1:] or not (is_pixels or is_numbers):
            yield f"inputs are {_spell(x)}; use uint8 [n, C, H, W], float32 [n, ...] or tokens int64 [n, T]"
        is_label = y.dtype == torch.int64 and y.ndim == 1
        if not is_label and not (self.regression and y.shape[1:] == (self.classes,)):
            yield f"targets are {_spell(y)}, not int64 labels [n] and not floats [n, {self.classes}]"
        if len({(x.dtype, x.shape[1:], y.dtype, y.shape[1:]) for _, x, y in splits}) > 1:
            yield "training and test examples have different forms"
        for split, x, y in splits:
            if not (x.isfinite().all() and y.isfinite().all()):
                yield f"{split} examples hold a value that is not finite"
            if is_label and len(y) and not 0 <= y.min() <= y.max() < self.classes:
                yield f"{split} labels go from {y.min()} to {y.max()}, not 0 to {self.classes - 1}"
        x, channels = self.train_x, (len(self.mean), len(self.std))
        if channels not in ((0, 0), (x.shape[1],) * 2) or min(self.std, default=1) <= 0:
            yield f"{channels} means and deviations (above 0) for {x.shape[1]} channels"
        if x.ndim != 4 and (self.augment or self.repeat != 1):
            yield f"augment and repeat are for images, and the inputs are {_spell(x)}"


def _spell(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


SLICE = re.compile(r"(train|test)|client:(\d+)(?:/(train|test|own))?")


@dataclass(frozen=True, eq=False)
class Slice:
    """Examples in a fixed order: raw inputs ``x_raw`` [n, ...] as stored, targets ``y`` [n] or [n, out]."""

    name: str
    n: int
    x_raw: Tensor
    y: Tensor
    dataset: Dataset

    @property
    def inputs(self) -> str:
        """What becomes of the stored inputs before a model sees them, in words."""
        return self.dataset.scaling

    def batch(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Model inputs (evaluation transform, never augmented) and targets of examples start..stop-1."""
        return self.dataset.normalise(self.x_raw[start:stop]), self.y[start:stop]


def take(
    dataset: Dataset,
    spec: str,
    partition: Sequence[np.ndarray] | None = None,
    samples: int | None = None,
    tests: Sequence[np.ndarray] | None = None,
) -> Slice:
    """A slice of a data set, in data set order.

    Args:
        dataset: The data.
        spec: ``train``, ``test``, ``client:7`` or ``client:7/train`` (the training examples of client 7), ``client:7/test``
            (its own test examples in ``tests``, else ``personal_test``), ``client:7/own`` (all test examples of the classes
            that the client has).
        partition: Training indices of every client.
        samples: Keep so many, or all when there are fewer, as ``spread`` chooses them.
        tests: Test indices of every client, where it has such of its own.

    Raises:
        FldiagError: An unknown slice, a client outside the partition, no partition, or an empty slice.

    >>> from fldiag.data import load
    >>> take(load("digits"), "test", samples=20).n
    20
    """
    match = SLICE.fullmatch(spec)
    if match is None:
        examples = ("train", "test", "client:7", "client:7/test", "client:7/own")
        raise FldiagError(f"unknown slice {spec!r}", nearest(spec, examples), usage=True)
    split, client, kind = match.groups(default="train")
    index: Any = slice(None)  # the whole split is not copied
    if ":" in spec:
        k, clients = int(client), len(partition or ())
        spec, split = f"client:{k}/{kind}", "train" if kind == "train" else "test"
        if partition is None or k >= clients:
            raise FldiagError(
                f"slice {spec} needs a partition with this client, and it has {clients} clients",
                "diagnose a run, which has one, and one of its clients; or use train or test",
                usage=True,
            )
        lists = tests if kind == "test" and tests is not None else partition
        index = np.asarray(lists[k], dtype=np.int64)
        if kind != "train" and lists is partition:
            if dataset.regression:
                what = f"slice {spec}: the targets of {dataset.name!r} are no classes"
                raise FldiagError(what, usage=True)
            choose = personal_test if kind == "test" else own_classes
            index = choose(dataset.train_y.cpu()[index], dataset.test_y.cpu(), k)
        index = torch.from_numpy(index)
    x, y = getattr(dataset, f"{split}_x"), getattr(dataset, f"{split}_y")
    if samples is not None and samples < len(y[index]):
        chosen = spread(y[index], samples)
        index = index[chosen] if ":" in spec else chosen
    if not len(y[index]):
        raise FldiagError(
            f"slice {spec} of data set {dataset.name!r} is empty: it has no {split} examples",
            "choose the slice train, or another client; or give test examples",
            usage=True,
        )
    return Slice(spec, len(y[index]), x[index], y[index], dataset)


def personal_test(train_labels: Any, test_labels: Any, client: int) -> np.ndarray:
    """Test examples with a client's own class mixture, about 1,000.

    Of class c, min(available, floor(1000 q_c)) without replacement, q the shares of the classes in the client's labels. The draw
    is fixed by the client's number.

    Args:
        train_labels: The client's, [n_k].
        test_labels: Of the test split, [n].
        client: Its number.

    Returns:
        Sorted indices into the test split.
    """
    labels, pool = np.asarray(train_labels), np.asarray(test_labels)
    rng = numpy_rng(0, "personal test set", client)
    indices = [np.empty(0, dtype=np.int64)]
    for c, n in zip(*np.unique(labels, return_counts=True), strict=True):
        members = np.flatnonzero(pool == c)
        count = min(len(members), 1000 * int(n) // len(labels))  # whole: 1000 * 0.57 is 569.99...
        indices.append(rng.choice(members, size=count, replace=False))
    return np.sort(np.concatenate(indices))


def own_classes(train_labels: Any, test_labels: Any, client: int) -> np.ndarray:
    """All test examples of the classes in a client's ``train_labels`` [n_k] (the personal test of FedProj), sorted indices into
    the test split; nothing is drawn, so ``client`` does not matter."""
    return np.flatnonzero(np.isin(np.asarray(test_labels), np.asarray(train_labels)))


def spread(y: Tensor, count: int) -> Tensor:
    """``count`` of the n positions, sorted, evenly spaced through the examples sorted by class; int64 [count].

    So each class keeps its share within one example and the choice uses no random numbers. Regression targets are taken evenly
    in data set order.
    """
    n = len(y)
    is_class = y.ndim == 1 and not y.is_floating_point()
    order = torch.argsort(y, stable=True) if is_class else torch.arange(n, device=y.device)
    pick = (2 * torch.arange(count, device=y.device) + 1) * n // (2 * count)
    return order[pick].sort().values


def draw(y: Tensor, count: int, seed: int, purpose: str) -> Tensor:
    """``count`` random positions, sorted, of which each class gives its share as in ``spread``; int64 [count]."""
    order = torch.from_numpy(numpy_rng(seed, purpose).permutation(len(y)))
    return order[spread(y[order], count)].sort().values
