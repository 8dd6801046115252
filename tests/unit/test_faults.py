"""Workers are killed, stopped and starved while they work: nothing is lost, and the bits are those of a quiet run.

FLDIAG_KILLS says how often each test kills (default 3; analyses ask for more).
"""

import multiprocessing
import os
import random
import signal
import threading
import time
from dataclasses import replace

import pandas as pd
import pytest
import torch

import fldiag
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
        seen = {}
        while self.done < self.count and not self.over.wait(0.1):
            now = time.monotonic()
            there = {p.pid for p in multiprocessing.active_children()}
            seen = {pid: seen.get(pid, now) for pid in there}
            ready = [pid for pid, since in seen.items() if now - since > 4]  # has started, and may be at work
            if ready and self.rng.random() < 0.3:
                self.send(self.rng.choice(sorted(ready)))
                seen, self.done = {}, self.done + 1  # the others wait anew: no unit loses three workers in a row

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.over.set()
        self.thread.join()


def kill(pid):
    os.kill(pid, signal.SIGKILL)


def stop_for_a_second(pid):
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1)
    os.kill(pid, signal.SIGCONT)


def federation(rounds):
    return fldiag.Config.load("digits", rounds=rounds, method__name="scaffold", model__name="mlp", clients__per_round=4,
                              train__epochs=1, checkpoint__clients="sampled", checkpoint__every=10, train__stack="off")


@pytest.mark.parametrize("send", [kill, stop_for_a_second])
def test_training(send, tmp_path):
    rounds = 40 * KILLS
    quiet = fldiag.train(federation(rounds), out=tmp_path / "quiet", device="cpu")
    with Trouble(send) as trouble:
        loud = fldiag.train(federation(rounds), out=tmp_path / "loud", executor="processes:2", device="cpu")
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
