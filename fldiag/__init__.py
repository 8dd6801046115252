"""fldiag: diagnose federated learning from its checkpoints.

The public names are listed in ``__all__``; everything else may change. They are imported when first used,
so ``import fldiag`` is quick.
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    **dict.fromkeys(("load", "diagnose", "draw", "catalogue", "check", "diff"), "fldiag.api"),
    "train": "fldiag.training.rounds",
    "sweep": "fldiag.training.sweep",
    "Problem": "fldiag.problem.problem",
    "History": "fldiag.rounds.history",
    "Config": "fldiag.config",
    "Method": "fldiag.method",
    "Part": "fldiag.method",
    "Run": "fldiag.checkpoint.run",
    "Recorder": "fldiag.export.recorder",
    "convert": "fldiag.export.convert",
    "forecast": "fldiag.training.forecast",
    "Checkpoint": "fldiag.checkpoint.schema",
    "FldiagError": "fldiag.errors",
}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(importlib.import_module(_WHERE[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'fldiag' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
