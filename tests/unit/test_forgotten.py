"""analyses/forgotten.py: the sign of a difference, what it is relative to, and which rounds count."""

import importlib.util
import sys
from pathlib import Path

import pandas as pd
import pytest


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("forgotten", Path(__file__).parents[2] / "analyses" / "forgotten.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table(method, rounds):
    """Rows of these rounds: (received, trained); another scope, a client's and a class's row stand beside them."""
    rows = [{"method": method, "round": r, "metric": metric, "moment": moment, "scope": "global", "slice": "test", "value": value}
            for r, (before, after) in rounds.items()
            for metric, moment, value in (("accuracy", "received", before), ("accuracy", "trained", after),
                                          ("accuracy", "aggregated", before), ("drop", "trained", before - after))]
    beside = [{**row, **other, "value": 9.0} for row in rows for other in ({"scope": "client"}, {"index": 3}, {"slice": "own"})]
    return pd.DataFrame(rows + beside)


def test_the_second_method_is_compared_with_the_first_in_the_rounds_of_both(script):
    both = pd.concat([table("fedavg", {10: (0.4, 0.2), 20: (0.5, 0.2), 30: (0.9, 0.9)}), table("fedsol", {10: (0.6, 0.4), 20: (0.6, 0.2)})])
    found = script.compare(both).set_index(["metric", "moment"])
    assert (found["rounds"] == 2).all()
    assert found.loc[("accuracy", "received"), ["fedavg", "fedsol", "difference", "positive in"]].tolist() == pytest.approx([45, 60, 15, 2])
    assert found.loc[("drop", "trained"), ["fedavg", "fedsol", "difference", "positive in"]].tolist() == pytest.approx([25, 30, 5, 1])
    assert found.loc[("share lost", "trained"), ["fedavg", "fedsol"]].tolist() == pytest.approx([55, 50])
    assert found.loc[("drop", "trained"), "std"] == pytest.approx(50 ** 0.5)


def test_one_method_is_refused(script, tmp_path, monkeypatch, capsys):
    table("fedavg", {10: (0.4, 0.2)}).to_csv(tmp_path / "t.csv")
    monkeypatch.setattr(sys, "argv", ["forgotten.py", str(tmp_path / "t.csv")])
    with pytest.raises(SystemExit):
        script.main()
    assert "1 methods are in these tables: give tables with two" in capsys.readouterr().err
