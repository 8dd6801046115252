"""Where work runs decides nothing but the time: results, their order, and what a worker that dies says."""

import itertools
import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import precision

import fldiag
from fldiag import execution, registry
from fldiag.device import threads
from fldiag.errors import FldiagError
from fldiag.execution import check_executor, open_pool
from fldiag.training.sweep import part_of

DASK = pytest.param("dask", marks=pytest.mark.slow)
on_workers = pytest.mark.parametrize("executor", ["processes:2", DASK])


#: A unit that ends its worker, while the other ones still work.
DEADLY = 10


def draw(state, seed):
    """A sum whose last bits depend on the number of threads, a draw from PyTorch's global generator; the code that may be imported,
    and how a GPU would compute."""
    if seed == DEADLY:
        os._exit(9)
    if seed > 6:
        time.sleep(0.2)
    torch.manual_seed(seed)
    total = float((state * torch.randn(len(state))).sum())
    return total, torch.get_num_threads(), "mine:net" in registry.ALLOWED, precision()


@pytest.fixture(autouse=True)
def _workers_find_this_file(monkeypatch):
    monkeypatch.syspath_prepend(os.path.dirname(__file__))


@pytest.fixture(scope="module")
def state():
    return torch.randn(100_003, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("executor", ["processes:2", "threads", DASK])
def test_results_are_those_of_this_process_in_order(state, executor, monkeypatch):
    """Also what a worker says that dies is one error, which names its unit."""
    monkeypatch.setattr(registry, "ALLOWED", {"mine:net"})
    has_workers, name = executor != "threads", "unit {}".format
    executor = executor if has_workers else ThreadPoolExecutor(2)
    with threads(1), open_pool("serial", draw, state) as pool:
        here = list(pool.map(range(7)))
    with threads(1), open_pool(executor, draw, state, name=name) as pool:
        assert list(pool.map(range(7))) == here
        if has_workers:
            with pytest.raises(FldiagError, match=rf"unit {DEADLY}: its worker died.*--resume"):
                list(pool.map(range(DEADLY - 3, DEADLY + 3)))
    assert {how[1:] for how in here} == {(1, True, (False, True))}


@pytest.mark.slow
def test_a_cluster_with_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(execution, "__version__", "99.9")
    with pytest.raises(FldiagError, match="install the same versions"):
        open_pool("dask", draw, None)


@pytest.mark.parametrize(
    "executor", ["threads", "processes:0", "processes:", "dask:8786", "serial:2", 3]
)
def test_what_is_no_executor_is_refused(executor):
    with pytest.raises(FldiagError, match="executor"):
        check_executor(executor)


def test_shards_are_all_of_a_plan_each_item_once():
    parts = [part_of([*range(10)], f"{i}/3") for i in (1, 2, 3)]
    assert sorted(itertools.chain(*parts)) == list(range(10)) and part_of(["a"], "1/1") == ["a"]
    for text in ("0/3", "4/3", "1", "a/b"):
        with pytest.raises(FldiagError, match="1/4 to 4/4"):
            part_of([*range(10)], text)


@pytest.fixture(scope="module")
def config():
    shape = {"model__name": "mlp", "model__hidden": [8], "clients__total": 6}
    how = {"clients__per_round": 3, "train__epochs": 1, "checkpoint__clients": "sampled"}
    return fldiag.Config.load("digits", rounds=2, method__name="scaffold", **shape, **how)


def same(one, other, rounds):
    """Whether two runs have the same weights after these rounds."""
    for r in rounds:
        a, b = one.checkpoint(r), other.checkpoint(r)
        assert all(torch.equal(a.state[k], b.state[k]) for k in a.state)
        assert np.array_equal(a.clients, b.clients)
    return True


@pytest.fixture(scope="module")
def workers():
    """A process that training and diagnostics do not have to start, and which had other work before."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        yield executor


@pytest.mark.parametrize("executor", ["workers", DASK])
def test_training_and_diagnostics_give_the_same_bits(config, executor, request, tmp_path):
    executor = request.getfixturevalue("workers") if executor == "workers" else executor
    here = fldiag.train(config, out=tmp_path / "here")
    there = fldiag.train(config, out=tmp_path / "there", executor=executor)
    assert same(here, there, (1, 2))
    rows = [run.metrics.drop(columns="run") for run in (here, there)]
    pd.testing.assert_frame_equal(*rows, check_exact=True)
    tables = [
        fldiag.diagnose(here, "drift", executor=where, samples=20) for where in ("serial", executor)
    ]
    pd.testing.assert_frame_equal(*tables, check_exact=True)


@pytest.mark.slow
def test_a_run_whose_worker_died_goes_on_with_the_same_bits(config, tmp_path):
    config = config.replace(rounds=4)
    whole = fldiag.train(config, out=tmp_path / "whole")

    def kill(event):
        if event["event"] == "round" and event["round"] == 2:
            multiprocessing.active_children()[0].kill()

    with pytest.raises(FldiagError, match=r"its worker died.*--resume"):
        fldiag.train(config, out=tmp_path / "other", executor="processes:1", on_event=kill)
    other = fldiag.train(config, out=tmp_path / "other", executor="processes:1", resume=True)
    assert same(whole, other, (4,))


def folders(state, unit):
    return sys.path


def blocked(state, unit):
    return "SigBlk:\t0000000000000002\n" in Path("/proc/self/status").read_text(encoding="utf-8")


def answers(function, executor, folder):
    """What units of a script answer that runs in that folder."""
    script = folder.parent / "script.py"
    script.write_text(
        f"from fldiag.execution import open_pool; from test_executors import {function}\n"
        f"if __name__ == '__main__':\n"
        f" with open_pool({executor!r}, {function}, None) as pool: print(list(pool.map([1, 2])))"
    )
    places = os.pathsep.join([os.path.dirname(__file__), *map(str, Path(__file__).parents[1:3])])
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": places},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@on_workers
def test_workers_do_not_import_from_the_working_directory(executor, tmp_path):
    for name in ("multiprocessing", "signal"):
        (tmp_path / f"{name}.py").write_text("open('HIT', 'a').write('x')\nraise ImportError\n")
    assert str(tmp_path) not in answers("folders", executor, tmp_path).split("'")
    assert not (tmp_path / "HIT").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
@on_workers
def test_workers_leave_ctrl_c_to_the_main_process(executor, tmp_path):
    assert answers("blocked", executor, tmp_path) == "[True, True]\n"
