"""From the option ``--executor`` to the place where the work is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fldiag.execution.choice import chosen, cores
from fldiag.execution.given import Given
from fldiag.execution.pool import Pool, Serial
from fldiag.execution.processes import Processes
from fldiag.execution.remote import Work


def started(
    executor: Any,
    function: Callable[[Any, Any], Any],
    shared: Any,
    *,
    threads: int | None = None,
    name: Callable[[Any], str] = str,
    most: int | None = None,
) -> Pool:
    """The place where units of this work are done.

    Args:
        executor: see :func:`fldiag.execution.choice.chosen`.
        function: ``function(shared, unit)``, found by its name in a module.
        shared: state that all units need; goes to a worker once.
        threads: PyTorch's threads at every unit, by default as many as here.
        name: what a unit is called in messages.
        most: how many units there are, where that is known: no more workers are started.

    Raises:
        FldiagError: an unknown executor, or a cluster that cannot be reached or has no fldiag of this version.
    """
    import torch  # only here: diagnostics name this function before anything is computed

    choice = chosen(executor)
    work = Work(function, shared, threads or torch.get_num_threads())
    if choice.kind == "serial" or (choice.kind == "processes" and most is not None and most <= 1):
        return Serial(work, name)
    if choice.kind == "processes":
        workers = choice.workers or cores(work.threads)
        return Processes(work, name, min(workers, most or workers))
    if choice.kind == "dask":
        from fldiag.execution.cluster import (
            Cluster,
        )  # distributed is an extra, and takes a second to import

        return Cluster(work, name, choice)
    assert choice.given is not None
    return Given(work, name, choice.given)
