"""What a notebook shows of a run and a problem."""

import pandas as pd
import pytest
import torch
from torch import nn

import fldiag
from fldiag.results.means import wilson
from fldiag.results.notebook import MOST, as_results
from fldiag.results.table import table


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = fldiag.Config.load(
        "digits", rounds=1, clients__per_round=2, train__epochs=1, model__name="mlp"
    )
    return fldiag.train(config, out=tmp_path_factory.mktemp("card") / "<b>run</b>")


def test_a_run_shows_its_accuracy_with_its_interval_and_nothing_of_its_name_is_markup(run):
    shown = run._repr_html_()
    rows = run.metrics.query(
        "metric == 'accuracy' and moment == 'aggregated' and scope == 'global' and slice == 'test'"
    )
    value, n = rows["value"].iloc[-1], int(rows["n_examples"].iloc[-1])
    low, high = wilson(round(value * n), n)
    assert f"{value:.1%} (95 % interval {low:.1%} to {high:.1%}, {n} examples)" in shown
    assert "<b>" not in shown and "&lt;b&gt;run" in shown and "1 of 1" in shown


def test_a_table_shows_each_number_with_its_error_and_unit_and_no_empty_column():
    common = {"run": "<b>a</b>", "slice": "test"}
    found = as_results(
        table(
            [
                {
                    **common,
                    "metric": "accuracy",
                    "value": 0.5,
                    "low": 0.4,
                    "high": 0.6,
                    "n_examples": 100,
                },
                {
                    **common,
                    "metric": "eigenvalue",
                    "index": 1,
                    "value": 2.5,
                    "residual": 0.001,
                    "converged": False,
                },
                {**common, "metric": "moved", "value": 3.0, "stderr": 0.25, "unit": "units"},
            ]
        )
    )
    text = found._repr_html_()
    assert "<td>0.5 (0.4 to 0.6)</td><td>share of 1</td>" in text
    assert "<td>2.5, residual 0.001, not converged</td><td>loss / weight²</td>" in text
    assert "<td>3 ± 0.25</td><td>units</td>" in text
    assert (
        "<caption>run &lt;b&gt;a&lt;/b&gt;, slice test</caption>" in text
        and "layer" not in text
        and "<b>" not in text
    )


def test_what_diagnose_returns_is_a_pandas_table_that_keeps_its_look_and_name_when_rows_are_selected():
    problem = fldiag.Problem(
        nn.Linear(3, 2), nn.functional.cross_entropy, (torch.eye(3), torch.tensor([0, 1, 1]))
    )
    found = fldiag.diagnose(problem, "spectrum", k=2)
    some = found[found["metric"] == "eigenvalue"]
    assert (
        isinstance(found, pd.DataFrame)
        and found.attrs["diagnostic"] == some.attrs["diagnostic"] == "spectrum"
    )
    assert "loss / weight²" in some._repr_html_() and "<td>2</td>" in some._repr_html_()
    assert (
        "dataframe" in found[["metric", "index"]]._repr_html_()
    )  # nothing of ours in it: pandas' own
    many = as_results(pd.concat([found] * MOST, ignore_index=True))
    assert (
        f"<p>{len(many) - MOST} more rows</p>" in many._repr_html_()
        and many._repr_html_().count("<tr>") == MOST + 1
    )


TWO = as_results(
    pd.DataFrame({"metric": ["loss", "accuracy"], "client": [3, 4], "value": [0.5, 0.25]})
)


@pytest.mark.parametrize(
    "made",
    [
        TWO.groupby("client")[["value"]].mean(),
        TWO.set_index(["client", "metric"]),
        TWO.set_index("metric").rename_axis(None),
        pd.concat([TWO, TWO[["value"]]], axis=1),
        TWO.rename(columns={"metric": 7}),
        TWO.rename_axis("row"),
        TWO.iloc[:0],
        TWO.assign(value=TWO["value"].map("{:.1%}".format)),
    ],
)
def test_a_table_made_of_it_that_has_more_than_its_columns_is_shown_by_pandas(made):
    assert (
        made._repr_html_() == pd.DataFrame(made)._repr_html_() and "dataframe" in made._repr_html_()
    )


def test_a_table_follows_pandas_option_and_has_no_empty_caption():
    assert TWO._repr_html_().startswith("<table><tr>") and "caption" not in TWO._repr_html_()
    with pd.option_context("display.notebook_repr_html", False):
        assert TWO._repr_html_() is None and TWO[["client"]]._repr_html_() is None
