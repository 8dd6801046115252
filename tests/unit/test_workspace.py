"""The workspace of a diagnostic, and how a History maps over its rounds and clients."""

import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pandas as pd
from histories import history, moved, separable, stored, tanh_net

import fldiag
from fldiag.errors import FldiagError
from fldiag.execution.pools import open_pool
from fldiag.execution.workspace import Workspace, workspace


def federation(second=None, clients=2):
    w, weights = moved(net := tanh_net(4, 4), clients)
    rounds = [stored(w, weights, round=r) for r in (1, 2, 3)]
    parts = np.array_split(np.random.default_rng(0).permutation(120), clients)
    return history(
        net, separable(), parts, rounds[0], second or rounds[1], rounds[2], dtype=w.dtype
    )


def client_rows(history, stored, client):
    if client == 0:
        raise FldiagError("it is the first", "choose another")
    history.note(stored.round, f"a word of client {client}", client)
    return [{"metric": "a", "value": float(client)}]


def round_rows(history, stored):
    history.note(stored.round, f"a word of round {stored.round}")
    return [{"metric": "b", "value": float(stored.round)}]


def test_a_round_that_cannot_be_read_is_noted_once(tmp_path):
    def matching(**where):
        subject = federation(FldiagError("round 2 is damaged", "restore it"))
        return fldiag.diagnose(subject, "matching", every_round=True, k=1, **where)

    table = matching()
    assert list(table.loc[table["metric"] == "missing", "note"]) == ["round 2 is damaged"]
    pd.testing.assert_frame_equal(matching(cache=tmp_path), table)


def test_clients_and_rounds_are_mapped_in_one_diagnostic():
    subject = federation(clients=3)
    for executor in ("serial", ThreadPoolExecutor(2)):
        with Workspace(executor):
            rows = subject.map_clients(client_rows, every_round=True)
            assert [(row["round"], row["client"]) for row in rows] == [
                (r, k) for r in (1, 2, 3) for k in (1, 2)
            ]
            assert [(n["round"], n["client"]) for n in subject.notes] == [
                (r, k) for r in (1, 2, 3) for k in (0, 1, 2)
            ]
            assert len(subject.map_rounds(round_rows)) == 3
            assert [n["note"] for n in subject.notes] == [f"a word of round {r}" for r in (1, 2, 3)]
            assert len(subject.each_round(lambda stored: round_rows(subject, stored))) == 1
            assert [n["note"] for n in subject.notes] == ["a word of round 3"]


def test_without_a_diagnostic_nothing_is_kept_alive():
    class Shared:
        pass

    shared = Shared()
    watch = weakref.ref(shared)
    assert list(workspace().map(lambda shared, item: item, shared, [1, 2, 3])) == [1, 2, 3]
    del shared
    gc.collect()
    assert watch() is None


def test_few_items_first_do_not_limit_the_workers_of_those_after():
    with open_pool("processes:3", divmod, 7, most=2) as pool:
        assert pool.workers == 3  # started when there is something to do


def test_a_pool_may_be_closed_before_its_results_are_taken(monkeypatch):
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    pool = open_pool("processes:2", divmod, 7)
    results = pool.map([1, 2, 3, 4])
    assert next(results) == (7, 0)
    pool.close()
    results.close()
    assert unraisable == []


def test_how_clients_are_weighed_tells_histories_apart():
    first, second = federation(), federation()
    assert first.digest() == second.digest()
    second.shares = "uniform"
    assert first.digest() != second.digest()
