"""Where to compute."""

from __future__ import annotations

from typing import Any

from fldiag.errors import FldiagError, nearest

KNOWN = ("auto", "cpu", "cuda", "mps")


def device_of(name: Any, dtype: Any = None) -> str:
    """The device that is meant, once it is sure that it is there.

    Args:
        name: auto (CUDA where it is usable, else the CPU), cpu, cuda, cuda:N or mps, or a ``torch.device``. Auto never takes
            mps: it has no float64, in which curvature is accumulated.
        dtype: what will be computed in.

    Raises:
        FldiagError: an unknown device, one that is not there, or one that lacks the dtype.

    >>> device_of("cpu")
    'cpu'
    """
    text = str(name)
    if text == "cpu":
        return text
    import torch  # only here: the command line names devices without it

    kind, _, number = text.partition(":")
    if kind not in KNOWN or (number and not (kind == "cuda" and number.isdecimal())):
        raise FldiagError(f"unknown device {text!r}", f"{nearest(text, KNOWN)}, cuda:N", usage=True)
    there = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if kind == "auto":
        return "cuda" if there["cuda"] else "cpu"
    if not there[kind]:
        raise FldiagError(
            f"no {kind.upper()} device is available", "use the device cpu, or auto", usage=True
        )
    if number and int(number) >= torch.cuda.device_count():
        raise FldiagError(
            f"there is no device {text!r}",
            f"there are {torch.cuda.device_count()} CUDA devices",
            usage=True,
        )
    if kind == "mps" and dtype == torch.float64:
        raise FldiagError("mps has no float64", "use precision fp32, or the device cpu", usage=True)
    return text


def keep_memory() -> None:
    """Let this process keep up to 62 MB that were freed, as every step of a training asks for as much again, and new pages
    take time.

    glibc raises that limit by itself, to twice the largest block that was ever freed (mallopt(3), M_MMAP_THRESHOLD; blocks over
    32 MB do not count). Elsewhere nothing changes. The block is not written to, so it takes no memory.
    """
    import torch

    torch.empty(31 * 2**20, dtype=torch.uint8)
