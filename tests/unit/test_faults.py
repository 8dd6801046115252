"""Workers are killed, stopped and starved while they work: nothing is lost, and the bits are those of a quiet run.

FLDIAG_KILLS says how often each test kills (default 3); with pytest -s it is counted. At least thirty in all:

    FLDIAG_KILLS=7 pytest -s tests/unit/test_faults.py
"""

import functools
import itertools
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import distributed
import pandas as pd
import psutil
import pytest
import torch

import fldiag
from fldiag.errors import FldiagError
from fldiag.execution import dask_cluster, pools
from fldiag.execution.pools import open_pool

KILLS = int(os.environ.get("FLDIAG_KILLS", "3"))
WHERE = ["processes:2", "dask"]
pytestmark = pytest.mark.slow


@pytest.fixture
def stubborn(monkeypatch):
    """A killer that draws its victims may well hit one unit three times: that is an error by design, and another test's matter."""
    monkeypatch.setattr(pools, "TRIES", 1000)
    monkeypatch.setattr(dask_cluster, "TRIES", 1000)


@functools.cache
def at_work():
    """Processor seconds after which a worker of this machine has started, or nearly so: the less of two starts, as the first
    may have to read from the disk."""
    took = []
    for _ in range(2):
        before = os.times()
        subprocess.run([sys.executable, "-c", "import torch, fldiag.training.rounds"], check=True)
        after = os.times()
        took.append(
            after.children_user
            - before.children_user
            + after.children_system
            - before.children_system
        )
    return min(took)


class Trouble:
    """Sends a signal to a worker that has been there for a while, again and again, until it was done often enough."""

    def __init__(self, send, count=KILLS):
        self.send, self.count, self.done, self.over = send, count, 0, threading.Event()
        self.thread = threading.Thread(target=self._go, daemon=True)
        self.rng = random.Random(0)

    def _go(self):
        before = {}
        while self.done < self.count and not self.over.wait(0.1):
            used = {
                p.pid: seconds
                for p in multiprocessing.active_children()
                if (seconds := computed(p.pid)) is not None
            }
            before = {pid: before.get(pid, 0.0) for pid in used}
            ready = [pid for pid, seconds in used.items() if seconds - before[pid] > at_work()]
            if ready and self.rng.random() < 0.3:
                self.send(self.rng.choice(sorted(ready)))
                before, self.done = (
                    used,
                    self.done + 1,
                )  # the others wait anew, so that work gets done between the kills

    def __enter__(self):
        at_work()
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.over.set()
        self.thread.join()
        print(f"{self.send.__name__}: {self.done} times")  # with pytest -s


def computed(pid):
    """The processor's seconds of a process, which count its progress also where the machine is busy; None of one that ended."""
    try:
        return sum(psutil.Process(pid).cpu_times()[:2])
    except psutil.Error:
        return None


def kill(pid):
    os.kill(pid, signal.SIGKILL)


def stop_for_a_second(pid):
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1)
    os.kill(pid, signal.SIGCONT)


def starve(pid):
    """From now on it gets no more memory than it has."""
    import resource  # there is none on Windows

    size = psutil.Process(pid).memory_info().vms
    resource.prlimit(pid, resource.RLIMIT_AS, (size, size))


def federation(rounds, model="mlp"):
    return fldiag.Config.load(
        "digits",
        rounds=rounds,
        method__name="scaffold",
        model__name=model,
        clients__per_round=4,
        train__epochs=1,
        checkpoint__clients="sampled",
        checkpoint__every=10,
        train__stack="off",
    )


def trained(folder, rounds, **options):
    return fldiag.train(federation(rounds), out=folder, device="cpu", **options)


def troubled(trouble, folder, executor):
    """A run that goes on until there was trouble enough, however fast this machine is, but not for ever."""
    until = time.monotonic() + 60 + 60 * trouble.count

    def enough(event):
        if trouble.done >= trouble.count or time.monotonic() > until:
            raise KeyboardInterrupt

    with trouble, pytest.raises(KeyboardInterrupt):
        trained(folder, 100_000, executor=executor, on_event=enough)
    assert trouble.done >= trouble.count, (
        f"{trouble.send.__name__} was done {trouble.done} times of {trouble.count}, and time was up"
    )
    return fldiag.load(folder)


def gone_on(folder):
    """The run after the next checkpoint, by the same command with resume: it may have ended before its first."""
    last = max(fldiag.load(folder).rounds, default=0)

    def enough(event):
        if event["event"] == "round" and event["round"] > last + 11:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(folder, 100_000, executor="processes:2", resume=True, on_event=enough)
    found = fldiag.load(folder)
    assert found.rounds[-1] >= last + 10
    return found


def same_until_it_was_stopped(loud, folder):
    last = loud.rounds[-1]
    quiet = trained(folder, last)
    one, other = (run.checkpoint(last).state for run in (quiet, loud))
    assert all(torch.equal(w, other[n]) for n, w in one.items())
    one, other = (run.metrics.drop(columns="run") for run in (quiet, loud))
    assert one.equals(other[other["round"] <= last].reset_index(drop=True))


@pytest.mark.parametrize(
    "send, executor", [(kill, "processes:2"), (stop_for_a_second, "processes:2"), (kill, "dask")]
)
def test_training(stubborn, send, executor, tmp_path):
    same_until_it_was_stopped(
        troubled(Trouble(send), tmp_path / "loud", executor), tmp_path / "quiet"
    )


def test_training_without_memory(tmp_path):
    """A worker that gets no more memory dies and is replaced, or ends the run with one error that names what it did."""
    if not hasattr(pytest.importorskip("resource"), "prlimit"):
        pytest.skip("the memory of other processes cannot be limited here")
    try:
        loud = troubled(Trouble(starve), tmp_path / "loud", "processes:2")
    except FldiagError as error:
        print(error)
        assert re.match(
            r"round \d+, clients [\d, ]+: (out of memory|its worker process died 3 times \(out of memory)",
            str(error),
        )
        assert "fewer workers" in error.remedy and "--resume" in error.remedy
        loud = gone_on(tmp_path / "loud")
    same_until_it_was_stopped(loud, tmp_path / "quiet")


def amid_kills(work):
    """What ``work`` returns, again and again until there were kills enough, however fast this machine is, but not for ever."""
    with Trouble(kill) as trouble:
        for _ in range(20):
            yield work()
            if trouble.done >= min(KILLS, 2):
                return
    raise AssertionError(f"{trouble.done} kills in 20 times")


@pytest.fixture(scope="module")
def quiet_matching(tmp_path_factory):
    run = trained(tmp_path_factory.mktemp("matching") / "run", 40 * KILLS)
    options = {"device": "cpu", "every_round": True, "k": 2, "samples": 100}
    return run, options, fldiag.diagnose(run, "matching", **options)


@pytest.mark.parametrize("executor", WHERE)
def test_matching(stubborn, quiet_matching, executor):
    run, options, quiet = quiet_matching
    for loud in amid_kills(lambda: fldiag.diagnose(run, "matching", executor=executor, **options)):
        pd.testing.assert_frame_equal(quiet, loud, check_exact=True)


@contextmanager
def cluster_in(folder, lacking=None, memory=None, failures=3):
    """(address, the scheduler's process) of a cluster of two workers in processes of their own.

    ``lacking``: the ``scheduler`` or the ``worker`` that cannot import fldiag. ``memory``: bytes of one worker, which Dask looks
    after. ``failures``: a unit is given up after one worker more."""
    file = folder / "scheduler.json"

    def python(who):
        without = "import sys; sys.modules['fldiag'] = None; " if who == lacking else ""
        return [
            sys.executable,
            "-c",
            f"{without}from distributed.cli.dask_{who} import main; main()",
            "--no-dashboard",
            "--scheduler-file",
            file,
        ]

    where = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": str(failures),
    }
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": where}
    main = subprocess.Popen([*python("scheduler"), "--port", "0"], **quiet)
    kept = (
        ["--no-nanny"]
        if memory is None
        else ["--memory-limit", str(memory), "--local-directory", folder]
    )
    others = [
        subprocess.Popen([*python("worker"), "--nthreads", "1", *kept], **quiet)
        for _ in range(1 if memory else 2)
    ]
    try:
        for _ in range(1000):
            if file.is_file() and file.read_text().endswith("}"):
                break
            time.sleep(0.1)
        address = json.loads(file.read_text())["address"]
        with distributed.Client(address, timeout=100, set_as_default=False) as client:
            client.wait_for_workers(len(others), timeout=100)
        yield address, main
    finally:
        if memory is not None:
            others[0].terminate()  # a nanny takes its worker along
            others[0].wait(60)
        for process in (main, *others):
            process.kill()
            process.wait()


@pytest.fixture
def scheduler(tmp_path, request):
    with cluster_in(tmp_path, lacking=getattr(request, "param", None)) as found:
        yield found


def waited(_, seconds):
    time.sleep(seconds)
    return seconds


def test_a_scheduler_that_is_killed_is_one_error(scheduler):
    address, process = scheduler
    with open_pool(f"dask:{address}", waited, None) as pool:
        assert list(pool.map([0.0, 0.1])) == [0.0, 0.1]
        threading.Timer(2, process.kill).start()
        with pytest.raises(FldiagError, match=r"the Dask scheduler at .* is gone.*--resume"):
            list(pool.map([0.5] * 100))


def test_a_cluster_of_another_version_is_refused(scheduler, monkeypatch):
    monkeypatch.setattr(dask_cluster, "version", lambda: "99.9")
    with pytest.raises(FldiagError, match=r"the Dask scheduler has fldiag .* and here are 99\.9"):
        open_pool(f"dask:{scheduler[0]}", waited, None)


@pytest.mark.parametrize("scheduler", ["scheduler", "worker"], indirect=True)
def test_a_cluster_without_fldiag_is_refused(scheduler, request):
    who = request.node.callspec.params["scheduler"]
    with pytest.raises(
        FldiagError, match=f"the Dask {who}.* cannot import fldiag .*; install the same fldiag"
    ):
        open_pool(f"dask:{scheduler[0]}", waited, None)


def test_an_error_says_that_it_is_one_of_a_worker(scheduler):
    """What lies in this machine's folders need not lie in the worker's."""
    with (
        open_pool(f"dask:{scheduler[0]}", without_data, None) as pool,
        pytest.raises(FldiagError) as caught,
    ):
        list(pool.map([1]))
    assert caught.value.what == f"on a worker of {scheduler[0]}: digits.npz was not found"
    assert caught.value.remedy == "set FLDIAG_DATA"


def without_data(_, unit):
    raise FldiagError("digits.npz was not found", "set FLDIAG_DATA")


GIGABYTE = 2**30


def greedy(_, unit):
    """Holds so many bytes in all from now on, taken bit by bit, as Dask looks at a worker ten times a second."""
    process = psutil.Process()
    while process.memory_info().rss < unit:
        held.append(torch.ones(16 * 2**20 // 4))
        time.sleep(0.03)
    return unit


held = []


def bytes_in_all(unit):
    return f"unit {unit / GIGABYTE:g}"


def test_a_worker_of_a_cluster_that_is_killed_for_its_memory_is_one_error_that_names_the_unit(
    tmp_path,
):
    with (
        cluster_in(tmp_path, memory=2 * GIGABYTE, failures=1) as (address, _),
        open_pool(f"dask:{address}", greedy, None, name=bytes_in_all) as pool,
    ):
        with pytest.raises(
            FldiagError,
            match=r"unit 3: its worker of tcp.* died 2 times \(out of memory\?\); .*--memory-limit",
        ):
            list(pool.map([0, 3 * GIGABYTE]))
        assert list(pool.map([0, 1])) == [0, 1], "Dask starts another worker"


def test_workers_of_a_cluster_that_pause_for_their_memory_are_one_error(tmp_path, monkeypatch):
    """A worker that holds 80 % of its memory takes no unit any more, and nobody says so."""
    with (
        cluster_in(tmp_path, memory=2 * GIGABYTE) as (address, _),
        open_pool(f"dask:{address}", greedy, None, name=bytes_in_all) as pool,
    ):
        assert list(pool.map([0, 1])) == [0, 1]
        monkeypatch.setattr(dask_cluster, "PATIENCE", 2.0)
        with pytest.raises(
            FldiagError, match=r"all workers of tcp.* are paused: .*--memory-limit.*--resume"
        ):
            list(pool.map([1.75 * GIGABYTE, 0, 1]))


def _after_a_while(state, unit):
    time.sleep(1)
    return unit


@contextmanager
def given_up(monkeypatch):
    """(the nannies, what is done) of work whose workers have died, and which Dask does not start again."""
    monkeypatch.setattr(dask_cluster, "PATIENCE", 2.0)
    with open_pool("dask", _after_a_while, None) as pool:
        nannies = list(pool._local.workers.values())
        for nanny in nannies:
            nanny.auto_restart = False
        found = pool.completed([1, 2, 3, 4])
        first = next(found)
        for nanny in nannies:
            os.kill(nanny.pid, signal.SIGKILL)
        yield nannies, itertools.chain([first], found)


def test_workers_that_dask_has_given_up_are_started_again(monkeypatch):
    with given_up(monkeypatch) as (_, found):
        assert sorted(found) == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_workers_that_do_not_start_are_one_error(monkeypatch):
    async def broken():
        raise OSError("no more processes")

    with given_up(monkeypatch) as (nannies, found):
        for nanny in nannies:
            nanny.instantiate = broken
        with pytest.raises(FldiagError, match=r"workers of this machine do not start.*--resume"):
            list(found)
