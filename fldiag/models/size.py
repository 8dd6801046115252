"""How large a model will be, found before it is allocated."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import nn

from fldiag.errors import FldiagError


def check(name: str, make: Callable[[], nn.Module], most: int | None = None) -> None:
    """Raises FldiagError when the model that ``make`` returns has more parameters than ``most``, or than fit into memory."""
    parameters = count(make)
    if most is not None and parameters > most:
        raise FldiagError(
            f"model {name!r} as the file describes it has {parameters:,} parameters, and the file holds {most:,} "
            "numbers",
            "the file was edited; use the original",
        )
    there = memory()
    if 4 * parameters > there:
        raise FldiagError(
            f"model {name!r} with these options has {parameters:,} parameters, {4 * parameters / 1e9:,.0f} GB, and "
            f"this machine has {there / 1e9:,.0f} GB of memory",
            "choose a smaller model",
            usage=True,
        )


def count(make: Callable[[], nn.Module]) -> int:
    """How many parameters a model has, found without allocating them; 0 for one that cannot be built so, and 2**62 for one
    with a tensor of more numbers than can be counted."""
    try:
        with torch.device("meta"):
            return sum(p.numel() for p in make().parameters())
    except FldiagError:
        raise
    except Exception as error:  # a model of another package may need the values of its tensors; it is then built as it is
        return 2**62 if "overflow" in str(error).lower() else 0


@cache
def memory() -> int:
    """Bytes of memory of this machine, or of the control group that the process may use; 2**62 where nobody says."""
    found = [2**62]
    with contextlib.suppress(AttributeError, ValueError, OSError):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            found.append(int(Path(limit).read_text("utf-8")))  # "max" where there is no limit
    return min(n for n in found if n > 0)
