"""Parts of one plan for machines that share nothing but a folder, such as the jobs of a Slurm array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from fldiag.errors import FldiagError

T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """The ``number``-th of ``of`` parts, from 1."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str | None) -> Shard | None:
        """``2/4``; None stays None.

        Raises FldiagError for what is no such part."""
        if text is None:
            return None
        number, _, of = text.partition("/")
        if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
            raise FldiagError(
                f"--shard {text}",
                "give the part and the number of parts: --shard 1/4 to --shard 4/4",
                usage=True,
            )
        return cls(int(number), int(of))

    def part(self, items: Sequence[T]) -> list[T]:
        """Every ``of``-th item. The parts together are all of them, each once.

        >>> Shard.parse("2/3").part("abcdefg")
        ['b', 'e']
        """
        return list(items[self.number - 1 :: self.of])

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"
