"""Where a number came from: versions, precision, device, seed, and digests of what it was computed from."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fldiag.errors import FldiagError, __version__

if TYPE_CHECKING:
    import torch


def _feed(state: Any, thing: Any) -> None:
    torch = sys.modules.get("torch")  # without it nothing is a tensor
    if torch is not None and isinstance(thing, torch.Tensor):
        thing = thing.detach().cpu()
        if thing.dtype == torch.bfloat16:  # numpy has no bfloat16; its bits are what counts
            state.update(b"bfloat16")
            thing = thing.view(torch.int16)
        thing = thing.numpy()
    if isinstance(thing, np.ndarray):
        state.update(f"array {thing.dtype.str} {thing.shape}".encode())
        state.update(np.ascontiguousarray(thing).data.cast("B") if thing.size else b"")
    elif isinstance(thing, bytes):
        state.update(b"bytes %d " % len(thing) + thing)
    elif isinstance(thing, Mapping):
        state.update(b"map %d" % len(thing))
        for key in sorted(thing, key=str):
            _feed(state, str(key))
            _feed(state, thing[key])
    elif isinstance(thing, (list, tuple)):
        state.update(b"list %d" % len(thing))
        for part in thing:
            _feed(state, part)
    elif thing is None or isinstance(thing, (str, bool, int, float)):
        text = json.dumps(thing)
        state.update(f"{type(thing).__name__} {len(text)} {text}".encode())
    else:
        raise FldiagError(
            f"cannot digest a {type(thing).__name__}",
            "give tensors, arrays, numbers, text, or lists and dicts of these",
        )


def digest(*things: Any) -> str:
    """64 hexadecimal digits that change with any bit of the tensors, arrays, text, lists or dicts given.

    Dicts are digested in the order of their keys, so insertion order does not matter.
    Raises FldiagError for anything whose bits are not defined (such as an open file).
    """
    state = hashlib.blake2b(digest_size=32)
    _feed(state, list(things))
    return state.hexdigest()


def provenance(
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    seed: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    """What a reader needs to get the same number again, as a dict that JSON can hold.

    Keys: fldiag, commit, torch, capability, dtype, device, device_name, threads, seed, and ``more``.
    """
    import torch  # only here: digests of texts and arrays need none

    place = torch.device(device or "cpu")
    device_name = torch.cuda.get_device_name(place) if place.type == "cuda" else place.type
    return {
        "fldiag": __version__,
        "commit": commit(),
        "torch": torch.__version__,
        "capability": capability(),
        "dtype": dtype and str(dtype).removeprefix("torch."),
        "device": str(place),
        "device_name": device_name,
        "threads": torch.get_num_threads(),
        "seed": seed,
        **more,
    }


# The machine and the code: what decides the last bits of a number, in words that say nothing of whose

ROOT = Path(__file__).parents[2]


@cache
def machine() -> str:
    """Processor and number of cores, such as ``Intel Xeon Processor, 2 cores``."""
    info = Path("/proc/cpuinfo")
    text = info.read_text("utf-8", errors="replace") if info.is_file() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    name = model[1] if model else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def capability() -> str:
    """The instruction set that PyTorch's own kernels use here, such as ``AVX512``: other sets round differently."""
    import torch  # only here and below: reports read what others computed

    return torch.backends.cpu.get_cpu_capability()


@cache
def sources() -> str:
    """The digest of fldiag's source files: it differs where the code does, also between two commits."""
    folder = Path(__file__).parents[1]
    return digest({str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.py")})


@cache
def commit() -> str | None:
    """The project's commit that is running, ``-dirty`` where the code differs from it; None where nobody knows.

    Of a source tree git says it; of an installed package the record that pip keeps of where it came from."""
    try:
        if not (ROOT / ".git").exists():
            record = json.loads(distribution("fldiag").read_text("direct_url.json") or "{}")
            return str(record["vcs_info"]["commit_id"])
        command = [
            "git",
            "--no-optional-locks",
            "describe",
            "--always",
            "--abbrev=40",
            "--exclude=*",
            "--dirty",
        ]
        answer = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=10)
        return answer.stdout.decode("ascii").strip() or None
    except Exception:
        return None  # no git is no reason to fail
