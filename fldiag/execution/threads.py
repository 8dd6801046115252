"""PyTorch's threads, for as long as something is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads; afterwards as many as before."""
    import torch  # only here: who plans units need not have it

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
