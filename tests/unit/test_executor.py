"""Executors: the same results wherever the work is done, a dead worker loses its unit only, and errors say what to do."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import config

import fldiag
from fldiag import registry
from fldiag.diagnosis.measure import measure
from fldiag.errors import FldiagError
from fldiag.execution.dask_cluster import DaskCluster
from fldiag.execution.executor import cores, parse_executor
from fldiag.execution.pool import TRIES
from fldiag.execution.pools import open_pool
from fldiag.execution.workspace import workspace
from fldiag.results.table import table
from fldiag.training import rounds


def work(factor, unit):
    """What the tests' units do: numbers are multiplied; texts say what happens to the worker."""
    if unit == "die":
        os._exit(3)
    if unit == "hungry":
        return torch.empty(2**60)
    if unit == "late":
        raise TimeoutError("the file server does not answer")
    if unit == "error":
        raise FldiagError("client 3 is broken", "mend it")
    if isinstance(unit, Path):  # dies until it was tried so often as the file's name says
        tried = len(list(unit.parent.glob(f"{unit.name}.*")))
        (unit.parent / f"{unit.name}.{tried}").touch()
        if tried < int(unit.name):
            os._exit(3)
        return tried
    return factor * unit, torch.get_num_threads()


def called(unit):
    return f"unit {unit}"


@pytest.fixture(scope="module", params=["serial", "processes:2", "dask", "given", "threads"])
def pool(request):
    own = {
        "given": lambda: ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")),
        "threads": lambda: ThreadPoolExecutor(2),
    }.get(request.param)
    executor = own() if own else request.param
    with open_pool(executor, work, 10, name=called) as made:
        yield made
    if own:
        assert executor.submit(int, "3").result() == 3, "somebody's own executor is not ended"
        executor.shutdown()


@pytest.mark.slow
def test_results_come_in_order_and_with_the_same_number_of_threads(pool):
    found = list(pool.map(range(20)))
    assert [v for v, _ in found] == [10 * i for i in range(20)]
    assert {n for _, n in found} == {torch.get_num_threads()}
    assert sorted(pool.completed(range(5))) == [(i, found[i]) for i in range(5)]
    assert list(pool.map([])) == []


@pytest.mark.slow
def test_an_error_of_a_unit_is_raised_and_the_pool_goes_on(pool):
    with pytest.raises(FldiagError, match="client 3 is broken") as caught:
        list(pool.map([1, "error", 2]))
    assert (caught.value.what, caught.value.remedy) == ("client 3 is broken", "mend it")
    with pytest.raises(TimeoutError, match="the file server"):
        list(pool.map([1, "late", 2]))
    assert [v for v, _ in pool.map([4, 5])] == [40, 50]


@pytest.mark.slow
def test_a_worker_without_memory_is_an_error_that_names_the_unit(pool):
    with pytest.raises(FldiagError, match="unit hungry: out of memory; use fewer workers"):
        list(pool.map([1, "hungry", 2]))
    assert [v for v, _ in pool.map([4, 5])] == [40, 50]


@pytest.mark.slow
def test_a_worker_that_dies_while_it_waits_is_replaced():
    with open_pool("processes:2", work, 10, name=called) as pool:
        assert [v for v, _ in pool.map([1, 2, 3])] == [10, 20, 30]
        for process in multiprocessing.active_children():
            process.kill()
            process.join()
        time.sleep(0.5)  # until the pool has noticed
        assert [v for v, _ in pool.map([4, 5, 6])] == [40, 50, 60]


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["processes:2", "dask"])
def test_a_worker_that_dies_loses_its_unit_only(executor, tmp_path):
    with open_pool(executor, work, 10, name=called) as pool:
        found = list(pool.map([1, tmp_path / str(TRIES - 1), 2, 3]))
        assert found[1] == TRIES - 1 and [v for v, _ in (found[0], *found[2:])] == [10, 20, 30]
        with pytest.raises(
            FldiagError, match=r"unit die: its worker process died 3 times.*--resume"
        ):
            list(pool.map([1, "die", 2]))
        assert [v for v, _ in pool.map([4, 5])] == [40, 50]


@pytest.mark.slow
def test_only_a_long_pause_of_all_workers_of_a_cluster_is_an_error():
    """Dask pauses a worker while it frees its memory, and lets it go on."""
    cluster, looks = object.__new__(DaskCluster), iter([True] * 5 + [False] + [True] * 6)
    cluster.client = SimpleNamespace(run_on_scheduler=lambda _: next(looks))
    cluster.location = "tcp://here"
    count = 0
    for _ in range(11):
        count = cluster._count_paused(count)
    with pytest.raises(FldiagError, match="all workers of tcp://here are paused"):
        cluster._count_paused(count)


@pytest.mark.slow
def test_a_worker_of_a_cluster_of_this_machine_may_take_more_than_its_share_of_the_memory(
    monkeypatch,
):
    """With PyTorch alone it takes more than this; Dask would stop it and wait until it takes less."""
    monkeypatch.setattr("distributed.system.MEMORY_LIMIT", 200 * 2**20)
    with open_pool("dask", work, 10) as pool:
        assert [v for v, _ in pool.map([1, 2, 3])] == [10, 20, 30]


@pytest.mark.slow
def test_a_broken_executor_of_somebody_else_is_one_error():
    with (
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as own,
        open_pool(own, work, 10) as pool,
        pytest.raises(FldiagError, match=r"ProcessPoolExecutor is broken.*resume=True"),
    ):
        list(pool.map([1, "die", 2]))


def test_an_executor_that_was_shut_down_is_one_error():
    own = ThreadPoolExecutor(1)
    own.shutdown()
    with pytest.raises(
        FldiagError, match=r"ThreadPoolExecutor is broken \(cannot schedule.*resume=True"
    ):
        list(open_pool(own, work, 10).map([1]))


class Six:
    """An executor that does not say how many workers it has, and begins when it has six units."""

    def __init__(self):
        self.waiting = []

    def submit(self, function, *args):
        self.waiting.append((future := Future(), function, args))
        if len(self.waiting) >= 6:
            for other, f, given in self.waiting:
                if not other.done():
                    other.set_result(f(*given))
        return future


def test_an_executor_of_unknown_size_gets_all_units_at_once():
    beats = iter(range(20))
    found = open_pool(Six(), work, 10).completed(range(6), beat=lambda: next(beats))
    assert sorted((n, value) for n, (value, _) in found) == [(i, 10 * i) for i in range(6)]


def test_a_place_that_cannot_be_reached_leaves_no_run_behind(tmp_path, monkeypatch):
    def refused(*args, **kwargs):
        raise FldiagError("no Dask scheduler answers")

    monkeypatch.setattr(rounds, "open_pool", refused)
    with pytest.raises(FldiagError, match="no Dask scheduler"):
        rounds.train(config(), out=tmp_path / "run", executor="dask:tcp://127.0.0.1:9")
    assert not (tmp_path / "run").exists()


def test_personal_models_are_made_where_the_rounds_were(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        rounds, "measure", lambda *args: seen.append(str(workspace().executor)) or []
    )
    with ThreadPoolExecutor(1) as own:
        run = rounds.train(
            config("fedbabu", rounds=1, total=3, per_round=2), out=tmp_path, executor=own
        )
    assert seen == ["ThreadPoolExecutor"] and run.status == "finished"


@pytest.mark.parametrize("executor", ["serial", "processes:2"])
def test_a_diagnostic_without_parts_says_so(executor):
    entry = registry.Diagnostic(
        "diagnostic", "one", lambda problem: table([{"metric": "n", "value": problem.n}])
    )
    data = torch.ones(2, 3), torch.zeros(2, dtype=torch.long)
    problem = fldiag.Problem(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, data)
    remarks = []
    frame = measure(entry, problem, entry.options(), executor=executor, tell=remarks.append)
    assert frame["value"].tolist() == [2]
    assert remarks == [f"one cannot be split for {executor}: it was computed in this process"] * (
        executor != "serial"
    )


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="processors cannot be taken away here"
)
def test_workers_are_as_many_as_the_processors_that_may_be_used():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert cores(1) == 1
    finally:
        os.sched_setaffinity(0, before)


def test_state_that_cannot_be_sent_is_said_before_anything_starts():
    with pytest.raises(FldiagError, match=r"cannot be sent to worker processes.*executor 'serial'"):
        open_pool("processes:2", work, lambda x: x)


@pytest.mark.slow
def test_left_early_it_does_not_wait_for_the_rest():
    with open_pool("processes:1", time_of, None) as pool:
        first = next(iter(pool.map([0.0, 600.0])))
    assert first == 0.0


def time_of(_, seconds):
    time.sleep(seconds)
    return seconds


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("serial", "serial"),
        ("processes:3", "processes:3"),
        ("dask", "dask"),
        ("dask:tcp://host:8786", "dask:tcp://host:8786"),
    ],
)
def test_names(name, said):
    assert str(parse_executor(name)) == said and parse_executor(
        parse_executor(name)
    ) == parse_executor(name)
    assert cores(1) >= cores(2) >= 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("threads", "unknown executor 'threads'"),
        ("processes:0", "number of workers"),
        ("processes:x", "number of workers"),
        ("serials", "did you mean 'serial'?"),
        ("serial:2", "write serial"),
        ("dask:8786", "address is not valid"),
        (3, "executor of concurrent.futures"),
    ],
)
def test_wrong_names(name, message):
    with pytest.raises(FldiagError, match=message.replace("?", r"\?")) as caught:
        parse_executor(name)
    assert caught.value.usage


@pytest.mark.slow
def test_nobody_at_the_address():
    with pytest.raises(
        FldiagError, match=r"no Dask scheduler answers at tcp://127.0.0.1:9 .*dask scheduler"
    ):
        open_pool("dask:tcp://127.0.0.1:9", work, 10)


def process_of(shared, unit):
    return os.getpid()


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="a terminal sends Ctrl-C to all processes")
def test_ctrl_c_while_a_worker_starts_is_none_of_its_business(capfd):
    """It imports modules for seconds before it can ignore the signal itself."""
    started = []

    def units():
        yield 0
        started.extend(process.pid for process in multiprocessing.active_children())
        for _ in range(10):
            for pid in started:
                os.kill(pid, signal.SIGINT)
            time.sleep(0.1)

    with open_pool("processes:2", process_of, None) as pool:
        assert list(pool.map(units())) == started and len(started) == 1
    assert not capfd.readouterr().err
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["processes:2", "dask"])
def test_a_run_in_worker_processes_has_the_bits_of_a_serial_one(executor, tmp_path):
    chosen_ = config("scaffold", rounds=2, total=5, per_round=4, precision="fp32")
    serial = rounds.train(chosen_, out=tmp_path / "serial")
    parallel = rounds.train(chosen_, out=tmp_path / "parallel", executor=executor)
    for r in serial.rounds:
        one, other = serial.checkpoint(r).state, parallel.checkpoint(r).state
        assert all(torch.equal(one[k], other[k]) for k in one)
    one, other = (run.metrics.drop(columns="run") for run in (serial, parallel))
    assert one.equals(other)


@pytest.mark.slow
def test_workers_end_with_the_process_that_started_them():
    script = """if __name__ == "__main__":
        import os, time
        from fldiag.execution.pools import open_pool
        from test_executor import own_number
        print(next(open_pool("processes:1", own_number, None).map([0])), flush=True)
        time.sleep(60)"""
    main = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    worker = int(main.stdout.readline())
    main.kill()
    main.wait()
    for _ in range(100):
        if (
            not Path(f"/proc/{worker}").exists()
            or "State:\tZ" in Path(f"/proc/{worker}/status").read_text()
        ):
            return
        time.sleep(0.1)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the worker outlived its main process by ten seconds")


def own_number(_, unit):
    return os.getpid()
