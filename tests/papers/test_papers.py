"""The papers' studies: protocols made small, shapes of pictures, what is counted, and every figure and table at the scale smoke."""

from __future__ import annotations

import json
from contextvars import Context
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import fldiag
from fldiag_papers import costs, reported, shapes, study
from fldiag_papers.ledger import chosen, side
from fldiag_papers.verbs import PAPERS, figures, studies

SMOKE = study.SCALES["smoke"]
STATEMENTS = pd.read_csv(reported.FOLDER / "statements.csv", keep_default_na=False)


@pytest.fixture(scope="module")
def scale(tmp_path_factory):
    return replace(SMOKE, store=tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def run(scale):
    over = {"rounds": 2, "clients.total": 10}
    return study.trained(scale, study.protocol(scale, "fedsol-cifar10-lda0.1", over, seed=0))


# ---- protocols and questions


def test_a_protocol_at_smoke_is_small_and_at_paper_is_the_papers(scale):
    over = {"method.name": "perfedavg"}
    small = study.protocol(scale, "fedsol-cifar10-lda0.1", over, seed=3)
    assert (small.data.name, small.model.name, small.seed) == ("digits-500", "small_cnn", 3)
    assert (small.clients.total, small.clients.per_round, small.train.epochs) == (10, 4, 1)
    assert (small.rounds, small.train.batch_size, small.partition.min_size) == (4, 40, 2)
    align = study.protocol(scale, "fedalign-cifar100-lda0.5", {}, seed=0)
    assert (align.model.name, align.clients.total, align.rounds) == ("small_resnet", 4, 2)
    proj = study.protocol(scale, "fedproj-cifar10-lda0.3", {}, seed=0)
    assert proj.data.public == "holdout:100"
    paper = study.protocol(study.SCALES["paper"], "fedsol-cifar10-lda0.1", over, seed=3)
    assert paper.hash == fldiag.Config.load("fedsol-cifar10-lda0.1", seed=3, **over).hash


def test_reduced_data_have_equally_many_of_every_class(scale, run):
    arrays = np.load(scale.store / "data" / "digits-500.npz")
    assert np.bincount(arrays["train_labels"]).tolist() == [50] * 10


def test_questions_to_a_run(run):
    accuracy = study.curve(run, label="ours")
    assert accuracy["round"].tolist() == [1, 2] and set(accuracy["question"]) == {"curve"}
    assert study.final(run)["value"].tolist() == accuracy["value"].tolist()[-1:]
    assert study.best(run)["value"].tolist() == [accuracy["value"].max()]
    reach = study.reach(run, (0, 101)).set_index("metric")["value"]
    assert reach["rounds_to_0"] == 1 and np.isnan(reach["rounds_to_101"])
    assert study.seconds(run)["value"].iloc[0] > 0
    assert set(study.seconds(run)["run"]) == {run.path.name}


def test_a_run_that_diverged_has_no_final_accuracy(scale):
    config = study.protocol(scale, "fedsol-cifar10-lda0.1", {"train.lr": 1e20}, seed=0)
    assert study.final(study.trained(scale, config))["value"].isna().all()


def test_a_run_that_is_there_is_not_trained_again(scale, run):
    events = []
    again = study.trained(replace(scale, listen=events.append), run.config)
    assert again.path == run.path and not events


@pytest.mark.parametrize("paper", PAPERS)
def test_every_cell_of_a_table_is_a_config(paper):
    for id in reported.printed(paper)["id"].unique():
        for preset, over, labels in list(reported.cells(f"{paper}/{id}"))[::20]:
            config = fldiag.Config.load(preset, **over)
            assert config.method.name == labels["method"].partition(":")[0]
            assert config.data.name == labels["data"]


# ---- shapes


def lines(seeds=2):
    rows = [
        {"label": label, "round": r, "value": 10 * r + place + seed, "seed": seed, "panel": "a"}
        for place, label in enumerate(("fedavg", "fedsol"))
        for r in range(1, 5)
        for seed in range(seeds)
    ]
    return pd.DataFrame(rows)


def test_curves_are_means_over_seeds():
    (ax,) = shapes.curves(lines(), "panel", {"a": "accuracy"}).axes
    drawn = [line.get_ydata().tolist() for line in ax.lines if len(line.get_xdata()) == 4]
    assert drawn == [[10.5, 20.5, 30.5, 40.5], [11.5, 21.5, 31.5, 41.5]]


def test_values_over_a_setting_mark_what_diverged():
    table = lines().rename(columns={"round": "at"}).assign(factor="f")
    table.loc[table["at"] == 4, "value"] = np.nan
    (ax,) = shapes.over(table, {"f": "rate"}).axes
    assert ax.lines[0].get_ydata()[:3].tolist() == [10.5, 20.5, 30.5]
    assert sum(line.get_marker() == "x" and len(line.get_xdata()) for line in ax.lines) == 4


def numbers(alphas):
    settings = [f"partition=lda;alpha={alpha}" for alpha in alphas]
    cells = [(s, m) for s in settings for m in ("fedavg", "fedsol")]
    table = pd.DataFrame(cells, columns=["setting", "method"])
    table = table.assign(
        metric="accuracy", model="", data="mnist", value=range(len(cells)), std=np.nan
    )
    return table.assign(seed=0, trained_on="digits-500", value=table["value"] + 50.0)


@pytest.mark.parametrize("count", [2, 7])
def test_a_table_has_the_printed_numbers_below_the_measured_ones(count):
    table = numbers(range(count))
    (ax,) = shapes.numbers(table, table.assign(value=1.5)).axes
    (sheet,) = ax.tables
    texts = {at: cell.get_text().get_text() for at, cell in sheet.get_celld().items()}
    methods = [(0, 1), (0, 2)] if count > shapes.COLUMNS else [(1, 0), (2, 0)]
    assert [texts[at] for at in methods] == ["FedAvg", "FedSOL"]
    assert texts[1, 1] == "50.0\n(1.5)" and texts[2, 2] == "53.0\n(1.5)"


# ---- what is counted


def test_traffic_of_methods():
    expected = {"fedavg": (1, 1, 0), "scaffold": (2, 2, 1), "fedtoga": (1, 2, 1)}
    for method, numbers in expected.items():
        config = fldiag.Config.load("fedtoga-cifar10-dir0.6", method__name=method)
        assert costs.traffic(config)["value"].tolist() == pytest.approx(numbers)


@pytest.mark.slow
def test_operations_of_steps():
    config = fldiag.Config.load("fedalign-cifar100-lda0.5", method__name="fedavg")
    count = costs.flops(config).set_index("metric")["value"]
    assert count["MFLOPs"] == pytest.approx(87.3, abs=0.1)  # as the paper prints
    assert count["params_M"] == pytest.approx(0.61, abs=0.005)
    assert costs.relative(config)["value"].tolist() == [1.0]


# ---- studies


def test_statements_name_studies():
    assert set(STATEMENTS["study"]) <= set(studies())


def test_figures_refuses_what_is_not_there():
    error = CliRunner().invoke(figures, ["fedsol/fig99"]).exception
    assert isinstance(error, fldiag.FldiagError) and error.usage
    assert CliRunner().invoke(figures, ["fedsol/fig2", "--scale", "tiny"]).exit_code == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", list(studies()))
def test_a_study_regenerates_from_nothing(name, scale, tmp_path):
    files = Context().run(study.make, studies()[name], scale, tmp_path)
    assert [file.suffix for file in files] == [".json", ".csv", ".pdf", ".png"]
    about = json.loads(files[0].read_text())
    assert about["command"].startswith(f"fldiag figures {name} --scale smoke") and about["fldiag"]
    table = pd.read_csv(files[1], keep_default_na=False, na_values=[""])
    assert table["question"].notna().all() and table["value"].notna().any()
    studies()[name].draw(table)
    for row in STATEMENTS[STATEMENTS["study"] == name].to_dict("records"):
        rows = table[(table["question"] == row["question"]) & (table["metric"] == row["metric"])]
        for text in (row["lower"], row["higher"]):
            assert text[:1].isdigit() or len(chosen(rows, side(text))), row
