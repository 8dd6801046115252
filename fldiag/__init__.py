"""fldiag: diagnose federated learning from its checkpoints.

The public names are listed in ``__all__``; everything else may change. They are imported when first used,
so ``import fldiag`` is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fldiag.errors import __version__ as __version__

if TYPE_CHECKING:  # what a type checker sees; the modules are those of _MODULES
    from fldiag.api import catalogue, check, diagnose, diff, draw, load
    from fldiag.config import Config
    from fldiag.errors import FldiagError
    from fldiag.integrations.importer import convert
    from fldiag.integrations.recorder import Recorder
    from fldiag.method import Method, Part
    from fldiag.problem.problem import Problem
    from fldiag.runs.checkpoint import Checkpoint
    from fldiag.runs.history import History
    from fldiag.runs.run import Run
    from fldiag.training.sweep import sweep
    from fldiag.training.train import train

__all__ = [
    "Checkpoint",
    "Config",
    "FldiagError",
    "History",
    "Method",
    "Part",
    "Problem",
    "Recorder",
    "Run",
    "catalogue",
    "check",
    "convert",
    "diagnose",
    "diff",
    "draw",
    "load",
    "sweep",
    "train",
]
#: Where a public name is, unless it is in fldiag.api.
_MODULES = {
    "Checkpoint": "fldiag.runs.checkpoint",
    "Config": "fldiag.config",
    "FldiagError": "fldiag.errors",
    "History": "fldiag.runs.history",
    "Method": "fldiag.method",
    "Part": "fldiag.method",
    "Problem": "fldiag.problem.problem",
    "Recorder": "fldiag.integrations.recorder",
    "Run": "fldiag.runs.run",
    "convert": "fldiag.integrations.importer",
    "sweep": "fldiag.training.sweep",
    "train": "fldiag.training.train",
}


if not TYPE_CHECKING:  # a type checker knows the names, and complains of others

    def __getattr__(name: str) -> Any:
        if name in __all__:
            value = getattr(importlib.import_module(_MODULES.get(name, "fldiag.api")), name)
            globals()[name] = value
            return value
        raise AttributeError(f"module 'fldiag' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
