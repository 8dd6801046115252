"""The report's first section decides between methods by paired seeds, and says so where it cannot."""

import shutil

import numpy as np
import pytest
from scipy import stats

import fldiag
from fldiag.report import glance
from fldiag.report.collect import collect

SHORT = {"rounds": 1, "clients__per_round": 2, "train__epochs": 1, "model__name": "mlp"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("glance")
    for lr in (0.1, 0.001):
        for seed in range(3):
            fldiag.train(
                fldiag.Config.load("digits", seed=seed, train__lr=lr, **SHORT),
                out=folder / f"{lr}-{seed}",
            )
    return folder


def test_the_difference_is_that_of_the_pairs_of_seeds(runs):
    found = collect([runs / f"{lr}-{seed}" for lr in (0.1, 0.001) for seed in range(3)])
    (table,) = glance.glance(found).tables
    values = [glance.accuracy(m).value for m in found.members]
    difference = np.array(values[3:]) - np.array(values[:3])
    low, high = stats.ttest_1samp(difference, 0).confidence_interval(0.95)
    (row,) = table.rows
    assert row[2] == "0, 1, 2"
    assert (
        row[3] == f"{100 * difference.mean():+.2g} points ({100 * low:+.2g} to {100 * high:+.2g})"
    )
    p = stats.ttest_1samp(difference, 0).pvalue
    assert row[4].startswith(
        "undecided" if p > 0.05 else "worse" if difference.mean() < 0 else "better"
    )


def test_without_common_seeds_nothing_is_decided(runs):
    section = glance.glance(collect([runs / "0.1-0", runs / "0.001-0"]))
    assert not section.tables and any(
        "cannot show which method is better" in note for note in section.notes
    )
    assert any("Not yet checked for faults: " in note for note in section.notes)


def test_a_method_trained_again_is_not_set_against_itself(runs, tmp_path):
    names = [f"{lr}-{seed}" for lr in (0.1, 0.001) for seed in range(3)]
    again = [shutil.copytree(runs / name, tmp_path / name) for name in names[:3]]
    once, twice = (
        glance.glance(collect(paths)).tables[0]
        for paths in ([runs / n for n in names], [*(runs / n for n in names), *again])
    )
    assert twice.rows == once.rows
