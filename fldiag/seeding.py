"""Stateless seeds: every random draw names its purpose, so order, executor and interruptions cannot shift it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def seed_for(seed: int, purpose: str, *indices: int) -> int:
    """A 63-bit seed from the run seed, a purpose and indices such as (round, client)."""
    text = ":".join(map(str, (int(seed), purpose, *map(int, indices))))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def numpy_rng(seed: int, purpose: str, *indices: int) -> np.random.Generator:
    return np.random.default_rng(seed_for(seed, purpose, *indices))


def torch_rng(seed: int, purpose: str, *indices: int) -> torch.Generator:
    import torch  # only here: grids and tables draw from numpy's

    return torch.Generator().manual_seed(seed_for(seed, purpose, *indices))
