"""Sides, evidence and verdicts: planted runs for methods, trained ones for two given models."""

import numpy as np
import pytest
import torch
from scipy import stats

import fldiag
from fldiag.compare import evidence
from fldiag.compare.reading import Reader
from fldiag.config import Config
from fldiag.errors import FldiagError
from fldiag.results.numbers import numbers
from fldiag.results.table import check as fits
from fldiag.results.uncertainty import Interval, mcnemar
from fldiag.runs.run import Run


def planted(folder, seed, accuracy, *, status="finished", partition=b"same", data="1", **options):
    """A run without weights that says it ended with this accuracy."""
    config = Config.load("digits", rounds=1, seed=seed, **options)
    run = Run.create(
        folder / f"{config.method.name}-{seed}",
        config.model_dump(mode="json"),
        {"data": data},
        hash=config.hash,
    )
    run.put("partition.npz", lambda f: f.write(partition))
    run.begin()
    row = {"moment": "aggregated", "scope": "global", "slice": "test", "metric": "accuracy"}
    run.append(1, [{"round": 1, **row, "value": accuracy}], status=status)
    return run


def side(folder, values, first=0, **options):
    return [planted(folder, first + i, v, **options) for i, v in enumerate(values)]


BASE = np.array([0.80, 0.83, 0.78, 0.81])
NOISE = np.array([0.004, -0.006, 0.005, -0.003])


@pytest.fixture
def worse(tmp_path):
    """A is 5 points worse than B, up to noise."""
    return side(tmp_path / "a", BASE - 0.05 + NOISE), side(tmp_path / "b", BASE)


def test_methods_are_compared_over_pairs_of_equal_seed(worse):
    a, b = worse
    found = fldiag.check(a, b[::-1], fail_if=["accuracy < baseline - 1pt"])
    row, oracle = found.table.iloc[0], stats.ttest_rel(BASE - 0.05 + NOISE, BASE - 0.01)
    assert (
        found.verdict == "fail"
        and "do the methods differ? Over 4 pairs of runs, paired by seed 0, 1, 2, 3"
        in found.question
    )
    assert (row["low"], row["high"], row["p"]) == pytest.approx(
        (*oracle.confidence_interval(), oracle.pvalue)
    )
    fits(found.table)


@pytest.mark.parametrize(
    ("condition", "verdict"),
    [
        ("accuracy < baseline", "fail"),
        ("accuracy < baseline - 9pt", "pass"),
        ("accuracy < baseline - 5pt", "undecided"),
        ("accuracy > baseline", "pass"),
        ("accuracy < 80%", "fail"),
        ("accuracy < 60%", "pass"),
        ("accuracy < baseline - 9%", "pass"),
    ],
)
def test_verdicts(worse, condition, verdict):
    assert fldiag.check(*worse, fail_if=[condition]).verdict == verdict


def test_several_conditions_are_held_to_holm(tmp_path):
    shift = np.array([0.01, 0.03, 0.05])
    a, b = side(tmp_path / "a", BASE[:3] + shift), side(tmp_path / "b", BASE[:3])
    alone = "accuracy > baseline - 2pt"
    assert fldiag.check(a, b, fail_if=[alone]).verdict == "fail"
    both = fldiag.check(a, b, fail_if=[alone, "accuracy > baseline - 1pt"])
    assert (
        both.verdict == "undecided"
        and both.table["p"].iloc[0] < 0.05 < both.table["p_holm"].iloc[0]
    )
    assert any("Holm" in note for note in both.notes)


def test_the_same_numbers_on_both_sides(worse):
    _, b = worse
    assert (
        fldiag.check(b, b).verdict == "pass"
        and fldiag.check(b, b, fail_if=["accuracy <= baseline"]).verdict == "fail"
    )


def test_the_picture_of_a_difference_points_to_the_better_side(worse):
    a, b = worse
    frame = fldiag.diff(a, b, numbers=["accuracy", "loss"])
    fig = fldiag.draw(frame)
    (ax,) = fig.axes
    row = frame.iloc[0]
    point = next(line for line in ax.lines if line.get_marker() == "s")  # B is better
    assert (
        float(point.get_xdata()[0]) == pytest.approx(2 * row.difference / (row.high - row.low))
        and row.difference < 0
    )
    assert [t.get_text() for t in ax.get_yticklabels()] == ["accuracy", "loss"]
    assert frame.note.iloc[1].startswith(
        next(t.get_text() for t in ax.texts if t.get_color() == "#555555")[:20]
    )  # why there is none
    less = frame.iloc[:1].assign(metric="loss")  # of a loss less is better
    assert (
        float(fldiag.draw(less.assign(better="A"), name="diff").axes[0].lines[-2].get_xdata()[0])
        > 0
    )


def test_two_seeds_decide_nothing_and_pairs_need_equal_seeds(worse, tmp_path):
    a, b = worse
    few = fldiag.check(a[:2], b[:2])
    assert few.verdict == "undecided" and "3 are needed" in few.table["note"].iloc[0]
    left = fldiag.check(a, b[1:])
    assert "paired by seed 1, 2, 3" in left.question and "left out: 1 run" in left.notes[0]
    other = side(tmp_path / "c", BASE, first=10)
    with pytest.raises(
        FldiagError, match=r"no seed is on both sides .*seeds 0, 1, 2, 3; .*seeds 10"
    ):
        fldiag.check(a, other)
    ordered = fldiag.check(a, other, pair="order")
    assert ordered.verdict == "fail" and "order" in ordered.question
    with pytest.raises(FldiagError, match="only seed 0 is"):
        fldiag.check(a, b[0])


def test_sides_are_folders_patterns_and_lists(worse, tmp_path):
    by_folder = fldiag.check(tmp_path / "a", str(tmp_path / "b" / "fedavg-*"))
    assert by_folder.verdict == "fail" and by_folder.labels == (
        "a (fedavg, 4 runs)",
        "b (fedavg, 4 runs)",
    )
    planted(tmp_path / "a", 9, 0.8, method__name="fedsam")
    with pytest.raises(FldiagError, match="differ in method"):
        fldiag.check(tmp_path / "a", tmp_path / "b")
    with pytest.raises(FldiagError, match="seed 0 is there twice"):
        fldiag.check([worse[0][0], worse[1][0]], tmp_path / "b")
    with pytest.raises(FldiagError, match="nothing matches"):
        fldiag.check(str(tmp_path / "x*"))


def test_what_cannot_be_compared_is_masked_with_its_reason(tmp_path):
    a = side(tmp_path / "a", BASE)
    b = side(tmp_path / "b", BASE, partition=b"other", model__name="mlp")
    frame = fldiag.diff(a, b).set_index("metric")
    assert frame["masked"].drop(["accuracy", "loss"]).all() and not frame.loc["accuracy", "masked"]
    assert (
        "models are different" in frame.loc["lambda_1", "note"]
        and "divided differently" in frame.loc["forgetting", "note"]
    )
    assert fldiag.check(a, b, fail_if=["lambda_1 > baseline"]).verdict == "error"
    with pytest.raises(FldiagError, match="on different data"):
        fldiag.diff(a, side(tmp_path / "c", BASE, data="2"))


def test_a_run_that_diverged_passes_no_condition(tmp_path):
    a, b = planted(tmp_path / "a", 0, None, status="diverged"), planted(tmp_path / "b", 0, 0.8)
    found = fldiag.check(a, b, fail_if=["accuracy < baseline"])
    assert found.verdict == "fail" and "diverged" in found.table["note"].iloc[0]


def test_a_number_is_looked_at_once_however_many_conditions_it_has(worse, monkeypatch):
    seen, old = [], evidence.of
    monkeypatch.setattr(
        evidence, "of", lambda number, *rest: seen.append(number.name) or old(number, *rest)
    )
    found = fldiag.check(
        *worse,
        fail_if=[f"{name} < {i / 1000}" for i in range(300) for name in ("accuracy", "loss")],
    )
    assert seen == ["accuracy", "loss"] and len(found.table) == 600


def test_wrong_use(worse):
    a, b = worse
    with pytest.raises(FldiagError, match="refers to a baseline, and none is given"):
        fldiag.check(a, fail_if=["accuracy < baseline"])
    with pytest.raises(FldiagError, match="neither a baseline nor a condition"):
        fldiag.check(a)
    with pytest.raises(FldiagError, match="unknown number 'acuracy'; did you mean 'accuracy'"):
        fldiag.diff(a, b, numbers=["acuracy"])
    with pytest.raises(FldiagError, match="not a confidence level"):
        fldiag.check(a, b, level=95)


# -- two given models


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """FedAvg for one round, and for two."""
    folder = tmp_path_factory.mktemp("check")
    return [
        fldiag.train(
            Config.load(
                "digits",
                rounds=r,
                model__name="mlp",
                train__epochs=1,
                clients__per_round=5,
                checkpoint__clients="sampled",
            ),
            out=folder / f"r{r}",
        )
        for r in (1, 4)
    ]


def test_two_models_are_compared_over_the_test_examples(trained):
    a, b = trained
    found = fldiag.check(a, b)
    rights = [Reader().tested(run).right for run in trained]
    row = found.table.iloc[0]
    assert (
        "do these two given models differ?" in found.question
        and "does not compare methods" in found.question
    )
    assert row["p"] == pytest.approx(mcnemar(*rights)) and row["n"] == len(rights[0])
    assert row["value"] == pytest.approx(
        a.metrics.query("metric == 'accuracy' and round == 1")["value"].iloc[0]
    )
    assert row["low"] <= row["difference"] <= row["high"]
    assert any("different numbers of rounds: 1 and 4" in note for note in found.notes)


@pytest.mark.slow
def test_every_number_of_two_models(trained, tmp_path):
    frame = fits(fldiag.diff(*trained)).set_index("metric")
    assert list(frame.index) == list(numbers()) and not frame["masked"].any()
    assert (
        frame["low"].notna().sum() >= 9
        and (frame["low"].dropna() <= frame["difference"][frame["low"].notna()]).all()
    )
    ece = fldiag.diagnose(trained[0], "fairness").query(
        "metric == 'ece' and scope == 'global' and estimator == 'bayesian bootstrap'"
    )
    assert frame.loc["ece", "value"] == pytest.approx(ece["value"].iloc[0])
    drop = fldiag.diagnose(trained[0], "forgetting").query(
        "metric == 'drop' and scope == 'client'"
    )["value"]
    assert frame.loc["drop", "value"] == pytest.approx(drop.mean())
    same = fldiag.diff(trained[0], trained[0], numbers=["accuracy", "loss", "drop", "ece"])
    assert (same["difference"] == 0).all() and not same["better"].isin(["A", "B"]).any()


def test_plain_weights_and_weights_that_are_no_numbers(trained, tmp_path):
    state = trained[0].checkpoint().state
    torch.save(state, tmp_path / "plain.pt")
    torch.save({n: t * torch.nan for n, t in state.items()}, tmp_path / "nan.pt")
    frame = fldiag.diff(
        tmp_path / "plain.pt",
        tmp_path / "nan.pt",
        model="mlp",
        data="digits",
        numbers=["accuracy", "lambda_1", "drift"],
    ).set_index("metric")
    assert (
        frame["masked"].all()
        and "has no clients" in frame.loc["drift", "note"]
        and frame.loc["accuracy", "note"]
    )
    found = fldiag.check(
        tmp_path / "plain.pt",
        trained[1].path / "rounds" / "0004.safetensors",
        model="mlp",
        data="digits",
    )
    assert found.table["p"].iloc[0] == pytest.approx(fldiag.check(*trained).table["p"].iloc[0])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_not_tested(trained, monkeypatch, value):
    monkeypatch.setattr(
        evidence,
        "_over_examples",
        lambda *words: evidence.Evidence(0.5, value, lambda scale, offset: Interval(0.0, 0.0, 0.0)),
    )
    found = fldiag.check(trained[0], trained[1], fail_if=["loss > baseline"])
    assert (
        found.verdict == "error"
        and "baseline" in found.table["note"].iloc[0]
        and found.table["remedy"].iloc[0]
    )
