"""A Dask cluster: one of this machine, or any whose scheduler's address is given. Scheduling and retries are Dask's."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from fldiag.errors import FldiagError
from fldiag.execution.executor import ExecutorSpec, cores
from fldiag.execution.pool import BEAT, GO_ON, TRIES, Event, Pool, check_sendable, worker_died
from fldiag.execution.worker import Work, forget, keep, paused, perform, versions
from fldiag.version import version

#: Seconds for a scheduler to answer, for the first of its workers to be there, and between two looks at workers that are silent.
PATIENCE = 10.0
#: Looks in a row that find all workers paused before that is an error: Dask frees their memory meanwhile, and most go on.
LOOKS = 6
#: What helps workers that lack memory.
ROOM = (
    "give each worker more memory (dask worker --memory-limit), or start fewer of them on a machine"
)


class DaskCluster(Pool):
    """``spec.address``: the scheduler's; without one, workers of one thread are started here and ended with the work."""

    def __init__(self, work: Work, name: Callable[[Any], str], spec: ExecutorSpec):
        super().__init__(work, name)
        check_sendable(work)
        try:
            import dask
            import distributed
        except ImportError:
            raise FldiagError(
                "executor dask needs the package distributed",
                "pip install 'fldiag[dask]'",
                usage=True,
            ) from None
        self._distributed, self.key = distributed, uuid.uuid4().hex
        self._local: Any = None
        self.location = spec.address or "this machine"
        if not spec.address:
            dask.config.set(
                {
                    # how often a unit is moved
                    "distributed.scheduler.allowed-failures": TRIES - 1,
                    # a unit that waits on a worker would be blamed when that worker dies
                    "distributed.scheduler.worker-saturation": 1.0,
                }
            )
            self._local = distributed.LocalCluster(
                n_workers=spec.workers or cores(work.threads),
                threads_per_worker=1,
                processes=True,
                dashboard_address="127.0.0.1:0",  # any port that is free
                memory_limit=None,  # a share of the memory would stop a worker that holds a large model, for ever
                silence_logs="CRITICAL",
            )
        try:
            self.client = distributed.Client(
                self._local or spec.address, timeout=PATIENCE, set_as_default=False
            )
            # Python loses whatever is raised while its callback runs, Ctrl-C too
            distributed.gc.disable_gc_diagnosis(force=True)
            self._check_versions()
            self._send(_work_plugin(distributed, self.key, work, is_local=self._local is not None))
        except (OSError, TimeoutError) as error:
            self.close()
            raise FldiagError(
                f"no Dask scheduler answers at {self.location} ({type(error).__name__})",
                "start one with: dask scheduler; and give the address that it prints",
            ) from None
        except BaseException:
            self.close()
            raise

    def _check_versions(self) -> None:
        """Every worker has this fldiag and this PyTorch: else the bits could differ from one to the next. So has the scheduler,
        which reads units before it hands them on."""
        try:
            self.client.wait_for_workers(1, timeout=PATIENCE)
        except TimeoutError:
            raise FldiagError(
                f"the Dask scheduler at {self.location} has no workers",
                "start some with: dask worker ADDRESS --nthreads 1",
            ) from None
        local = version(), torch.__version__
        answers: dict[str, Any] = {}
        try:
            answers["scheduler"] = self.client.run_on_scheduler(versions)
        except OSError:
            raise
        except Exception as error:  # whatever an import there can raise
            answers["scheduler"] = error
        by_worker = self.client.run(versions, on_error="return")
        answers |= {f"worker {address}": answer for address, answer in by_worker.items()}
        for node, answer in answers.items():
            if isinstance(answer, OSError):  # the worker died meanwhile; Dask starts another
                continue
            if isinstance(answer, Exception):
                raise FldiagError(
                    f"the Dask {node} cannot import fldiag ({type(answer).__name__}: {answer})",
                    "install the same fldiag in its environment",
                )
            if tuple(answer) != local:
                raise FldiagError(
                    f"the Dask {node} has fldiag {answer[0]} with PyTorch {answer[1]}, and here are "
                    f"{local[0]} and {local[1]}",
                    "install the same versions in its environment",
                )

    def _send(self, plugin: Any) -> None:
        """To every worker; a worker that dies meanwhile is replaced, and gets it as it starts."""
        for attempt in range(1, TRIES + 1):
            try:
                return self.client.register_plugin(plugin, name=self.key)
            except OSError:
                if attempt == TRIES:
                    raise

    def completed(
        self, units: Iterable[Any], beat: Event | None = None
    ) -> Iterator[tuple[int, Any]]:
        distributed, units = self._distributed, list(units)
        waiting: dict[Any, int] = {}
        for number, unit in enumerate(units):
            key = f"fldiag-{self.key[:8]}-{number}-{uuid.uuid4().hex[:8]}"
            future = self.client.submit(perform, self.key, unit, pure=False, key=key)
            waiting[future] = number
        last_look, stuck = time.monotonic(), 0
        try:
            while waiting:
                try:
                    with contextlib.suppress(TimeoutError), self.client.as_current():
                        distributed.wait(list(waiting), timeout=BEAT, return_when="FIRST_COMPLETED")
                except self._lost_errors:
                    raise self._lost() from None
                for future in [f for f in waiting if f.done()]:
                    number = waiting[future]
                    try:
                        result = self._result(future, units[number])
                    except TimeoutError:
                        if future.status == "error":  # the unit's own
                            raise
                        continue  # its worker died with the result, which Dask is computing again
                    del waiting[future]
                    yield number, result
                    last_look, stuck = time.monotonic(), 0
                if time.monotonic() - last_look > PATIENCE:
                    look = self._count_paused if self._local is None else self._revive
                    stuck = look(stuck)
                    last_look = time.monotonic()
                if self.client.status not in ("running", "connecting"):
                    raise self._lost()
                if beat is not None:
                    beat()
        finally:
            self._cancel(list(waiting))

    def _result(self, future: Any, unit: Any) -> Any:
        try:
            with self.doing(unit):
                # a large result on a slow network takes a while
                return future.result(timeout=6 * PATIENCE)
        except self._distributed.KilledWorker as error:
            if self._local is not None:
                raise worker_died(self.name(unit), TRIES) from None
            raise FldiagError(
                f"{self.name(unit)}: its worker of {self.location} died {error.allowed_failures + 1} times (out of "
                "memory?)",
                f"{ROOM}, and {GO_ON}",
            ) from None
        except FldiagError as error:
            if self._local is not None:
                raise
            raise FldiagError(
                f"on a worker of {self.location}: {error.what}", error.remedy, usage=error.usage
            ) from None
        except self._lost_errors:
            raise self._lost() from None

    def _count_paused(self, before: int) -> int:
        """How many looks in a row, ``before`` and this one, found all workers paused, so that nothing can be done. Raises
        FldiagError after ``LOOKS``: what fills their memory does not go away while they wait."""
        try:
            is_paused = bool(self.client.run_on_scheduler(paused))
        except Exception:  # the scheduler is gone, which the caller will notice
            return 0
        if is_paused and before + 1 >= LOOKS:
            raise FldiagError(
                f"all workers of {self.location} are paused: they use most of the memory that Dask lets them use",
                f"{ROOM}, and {GO_ON}",
            )
        return before + 1 if is_paused else 0

    def _revive(self, before: int) -> int:
        """How many looks in a row, ``before`` and this one, found no worker here and started them again: Dask gives one up that
        dies while it starts. Raises FldiagError after ``TRIES``."""
        try:
            threads = self.client.nthreads()
        except Exception:  # the scheduler is gone, which the caller will notice
            return 0
        if threads:
            return 0
        if before == TRIES:
            raise FldiagError(
                "the Dask workers of this machine do not start",
                f"use --executor processes, and {GO_ON}",
            )
        for nanny in list(self._local.workers.values()):
            with contextlib.suppress(Exception):  # the next look will tell
                self._local.sync(nanny.instantiate, callback_timeout=6 * PATIENCE)
        return before + 1

    @property
    def _lost_errors(self) -> tuple[type[BaseException], ...]:
        """What Dask raises when a scheduler is not there any more."""
        return self._distributed.CancelledError, self._distributed.comm.CommClosedError

    def _lost(self) -> FldiagError:
        return FldiagError(
            f"the Dask scheduler at {self.location} is gone", f"start it again, and {GO_ON}"
        )

    def _cancel(self, futures: list[Any]) -> None:
        if futures and self.client.status == "running":
            _with_patience(lambda: self.client.cancel(futures, force=True))

    def close(self) -> None:
        client = getattr(self, "client", None)
        if client is not None and client.status == "running":
            _with_patience(lambda: client.unregister_worker_plugin(self.key))
        for owned in (client, self._local):
            if owned is not None:
                _with_patience(lambda owned=owned: owned.close(timeout=PATIENCE))  # type: ignore[misc]


def _with_patience(request: Callable[[], Any]) -> None:
    """Wait for a request to the cluster for a while only: one that goes away never answers."""

    def quietly() -> None:
        with contextlib.suppress(Exception):
            request()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(2 * PATIENCE)


def _work_plugin(distributed: Any, key: str, work: Work, is_local: bool) -> Any:
    """Brings the work to every worker of the cluster, also to those that start later."""

    class WorkPlugin(distributed.WorkerPlugin):  # type: ignore[misc, name-defined]
        def setup(self, worker: Any) -> None:
            keep(key, work)
            if is_local:  # Ctrl-C reaches all processes, and is the main one's to handle
                with contextlib.suppress(ValueError):
                    signal.signal(signal.SIGINT, signal.SIG_IGN)

        def teardown(self, worker: Any) -> None:
            forget(key)

    return WorkPlugin()
