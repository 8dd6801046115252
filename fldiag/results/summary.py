"""What a person reads first of a result table: small tables, sentences and remarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fldiag.results.table import Row


@dataclass(frozen=True)
class Small:
    """A small table. ``columns``: key of the rows -> heading. Nothing is shown of one without rows."""

    rows: Sequence[Row]
    columns: Mapping[str, str]


@dataclass(frozen=True)
class Say:
    """A sentence that belongs to the answer."""

    text: str


@dataclass(frozen=True)
class Note:
    """A remark beside the answer: what was left out, or how far a number can be trusted.

    ``about``: rows that a machine reads under this key instead (the remark may shorten them)."""

    text: str
    about: Mapping[str, Any] | None = None


Item = Small | Say | Note
