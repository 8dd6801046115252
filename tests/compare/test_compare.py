"""Conditions, sides and verdicts of recorded and trained runs, and the verbs as they are typed."""

import json
import shutil
from contextvars import Context

import numpy as np
import pandas as pd
import pytest
import torch
from commands import run
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import fldiag
from fldiag.compare.check import parse
from fldiag.errors import FldiagError
from fldiag.results.numbers import numbers
from fldiag.results.statistics import Interval, basic, holm, mcnemar, means, paired_t

X = (torch.arange(200) + 0.5)[:, None] / 200
BASE = np.array([0.80, 0.83, 0.78, 0.81])
NOISE = np.array([0.005, -0.005, 0.01, 0.0])


def record(folder, values, *, first=0, method="mine", clients=(range(200),), labels=None):
    """Runs whose models are right on just this share of the test examples, all of class 1."""
    data = {"data": (X, torch.arange(200) % 2 if labels is None else labels)}
    for seed, value in enumerate(values, first):
        net = torch.nn.Linear(1, 2)
        with torch.no_grad():
            net.weight.copy_(torch.tensor([[0.0], [-100.0]]))
            net.bias.copy_(torch.tensor([0.0, 100 * value]))
        more = {"clients": list(clients), "test": (X, torch.ones(200).long()), "method": method}
        with fldiag.Recorder(folder / f"{method}-{seed}", net, **data, **more, seed=seed) as rec:
            rec.round(received=net, clients={0: net}, aggregated=net)
    return [fldiag.load(folder / f"{method}-{s}") for s in range(first, first + len(values))]


@pytest.fixture(scope="module")
def worse(tmp_path_factory):
    """A is 5 points worse than B, up to noise."""
    folder = tmp_path_factory.mktemp("worse")
    return record(folder / "a", BASE - 0.05 + NOISE), record(folder / "b", BASE)


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("accuracy < baseline", ("<", 1, 0)),
        ("accuracy<=baseline-1pt", ("<=", 1, -0.01)),
        (" accuracy > 80 %", (">", 0, 0.8)),
        ("loss >= baseline\n+ 5%", (">=", 1.05, 0)),
        ("loss > baseline - .5", (">", 1, -0.5)),
        ("loss > -2e-1", (">", 0, -0.2)),
    ],
)
def test_a_condition_is_read(text, condition):
    parsed = parse(text)
    assert (parsed.comparison, parsed.scale, parsed.offset) == pytest.approx(condition)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a condition"),
        ("acuracy < 3", "unknown number 'acuracy'"),
        ("accuracy == 3", "not a condition"),
        ("accuracy < ", "not a condition"),
        ("accuracy < basline", "not a condition"),
        ("accuracy < baseline -", "not a condition"),
        ("accuracy < baseline 3", "not a condition"),
        ("accuracy < 3 < 4", "not a condition"),
        ("accuracy < 1e400", "not a condition"),
        ("loss > 3pt", "not a share"),
        ("__import__('os')", "not a condition"),
        ("(" * 10**6, "not a condition"),
    ],
)
def test_what_is_no_condition_is_refused(text, words):
    with pytest.raises(FldiagError, match=words) as caught:
        parse(text)
    assert caught.value.usage and len(str(caught.value)) < 500


@given(st.text(alphabet="acury<>=+-%0123456789. ptbaselin()_e\n") | st.text())
def test_any_text_is_a_condition_or_one_error(text):
    try:
        assert parse(text).number.name in numbers()
    except FldiagError as error:
        assert error.usage


def test_methods_are_compared_over_pairs_of_equal_seed(worse):
    a, b = worse
    answer = fldiag.check(a, b[::-1], fail_if=["accuracy < baseline - 1pt"])
    row, oracle = answer.table.iloc[0], stats.ttest_rel(BASE - 0.05 + NOISE, BASE - 0.01)
    assert answer.verdict == "fail" and "seeds 0, 1, 2, 3" in answer.question
    ends = (*oracle.confidence_interval(), oracle.pvalue)
    assert (row["low"], row["high"], row["p"]) == pytest.approx(ends, rel=1e-6)


@pytest.mark.parametrize(
    ("condition", "verdict"),
    [
        ("accuracy < baseline", "fail"),
        ("accuracy < baseline - 9pt", "pass"),
        ("accuracy < baseline - 5pt", "undecided"),
        ("accuracy > baseline", "pass"),
        ("accuracy < 79%", "fail"),
        ("accuracy < 60%", "pass"),
        ("lambda_1 > 3", "error"),  # no model is known
    ],
)
def test_verdicts(worse, condition, verdict):
    assert fldiag.check(*worse, fail_if=[condition]).verdict == verdict
    both = fldiag.check(*worse, fail_if=[condition, "loss > 1e6"])
    assert both.verdict == verdict and both.table["verdict"].tolist() == [verdict, "pass"]


def test_several_conditions_are_held_to_holm(tmp_path):
    shift = np.array([0.01, 0.03, 0.05])
    sides = record(tmp_path / "a", BASE[:3] + shift), record(tmp_path / "b", BASE[:3])
    one, other = "accuracy > baseline - 2pt", "accuracy > baseline - 1pt"
    assert fldiag.check(*sides, fail_if=[one]).verdict == "fail"
    both = fldiag.check(*sides, fail_if=[one, other])
    assert both.verdict == "undecided"
    assert both.table["p"].iloc[0] < 0.05 < both.table["p_holm"].iloc[0]


def test_what_decides_nothing(worse):
    a, b = worse
    few = fldiag.check(a[:2], b[:2])
    assert few.verdict == "undecided" and "3 seeds are needed" in few.table["note"].iloc[0]
    assert fldiag.check(b, b).verdict == "pass"  # the same numbers on both sides
    assert fldiag.check(b, b, fail_if=["accuracy <= baseline"]).verdict == "fail"
    equal = fldiag.check(b, b, fail_if=["accuracy < baseline - 1pt"])
    assert equal.verdict == "undecided" and "equal" in equal.table["note"].iloc[0]


def test_sides_are_folders_patterns_and_lists(worse, tmp_path):
    a, b = worse
    folder = a[0].path.parent.parent
    answer = fldiag.check(folder / "a", str(folder / "b" / "mine-*"))
    assert answer.verdict == "fail" and answer.labels == ("a (4 runs)", "b (4 runs)")
    left = fldiag.check(a, b[1:])
    assert "seeds 1, 2, 3" in left.question and "left out" in left.notes[0]
    others = record(tmp_path / "c", BASE, first=10)
    ours = record(tmp_path / "d", BASE[:1], method="ours")
    labels = torch.zeros(200).long()
    elsewhere = record(tmp_path / "e", BASE, labels=labels)
    for wrong, words in (
        ((a, others), "no two seeds"),
        ((a, b[0]), "no two seeds"),
        (([a[0], *ours], b), "differ by more"),
        (([a[0], b[0]], b), "seed is there twice"),
        (([a[0], a[1].checkpoint()], b), "must be runs"),
        ((a, elsewhere), "different data"),
        (("x*", b), "is no run"),
        ((3, b), "not a path"),
    ):
        with pytest.raises(FldiagError, match=words):
            fldiag.check(*wrong)


def test_what_cannot_be_compared_is_masked_with_its_reason(worse, tmp_path):
    a, _ = worse
    b = record(tmp_path / "b", BASE, clients=(range(100), range(100, 200)))
    frame = fldiag.diff(a, b).set_index("metric")
    assert frame["masked"].drop(["accuracy", "loss"]).all() and not frame["masked"]["accuracy"]
    assert "divided differently" in frame["note"]["drift"]
    for wrong, words in (
        ({"fail_if": ["accuracy < baseline"]}, "needs a baseline"),
        ({"fail_if": ["loss > 1"], "level": 95}, "between 0 and 1"),
        ({"fail_if": ["loss > 1"], "modle": "mlp"}, "did you mean 'model'"),
    ):
        with pytest.raises(FldiagError, match=words):
            fldiag.check(a, **wrong)
    with pytest.raises(FldiagError, match="unknown number 'acuracy'; did you mean 'accuracy'"):
        fldiag.diff(a, b, numbers=["acuracy"])


def test_the_picture_points_to_the_better_side(worse):
    frame = fldiag.diff(*worse, numbers=["accuracy"])
    row = frame.iloc[0]
    x = 2 * row.difference / (row.high - row.low)
    for metric, sign in (("accuracy", 1), ("loss", -1)):  # of a loss less is better
        (ax,) = fldiag.draw(frame.assign(metric=metric), name="diff").axes
        (point,) = [p for p in ax.lines if p.get_marker() == "s" and len(p.get_xdata())]
        assert point.get_xdata()[0] == pytest.approx(np.clip(sign * x, -6, 6))


# Two given models, and the verbs


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """One round and eight of the same training: the second is clearly better. And what lacks something."""
    folder = tmp_path_factory.mktemp("trained")
    keys = {"model__name": "mlp", "train__epochs": 1, "checkpoint__clients": "sampled"}
    keys |= {"clients__total": 5, "clients__per_round": 5}
    for name, rounds in (("short", 1), ("long", 8)):
        config = fldiag.Config.load("digits", rounds=rounds, partition__kind="iid", **keys)
        run_ = fldiag.train(config, out=folder / name)
    state = run_.checkpoint().state
    torch.save(state, folder / "plain.pt")
    torch.save({n: t * torch.nan for n, t in state.items()}, folder / "nan.pt")
    shutil.copytree(folder / "short", folder / "gone")
    shutil.rmtree(folder / "gone" / "rounds")
    return folder


@pytest.fixture(autouse=True)
def here(trained, monkeypatch):
    monkeypatch.chdir(trained)


def test_two_models_are_compared_over_examples():
    frame = fldiag.diff("short", "long").set_index("metric")
    assert list(frame.index) == list(numbers()) and not frame["masked"].any()
    decided = frame[frame["low"].notna()]
    assert {"accuracy", "loss"} == set(decided.index)
    assert (decided["low"] <= decided["difference"]).all()
    assert (frame["note"].drop(decided.index) != "").all()
    run_ = fldiag.load("short")
    metrics = run_.metrics.query("scope == 'global' and slice == 'test'").set_index("metric")
    drops = fldiag.diagnose(run_, "forgetting").query("metric == 'drop' and scope == 'client'")
    expected = [*metrics["value"][["accuracy", "loss"]], drops["value"].mean()]
    assert frame["value"][["accuracy", "loss", "drop"]].tolist() == pytest.approx(expected)
    same = fldiag.diff("short", "short", numbers=["accuracy", "loss"])
    assert (same["better"] == "same").all()
    plain = fldiag.diff("plain.pt", "short", model="mlp", data="digits", numbers=["loss"])
    assert plain["difference"].iloc[0] == pytest.approx(-frame["difference"]["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("words", "code", "verdict"),
    [
        (["accuracy < baseline - 1pt", "loss > baseline"], 3, "fail"),
        (["accuracy > baseline"], 0, "pass"),
        (["loss < baseline", "worst_decile < 200%"], 0, "undecided"),
        (["loss < baseline", "worst_decile < 200%", "--strict"], 3, "undecided"),
        (["loss > 0", "lambda_1 > baseline", "--model", "os:system"], 2, "error"),
    ],
)
def test_exit_codes(words, code, verdict, tmp_path):
    conditions = [w for word in words if " " in word for w in ("--fail-if", word)]
    options = [word for word in words if " " not in word]
    sides = ["short", "long", "--out", tmp_path]
    answer = run("check", *sides, *conditions, *options, "--json", code=code)
    assert json.loads(answer.stdout)["verdict"] == verdict
    (csv,) = tmp_path.glob("check-*.csv")
    assert len(pd.read_csv(csv)) == len(conditions) / 2


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["plain.pt"], "--data digits"),
        (["plain.pt", "--data", "digits"], "--model"),
        (["nan.pt", "--model", "mlp", "--data", "digits"], "from before it diverged"),
        (["plain.pt", "--fail-if", "forgetting > 0.2"], "run"),
        (["gone", "--fail-if", "lambda_1 > 9"], "restore"),
    ],
)
def test_what_could_not_be_measured_is_not_green(words, remedy, tmp_path):
    words = [*words, *([] if "--fail-if" in words else ["--fail-if", "accuracy < 1%"])]
    answer = run("check", *words, "--out", tmp_path, code=2)
    assert answer.stderr.startswith("error: not tested: ") and remedy in answer.stderr


def test_diff_says_who_is_better(tmp_path):
    words = ["diff", "short", "long", "--number", "loss", "--json", "--out", tmp_path]
    answer = Context().run(run, *words)
    (row,) = json.loads(answer.stdout)["rows"]
    assert row["better"] == "B" and list(tmp_path.glob("diff-*.pdf"))


# Intervals and p-values


def test_a_t_interval_is_scipys():
    d = BASE - NOISE * 9
    oracle = stats.ttest_1samp(d, 0)
    interval = paired_t(d)
    ends = (*oracle.confidence_interval(), oracle.pvalue)
    assert (interval.low, interval.high, interval.p) == pytest.approx(ends)
    assert paired_t(np.array([0.5])) == Interval(0.5) == paired_t(np.full(3, 0.5))
    assert (
        paired_t(np.zeros(3)) == Interval(0.0, 0.0, 0.0, 1.0) and basic(1.0, np.ones(9)).p is None
    )


def test_the_basic_interval_is_that_of_the_quantiles_turned_around():
    interval = basic(0.4, np.arange(1001) / 1000, 0.9)
    assert (interval.low, interval.high) == pytest.approx((2 * 0.4 - 0.95, 2 * 0.4 - 0.05))
    assert interval.p == pytest.approx(2 * (201 + 1) / (1001 + 1))


@pytest.mark.parametrize(
    ("only_a", "only_b", "p"), [(0, 0, 1.0), (5, 0, 2 / 32), (1, 5, 14 / 64), (4, 4, 1.0)]
)
def test_mcnemar_counts_the_examples_on_which_only_one_is_right(only_a, only_b, p):
    a = np.array([True] * only_a + [False] * only_b + [True] * 7 + [False] * 3)
    b = np.array([False] * only_a + [True] * only_b + [True] * 7 + [False] * 3)
    assert mcnemar(a, b) == pytest.approx(p)


def test_holms_worked_example():
    assert holm([0.01, 0.04, 0.03, 0.005, None]) == pytest.approx([0.03, 0.06, 0.06, 0.02, None])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_two_models_share_the_draws():
    x = np.random.default_rng(0).normal(size=50)
    draws = means(np.stack([x, x + 0.3], 1))
    assert np.ptp(draws[:, 1] - draws[:, 0]) < 1e-9 < np.ptp(draws[:, 0])
