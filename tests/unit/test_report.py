"""The numbers, figures and words of a report."""

import dataclasses
import json
import math
import shlex
import statistics

import numpy as np
import pandas as pd
import pytest
import reports

from fldiag.diagnostics.account.section import section as account
from fldiag.diagnostics.drift.section import section as drift
from fldiag.diagnostics.forgetting.section import section as forgetting
from fldiag.diagnostics.landscape.section import section as landscapes
from fldiag.diagnostics.matching.section import _range, square
from fldiag.diagnostics.matching.section import section as matching
from fldiag.diagnostics.spectrum.section import section as spectrum
from fldiag.errors import FldiagError
from fldiag.plotting.sections import percent, plus_minus, series, short
from fldiag.report import performance, steps, summary
from fldiag.report.collect import collect
from fldiag.report.performance import _one_source
from fldiag.results.numbers import numbers
from fldiag.runs.index import write_index
from fldiag.training.diagnostics.personalise.section import section as personal
from fldiag_papers.records import keep


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
    steps.collect(found)
    return found


def frame_of(figure, key=""):
    return figure.spec["frames"][key]


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
    assert (
        short(math.pi) == 3.1416
        and short(float("inf")) is None
        and short(float("nan")) is None
        and short(None) is None
    )
    assert percent(0.12345) == "12.3 %" and percent(None) == "–"


def test_a_line_is_sorted_and_its_band_is_the_error_on_both_sides():
    rows = reports.frame(
        [{"metric": "m", "round": r, "value": r / 10, "stderr": 0.01} for r in (3, 1, 2)]
    )
    made = series("a<b", rows, run=1, spread="stderr")
    assert made["x"] == [1, 2, 3] and made["y"] == [0.1, 0.2, 0.3] and made["name"] == "a&lt;b"
    np.testing.assert_allclose(made["high"], [0.11, 0.21, 0.31])
    np.testing.assert_allclose(made["low"], [0.09, 0.19, 0.29])


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
    row = dict(zip(summary.head(), summary.row(two.members[1]), strict=True))
    assert row["Run"] == "fedsol-b" and row["Rounds"] == "3" and row["Seed"] == "0"
    assert (
        row["Test accuracy (95 % interval)"].startswith("63 % (") and row["Test loss"] == "0.6667"
    )
    assert row["λ₁ ± residual"] == "8 ± 0.001"
    assert row["Forgetting: accuracy lost in local training (± std over clients)"] == "43 ± 4 %"
    assert row["Drift: distance of client weights from the received"] == "0.67 ± 0.2"
    assert row["Method"] == "FedSOL (ρ = 1.5, τ = 3, tau moon = 0.5)"


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
    assert summary.shown(number("lambda_1", collect([made.path]).members[0])) == "5 ± 0.001 (test)"
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
    table = summary.seeds(found.members, "")
    assert len(table.rows) == 1
    row = dict(zip(table.head, table.rows[0], strict=True))
    assert row["Runs"] == "s0, s1, s2" and row["Seeds"] == "0, 1, 2"
    assert row["Test accuracy"] == plus_minus(0.63, statistics.stdev(accuracies), share=True)
    assert summary.seeds(found.members[2:], "") is None
    drawn = frame_of(performance.curves(found).groups[0].figures[0])["series"]
    mean = next(s for s in drawn if s["name"].startswith("mean of 3 seeds"))
    assert mean["y"] == pytest.approx([0.61, 0.62, 0.63]) and mean["high"][0] == pytest.approx(0.71)
    assert sum(bool(s.get("faint")) for s in drawn) == 3


def test_a_run_trained_again_is_no_further_seed(tmp_path):
    places = [
        reports.run(tmp_path / name, seed=seed, accuracy=a).path
        for name, seed, a in (("one", 0, 0.5), ("two", 1, 0.6), ("one-again", 0, 0.9))
    ]
    twice = collect([places[0], places[2]])
    assert summary.seeds(twice.members, "") is None
    assert len(frame_of(performance.curves(twice).groups[0].figures[0])["series"]) == 2, (
        "two lines, no mean"
    )
    (row,) = summary.seeds(collect(places).members, "").rows
    assert row[:3] == ["one, two", "FedAvg", "0, 1"]


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
    rows = {r[0]: r[1:] for r in summary.differences(found.members).rows}
    assert rows == {
        "method.name": ["fedavg", "fedsol", "fedsol"],
        "method.rho": ["–", "1.5", "2"],
        "train.clip": ["10", "1", "10"],
    }
    assert summary.differences(found.members[:1]) is None


# -- what may be compared


def test_different_data_are_drawn_apart_and_the_report_says_so(tmp_path):
    found = collect(
        [
            reports.everything(reports.run(tmp_path / n, data=d)).path
            for n, d in (("a", "d0"), ("b", "d1"), ("c", "d0"))
        ]
    )
    assert "must not be compared" in summary.remarks(found)[0]
    assert len([t for t in summary.summary(found).tables if t.caption.startswith("Runs on")]) == 2
    for section in (
        performance.curves(found),
        forgetting(found),
        drift(found),
        landscapes(found),
        spectrum(found),
        personal(found),
    ):
        for figure in section.figures:
            runs = {s["run"] for f in figure.spec["frames"].values() for s in f.get("series", ())}
            assert runs <= {0, 2} or runs <= {1}, (section.id, figure.caption)
    assert len(landscapes(found).groups) == 2


def test_different_models_share_no_scale_of_weights(tmp_path):
    found = collect(
        [
            reports.everything(reports.run(tmp_path / n, model__hidden=h)).path
            for n, h in (("a", "[8]"), ("b", "[9]"))
        ]
    )
    assert any("different models" in r for r in summary.remarks(found))
    assert len(landscapes(found).groups) == 2 and len(drift(found).groups) == 4
    assert {
        s["run"] for s in frame_of(performance.curves(found).groups[0].figures[0])["series"]
    } == {0, 1}  # accuracies may be


def test_surfaces_on_one_slice_share_a_scale_and_others_do_not(tmp_path):
    a, b, c = (reports.run(tmp_path / n) for n in "abc")
    for made, top, n in ((a, 4, 100), (b, 9, 100), (c, 90, 50)):
        reports.of_checkpoints(made, "landscape", lambda _, top=top: reports.surface(top), n=n)
    section = landscapes(collect([a.path, b.path, c.path]))
    ranges = [[f.spec["frames"][""]["surface"]["cmax"] for f in g.figures] for g in section.groups]
    # Where the loss spans a factor of 30, the height is logarithmic.
    assert sorted(ranges) == [[pytest.approx(math.log10(90))], [9, 9]] and any(
        "scales of their own" in n for n in section.notes
    )
    surface = (
        section.groups[[len(r) for r in ranges].index(2)].figures[0].spec["frames"][""]["surface"]
    )
    assert surface["z"][0][0] == pytest.approx(4) and surface["z"][2][2] == pytest.approx(1)


def test_an_unfinished_run_and_a_table_that_ends_early_are_pointed_out(tmp_path):
    made = reports.run(tmp_path / "a", status="interrupted")
    reports.of_run(made, "drift", reports.drift(2), rounds=[1, 2])
    found = collect([made.path])
    assert any("interrupted" in r for r in summary.remarks(found))
    assert any(
        "ends with round 2, the run has 3" in n
        and shlex.join(["fldiag", "drift", str(made.path)]) in n
        for n in drift(found).notes
    )
    assert number("drift", found.members[0]).about == "round 2"


# -- sections


def test_missing_tables_are_named_with_a_command_a_shell_understands(tmp_path):
    made = reports.run(tmp_path / 'it\'s $HOME; "x"')
    found = collect([made.path])
    expected = {
        "landscapes": "landscape",
        "curvature": "spectrum",
        "forgetting": "forgetting",
        "drift": "drift",
        "matching": "matching",
        "account": "forgetting",
        "personal": "personalise",
    }
    for part in (landscapes, spectrum, forgetting, drift, matching, account, personal):
        section = part(found)
        (missing,) = section.missing
        assert shlex.split(missing.command)[:3] == [
            "fldiag",
            expected[section.id],
            str(made.path),
        ], section.id
        assert (
            ("--why" in missing.command) == (section.id == "account")
            and not section.groups
            and not section.sources
        )


def test_a_run_without_client_weights_says_what_to_change(tmp_path):
    found = collect([reports.run(tmp_path / "a", keep="none").path])
    for part in (forgetting, drift, matching, account):
        (missing,) = part(found).missing
        assert "checkpoint.clients=sampled" in missing.why and not missing.command


def test_forgetting_panels_share_an_axis_and_the_heatmaps_a_scale(two):
    section = forgetting(two)
    received, trained, aggregated = section.groups[0].figures[:3]
    assert received.spec["yrange"] == trained.spec["yrange"] == aggregated.spec["yrange"]
    line = frame_of(trained)["series"][0]
    assert line["y"] == pytest.approx([0.31, 0.32, 0.33]) and line["high"][0] == pytest.approx(0.36)
    a, b = section.groups[1].figures
    assert a.spec["range"] == b.spec["range"] == [-0.27, 0.27] and set(a.spec["frames"]) == {
        "1",
        "2",
        "3",
    }
    cells = a.spec["frames"]["2"]
    assert (
        cells["y"] == ["1", "4", "7"]
        and cells["z"][2] == pytest.approx([0.06, 0.12, 0.18])
        and cells["z"][0][0] is None
    )
    assert cells["dots"] == [[1, 0], [1, 1], [1, 2]]  # class 1 is held by nobody
    assert (
        section.groups[1].controls[0].options == ["1", "2", "3"]
        and section.groups[1].controls[0].start == 2
    )


def test_drift_takes_the_whole_model_and_lets_rho_be_chosen(two):
    section = drift(two)
    first = frame_of(section.groups[0].figures[0])["series"]
    assert [s["y"] for s in first] == [[1.0, 0.5, 0.33333], [2.0, 1.0, 0.66667]]
    angle = section.groups[1].figures[0]
    assert set(angle.spec["frames"]) == {"0", "2"} and angle.spec["frames"]["2"]["series"][0]["y"][
        0
    ] == pytest.approx(0.0)
    assert not section.notes


def test_drift_with_other_options_is_not_taken_for_the_same(tmp_path):
    a, b = reports.run(tmp_path / "a"), reports.run(tmp_path / "b")
    for made, loss in ((a, "kl"), (b, "l2")):
        reports.of_run(made, "drift", reports.drift(), loss=loss)
    assert "different options" in drift(collect([a.path, b.path])).notes[0]


def test_pairs_stand_in_both_halves_on_one_scale(two):
    section = matching(two)
    first = "diagonals, own data (as in the paper)"
    assert section.groups[0].controls[0].options[0] == first and len(section.groups[0].figures) == 4
    a, b = (
        next(f for f in section.groups[0].figures if f.run == r and "H_N" in f.caption).spec[
            "frames"
        ][first]
        for r in (0, 1)
    )
    assert a["range"] == b["range"] == [0.0, 2.2]
    assert (
        a["z"][0][1] == a["z"][1][0] == pytest.approx(0.5)
        and b["z"][1][2] == pytest.approx(2.2)
        and a["z"][0][0] is None
    )
    rows = section.tables[0].rows
    assert rows[0] == ["fedavg-a", "3", "diagonals", "own data", "1", "0.5", "0.5", "0.25"]
    bars = section.groups[1].figures[0].spec["frames"][""]["series"]
    assert [s["y"] for s in bars] == [[1, 4, 7], [2, 8, 14]]


def test_pairs_over_decades_are_coloured_by_their_logarithm():
    rows = reports.frame(
        [
            {"metric": "H_N", "client": 1, "client_b": 2, "value": 100.0},
            {"metric": "H_N", "client": 1, "client_b": 3, "value": 0.01},
        ]
    )
    assert _range([rows], "H_N") == (0.01, 100.0, True)
    made = square(rows, 0.01, 100.0, True)
    assert (
        made["z"][0] == [None, 2, -2]
        and made["v"][0] == [None, 100, 0.01]
        and made["range"] == [-2, 2]
    )
    assert made["ticks"][0][0] == -2 and made["ticks"][-1][0] == 2


def test_account_sums_up_and_keeps_signs(two):
    section = account(two)
    terms = frame_of(section.groups[0].figures[0])
    assert terms["labels"] == ["1", "4", "7", "all"] and terms["marks"] == [0.5, 2, 3.5, 1]
    total = np.sum([s["y"] for s in terms["series"]], axis=0)
    np.testing.assert_allclose(total, terms["marks"])
    harm = [frame_of(g.figures[-1]) for g in section.groups]
    assert harm[0]["range"] == harm[1]["range"] and harm[0]["v"][1] == [0.4, -0.01, 0.4]
    assert np.sign(harm[0]["z"][1]).tolist() == [1, -1, 1] and max(
        map(max, harm[1]["z"])
    ) == pytest.approx(harm[1]["range"][1], rel=1e-3)
    turned = account(dataclasses.replace(two, members=two.members[::-1]))
    assert (
        frame_of(turned.groups[0].figures[-1])["range"] == harm[0]["range"]
    )  # the largest of all runs, whichever is last
    layers = frame_of(next(f for f in section.groups[0].figures if "layer" in f.caption))
    assert layers["labels"] == ["fc1", "&lt;b&gt;head&lt;/b&gt;"]
    assert section.tables[0].rows[1][:5] == ["fedavg-a", "3", "train", "mean over clients", "2"]


def test_personal_accuracy_counts_every_client_once(two):
    section = personal(two)
    box = frame_of(section.figures[0])["series"][0]
    assert box["x"] == [0] * 3 + [1] * 3 + [2] * 3 and box["text"][:3] == [
        "client 1",
        "client 4",
        "client 7",
    ]
    values = [0.51, 0.54, 0.57]
    assert section.tables[0].rows[0] == [
        "fedavg-a",
        "0",
        "3",
        plus_minus(np.mean(values), np.std(values), True),
        "51 %",
        "57 %",
    ]


def test_steps_are_averaged_over_clients_by_layer(two):
    section = steps.steps(two)
    loss = next(f for f in section.figures if f.spec["controls"] == ["step-round"])
    line = loss.spec["frames"]["2"]["series"][0]
    assert line["x"] == [1, 2, 3, 4] and line["y"] == pytest.approx([4.1, 4.2, 4.3, 4.4])
    assert line["high"][0] - line["y"][0] == pytest.approx(statistics.stdev(reports.CLIENTS))
    strength = next(f for f in section.figures if len(f.spec["controls"]) == 2)
    assert strength.spec["frames"]["3|head"]["series"][1]["y"] == pytest.approx(
        [0.4] * 4
    )  # scaled: ten times the value
    assert not section.missing and {"steps"} <= set(two.members[0].tables)


def test_many_recorded_rounds_are_thinned_with_both_ends_kept(tmp_path):
    made = reports.run(tmp_path / "a", rounds=30, steps=1)
    found = collect([made.path])
    steps.collect(found)
    rounds = sorted(set(found.members[0].tables["steps"].frame["round"]))
    assert len(rounds) == steps.MOST and (rounds[0], rounds[-1]) == (1, 30)
    assert "20 of 30" in found.members[0].tables["steps"].note
    assert "metrics.steps=true" in steps.steps(collect([made.path])).missing[0].why


def test_everything_a_figure_holds_is_json(two):
    for part in (
        performance.curves,
        landscapes,
        spectrum,
        forgetting,
        drift,
        matching,
        account,
        personal,
        steps.steps,
    ):
        for figure in part(two).figures:
            json.dumps(figure.spec, allow_nan=False)


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


def test_a_record_has_the_tables_of_the_weights_that_it_no_longer_has(tmp_path):
    """By the checksums of its checkpoints, which it keeps; a table of other weights is nobody's."""
    run = reports.everything(reports.run(tmp_path / "runs" / "fedavg-a"))
    reports.everything(reports.run(tmp_path / "other" / "fedavg-b", seed=1))
    record = keep(run, tmp_path / "records")
    assert not list(record.rglob("*.pt"))
    wanted = {name: source.sha256 for name, source in collect([run.path]).members[0].tables.items()}
    found = collect([record], [run.path / "diagnostics", tmp_path / "other"]).members[0].tables
    assert {name: source.sha256 for name, source in found.items()} == wanted
    assert not set(collect([record], [tmp_path / "other"]).members[0].tables) - {"metrics"}


@pytest.mark.parametrize(
    "gone, message",
    [
        ([], "wrong kind"),
        ({"rounds/0001.pt": 3}, "is a int, not text"),
        ({"../x": "0"}, "which no run has"),
    ],
)
def test_what_a_record_says_of_its_weights_is_looked_at(tmp_path, gone, message):
    record = keep(reports.run(tmp_path / "fedavg-a"), tmp_path / "records")
    index = json.loads((record / "run.json").read_text())
    write_index(record, {**index, "gone": gone})
    with pytest.raises(FldiagError, match=message):
        collect([record])
