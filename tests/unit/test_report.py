"""The numbers, figures and words of a report."""

import json
import math
import shlex
import statistics

import numpy as np
import pandas as pd
import pytest
import reports

from fldiag import registry
from fldiag.plotting import style
from fldiag.report import build, measured, performance, summary
from fldiag.report.collect import collect
from fldiag.report.performance import _one_source
from fldiag.results.numbers import numbers
from fldiag.results.summary import percent, plus_minus


@pytest.fixture(autouse=True)
def _inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two runs with all tables; the second one's numbers are twice the first's."""
    folder = tmp_path_factory.mktemp("two")
    a = reports.everything(reports.run(folder / "fedavg-a", steps=4))
    b = reports.everything(reports.run(folder / "fedsol-b", "fedsol", accuracy=0.6, steps=4), 2.0)
    found = collect([a.path, b.path])
    return found


def section_of(name, found):
    return measured.section(registry.diagnostic.get(name), found)


def absent(found):
    """The rows of what is not computed."""
    return build.absent(found).tables[0].rows


def curves_of(found):
    """Name -> trace of the first chart of learning curves."""
    return {
        t["name"]: t for t in performance.curves(found).groups[0].charts[0].traces if "name" in t
    }


def number(name, member):
    return summary.measured(member, numbers()[name])


# -- words


@pytest.mark.parametrize(
    "value, error, share, text",
    [
        (0.12345, 0.043, True, "12.3 ± 4.3 %"),
        (4.78712, 5e-8, False, "4.787 ± 5×10⁻⁸"),
        (1234.5, 12.0, False, "1234 ± 12"),
        (0.5, None, True, "50 %"),
        (None, 1.0, False, "–"),
        (float("nan"), 1.0, False, "–"),
        (-0.2, 0.0, False, "−0.2 ± 0"),
    ],
)
def test_no_more_digits_than_the_error_leaves_certain(value, error, share, text):
    assert plus_minus(value, error, share) == text


def test_numbers_of_figures_are_short_and_finite():
    values = np.array([math.pi, float("inf"), float("nan")])
    assert performance.shorts(values) == [3.1416, None, None]
    assert percent(0.12345) == "12.3 %" and percent(None) == "–"


def test_a_line_is_sorted_and_its_bars_are_the_error():
    rows = pd.DataFrame([{"round": r, "value": r / 10, "std": r / 100} for r in (3, 1, 2)])
    line = performance.line("a<b", rows, style.look(0))
    assert line["x"] == [1, 2, 3] and line["y"] == [0.1, 0.2, 0.3] and line["name"] == "a&lt;b"
    assert line["error_y"]["array"] == [0.01, 0.02, 0.03]


# -- summary


def test_accuracy_has_wilsons_interval(two):
    got, n, p, z = summary.accuracy(two.members[0]), 200, 0.53, 1.959964
    centre, half = (
        (p + z * z / (2 * n)) / (1 + z * z / n),
        z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n),
    )
    assert got.value == pytest.approx(p)
    assert (got.low, got.high) == pytest.approx((centre - half, centre + half), abs=1e-5)


def test_summary_takes_each_number_from_its_table(two):
    row = summary.row(two.members[1])
    assert (
        row["Run"] == "FedSOL, seed 0"
        and row["Folder"] == "fedsol-b"
        and row["Rounds"] == "3"
        and row["Seed"] == "0"
    )
    assert (
        row["Test accuracy (95 % interval)"].startswith("63 % (") and row["Test loss"] == "0.6667"
    )
    assert row["λ₁ ± residual"] == "8 ± 0.001"
    assert row["Forgetting: accuracy lost in local training (± std over clients)"] == "43 ± 4 %"
    assert row["Drift: distance of client weights from the received"] == "0.67 ± 0.2"
    assert row["Method"] == "FedSOL (ρ = 1.5, τ = 3)"


def test_method_names_what_is_not_the_default(tmp_path):
    made = reports.run(tmp_path / "a", "fedsol", method__strength="fixed", method__rho=0.5)
    text = summary.method(collect([made.path]).members[0])
    assert "ρ = 0.5" in text and "strength = fixed" in text and "loss" not in text


def test_sharpness_is_that_of_the_latest_global_model_on_train(tmp_path):
    made = reports.run(tmp_path / "a")
    reports.of_checkpoints(
        made, "spectrum", lambda _: reports.eigenvalues(1), name="spectrum-early", round=1
    )
    member = collect([made.path]).members[0]
    assert (number("lambda_1", member).value, number("lambda_1", member).about) == (1, "round 1")
    reports.of_checkpoints(
        made,
        "spectrum",
        lambda _: reports.eigenvalues(2),
        name="spectrum-own",
        labels=["fedavg round 3 client 4"],
    )
    assert (
        number("lambda_1", collect([made.path]).members[0]) is None
    )  # the later table is of a client
    reports.of_checkpoints(
        made, "landscape", lambda _: reports.surface(5), name="landscape-test", slice="test"
    )
    assert (
        summary.format_value(number("lambda_1", collect([made.path]).members[0]))
        == "5 ± 0.001 (test)"
    )
    reports.of_checkpoints(
        made, "landscape", lambda _: reports.surface(3), name="landscape-r", directions="random"
    )
    assert number("lambda_1", collect([made.path]).members[0]).value == 3


def test_runs_that_differ_by_the_seed_are_averaged_and_no_others(tmp_path):
    accuracies = [0.5, 0.6, 0.7]
    found = collect(
        [
            reports.run(
                tmp_path / f"s{i}", seed=i, accuracy=a, keep="none" if i else "sampled"
            ).path
            for i, a in enumerate(accuracies)
        ]
        + [reports.run(tmp_path / "other", "fedsol").path]
    )
    (table,) = summary.seeds(found.members)
    assert len(table.rows) == 1
    row = dict(zip(table.head, table.rows[0], strict=True))
    assert (
        row["Runs"] == "FedAvg, seed 0, FedAvg, seed 1, FedAvg, seed 2"
        and row["Seeds"] == "0, 1, 2"
    )
    assert row["Test accuracy"] == plus_minus(0.63, statistics.stdev(accuracies), share=True)
    assert not summary.seeds(found.members[2:])
    traces = curves_of(found)
    mean = next(t for name, t in traces.items() if name.startswith("mean of 3 seeds"))
    assert mean["y"] == pytest.approx([0.61, 0.62, 0.63])
    assert sum(t["opacity"] < 1 for t in traces.values()) == 3


def test_a_run_trained_again_is_no_further_seed(tmp_path):
    places = [
        reports.run(tmp_path / name, seed=seed, accuracy=a).path
        for name, seed, a in (("one", 0, 0.5), ("two", 1, 0.6), ("one-again", 0, 0.9))
    ]
    twice = collect([places[0], places[2]])
    assert not summary.seeds(twice.members)
    assert len(curves_of(twice)) == 2, "two lines, no mean"
    (row,) = summary.seeds(collect(places).members)[0].rows
    assert row[:3] == ["FedAvg, seed 0 (one), FedAvg, seed 1", "FedAvg", "0, 1"]


def test_differences_name_the_keys_that_differ_only(tmp_path):
    found = collect(
        [
            reports.run(tmp_path / n, m, **o).path
            for n, m, o in (
                ("a", "fedavg", {}),
                ("b", "fedsol", {"train__clip": 1.0}),
                ("c", "fedsol", {"method__rho": 2.0}),
            )
        ]
    )
    rows = {r[0]: r[1:] for r in summary.differences(found.members)[0].rows}
    assert rows == {
        "method.name": ["fedavg", "fedsol", "fedsol"],
        "method.rho": ["–", "1.5", "2"],
        "train.clip": ["10", "1", "10"],
    }
    assert not summary.differences(found.members[:1])


# -- what may be compared


def test_different_data_are_drawn_apart_and_the_report_says_so(tmp_path):
    found = collect(
        [
            reports.everything(reports.run(tmp_path / n, m, data=d)).path
            for n, m, d in (("a", "fedavg", "d0"), ("b", "fedprox", "d1"), ("c", "fedsol", "d0"))
        ]
    )
    assert "must not be compared" in summary.remarks(found)[0]
    assert len([t for t in summary.summary(found).tables if t.caption.startswith("Runs on")]) == 2
    for name in ("forgetting", "landscape", "spectrum"):  # of a run, of checkpoints, of weights
        groups = section_of(name, found).groups
        assert len(groups) == 2, name
        for group in groups:
            words = " ".join([*(p.alt for p in group.pictures), *(c.caption for c in group.charts)])
            assert ("FedProx" in words) != ("FedAvg" in words or "FedSOL" in words), name
    assert len(performance.curves(found).groups[0].charts) >= 1


def test_different_models_share_no_scale_of_weights(tmp_path):
    found = collect(
        [
            reports.everything(reports.run(tmp_path / n, model__hidden=h)).path
            for n, h in (("a", "[8]"), ("b", "[9]"))
        ]
    )
    assert any("different models" in r for r in summary.remarks(found))
    for name in ("landscape", "drift"):
        groups = section_of(name, found).groups
        assert len(groups) == 2 and all("model mlp" in g.title for g in groups)
    assert len(curves_of(found)) == 2  # accuracies may be compared


def test_surfaces_on_one_slice_share_a_scale_and_others_do_not(tmp_path):
    methods = {"a": "fedavg", "b": "fedprox", "c": "fedsol"}
    a, b, c = (reports.run(tmp_path / n, m) for n, m in methods.items())
    for made, top, n in ((a, 4, 100), (b, 9, 100), (c, 90, 50)):
        reports.of_checkpoints(made, "landscape", lambda _, top=top: reports.surface(top), n=n)
    section = section_of("landscape", collect([a.path, b.path, c.path]))
    scenes = [[c.traces[0] for c in g.charts if c.kind == "scene"] for g in section.groups]
    # Where the loss spans a factor of 30, the height is logarithmic.
    assert sorted([s["cmax"] for s in group] for group in scenes) == [
        [pytest.approx(math.log10(90))],
        [9, 9],
    ]
    surface = next(group for group in scenes if len(group) == 2)[0]
    assert surface["z"][0][0] == pytest.approx(4) and surface["z"][2][2] == pytest.approx(1)


def test_an_unfinished_run_and_a_table_that_ends_early_are_pointed_out(tmp_path):
    made = reports.run(tmp_path / "a", status="interrupted")
    reports.of_run(made, "drift", reports.drift(2), rounds=[1, 2])
    found = collect([made.path])
    assert any("interrupted" in r for r in summary.remarks(found))
    assert any(
        "ends with round 2, the run has 3" in n
        and shlex.join(["fldiag", "drift", str(made.path)]) in n
        for n in section_of("drift", found).notes
    )
    assert number("drift", found.members[0]).about == "round 2"


# -- sections


def test_missing_tables_are_named_with_a_command_a_shell_understands(tmp_path):
    made = reports.run(tmp_path / 'it\'s $HOME; "x"')
    found = collect([made.path])
    commands = {row[0]: shlex.split(row[2]) for row in absent(found)}
    assert set(commands) >= {"landscape", "spectrum", "forgetting", "drift", "matching", "account"}
    assert all(words[0] == "fldiag" and str(made.path) in words for words in commands.values())
    (lack,) = summary.summary(found).missing
    assert shlex.split(lack.command) == ["fldiag", "report", str(made.path), "--compute"]
    assert lack.why.startswith("λ₁, ")


def test_a_command_consents_to_the_code_that_the_run_names(tmp_path):
    made = reports.run(tmp_path / "a")
    made.about["config"]["model"] = {"name": "mine.nets:Small"}
    made.commit()
    for _, _, command in absent(collect([made.path])):
        assert shlex.split(command)[-2:] == ["--allow-code", "mine.nets:Small"]


def test_a_recording_without_a_model_is_not_offered_an_option_that_report_lacks(tmp_path):
    made = reports.run(tmp_path / "a")
    made.about["config"]["model"] = {}
    made.commit()
    commands = [shlex.split(lack.command) for lack in summary.summary(collect([made.path])).missing]
    assert {words[1] for words in commands} >= {"spectrum", "drift", "forgetting"}
    assert all(words[1] != "report" and "--model" in words for words in commands)


def test_a_run_without_client_weights_says_what_to_change(tmp_path):
    found = collect([reports.run(tmp_path / "a", keep="none").path])
    lacks = {row[0]: row[2] for row in absent(found)}
    for name in ("forgetting", "drift", "matching", "account"):
        assert lacks[name].startswith("FedAvg, seed 0: it kept no client weights")


def test_runs_stand_together_in_the_pictures_of_a_section(two):
    for name, count in (("forgetting", 2), ("drift", 2), ("personalise", 1)):
        (group,) = section_of(name, two).groups
        assert len(group.pictures) == count, name
        for picture in group.pictures:
            assert (
                picture.kind == "svg"
                and b"<svg" in picture.content
                and not picture.caption.endswith("0")
            )
            if "classes" not in picture.caption:
                assert "FedAvg, seed 0" in picture.alt and "FedSOL, seed 0" in picture.alt
    (group,) = section_of("account", two).groups
    assert [p.caption for p in group.pictures] == [
        "Account, FedAvg, seed 0",
        "Account, FedSOL, seed 0",
    ]
    table = next(t for t in group.tables if t.head[0] == "Run")
    assert {row[0] for row in table.rows} == {"FedAvg, seed 0", "FedSOL, seed 0"}


def test_the_same_tables_give_the_same_pictures(two):
    first, second = (section_of("personalise", two).groups[0].pictures for _ in range(2))
    assert [p.content for p in first] == [p.content for p in second]


def test_drift_with_other_options_is_not_taken_for_the_same(tmp_path):
    a, b = reports.run(tmp_path / "a"), reports.run(tmp_path / "b", "fedsol")
    for made, rho in ((a, [0.0, 1.0]), (b, [0.0, 2.0])):
        reports.of_run(made, "drift", reports.drift(), rho=rho)
    assert "different options" in section_of("drift", collect([a.path, b.path])).notes[0]
    reports.of_run(b, "drift", reports.drift(), loss="l2")
    headings = {group.title for group in section_of("drift", collect([a.path, b.path])).groups}
    assert headings == {"", "L2"}


def test_personal_accuracies_that_training_measured_are_shown(tmp_path):
    made = reports.run(tmp_path / "a")
    rows = [{**row, "round": 3} for row in reports.personal()]
    made.put_metrics(
        pd.concat([made.metrics, reports.frame(rows, run="a", method="fedavg", seed=0)])
    )
    made.commit()
    (group,) = section_of("personalise", collect([made.path])).groups
    assert len(group.pictures) == 1


def test_everything_a_chart_holds_is_json(two):
    for group in (*performance.curves(two).groups, *section_of("landscape", two).groups):
        for chart in group.charts:
            json.dumps([chart.traces, chart.layout], allow_nan=False)


def test_a_learning_curve_is_the_test_splits_or_one_programs():
    rows = pd.DataFrame(
        {
            "round": [0, 1, 1, 1],
            "slice": [pd.NA, "test", pd.NA, pd.NA],
            "value": [0.1, 0.2, 0.9, 0.8],
            "source": ["evaluate_fn", pd.NA, "clients' evaluation", "evaluate_fn"],
        }
    )
    assert _one_source(rows)["value"].tolist() == [0.2]
    assert _one_source(rows[rows["slice"].isna()])["value"].tolist() == [0.1, 0.8]
    assert (
        len(_one_source(rows.iloc[:0])) == 0 and len(_one_source(rows.drop(columns="source"))) == 1
    )
