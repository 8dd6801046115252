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
from fldiag.execution.choice import Choice, cores
from fldiag.execution.pool import GO_ON, TRIES, Event, Pool, can_be_sent, died
from fldiag.execution.remote import Work, forget, keep, paused, perform, versions
from fldiag.version import version

#: Seconds for a scheduler to answer, for the first of its workers to be there, and between two looks at workers that are silent.
PATIENCE = 10.0
#: Looks in a row that find all workers paused before that is an error: Dask frees their memory meanwhile, and most go on.
LOOKS = 6
#: What helps workers that lack memory.
ROOM = (
    "give each worker more memory (dask worker --memory-limit), or start fewer of them on a machine"
)


class Cluster(Pool):
    """``choice.address``: the scheduler's; without one, workers of one thread are started here and ended with the work."""

    def __init__(self, work: Work, name: Callable[[Any], str], choice: Choice):
        super().__init__(work, name)
        can_be_sent(work)
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
        self.where = choice.address or "this machine"
        if not choice.address:
            dask.config.set(
                {"distributed.scheduler.allowed-failures": TRIES - 1}
            )  # a unit is moved so often
            self._local = distributed.LocalCluster(
                n_workers=choice.workers or cores(work.threads),
                threads_per_worker=1,
                processes=True,
                dashboard_address="127.0.0.1:0",  # any port that is free
                memory_limit=None,  # a share of the memory would stop a worker that holds a large model, for ever
                silence_logs="CRITICAL",
            )
        try:
            self.client = distributed.Client(
                self._local or choice.address, timeout=PATIENCE, set_as_default=False
            )
            self._look()
            self._send(_state(distributed, self.key, work, ours=self._local is not None))
        except (OSError, TimeoutError) as error:
            self.close()
            raise FldiagError(
                f"no Dask scheduler answers at {self.where} ({type(error).__name__})",
                "start one with: dask scheduler; and give the address that it prints",
            ) from None
        except BaseException:
            self.close()
            raise

    def _look(self) -> None:
        """Every worker has this fldiag and this PyTorch: else the bits could differ from one to the next. So has the scheduler,
        which reads units before it hands them on."""
        try:
            self.client.wait_for_workers(1, timeout=PATIENCE)
        except TimeoutError:
            raise FldiagError(
                f"the Dask scheduler at {self.where} has no workers",
                "start some with: dask worker ADDRESS --nthreads 1",
            ) from None
        mine = version(), torch.__version__
        found: dict[str, Any] = {}
        try:
            found["scheduler"] = self.client.run_on_scheduler(versions)
        except OSError:
            raise
        except Exception as error:  # whatever an import there can raise
            found["scheduler"] = error
        found |= {
            f"worker {address}": theirs
            for address, theirs in self.client.run(versions, on_error="return").items()
        }
        for who, theirs in found.items():
            if isinstance(theirs, OSError):  # the worker died meanwhile; Dask starts another
                continue
            if isinstance(theirs, Exception):
                raise FldiagError(
                    f"the Dask {who} cannot import fldiag ({type(theirs).__name__}: {theirs})",
                    "install the same fldiag in its environment",
                )
            if tuple(theirs) != mine:
                raise FldiagError(
                    f"the Dask {who} has fldiag {theirs[0]} with PyTorch {theirs[1]}, and here are "
                    f"{mine[0]} and {mine[1]}",
                    "install the same versions in its environment",
                )

    def _send(self, plugin: Any) -> None:
        """To every worker; a worker that dies meanwhile is replaced, and gets it as it starts."""
        for tried in range(1, TRIES + 1):
            try:
                return self.client.register_plugin(plugin, name=self.key)
            except OSError:
                if tried == TRIES:
                    raise

    def completed(
        self, units: Iterable[Any], beat: Event | None = None
    ) -> Iterator[tuple[int, Any]]:
        distributed, waiting = self._distributed, {}
        units = list(units)
        for number, unit in enumerate(units):
            waiting[
                self.client.submit(
                    perform,
                    self.key,
                    unit,
                    pure=False,
                    key=f"fldiag-{self.key[:8]}-{number}-{uuid.uuid4().hex[:8]}",
                )
            ] = number
        looked, stuck = time.monotonic(), 0
        try:
            while waiting:
                try:
                    with contextlib.suppress(TimeoutError), self.client.as_current():
                        distributed.wait(list(waiting), timeout=0.2, return_when="FIRST_COMPLETED")
                except self._gone:
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
                    looked, stuck = time.monotonic(), 0
                if time.monotonic() - looked > PATIENCE:
                    stuck = self._paused(stuck) if self._local is None else self._revived(stuck)
                    looked = time.monotonic()
                if self.client.status not in ("running", "connecting"):
                    raise self._lost()
                if beat is not None:
                    beat()
        finally:
            self._cancel(list(waiting))

    def _result(self, future: Any, unit: Any) -> Any:
        try:
            with self.doing(unit):
                return future.result(
                    timeout=6 * PATIENCE
                )  # a large one on a slow network takes a while
        except self._distributed.KilledWorker as error:
            if self._local is not None:
                raise died(self.name(unit), TRIES) from None
            raise FldiagError(
                f"{self.name(unit)}: its worker of {self.where} died {error.allowed_failures + 1} times (out of "
                "memory?)",
                f"{ROOM}, and {GO_ON}",
            ) from None
        except FldiagError as error:
            if self._local is not None:
                raise
            raise FldiagError(
                f"on a worker of {self.where}: {error.what}", error.remedy, usage=error.usage
            ) from None
        except self._gone:
            raise self._lost() from None

    def _paused(self, before: int) -> int:
        """How many looks in a row, ``before`` and this one, found all workers paused, so that nothing can be done. Raises
        FldiagError after ``LOOKS``: what fills their memory does not go away while they wait."""
        try:
            now = bool(self.client.run_on_scheduler(paused))
        except Exception:  # the scheduler is gone, which the caller will notice
            return 0
        if now and before + 1 >= LOOKS:
            raise FldiagError(
                f"all workers of {self.where} are paused: they use most of the memory that Dask lets them use",
                f"{ROOM}, and {GO_ON}",
            )
        return before + 1 if now else 0

    def _revived(self, before: int) -> int:
        """How many looks in a row, ``before`` and this one, found no worker here and started them again: Dask gives one up that
        dies while it starts. Raises FldiagError after ``TRIES``."""
        try:
            there = self.client.nthreads()
        except Exception:  # the scheduler is gone, which the caller will notice
            return 0
        if there:
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
    def _gone(self) -> tuple[type[BaseException], ...]:
        """What Dask raises when a scheduler is not there any more."""
        return self._distributed.CancelledError, self._distributed.comm.CommClosedError

    def _lost(self) -> FldiagError:
        return FldiagError(
            f"the Dask scheduler at {self.where} is gone", f"start it again, and {GO_ON}"
        )

    def _cancel(self, futures: list[Any]) -> None:
        if futures and self.client.status == "running":
            _patiently(lambda: self.client.cancel(futures, force=True))

    def close(self) -> None:
        client = getattr(self, "client", None)
        if client is not None and client.status == "running":
            _patiently(lambda: client.unregister_worker_plugin(self.key))
        for owned in (client, self._local):
            if owned is not None:
                _patiently(lambda owned=owned: owned.close(timeout=PATIENCE))  # type: ignore[misc]


def _patiently(ask: Callable[[], Any]) -> None:
    """For no longer than it takes: a cluster that goes away may never answer, and takes what is asked for with it."""

    def quietly() -> None:
        with contextlib.suppress(Exception):
            ask()

    asking = threading.Thread(target=quietly, daemon=True)
    asking.start()
    asking.join(2 * PATIENCE)


def _state(distributed: Any, key: str, work: Work, ours: bool) -> Any:
    """Brings the work to every worker of the cluster, also to those that start later."""

    class State(distributed.WorkerPlugin):  # type: ignore[misc, name-defined]
        def setup(self, worker: Any) -> None:
            keep(key, work)
            if (
                ours
            ):  # Ctrl-C reaches the whole group of processes, and is the main process's to handle
                with contextlib.suppress(ValueError):
                    signal.signal(signal.SIGINT, signal.SIG_IGN)

        def teardown(self, worker: Any) -> None:
            forget(key)

    return State()
