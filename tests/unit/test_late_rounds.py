"""analyses/late_rounds.py: which runs are set against each other, and the sign of a difference."""

import pytest
import reports
from helpers import analysis

from fldiag.report.collect import collect


@pytest.fixture(scope="module")
def script():
    return analysis("late_rounds")


def test_runs_that_differ_by_the_method_alone_are_set_against_each_other(script, tmp_path):
    runs = [
        reports.run(tmp_path / "avg", accuracy=0.5),
        reports.run(tmp_path / "sol", "fedsol", accuracy=0.6),
        reports.run(tmp_path / "other-seed", "fedsol", seed=1),
        reports.run(tmp_path / "others-data", "fedsol", data="d1"),
        reports.run(tmp_path / "more-clients", "fedsol", clients__per_round=9),
        reports.run(tmp_path / "longer", "fedsol", rounds=4),
    ]
    found = script.compare(collect([r.path for r in runs]).members, count=2)
    assert found["than"].notna().sum() == 1 and len(found) == len(runs) + 1
    difference = found.iloc[-1]
    assert (difference["run"], difference["than"], difference["ahead_in"]) == ("sol", "avg", 2)
    assert difference["mean"] == pytest.approx(10) and difference["std"] == pytest.approx(0)
    alone = found[found["run"].eq("avg") & found["than"].isna()].iloc[0]
    assert (alone["last"], alone["mean"]) == pytest.approx((53, 52.5)), (
        "of the last two of three rounds"
    )
