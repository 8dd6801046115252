"""What the option ``--executor`` means, looked at before anything is computed."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from fldiag.errors import FldiagError, unknown

KINDS = ("serial", "processes", "dask")


@dataclass(frozen=True)
class Choice:
    """``workers``: how many processes of this machine, where it was said; ``address``: a Dask scheduler's; ``given``: somebody's
    own executor."""

    kind: str
    workers: int | None = None
    address: str = ""
    given: Executor | None = None

    def __str__(self) -> str:
        if self.given is not None:
            return type(self.given).__name__
        more = self.workers or self.address
        return f"{self.kind}:{more}" if more else self.kind


def cores(threads: int | None = None) -> int:
    """Workers of this machine that do not crowd each other, with so many threads each (by default as many as here)."""
    import joblib  # only here: what an executor is called is known without them
    import torch

    return max(
        1, joblib.cpu_count() // (threads or torch.get_num_threads())
    )  # those that this process may use


def chosen(executor: Any) -> Choice:
    """``serial``, ``processes[:N]``, ``dask[:ADDRESS]``, or an object with the interface of ``concurrent.futures.Executor``.

    Raises:
        FldiagError: another name, or a number of workers that is none.

    >>> chosen("processes:4")
    Choice(kind='processes', workers=4, address='', given=None)
    """
    if isinstance(executor, Choice):
        return executor
    if not isinstance(executor, str):
        if not callable(getattr(executor, "submit", None)):
            raise FldiagError(
                f"executor {executor!r}",
                "give serial, processes:4, dask:ADDRESS, or an executor of concurrent.futures",
                usage=True,
            )
        return Choice("given", given=executor)
    kind, colon, rest = executor.partition(":")
    if kind not in KINDS:
        raise unknown("executor", kind, KINDS)
    if kind == "processes":
        if colon and (not rest.isdecimal() or int(rest) < 1):
            raise FldiagError(
                f"executor {executor!r}: the number of workers is not valid",
                "write for example processes:4",
                usage=True,
            )
        return Choice(kind, int(rest) if rest else None)
    if kind == "dask":
        if colon and ":" not in rest:
            raise FldiagError(
                f"executor {executor!r}: the scheduler's address is not valid",
                "write for example dask:tcp://HOST:8786, or dask for a cluster on this machine",
                usage=True,
            )
        return Choice(kind, address=rest)
    if colon:
        raise FldiagError(f"executor {executor!r}", "write serial", usage=True)
    return Choice(kind)
