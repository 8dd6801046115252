"""Public data for distillation: inputs that everybody has, and no labels."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fldiag import registry
from fldiag.data import partition
from fldiag.data.arrays import spread
from fldiag.data.dataset import Dataset
from fldiag.data.sources import load
from fldiag.errors import FldiagError
from fldiag.sections import Normalise, PartitionSection
from fldiag.seeding import numpy_rng

_HOLDOUT = re.compile(r"holdout:(\d+)")


def load_public(
    spec: str,
    private: Dataset,
    root: str | os.PathLike[str] | None = None,
    download: bool = False,
    size: int | None = None,
    seed: int = 0,
    normalise: Normalise | None = None,
    find: Callable[..., Dataset] = load,
) -> tuple[Tensor, Sequence[int] | np.ndarray]:
    """Public inputs [M, *private.shape], and the training examples that stay private: indices int64 [n].

    ``spec`` is the name of a data set (as ``load`` takes it): its training and test inputs, in that order,
    normalised by its own transform, as in the FedProj experiments, or by ``normalise`` (see ``load``) where its name
    is not a registered one; or ``holdout:N``: N training examples of
    ``private`` become public, drawn by ``seed`` so that each class gives its share within one example.
    Of texts they are the sentences, each once, in the private data's tokens.
    ``size`` keeps so many of the inputs, drawn by ``seed``, or all when there are fewer. ``find``: what a name is looked up
    with.

    Raises FldiagError for inputs of another shape than the private ones, the private set itself, and numbers
    out of range.
    """
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise FldiagError(
            f"public data: size = {size!r}",
            "use a whole number of at least 1, or leave it out",
            usage=True,
        )
    if isinstance(spec, str) and spec.startswith("holdout"):
        out = _hold_out(spec, private, seed)
        held_out, remaining = (mask.nonzero()[:, 0] for mask in (out, ~out))
        index = held_out[_subset(len(held_out), size, seed)].to(private.train_x.device)
        return private.normalise(private.train_x[index]), remaining.numpy()
    other = find(spec, root, download, normalise=None if spec in registry.dataset else normalise)
    if other.words is not None and private.words is not None and other.name != private.name:
        sentences = list(dict.fromkeys((sentence,) for text in other.texts for sentence in text))
        sentences = [sentences[int(i)] for i in _subset(len(sentences), size, seed)]
        return private.normalise(private.words.numbers(sentences)), range(len(private.train_y))
    if other.shape != private.shape or (other.words is None) != (private.words is None):
        raise FldiagError(
            f"public data {spec!r} has inputs of shape {other.shape}, and the private data "
            f"{private.name!r} {private.shape}",
            "use public data of that shape (npz:PATH for resized ones), or holdout:N",
            usage=True,
        )
    if other.name == private.name:
        raise FldiagError(
            f"public data {spec!r} are the private data themselves, test inputs included",
            "use other data, or holdout:N for a part of the training split",
            usage=True,
        )
    train = len(other.train_x)
    keep = _subset(train + len(other.test_x), size, seed)
    picked = [other.train_x[keep[keep < train]], other.test_x[keep[keep >= train] - train]]
    return torch.cat([other.normalise(x) for x in picked]), range(len(private.train_y))


def deal(
    dataset: Dataset, spec: PartitionSection, clients: int, public: str | None = None
) -> Sequence[np.ndarray]:
    """The clients' training examples: indices of each into the training split, without those that are held out as
    ``public``. Raises FldiagError when there are more clients than examples."""
    holds_out = isinstance(public, str) and public.startswith("holdout")
    if spec.kind == "file":
        return _deal_file(dataset, spec, clients, str(public) if holds_out else None)
    private = (
        np.flatnonzero(~_hold_out(str(public), dataset, spec.seed).numpy())
        if holds_out
        else np.arange(len(dataset.train_y))
    )
    if clients > len(private):
        raise FldiagError(
            f"clients.total = {clients} is more than the {len(private)} training examples",
            "lower clients.total",
            usage=True,
        )
    return [
        private[part]
        for part in partition.make(
            spec.kind, dataset.train_y[private], clients, spec.seed, **spec.options
        )
    ]


def _deal_file(
    dataset: Dataset, spec: PartitionSection, clients: int, holdout: str | None
) -> Sequence[np.ndarray]:
    """The partition of a file. Raises FldiagError where a client has examples that ``holdout`` makes public."""
    parts = partition.from_file(str(spec.path), spec.digest, clients, len(dataset.train_y))
    if holdout is not None:
        is_public = _hold_out(holdout, dataset, spec.seed).numpy()
        for k, part in enumerate(parts):
            if is_public[part].any():
                raise FldiagError(
                    f"partition {spec.path}: client {k} has example {part[is_public[part]][0]}, which data.public = "
                    f"{holdout} makes public",
                    "name another data set with data.public, or take these examples out of the partition",
                    usage=True,
                )
    return parts


def _hold_out(spec: str, private: Dataset, seed: int) -> Tensor:
    """Which training examples become public: bool [n]."""
    match, n = _HOLDOUT.fullmatch(spec), len(private.train_y)
    if match is None or not 1 <= int(match[1]) < n:
        raise FldiagError(
            f"public data {spec!r}",
            f"write holdout:N with N from 1 to {n - 1}, the private "
            f"data {private.name!r} having {n} training examples",
            usage=True,
        )
    order = torch.from_numpy(numpy_rng(seed, "public holdout").permutation(n))
    out = torch.zeros(n, dtype=torch.bool)
    out[order[spread(private.train_y.cpu()[order], int(match[1]))]] = True
    return out


def _subset(n: int, size: int | None, seed: int) -> Tensor:
    """Which of n positions are kept, sorted."""
    if size is None or size >= n:
        return torch.arange(n)
    return torch.from_numpy(numpy_rng(seed, "public subset").permutation(n)[:size]).sort().values
