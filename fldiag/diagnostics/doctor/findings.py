"""What a check says of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Severity = Literal["fault", "hint", "healthy", "not checked"]
#: From the worst to the best. A fault is arithmetic that anybody can repeat, a hint is statistics.
SEVERITIES: tuple[Severity, ...] = ("fault", "hint", "healthy", "not checked")


@dataclass(frozen=True)
class Finding:
    """``what`` is wrong, by which numbers (``evidence``), what to do or what else explains it (``remedy``); and where."""

    severity: Severity
    what: str
    evidence: str
    remedy: str
    rounds: Sequence[int] = ()
    client: int | None = None
    layer: str | None = None


def joined(items: Sequence[object], most: int = 6) -> str:
    """``1, 2, 5``, or the first of many."""
    text = ", ".join(map(str, items[:most]))
    return text + (f" and {len(items) - most} more" if len(items) > most else "")
