"""Which machine it is, in words that say nothing of whose."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path


@cache
def machine() -> str:
    """Processor and number of cores, such as ``Intel Xeon Processor, 2 cores``."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        models = [line.split(":", 1)[1].strip() for line in info.read_text(errors="replace").splitlines()
                  if line.startswith("model name") and ":" in line]
        name = models[0] if models else name
    return f"{name}, {os.cpu_count()} cores"
