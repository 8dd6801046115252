"""An interrupted diagnostic resumes: the same table to the bit, and no finished item is computed again."""

import helpers
import numpy as np
import pandas as pd
import pytest
import torch
from histories import history, moved, separable, stored, tanh_net
from torch import nn

import fldiag
from fldiag.models.lora import with_adapters
from fldiag.results.kept_units import FinishedItems
from fldiag.runs.round_weights import Stored


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
    "account": (four_rounds, {"every_round": True, "k": 1}),
    "drift": (four_rounds, {}),
    "fairness": (four_rounds, {"every_round": True}),
    "forgetting": (four_rounds, {}),
    "lora": (adapted, {"k": 1, "tol": 0.5}),
    "matching": (four_rounds, {"every_round": True, "k": 1}),
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
