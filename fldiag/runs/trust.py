"""Below torch 2.10 a ``.pt`` file is read only where the user says that it is their own.

``torch.load(weights_only=True)`` could be made to execute code below 2.6 (CVE-2025-32434) and to corrupt memory below 2.10
(CVE-2026-24747). Safetensors and arrays of numpy need no consent, and there fldiag writes its own runs as safetensors.
"""

from __future__ import annotations

import os
from pathlib import Path

from fldiag.errors import FldiagError

#: The oldest torch that reads a stranger's ``.pt`` file safely.
SAFE = "2.10"
#: The user's own files and folders, with ``os.pathsep`` between them, or ``ALL``. Workers inherit it.
VARIABLE, ALL = "FLDIAG_TRUST_FILES", "all"


def trust(path: str | Path = ALL) -> None:
    """Consent to read this ``.pt`` file, or those in this folder; until the process ends, also in workers that it starts."""
    paths = _trusted_paths()
    name = ALL if path == ALL else os.path.realpath(path)
    if name not in paths:
        os.environ[VARIABLE] = os.pathsep.join([*paths, name])


def reads_pt(path: Path | None = None) -> bool:
    """Whether this ``.pt`` file (None: any) can be read."""
    import torch  # only here: the command line speaks of consent without it
    from torch.torch_version import TorchVersion

    paths = _trusted_paths()
    if TorchVersion(torch.__version__) >= SAFE or ALL in paths:
        return True
    file = None if path is None else Path(os.path.realpath(path))
    return file is not None and any(name in map(str, (file, *file.parents)) for name in paths)


def check_trust(path: Path) -> None:
    """Raises FldiagError for a ``.pt`` file that this torch cannot read safely, without consent."""
    if reads_pt(path):
        return
    import torch

    raise FldiagError(
        f"{path} is in torch's format, and with torch {torch.__version__} a prepared file of that kind can harm this machine "
        "(CVE-2026-24747, below 2.6 also CVE-2025-32434)",
        "install torch 2.10 or later, or take a .safetensors file; where the file is your own: --trust-file (in Python: "
        f"trust_file=True in fldiag.load, diagnose or convert; for all commands and workers: {VARIABLE}={ALL})",
        usage=True,
    )


def _trusted_paths() -> list[str]:
    return [name for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]
