"""How training examples are dealt to clients: the heterogeneity of a federation, fixed by its own seed.

The seed is the partition's own, so runs with different training seeds share their clients.
"""

from __future__ import annotations

import inspect
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np
import pandas as pd
from numpy.random import Generator

from fldiag.config_files import partition_digest, read_partition, split_indices
from fldiag.errors import FldiagError, nearest, unknown
from fldiag.seeding import numpy_rng

Parts = list[np.ndarray]

#: What FedSOL's code seeds numpy's generator with before it deals the data, whatever the seed of the training.
FEDSOL_SEED = 19940817
#: A draw of ``lda_fedsol`` shuffles all examples, unlike those of ``lda``, so fewer are affordable.
FEDSOL_MAX_TRIES = 2_000
#: LDA redraws until every client has ``min_size`` examples; a hard setting (10 classes of 5,000, 100 clients,
#: alpha 0.05) takes 20,000 draws on average, so the limits leave it a factor of ten.
LDA_MAX_TRIES, LDA_MAX_NUMBERS = 200_000, 200_000_000


def make(kind: str, labels: Any, clients: int, seed: int, **options: Any) -> Parts:
    """The training examples of every client: ``clients`` sorted int64 index arrays, none of them empty.

    ``labels``: integer class labels [n] (array or tensor). Kinds and their options (an option given as None
    counts as not given):

    - ``iid``: a random permutation cut into equal pieces.
    - ``sharding``, ``shards``: every client gets so many shards of one class each (McMahan et al., 2017).
    - ``lda``, ``alpha``, ``min_size=10``: every class is split over the clients by a symmetric Dirichlet draw
      (Hsu et al., 2019), clients that already hold their share left out.
    - ``lda_fedsol``, ``alpha``, ``min_size=10``: the same rule, draw by draw as in FedSOL's released code: with seed 19940817
      and its data set, the paper's own clients.
    - ``dirichlet``, ``alpha``: every client has its own Dirichlet class prior and all have equal sizes.
    - ``pathological``, ``classes``: the same, the prior being uniform over so many random classes.

    Raises FldiagError for an unknown kind or option, values out of range, more clients than the data feeds,
    and an LDA that cannot reach its minimum size. Warns when ``sharding`` cannot give all clients alike.
    """
    if kind not in _KINDS:
        raise unknown("partition kind", kind, _KINDS)
    build = _KINDS[kind]
    labels = _labels(labels, kind)
    _check_whole_number("clients", clients)
    _check_whole_number("seed", seed, low=None)
    if clients > len(labels):
        raise FldiagError(
            f"{clients} clients cannot share {len(labels)} examples",
            "use fewer clients",
            usage=True,
        )
    options = {key: value for key, value in options.items() if value is not None}
    signature = inspect.signature(build).parameters.values()
    defaults = {p.name: p.default for p in signature if p.kind is p.KEYWORD_ONLY}
    for key in options:
        if key not in defaults:
            remedy = nearest(key, defaults) if defaults else "it takes no options"
            raise FldiagError(f"partition kind {kind!r} has no option {key!r}", remedy, usage=True)
    for key, default in defaults.items():
        if default is inspect.Parameter.empty and key not in options:
            raise FldiagError(
                f"partition kind {kind!r} needs {key}", f"set partition.{key}", usage=True
            )
    parts = build(
        labels,
        int(clients),
        seed if kind == "lda_fedsol" else numpy_rng(seed, f"partition {kind}"),
        **options,
    )
    empty = [k for k, part in enumerate(parts) if len(part) == 0]
    if empty:
        raise FldiagError(
            f"partition {kind!r} leaves {len(empty)} of {clients} clients without examples "
            f"(client {empty[0]} is the first)",
            "use fewer clients",
            usage=True,
        )
    return [np.sort(part).astype(np.int64, copy=False) for part in parts]


def _iid(labels: np.ndarray, clients: int, rng: Generator) -> Parts:
    return np.array_split(rng.permutation(len(labels)), clients)


def _sharding(labels: np.ndarray, clients: int, rng: Generator, *, shards: int) -> Parts:
    _check_whole_number("partition.shards", shards)
    by_class = _by_class(labels)
    each = shards * clients // len(by_class)
    if each == 0:
        raise FldiagError(
            f"{clients} clients with {shards} shards leave some of {len(by_class)} classes out",
            "use more clients or more shards",
            usage=True,
        )
    pools: list[Parts] = []
    for members in by_class:
        size = len(members) // each
        if size == 0:
            raise FldiagError(
                f"class {labels[members[0]]} has {len(members)} examples for its {each} shards "
                f"({clients} clients, {shards} shards each)",
                "use fewer clients or fewer shards",
                usage=True,
            )
        cut, left = members[: size * each].reshape(each, size), members[size * each :]
        pool = [
            np.append(shard, left[j]) if j < len(left) else shard for j, shard in enumerate(cut)
        ]
        pools.append([pool[j] for j in rng.permutation(each)])
    dealt = rng.permutation(np.repeat(np.arange(len(by_class)), each))
    missing = shards * clients - len(dealt)
    holds = np.full(clients, shards)
    for k in range(missing):
        holds[-1 - k % clients] -= 1
    if missing:
        short = np.flatnonzero(holds < shards)
        warnings.warn(
            f"{shards * clients} shards do not divide over {len(by_class)} classes: clients "
            f"{short[0]} to {short[-1]} hold fewer than {shards} shards ({missing} fewer together)",
            stacklevel=3,
        )
    groups = np.split(dealt, np.cumsum(holds)[:-1])
    return [
        np.concatenate([pools[c].pop() for c in group]) if len(group) else group for group in groups
    ]


def _lda(
    labels: np.ndarray, clients: int, rng: Generator, *, alpha: float, min_size: int = 10
) -> Parts:
    by_class = _lda_classes(labels, clients, alpha, min_size)
    cuts = _lda_cuts(
        [len(members) for members in by_class], clients, rng, float(alpha), int(min_size)
    )
    counts = np.diff(cuts, axis=1, prepend=0)
    owner = np.concatenate([np.repeat(np.arange(clients), row) for row in counts])
    order = np.argsort(owner, kind="stable")
    return np.split(
        np.concatenate([rng.permutation(members) for members in by_class])[order],
        np.cumsum(counts.sum(0))[:-1],
    )


def _lda_fedsol(
    labels: np.ndarray, clients: int, seed: int, *, alpha: float, min_size: int = 10
) -> Parts:
    """Draw by draw as FedSOL's released code: with its seed, the clients of the paper itself.

    That code draws from numpy's legacy generator, whose stream numpy keeps unchanged. Every class in turn is shuffled and cut
    by a Dirichlet draw without the clients that hold ``n // clients`` examples already, and the clients' examples are shuffled;
    all is drawn anew until the smallest client has ``min_size``. As there, a rejected draw leaves the examples shuffled and
    the stream where it ended.
    """
    by_class = [c.copy() for c in _lda_classes(labels, clients, alpha, min_size)]
    if not 0 <= seed < 2**32:
        raise FldiagError(
            f"partition.seed = {seed}, and lda_fedsol draws from a generator with seeds of 32 bits",
            "use one from 0 to 4294967295",
            usage=True,
        )
    rng, share = np.random.RandomState(seed), sum(map(len, by_class)) // clients
    for _ in range(FEDSOL_MAX_TRIES):
        counts, pieces = np.zeros(clients, dtype=np.int64), []
        for members in by_class:
            rng.shuffle(members)
            weight = rng.dirichlet(np.repeat(float(alpha), clients)) * (counts < share)
            if not weight.sum() > 0:
                break  # with a tiny alpha all weights can underflow: such a draw splits nothing
            cuts = (np.cumsum(weight / weight.sum()) * len(members)).astype(np.int64)[:-1]
            pieces.append(np.split(members, cuts))
            counts += [len(piece) for piece in pieces[-1]]
        else:
            parts = [np.concatenate(of_client) for of_client in zip(*pieces, strict=True)]
            for part in parts:
                rng.shuffle(part)
            if counts.min() >= int(min_size):
                return parts
    raise FldiagError(
        f"lda_fedsol with alpha {alpha:g} and {clients} clients: none of {FEDSOL_MAX_TRIES} draws gave every client "
        f"{min_size} examples",
        "use a larger alpha, fewer clients or a smaller min_size",
    )


def _lda_classes(labels: np.ndarray, clients: int, alpha: float, min_size: int) -> Parts:
    """The classes' examples, of options that can be."""
    _check_alpha(alpha)
    _check_whole_number("partition.min_size", min_size)
    if clients * min_size > len(labels):
        raise FldiagError(
            f"{clients} clients with at least {min_size} examples each need more than the "
            f"{len(labels)} there are",
            "use fewer clients or a smaller min_size",
            usage=True,
        )
    return _by_class(labels)


def _lda_cuts(
    sizes: list[int], clients: int, rng: Generator, alpha: float, min_size: int
) -> np.ndarray:
    """Where every shuffled class is cut, [classes, clients]: the first draw to give all clients ``min_size``.

    Only the sizes decide whether a draw is accepted, so draws are made in blocks and nothing is shuffled until
    one is accepted. A Dirichlet draw with some entries removed is normalised gamma draws.
    """
    numbers = len(sizes) * clients
    limit = max(1000, min(LDA_MAX_TRIES, LDA_MAX_NUMBERS // numbers))
    largest, share = max(1, 500_000 // numbers), sum(sizes) / clients
    tries, block, best = 0, 4, 0
    while tries < limit:
        block = min(2 * block, largest, limit - tries)
        weight = rng.standard_gamma(alpha, size=(block, len(sizes), clients))
        counts = np.zeros((block, clients))
        cuts = np.empty((block, len(sizes), clients), dtype=np.int64)
        valid = np.ones(block, dtype=bool)
        for c, n in enumerate(sizes):
            weight[:, c][counts >= share] = 0
            upto = np.cumsum(weight[:, c], axis=1)
            total = upto[:, -1:]
            # With a tiny alpha all remaining weights can underflow: such a draw splits nothing and is void.
            valid &= total[:, 0] > 0
            cuts[:, c] = np.floor(upto / np.where(total > 0, total, 1) * n)
            cuts[:, c, -1] = n
            counts += np.diff(cuts[:, c], axis=1, prepend=0)
        smallest = np.where(valid, counts.min(axis=1), -1)
        tries += block
        best = max(best, int(smallest.max()))
        if best >= min_size:
            return cuts[np.argmax(smallest >= min_size)]
    raise FldiagError(
        f"lda with alpha {alpha:g}, {clients} clients and {sum(sizes)} examples: none of "
        f"{tries} draws gave every client {min_size} examples "
        f"(the best left its smallest client {best})",
        "use a larger alpha, fewer clients or a smaller min_size",
    )


def _dirichlet(labels: np.ndarray, clients: int, rng: Generator, *, alpha: float) -> Parts:
    _check_alpha(alpha)
    by_class = _by_class(labels)
    prior = rng.dirichlet(np.full(len(by_class), float(alpha)), size=clients)
    size = len(labels) // clients
    upto = np.cumsum(prior, axis=1)
    upto /= upto[:, -1:]
    u = rng.random((clients, size))
    classes = np.zeros((clients, size), dtype=np.int64)
    for column in upto.T:
        classes += u >= column[:, None]
    return _fill(by_class, classes, rng)


def _pathological(labels: np.ndarray, clients: int, rng: Generator, *, classes: int) -> Parts:
    _check_whole_number("partition.classes", classes)
    by_class = _by_class(labels)
    if classes > len(by_class):
        raise FldiagError(
            f"partition.classes = {classes}, and the data have {len(by_class)} classes",
            f"use at most {len(by_class)}",
            usage=True,
        )
    size = len(labels) // clients
    if size < classes:
        raise FldiagError(
            f"{clients} clients hold {size} examples each, too few for {classes} classes",
            "use fewer clients or fewer classes",
            usage=True,
        )
    rows = np.empty((clients, size), dtype=np.int64)
    for row in rows:
        choice = rng.choice(len(by_class), size=classes, replace=False)
        row[:] = choice[rng.integers(classes, size=size)]
        # A small client can miss a class by chance; it then gives up an example of one it holds twice.
        for c in sorted(set(choice.tolist()) - set(row.tolist())):
            present = row.tolist()
            spare = [i for i, label in enumerate(present) if present.count(label) > 1]
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
    order = np.array(turns)
    # The t-th turn of a client asks for its t-th class: a stable sort by client lines the two up.
    turn = np.argsort(order, kind="stable")
    classes_by_turn = np.empty_like(order)
    classes_by_turn[turn] = classes.ravel()
    examples = np.empty_like(order)
    for c, members in enumerate(by_class):
        turns_of_class = np.flatnonzero(classes_by_turn == c)
        cycled = np.arange(len(turns_of_class)) % len(members)
        examples[turns_of_class] = rng.permutation(members)[cycled]
    return list(examples[turn].reshape(clients, size))


_KINDS: dict[str, Callable[..., Parts]] = {
    "iid": _iid,
    "sharding": _sharding,
    "lda": _lda,
    "lda_fedsol": _lda_fedsol,
    "dirichlet": _dirichlet,
    "pathological": _pathological,
}


def from_file(path: str, digest: str | None, clients: int, examples: int) -> Parts:
    """Anybody's partition: the training examples of clients 0, 1, 2, ... as a file (or a run's folder) says.

    ``digest``: of the content that is expected. ``clients``, ``examples``: how many the federation and the training split have.
    Examples may belong to several clients, and to none.

    Raises FldiagError for another content, clients that are not 0 to ``clients`` - 1, a client without examples or with one
    twice, and examples that the data do not have. (Of a run's own partition a client may have one twice: some kinds deal so.)
    """
    indices_by_name = read_partition(path)
    if digest is not None and partition_digest(indices_by_name) != digest:
        raise FldiagError(
            f"the partition {path} has changed since the config was made",
            "restore the file, or make the config again (and train into another folder)",
        )
    name = next((n for n in indices_by_name if not n.isdecimal() or n != str(int(n))), None)
    if name is not None:
        raise FldiagError(
            f"partition {path}: client {name!r} is not a number",
            "name the clients 0, 1, 2, ...",
            usage=True,
        )
    parts = {int(name): index for name, index in indices_by_name.items()}
    if parts.keys() != set(range(clients)):
        beyond, lacks = sorted(parts.keys() - range(clients)), set(range(clients)) - parts.keys()
        fault = f"has client {beyond[0]}" if beyond else f"has no client {min(lacks)}"
        total = len(parts)
        numbering = "" if max(parts) < total else f"number its clients from 0 to {total - 1}, and "
        raise FldiagError(
            f"partition {path} {fault}, and clients.total = {clients}",
            f"{numbering}set clients.total = {total}",
            usage=True,
        )
    for message, remedy in file_faults(parts, examples, may_repeat=os.path.isdir(path)):
        raise FldiagError(f"partition {path}: {message}", remedy, usage=True)
    return [parts[k] for k in range(clients)]


def file_faults(
    parts: Mapping[Any, np.ndarray], examples: int, *, may_repeat: bool
) -> Iterator[tuple[str, str]]:
    """Why training refuses these clients' sorted indices, each fault with its remedy. ``may_repeat``: a client may have an
    example twice, as some kinds of partition deal."""
    for k, index in sorted(parts.items()):
        if not len(index):
            yield (
                f"client {k} has no examples",
                "give it some, or leave it out and number the others anew",
            )
            continue
        if index[-1] >= examples:
            yield (
                f"client {k} has example {index[-1]}, and the data have {examples} training examples",
                f"give the data of this partition (--data, data.name), or indices from 0 to {examples - 1}",
            )
        twice = index[1:][index[1:] == index[:-1]]
        if len(twice) and not may_repeat:
            yield (
                f"client {k} has example {twice[0]} twice",
                "list every example of a client once; a run's partition that repeats them is read from the run's folder",
            )


def file_remarks(parts: Sequence[np.ndarray], examples: int) -> list[str]:
    """What to know of a partition from a file: examples of several clients, and of none."""
    owners = np.zeros(examples, dtype=np.int64)
    for part in parts:
        owners[np.unique(part)] += 1
    counts = {"several clients": int((owners > 1).sum()), "no client": int((owners == 0).sum())}
    return [
        f"partition: {count} of {examples} training examples belong to {owner}"
        for owner, count in counts.items()
        if count
    ]


def summary(parts: Sequence[np.ndarray], labels: Any) -> pd.DataFrame:
    """Examples of every class at every client, zeros included: int64 columns client, class, count."""
    labels = _labels(labels, "summary")
    classes = int(labels.max()) + 1
    classes_of_examples = labels[np.concatenate(parts)]
    owner = np.repeat(np.arange(len(parts)), sizes(parts))
    cells = np.bincount(owner * classes + classes_of_examples, minlength=len(parts) * classes)
    counts = cells.reshape(len(parts), classes)
    client, label = np.indices(counts.shape)
    return pd.DataFrame({"client": client.ravel(), "class": label.ravel(), "count": counts.ravel()})


def save(path: str | os.PathLike[str] | IO[bytes], parts: Sequence[np.ndarray]) -> None:
    """Writes a partition as npz: client k's are ``indices[offsets[k]:offsets[k + 1]]`` (both int64)."""
    offsets = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
    np.savez_compressed(path, indices=np.concatenate(parts).astype(np.int64), offsets=offsets)


def load_parts(path: str | os.PathLike[str]) -> Parts:
    """The partition that ``save`` wrote. Raises FldiagError for a missing, damaged or foreign file."""
    remedy = "train again, or point to the partition.npz of a run"
    try:
        with np.load(path, allow_pickle=False) as file:
            return split_indices(file["indices"], file["offsets"])
    except FileNotFoundError:
        raise FldiagError(f"no partition at {path}", remedy) from None
    except Exception as error:  # a damaged archive can make the reader raise anything
        raise FldiagError(f"{path} is not a partition ({error})", remedy) from None


def sizes(parts: Sequence[np.ndarray]) -> np.ndarray:
    """How many examples every client has, int64 [clients]."""
    return np.array([len(part) for part in parts])


def same(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> bool:
    """Whether every client has the same examples in both."""
    return len(one) == len(other) and all(map(np.array_equal, one, other))


def _labels(labels: Any, kind: str) -> np.ndarray:
    labels = np.asarray(labels.detach().cpu() if hasattr(labels, "detach") else labels)
    if kind == "iid" and labels.ndim:
        return labels
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or (len(labels) and labels.min() < 0):
        raise FldiagError(
            f"{kind!r} needs class labels, and these are {labels.dtype} {list(labels.shape)}",
            "give non-negative integers [n]; regression targets can only be split iid",
            usage=True,
        )
    return labels


def _by_class(labels: np.ndarray) -> Parts:
    """Indices of every class that occurs, in data set order."""
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)


def _check_whole_number(name: str, value: Any, low: int | None = 1) -> None:
    is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_whole or (low is not None and value < low):
        at_least = "" if low is None else f" of at least {low}"
        raise FldiagError(f"{name} = {value!r}", f"use a whole number{at_least}", usage=True)


def _check_alpha(value: Any) -> None:
    is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:
        raise FldiagError(
            f"partition.alpha = {value!r}", "use a number above 0, such as 0.1", usage=True
        )
