"""Forgetting: planted cases, scikit-learn as reference, masks, gaps."""

import weakref

import helpers
import numpy as np
import pandas as pd
import pytest
import torch
from histories import always, history, identity, linear, one, separable, stored
from scipy.stats import binom, binomtest
from sklearn.metrics import accuracy_score, log_loss, recall_score
from torch import nn

import fldiag
from fldiag.config import Config
from fldiag.diagnostics.forgetting import forgetting
from fldiag.errors import FldiagError
from fldiag.params import Layout, flatten
from fldiag.results.means import share, wilson
from fldiag.runs.history import History

PARTS = [np.arange(0, 60), np.arange(60, 120)]  # classes 0, 1 and classes 2, 3


@pytest.fixture
def planted():
    """Client 0 answers class 0 to everything, client 1 is unharmed; averaging restores all."""
    return history(
        linear(), separable(), PARTS, stored(identity(), [always(0), identity()], identity())
    )


def test_planted_forgetting(planted):
    frame = forgetting(planted)
    hurt, fine = ({"client": k, "moment": "trained"} for k in (0, 1))
    assert (
        one(frame, "accuracy", slice="test", **hurt).value == 0.25
        and one(frame, "accuracy", slice="test", **fine).value == 1
    )
    assert one(frame, "drop", **hurt).value == 0.75 and one(frame, "drop", **fine).value == 0
    assert [one(frame, "class_forgetting", index=c, **hurt).value for c in range(4)] == [0, 1, 1, 1]
    assert (
        one(frame, "forgetting", **hurt).value == 1 and one(frame, "forgetting", **fine).value == 0
    )
    assert one(frame, "forgetting", scope="global").value == 0.5
    assert (
        one(frame, "forgotten", **hurt).value == 0.75 and one(frame, "learned", **hurt).value == 0
    )
    assert (
        one(frame, "restored", **hurt).value == 1
        and one(frame, "restored", **hurt).n_examples == 75
    )
    assert one(frame, "unseen_classes", **hurt).value == 2
    assert (
        one(frame, "accuracy_seen", **hurt).value == 0.5
        and one(frame, "accuracy_unseen", **hurt).value == 0
    )
    assert (
        one(frame, "accuracy", slice="client:0/train", **hurt).value == 0.5
    )  # class 0 of its classes 0 and 1
    assert one(frame, "accuracy", slice="client:0/others", **hurt).value == 0
    assert one(frame, "accuracy", slice="client:1/others", **fine).value == 1
    assert (
        one(frame, "class_examples", client=1, index=2).value == 30
        and one(frame, "class_examples", client=1, index=0).value == 0
    )
    mean, spread = (
        one(frame, m, scope="global", moment="trained", slice="test").value
        for m in ("accuracy", "accuracy_std")
    )
    assert (mean, spread) == (0.625, 0.375)


def test_what_averaging_does_not_restore():
    made = history(
        linear(), separable(), PARTS, stored(identity(), [always(0), always(0)], always(1))
    )
    frame = forgetting(made)  # of classes 1, 2, 3 the aggregated model knows 1
    assert one(frame, "restored", client=0).value == pytest.approx(1 / 3)
    pooled = one(frame, "restored", scope="global")
    assert (
        pooled.value == pytest.approx(1 / 3)
        and pooled.n_examples == 150
        and pooled.low < 1 / 3 < pooled.high
    )


def test_nothing_forgotten_has_no_restored_share(planted):
    row = one(forgetting(planted), "restored", client=1)
    assert pd.isna(row.value) and row.masked and row.n_examples == 0


@pytest.mark.parametrize("stack", ["on", "off"])
@pytest.mark.parametrize("images", [False, True])
def test_every_accuracy_and_loss_equals_scikit_learn(images, stack):
    """Random models (a chain of convolutions, or affine layers) on random data, every moment and slice."""
    torch.manual_seed(0)
    sizes = (70, 40, 31)
    if images:
        data, parts = helpers.images(sizes)
        net = nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 4)
        )
    else:
        data, parts = helpers.classification(sizes)
        net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    size = flatten(net).numel()
    rows = 0.5 * torch.randn(5, size, generator=torch.Generator().manual_seed(1)).double()
    made = history(
        net, data, parts, stored(rows[0], rows[1:4], rows[4]), dtype=torch.float64, stack=stack
    )
    frame = forgetting(made, min_count=1)
    everyone = np.arange(len(data.train_y))
    slices = {"test": (data.test_x, data.test_y)}
    for k, part in enumerate(parts):
        rest = np.setdiff1d(everyone, part)
        slices |= {
            f"client:{k}/train": (data.train_x[part], data.train_y[part]),
            f"client:{k}/others": (data.train_x[rest], data.train_y[rest]),
        }
    layout, checked = Layout.of(net), 0
    for row in frame[frame.metric.isin(["accuracy", "loss"]) & frame.n_clients.isna()].itertuples():
        w = rows[
            {"received": 0, "aggregated": 4}.get(
                row.moment, 1 + (0 if pd.isna(row.client) else int(row.client))
            )
        ]
        x, y = slices[row.slice]
        p = torch.func.functional_call(net, layout.views(w), (x.double(),)).softmax(1).numpy()
        if row.metric == "accuracy":
            assert row.value == accuracy_score(y, p.argmax(1)) and row.n_examples == len(y)
        else:
            assert row.value == pytest.approx(log_loss(y, p, labels=range(p.shape[1])), rel=1e-9)
        checked += 1
    assert checked == 2 * (2 * 7 + 3 * 3)
    x, y = slices["test"]
    for k in range(3):
        p = torch.func.functional_call(net, layout.views(rows[1 + k]), (x.double(),)).argmax(1)
        recall = recall_score(y, p, average=None, labels=range(data.classes), zero_division=np.nan)
        for c in range(data.classes):
            row = one(frame, "class_accuracy", moment="trained", client=k, index=c)
            assert (pd.isna(row.value) and np.isnan(recall[c])) or row.value == recall[c]


@pytest.mark.parametrize(("right", "n"), [(0, 7), (7, 7), (3, 11), (250, 297), (1, 1)])
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_intervals_are_wilsons(right, n, confidence):
    expected = binomtest(right, n).proportion_ci(confidence, "wilson")
    assert wilson(right, n, confidence) == pytest.approx((expected.low, expected.high), abs=1e-12)
    low, high = wilson(right, n, confidence)
    assert (low == 0) == (right == 0) and (high == 1) == (right == n)
    assert share(right, n, confidence) == {
        "value": right / n,
        "low": low,
        "high": high,
        "stderr": pytest.approx(binom.std(n, right / n) / n, abs=1e-15),
    }


def test_paired_standard_error_of_the_drop():
    data = separable()
    made = history(linear(), data, PARTS, stored(identity(), [always(2)], identity()))
    before, after = np.ones(100), np.r_[np.zeros(50), np.ones(25), np.zeros(25)]
    expected = np.std(before - after, ddof=1) / 10
    assert one(forgetting(made), "drop", client=0).stderr == pytest.approx(expected)


def test_too_few_examples_are_masked_not_zero_or_one():
    data = separable(test_per_class=(25, 4, 25, 0))
    made = history(
        linear(),
        data,
        [np.arange(0, 3), np.arange(3, 120)],
        stored(identity(), [always(0), identity()]),
    )
    frame = forgetting(made, min_count=5)
    few = frame[frame.n_examples < 5]
    few = few[~few.metric.isin(["class_examples", "unseen_classes"])]
    assert len(few) and few.value.isna().all() and few.masked.all()
    assert set(few["slice"]) == {"test", "client:0/train", "client:1/others"}
    assert frame[frame.metric == "class_accuracy"].groupby("index").value.apply(
        lambda v: v.isna().all()
    ).tolist() == [False, True, False, True]
    assert one(frame, "forgetting", client=0).value == 1  # of the classes that can be measured
    assert (
        forgetting(made, min_count=1)
        .query("metric == 'class_accuracy' and index == 1")
        .value.notna()
        .all()
    )


def test_backward_transfer_and_fluctuation():
    def aggregated(c, r):
        return stored(identity(), [identity(), identity()], c, round=r)

    made = history(
        linear(),
        separable(),
        PARTS,
        aggregated(identity(), 1),
        aggregated(always(0), 2),
        aggregated(always(1), 3),
    )
    frame = forgetting(made)
    assert (frame[frame.metric == "backward_transfer"]["round"] > 1).all()
    # round 3: class 1 as good as ever, the others lost from 1 to 0
    assert [one(frame, "backward_transfer", round=3, index=c).value for c in range(4)] == [
        -1,
        0,
        -1,
        -1,
    ]
    assert one(frame, "backward_transfer", round=3, index=None).value == -0.75
    assert [one(frame, "class_fluctuation", round=3, index=c).value for c in range(4)] == [
        1,
        1,
        0,
        0,
    ]


def test_an_unreadable_round_is_named_and_bridged_by_nothing():
    rounds = [stored(identity(), [always(0), identity()], identity(), round=r) for r in (1, 2, 3)]
    made = history(
        linear(),
        separable(),
        PARTS,
        rounds[0],
        FldiagError("0002.pt is damaged", "copy it again"),
        rounds[2],
    )
    frame = forgetting(made)
    assert (
        one(frame, "missing").note == "0002.pt is damaged" and one(frame, "missing")["round"] == 2
    )
    assert set(frame["round"].dropna()) == {1, 2, 3} and made.read == [1, 3]
    assert (
        "class_fluctuation" not in set(frame.metric)
        and (frame[frame.metric == "backward_transfer"]["round"] == 3).all()
    )


def test_rounds_without_clients_and_no_clients_at_all():
    bare = stored(identity(), [identity()], round=1).__class__(
        2, identity(), notes=("no client weights in this round",)
    )
    made = history(linear(), separable(), PARTS, stored(identity(), [identity()], round=1), bare)
    frame = forgetting(made)
    assert (
        set(frame[frame["round"] == 2].moment.dropna()) == {"aggregated"}
        and "no client weights" in one(frame, "missing").note
    )
    assert one(frame, "backward_transfer", round=2, index=None).value == 0
    with pytest.raises(
        FldiagError, match=r"no round with client weights.*checkpoint\.clients=sampled"
    ):
        forgetting(history(linear(), separable(), PARTS, bare))


def test_weights_that_are_no_numbers_are_masked_and_named():
    broken = identity().clone()
    broken[3] = float("nan")
    frame = forgetting(
        history(linear(), separable(), PARTS, stored(identity(), [broken, always(0)], identity()))
    )
    lost = frame[frame.metric.isin(["accuracy", "loss", "drop", "restored"])].query(
        "client == 0 and scope == 'client' and moment == 'trained'"
    )
    assert len(lost) == 8 and lost.value.isna().all() and lost.masked.all()
    assert one(frame, "missing").client == 0
    assert (
        one(frame, "accuracy", scope="global", moment="trained", slice="test").value == 0.25
    )  # of the client that is left


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_all_losses_of_weights_that_are_no_numbers_are_nan(odd):
    """Also where the odd entry does not reach an example's loss."""
    made = history(linear(), separable(), PARTS, stored(identity(), [identity()]))
    broken = identity().clone()
    broken[-1] = odd
    scores = made.evaluate([(broken, {}), (identity(), {})])
    assert (
        scores.valid.tolist() == [False, True]
        and np.isnan(scores.loss[0]).all()
        and np.isfinite(scores.loss[1]).all()
    )


def test_a_stranger_to_the_partition_is_left_out():
    good = stored(identity(), [identity()], round=1)
    odd = stored(identity(), [identity()], round=2, ids=[7])
    frame = forgetting(history(linear(), separable(), PARTS, good, odd))
    of_round = frame[(frame["round"] == 2) & frame["moment"].notna()]
    assert "client 7 is not in the partition of 2 clients" in one(frame, "missing").note and set(
        of_round["moment"]
    ) == {"aggregated"}


def test_regression_has_losses_only():
    q = helpers.quadratics((12, 9))
    net = nn.Sequential(nn.Linear(4, 1, bias=False))
    w = torch.ones(4).double()
    frame = forgetting(history(net, *q.data, stored(w, [2 * w, 0 * w]), dtype=torch.float64))
    assert set(frame.metric) == {"loss", "loss_std"}
    assert one(
        frame, "loss", moment="trained", client=0, slice="client:0/train"
    ).value == pytest.approx(float(q.loss(0, 2 * w)))
    assert one(
        frame, "loss", moment="trained", client=1, slice="client:1/others"
    ).value == pytest.approx(float(q.loss(0, 0 * w)))


def test_memory_holds_the_clients_of_one_round():
    """A round's client weights are gone when the next but one is read."""
    alive, most = [], []

    def reader(r):
        def read():
            most.append(sum(ref() is not None for ref in alive))
            made = stored(identity().clone(), [always(0), identity()], round=r)
            alive.append(weakref.ref(made.clients))
            return made

        return read

    made = History(linear(), separable(), PARTS, {r: reader(r) for r in range(1, 7)})
    forgetting(made)
    assert max(most) <= 1 and len(alive) == 6


def test_samples_keep_every_client_and_class_knowledge():
    made = history(
        linear(), separable(), PARTS, stored(identity(), [always(0), identity()]), samples=20
    )
    frame = forgetting(made)
    assert one(frame, "accuracy", client=0, moment="trained", slice="test").n_examples == 20
    assert (
        one(frame, "accuracy", client=1, moment="trained", slice="client:1/train").n_examples == 10
    )
    assert (
        one(frame, "class_examples", client=0, index=1).value == 30
    )  # what it holds, not what was looked at


@pytest.mark.parametrize(
    "executor", ["serial", pytest.param("processes:2", marks=pytest.mark.slow)]
)
def test_without_own_data_the_rest_is_the_same_to_the_bit_for_less(executor, tmp_path):
    run = fldiag.train(
        Config.load(
            "digits",
            rounds=2,
            model__name="mlp",
            train__epochs=1,
            clients__per_round=3,
            checkpoint__clients="sampled",
        ),
        out=tmp_path / "run",
    )
    rest = fldiag.diagnose(History.of(run), "forgetting", own=False, executor=executor)
    read = forgetting(History.of(run))
    kept = read[(read["slice"] == "test") | (read["metric"] == "class_examples")].reset_index(
        drop=True
    )
    assert len(kept) < len(read)
    pd.testing.assert_frame_equal(rest.reset_index(drop=True), kept, check_exact=True)


def test_the_ceiling_is_the_share_of_classes_that_clients_hold():
    from fldiag.diagnostics.forgetting.picture import ceiling

    held = [
        {"metric": "class_examples", "client": k, "index": c, "value": n}
        for k, counts in enumerate(([5, 0, 0, 3], [0, 0, 0, 9]))
        for c, n in enumerate(counts)
    ]
    assert ceiling(pd.DataFrame(held)) == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert (
        ceiling(pd.DataFrame([{**row, "value": 1} for row in held])) is None
    )  # all hold all: there is none
