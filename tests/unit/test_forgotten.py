"""analyses/forgotten.py: the sign of a difference, what it is relative to, and which seeds and rounds count."""

import contextlib
import sys

import pandas as pd
import pytest
from helpers import analysis


@pytest.fixture(scope="module")
def script():
    return analysis("forgotten")


def table(method, rounds, seed=0):
    """Rows of these rounds: (received, trained); another scope, a client's and a class's row stand beside them."""
    rows = [
        {
            "method": method,
            "seed": seed,
            "round": r,
            "metric": metric,
            "moment": moment,
            "scope": "global",
            "slice": "test",
            "value": value,
        }
        for r, (before, after) in rounds.items()
        for metric, moment, value in (
            ("accuracy", "received", before),
            ("accuracy", "trained", after),
            ("accuracy", "aggregated", before),
            ("drop", "trained", before - after),
        )
    ]
    beside = [
        {**row, **other, "value": 9.0}
        for row in rows
        for other in ({"scope": "client"}, {"index": 3}, {"slice": "own"})
    ]
    return pd.DataFrame(rows + beside)


AVG = {10: (0.4, 0.2), 20: (0.5, 0.2), 30: (0.9, 0.9)}
SOL = {10: (0.6, 0.4), 20: (0.6, 0.2)}


def test_the_second_method_is_compared_with_the_first_in_the_rounds_of_both(script):
    both = pd.concat([table("fedavg", AVG), table("fedsol", SOL)])
    found = script.compare(both).set_index(["metric", "moment"])
    assert (found["rounds"] == 2).all()
    assert found.loc[
        ("accuracy", "received"), ["fedavg", "fedsol", "difference", "positive in"]
    ].tolist() == pytest.approx([45, 60, 15, 2])
    assert found.loc[
        ("drop", "trained"), ["fedavg", "fedsol", "difference", "positive in"]
    ].tolist() == pytest.approx([25, 30, 5, 1])
    assert found.loc[("share lost", "trained"), ["fedavg", "fedsol"]].tolist() == pytest.approx(
        [55, 50]
    )
    assert found.loc[("drop", "trained"), "std"] == pytest.approx(50**0.5)


def test_a_round_is_the_mean_over_the_seeds_of_both(script):
    both = [
        table("fedavg", {10: (0.4, 0.2)}),
        table("fedavg", {10: (0.8, 0.2)}, 1),
        table("fedavg", {10: (0.1, 0.1)}, 2),
        table("fedsol", {10: (0.6, 0.3)}),
        table("fedsol", {10: (0.6, 0.3)}, 1),
    ]
    found = script.compare(pd.concat(both)).set_index(["metric", "moment"])
    assert found.loc[("accuracy", "received"), ["fedavg", "fedsol"]].tolist() == pytest.approx(
        [60, 60]
    )
    assert found.loc[("share lost", "trained"), ["fedavg", "fedsol"]].tolist() == pytest.approx(
        [(50 + 75) / 2, 50]
    )


def called(script, monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["forgotten.py", *map(str, words)])
    with contextlib.suppress(SystemExit):
        script.main()
    return capsys.readouterr()


def test_errors_and_rounds(script, tmp_path, monkeypatch, capsys):
    one, other = tmp_path / "a.csv", tmp_path / "b.csv"
    table("fedavg", AVG).to_csv(one), table("fedsol", SOL).to_csv(other)
    call = lambda *words: called(script, monkeypatch, capsys, *words)  # noqa: E731
    assert "tables with two methods are needed, and these have 1" in call(one).err
    assert "is not there" in call(tmp_path / "none.csv").err
    assert "there is no round that both methods have" in call(one, other, "--rounds", 25, 40).err
    assert "share lost" in call(one, other).out
    received = [
        line.split()
        for line in call(one, other, "--rounds", 20, 30).out.splitlines()
        if "received" in line
    ]
    assert received == [["accuracy", "received", "1", "50.00", "60.00", "10.00", "NaN", "1"]]
