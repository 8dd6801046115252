"""The doctor: what the committed study says of it, arithmetic by hand, its table, and the command line."""

import json
from pathlib import Path

import helpers
import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from commands import last
from commands import run as typed

import fldiag
from fldiag.diagnostics.doctor import alarms, fails
from fldiag.diagnostics.doctor.examples import _chance
from fldiag.diagnostics.doctor.facts import About, RoundFacts
from fldiag.diagnostics.doctor.weights import aggregate, outliers, sampling, starts, updates
from fldiag.errors import FldiagError

study = helpers.analysis("doctor")
TABLE = pd.read_csv(Path(study.__file__).with_suffix(".csv"), keep_default_na=False)


@pytest.mark.parametrize("seed", study.SEEDS)
def test_the_committed_table_reaches_its_targets(seed):
    part = TABLE[TABLE["seed"] == seed]
    assert list(zip(part["group"], part["case"], strict=True)) == list(study.CASES)
    count = part.groupby(["group", "outcome"]).size()
    assert count["broken", "found"] >= 27 and part["group"].eq("broken").sum() == 32
    assert count["planted", "found"] >= 16 and part["group"].eq("planted").sum() == 20
    assert count["start", "found"] >= 8 and part["group"].eq("start").sum() == 12
    assert count["sound", "clean"] >= 60 and count["sound", "hint"] <= 3
    assert ("sound", "fault") not in count


def judged_as_in_the_table(group, name):
    row = TABLE[(TABLE["seed"] == 1) & (TABLE["group"] == group) & (TABLE["case"] == name)].iloc[0]
    return study.judge(group, name, 1)[0] == row["outcome"]


@pytest.mark.parametrize(
    ("group", "name"),
    [
        ("broken", "reports_too_much"),
        ("broken", "twice_in_list"),
        ("planted", "leaked_test"),
        ("planted", "shared_module"),
        ("planted", "last_buffers"),
        ("start", "head_kept_by_all_equal"),
        ("sound", "stated_skewed"),
        ("sound", "last_minibatch_of_2"),
        ("sound", "feddyn_equal"),
    ],
)
def test_a_case_of_the_study_is_judged_as_in_its_table(group, name):
    assert judged_as_in_the_table(group, name)


@pytest.mark.slow
@pytest.mark.parametrize("group", ["broken", "planted", "start", "sound"])
def test_the_study_gives_its_table(group):
    assert [n for g, n in study.CASES if g == group and not judged_as_in_the_table(g, n)] == []


# -- arithmetic by hand


def round_of(c, k=5, p=40, seed=0, number=1, scale=1.0, noise=0.0):
    """A round whose server takes the combination c of the updates, plus noise of a share of the step."""
    rng = np.random.default_rng(seed)
    w, d = rng.normal(size=p), scale * rng.normal(size=(k, p))
    u = np.asarray(c) @ d
    rest = rng.normal(size=p)
    u = u + noise * np.linalg.norm(u) * rest / np.linalg.norm(rest)
    return facts_of(w, w + d, w + u, number)


def facts_of(w, clients, aggregated, number=1):
    halves = {"a": slice(0, len(w) // 2), "b": slice(len(w) // 2, len(w))}
    rows = np.vstack([clients - w, aggregated - w, w])
    return RoundFacts(
        round=number,
        ids=list(range(len(clients))),
        infinite={},
        parts=halves,
        aggregated=aggregated,
        received=w,
        clients=clients,
        digests=[row.tobytes().hex() for row in clients],
        grams={n: rows[:, s] @ rows[:, s].T for n, s in halves.items()},
        buffers={},
        rounding=1e-9,
        is_one_start=True,
    )


SIZES = dict(enumerate([10, 20, 30, 40, 100]))
P = np.array([0.05, 0.1, 0.15, 0.2, 0.5])


@pytest.mark.parametrize(
    ("c", "rule", "severity", "words"),
    [
        (P, "mean", None, ""),
        (P, "none", None, ""),
        (np.full(5, 0.2), "none", None, ""),
        (np.full(5, 0.2), "mean", "fault", "plain mean, not the mean by examples"),
        (0.5 * P, "mean", "hint", "multiple"),
        (-P, "mean", "fault", "multiple"),
        (5 * P, "mean", "fault", "multiple"),
        (P * [0, 1, 1, 1, 1], "mean", "fault", "client 0 is left out"),
        (P[::-1], "mean", "fault", "other weights"),
        (P[::-1], "none", "hint", "other weights"),
    ],
)
def test_the_coefficients_of_the_aggregate(c, rule, severity, words):
    found = list(aggregate([round_of(c)], About(rule=rule, sizes=SIZES, total=5)))
    assert [f.severity for f in found] == ([severity] if severity else [])
    assert all(words in f.what for f in found)


def test_coefficients_are_printed():
    found = next(aggregate([round_of([0.7, 0.3, 0, 0, 0])], About(sizes=SIZES)))
    assert found.what == "client 2, 3, 4 is left out of the mean"
    assert "0: 0.7, 1: 0.3" in found.evidence and "sum 1;" in found.evidence


@pytest.mark.parametrize(
    ("noise", "rule", "severity"),
    [(0.01, "mean", "hint"), (0.01, "none", None), (0.3, "mean", "fault"), (0.3, "none", "hint")],
)
def test_noise_of_the_aggregate(noise, rule, severity):
    rounds = [round_of(P, p=4000, noise=noise)]
    found = list(aggregate(rounds, About(rule=rule, sizes=SIZES)))
    assert [f.severity for f in found] == ([severity] if severity else [])


def test_weights_that_do_not_sum_to_1():
    rng = np.random.default_rng(0)
    w, d = rng.normal(size=40), rng.normal(size=(5, 40))
    found = list(aggregate([facts_of(w, w + d, 0.9 * (w + P @ d))], About(sizes=SIZES)))
    assert found[0].severity == "fault" and found[0].evidence.startswith("they sum to 0.9;")


def test_a_layer_that_is_not_averaged():
    rng = np.random.default_rng(0)
    w, d = rng.normal(size=40), rng.normal(size=(5, 40))
    new = w + P @ d
    new[20:] = w[20:]
    found = list(aggregate([facts_of(w, w + d, new)], About(sizes=SIZES)))
    assert found[0].severity == "fault" and "some tensors" in found[0].what
    assert found[0].evidence.startswith("b;")


def test_a_client_of_few_examples_that_is_left_out_is_told_as_that():
    sizes = dict(enumerate([1, 600, 600, 600, 600]))
    c = np.array([0, 0.25, 0.25, 0.25, 0.25])
    found = list(aggregate([round_of(c)], About(sizes=sizes, total=5)))
    assert [f.what for f in found] == ["client 0 is left out of the mean"]


def test_outliers_are_those_beyond_t_shared_by_the_clients():
    """Ten clients at -4.5 ... 4.5: the median absolute deviation is 2.5, t of 9 degrees at 0.5 % is 3.2498 (tables)."""
    values = {i: [i - 4.5] * 5 for i in range(10)}
    limit = 3.2498 * 1.4826 * 2.5
    for away, beyond in ((limit - 0.01, []), (limit + 0.01, [9])):
        assert list(outliers(values | {9: [away] * 5}, 0.0)) == beyond
    often = {9: [20.0] * 3 + [-1.0] * 2}
    assert not outliers(values | often, 0.0)  # in 60 % of its rounds
    assert not outliers({9: [20.0] * 5, 1: [0.0] * 5, 2: [0.0] * 5}, 0.0)


def test_the_chance_that_test_examples_fit_better_is_welchs():
    values = np.random.default_rng(0).normal(size=60) + np.repeat([0.5, 0.0], 30)
    labels, test, part = np.zeros(60, dtype=int), slice(0, 30), slice(30, 60)
    welch = scipy.stats.ttest_ind(
        values[test], values[part], equal_var=False, alternative="greater"
    )
    assert _chance(values, labels, test, part) == pytest.approx(welch.pvalue, rel=1e-9)
    assert _chance(values, np.arange(60), test, part) == 1.0  # no class twice


def test_a_method_whose_server_is_not_known_is_not_judged():
    with pytest.raises(FldiagError, match="not known to take a mean"):
        list(aggregate([round_of(P)], About(method="krum", rule="other")))


def test_updates_of_the_wrong_sign_and_of_another_length():
    rng = np.random.default_rng(0)
    rounds = []
    for t in range(4):
        w, common = rng.normal(size=(2, 400))
        d = common + 0.5 * rng.normal(size=(6, 400))
        d[2] *= -1
        d[4] *= 20
        rounds.append(facts_of(w, w + d, w + d.mean(0), t))
    found = {
        (f.client, f.what.split(" are ")[-1].split(" have ")[-1]) for f in updates(rounds, About())
    }
    assert found == {(2, "the wrong sign"), (4, "unusually long")}


def test_equal_uploads_are_a_fault_and_a_zero_update_a_hint():
    w = np.zeros(40)
    d = np.random.default_rng(0).normal(size=(5, 40))
    d[1], d[3] = d[0], 0
    found = list(updates([facts_of(w, w + d, w + d.mean(0))], About(sizes=SIZES)))
    assert [(f.severity, f.client) for f in found] == [("fault", None), ("hint", 3)]
    assert not list(updates([facts_of(w, w + d[2:], w)], About(sizes={1: 0})))


def test_what_was_received_is_the_last_aggregate():
    first, second = round_of(P, number=1), round_of(P, seed=1, number=2)
    for rule, severity in (("mean", "fault"), ("none", "hint")):
        assert [f.severity for f in starts([first, second], About(rule=rule))] == [severity]


def test_the_probability_of_never_being_drawn():
    rounds = [round_of(P, number=t) for t in range(1, 21)]
    found = list(sampling(rounds, About(total=10)))
    assert [f.client for f in found] == [5, 6, 7, 8, 9]
    assert f"p = {10 * 0.5**20:.1g} " in found[0].evidence
    assert not list(sampling(rounds[:10], About(total=10)))


# -- the table and the command line


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doctor")
    cases = {"broken": ("broken", "said_by_examples"), "sound": ("sound", "stated_equal")}
    changes = {name: study.CASES[case][1] for name, case in cases.items()}
    return {n: study.Federation(1, **kw).run(folder / n).path for n, kw in changes.items()}


def test_a_check_has_a_row_and_one_without_a_model_says_why(folders):
    table = fldiag.diagnose(fldiag.load(folders["broken"]), "doctor")
    assert table["metric"].nunique() == 11
    unchecked = set(table.loc[table["severity"] == "not checked", "metric"])
    assert unchecked == {"data", "own_data", "test_data", "reported", "learning"}
    assert fails(table) and alarms(table)[0].startswith("the aggregate is the plain mean")


def test_strict_fails_on_a_fault_alone(folders):
    broken = typed("doctor", folders["broken"], "--strict", "--json", code=3)
    answer = json.loads(broken.stdout)
    assert '"fault": 1' in json.dumps(answer)
    assert "not checked" in json.dumps(answer) and "plain mean" in json.dumps(answer)
    result = typed("doctor", folders["sound"], "--strict", "--out", folders["sound"].parent / "out")
    assert last(result).suffix == ".csv" and "0 fault, 0 hint" in result.stdout
    assert not list((folders["sound"].parent / "out").glob("doctor*.p*"))


def test_a_run_of_fldiag_is_healthy_and_a_damaged_round_is_a_fault(tmp_path):
    run = fldiag.train(helpers.config("fedavg", rounds=3, total=4, per_round=2), out=tmp_path / "r")
    table = fldiag.diagnose(run, "doctor")
    assert set(table["severity"]) == {"healthy", "not checked"}  # 30 test examples
    (run.path / run.round_file(2)).write_bytes(b"nothing")
    table = fldiag.diagnose(fldiag.load(run.path), "doctor")
    assert table.loc[table["severity"] == "fault", "what"].tolist() == ["round 2 cannot be read"]


def test_weights_that_are_no_numbers_are_told_once(tmp_path):
    model = torch.nn.Linear(3, 2)
    state = {n: v.clone() for n, v in model.state_dict().items()}
    ill = {**state, "bias": state["bias"] / 0}
    with fldiag.Recorder(tmp_path / "r", model, clients=[[0], [1]]) as recorder:
        recorder.round(received=state, clients={0: state, 1: ill}, aggregated=ill)
    table = fldiag.diagnose(fldiag.load(tmp_path / "r"), "doctor")
    what = table.loc[table["severity"] == "fault", "what"].tolist()
    assert what == ["the trained weights of client 1 are not finite"]
