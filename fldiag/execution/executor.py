"""What the options ``--executor`` and ``--shard`` mean, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

from fldiag.errors import FldiagError, unknown

T = TypeVar("T")
KINDS = ("serial", "processes", "dask")


@dataclass(frozen=True)
class ExecutorSpec:
    """One way to run units.

    ``kind``: one of ``KINDS``, or ``futures``. ``workers``: how many processes of this machine
    (None: as many as there are cores); ``address``: of a Dask scheduler; ``futures``: an executor
    handed over.
    """

    kind: str
    workers: int | None = None
    address: str = ""
    futures: Executor | None = None

    def __str__(self) -> str:
        if self.futures is not None:
            return type(self.futures).__name__
        suffix = self.workers or self.address
        return f"{self.kind}:{suffix}" if suffix else self.kind

    def workers_here(self, threads: int | None = None) -> int | None:
        """Units done at a time, with so many threads each; None where only a cluster or the executor handed over knows."""
        if self.kind == "serial":
            return 1
        if self.address or self.futures is not None:
            return None
        return self.workers or cores(threads)


def cores(threads: int | None = None) -> int:
    """Workers of this machine that do not crowd each other, with so many threads each (by default as many as here)."""
    import joblib  # only here: an executor's name is known without them
    import torch

    # joblib counts the cores that this process may use
    return max(1, joblib.cpu_count() // (threads or torch.get_num_threads()))


def parse_executor(executor: Any) -> ExecutorSpec:
    """``serial``, ``processes[:N]``, ``dask[:ADDRESS]``, or an object with the interface of ``concurrent.futures.Executor``.

    Raises:
        FldiagError: another name, or a number of workers that is none.

    >>> parse_executor("processes:4")
    ExecutorSpec(kind='processes', workers=4, address='', futures=None)
    """
    if isinstance(executor, ExecutorSpec):
        return executor
    if not isinstance(executor, str):
        if not callable(getattr(executor, "submit", None)):
            raise FldiagError(
                f"executor {executor!r}",
                "give serial, processes:4, dask:ADDRESS, or an executor of concurrent.futures",
                usage=True,
            )
        return ExecutorSpec("futures", futures=executor)
    kind, colon, suffix = executor.partition(":")
    if kind not in KINDS:
        raise unknown("executor", kind, KINDS)
    if kind == "processes":
        if colon and (not suffix.isdecimal() or int(suffix) < 1):
            raise FldiagError(
                f"executor {executor!r}: the number of workers is not valid",
                "write for example processes:4",
                usage=True,
            )
        return ExecutorSpec(kind, int(suffix) if suffix else None)
    if kind == "dask":
        if colon and ":" not in suffix:
            raise FldiagError(
                f"executor {executor!r}: the scheduler's address is not valid",
                "write for example dask:tcp://HOST:8786, or dask for a cluster on this machine",
                usage=True,
            )
        return ExecutorSpec(kind, address=suffix)
    if colon:
        raise FldiagError(f"executor {executor!r}", "write serial", usage=True)
    return ExecutorSpec(kind)


@dataclass(frozen=True)
class Shard:
    """The ``number``-th of ``of`` parts of a plan, from 1, for machines that share nothing but a folder (Slurm array jobs)."""

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
