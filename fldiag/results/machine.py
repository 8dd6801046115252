"""Which machine and which code it is: what decides the last bits of a number, in words that say nothing of whose."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

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
def commit() -> str | None:
    """The project's commit that is running, ``-dirty`` where the code differs from it; None where nobody knows.

    Of a source tree git says it; of an installed package the record that pip keeps of where it came from."""
    try:
        if not (ROOT / ".git").exists():
            record = json.loads(distribution("fldiag").read_text("direct_url.json") or "{}")
            return str(record["vcs_info"]["commit_id"])
        words = ["describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
        options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 10}
        answer = subprocess.run(["git", "-C", str(ROOT), *words], check=True, **options)
        return answer.stdout.strip() or None
    except (PackageNotFoundError, KeyError, ValueError, TypeError, OSError, SubprocessError):
        return None  # no git is no reason to fail
