"""Control and dual variables of one's own loop: stored by round, and checked by the doctor."""

import numpy as np
import pytest
import torch
from torch import nn

import fldiag

N, K, ROUNDS, SIZE = 6, 3, 5, 35


def loop(path, bug="", method="scaffold", every=True):
    """SCAFFOLD (option II) or FedDyn of made-up updates, with a fault."""
    rng = np.random.default_rng(0)
    names = ("c", "c_k") if method == "scaffold" else ("h", "h_k")
    net = nn.Linear(6, 5)
    w = rng.normal(size=SIZE).astype(np.float32)
    c, c_k = np.zeros(SIZE, np.float32), np.zeros((N, SIZE), np.float32)
    parts = [range(3 * k, 3 * k + 3) for k in range(N)]
    rec = fldiag.Recorder(
        path,
        net,
        clients=None if bug == "nobody says N" else parts,
        method=method,
        personal=["bias"] if bug == "its own bias" else (),
    )
    for _ in range(ROUNDS):
        ids = sorted(rng.choice(N, K, replace=False).tolist())
        trained = {k: w + rng.normal(size=SIZE).astype(np.float32) * 0.1 for k in ids}
        old, before = c_k.copy(), c.copy()
        for k in ids:
            step = (w - trained[k]) / 0.05
            if method == "feddyn":
                c_k[k] = old[k] - 0.1 * (trained[k] - w) * (-1 if bug == "plus" else 1)
            elif bug == "without c":
                c_k[k] = old[k] + step
            elif bug == "sign":
                c_k[k] = old[k] - c - step
            else:
                c_k[k] = old[k] - c + step
            if bug == "its own bias":  # trained without correction
                c_k[k, 30:] = 0
        change = (c_k - old)[ids].sum(0)
        n = {"N / K": K, "total": 1}.get(bug, N)
        c = before if bug == "never" else before + change / n
        if bug == "round's clients":
            c = c_k[ids].mean(0)
        elif bug == "late":
            c = old.mean(0)
        w = w + np.mean([v - w for v in trained.values()], 0)
        rows = {k: c_k[k] for k in (range(N) if every else ids)}
        rec.round(clients=trained, aggregated=w, state={names[0]: c, names[1]: rows})
    return rec.close()


def variates(run):
    table = fldiag.diagnose(run, "doctor")
    return table[table["metric"] == "variates"]


@pytest.mark.parametrize(
    ("options", "severity", "words"),
    [
        ({}, "healthy", "c is the mean of all c_k in 5 rounds"),
        ({"every": False}, "healthy", "c is the mean of all c_k in 5 rounds"),
        ({"method": "feddyn"}, "healthy", "h is the mean"),
        ({"method": "feddyn", "bug": "plus"}, "healthy", "h is the mean"),
        ({"bug": "N / K"}, "fault", "mean change of the round's clients"),
        ({"bug": "N / K", "every": False}, "fault", "mean change of the round's clients"),
        ({"bug": "total"}, "fault", "6 times the mean"),
        ({"bug": "never"}, "fault", "what it was in the round before"),
        ({"bug": "late"}, "fault", "the mean of the round before"),
        ({"bug": "round's clients"}, "fault", "the mean of the round's clients alone"),
        ({"bug": "without c"}, "fault", "c_k without c"),
        ({"bug": "sign"}, "fault", "c_k against"),
        ({"bug": "nobody says N"}, "healthy", "c is the mean"),
        ({"bug": "its own bias"}, "healthy", "c is the mean"),
    ],
)
def test_the_rule_is_checked(tmp_path, options, severity, words):
    rows = variates(loop(tmp_path / "run", **options))
    texts = [str(row["what"] if row["what"] else row["evidence"]) for _, row in rows.iterrows()]
    assert set(rows["severity"]) == {severity} and any(words in text for text in texts), rows[
        ["severity", "what", "evidence"]
    ].to_dict("records")


def test_it_is_stored_by_round_and_read_again(tmp_path):
    run = loop(tmp_path / "run", every=False)
    c = run.checkpoint(2)
    assert c.variates["c"].shape == (SIZE,) and c.variates["c_k"].shape == (K, SIZE)
    assert c.variate_clients == {"c_k": c.client_ids}
    table = fldiag.diagnose(fldiag.load(run.path, model=nn.Linear(6, 5)), "drift")
    assert "update_norm" in set(table["metric"])


def test_a_vector_of_another_length_is_refused_and_nothing_is_stored(tmp_path):
    rec = fldiag.Recorder(tmp_path / "run", nn.Linear(6, 5))
    zero = torch.zeros(SIZE)
    with pytest.raises(fldiag.FldiagError, match="c has 3 numbers"):
        rec.round(aggregated=zero, clients={0: zero}, state={"c": torch.zeros(3)})
    rec.round(
        aggregated=zero,
        clients={0: zero},
        state={"c": {"weight": zero[:30].reshape(5, 6), "bias": zero[30:]}},
    )
    assert rec.close().rounds == [1] and rec.run.checkpoint(1).variates["c"].shape == (SIZE,)


def test_runs_without_them_say_so(tmp_path):
    rec = fldiag.Recorder(tmp_path / "run", nn.Linear(6, 5))
    rec.round(aggregated=torch.zeros(SIZE), clients={0: torch.zeros(SIZE)})
    rows = variates(rec.close())
    assert set(rows["severity"]) == {"not checked"}


def test_a_recording_that_begins_late_accuses_nobody(tmp_path):
    """What clients carried before is not known, where only those of the round are given."""
    whole = loop(tmp_path / "whole", every=False)
    rec = fldiag.Recorder(
        tmp_path / "run", nn.Linear(6, 5), clients=[range(k, k + 1) for k in range(N)]
    )
    for r in (3, 4, 5):
        c = whole.checkpoint(r)
        rows = dict(zip(c.client_ids, c.variates["c_k"], strict=True))
        rec.round(
            number=r,
            received=c.received,
            clients=dict(zip(c.client_ids, c.clients, strict=True)),
            aggregated=c.state,
            state={"c": c.variates["c"], "c_k": rows},
        )
    rows = variates(rec.close())
    assert not set(rows["severity"]) & {"fault", "warning"}
