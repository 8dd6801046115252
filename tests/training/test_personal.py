"""Clients' own models: fine-tuned as torch does it, tested on each client's own mixture, counted as the table says."""

import copy
import math

import numpy as np
import pytest
import torch
from helpers import normed
from reference import clients_of, train, value, values, vector
from sklearn.neighbors import KNeighborsClassifier
from torch import nn
from torch.nn import functional as F

import fldiag
from fldiag.data import Dataset, take
from fldiag.method import Neighbours, PersonalPlan
from fldiag.training.client import MOMENTUM
from fldiag.training.personalise import count_right, fine_tune, mix
from fldiag.training.server import Federation
from fldiag.training.setup import Setup, setup_of

RNG = np.random.default_rng(0)
CENTRES = RNG.normal(size=(3, 6))
SMALL = {"rounds": 2, "clients__per_round": 4, "clients__total": 6, "train__epochs": 1}
SMALL |= {"model__name": "mlp", "train__lr": 0.1, "partition__alpha": 1.0}


def examples(n):
    y = RNG.integers(0, 3, n)
    return torch.from_numpy(CENTRES[y] + RNG.normal(size=(n, 6))).float(), torch.from_numpy(y)


DATA = Dataset("blobs", *examples(60), *examples(2000), 3)
PARTS = [np.arange(30), np.arange(30, 50), np.arange(50, 60)]


def setup(module, **options):
    """Batches of all examples, so that their order does not matter."""
    options |= {"train__batch_size": 100, "train__precision": "fp64", "clients__total": 3}
    options |= {"clients__per_round": 3, "train__lr": 0.3, "train__lr_decay": 0.5}
    config = fldiag.Config.load("digits", train__momentum=0.9, **options)
    return Setup(config, dataset=DATA, parts=PARTS, module=module)


@pytest.mark.parametrize("lr", ["decayed", "initial"])
@pytest.mark.parametrize("kind", [lambda: nn.Linear(6, 3), normed], ids=["linear", "batch-norm"])
def test_fine_tuning_is_torchs_sgd_from_the_global_model(kind, lr):
    torch.manual_seed(0)
    net = kind()
    options = {"train__local_decay": 0.1, "train__keep_momentum": True}
    start, accuracies = Federation(setup(net, train__weight_decay=0.01, **options)), {}
    start.t = 2
    start.clients = {k: {MOMENTUM: torch.randn_like(start.w)} for k in range(3)}  # has no effect
    rows = fine_tune(start, PersonalPlan((0, 1, 4), lr=lr))
    for k, part in enumerate(PARTS):
        own = copy.deepcopy(net).double()
        rate = 0.3 * (0.5**2 if lr == "decayed" else 1)
        sgd = torch.optim.SGD(own.parameters(), rate, momentum=0.9, weight_decay=0.01)
        x, y = take(DATA, f"client:{k}/test", PARTS).batch(0, 10**6)
        for e in range(5):
            own.eval()
            right = (own(x.double()).argmax(1) == y).double().mean().item()
            accuracies[e, k] = right
            own.train()
            sgd.zero_grad()
            F.cross_entropy(own(DATA.train_x[part].double()), DATA.train_y[part]).backward()
            sgd.step()
    for e in (0, 1, 4):
        mine = {
            row["client"]: row["value"] for row in rows if row["index"] == e and "client" in row
        }
        assert mine == pytest.approx({k: accuracies[e, k] for k in range(3)}, abs=1e-12)
        mean, std = (row["value"] for row in rows if row["index"] == e and "client" not in row)
        true = [accuracies[e, k] for k in range(3)]
        assert (mean, std) == pytest.approx((np.mean(true), np.std(true)), abs=1e-12)
    assert len({accuracies[e, 0] for e in (0, 1, 4)}) > 1


@pytest.mark.parametrize("stack", ["on", "off"])
def test_the_first_epochs_of_a_longer_training_are_those_of_a_shorter_one(stack, tmp_path):
    run = train(tmp_path / "run", train__stack=stack, **SMALL)
    tables = [fldiag.diagnose(run, "personalise", epochs=e) for e in ("0,1,2", "1", (2,))]
    for e, table in ((1, tables[1]), (2, tables[2])):
        mine = [values(t, "personal_accuracy", scope="client", index=e) for t in (tables[0], table)]
        assert len(mine[0]) == 6 and list(mine[0]) == list(mine[1])
    other = fldiag.diagnose(run, "personalise", epochs="2", seed=5)
    shorter = values(tables[2], "personal_accuracy", scope="client")
    assert list(values(other, "personal_accuracy", scope="client")) != list(shorter)


@pytest.mark.parametrize("name", ["fedavg_ft", "knnper", "fedbabu", "perfedavg"])
def test_a_run_ends_with_what_the_command_would_say(name, tmp_path):
    run = train(tmp_path / "run", method__name=name, **SMALL)
    end = run.metrics[run.metrics["metric"].str.startswith("personal_accuracy")]
    asked = fldiag.diagnose(run, "personalise")
    asked = asked[asked["metric"].str.startswith("personal_accuracy")]
    columns = ["metric", "client", "index", "value", "stderr", "n_examples"]
    assert end[columns].astype(str).values.tolist() == asked[columns].astype(str).values.tolist()
    assert (asked["prediction"] != "model").all() == (name == "knnper")


def test_local_only_tests_each_clients_own_weights(tmp_path):
    run = train(tmp_path / "run", method__name="local_only", checkpoint__clients="sampled", **SMALL)
    table = fldiag.diagnose(run, "personalise", epochs="0")
    last, made = run.checkpoint(), setup_of(run)
    for client, w in clients_of(last).items():
        right, n = count_right(made, client, w[None], {})
        assert value(table, "personal_accuracy", client=client) == pytest.approx(right / n)
        assert (right, n) != count_right(made, client, vector(last.state)[None], {})


def test_intervals_are_wilsons_and_predictions_that_are_not_finite_are_wrong():
    made = setup(nn.Linear(6, 3))
    rows = fine_tune(Federation(made), PersonalPlan((0,)))
    p, n, z = rows[0]["value"], rows[0]["n_examples"], 1.959963984540054
    centre, half = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    low, high = ((centre + sign * half) / (1 + z**2 / n) for sign in (-1, 1))
    assert (rows[0]["low"], rows[0]["high"]) == pytest.approx((low, high), rel=1e-9)
    broken = torch.full_like(made.initial(), torch.nan)
    assert count_right(made, 0, broken[None], {}) == (0, n)


@pytest.mark.parametrize("k", [1, 5, 40])
def test_votes_are_those_of_scikit_learn(k):
    store, x, labels = RNG.normal(size=(30, 7)), RNG.normal(size=(12, 7)), RNG.integers(0, 3, 30)
    weigh = {"weights": lambda d: np.exp(-(d**2) / (7 * 0.3))}
    peer = KNeighborsClassifier(min(k, 30), **weigh).fit(store, labels)
    rows = (torch.from_numpy(a) for a in (x, store, labels))
    mine = mix(torch.zeros(12, 3).double(), *rows, Neighbours(1.0, k, 500, 0.3))
    np.testing.assert_allclose(mine.numpy(), peer.predict_proba(x), rtol=1e-10, atol=1e-12)


def test_the_mixture_by_hand():
    """One neighbour of class 1 at distance 0 and one of class 0 at squared distance 2 ln 3, dim = 2: shares 3/4, 1/4."""
    logits = torch.tensor([[math.log(4.0), 0.0]]).double()  # p = (0.8, 0.2)
    store = torch.tensor([[0.0, 0.0], [math.sqrt(2 * math.log(3)), 0.0], [9.0, 0.0]]).double()
    features, labels = torch.zeros(1, 2).double(), torch.tensor([1, 0, 0])
    mixed = mix(logits, features, store, labels, Neighbours(0.6, 2))
    assert mixed.tolist()[0] == pytest.approx(
        [0.6 * 0.25 + 0.4 * 0.8, 0.6 * 0.75 + 0.4 * 0.2], rel=1e-6
    )
    far = mix(logits, features + 1e4, store, labels, Neighbours(1.0, 2))
    assert far.isfinite().all() and float(far.sum()) == pytest.approx(1)


def test_runs_without_a_final_model_are_refused(tmp_path):
    run = train(tmp_path / "run", **SMALL | {"train__lr": 1e30})
    assert run.status == "diverged" and value(run.metrics, "diverged") == 1
    with pytest.raises(fldiag.FldiagError, match="is diverged or was trained by another program"):
        fldiag.diagnose(run, "personalise")
