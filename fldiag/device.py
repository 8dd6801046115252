"""Where to compute, and with how much memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from fldiag.errors import FldiagError, nearest


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

    counts = {
        "cpu": 1,
        "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "mps": int(torch.backends.mps.is_available()),
    }
    if text == "auto":
        return "cuda" if counts["cuda"] else "cpu"
    kind, _, number = text.partition(":")
    if kind not in counts or not (number or "0").isdecimal():
        known = f"{nearest(text, ('auto', *counts))}, cuda:N"
        raise FldiagError(f"unknown device {text!r}", known, usage=True)
    if int(number or 0) >= counts[kind]:
        raise FldiagError(f"there is no device {text!r}", "use the device cpu, or auto", usage=True)
    if kind == "mps" and dtype == torch.float64:
        raise FldiagError("mps has no float64", "use precision fp32, or the device cpu", usage=True)
    return text


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """In this context a GPU's convolutions in float32 are that, and come out the same each time.

    PyTorch rounds their inputs to 10 bits of the mantissa (TF32) and may add in another order at each call, unless told
    otherwise; the settings are the process's, and afterwards what they were. Those of matrix products are left alone: by default
    they are exact.
    """
    import torch

    cudnn = torch.backends.cudnn
    settings: list[tuple[Any, str, Any]] = [
        (cudnn, "benchmark", False),
        (cudnn, "deterministic", True),
        (cudnn, "allow_tf32", False),
    ]
    # torch 2.9 added a second way to say it; the two have to agree, or models that set ``cudnn.flags`` fail
    parts = (getattr(cudnn, name, None) for name in ("conv", "rnn"))
    settings += [(part, "fp32_precision", "ieee") for part in parts if part is not None]
    before = [_setting(place, name) for place, name, _ in settings]
    for place, name, value in settings:
        setattr(place, name, value)
    try:
        yield
    finally:
        for (place, name, _), value in zip(settings, before, strict=True):
            setattr(place, name, value)


def _setting(place: Any, name: str) -> Any:
    """What is set. ``allow_tf32`` cannot be read where somebody has set the second way alone: then it is at its default."""
    try:
        return getattr(place, name)
    except RuntimeError:
        return True


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads of PyTorch; afterwards as many as before."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def keep_memory() -> None:
    """Let this process keep up to 62 MB that were freed, as every step of a training asks for as much again, and new pages
    take time.

    glibc raises that limit by itself, to twice the largest block that was ever freed (mallopt(3), M_MMAP_THRESHOLD; blocks over
    32 MB do not count). Elsewhere nothing changes. The block is not written to, so it takes no memory.
    """
    import torch

    torch.empty(31 * 2**20, dtype=torch.uint8)
