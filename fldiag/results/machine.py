"""Which machine and which code it is: what decides the last bits of a number, in words that say nothing of whose."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def machine() -> str:
    """Processor and number of cores, such as ``Intel Xeon Processor, 2 cores``."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        models = [
            line.split(":", 1)[1].strip()
            for line in info.read_text("utf-8", errors="replace").splitlines()
            if line.startswith("model name") and ":" in line
        ]
        name = models[0] if models else name
    return f"{name}, {os.cpu_count()} cores"


def capability() -> str:
    """The instruction set that PyTorch's own kernels use here, such as ``AVX512``: other sets round differently."""
    import torch  # only here and below: reports read what others computed

    return torch.backends.cpu.get_cpu_capability()


@cache
def commit() -> str | None:
    """The project's commit that is running, ``-dirty`` where the code differs from it; None where nobody knows.

    Of a source tree git says it; of an installed package the record that pip keeps of where it came from."""
    if (ROOT / ".git").exists():
        return _git("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")
    try:
        record = json.loads(distribution("fldiag").read_text("direct_url.json") or "{}")
        return str(record["vcs_info"]["commit_id"])
    except (PackageNotFoundError, KeyError, ValueError, TypeError):
        return None


def _git(*words: str) -> str | None:
    """The answer of git about this source tree, or None: no git is no reason to fail."""
    try:
        answer = subprocess.run(
            ["git", "-C", str(ROOT), *words],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None
