"""Clients' own models: how they are tuned, what they are tested on, how they are counted."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import (
    classification,
    close,
    config,
    federation,
    images,
    play,
    quadratics,
    setup,
    terms,
)
from sklearn.neighbors import KNeighborsClassifier
from test_methods_personal import normed
from torch.nn import functional as F

import fldiag
from fldiag.data import Dataset
from fldiag.errors import FldiagError
from fldiag.execution import Workspace
from fldiag.method import Neighbours, Personal
from fldiag.runs.run import Run
from fldiag.seeding import seed_for
from fldiag.training import personalise as library
from fldiag.training import train
from fldiag.training.personalise import (
    EpochSchedule,
    GlobalModel,
    Predictor,
    fine_tune,
    measure,
    mix,
)
from fldiag.training.setup import Setup, setup_of

UNEQUAL = (20, 13, 7)
#: Class counts of three clients and of the test set; class 2 is rare there, class 3 absent.
HELD = ((6, 2, 0, 0), (1, 1, 2, 0), (0, 0, 5, 3))
TESTED = (700, 300, 4, 0)


def labelled(held=HELD, tested=TESTED, features=6, seed=0):
    """Clients with exactly these class counts, features around a centre for each class."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(len(tested), features))
    y, ty = np.concatenate([np.repeat(range(4), h) for h in held]), np.repeat(range(4), tested)
    x, tx = (
        torch.from_numpy(centres[v] + rng.normal(size=(len(v), features))).float() for v in (y, ty)
    )
    ends = np.cumsum([sum(h) for h in held])
    parts = [np.arange(end - sum(h), end) for h, end in zip(held, ends, strict=True)]
    return Dataset("labelled", x, torch.from_numpy(y), tx, torch.from_numpy(ty), 4), parts


def models(made: Setup, plan: Personal, w, *, buffers=None, seed=0, t=2, states=None, ids=None):
    """{(e, client): weights} and {(e, client): buffers}."""
    found = fine_tune(
        made,
        plan,
        GlobalModel(w, buffers or {}, states or {}, t),
        ids or range(len(made.parts)),
        seed,
        lambda models: models,
    )
    rows = {(m.e, i): m.rows[j] for m in found for j, i in enumerate(m.ids)}
    return rows, {
        (m.e, i): {n: b[j] for n, b in m.buffers.items()}
        for m in found
        for j, i in enumerate(m.ids)
    }


def trained(name="fedavg_ft", options=None, data=None, **train):
    made = federation(config(name, options, **train), data or classification(UNEQUAL))
    play(made, 2)
    return made


# -- fine-tuning


@pytest.mark.parametrize(("lr", "power"), [("decayed", 2), ("initial", 0)])
def test_fine_tuning_is_torch_sgd_from_the_global_model(lr, power):
    """Fresh momentum, weight decay, lr * lr_decay ** rounds; e epochs of the minibatches that ``EpochSchedule`` gives."""
    made = trained(lr_decay=0.5, momentum=0.9)
    rows, _ = models(made.setup, Personal((0, 1, 3), lr=lr), made.w)
    data = made.setup.dataset
    tuning = EpochSchedule(made.setup.config.replace(seed=library_seed(0)), 3, None)
    for i, part in enumerate(made.setup.parts):
        net, start = (
            made.setup.module,
            made.w.split([p.numel() for p in made.setup.module.parameters()]),
        )
        with torch.no_grad():
            for p, value in zip(net.parameters(), start, strict=True):
                p.copy_(value.view_as(p))
        optimizer = torch.optim.SGD(
            net.parameters(), lr=0.1 * 0.5**power, momentum=0.9, weight_decay=1e-3
        )
        plan = tuning.batches(2, i, len(part))
        assert len(plan) == 3 * math.ceil(len(part) / 8)
        assert sorted(np.concatenate(plan[: len(plan) // 3])) == list(range(len(part)))
        assert torch.equal(rows[0, i], made.w)
        for s, b in enumerate(plan, start=1):
            optimizer.zero_grad()
            F.cross_entropy(net(data.train_x[part[b]].double()), data.train_y[part[b]]).backward()
            optimizer.step()
            if s in (len(plan) // 3, len(plan)):
                mine = torch.cat([p.detach().flatten() for p in net.parameters()])
                torch.testing.assert_close(
                    rows[1 if s < len(plan) else 3, i], mine, rtol=1e-10, atol=1e-12
                )


def library_seed(seed):
    return seed_for(seed, "fine-tuning")


@pytest.mark.parametrize("stack", ["off", "on"])
def test_the_first_epochs_of_a_longer_training_are_those_of_a_shorter_one(stack):
    made = trained(stack=stack)
    together, _ = models(made.setup, Personal((1, 2, 5)), made.w)
    for e in (1, 2, 5):
        single, _ = models(made.setup, Personal((e,)), made.w)
        for i in range(3):
            close(together[e, i], single[e, i], terms=terms(made.setup.module, examples=e * 20))
    assert not torch.equal(together[1, 0], together[2, 0])


@pytest.mark.parametrize("name", ["fedavg_ft", "perfedavg", "fedbabu", "local_only"])
def test_a_stack_of_clients_is_tuned_as_one_by_one(name):
    looped = trained(name)
    stacked = federation(config(name, stack="on"), classification(UNEQUAL))
    plan = replace(looped.setup.method.personal, epochs=(0, 1, 4))
    one, _ = models(looped.setup, plan, looped.w, states=looped.clients)
    other, _ = models(stacked.setup, plan, looped.w, states=looped.clients)
    assert one.keys() == other.keys() and len(one) == 9
    for key in one:
        torch.testing.assert_close(other[key], one[key], rtol=1e-10, atol=1e-12)


def test_minibatches_depend_on_the_seed_alone_and_are_not_those_of_training():
    made = trained()
    plan = Personal((1,))
    first, again, other = (models(made.setup, plan, made.w, seed=s)[0][1, 0] for s in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    assert torch.equal(models(made.setup, plan, made.w)[0][1, 0], first)
    assert torch.equal(torch.random.get_rng_state(), state)
    mine = EpochSchedule(made.setup.config.replace(seed=library_seed(0)), 1, None).batches(2, 0, 20)
    assert not all(map(np.array_equal, mine, made.setup.schedule.batches(2, 0, 20)))


def test_fedbabu_tunes_the_head_too():
    made = trained("fedbabu")
    head = made.setup.network.layout.head_size
    rows, _ = models(made.setup, made.setup.method.personal, made.w)
    assert torch.equal(rows[0, 0], made.w)
    assert not torch.isclose(rows[1, 0][-head:], made.w[-head:]).any()
    plain, _ = models(made.setup, Personal((0, 1, 5)), made.w)
    assert all(torch.equal(rows[key], plain[key]) for key in plain)


def test_fedsol_tunes_without_perturbation():
    made = trained("fedsol_ft", {"rho": 3.0, "part": "full", "strength": "fixed", "loss": "l2"})
    plain = federation(config("fedavg_ft"), classification(UNEQUAL))
    mine, _ = models(made.setup, made.setup.method.personal, made.w)
    other, _ = models(plain.setup, plain.setup.method.personal, made.w)
    assert all(torch.equal(mine[key], other[key]) for key in other)


def test_perfedavg_tunes_by_its_own_steps():
    """On a quadratic with a client of twice the same data in a minibatch: e outer steps (L = 2, E = 5)."""
    q, eta, beta = quadratics((1,)), 0.2, 0.05
    made = federation(q.config("perfedavg", {"beta_outer": beta}, lr=eta, lr_decay=0.5), q.data)
    rows, _ = models(made.setup, replace(made.setup.method.personal, epochs=(1, 3)), made.w, t=2)
    w = made.w.clone()
    for e in (1, 2, 3):
        w = w - beta * q.gradient(0, w - eta * 0.5**2 * q.gradient(0, w))
        if e != 2:
            torch.testing.assert_close(rows[e, 0], w, rtol=1e-10, atol=1e-12)


def test_perfedavg_makes_so_many_steps():
    made = trained("perfedavg", {"tune_split": 3})  # halves of 4: L = 5, 4, 2
    plan = made.setup.method.personal
    tuning = EpochSchedule(made.setup.config, 5, plan.steps)
    assert [len(tuning.batches(0, i, n)) for i, n in enumerate(UNEQUAL)] == [5 * 2, 5 * 2, 5 * 1]
    one_pass = tuning.batches(0, 0, 20)[:3]
    assert sorted(np.concatenate(one_pass)) == list(
        range(20)
    )  # the next epoch goes on in the same pass


def test_batch_norm_statistics_are_the_clients_own():
    made = federation(config("fedavg_ft", batch_size=5), classification(UNEQUAL), module=normed())
    _, buffers = models(made.setup, Personal((0, 2)), made.w, buffers=made.buffers)
    x = made.setup.dataset.train_x[made.setup.parts[0]]
    assert torch.equal(buffers[0, 0]["norm.running_mean"], made.buffers["norm.running_mean"])
    assert (
        int(buffers[2, 0]["norm.num_batches_tracked"]) == 8
        and int(buffers[2, 2]["norm.num_batches_tracked"]) == 4
    )
    assert not torch.equal(buffers[2, 0]["norm.running_mean"], buffers[2, 1]["norm.running_mean"])
    predict = Predictor(made.setup, None, 0)
    eval_mode, _ = predict.outputs(made.w, buffers[2, 0], x)
    z = x.double() @ made.setup.module.body.weight.T + made.setup.module.body.bias
    z = (z - buffers[2, 0]["norm.running_mean"]) / (buffers[2, 0]["norm.running_var"] + 1e-5).sqrt()
    torch.testing.assert_close(eval_mode, made.setup.module.fc(torch.relu(z)), rtol=1e-9, atol=1e-9)


def test_local_only_measures_each_clients_own_weights():
    """Also of clients that were never sampled: theirs are the initial ones."""
    made = federation(config("local_only", total=3, per_round=1), classification(UNEQUAL))
    play(made, 2)
    rows, _ = models(made.setup, made.setup.method.personal, made.w, states=made.clients)
    assert len(made.clients) < 3
    for i in range(3):
        assert torch.equal(rows[0, i], made.clients[i]["own"] if i in made.clients else made.w)


# -- what is counted


def constant(made, favourite):
    """Weights with which the network answers one class always."""
    w = torch.zeros_like(made.w)
    w[-made.setup.dataset.classes + favourite] = 1.0
    return w


def test_matched_test_sets_by_hand():
    """floor(1000 n_c / n) examples of class c, or all there are: (700, 250), (250, 250, 4), (4)."""
    made = federation(config("fedavg_ft"), labelled())
    sizes = [{0: 700, 1: 250}, {0: 250, 1: 250, 2: 4}, {2: 4}]
    for favourite in range(3):
        rows = measure(
            made.setup, Personal((0,)), GlobalModel(constant(made, favourite), {}, {}, 1)
        )
        for row, size in zip(rows[:3], sizes, strict=True):
            n = sum(size.values())
            assert row["n_examples"] == n and row["value"] == size.get(favourite, 0) / n
            assert row["slice"] == f"client:{row['client']}/test" and row["index"] == 0


def test_mean_deviation_and_intervals_by_hand():
    made = federation(config("fedavg_ft"), labelled())
    rows = measure(made.setup, Personal((0,)), GlobalModel(constant(made, 0), {}, {}, 1))
    p = np.array([700 / 950, 250 / 504, 0.0])
    mean, std = rows[3:]
    assert mean["metric"] == "personal_accuracy" and mean["n_examples"] == 950 + 504 + 4
    close(mean["value"], p.sum() / 3, terms=3)
    assert std["metric"] == "personal_accuracy_std"
    close(std["value"], math.sqrt(((p - p.mean()) ** 2).sum() / 3), terms=6)
    close(mean["stderr"], math.sqrt(((p - p.mean()) ** 2).sum() / 2 / 3), terms=6)
    q, n, z = 700 / 950, 950, 1.959963984540054
    half = z / (1 + z**2 / n) * math.sqrt(q * (1 - q) / n + z**2 / (4 * n**2))
    centre = (q + z**2 / (2 * n)) / (1 + z**2 / n)
    assert (rows[0]["low"], rows[0]["high"]) == pytest.approx(
        (centre - half, centre + half), rel=1e-9
    )
    assert rows[0]["stderr"] == pytest.approx(math.sqrt(q * (1 - q) / n))
    assert rows[2]["low"] == 0 and rows[2]["high"] == pytest.approx(
        z**2 / (4 + z**2)
    )  # none of 4 right


def test_clients_without_test_examples_do_not_enter_the_mean():
    made = federation(
        config("fedavg_ft"), labelled(held=((4, 4, 0, 0), (0, 0, 0, 6), (4, 0, 0, 0)))
    )
    rows = measure(made.setup, Personal((0,)), GlobalModel(constant(made, 0), {}, {}, 1))
    assert rows[1]["n_examples"] == 0 and "value" not in rows[1]
    assert rows[3]["value"] == pytest.approx(
        (500 / 800 + 1) / 2
    )  # 500 of class 0, the 300 there are of class 1


def test_a_model_that_is_not_finite_is_right_nowhere():
    made = federation(config("fedavg_ft"), labelled())
    rows = measure(
        made.setup, Personal((0,)), GlobalModel(torch.full_like(made.w, torch.nan), {}, {}, 1)
    )
    assert [row["value"] for row in rows[:3]] == [0.0, 0.0, 0.0]


# -- neighbours


@pytest.mark.parametrize("k", [1, 5, 40])
def test_votes_are_those_of_scikit_learn(k):
    rng = np.random.default_rng(0)
    store, x, labels = rng.normal(size=(30, 7)), rng.normal(size=(12, 7)), rng.integers(0, 3, 30)
    scale = 0.3
    peer = KNeighborsClassifier(min(k, 30), weights=lambda d: np.exp(-(d**2) / (7 * scale))).fit(
        store, labels
    )
    mine = mix(
        torch.zeros(12, 3).double(),
        torch.from_numpy(x),
        torch.from_numpy(store),
        torch.from_numpy(labels),
        Neighbours(1.0, k, 500, scale),
    )
    np.testing.assert_allclose(mine.numpy(), peer.predict_proba(x), rtol=1e-10, atol=1e-12)


def test_the_mixture_by_hand():
    """One neighbour of class 1 at distance 0 and one of class 0 at squared distance 2 ln 3, dim = 2: shares 3/4, 1/4."""
    logits = torch.tensor([[math.log(4.0), 0.0]], dtype=torch.float64)  # p = (0.8, 0.2)
    store = torch.tensor(
        [[0.0, 0.0], [math.sqrt(2 * math.log(3)), 0.0], [9.0, 0.0]], dtype=torch.float64
    )
    common = (logits, torch.zeros(1, 2).double(), store, torch.tensor([1, 0, 0]))
    close(
        mix(*common, Neighbours(0.6, 2)),
        [[0.6 * 0.25 + 0.4 * 0.8, 0.6 * 0.75 + 0.4 * 0.2]],
        terms=4,
    )
    close(
        mix(*common, Neighbours(0.6, 2, logits=True)),
        [[0.6 * 0.25 + 0.4 * math.log(4.0), 0.6 * 0.75]],
        terms=4,
    )
    far = mix(
        logits, torch.full((1, 2), 1e4).double(), store, torch.tensor([1, 0, 0]), Neighbours(1.0, 2)
    )
    assert far.isfinite().all() and float(far.sum()) == pytest.approx(
        1
    )  # where exp(-d^2) is 0 for every neighbour


@pytest.mark.parametrize("e", [0, 1])
def test_weight_0_is_the_fine_tuned_model(e):
    """T-KNN-1."""
    made = trained("knnper", data=labelled())
    alone = measure(made.setup, Personal((e,)), GlobalModel(made.w, {}, {}, 2))
    mixed = measure(
        made.setup,
        Personal((e,), neighbours=Neighbours(weight=0.0)),
        GlobalModel(made.w, {}, {}, 2),
    )
    votes = measure(
        made.setup,
        Personal((e,), neighbours=Neighbours(weight=1.0)),
        GlobalModel(made.w, {}, {}, 2),
    )
    assert [row["value"] for row in alone] == [row["value"] for row in mixed]
    assert [row["value"] for row in alone] != [row["value"] for row in votes]
    assert {row["prediction"] for row in mixed} == {"model and neighbours"}


@pytest.mark.parametrize("data", [labelled(), images()], ids=["features", "images"])
def test_one_neighbour_gives_training_points_their_own_label(data):
    """T-KNN-2, with the training set as test set."""
    dataset, _ = data
    dataset = replace(dataset, test_x=dataset.train_x, test_y=dataset.train_y)
    model = {"model": "small_cnn", "model_options": {}} if dataset.train_x.ndim == 4 else {}
    made = federation(config("knnper", **model), (dataset, [np.arange(len(dataset.train_y))]))
    rows = measure(
        made.setup, Personal((0,), neighbours=Neighbours(1.0, 1)), GlobalModel(made.w, {}, {}, 0)
    )
    assert rows[0]["n_examples"] >= 20 and rows[0]["value"] == 1.0
    few = measure(
        made.setup,
        Personal((0,), neighbours=Neighbours(1.0, 1, capacity=2)),
        GlobalModel(made.w, {}, {}, 0),
    )
    assert few[0]["value"] < 1.0


def test_the_store_is_a_random_subset_of_the_clients_examples():
    made = federation(config("knnper"), classification(UNEQUAL))
    predict = Predictor(made.setup, Neighbours(capacity=6), 0)
    first = predict.store(0, 20)
    assert (
        len(set(first.tolist())) == 6
        and first.max() < 20
        and np.array_equal(first, predict.store(0, 20))
    )
    assert not np.array_equal(first, predict.store(1, 20))
    assert np.array_equal(predict.store(2, 4), np.arange(4))


# -- runs


def personalise(run, *, setup=None, **options):
    where = {k: options.pop(k) for k in ("model", "data") if k in options}
    return library.of_run(run, setup or setup_of(run, **where), **options)


def small(name="fedavg_ft", **more):
    return config(name, rounds=2, total=4, per_round=2, **more)


@pytest.mark.parametrize(
    "name", ["fedavg_ft", "fedsol_ft", "fedbabu", "knnper", "perfedavg", "local_only"]
)
@pytest.mark.slow
def test_a_run_ends_with_what_the_command_would_say(name, tmp_path):
    run = train.train(
        small(name, batch_size=4, epochs=4, lr=0.03, model_options={"hidden": (16,)}), out=tmp_path
    )
    frame = run.metrics[run.metrics["metric"].str.startswith("personal")].reset_index(drop=True)
    asked = personalise(run)
    epochs = [0] if name == "local_only" else [0, 1, 5]
    assert sorted(set(asked["index"])) == epochs and len(asked) == len(epochs) * (4 + 2)
    shared = [c for c in frame.columns if c in asked.columns]
    assert frame[shared].equals(asked[shared]) and {"low", "high", "value", "n_examples"} <= set(
        shared
    )
    assert asked[asked["scope"] == "client"]["value"].nunique() > 1
    assert (
        set(asked["round"]) == {2}
        and set(asked["moment"]) == {"trained"}
        and set(asked["method"]) == {name}
    )


def test_any_run_can_be_asked_afterwards(tmp_path):
    run = train.train(small("scaffold"), out=tmp_path)
    assert not run.metrics["metric"].str.startswith("personal").any()
    whole = personalise(Run.open(tmp_path))
    assert sorted(set(whole["index"])) == [0, 1, 5]
    one = personalise(run, epochs=[1])
    assert one["value"].tolist() == whole[whole["index"] == 1]["value"].tolist()
    assert Run.open(tmp_path).about == run.about  # asking changes nothing in the run


def test_interrupted_while_personalising_goes_on_there(tmp_path, monkeypatch):
    whole = train.train(small(), out=tmp_path / "whole")

    def stop(event):
        if event["event"] == "personalise":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train.train(small(), out=tmp_path / "cut", on_event=stop)
    half = Run.open(tmp_path / "cut")
    assert half.status == "unfinished" and half.done == 2 and half.rounds == [1, 2]
    with pytest.raises(FldiagError, match="interrupted after 2 of 2"):
        personalise(half)
    # killed between the metrics and run.json: the rows are there already, and must not come twice
    real = Run.commit
    monkeypatch.setattr(
        Run,
        "commit",
        lambda run: real(run) if run.status != "finished" else stop({"event": "personalise"}),
    )
    with pytest.raises(KeyboardInterrupt):
        train.train(small(), out=tmp_path / "cut", resume=True)
    monkeypatch.undo()
    events = []
    cut = train.train(
        small(), out=tmp_path / "cut", resume=True, on_event=lambda e: events.append(e["event"])
    )
    assert cut.status == "finished" and "round" not in events and "personalise" in events
    assert cut.metrics.drop(columns="run").equals(whole.metrics.drop(columns="run"))
    assert train.train(small(), out=tmp_path / "cut", resume=True).status == "finished"


def test_the_same_question_is_answered_from_the_cache(tmp_path, monkeypatch):
    run = train.train(small(), out=tmp_path / "run")

    def ask(told=None, **options):
        return fldiag.diagnose(run, "personalise", cache=tmp_path / "cache", tell=told, **options)

    first = ask()
    monkeypatch.setattr(library, "measure", lambda *a, **k: pytest.fail("measured again"))
    assert ask().equals(first)
    for other in (
        {"epochs": "2"},
        {"seed": 1},
        {"lr": "initial"},
    ):
        with pytest.raises(pytest.fail.Exception):
            ask(**other)
    [kept] = (tmp_path / "cache").glob("*.parquet")
    monkeypatch.undo()
    kept.write_bytes(b"damaged")
    told = []
    assert ask(told.append).equals(first)
    assert told == [f"cache entry {kept.stem} was damaged and is computed again"]


def test_progress_counts_clients(tmp_path):
    run, seen = train.train(small(stack="off"), out=tmp_path), []
    with Workspace(progress=lambda done, total, text: seen.append(4 * done / total)):
        personalise(run, epochs=[0, 1])
    assert seen == sorted(seen) and set(seen) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"epochs": []}, "at least 0"),
        ({"epochs": [-1]}, "at least 0"),
        ({"epochs": [1.5]}, "at least 0"),
        ({"data": "digits"}, "leave out --data"),
    ],
)
def test_wrong_questions(options, expected, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "asked"
    run = Run.open(folder) if folder.exists() else train.train(small(), out=folder)
    with pytest.raises(FldiagError, match=expected) as caught:
        personalise(run, **options)
    assert caught.value.usage and caught.value.remedy
    with pytest.raises(FldiagError, match="decayed"):
        fldiag.diagnose(run, "personalise", lr="final")


def test_regression_has_no_class_mixture(tmp_path):
    q = quadratics()
    chosen = q.config("fedavg_ft", rounds=1)
    run = train.train(chosen, out=tmp_path, setup=setup(chosen, q.data))
    assert run.status == "finished" and not run.metrics["metric"].str.startswith("personal").any()
    with pytest.raises(FldiagError, match="real targets"):
        personalise(run, setup=setup(chosen, q.data))


def test_a_run_cannot_name_code_to_run(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import torch\ndef net(): return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run = train.train(small(model="mine:net", model_options={}), out=tmp_path / "run")
    with pytest.raises(FldiagError, match="--allow-code mine:net"):
        personalise(run)
    assert len(personalise(run, model="mine:net")) == 18


def test_other_data_under_the_same_name_are_refused(tmp_path):
    run = train.train(small(), out=tmp_path)
    run.about["provenance"]["data"] = "0" * 16
    with pytest.raises(FldiagError, match="is not the one"):
        personalise(run)


def test_a_diverged_run_has_no_final_model(tmp_path):
    run = train.train(small(lr=1e200), out=tmp_path)
    assert run.status == "diverged"
    with pytest.raises(FldiagError, match="diverged"):
        personalise(run)


def test_no_examples_no_steps():
    tuning = EpochSchedule(
        SimpleNamespace(seed=0, train=SimpleNamespace(batch_size=8, drop_last=True)),
        3,
        lambda n, train: 2,
    )
    assert tuning.batches(0, 0, 5) == [] and tuning.count(3, 5) == 0
    assert len(tuning.batches(0, 0, 17)) == 6 and all(len(b) == 8 for b in tuning.batches(0, 0, 17))
