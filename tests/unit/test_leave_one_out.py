"""Leaving clients out: an independent retraining by hand, the closed form on quadratics, signs, and what cannot be done."""

from pathlib import Path
from types import SimpleNamespace

import helpers
import numpy as np
import pandas as pd
import pytest
import torch
from histories import one

from fldiag.errors import FldiagError
from fldiag.results.table import table
from fldiag.training.diagnostics.leave_one_out.measure import of_run, rank_correlations
from fldiag.training.diagnostics.leave_one_out.picture import draw
from fldiag.training.setup import setup_of

SIZES, ROUNDS, LR = (12, 9, 15), 4, 0.1


def finished(setup, rounds=ROUNDS):
    """A run of this setup that keeps nothing but its last weights."""
    made = helpers.Federation(setup)
    helpers.play(made, rounds)
    state = setup.network.layout.views(made.w)
    return SimpleNamespace(
        status="finished",
        done=rounds,
        path=Path("made"),
        name="made",
        rounds=[],
        checkpoint=lambda r=None: SimpleNamespace(state=state),
    )


def effects(setup, last=(1, 3), where="train", run=None):
    return table(
        of_run(run or finished(setup), setup, list(last), where),
        run="made",
        method="m",
        seed=0,
    )


@pytest.fixture
def quadratic():
    """Three clients of full-batch gradient descent, all of them in every round."""
    q = helpers.quadratics(SIZES)
    return q, helpers.setup(q.config(rounds=ROUNDS, lr=LR), q.data)


def by_hand(q, setup, drop=None, since=0):
    """Global weights when client ``drop`` is left out from round ``since`` on (2 epochs of full-batch steps)."""
    w = setup.initial()
    for t in range(ROUNDS):
        ids = [k for k in range(3) if k != drop or t < since]
        after = []
        for k in ids:
            v = w.clone()
            for _ in range(2):
                v = v - LR * q.gradient(k, v)
            after.append(v)
        n = torch.tensor([SIZES[k] for k in ids], dtype=torch.float64)
        w = (n / n.sum()) @ torch.stack(after)
    return w


def loss(q, w):
    return sum(n * float(q.loss(k, w)) for k, n in enumerate(SIZES)) / sum(SIZES)


@pytest.mark.parametrize("last", [1, 3])
def test_retraining_without_a_client_is_what_it_is_by_hand(quadratic, last):
    q, setup = quadratic
    frame = effects(setup, (last,))
    assert not (frame.metric == "missing").any()  # the weights of the run were found again
    before = loss(q, by_hand(q, setup))
    for k in range(3):
        expected = loss(q, by_hand(q, setup, k, ROUNDS - last)) - before
        assert one(frame, "effect", client=k, index=last).value == pytest.approx(
            expected, rel=1e-9, abs=1e-12
        )


def test_on_a_quadratic_the_prediction_of_the_aggregate_is_exact(quadratic):
    _, setup = quadratic
    frame = effects(setup, (1, 3))
    for k in range(3):
        true = one(frame, "effect", client=k, index=0)
        assert true.estimator == "exact"
        for index in (0, 1):  # one round is its aggregate
            for how in ("quadratic", "rounds-quadratic"):
                found = one(frame, "predicted_effect", client=k, index=index, estimator=how).value
                assert found == pytest.approx(true.value, rel=1e-6, abs=1e-9)
        assert one(frame, "effect", client=k, index=1).value == pytest.approx(
            true.value, rel=1e-6, abs=1e-9
        )
        assert one(
            frame, "predicted_effect", client=k, index=0, estimator="linear"
        ).value != pytest.approx(true.value, rel=1e-3)


def test_a_client_that_pulls_away_harms_and_the_others_help():
    """Four clients agree, a fifth pulls the other way; with short steps from zero the others would go further without it."""
    q = helpers.diagonal([[1.0, 1.0]] * 5, [[2.0, 2.0]] * 4 + [[-3.0, -3.0]])
    setup = helpers.setup(q.config(rounds=2, lr=0.05), q.data)
    with torch.no_grad():
        for p in setup.module.parameters():
            p.zero_()
    frame = effects(setup, (1, 2), run=finished(setup, 2))
    for index in (0, 1, 2):
        assert (
            one(frame, "effect", client=4, index=index).value
            < 0
            < one(frame, "effect", client=0, index=index).value
        )
        for k, sign in ((4, -1), (0, 1)):
            assert (
                np.sign(
                    one(
                        frame, "predicted_effect", client=k, index=index, estimator="quadratic"
                    ).value
                )
                == sign
            )


def test_clients_that_were_hardly_sampled_are_masked_and_the_test_loss_can_be_asked():
    q = helpers.quadratics((12, 9, 15, 8))
    setup = helpers.setup(q.config(rounds=ROUNDS, lr=LR, per_round=2, total=4), q.data)
    frame = effects(setup, (1, 3, 9), "test")
    assert "and not 9" in one(frame, "missing").note
    for last in (1, 3):
        for k in range(4):
            times = sum(k in setup.schedule.sampled(t) for t in range(ROUNDS - last, ROUNDS))
            row = one(frame, "effect", client=k, index=last)
            assert row.masked == (times < min(2, last)) and (
                not row.masked or f"sampled in {times}" in row.note
            )
    assert (frame[frame.metric == "effect"].n_examples == 5).all() and set(
        frame[frame.metric == "effect"]["slice"]
    ) == {"test"}


def test_a_client_alone_and_a_server_with_a_step_of_its_own():
    q = helpers.quadratics(SIZES)
    alone = effects(helpers.setup(q.config(rounds=ROUNDS, lr=LR, per_round=1), q.data), (1,))
    row = alone[(alone.metric == "effect") & (alone["index"] == 0)].iloc[0]
    assert row.masked and "is alone" in row.note
    retrained = alone[(alone.metric == "effect") & (alone["index"] == 1)].dropna(subset="value")
    assert (
        len(retrained) == 1 and retrained.value.iloc[0] != 0
    )  # the round is as if nobody had been there
    server = effects(helpers.setup(q.config("fedavgm", rounds=ROUNDS, lr=LR), q.data), (3,))
    rows = server[server.metric == "predicted_effect"]
    assert rows.masked.all() and "more than the weighted mean" in rows.note.iloc[0]
    assert server[(server.metric == "effect") & (server["index"] == 3)].value.notna().all()


def test_what_cannot_be_trained_again(quadratic):
    q, setup = quadratic
    run = finished(setup)
    with pytest.raises(FldiagError, match="interrupted"):
        setup_of(
            SimpleNamespace(
                **{**vars(run), "status": "interrupted", "origin": {}, "config": setup.config}
            )
        )
    with pytest.raises(FldiagError, match="nothing is aggregated"):
        effects(helpers.setup(q.config("local_only", rounds=ROUNDS), q.data), run=run)
    run.checkpoint = lambda r=None: SimpleNamespace(
        state={n: v + 1 for n, v in setup.network.layout.views(setup.initial()).items()}
    )
    assert "differ from the stored ones" in one(effects(setup, run=run), "missing").note


def made_table(predicted, true, runs=1):
    rows = [
        {
            "run": f"r{i % runs}",
            "metric": m,
            "client": i // runs,
            "index": 0,
            "value": v,
            "estimator": e,
        }
        for m, values, e in (
            ("predicted_effect", predicted, "quadratic"),
            ("effect", true, "exact"),
        )
        for i, v in enumerate(values)
    ]
    return table(rows, method="m", seed=0)


@pytest.mark.slow
def test_rank_correlations_and_their_interval():
    x = np.arange(20.0)
    (row,) = rank_correlations(made_table(x, x**3), 0)
    assert row["value"] == pytest.approx(1) and row["n_clients"] == 20
    assert row["low"] is row["high"] is None  # all resamples agree: that is no interval of length 0
    assert rank_correlations(made_table(x, -x), 0)[0]["value"] == pytest.approx(-1)
    rng = np.random.default_rng(0)
    (row,) = rank_correlations(made_table(x, rng.normal(size=20)), 0)
    assert row["low"] < row["value"] < row["high"] and row["high"] - row["low"] > 0.5
    # copies of a client in other runs add no information
    pairs = np.repeat(rng.normal(size=(2, 10)), 4, axis=1)
    (few,) = rank_correlations(made_table(*pairs[:, ::4]), 0)
    (many,) = rank_correlations(made_table(*pairs, runs=4), 0)
    assert many["n_clients"] == 40 and many["value"] == pytest.approx(few["value"], abs=0.02)
    assert many["high"] - many["low"] == pytest.approx(few["high"] - few["low"], abs=0.1)
    assert rank_correlations(made_table([1.0, 2], [1.0, 2]), 0)[0]["value"] is None


def test_where_all_clients_are_masked_there_is_no_picture():
    assert draw(made_table([1.0, 2, 3], [1.0, 2, 3]).assign(value=np.nan)) is None


@pytest.mark.slow
def test_the_picture(quadratic):
    frame = effects(quadratic[1], (1, 3))
    fig = draw(pd.concat([frame, table(rank_correlations(frame, 0), run="made")]))
    assert [ax.get_title().split("\n")[0] for ax in fig.axes] == [
        "last aggregate",
        "last round",
        "last 3 rounds",
    ]
    assert all(len(ax.texts) == 3 for ax in fig.axes)
