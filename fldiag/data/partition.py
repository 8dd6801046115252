"""How training examples are dealt to clients: the heterogeneity of a federation, fixed by its own seed.

The seed is the partition's own, so runs with different training seeds share their clients. What a kind's options may be is
checked by the config (``fldiag.sections.PartitionSection``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from operator import index
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from fldiag.data.dataset import Dataset, draw
from fldiag.errors import FldiagError, first_line, unknown
from fldiag.sections import PartitionSection
from fldiag.seeding import numpy_rng

Parts = Sequence[np.ndarray]

#: Draws of ``lda_fedsol``, each of which shuffles all examples.
FEDSOL_MAX_TRIES = 2_000
#: ``lda`` redraws until every client has ``min_size`` examples; a hard setting (10 classes of 5,000, 100 clients,
#: alpha 0.05) takes 20,000 draws on average, so the limits leave it a factor of ten.
LDA_MAX_TRIES, LDA_MAX_NUMBERS = 200_000, 200_000_000


def deal(
    dataset: Dataset, spec: PartitionSection, clients: int, public: str | None = None
) -> Parts:
    """The clients' training examples: indices of each into the training split, without those held out as ``public``.

    Raises FldiagError as ``make`` and ``from_file`` do.
    """
    examples = np.arange(len(dataset.train_y))
    private = np.setdiff1d(examples, hold_out(public, dataset, spec.seed))
    if spec.kind == "file":
        return from_file(str(spec.path), clients, private)
    parts = make(spec.kind, dataset.train_y[private], clients, spec.seed, **spec.options)
    return [private[part] for part in parts]


def hold_out(public: str | None, dataset: Dataset, seed: int) -> Tensor:
    """Training examples that become public, sorted indices; none where ``public`` is not ``holdout:N``."""
    kind, _, count = (public or "").partition(":")
    if kind != "holdout":
        return torch.empty(0, dtype=torch.int64)
    n = len(dataset.train_y)
    if not count.isdecimal() or not 1 <= int(count) < n:
        raise FldiagError(
            f"public data {public!r}", f"write holdout:N with N from 1 to {n - 1}", usage=True
        )
    return draw(dataset.train_y, int(count), seed, "public holdout")


def make(kind: str, labels: Any, clients: int, seed: int, **options: Any) -> Parts:
    """The training examples of every client.

    - ``iid``: a random permutation cut into equal pieces.
    - ``sharding``, ``shards``: every client gets so many shards of one class each (McMahan et al., 2017); the last clients
      fewer, where the shards do not divide over the classes.
    - ``lda``, ``alpha``, ``min_size``: every class is split over the clients by a symmetric Dirichlet draw
      (Hsu et al., 2019), clients that already hold their share left out.
    - ``lda_fedsol``, ``alpha``, ``min_size``: the same rule, draw by draw as in FedSOL's released code: with seed 19940817
      and its data set, the paper's own clients.
    - ``dirichlet``, ``alpha``: every client has its own Dirichlet class prior and all have equal sizes.
    - ``pathological``, ``classes``: the same, the prior being uniform over so many random classes.

    Args:
        kind: One of these.
        labels: Integer class labels [n] (array or tensor).
        clients: How many.
        seed: Of the partition.
        options: Those of the kind.

    Returns:
        ``clients`` sorted int64 index arrays, none of them empty.

    Raises:
        FldiagError: An unknown kind, more clients than the data feed, and an LDA that cannot reach its minimum size.

    >>> [part.tolist() for part in make("sharding", [0, 0, 1, 1], clients=2, seed=0, shards=1)]
    [[2, 3], [0, 1]]
    """
    if kind not in _KINDS:
        raise unknown("partition kind", kind, _KINDS)
    labels = np.asarray(labels)
    if kind != "iid" and (labels.ndim != 1 or labels.dtype.kind not in "iu"):
        raise FldiagError(
            f"partition {kind!r} needs class labels, and these are {labels.dtype}",
            "use partition.kind = iid",
            usage=True,
        )
    least = options.get("min_size", 1)
    rng = seed if kind == "lda_fedsol" else numpy_rng(seed, f"partition {kind}")
    is_enough = clients * least <= len(labels)
    parts = _KINDS[kind](labels, clients, rng, **options) if is_enough else []
    if not parts or not all(map(len, parts)):
        raise FldiagError(
            f"{clients} clients cannot share {len(labels)} examples, at least {least} each, by partition {kind!r} {options}",
            "use fewer clients, or milder options of the partition",
            usage=True,
        )
    return [np.sort(part).astype(np.int64, copy=False) for part in parts]


def _by_class(labels: np.ndarray) -> Parts:
    """Indices of every class that occurs, in data set order."""
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)


def _sharding(labels: np.ndarray, clients: int, rng: Generator, *, shards: int) -> Parts:
    by_class = _by_class(labels)
    each = shards * clients // len(by_class)
    if not 0 < each <= min(map(len, by_class)):
        raise FldiagError(
            f"{clients} clients with {shards} shards make {each} shards of every class, and the smallest of the "
            f"{len(by_class)} classes has {min(map(len, by_class))} examples",
            "choose clients.total and partition.shards so that each class has a shard, and each shard an example",
            usage=True,
        )
    pools = []
    for members in by_class:
        # Equal shards, of which the first ones get an example more each, from the end of the class.
        size = len(members) // each
        shard = np.append(np.repeat(np.arange(each), size), np.arange(len(members) % each))
        pools.append([members[shard == j] for j in rng.permutation(each)])
    dealt = rng.permutation(np.repeat(np.arange(len(by_class)), each))
    # Where they do not divide, the last clients go without.
    groups = np.array_split(dealt, clients)
    return [np.concatenate([*(pools[c].pop() for c in group), dealt[:0]]) for group in groups]


def _lda(labels: np.ndarray, clients: int, rng: Generator, *, alpha: float, min_size: int) -> Parts:
    """The first draw of the classes' cuts that gives all clients ``min_size``.

    Only the sizes decide whether a draw is accepted, so draws are made in blocks and nothing is shuffled until one is accepted. A
    Dirichlet draw with some entries removed is normalised gamma draws.
    """
    by_class = _by_class(labels)
    numbers = len(by_class) * clients
    limit = max(1000, min(LDA_MAX_TRIES, LDA_MAX_NUMBERS // numbers))
    tries, block = 0, 4
    while tries < limit:
        block = min(2 * block, max(1, 500_000 // numbers), limit - tries)
        weight = rng.standard_gamma(alpha, size=(block, len(by_class), clients))
        counts = np.empty(weight.shape, dtype=np.int64)
        sizes = np.zeros((block, clients), dtype=np.int64)
        is_valid = np.ones(block, dtype=bool)
        for c, members in enumerate(by_class):
            weight[:, c][sizes >= len(labels) / clients] = 0
            upto = np.cumsum(weight[:, c], axis=1)
            total = upto[:, -1:]
            # With a tiny alpha all remaining weights can underflow: such a draw splits nothing and is void.
            is_valid &= total[:, 0] > 0
            ends = np.floor(upto / np.where(total > 0, total, 1) * len(members))
            ends[:, -1] = len(members)
            counts[:, c] = np.diff(ends, axis=1, prepend=0)
            sizes += counts[:, c]
        accepted = np.flatnonzero(is_valid & (sizes.min(axis=1) >= min_size))
        tries += block
        if len(accepted):
            first = accepted[0]
            owner = np.concatenate([np.repeat(np.arange(clients), row) for row in counts[first]])
            examples = np.concatenate([rng.permutation(members) for members in by_class])
            return np.split(examples[np.argsort(owner, kind="stable")], sizes[first].cumsum()[:-1])
    return []


def _lda_fedsol(
    labels: np.ndarray, clients: int, seed: int, *, alpha: float, min_size: int
) -> Parts:
    """Draw by draw as FedSOL's released code: with its seed, the clients of the paper itself.

    That code draws from numpy's legacy generator, whose stream numpy keeps unchanged. Every class in turn is shuffled and cut
    by a Dirichlet draw without the clients that hold ``n // clients`` examples already, and the clients' examples are shuffled;
    all is drawn anew until the smallest client has ``min_size``. As there, a rejected draw leaves the examples shuffled and
    the stream where it ended.
    """
    by_class = _by_class(labels)
    rng, share = np.random.RandomState(seed), len(labels) // clients
    for _ in range(FEDSOL_MAX_TRIES):
        counts, pieces = np.zeros(clients, dtype=np.int64), []
        for members in by_class:
            rng.shuffle(members)
            weight = rng.dirichlet([alpha] * clients) * (counts < share)
            if not weight.sum() > 0:
                break  # with a tiny alpha all weights can underflow: such a draw splits nothing
            cuts = (np.cumsum(weight / weight.sum()) * len(members)).astype(np.int64)[:-1]
            pieces.append(np.split(members, cuts))
            counts += [len(piece) for piece in pieces[-1]]
        else:
            parts = [np.concatenate(of_client) for of_client in zip(*pieces, strict=True)]
            for part in parts:
                rng.shuffle(part)
            if counts.min() >= min_size:
                return parts
    return []


def _dirichlet(labels: np.ndarray, clients: int, rng: Generator, *, alpha: float) -> Parts:
    by_class = _by_class(labels)
    prior = rng.dirichlet([alpha] * len(by_class), size=clients)
    size = len(labels) // clients
    upto = np.cumsum(prior, axis=1)
    upto /= upto[:, -1:]
    u = rng.random((clients, size, 1))
    return _fill(by_class, (u >= upto[:, None]).sum(axis=2), rng)


def _pathological(labels: np.ndarray, clients: int, rng: Generator, *, classes: int) -> Parts:
    by_class = _by_class(labels)
    size = len(labels) // clients
    if classes > min(len(by_class), size):
        raise FldiagError(
            f"partition.classes = {classes}, and there are {len(by_class)} classes and {size} examples for each client",
            "use fewer classes or fewer clients",
            usage=True,
        )
    rows = np.empty((clients, size), dtype=np.int64)
    for row in rows:
        choice = rng.choice(len(by_class), size=classes, replace=False)
        row[:] = choice[rng.integers(classes, size=size)]
        # A small client can miss a class by chance; it then gives up an example of one it holds twice.
        for c in np.setdiff1d(choice, row):
            spare = np.flatnonzero(np.bincount(row)[row] > 1)
            row[spare[rng.integers(len(spare))]] = c
    return _fill(by_class, rows, rng)


def _fill(by_class: Parts, classes: np.ndarray, rng: Generator) -> Parts:
    """Examples for clients that ask for ``classes`` [clients, size], in that order each.

    Clients that are not full yet take turns at random; each takes the next unused example of its class, and a
    class that is used up starts again, so an example can serve twice while others stay unused.
    """
    clients, size = classes.shape
    turns = []
    open_clients, left = list(range(clients)), [size] * clients
    for u in rng.random(clients * size).tolist():
        place = int(u * len(open_clients))
        client = open_clients[place]
        turns.append(client)
        left[client] -= 1
        if left[client] == 0:
            open_clients[place] = open_clients[-1]
            open_clients.pop()
    # The t-th turn of a client asks for its t-th class: a stable sort by client lines the two up.
    turn = np.argsort(turns, kind="stable")
    classes_by_turn, examples = np.empty_like(turn), np.empty_like(turn)
    classes_by_turn[turn] = classes.ravel()
    for c, members in enumerate(by_class):
        turns_of_class = np.flatnonzero(classes_by_turn == c)
        examples[turns_of_class] = np.resize(rng.permutation(members), len(turns_of_class))
    return [*examples[turn].reshape(clients, size)]


_KINDS: dict[str, Callable[..., Parts]] = {
    "iid": lambda labels, clients, rng: np.array_split(rng.permutation(len(labels)), clients),
    "sharding": _sharding,
    "lda": _lda,
    "lda_fedsol": _lda_fedsol,
    "dirichlet": _dirichlet,
    "pathological": _pathological,
}


def read_partition(path: str | Path) -> dict[str, np.ndarray]:
    """Client name -> indices of its training examples.

    Args:
        path: JSON ``{"client": [indices]}``, a list of lists, or the partition.npz of a run. Nothing in it is executed.

    Raises:
        FldiagError: anything else.
    """
    path = Path(path)
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                content = np.split(file["indices"], file["offsets"][1:-1])
        else:
            content = json.loads(path.read_text("utf-8"))
        parts = content if isinstance(content, dict) else dict(enumerate(content))
        return {
            str(client): np.array([*map(index, part)], dtype=np.int64)
            for client, part in parts.items()
        }
    except Exception as error:  # a damaged file can make its reader raise anything
        raise FldiagError(
            f"{path} is not a partition: {first_line(error)}",
            "give JSON, client -> indices of its training examples, or the partition.npz of a run",
            usage=True,
        ) from None


def from_file(path: str, clients: int, examples: np.ndarray) -> Parts:
    """Anybody's partition: the training examples of clients 0, 1, 2, ... Examples may belong to several clients, and to none.

    Args:
        path: See ``read_partition``.
        clients: How many the federation has.
        examples: Those that clients may have, indices into the training split.

    Returns:
        Sorted indices of each client.

    Raises:
        FldiagError: Clients that are not 0 to ``clients`` - 1, a client without examples, and examples that it may not have.
    """
    index_of_client = read_partition(path)
    if index_of_client.keys() != {str(k) for k in range(clients)}:
        raise FldiagError(
            f"partition {path} has {len(index_of_client)} clients, from {min(index_of_client)} to {max(index_of_client)}",
            f"number them 0, 1, 2, ..., and set clients.total (now {clients}) to how many there are",
            usage=True,
        )
    parts = [np.sort(index_of_client[str(k)]) for k in range(clients)]
    for k, part in enumerate(parts):
        if not len(part) or not np.isin(part, examples).all():
            raise FldiagError(
                f"partition {path}: client {k} has {len(part)} examples {part[:1]} to {part[-1:]}, and may have {len(examples)}",
                "give each client some of its examples, and the data that belong to the partition",
                usage=True,
            )
    return parts


def save(path: str | Path | IO[bytes], parts: Parts) -> None:
    """Writes a partition as npz: client k's are ``indices[offsets[k]:offsets[k + 1]]`` (both int64)."""
    offsets = np.cumsum([0, *sizes(parts)], dtype=np.int64)
    np.savez_compressed(path, indices=np.concatenate(parts).astype(np.int64), offsets=offsets)


def load_parts(path: str | Path) -> Parts:
    """The partition that ``save`` wrote. Raises FldiagError for a missing, damaged or foreign file."""
    return [*read_partition(path).values()]


def sizes(parts: Parts) -> np.ndarray:
    """How many examples every client has, int64 [clients]."""
    return np.array([len(part) for part in parts])


def same(one: Parts, other: Parts) -> bool:
    """Whether every client has the same examples in both."""
    return len(one) == len(other) and all(map(np.array_equal, one, other))
