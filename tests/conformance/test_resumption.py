"""An interrupted diagnostic resumes: the same table to the bit, and no finished item is computed again."""

import tempfile
from functools import cache

import helpers
import numpy as np
import pandas as pd
import pytest
import torch
from histories import history, moved, separable, stored, tanh_net

import fldiag
from fldiag.results.kept_units import FinishedItems
from fldiag.runs.round_weights import Stored
from fldiag.training import rounds

FOLDER = tempfile.TemporaryDirectory()


def four_rounds():
    """Of the second round one client's weights are broken; the third has no client weights."""
    w, clients = moved(net := tanh_net(4, 4), 2)
    broken = [clients[0], torch.full_like(w, torch.nan)]
    rounds = [
        stored(w, clients, round=1),
        stored(w, broken, clients[0], round=2),
        Stored(3, w),
        stored(w, clients, round=4),
    ]
    parts = np.array_split(np.random.default_rng(0).permutation(120), 2)
    return history(net, separable(), parts, *rounds, dtype=w.dtype)


@cache
def two_runs():
    """Of the same config: only their names differ."""
    config = helpers.config("fedavg", rounds=2, total=4, per_round=2, stack="off")
    return [rounds.train(config, out=f"{FOLDER.name}/{name}") for name in "ab"]


def rugged():
    """A problem whose surface is refined in several steps."""
    torch.manual_seed(2)
    net = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    data = torch.randn(30, 5), torch.arange(30) % 3
    return fldiag.Problem(net, torch.nn.functional.cross_entropy, data)


CASES = {
    "matching": (four_rounds, {"every_round": True, "k": 1}),
    "landscape": (rugged, {"directions": "random", "points": 21, "span": 4.0}),
    "leave-one-out": (two_runs, {"last": (1, 2)}),
    "personalise": (two_runs, {"epochs": "0,1"}),
}


class Keeps:
    """Counts what is kept, and interrupts after so many."""

    def __init__(self, monkeypatch):
        self.count, self.limit = 0, None
        keep = FinishedItems.keep

        def counted(finished, name, value):
            keep(finished, name, value)
            self.count += 1
            if self.count == self.limit:
                raise KeyboardInterrupt

        monkeypatch.setattr(FinishedItems, "keep", counted)

    def of(self, call, limit=None):
        """The result of the call (None: interrupted), and how much it kept."""
        self.count, self.limit = 0, limit
        try:
            return call(), self.count
        except KeyboardInterrupt:
            return None, self.count


@pytest.mark.parametrize("name", CASES)
def test_an_interrupted_diagnostic_resumes(name, tmp_path, monkeypatch):
    make, options = CASES[name]
    keeps = Keeps(monkeypatch)

    def diagnose(folder):
        return fldiag.diagnose(make(), name, cache=tmp_path / folder, **options)

    table, total = keeps.of(lambda: diagnose("whole"))
    assert total > 1, "the work of this diagnostic has no parts"
    for stop in sorted({1, total // 2, total - 1}):
        assert keeps.of(lambda stop=stop: diagnose(f"stopped-{stop}"), limit=stop) == (None, stop)
        resumed, count = keeps.of(lambda stop=stop: diagnose(f"stopped-{stop}"))
        pd.testing.assert_frame_equal(resumed, table, check_exact=True)
        assert count == total - stop
        assert not list((tmp_path / f"stopped-{stop}").glob("*.partial.npz"))
