"""Executors: the same bits wherever the work is done, and a worker's death is a message."""

import os

import pytest
import torch
from helpers import config

from fldiag.errors import FldiagError
from fldiag.training import executor, rounds


@pytest.mark.slow
def test_a_run_in_worker_processes_has_the_bits_of_a_serial_one(tmp_path):
    chosen = config("scaffold", rounds=2, total=5, per_round=4, precision="fp32")
    serial = rounds.train(chosen, out=tmp_path / "serial")
    parallel = rounds.train(chosen, out=tmp_path / "parallel", executor="processes:2")
    for r in serial.rounds:
        one, other = serial.checkpoint(r).state, parallel.checkpoint(r).state
        assert all(torch.equal(one[k], other[k]) for k in one)
    one, other = (run.metrics.drop(columns="run") for run in (serial, parallel))
    assert one.equals(other)


class Work:
    def __init__(self, factor):
        self.factor = factor

    def go(self, x):
        if x == "die":
            os._exit(3)
        if x == "error":
            raise FldiagError("client 3 is broken", "mend it")
        return self.factor * x, torch.get_num_threads()


def test_results_come_in_order_and_with_the_same_number_of_threads():
    pool = executor.Processes(Work, {"factor": 10}, "go", 2)
    try:
        found = list(pool.map(range(20)))
        assert [v for v, _ in found] == [10 * i for i in range(20)]
        assert {n for _, n in found} == {torch.get_num_threads()}
        with pytest.raises(FldiagError, match="client 3 is broken") as caught:
            list(pool.map(["error"]))
        assert (caught.value.what, caught.value.remedy) == ("client 3 is broken", "mend it")
        with pytest.raises(FldiagError, match=r"a worker process died.*--resume"):
            list(pool.map(["die"]))
    finally:
        pool.close()


@pytest.mark.parametrize(("name", "parsed"), [
    ("serial", "serial"), ("processes:3", ("processes", 3)), ("processes", "processes")])
def test_names(name, parsed):
    kind, workers = executor.parse(name)
    assert (kind, workers) == parsed if isinstance(parsed, tuple) else kind == parsed
    assert workers >= 1


@pytest.mark.parametrize(("name", "message"), [("threads", "unknown executor 'threads'"), ("processes:0", "number of workers"),
                                               ("processes:x", "number of workers"), ("serials", "did you mean 'serial'?")])
def test_wrong_names(name, message):
    with pytest.raises(FldiagError, match=message.replace("?", r"\?")) as caught:
        executor.parse(name)
    assert caught.value.usage
