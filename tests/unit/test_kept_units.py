"""What is interrupted goes on: the same table to the bit, and nothing that was finished is computed again."""

import helpers
import numpy as np
import pandas as pd
import pytest
from histories import history, moved, separable, stored, tanh_net
from surfaces import Interrupted
from test_connectivity import asked, net
from test_leave_one_out import effects, finished

import fldiag
from fldiag.results.array_checkpoint import ArrayStore
from fldiag.results.kept_units import KeptUnits


class Counting(ArrayStore):
    """How many units were computed."""

    count = 0

    def offer(self, *what):
        self.count += 1
        super().offer(*what)


def connectivity(store):
    """Three paths, and eight mixtures after corners, centre and edges."""
    three = [asked(net(s, hidden=[4]), name=str(s)) for s in range(3)]
    return fldiag.diagnose(three, "connectivity", curve=0, points=3, refine=0, mixtures=2, store=store)


def basins(store):
    return fldiag.diagnose(asked(net(0, hidden=[4])), "basins", draws=5, density=1, store=store)


def flatness(store):
    w, clients = moved(net := tanh_net(4, 4), 2)
    rounds = [stored(w, clients, round=r) for r in (1, 2)]
    made = history(net, separable(), np.array_split(np.random.default_rng(0).permutation(120), 2), *rounds, dtype=w.dtype)
    return fldiag.diagnose(made, "flatness", every=1, rtol=0.9, max_products=4, tol=0.5, store=store)


def leave_one_out(store):
    q = helpers.quadratics((12, 9, 15))
    setup = helpers.setup(q.config(rounds=4, lr=0.1), q.data)
    return effects(setup, (1, 2), run=finished(setup), kept=KeptUnits(store, str))


@pytest.mark.parametrize(("ask", "units", "after"), [(connectivity, 3 + 3 + 1 + 21 + 2, 7), (basins, 6, 4), (flatness, 2 * 3, 4),
                                                     (leave_one_out, 6, 4)])
def test_an_interrupted_diagnostic_goes_on(ask, units, after, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        ask(Interrupted(tmp_path / "kept.npz", after))
    again, whole = Counting(tmp_path / "kept.npz"), Counting(tmp_path / "new.npz")
    pd.testing.assert_frame_equal(ask(again), ask(whole), check_exact=True)
    assert (again.count, whole.count) == (units - after, units)
