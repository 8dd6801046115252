"""What a notebook shows of a run and a problem."""

import pytest
import torch
from torch import nn

import fldiag
from fldiag.results.shares import wilson


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = fldiag.Config.load("digits", rounds=1, clients__per_round=2, train__epochs=1, model__name="mlp")
    return fldiag.train(config, out=tmp_path_factory.mktemp("card") / "<b>run</b>")


def test_a_run_shows_its_accuracy_with_its_interval_and_nothing_of_its_name_is_markup(run):
    shown = run._repr_html_()
    rows = run.metrics.query("metric == 'accuracy' and moment == 'aggregated' and scope == 'global' and slice == 'test'")
    value, n = rows["value"].iloc[-1], int(rows["n_examples"].iloc[-1])
    low, high = wilson(round(value * n), n)
    assert f"{value:.1%} (95 % interval {low:.1%} to {high:.1%}, {n} examples)" in shown
    assert "<b>" not in shown and "&lt;b&gt;run" in shown and "1 of 1" in shown


def test_a_problem_shows_what_is_measured():
    problem = fldiag.Problem(nn.Linear(3, 2), nn.functional.cross_entropy, (torch.zeros(5, 3), torch.zeros(5, dtype=torch.long)))
    shown = problem._repr_html_()
    assert "<td>8</td>" in shown and "<td>5</td>" in shown and "torch.float32" in shown
