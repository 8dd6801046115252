"""Whether the weights of two runs belong to one model."""

from __future__ import annotations

from typing import Any

from fldiag.errors import FldiagError
from fldiag.runs.run import Run
from fldiag.runs.schema import Checkpoint


def same_model(a: Run | Checkpoint, b: Run | Checkpoint) -> bool:
    """By the configs where both say the same, else by the names and shapes of the tensors."""
    config = _section(a)
    if config.get("name") and config == _section(b):
        return True
    shapes = _shapes(a)
    return shapes is not None and shapes == _shapes(b)


def _section(member: Run | Checkpoint) -> dict[str, Any]:
    config = member.index["config"] if isinstance(member, Run) else member.config
    section = config.get("model")
    return section if isinstance(section, dict) else {}


def _shapes(member: Run | Checkpoint) -> dict[str, tuple[int, ...]] | None:
    """Of every tensor; None where there are no weights to read."""
    try:
        checkpoint = member.checkpoint() if isinstance(member, Run) else member
    except FldiagError:
        return None
    return {name: tuple(tensor.shape) for name, tensor in checkpoint.state.items()}
