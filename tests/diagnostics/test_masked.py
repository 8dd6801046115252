"""Of a client without examples, and of a class that nobody has, there is no number; the means are over the others."""

import numpy as np
import pandas as pd
import pytest
from loops import accuracy, ask, by_class, cosine, flat, record
from reference import rows, value, values

import fldiag


def masked(table, metric, **where):
    found = rows(table, metric, **where)
    return len(found) > 0 and found["value"].isna().all() and bool(found["masked"].all())


def test_forgetting(gaps):
    table = ask(gaps, "forgetting")
    own = {"round": 3, "moment": "trained", "client": 3}
    for metric in ("accuracy", "loss"):
        assert masked(table, metric, slice="client:3/train", **own)
        assert not masked(table, metric, slice="test", **own)
    assert masked(table, "accuracy_seen", **own)
    found = value(table, "accuracy_unseen", **own)
    assert found == pytest.approx(accuracy(gaps.trained[2][3], gaps.test))
    assert values(table, "class_examples", client=3) == [0, 0, 0, 0]
    at = {"round": 3, "moment": "aggregated", "scope": "global", "slice": "test"}
    found = rows(table, "class_accuracy", **at).dropna(subset=["value"])
    assert found["index"].tolist() == [0, 1, 3]  # of class 2 there is no test example
    assert found["value"].tolist() == pytest.approx(by_class(gaps.past[3], gaps.test))
    (row,) = rows(table, "average_forgetting", index=None).to_dict("records")
    each = rows(table, "average_forgetting").dropna(subset=["index", "value"])
    assert each["index"].tolist() == [0, 1, 3]
    assert row["value"] == pytest.approx(each["value"].astype(float).mean())


def test_drift(gaps):
    """A client that did not move has no direction."""
    table, at = ask(gaps, "drift"), {"round": 2, "layer": None}
    assert value(table, "global_local_divergence", client=3, **at) == 0
    assert masked(table, "server_cosine", client=3, **at)
    assert masked(table, "update_cosine", client=0, client_b=3, **at)
    d = [flat(gaps.trained[1][k]) - flat(gaps.past[1]) for k in (0, 2)]
    found = value(table, "update_cosine", client=0, client_b=2, **at)
    assert found == pytest.approx(cosine(*d))
    assert value(table, "update_cosine", scope="global", **at) == pytest.approx(found)


@pytest.mark.parametrize("name", ["matching", "flatness"])
def test_curvature(name, gaps):
    table = ask(gaps, name, **({"on": "client"} if name == "matching" else {}))
    (row,) = rows(table, "missing", client=3).to_dict("records")
    assert "client 3" in row["note"] and row["masked"] and pd.isna(row["value"])
    assert set(rows(table, "trace", moment="trained", scope="client")["client"]) == {1, 2}
    if name == "matching":
        (pair,) = values(table, "H_D", scope="pair", diag_mode="diag")
        found = value(table, "H_D", scope="global", diag_mode="diag", self_pairs=False)
        assert found == pytest.approx(pair)


def test_fairness(gaps):
    table = ask(gaps, "fairness", on="train")
    (row,) = rows(table, "accuracy", client=3).to_dict("records")
    assert row["masked"] and "few examples" in row["note"]
    each = [accuracy(gaps.past[3], data) for data in gaps.data[:3]]
    assert value(table, "mean_accuracy") == pytest.approx(np.mean(each))


def test_geometry(tmp_path):
    """One class alone has no collapse."""
    table = ask(record(tmp_path / "run", tested=(0,), who=[[0, 1]]), "geometry", slice="test")
    assert masked(table, "nc1") and table["note"].str.contains("one class").any()
    assert not masked(table, "effective_rank")


def test_adapters(toy, tmp_path):
    """Before the first step all B are 0."""
    model = {"name": "mlp", "hidden": (5,), "lora_rank": 2}
    run = toy.train("fedavg", tmp_path / "run", rounds=1, model=model, train={"epochs": 0})
    table = fldiag.diagnose(run, "lora")
    assert masked(table, "aggregation_error") and masked(table, "misalignment")


def test_account(gaps):
    """A client that did not move changes nothing."""
    table = ask(gaps, "account")
    for metric in ("change", "linear", "quadratic", "rest"):
        assert value(table, metric, client=3, estimator="exact") == pytest.approx(0, abs=1e-12)
    for metric in ("linear", "quadratic"):
        assert value(table, metric, client=3, estimator="client") == pytest.approx(0, abs=1e-12)
        whole = value(table, metric, estimator="exact", scope="global")
        assert whole == pytest.approx(sum(values(table, metric, estimator="client")))
