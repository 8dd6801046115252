"""An interrupted diagnostic resumes: the same table to the bit, and no finished item is computed again."""

import tempfile
from functools import cache
from pathlib import Path

import helpers
import numpy as np
import pandas as pd
import pytest
import torch
from histories import history, moved, separable, stored, tanh_net
from torch import nn
from torch.nn.functional import cross_entropy

import fldiag
from fldiag.errors import FldiagError
from fldiag.models.lora import with_adapters
from fldiag.problem.problem import Problem
from fldiag.results import finished_items
from fldiag.results.finished_items import FinishedItems
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


def network(seed=0, **options):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    examples = torch.randn(30, 6, generator=torch.Generator().manual_seed(1)), torch.arange(30) % 3
    return Problem(net, cross_entropy, examples, name=f"net-{seed}", **options)


def adapted():
    """In the second round one client's weights are broken."""
    torch.manual_seed(0)
    data, parts = helpers.classification((20, 13, 9))
    layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    w, clients = moved(net := with_adapters(layers, 2, 4.0, ("0",), "2"))
    broken = [*clients[:2], torch.full_like(w, torch.nan)]
    cohorts = enumerate((clients, broken, clients), 1)
    return history(net, data, parts, *(stored(w, c, clients[0], round=r) for r, c in cohorts))


CASES = {
    "connectivity": (
        lambda: [network(seed) for seed in range(3)],
        {"curve": 3, "points": 3, "refine": 0, "mixtures": 2},
    ),
    "density": (network, {"k": 2, "steps": 5}),
    "profile": (network, {"points": 5}),
    "spectrum": (network, {"k": 2, "per_layer": True, "trace": True}),
    "flatness": (four_rounds, {"every": 1, "rtol": 0.9, "max_products": 4, "tol": 0.5}),
    "account": (four_rounds, {"every_round": True, "k": 1}),
    "drift": (four_rounds, {}),
    "fairness": (four_rounds, {"every_round": True}),
    "forgetting": (four_rounds, {}),
    "lora": (adapted, {"k": 1, "tol": 0.5}),
    "matching": (
        four_rounds,
        {"every_round": True, "k": 1, "tol": 0.5, "rtol": 0.5, "deflate": 2, "max_products": 20},
    ),
    "landscape": (rugged, {"directions": "random", "points": 21, "span": 4.0}),
    "personalise": (two_runs, {"epochs": "0,1"}),
}


class Keeps:
    """Counts what is kept, and interrupts after so many. It is undone with ``monkeypatch``."""

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


@cache
def uninterrupted(name):
    """The table of a diagnostic that nothing interrupted, and how many parts were kept."""
    make, options = CASES[name]
    with pytest.MonkeyPatch.context() as monkeypatch, tempfile.TemporaryDirectory() as folder:
        return Keeps(monkeypatch).of(
            lambda: fldiag.diagnose(make(), name, cache=Path(folder), **options)
        )


@pytest.mark.parametrize("name", CASES)
def test_a_diagnostic_that_is_interrupted_twice_resumes(name, tmp_path, monkeypatch):
    make, options = CASES[name]
    table, total = uninterrupted(name)
    assert total > 1, "the work of this diagnostic has no parts"
    keeps = Keeps(monkeypatch)

    def diagnose():
        return fldiag.diagnose(make(), name, cache=tmp_path, **options)

    first, second = 1, total - 2  # one part is left
    for stop in filter(None, (first, second)):
        assert keeps.of(diagnose, limit=stop) == (None, stop)
    resumed, count = keeps.of(diagnose)
    pd.testing.assert_frame_equal(resumed, table, check_exact=True)
    assert count == 1
    assert not list(tmp_path.glob("*.partial.npz"))


@pytest.mark.parametrize("name", ["density", "connectivity", "drift"])
def test_a_disk_without_room_keeps_nothing_and_ends_nothing(name, tmp_path, monkeypatch):
    make, options = CASES[name]
    messages = []

    def full(path, writer):
        raise FldiagError(f"cannot write {path}")

    monkeypatch.setattr(finished_items, "write_atomic", full)
    monkeypatch.setattr(finished_items, "INTERVAL", 0)
    table = fldiag.diagnose(make(), name, cache=tmp_path, tell=messages.append, **options)
    pd.testing.assert_frame_equal(table, uninterrupted(name)[0], check_exact=True)
    assert sum("finished parts are not kept from here on" in text for text in messages) == 1


def test_items_of_other_options_are_not_read(tmp_path, monkeypatch):
    keeps = Keeps(monkeypatch)

    def diagnose(rho):
        return fldiag.diagnose(four_rounds(), "drift", cache=tmp_path, rho=(rho,))

    assert keeps.of(lambda: diagnose(1.0), limit=2)[0] is None
    assert len(list(tmp_path.glob("drift-*.partial.npz"))) == 1
    fresh = fldiag.diagnose(four_rounds(), "drift", rho=(2.0,))
    pd.testing.assert_frame_equal(keeps.of(lambda: diagnose(2.0))[0], fresh, check_exact=True)
