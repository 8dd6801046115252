"""Whose weights the checkpoints hold unless it is said: those sampled, as far as that stays small; always in the last round."""

import pytest
from helpers import config

import fldiag
from fldiag.training import rounds, storing


def of(every=1, clients="auto", count=10):
    return config(
        rounds=count, total=5, per_round=2, checkpoint={"every": every, "clients": clients}
    )


def test_small_models_are_kept_in_every_stored_round():
    assert storing.every_round_holds_clients(of(), 1000) and not storing.every_round_holds_clients(
        of(), storing.SMALL
    )
    assert storing.every_round_holds_clients(
        of(), storing.SMALL // 20
    ) and not storing.every_round_holds_clients(of(), storing.SMALL // 20 + 1)  # 10 rounds of 2
    assert storing.every_round_holds_clients(of(every=4), storing.SMALL // 6)  # rounds 4, 8 and 10


@pytest.mark.parametrize(
    "clients, size, whose",
    [
        ("auto", 1000, [[1, 3], [1, 3]]),
        ("auto", storing.SMALL, [[], [1, 3]]),
        ("none", 1, [[], []]),
        ("sampled", storing.SMALL, [[1, 3], [1, 3]]),
        ("all", storing.SMALL, [[0, 1, 2, 3, 4]] * 2),
        ([4], storing.SMALL, [[4], [4]]),
    ],
)
def test_whose_in_an_early_round_and_in_the_last(clients, size, whose):
    assert [
        storing.clients_to_store(of(clients=clients), size, t, [3, 1]) for t in (1, 10)
    ] == whose


@pytest.mark.parametrize(
    "clients, size, total",
    [
        ("auto", 1000, 10 * 3 * 1000),
        ("auto", storing.SMALL, 3 * storing.SMALL),
        ("none", 1000, 0),
        ("all", 1000, 10 * 6 * 1000),
    ],
)
def test_bytes(clients, size, total):
    """A file with clients holds theirs and what they received."""
    assert storing.client_bytes(of(clients=clients), size) == total


def test_a_large_run_is_still_diagnosable(tmp_path, monkeypatch):
    monkeypatch.setattr(storing, "SMALL", 0)
    run = rounds.train(config(rounds=2, total=4, per_round=2), out=tmp_path)
    assert run.checkpoint(1).clients is None and len(run.checkpoint().client_ids) == 2
    for name in ("forgetting", "matching"):
        assert len(fldiag.diagnose(run, name).query("metric != 'missing'"))
