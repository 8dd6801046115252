"""Public data for distillation, inputs that everybody has and no labels; and who has the rest."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fldiag import registry
from fldiag.data import partition
from fldiag.data.arrays import spread
from fldiag.data.dataset import Dataset
from fldiag.data.sources import load
from fldiag.errors import FldiagError
from fldiag.sections import DataSection, PartitionSection
from fldiag.seeding import numpy_rng


def load_public(
    section: DataSection,
    private: Dataset,
    seed: int,
    *,
    download: bool = False,
) -> Tensor:
    """Public inputs, without labels.

    Args:
        section: ``public`` is the name of a data set: its training and test inputs, in that order, normalised by its own
            transform, as in the FedProj experiments; of texts the sentences, each once, in the private data's tokens. Or it is
            ``holdout:N``: N training examples of ``private``, each class giving its share within one example.
            ``public_size`` keeps so many of the inputs, or all when there are fewer.
        private: The clients' data.
        seed: Of both draws.
        download: Fetch a missing public data set.

    Returns:
        [M, *private.shape].

    Raises:
        FldiagError: Inputs of another shape than the private ones, and the private set itself.
    """
    name, size = str(section.public), section.public_size
    held_out = hold_out(name, private, seed)
    if len(held_out):
        return private.batch(held_out[_subset(len(held_out), size, seed)])
    update: dict[str, Any] = {"name": name, "variant": None, "validation": None}
    if name.partition("@")[0] in registry.dataset:
        update["normalise"] = None
    other = load(section.model_copy(update=update), download=download)
    are_texts = other.words is not None, private.words is not None
    fits = all(are_texts) or (other.shape == private.shape and not any(are_texts))
    if other.name == private.name or not fits:
        raise FldiagError(
            f"public data {name!r} are {other.name!r} of shape {other.shape}, the private data {private.name!r} {private.shape}",
            "use other data than the private ones, of the same shape, or holdout:N",
            usage=True,
        )
    if all(are_texts):
        sentences = list(dict.fromkeys((sentence,) for text in other.texts for sentence in text))
        chosen = [sentences[i] for i in _subset(len(sentences), size, seed).tolist()]
        return private.normalise(private.words.numbers(chosen))
    train = len(other.train_x)
    keep = _subset(train + len(other.test_x), size, seed)
    picked = [other.train_x[keep[keep < train]], other.test_x[keep[keep >= train] - train]]
    return torch.cat([other.normalise(x) for x in picked])


def deal(
    dataset: Dataset, spec: PartitionSection, clients: int, public: str | None = None
) -> partition.Parts:
    """The clients' training examples: indices of each into the training split, without those held out as ``public``.

    Raises FldiagError as ``partition.make`` does, and where a file gives a client an example that is public.
    """
    is_private = np.ones(len(dataset.train_y), dtype=bool)
    is_private[hold_out(public, dataset, spec.seed).numpy()] = False
    if spec.kind == "file":
        parts = partition.from_file(str(spec.path), clients, len(is_private))
        for k, part in enumerate(parts):
            if not is_private[part].all():
                raise FldiagError(f"partition {spec.path}: client {k} has examples of {public}")
        return parts
    private = np.flatnonzero(is_private)
    parts = partition.make(spec.kind, dataset.train_y[private], clients, spec.seed, **spec.options)
    return [private[part] for part in parts]


def hold_out(spec: str | None, private: Dataset, seed: int) -> Tensor:
    """Training examples that become public, sorted indices; none where ``spec`` is not ``holdout:N``."""
    if spec is None or not spec.startswith("holdout"):
        return torch.empty(0, dtype=torch.int64)
    match, n = re.fullmatch(r"holdout:(\d+)", spec), len(private.train_y)
    if match is None or not 1 <= int(match[1]) < n:
        raise FldiagError(
            f"public data {spec!r}", f"write holdout:N with N from 1 to {n - 1}", usage=True
        )
    order = torch.from_numpy(numpy_rng(seed, "public holdout").permutation(n))
    return order[spread(private.train_y[order], int(match[1]))].sort().values


def _subset(n: int, size: int | None, seed: int) -> Tensor:
    """Which of n positions are kept, sorted."""
    if size is None or size >= n:
        return torch.arange(n)
    return torch.from_numpy(numpy_rng(seed, "public subset").permutation(n)[:size]).sort().values
