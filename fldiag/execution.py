"""Where work runs: this process, processes of this machine, a Dask cluster, or any ``concurrent.futures.Executor``.

A unit of work is ``function(shared, unit)``. What all units share (data, weights, a setup) goes to a worker once, not with
every unit. Where work runs decides no bits: every unit has the same number of PyTorch threads. A worker imports nothing from the
working directory that this process would not import from there.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    BrokenExecutor,
    CancelledError,
    Executor,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
)
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from queue import SimpleQueue
from typing import Any

import torch

from fldiag import registry
from fldiag.device import full_precision, threads
from fldiag.errors import FldiagError, __version__, first_line

NAMES = re.compile(r"serial|processes(:[1-9]\d*)?|dask(:.+:.+)?")


def check_executor(executor: str | Executor) -> str | Executor:
    """The executor, where it is ``serial``, ``processes[:N]``, ``dask[:ADDRESS]`` or one of ``concurrent.futures``.

    Raises:
        FldiagError: anything else.

    >>> check_executor("processes:4")
    'processes:4'
    """
    if not NAMES.fullmatch(str(executor)) and not hasattr(executor, "submit"):
        raise FldiagError(
            f"{executor!r} is no executor",
            "give serial, processes:4, dask or dask:tcp://HOST:8786",
            usage=True,
        )
    return executor


# -- what a worker does

Work = Callable[[Any], Any]


def _work_on(
    function: Callable[[Any, Any], Any], shared: Any, count: int, allowed: set[str], unit: Any
) -> Any:
    registry.ALLOWED.update(allowed)
    with full_precision(), threads(count):
        return function(shared, unit)


class Missing:
    """What a worker answers that lacks the work."""


_work: dict[str, Work] = {}  # of a worker, by key: the last one
# PyTorch's random state, and the environment, belong to the whole process
_one_at_a_time, _one_start = threading.Lock(), threading.Lock()


def _keep(key: str, work: Work) -> None:
    _work.clear()
    _work[key] = work


def _perform(key: str, unit: Any, *work: Work) -> Any:
    with _one_at_a_time:
        if work:
            _keep(key, *work)
        return _work[key](unit) if key in _work else Missing


def _end_with_parent() -> None:
    """A worker whose main process was killed would wait for units for ever."""

    def watch() -> None:
        multiprocessing.parent_process().join()  # type: ignore[union-attr]
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _versions() -> tuple[str, str]:
    return __version__, torch.__version__


# -- pools


class Pool(contextlib.ExitStack):
    """Does units of one work. Used as a context; leaving it ends the workers that are ours.

    ``map``: the results of units in their order, each as early as that allows; the units' own exceptions are raised.
    ``name``: what a unit is called in messages.
    """

    def __init__(self, work: Work, name: Callable[[Any], str]):
        super().__init__()
        self.work, self.name, self.key = work, name, uuid.uuid4().hex
        self.map: Callable[..., Iterator[Any]] = partial(map, work)  # in this process
        self._idle: SimpleQueue[Executor] = SimpleQueue()

    def start(self, workers: Sequence[Executor]) -> None:
        """Let these do the units: an executor for each unit that may be under way."""
        for worker in workers:
            self._idle.put(worker)
        callers = ThreadPoolExecutor(len(workers))
        self.callback(callers.shutdown, wait=False, cancel_futures=True)
        self.map = partial(callers.map, self._do)

    def _do(self, unit: Any) -> Any:
        """The result of a unit by an idle worker. One that dies is an error that names the unit."""
        worker = self._idle.get()
        try:
            result = _compute_on(worker, self.key, unit)
            return _compute_on(worker, self.key, unit, self.work) if result is Missing else result
        except Exception as error:
            is_dead = isinstance(error, (BrokenExecutor, CancelledError))
            if not is_dead and type(error).__module__ != "distributed.scheduler":
                raise
            raise FldiagError(
                f"{self.name(unit)}: its worker died ({first_line(error)}; out of memory?)",
                "run the same command again (train: with --resume, resume=True); finished work is kept",
            ) from error
        finally:
            self._idle.put(worker)


def open_pool(
    executor: str | Executor,
    function: Callable[[Any, Any], Any],
    shared: Any,
    *,
    name: Callable[[Any], str] = str,
) -> Pool:
    """The pool that does units of this work, each with as many threads of PyTorch as there are here.

    Args:
        executor: see ``check_executor``.
        function: ``function(shared, unit)``, found by its name in a module.
        shared: state that all units need; goes to a worker once.
        name: what a unit is called in messages.

    Raises:
        FldiagError: an unknown executor, or a cluster with another fldiag or PyTorch.
    """
    import joblib  # a sixth of a second, which a table from the store does not need

    kind, _, suffix = str(check_executor(executor)).partition(":")
    count = torch.get_num_threads()
    work = partial(_work_on, function, shared, count, registry.ALLOWED)
    pool, workers = Pool(work, name), joblib.cpu_count() // count or 1
    with _safe_start():
        if not isinstance(executor, str):
            pool.start([executor] * 256)  # as many under way, whatever the number of workers
        elif kind == "processes":
            pool.start([_process(pool) for _ in range(int(suffix or workers))])
        elif kind == "dask":
            pool.start([_dask(pool, suffix, workers)] * 256)
    return pool


def _process(pool: Pool) -> Executor:
    """A process, started with its first unit: when it dies, it is known which unit it had."""
    executor = ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"), initializer=_end_with_parent
    )

    def end() -> None:  # ended rather than waited for: PyTorch takes a second to leave
        for worker in [*executor._processes.values()]:
            worker.terminate()
        executor.shutdown(wait=False, cancel_futures=True)

    pool.callback(end)
    return executor


def _dask(pool: Pool, address: str, workers: int) -> Executor:
    """The workers of a scheduler; without an address, workers of one thread each on this machine."""
    import dask
    import distributed

    # a local worker may not come back after its death: units would wait for ever
    with dask.config.set({"distributed.scheduler.no-workers-timeout": "60s"}):
        where = (
            address
            or pool.enter_context(
                distributed.LocalCluster(
                    n_workers=workers,
                    threads_per_worker=1,
                    memory_limit=None,  # a share of it would stop a worker that holds a large model, for ever
                    dashboard_address=None,
                )
            )
        )
        client = distributed.Client(where, timeout=10, set_as_default=False)
    pool.enter_context(client)
    if different := {*client.run(_versions).values()} - {_versions()}:
        pool.close()
        raise FldiagError(
            f"Dask workers have fldiag and PyTorch {different}, and here are {_versions()}",
            "install the same versions in their environment",
        )
    client.run(_keep, pool.key, pool.work)
    return client.get_executor(retries=3, pure=False)  # type: ignore[no-any-return]


def _compute_on(worker: Executor, *arguments: Any) -> Any:
    with _safe_start():
        future = worker.submit(_perform, *arguments)
    return future.result()


@contextlib.contextmanager
def _safe_start() -> Iterator[None]:
    """Processes that start meanwhile do not search the working directory: a file multiprocessing.py beside a run that was sent
    would be executed. They also leave Ctrl-C to this process."""
    with _one_start:
        is_set = "PYTHONSAFEPATH" in os.environ
        os.environ["PYTHONSAFEPATH"] = "1"
        resource_tracker.ensure_running()  # the first process would start it, and unblock Ctrl-C by that
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if not is_set:
                del os.environ["PYTHONSAFEPATH"]


# -- where a diagnostic is computed


@dataclass
class Workspace:
    """A context in which ``workspace().map`` runs on an executor and shows progress.

    Args:
        executor: see ``check_executor``.
        show: called with (done, total, text).
    """

    executor: str | Executor = "serial"
    show: Callable[[int, int, str], None] = lambda *_: None

    def map(
        self,
        function: Callable[..., Any],
        shared: Any,
        items: Sequence[Any],
        /,
        *,
        name: Callable[[Any], str] = str,
        **options: Any,
    ) -> Iterator[Any]:
        """``function(shared, item, **options)`` of every item, in their order, each as early as that allows.

        Args:
            function: pure, and found by its name in a module. An exception that it returns says what could not be computed.
            shared: what all items need; it goes to a worker once.
            items: small, and picklable.
            name: what an item is called in progress and messages.
            options: further arguments of the function.

        >>> list(workspace().map(divmod, 7, [2, 3]))
        [(3, 1), (2, 1)]
        """
        with open_pool(self.executor, partial(function, **options), shared, name=name) as pool:
            results = pool.map(items)
            for done, item in enumerate(items):
                self.show(done, len(items), name(item))
                yield next(results)

    def __enter__(self) -> Workspace:
        self._token = _current.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        _current.reset(self._token)


_current: ContextVar[Workspace] = ContextVar("workspace", default=Workspace())  # noqa: B039


def workspace() -> Workspace:
    """The workspace of the diagnostic at hand; outside of any, one that computes in this process and shows nothing."""
    return _current.get()
