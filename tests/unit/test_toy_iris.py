"""The Iris toy: its data against scikit-learn and numpy, its training against a loop in plain torch, its measures by hand."""

import math
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from sklearn.datasets import load_iris
from torch.nn import functional as F

from fldiag import models
from fldiag.errors import FldiagError
from fldiag.results.table import check, table
from fldiag.training.setup import Seeded
from fldiag_papers.toys import iris, iris_measures, iris_reported
from fldiag_papers.toys.iris_picture import classes

LABELS = load_iris().target
SHORT = iris.Protocol(rounds=2)


@pytest.fixture(scope="module")
def short():
    return iris.run([SHORT], seeds=(3, 0))


def pick(frame, **where):
    rows = frame
    for column, value in where.items():
        rows = rows[(rows[column] == value).fillna(False).astype(bool)]
    return rows


def numbers(frame, **where):
    return pick(frame, **where)["value"].to_numpy(dtype=float)


# --- data ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [False, True])
def test_plane_is_the_two_leading_components(raw):
    x = load_iris().data
    x = x - x.mean(0)
    if not raw:
        x = x / x.std(0)
    u, s, _ = np.linalg.svd(x, full_matrices=False)
    made = iris.world(iris.Protocol(raw=raw), 0)
    z = made.dataset.train_x.numpy()
    np.testing.assert_allclose(np.abs(z), np.abs(u[:, :2] * s[:2]), atol=1e-5)
    assert torch.equal(made.dataset.test_x, made.dataset.train_x) and np.array_equal(
        made.dataset.test_y, LABELS
    )


@pytest.mark.parametrize(
    ("split", "counts"),
    [
        ("one", [[50, 0, 0], [0, 50, 0], [0, 0, 50]]),
        ("two", [[25, 25, 0], [0, 25, 25], [25, 0, 25]]),
        ("dominant", [[40, 5, 5], [5, 40, 5], [5, 5, 40]]),
        ("mixed", [[22, 22, 5], [6, 23, 23], [22, 5, 22]]),
    ],
)
def test_every_flower_goes_to_one_client(split, counts):
    parts = iris.deal(LABELS, split, 0)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(150))
    # Half flowers may fall on either side.
    assert np.abs(
        np.array([np.bincount(LABELS[p], minlength=3) for p in parts]) - counts
    ).max() <= (split == "mixed")


def test_the_split_depends_on_the_seed_where_there_is_a_choice():
    same, other = iris.deal(LABELS, "two", 1), iris.deal(LABELS, "two", 2)
    assert all(map(np.array_equal, same, iris.deal(LABELS, "two", 1))) and not np.array_equal(
        same[0], other[0]
    )
    assert all(map(np.array_equal, iris.deal(LABELS, "one", 1), iris.deal(LABELS, "one", 2)))


def test_public_points_are_uniform_in_the_box_of_the_data():
    one, other = (iris.world(SHORT, seed) for seed in (0, 1))
    low, high = (getattr(one.dataset.train_x, f)(0).values for f in ("min", "max"))
    share = (one.public - low) / (high - low)
    assert share.shape == (300, 2) and share.min() >= 0 and share.max() <= 1
    for column in share.T.numpy():
        assert stats.kstest(column, "uniform").pvalue > 1e-3
    assert not torch.equal(one.public, other.public)


def test_train_and_test_are_stratified_and_the_plane_is_fitted_to_training_only():
    made, other = (iris.world(iris.Protocol(train_test=True), seed) for seed in (0, 1))
    data = made.dataset
    assert (
        np.bincount(data.train_y).tolist() == [40] * 3
        and np.bincount(data.test_y).tolist() == [10] * 3
    )
    np.testing.assert_allclose(data.train_x.mean(0), 0, atol=1e-5)
    assert abs(torch.cat([data.train_x, data.test_x]).mean(0)).max() > 1e-3
    assert not torch.equal(data.test_x, other.dataset.test_x)
    np.testing.assert_array_equal(np.sort(np.concatenate(made.parts)), np.arange(120))


def test_grid_spans_the_plane_row_after_row():
    made = iris.world(SHORT, 0)
    x, y = made.axes
    grid = made.grid.view(200, 200, 2).numpy()
    np.testing.assert_allclose(grid[7, 150], [x[150], y[7]], rtol=1e-6)
    z = made.dataset.train_x.numpy()
    np.testing.assert_allclose(
        [x[0], y[-1]],
        [z[:, 0].min() - 0.05 * np.ptp(z[:, 0]), z[:, 1].max() + 0.05 * np.ptp(z[:, 1])],
        rtol=1e-6,
    )


def test_config_distils_like_the_clients_train():
    made = iris.config(iris.Protocol(lr=0.004), "fedproj", 7, 50)
    assert (
        made.method.options["epochs"] == 5
        and made.method.options["tau"] == 3.0
        and made.method.options["lr"] == 0.004
    )
    assert made.method.options["optimizer"] == "sgd" and made.method.options["gamma_wd"] == 0.0
    assert (
        made.train.lr,
        made.train.momentum,
        made.train.epochs,
        made.train.batch_size,
        made.seed,
    ) == (0.004, 0.9, 5, 5, 7)
    assert made.train.lr_decay == 1 and made.train.weight_decay == 0 and made.clients.per_round == 3
    assert iris.config(iris.Protocol(batch_size=None), "fedavg", 0, 41).train.batch_size == 41
    assert iris.config(SHORT, "fedntd", 0, 1).method.options.get("epochs") is None


# --- training --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [None, 5])
def test_a_round_is_local_sgd_and_the_mean(batch):
    protocol, seed = iris.Protocol("two", 0.05, batch, rounds=1), 4
    frame = iris.train(None, iris.Job(protocol, "fedavg", seed, is_drawn=True))
    made = iris.world(protocol, seed)
    x, y = made.dataset.train_x, made.dataset.train_y
    start = models.build("mlp_iris", (2,), 3, {}, seed=seed).state_dict()
    schedule, nets = Seeded(seed, 3, 3, 5, batch or 50), []
    for k, part in enumerate(made.parts):
        net = models.build("mlp_iris", (2,), 3, {}, seed=seed)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        for positions in schedule.batches(0, k, len(part)):
            optimizer.zero_grad()
            F.cross_entropy(net(x[part[positions]]), y[part[positions]]).backward()
            optimizer.step()
        nets.append(net)
    mean = models.build("mlp_iris", (2,), 3, {}, seed=seed)
    mean.load_state_dict(
        {
            n: sum(
                net.state_dict()[n] * len(p) / 150 for net, p in zip(nets, made.parts, strict=True)
            )
            for n in start
        }
    )
    with torch.no_grad():
        maps = [net(made.grid).argmax(1).view(200, 200).numpy() for net in (*nets, mean)]
        right = [float((net(x).argmax(1) == y).double().mean()) for net in (*nets, mean)]
    found = pick(frame, metric="region")
    for k, expected in enumerate(maps):
        who = pick(found, moment="aggregated") if k == 3 else pick(found, client=k)
        lines = np.stack([classes(line) for line in who.sort_values("index")["line"]])
        assert (lines != expected).mean() < 1e-4  # a point on the boundary may go either way
        mine = numbers(
            frame, metric="accuracy", **({"moment": "aggregated"} if k == 3 else {"client": k})
        )
        assert mine == pytest.approx([right[k]], abs=1.01 / 150)
    assert len({m.tobytes() for m in maps}) == 4


def test_methods_share_start_data_and_first_local_training(short):
    for seed in (0, 3):
        first = [
            pick(short, method=m, seed=seed, round=1, moment="trained", scope="client")
            for m in iris.METHODS
        ]
        for other in first[1:]:
            assert numbers(first[0]).tolist() == numbers(other).tolist()
    assert (
        numbers(short, seed=0, metric="accuracy").tolist()
        != numbers(short, seed=3, metric="accuracy").tolist()
    )


def test_what_is_received_is_what_was_aggregated(short):
    for method in iris.METHODS:
        before, after = (
            numbers(
                short, method=method, metric="class_accuracy", round=t, moment=m, scope="global"
            )
            for t, m in ((1, "aggregated"), (2, "received"))
        )
        assert before.tolist() == after.tolist() and len(before) == 6


def test_projection_keeps_the_clients_nearer_to_the_global_model():
    frame = iris.run([iris.Protocol(rounds=4)], ("fedavg", "fedproj"), (0,))
    seen = iris_reported.per_seed(frame).set_index("method")
    assert seen.loc["fedproj", "disagreement"] < 0.7 * seen.loc["fedavg", "disagreement"]
    assert seen.loc["fedproj", "local"] > seen.loc["fedavg", "local"] + 0.05


def test_table(short):
    check(short)
    assert (
        set(short["run"]) == {SHORT.name}
        and set(short["seed"]) == {0, 3}
        and set(short["estimator"]) == {"exact"}
    )
    assert set(pick(short, metric="accuracy")["slice"]) == {"all"}
    assert (
        set(pick(short, metric="region")["seed"]) == set(pick(short, metric="point")["seed"]) == {3}
    )  # the first one given
    assert (
        len(pick(short, metric="region")) == 3 * 4 * 200
        and len(pick(short, metric="point")) == 3 * 150
    )
    assert set(pick(short, metric="disagreement")["round"]) == {2}
    for m in iris.METHODS:
        for k in range(3):
            mean = numbers(short, metric="region", method=m, client=k).mean()
            told = numbers(
                short, metric="disagreement", method=m, client=k, seed=3, reference="aggregated"
            )
            assert told == pytest.approx([mean], abs=1e-12)


def test_repeats_and_leaves_global_state_alone(short):
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        again = iris.run([SHORT], ("fedproj",), (3,))
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(state, torch.random.get_rng_state())
    expected = pick(short, method="fedproj", seed=3)
    for column in ("metric", "line", "value", "index", "client"):
        assert again[column].equals(expected[column].reset_index(drop=True)), column


def test_finished_trainings_are_kept(tmp_path, monkeypatch):
    protocol = iris.Protocol(rounds=1, batch_size=None)
    seen = []
    whole = iris.run(
        [protocol],
        ("fedavg", "feddf"),
        (0, 1),
        keep=tmp_path,
        progress=lambda *a: seen.append(a[:2]),
    )
    assert seen == [(i, 4) for i in range(5)] and len(list(tmp_path.glob("*.parquet"))) == 4
    next(tmp_path.glob("*feddf-s1*.parquet")).write_text("[")  # a broken file is trained again
    trained, told = [], []
    original = iris.train
    monkeypatch.setattr(
        iris, "train", lambda shared, job: trained.append(job) or original(shared, job)
    )
    assert iris.run(
        [protocol], ("fedavg", "feddf"), (0, 1), keep=tmp_path, on_damage=told.append
    ).equals(whole)
    assert (
        len(told) == 1
        and "feddf-s1" in told[0]
        and told[0].endswith("was damaged and is computed again")
    )
    assert [(j.method, j.seed) for j in trained] == [("feddf", 1)]
    iris.run(
        [iris.Protocol(rounds=2, batch_size=None)], ("fedavg",), (0,), keep=tmp_path
    )  # more rounds under the same name
    assert len(trained) == 2


def test_workers_can_be_sent_their_work():
    job = pickle.loads(pickle.dumps(iris.Job(iris.Protocol(rounds=1), "fedavg", 2)))
    expected = iris.train(None, iris.Job(iris.Protocol(rounds=1), "fedavg", 2))
    assert iris.train(None, job).equals(expected)


def test_measured_on_what_is_held_out():
    frame = iris.run([iris.Protocol(rounds=1, train_test=True)], ("fedavg",), (0,))
    rows = pick(frame, metric="accuracy")
    assert set(rows["slice"]) == {"test"} and set(rows["n_examples"]) == {30}
    shown = pick(frame, metric="point")
    assert shown.groupby("slice").size().to_dict() == {"train": 120, "test": 30}
    assert shown["client"].isna().sum() == 30 and pick(shown, slice="test")["client"].isna().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "tow"}, "did you mean 'two'"),
        ({"lr": 0.0}, r"lr = 0\.0"),
        ({"lr": math.inf}, "lr = inf"),
        ({"rounds": 0}, "rounds = 0"),
    ],
)
def test_no_protocol(options, message):
    with pytest.raises(FldiagError, match=message) as caught:
        iris.Protocol(**options)
    assert caught.value.usage


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ("fedavgg",)}, "did you mean 'fedavg'"),
        ({"methods": ()}, "nothing to train"),
        ({"seeds": ()}, "nothing to train"),
        ({"seeds": (1, 1)}, "twice"),
        (
            {"protocols": (iris.Protocol(lr=1e12, rounds=2),), "seeds": (0,)},
            "fedavg diverged in round \\d with lr = 1e\\+12",
        ),
    ],
)
def test_refused(options, message):
    with pytest.raises(FldiagError, match=message) as caught:
        iris.run(**options)
    assert caught.value.usage


def test_names_and_variants_differ():
    made = iris.variants(rounds=3, train_test=True)
    assert (
        len({p.name for p in made}) == len(made)
        and {p.rounds for p in made} == {3}
        and all(p.train_test for p in made)
    )
    assert made[0] == iris.Protocol(rounds=3, train_test=True) and any(
        p.lr == iris_reported.REPORTED_LR for p in made
    )


# --- measures --------------------------------------------------------------------------------------------------


def test_accuracies_by_hand():
    y = torch.tensor([0, 0, 1, 1, 1, 1, 2, 2])
    received = torch.tensor([0, 0, 1, 1, 1, 0, 2, 0])  # 6 right: classes 1, 3/4, 1/2
    client0 = torch.tensor([0, 0, 0, 0, 0, 0, 2, 2])  # 4 right: classes 1, 0, 1
    client1 = torch.tensor([0, 1, 1, 1, 1, 1, 2, 0])  # 6 right: classes 1/2, 1, 1/2
    frame = table(iris_measures.accuracies(torch.stack([received, client0, client1, y]), y))
    assert set(frame["n_examples"]) == {8}
    assert numbers(frame, metric="accuracy", scope="client").tolist() == [0.5, 0.75]
    assert numbers(frame, metric="accuracy", moment="received").tolist() == [0.75]
    assert numbers(frame, metric="accuracy", moment="aggregated").tolist() == [1.0]
    assert numbers(frame, metric="drop", scope="client").tolist() == [0.25, 0.0]
    assert numbers(frame, metric="forgetting", scope="client").tolist() == [
        0.75,
        0.5,
    ]  # class 1; class 0
    means = pick(frame, scope="global", moment="trained").set_index("metric")["value"].to_dict()
    assert means == {"accuracy": 0.625, "drop": 0.125, "forgetting": 0.625}
    assert numbers(frame, metric="class_accuracy", client=0).tolist() == [1.0, 0.0, 1.0]


def test_disagreement_and_lines_by_hand():
    # received, two clients, aggregated on 2 lines of 3 points
    maps = torch.tensor(
        [[0, 0, 0, 0, 0, 0], [0, 0, 2, 1, 1, 1], [0, 0, 0, 2, 2, 0], [0, 0, 2, 2, 2, 2]]
    )
    frame = table(iris_measures.differences(maps))
    assert numbers(frame, reference="received", scope="client").tolist() == pytest.approx(
        [4 / 6, 2 / 6]
    )
    assert numbers(frame, reference="aggregated", scope="client").tolist() == pytest.approx(
        [3 / 6, 2 / 6]
    )
    assert numbers(frame, reference="aggregated", scope="global").tolist() == pytest.approx(
        [2.5 / 6]
    )
    x, y = np.array([-1.0, 0.0, 1.0]), np.array([5.0, 7.0])
    drawn = table(iris_measures.lines(maps, x, y))
    assert pick(drawn, client=0)["line"].tolist() == ["2a1c", "3b"]
    assert (
        numbers(drawn, client=1).tolist() == pytest.approx([1 / 3, 1 / 3])
        and not numbers(drawn, moment="aggregated").any()
    )
    assert (
        drawn["y"].tolist() == [5.0, 7.0] * 3
        and set(drawn["x"]) == {-1.0}
        and set(drawn["x_last"]) == {1.0}
    )
    assert not (drawn["moment"] == "received").any()


def test_points_know_their_owner(short):
    shown = pick(short, metric="point", method="feddf")
    assert np.array_equal(shown["value"].astype(int), LABELS) and np.array_equal(
        shown["client"].astype(int), LABELS
    )
    np.testing.assert_allclose(
        shown[["x", "y"]].astype(float), iris.world(SHORT, 3).dataset.train_x, rtol=1e-6
    )


# --- beside the paper's numbers --------------------------------------------------------------------------------


def made_up(accuracies, run="p", rounds=(1, 20)):
    """A table with these accuracies by method and seed in its last round, and half of them before."""
    rows = []
    for method, values in accuracies.items():
        for seed, value in enumerate(values):
            for t in rounds:
                here = {
                    "run": run,
                    "method": method,
                    "seed": seed,
                    "round": t,
                    "scope": "global",
                    "n_examples": 150,
                }
                share = 1 if t == rounds[-1] else 0.5
                rows += [
                    {**here, "moment": "aggregated", "metric": "accuracy", "value": share * value},
                    {**here, "moment": "received", "metric": "accuracy", "value": 0.11},
                    {
                        **here,
                        "moment": "trained",
                        "metric": "accuracy",
                        "value": share * (value - 0.1),
                    },
                    {**here, "moment": "trained", "metric": "drop", "value": 0.2},
                    {**here, "moment": "trained", "metric": "forgetting", "value": 0.3},
                    {
                        **here,
                        "moment": "trained",
                        "metric": "accuracy",
                        "value": 0.01,
                        "scope": "client",
                        "client": 0,
                    },
                ]
                rows += [
                    {
                        **here,
                        "moment": "trained",
                        "metric": "disagreement",
                        "reference": r,
                        "value": v,
                    }
                    for r, v in (("received", 0.9), ("aggregated", 0.4))
                ]
    return table(rows)


def test_per_seed_takes_the_last_round():
    seen = iris_reported.per_seed(made_up({"fedavg": [0.6, 0.8]}, rounds=(15, 16, 17, 20)))
    assert seen["accuracy"].tolist() == [0.6, 0.8] and seen["local"].tolist() == pytest.approx(
        [0.5, 0.7]
    )
    assert seen["late"].tolist() == pytest.approx([0.4, 0.8 * 2 / 3])  # rounds 16, 17 (half) and 20
    assert seen[["drop", "forgetting", "disagreement"]].to_numpy().tolist() == [[0.2, 0.3, 0.4]] * 2


def test_interval_of_the_mean_is_students():
    values = np.array([0.7, 0.75, 0.9, 0.82])
    low, high = stats.t.interval(0.95, 3, loc=values.mean(), scale=stats.sem(values))
    assert iris_reported.interval(values, 0.0) == pytest.approx((low, high))
    assert iris_reported.interval(values, 0.02) == pytest.approx((low - 0.01, high + 0.01))
    assert iris_reported.interval(values[:1], 0.0) == (-math.inf, math.inf)


def test_interval_of_a_single_run_covers_a_further_run():
    draws = np.random.default_rng(0).normal(size=(1500, 6))
    inside = [
        low <= row[5] <= high
        for row in draws
        for low, high in [iris_reported.interval(row[:5], 0.0, single=True)]
    ]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.018)


def test_agreement_has_three_answers():
    values = np.array([0.7, 0.8, 0.9])  # mean 0.8, std 0.1, t 4.30: -+ 0.248, single -+ 0.497
    said = [iris_reported.agreement(values, v, 0.0) for v in (0.8, 0.56, 0.54, 0.31, 0.29, 1.3)]
    assert said == ["mean", "mean", "run", "run", "none", "none"]
    assert iris_reported.agreement(np.array([0.5, 0.5]), 0.503, 1 / 150) == "mean"  # half a flower
    assert iris_reported.agreement(np.array([0.5, 0.5]), 0.504, 1 / 150) == "none"


def test_statements_follow_the_data():
    good = {
        "fedavg": [0.63, 0.64, 0.65],
        "feddf": [0.64, 0.65, 0.64],
        "fedproj": [0.93, 0.94, 0.93],
    }
    said = " ".join(iris_reported.statements(made_up(good)))
    assert "accuracy of fedavg, feddf, fedproj fits the mean" in said and "not" not in said
    assert (
        "fedproj against fedavg, seed by seed: global accuracy +29.3 ± 1.2 points (paper +29.3), local models +29.3"
        in said
    )
    assert "feddf: 64.3 ± 0.6 % over 3 seeds (64.0 to 65.0;" in said
    other = iris_reported.statements(
        made_up({**good, "fedavg": [0.90, 0.91, 0.90], "feddf": [0.70, 0.75, 0.72]})
    )
    assert any("of fedavg is not what this protocol gives" in s for s in other)
    assert any("of feddf is not the mean of this protocol, though a single run" in s for s in other)
    assert any("of fedproj fits" in s for s in other)
    assert iris_reported.statements(made_up(good, rounds=(1, 7)))[0].endswith("here are 7.")


def test_statements_of_one_seed_and_of_unreported_methods():
    (said,) = iris_reported.statements(made_up({"fedavg": [0.7], "fedproj": [0.9]}))
    assert "One seed has no spread" in said
    found = iris_reported.summary(made_up({"fedavg": [0.7]})).iloc[0]
    assert (
        found["accuracy_std"] is None
        and found["agreement"] is None
        and (found["low"], found["high"]) == (0.0, 1.0)
    )
    assert iris_reported.statements(made_up({"fedsol": [0.7, 0.8]})) == []
    summary = iris_reported.summary(made_up({"fedsol": [0.7, 0.8], "fedavg": [0.64, 0.66]}))
    assert pd.isna(summary["agreement"].iloc[0]) and summary["agreement"].iloc[1] == "mean"
    assert summary["accuracy_std"].iloc[0] == pytest.approx(np.sqrt(0.005))


def test_statements_over_protocols():
    good, bad = (
        {"fedavg": [0.63, 0.65], "fedproj": [0.93, 0.93]},
        {"fedavg": [0.9, 0.9], "fedproj": [0.93, 0.93]},
    )
    said = iris_reported.statements(pd.concat([made_up(good, "here"), made_up(bad, "there")]))
    assert said[0].endswith("64.00 % may be the mean of here.") and said[1].endswith(
        "93.33 % may be the mean of here, there."
    )
    assert said[2].endswith("as means: here.")
    said = iris_reported.statements(pd.concat([made_up(bad, "here"), made_up(bad, "there")]))
    assert said[0].endswith("none of these protocols.") and said[2].endswith(
        "as means: no protocol here."
    )
