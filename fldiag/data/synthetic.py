"""A federation of any number of clients, computed client by client from seeds and never in memory as a whole.

Client k has ``EXAMPLES`` pictures, each a noisy and shifted copy of its class's pattern. Noise and shift come from a seed of the
client, and the classes from the partition (``LazyPartition``): so a client's data depend neither on the number of clients nor
on the order of calls. Training example i of the data set is the picture that slot i // ``CLASSES`` shows when its class is
i % ``CLASSES``; client k has slots k * ``EXAMPLES`` and on, and of each slot one example.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, cast, overload

import numpy as np
import torch
from torch import Tensor

from fldiag import registry
from fldiag.data.dataset import Dataset, LazyRows
from fldiag.errors import FldiagError
from fldiag.seeding import numpy_rng

EXAMPLES, CLASSES, SIDE, TEST = 32, 10, 8, 1000
MOST_CLIENTS = 10_000_000
#: Deviation of the noise, that of a pattern being 1, and the pixels of 0 to 255 that a deviation of 1 takes.
NOISE, CONTRAST = 0.6, 32.0
#: Kinds of partition that deal to one client without looking at the others, and the option of each.
KINDS = {"dirichlet": "alpha", "pathological": "classes", "iid": None}


@registry.dataset("synthetic")
def synthetic(root: str | None = None, download: bool = False) -> Dataset:
    """Any number of clients with 32 examples each, 8x8 gray, 10 classes, made when they are sampled / 1,000 test (no file).

    A noisy, shifted pattern a class. ``clients.total`` says how many clients (up to 10,000,000), and ``partition.kind`` what
    they hold: ``dirichlet`` with alpha, ``pathological`` with classes, or ``iid``; each client is dealt by a seed of its own.
    """
    n = MOST_CLIENTS * EXAMPLES * CLASSES
    x = LazyRows(partial(_pictures, purpose="synthetic client"), (n, 1, SIDE, SIDE), torch.uint8)
    y = LazyRows(_labels, (n,), torch.int64)
    test = np.arange(TEST) * CLASSES + np.arange(TEST) % CLASSES
    return Dataset(
        "synthetic",
        cast(Tensor, x),
        cast(Tensor, y),
        _pictures(test, "synthetic test"),
        _labels(test),
        classes=CLASSES,
        mean=(0.5,),
        std=(0.25,),
    )


def _labels(index: np.ndarray) -> Tensor:
    return torch.from_numpy(index % CLASSES)


def _pictures(index: np.ndarray, purpose: str) -> Tensor:
    """uint8 [n, 1, SIDE, SIDE]."""
    client, slot = np.divmod(index // CLASSES, EXAMPLES)
    x = np.empty((len(index), SIDE, SIDE), dtype=np.float32)
    for k in np.unique(client):
        rows = np.flatnonzero(client == k)
        rng = numpy_rng(0, purpose, int(k))
        noise = rng.standard_normal((EXAMPLES, SIDE, SIDE), dtype=np.float32)
        down, right = rng.integers(3, size=(2, EXAMPLES))
        at = slot[rows]
        patterns = _patterns()[index[rows] % CLASSES, down[at], right[at]]
        x[rows] = patterns + np.float32(NOISE) * noise[at]
    pixels = np.clip(np.rint(128 + np.float32(CONTRAST) * x), 0, 255).astype(np.uint8)
    return torch.from_numpy(pixels[:, None])


@cache
def _patterns() -> np.ndarray:
    """Every class's pattern at each of 3 x 3 places: float32 [CLASSES, 3, 3, SIDE, SIDE]."""
    wide = numpy_rng(0, "synthetic patterns").standard_normal((CLASSES, SIDE + 6, SIDE + 6))
    for _ in range(2):  # smooth, so that a shifted pattern resembles itself
        wide = (wide[:, :-1] + wide[:, 1:])[:, :, :-1] + (wide[:, :-1] + wide[:, 1:])[:, :, 1:]
    wide = (wide - wide.mean((1, 2), keepdims=True)) / wide.std((1, 2), keepdims=True)
    places = np.lib.stride_tricks.sliding_window_view(wide, (SIDE, SIDE), (1, 2))[:, :3, :3]
    return places.astype(np.float32)


class LazyPartition(Sequence[np.ndarray]):
    """Which examples every client has: drawn when asked for, from the partition's seed and the client's number alone.

    ``kind`` and ``option`` as in the section ``partition``: each slot's class is drawn from the client's own Dirichlet prior
    (``dirichlet``, alpha), from so many random classes (``pathological``, classes), or from all (``iid``).

    Raises FldiagError for a kind that deals to all clients at once, and for numbers out of range.
    """

    def __init__(self, kind: str, option: float | None, clients: int, seed: int):
        if kind not in KINDS:
            raise FldiagError(
                f"partition.kind = {kind!r} looks at all examples at once, and those of 'synthetic' are made "
                "client by client",
                f"use one of {', '.join(KINDS)}: --set partition.kind=dirichlet",
                usage=True,
            )
        if clients > MOST_CLIENTS:
            raise FldiagError(
                f"clients.total = {clients:,}",
                f"'synthetic' has at most {MOST_CLIENTS:,}",
                usage=True,
            )
        if kind == "pathological" and not 1 <= (option or 0) <= CLASSES:
            raise FldiagError(
                f"partition.classes = {option}, and the data have {CLASSES} classes",
                f"use at most {CLASSES}",
                usage=True,
            )
        self.kind, self.option, self.clients, self.seed = kind, option, int(clients), int(seed)

    def __len__(self) -> int:
        return self.clients

    @overload
    def __getitem__(self, client: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, client: slice) -> list[np.ndarray]: ...
    def __getitem__(self, client: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(client, slice):
            return [self[k] for k in range(*client.indices(self.clients))]
        if not 0 <= client < self.clients:
            raise IndexError(client)
        rng = numpy_rng(self.seed, f"synthetic {self.kind}", client)
        p = None
        if self.kind == "dirichlet":
            p = rng.dirichlet(np.full(CLASSES, float(self.option or 0)))
        elif self.kind == "pathological":
            p = np.zeros(CLASSES)
            p[rng.choice(CLASSES, int(self.option or 0), replace=False)] = 1 / int(self.option or 1)
        return (client * EXAMPLES + np.arange(EXAMPLES)) * CLASSES + rng.choice(
            CLASSES, EXAMPLES, p=p
        )

    @property
    def sizes(self) -> np.ndarray:
        """How many examples every client has, [clients]; takes no memory."""
        return np.broadcast_to(np.int64(EXAMPLES), self.clients)

    @property
    def recipe(self) -> dict[str, Any]:
        """What ``partition.save`` writes of it."""
        return {
            "kind": self.kind,
            "option": float(self.option or 0),
            "clients": self.clients,
            "seed": self.seed,
            "examples": EXAMPLES,
        }

    @staticmethod
    def of(recipe: dict[str, Any]) -> LazyPartition:
        """Raises ValueError for what is no recipe of this version."""
        if int(recipe["examples"]) != EXAMPLES:
            raise ValueError(f"its clients have {recipe['examples']} examples, here {EXAMPLES}")
        return LazyPartition(
            str(recipe["kind"]),
            float(recipe["option"]),
            int(recipe["clients"]),
            int(recipe["seed"]),
        )
