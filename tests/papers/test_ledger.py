"""The ledger on small invented tables: what is compared with what a paper prints, and what decides a number or a statement."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from fldiag.results.files import with_digest
from fldiag_papers import ledger
from fldiag_papers.verbs import figures

CLAIM = {
    "study": "fedsol/table2",
    "question": "final",
    "metric": "accuracy",
    "lower": "method=fedavg",
    "higher": "method=fedsol",
    "minus": "",
    "times": "",
    "may_be_equal": "",
    "statement": "FedSOL is more accurate.",
}


def table(values, **more):
    """Rows of final accuracies: (method, alpha) -> a value for each seed."""
    rows = [
        {"method": method, "setting": f"alpha={alpha}", "seed": seed, "value": value}
        for (method, alpha), of_seeds in values.items()
        for seed, value in enumerate(of_seeds)
    ]
    about = {"study": "fedsol/table2", "precision": "bf16", "question": "final", "unit": "%"}
    about |= {"metric": "accuracy", "model": "net", "data": "cifar10", "trained_on": "cifar10"}
    return pd.DataFrame(rows).assign(**{**about, "trained_model": "net", **more})


def printed(methods=("fedavg", "fedsol"), alphas=(0.1,)):
    rows = [(m, f"alpha={a}") for a in alphas for m in methods]
    frame = pd.DataFrame(rows, columns=["method", "setting"])
    about = {"study": "fedsol/table2", "model": "net", "data": "cifar10", "metric": "accuracy"}
    return frame.assign(**about, printed="60.0", printed_std="", note="")


def decided(rows, claims, theirs=None):
    theirs = printed() if theirs is None else theirs
    return ledger.statements(rows, theirs, pd.DataFrame(claims))["verdict"].tolist()


# ---- numbers


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([62.0], "undecided"),  # one seed
        ([59.0, 60.0, 63.0], "agrees"),
        ([69.0, 70.0, 71.0], "differs"),
    ],
)
def test_trained_numbers(values, verdict):
    (line,) = ledger.numbers(table({("fedavg", 0.1): values}), printed(("fedavg",))).to_dict(
        "records"
    )
    assert line["verdict"] == verdict and line["seeds"] == len(values)
    assert line["difference"] == pytest.approx(np.mean(values) - 60)


def test_the_interval_of_a_difference_has_both_deviations():
    line = {"difference": 4.0, "note": "", "precision": "fp32", "seeds": 3, "measured_std": 1.5}
    line |= {"measured": 67.2, "printed": "63.2"}
    # Welch's half widths: t(0.975, 4.0) = 2.776 times 1.22 with the own deviation for both, t(0.975, 3.5) = 2.95 times 1.04
    # with 1.0, and t(0.975, 2.9) = 3.22 times 1.94 with 3.0
    assert ledger.verdict({**line, "printed_std": ""}) == "differs"
    assert ledger.verdict({**line, "printed_std": "1.0"}) == "differs"
    assert ledger.verdict({**line, "printed_std": "3.0"}) == "agrees"


@pytest.mark.parametrize(
    ("value", "profiled", "verdict"),
    [
        (60.04, np.nan, "agrees"),  # to the digit that is printed
        (60.06, np.nan, "differs"),
        (61.0, 60.0, "as profilers count"),
    ],
)
def test_counted_numbers(value, profiled, verdict):
    rows = table({("fedavg", 0.1): [value]}, precision="counted")
    rows = pd.concat([rows, rows.assign(metric="accuracy_profiled", value=profiled)])
    lines = ledger.numbers(rows, printed(("fedavg",)))
    assert lines["verdict"].tolist() == [verdict]


def test_a_number_of_an_unknown_protocol_has_no_verdict():
    lines = ledger.numbers(
        table({("fedavg", 0.1): [1.0, 2.0]}), printed(("fedavg",)).assign(note="protocol unknown")
    )
    assert lines["verdict"].tolist() == ["not measured"]


def test_only_the_papers_data_model_and_scale_are_compared(tmp_path):
    def put(name, scale, command="", **more):
        rows = table({("fedavg", 0.1): [50.0]}, **more).drop(columns=["study", "precision"])
        (tmp_path / "fedsol").mkdir(exist_ok=True)
        rows.to_csv(tmp_path / "fedsol" / f"{name}.csv", index=False)
        about = {"scale": scale, "command": command}
        (tmp_path / "fedsol" / f"{name}.json").write_text(json.dumps(with_digest(about)))

    put("table1", "paper", "--set train.precision=bf16")
    put("table2", "small")
    put("table3", "paper", trained_on="mnist-2000")
    put("table4", "paper", trained_model="small_cnn")
    put("table5", "small", question="flops", metric="MFLOPs")
    rows = ledger.measured(tmp_path).set_index("study")["precision"]
    assert rows.to_dict() == {"fedsol/table1": "bf16", "fedsol/table5": "counted"}


# ---- statements


@pytest.mark.parametrize(
    ("fedsol", "verdict"),
    [
        ([64.0, 65.0, 66.5], "holds"),
        ([54.0, 55.0, 56.5], "does not hold"),
        ([55.0, 65.0, 63.0], "undecided"),
        ([64.0], "undecided"),  # one seed
        ([64.0, 65.0], "holds"),  # of three seeds two have both
    ],
)
def test_a_statement_is_decided_by_differences_paired_over_seeds(fedsol, verdict):
    rows = table({("fedavg", 0.1): [60.0, 61.0, 62.0], ("fedsol", 0.1): fedsol})
    assert decided(rows, [CLAIM]) == [verdict]


def test_models_near_chance_decide_nothing():
    for low, verdict in ((12.9, "undecided"), (13.5, "holds")):
        rows = table({("fedavg", 0.1): [low, low], ("fedsol", 0.1): [64.0, 65.0]})
        assert decided(rows, [CLAIM]) == [verdict]
    rows = {("fedavg", 0.1): [12.0, 12.1], ("fedsol", 0.1): [68.0, 69.1]}
    rows |= {("fedavg", 0.5): [40.0, 41.0], ("fedsol", 0.5): [73.0, 74.1]}
    gains = {"lower": "method=fedsol & setting=alpha=0.5", "minus": "method=fedavg"}
    gains["higher"] = "method=fedsol & setting=alpha=0.1"
    assert decided(table(rows), [{**CLAIM, **gains}]) == ["undecided"]


def test_every_column_must_be_measured_unless_one_refutes():
    theirs = printed(alphas=(0.1, 0.3, 0.5))
    rows = {("fedavg", 0.1): [60.0, 61.0], ("fedsol", 0.1): [64.0, 65.1]}
    assert decided(table(rows), [CLAIM], theirs) == ["not decided: measured in 1 of 3 comparisons"]
    rows |= {("fedavg", 0.5): [60.0, 61.0], ("fedsol", 0.5): [50.0, 51.1]}
    assert decided(table(rows), [CLAIM], theirs) == ["does not hold"]


def test_a_side_without_a_name_is_every_rival():
    claim = {**CLAIM, "lower": ""}
    theirs = printed(("fedavg", "fedsol", "moon"))
    rows = {("fedavg", 0.1): [60.0, 61.0], ("fedsol", 0.1): [64.0, 65.1]}
    assert decided(table(rows), [claim], theirs) == ["not decided: measured in 1 of 2 comparisons"]
    rows["moon", 0.1] = [62.0, 63.0]
    assert decided(table(rows), [claim], theirs) == ["holds"]
    rows["moon", 0.1] = [70.0, 71.1]
    assert decided(table(rows), [claim], theirs) == ["does not hold"]


def test_parts_of_a_statement_must_all_hold():
    rows = {("fedavg", 0.1): [60.0, 61.0], ("fedsol", 0.1): [64.0, 65.1]}
    rows["moon", 0.1] = [64.0, 61.0]
    second = {**CLAIM, "higher": "method=moon"}
    assert decided(table(rows), [CLAIM, second]) == ["undecided"]


def test_gains_factors_and_bounds():
    rows = {("fedavg", 0.1): [60.0, 61.0], ("fedsol", 0.1): [68.0, 69.1]}
    rows |= {("fedavg", 0.5): [70.0, 71.0], ("fedsol", 0.5): [73.0, 74.1]}
    gains = {"lower": "method=fedsol & setting=alpha=0.5", "minus": "method=fedavg"}
    gains["higher"] = "method=fedsol & setting=alpha=0.1"
    assert decided(table(rows), [{**CLAIM, **gains}]) == ["holds"]
    bound = {"lower": gains["higher"], "higher": "5", "minus": "method=fedavg"}
    assert decided(table(rows), [{**CLAIM, **bound}]) == ["does not hold"]
    counted = table(
        {("fedavg", 0.1): [60.0], ("fedsol", 0.1): [90.0]}, precision="counted", unit=""
    )
    for factor, verdict in (("0.7", "holds"), ("0.6", "does not hold")):
        assert decided(counted, [{**CLAIM, "times": factor}]) == [verdict]


def test_equal_counts_hold_where_they_may_be_equal():
    rows = table({("fedavg", 0.1): [60.0], ("fedsol", 0.1): [60.0]}, precision="counted", unit="")
    assert decided(rows, [CLAIM]) == ["does not hold"]
    assert decided(rows, [{**CLAIM, "may_be_equal": "yes"}]) == ["holds"]


def test_nothing_measured():
    assert decided(table({("moon", 0.1): [60.0, 61.0]}), [CLAIM]) == ["not measured"]


def test_the_command_writes_a_csv_for_machines_and_a_page_for_people(tmp_path):
    rows = table({("fedtoga", 0.1): [1.0]}, question="traffic", metric="uplink", data="", unit="")
    rows = pd.concat([rows, rows.assign(method="fedavg")]).drop(
        columns=["study", "precision", "setting"]
    )
    (tmp_path / "fedtoga").mkdir()
    rows.to_csv(tmp_path / "fedtoga" / "table4.csv", index=False)
    about = with_digest({"scale": "small", "command": ""})
    (tmp_path / "fedtoga" / "table4.json").write_text(json.dumps(about))
    called = CliRunner().invoke(figures, ["ledger", "--out", str(tmp_path)])
    assert called.exit_code == 0, called.output
    lines = pd.read_csv(tmp_path / "ledger.csv").dropna(subset="statement").set_index("statement")
    text = "FedTOGA's clients upload no more than FedAvg's."
    assert lines["verdict"][text] == "holds"
    page = (tmp_path / "overview.md").read_text()
    assert f"| holds | {text} | fedtoga/table4 | counted |" in page
    assert len(page.splitlines()) < 40  # what is not measured is not listed
