"""Workers are killed, stopped and starved while they work: nothing is lost, and the bits are those of a quiet run.

FLDIAG_KILLS says how often each test kills (default 3); with pytest -s it is counted.
"""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import distributed
import pandas as pd
import psutil
import pytest
import torch

import fldiag
from fldiag.errors import FldiagError
from fldiag.execution import cluster
from fldiag.execution.start import started
from fldiag.figures import make, reported
from fldiag.figures.scales import scale

KILLS = int(os.environ.get("FLDIAG_KILLS", "3"))
pytestmark = pytest.mark.slow


class Trouble:
    """Sends a signal to a worker that has been there for a while, again and again, until it was done often enough."""

    def __init__(self, send, count=KILLS):
        self.send, self.count, self.done, self.over = send, count, 0, threading.Event()
        self.thread = threading.Thread(target=self._go, daemon=True)
        self.rng = random.Random(0)

    def _go(self):
        before = {}
        while self.done < self.count and not self.over.wait(0.1):
            used = {p.pid: seconds for p in multiprocessing.active_children() if (seconds := computed(p.pid)) is not None}
            before = {pid: before.get(pid, 0.0) for pid in used}
            ready = [pid for pid, seconds in used.items() if seconds - before[pid] > 4]  # has started, and is likely at work
            if ready and self.rng.random() < 0.3:
                self.send(self.rng.choice(sorted(ready)))
                before, self.done = used, self.done + 1  # the others wait anew: no unit loses three workers in a row

    def __enter__(self):
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


def federation(rounds):
    return fldiag.Config.load("digits", rounds=rounds, method__name="scaffold", model__name="mlp", clients__per_round=4,
                              train__epochs=1, checkpoint__clients="sampled", checkpoint__every=10, train__stack="off")


@pytest.mark.parametrize("send, executor", [(kill, "processes:2"), (stop_for_a_second, "processes:2"), (kill, "dask")])
def test_training(send, executor, tmp_path):
    rounds = 100 * KILLS
    quiet = fldiag.train(federation(rounds), out=tmp_path / "quiet", device="cpu")
    with Trouble(send) as trouble:
        loud = fldiag.train(federation(rounds), out=tmp_path / "loud", executor=executor, device="cpu")
    assert trouble.done >= min(KILLS, 2)
    assert all(torch.equal(w, loud.checkpoint().state[n]) for n, w in quiet.checkpoint().state.items())
    assert quiet.metrics.drop(columns="run").equals(loud.metrics.drop(columns="run"))


def test_matching(tmp_path):
    run = fldiag.train(federation(10 * KILLS), out=tmp_path / "run", device="cpu")
    options = {"device": "cpu", "every_round": True, "k": 2, "samples": 100}
    quiet = fldiag.diagnose(run, "matching", **options)
    with Trouble(kill) as trouble:
        loud = fldiag.diagnose(run, "matching", executor="processes:2", **options)
    assert trouble.done >= min(KILLS, 2)
    pd.testing.assert_frame_equal(quiet, loud, check_exact=True)


def test_figures(tmp_path):
    table = reported.studies()["fedsol/table2"]
    studies = [replace(table, trials=table.trials[:4 * KILLS])]
    quiet = make.make(studies, scale("smoke"), out=tmp_path / "a", store=tmp_path / "ra", strict=True)
    with Trouble(kill) as trouble:
        loud = make.make(studies, scale("smoke"), out=tmp_path / "b", store=tmp_path / "rb", executor="processes:2", strict=True)
    assert trouble.done >= 1 and not any(m.error for m in loud)
    for one, other in zip(quiet, loud, strict=True):
        assert [f.read_bytes() for f in one.files if f.suffix == ".csv"] == [f.read_bytes() for f in other.files if f.suffix == ".csv"]


@pytest.fixture
def scheduler(tmp_path, request):
    """(address, the scheduler's process) of a cluster of two workers in processes of their own. With a parameter, the
    ``scheduler`` or the ``worker`` cannot import fldiag."""
    file, lacking = tmp_path / "scheduler.json", getattr(request, "param", None)

    def python(who):
        without = "import sys; sys.modules['fldiag'] = None; " if who == lacking else ""
        return [sys.executable, "-c", f"{without}from distributed.cli.dask_{who} import main; main()", "--no-dashboard",
                "--scheduler-file", file]

    where = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": where}
    main = subprocess.Popen([*python("scheduler"), "--port", "0"], **quiet)
    others = [subprocess.Popen([*python("worker"), "--nthreads", "1", "--no-nanny"], **quiet) for _ in range(2)]
    for _ in range(1000):
        if file.is_file() and file.read_text().endswith("}"):
            break
        time.sleep(0.1)
    address = json.loads(file.read_text())["address"]
    with distributed.Client(address, timeout=100, set_as_default=False) as client:
        client.wait_for_workers(2, timeout=100)
    yield address, main
    for process in (main, *others):
        process.kill()
        process.wait()


def waited(_, seconds):
    time.sleep(seconds)
    return seconds


def test_a_scheduler_that_is_killed_is_one_error(scheduler):
    address, process = scheduler
    with started(f"dask:{address}", waited, None) as pool:
        assert list(pool.map([0.0, 0.1])) == [0.0, 0.1]
        threading.Timer(2, process.kill).start()
        with pytest.raises(FldiagError, match=r"the Dask scheduler at .* is gone.*--resume"):
            list(pool.map([0.5] * 100))


def test_a_cluster_of_another_version_is_refused(scheduler, monkeypatch):
    monkeypatch.setattr(cluster, "version", lambda: "99.9")
    with pytest.raises(FldiagError, match=r"the Dask scheduler has fldiag .* and here are 99\.9"):
        started(f"dask:{scheduler[0]}", waited, None)


@pytest.mark.parametrize("scheduler", ["scheduler", "worker"], indirect=True)
def test_a_cluster_without_fldiag_is_refused(scheduler, request):
    who = request.node.callspec.params["scheduler"]
    with pytest.raises(FldiagError, match=f"the Dask {who}.* cannot import fldiag .*; install the same fldiag"):
        started(f"dask:{scheduler[0]}", waited, None)


def test_an_error_says_that_it_is_one_of_a_worker(scheduler):
    """What lies in this machine's folders need not lie in the worker's."""
    with started(f"dask:{scheduler[0]}", without_data, None) as pool, pytest.raises(FldiagError) as caught:
        list(pool.map([1]))
    assert caught.value.what == f"on a worker of {scheduler[0]}: digits.npz was not found"
    assert caught.value.remedy == "set FLDIAG_DATA"


def without_data(_, unit):
    raise FldiagError("digits.npz was not found", "set FLDIAG_DATA")
