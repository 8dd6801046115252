"""What is interrupted goes on: the same table to the bit, and nothing that was finished is computed again."""

import helpers
import numpy as np
import pandas as pd
import pytest
import torch
from histories import history, moved, separable, stored, tanh_net
from surfaces import Interrupted
from test_connectivity import asked, net
from test_leave_one_out import effects, finished
from test_personalise import trained

import fldiag
from fldiag.errors import FldiagError
from fldiag.execution.pools import open_pool
from fldiag.method import Personal
from fldiag.results import kept_units
from fldiag.results.kept_units import ArrayStore, KeptUnits
from fldiag.runs.round_weights import Stored
from fldiag.training.personalise import GlobalModel, measure


class Counting(ArrayStore):
    """How many units were computed."""

    count = 0

    def offer(self, *what):
        self.count += 1
        super().offer(*what)


class Refusing(ArrayStore):
    """A disk without room."""

    def save(self, *what):
        raise FldiagError("cannot write")

    offer = save


def connectivity(store):
    """Three paths, and eight mixtures after corners, centre and edges."""
    three = [asked(net(s, hidden=[4]), name=str(s)) for s in range(3)]
    return fldiag.diagnose(
        three, "connectivity", curve=0, points=3, refine=0, mixtures=2, store=store
    )


def flatness(store):
    w, clients = moved(net := tanh_net(4, 4), 2)
    rounds = [stored(w, clients, round=r) for r in (1, 2)]
    made = history(
        net,
        separable(),
        np.array_split(np.random.default_rng(0).permutation(120), 2),
        *rounds,
        dtype=w.dtype,
    )
    return fldiag.diagnose(
        made, "flatness", every=1, rtol=0.9, max_products=4, tol=0.5, store=store
    )


def four_rounds():
    """Of the second round one client's weights are broken, of the third there are no client weights."""
    w, clients = moved(net := tanh_net(4, 4), 2)
    broken = [clients[0], torch.full_like(w, torch.nan)]
    read = [
        stored(w, clients, round=1),
        stored(w, broken, clients[0], round=2),
        Stored(3, w),
        stored(w, clients, round=4),
    ]
    return history(
        net,
        separable(),
        np.array_split(np.random.default_rng(0).permutation(120), 2),
        *read,
        dtype=w.dtype,
    )


def leave_one_out(store):
    q = helpers.quadratics((12, 9, 15))
    setup = helpers.setup(q.config(rounds=4, lr=0.1), q.data)
    return effects(setup, (1, 2), run=finished(setup), kept=KeptUnits(store, str))


def personalise(store):
    """Of two runs with the same clients, which differ in what they are called."""
    made, plan = trained(stack="off"), Personal((0, 2))
    kept = KeptUnits(store, str)
    return pd.concat(
        [
            pd.DataFrame(
                measure(made.setup, plan, GlobalModel(made.w, {}, {}, 2), store=kept, run=run)
            )
            for run in "ab"
        ]
    )


@pytest.mark.parametrize(
    ("ask", "units", "after"),
    [
        (connectivity, 3 + 3 + 1 + 21 + 2, 7),
        (flatness, 2 * 3, 4),
        (leave_one_out, 6, 4),
        (personalise, 2 * 3, 4),
    ],
)
def test_an_interrupted_diagnostic_goes_on(ask, units, after, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        ask(Interrupted(tmp_path / "kept.npz", after))
    again, whole = Counting(tmp_path / "kept.npz"), Counting(tmp_path / "new.npz")
    pd.testing.assert_frame_equal(ask(again), ask(whole), check_exact=True)
    assert (again.count, whole.count) == (units - after, units)


def test_a_cache_without_room_keeps_nothing_and_ends_nothing(tmp_path, monkeypatch):
    whole, asked, told = fldiag.diagnose(four_rounds(), "drift"), [], []

    def full(path, writer):
        asked.append(path)
        raise FldiagError(f"cannot write {path}")

    monkeypatch.setattr(kept_units, "write_atomic", full)
    monkeypatch.setattr(ArrayStore, "offer", lambda self, *content: self.save(*content))
    found = fldiag.diagnose(four_rounds(), "drift", cache=tmp_path, tell=told.append)
    pd.testing.assert_frame_equal(found, whole, check_exact=True)
    assert (
        len(asked) == 1
        and sum("finished parts are not kept from here on" in text for text in told) == 1
    )


def test_a_store_that_was_asked_for_and_refuses_is_an_error(tmp_path):
    with pytest.raises(FldiagError, match="cannot write"):
        KeptUnits(Refusing(tmp_path), str).result("unit", dict)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_disk_without_room_does_not_hide_what_ended_the_work(error, tmp_path):
    kept = KeptUnits(Refusing(tmp_path), str)
    kept.contents["unit"] = np.zeros(1)
    with pytest.raises(error), kept.saved():
        raise error


def stopped(done, total, text):
    """In the last of ``four_rounds``."""
    if text == "round 4":
        raise KeyboardInterrupt


def test_finished_rounds_of_other_options_are_not_taken(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fldiag.diagnose(four_rounds(), "drift", cache=tmp_path, progress=stopped, rho=(1,))
    assert len(list(tmp_path.glob("drift-*.partial.npz"))) == 1
    fresh = fldiag.diagnose(four_rounds(), "drift", rho=(2,))
    pd.testing.assert_frame_equal(
        fldiag.diagnose(four_rounds(), "drift", cache=tmp_path, rho=(2,)), fresh, check_exact=True
    )


def test_a_round_whose_weights_are_all_numbers_is_not_copied():
    w, clients = moved(tanh_net(4, 4), 2)
    sound, broken = stored(w, clients), stored(w, [clients[0], torch.full_like(w, torch.nan)])
    assert (
        sound.finite() is sound
        and broken.finite().ids == (0,)
        and len(broken.finite().clients) == 1
    )


def test_two_units_of_one_name_are_refused(tmp_path):
    with (
        open_pool("serial", lambda shared, unit: unit, None) as pool,
        pytest.raises(ValueError, match="two units of one name"),
    ):
        KeptUnits(tmp_path / "kept.npz", str).results(pool, [1, 1, 2])
