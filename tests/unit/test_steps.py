"""Recorded local steps: what the numbers are, against plain autograd, and that recording leaves training alone."""

import hashlib
import json

import helpers
import pandas as pd
import pytest
import torch
from histories import one
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import fldiag
from fldiag.config import Config
from fldiag.errors import FldiagError
from fldiag.identity import ADDED_KEYS
from fldiag.results.table import check, columns, table
from fldiag.runs.history import History
from fldiag.runs.run import Run
from fldiag.sections import MetricsSection
from fldiag.training import train
from fldiag.training.setup import Setup

KL = {"metrics__proximal": "kl"}
CASES = [
    ("fedavg", {}),
    ("fedsol", {}),
    ("fedsol", {"loss": "l2"}),
    ("fedsol", {"part": "body", "lambda_norm": "dim0"}),
    ("fedsol", {"loss": "feddyn"}),
    ("fedprox", {"mu": 0.5}),
    ("gradient_projection", {}),
    ("gradient_projection", {"loss": "l2"}),
    ("strategy", {"id": "A4"}),
    ("strategy", {"id": "A6"}),
    ("scaffold", {}),
    ("perfedavg", {}),
    ("mixup", {}),
]


def recorded(made, **metrics):
    return made.replace(metrics__steps=True, **metrics)


# -- training is left alone


@pytest.mark.parametrize("stack", ["off", "on"])
@pytest.mark.parametrize(("name", "options"), CASES, ids=map(helpers.label, CASES))
def test_recording_changes_no_bit(name, options, stack):
    plain = helpers.config(name, options, stack=stack, precision="fp32", momentum=0.9)
    data = helpers.classification((20, 13, 7))
    made = [
        helpers.federation(c, data)
        for c in (plain, *(recorded(plain, metrics__proximal=p) for p in ("own", "kl", "l2")))
    ]
    without, *noted = ([trained for _, trained in helpers.play(m, 2)] for m in made)
    for other, notes in zip(made[1:], noted, strict=True):
        assert torch.equal(made[0].w, other.w)
        for a, b in zip(without, notes, strict=True):
            assert torch.equal(a.rows, b.rows) and torch.equal(a.loss, b.loss)
            assert all(torch.equal(a.state[k], b.state[k]) for k in a.state)
            assert a.notes is None and len(b.notes) > 0


class Noisy(nn.Module):
    """Batch-norm with running statistics, dropout, and a head."""

    def __init__(self):
        super().__init__()
        self.body, self.norm, self.drop, self.fc = (
            nn.Linear(6, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.4),
            nn.Linear(8, 3),
        )

    def features(self, x):
        return self.drop(torch.relu(self.norm(self.body(x))))

    def forward(self, x):
        return self.fc(self.features(x))


@pytest.mark.parametrize("name", ["fedavg", "fedsol", "fedsam"])
def test_statistics_and_random_numbers_of_layers_are_left_alone(name):
    plain, data = helpers.config(name, precision="fp32"), helpers.classification((20, 13, 7))
    torch.manual_seed(0)
    net = Noisy()
    made = [helpers.federation(c, data, module=net) for c in (plain, recorded(plain, **KL))]
    state = torch.get_rng_state()
    for m in made:
        helpers.play(m, 2)
    assert torch.equal(made[0].w, made[1].w)
    assert all(torch.equal(b, made[1].buffers[n]) for n, b in made[0].buffers.items())
    assert torch.equal(state, torch.get_rng_state())


# -- what the numbers are


def naive(made, w, x, y, w_g, tau=3.0):
    """Local loss and gradient, KL to the received model and its gradient, with torch alone."""
    layout = made.setup.network.layout

    def outputs(v):
        return functional_call(made.setup.module, layout.views(v), (x,))

    def gradient(value):
        leaf = w.clone().requires_grad_()
        loss = value(leaf)
        return float(loss.detach()), torch.autograd.grad(loss, leaf)[0]

    teacher = F.log_softmax(outputs(w_g).detach() / tau, -1)
    return (
        gradient(lambda v: F.cross_entropy(outputs(v), y)),
        gradient(
            lambda v: F.kl_div(
                F.log_softmax(outputs(v) / tau, -1), teacher, reduction="batchmean", log_target=True
            )
        ),
    )


def spied(config, data):
    """One client's round: notes, and of every step w, e, the minibatch; and the weights received and made."""
    made = helpers.federation(config, data)
    spy, received = helpers.trace(made, raw=True), made.w.clone()
    batches = made.setup.schedule.batches(0, 0, len(data[1][0]))
    ((_, trained),) = helpers.play(made, 1)
    x, y = data[0].train_x[data[1][0]].double(), data[0].train_y[data[1][0]]
    steps = [
        (w[0], e[0] if spy.e else 0 * w[0], x[b], y[b])
        for w, e, b in zip(spy.w, spy.e or spy.w, batches, strict=True)
    ]
    return made, trained.notes, steps, received, trained.rows[0]


@pytest.mark.parametrize(
    ("name", "options", "proximal"),
    [
        ("fedavg", {}, "kl"),
        ("fedavg", {}, "l2"),
        ("fedsol", {"part": "full"}, "own"),
        ("fedsol", {}, "kl"),
        ("fedsol", {}, "own"),
        ("fedsol", {"loss": "l2", "strength": "fixed"}, "own"),
        ("fedprox", {"mu": 0.5}, "own"),
        ("fedsam", {}, "kl"),
        ("fedsol", {"loss": "l2"}, "kl"),
    ],
)
def test_every_number_equals_autograds(name, options, proximal):
    data = helpers.classification((20,))
    made, notes, steps, received, end = spied(
        recorded(helpers.config(name, options, total=1, momentum=0.9), metrics__proximal=proximal),
        data,
    )
    head = made.setup.network.layout.head_size
    kl = proximal == "kl" or (
        proximal == "own" and name == "fedsol" and options.get("loss") != "l2"
    )
    head_only = name == "fedsol" and proximal == "own" and not options
    after = [w for w, *_ in steps[1:]] + [end]
    assert len(steps) == 6
    for i, (w, e, x, y) in enumerate(steps, start=1):
        rows = notes[notes["index"] == i]
        (loss, g_u), _ = naive(made, w + e, x, y, received)
        _, (divergence, g_p) = naive(made, w, x, y, received)
        if not kl:
            divergence, g_p = 0.5 * float((w - received).square().sum()), w - received
        assert one(rows, "loss").value == pytest.approx(loss, rel=1e-9) and one(
            rows, "loss"
        ).n_examples == len(y)
        assert one(rows, "grad_norm").value == pytest.approx(float(g_u.norm()), rel=1e-9)
        assert one(rows, "update_norm").value == pytest.approx(
            float((after[i - 1] - received).norm()), rel=1e-9
        )
        assert one(rows, "proximal_loss").value == pytest.approx(divergence, rel=1e-8, abs=1e-15)
        assert one(rows, "proximal_loss").proximal == ("kl:3" if kl else "l2")
        found = rows[rows.metric == "cos_gu_gp"]
        if i == 1:  # g_p is rounding noise
            assert found.empty
            continue
        assert len(found) == (1 if head_only else 2)
        if not head_only:
            assert one(found, "cos_gu_gp", layer=None).value == pytest.approx(
                float(F.cosine_similarity(g_u, g_p, 0)), rel=1e-7
            )
        expected = float(F.cosine_similarity(g_u[-head:], g_p[-head:], 0))
        assert one(found, "cos_gu_gp", layer="part:head").value == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("per", ["layer", "tensor"])
def test_strengths_are_those_of_the_definition(per):
    config = recorded(helpers.config("fedsol", {"part": "full", "lambda_norm": per}, total=1))
    made, notes, steps, received, _ = spied(config, helpers.classification((20,)))
    layout = made.setup.network.layout
    groups = layout.layers if per == "layer" else {n: (n,) for n in layout.names}
    rows = notes[notes.metric == "lambda_mean"]
    assert set(rows["index"]) == set(range(2, 7)) and set(rows.layer) == set(
        groups
    )  # at first nothing has moved
    for i, (w, *_) in enumerate(steps[1:], start=2):
        moved = layout.views((w - received).abs())
        for layer, names in groups.items():
            d = torch.cat([moved[n].flatten() for n in names])
            row = one(rows[rows["index"] == i], "lambda_mean", layer=layer)
            assert row.value == pytest.approx(float((d / d.norm()).mean()), rel=1e-9)
            assert (
                row.scaled == pytest.approx(float((d / d.norm()).mean()) * len(d) ** 0.5, rel=1e-9)
                and row.scaled <= 1
            )


def metrics_of(name, options=None, **metrics):
    config = recorded(helpers.config(name, options or {}), **metrics)
    ((_, trained),) = helpers.play(
        helpers.federation(config, helpers.classification((20, 13, 7))), 1
    )
    return trained.notes


def test_nothing_is_invented():
    plain = {"loss", "grad_norm", "update_norm"}
    for name, options in (
        ("fedavg", {}),
        ("fedprox", {"mu": 0.0}),
        ("fedsol", {"rho": 0.0}),
        ("fedntd", {}),
    ):
        assert set(metrics_of(name, options).metric) == plain, name
    assert set(metrics_of("fedsol", {"strength": "fixed"}).metric) == plain | {
        "cos_gu_gp",
        "proximal_loss",
    }
    assert set(metrics_of("fedsol", {"loss": "feddyn"}).metric) == plain | {
        "cos_gu_gp",
        "lambda_mean",
    }  # a gradient, no value
    assert set(metrics_of("fedsol", {"loss": "feddyn"}).proximal.dropna()) == {"own"}


@pytest.mark.parametrize("loss", ["kl", "l2"])
def test_a_projected_gradient_has_no_conflict_left(loss):
    def cosines(*args, **metrics):
        notes = metrics_of(*args, **metrics)
        return notes[(notes.metric == "cos_gu_gp") & notes.layer.isna()].value.astype(float)

    assert cosines("gradient_projection", {"loss": loss}).min() > -1e-9
    assert cosines("gradient_projection", {"loss": loss}, metrics__proximal=loss).min() > -1e-9
    assert cosines("fedavg", metrics__proximal=loss).min() < -0.1


def test_another_loss_is_compared_with_the_projected_gradient_too():
    config = recorded(helpers.config("gradient_projection", {"loss": "l2"}, total=1), **KL)
    made, notes, steps, received, _ = spied(config, helpers.classification((20,)))
    for i, (w, _, x, y) in enumerate(steps[1:], start=2):
        (_, g), (_, g_p) = naive(made, w, x, y, received)
        d = w - received
        g_u = g - min(0.0, float(g @ d / (d @ d))) * d
        row = one(notes[notes["index"] == i], "cos_gu_gp", layer=None)
        assert (
            row.value == pytest.approx(float(F.cosine_similarity(g_u, g_p, 0)), rel=1e-7)
            and row.proximal == "kl:3"
        )


def test_every_client_has_its_own_steps_and_minibatches():
    notes = metrics_of("fedavg")
    rows = notes[notes.metric == "loss"]
    assert rows.groupby("client")["index"].apply(list).to_dict() == {
        0: [1, 2, 3, 4, 5, 6],
        1: [1, 2, 3, 4],
        2: [1, 2],
    }
    assert rows.groupby("client").n_examples.apply(list).to_dict() == {
        0: [8, 8, 4] * 2,
        1: [8, 5] * 2,
        2: [7, 7],
    }


@pytest.mark.parametrize(("name", "options"), CASES, ids=map(helpers.label, CASES))
@pytest.mark.parametrize("proximal", ["own", "kl"])
@pytest.mark.slow
def test_a_stack_records_what_its_clients_would(name, options, proximal):
    found = []
    for stack in ("off", "on"):
        config = recorded(
            helpers.config(name, options, stack=stack, momentum=0.9), metrics__proximal=proximal
        )
        notes = [
            t.notes
            for _, t in helpers.play(
                helpers.federation(config, helpers.classification((7, 20, 13))), 2
            )
        ]
        assert all(n.client.is_monotonic_increasing and set(n.client) == {0, 1, 2} for n in notes)
        found.append(pd.concat(notes, ignore_index=True))
    keys = ["client", "index", "metric", "layer", "proximal", "n_examples"]
    pd.testing.assert_frame_equal(found[0][keys], found[1][keys])
    pd.testing.assert_frame_equal(
        found[0][["value", "scaled"]], found[1][["value", "scaled"]], rtol=1e-7, atol=1e-10
    )


# -- runs


def small(name="fedsol", rounds_=4, **more):
    return recorded(
        helpers.config(
            name, rounds=rounds_, total=4, per_round=2, checkpoint={"clients": "sampled", **more}
        ),
        **KL,
    )


def test_a_run_keeps_a_table_a_round(tmp_path):
    run = train.train(small(), out=tmp_path)
    assert Run.open(tmp_path).recorded == [1, 2, 3, 4]
    frame = check(run.steps())
    assert list(frame.dtypes.astype(str)[:19]) == list(table([]).dtypes.astype(str))
    assert (
        set(frame.run) == {tmp_path.name}
        and set(frame.method) == {"fedsol"}
        and set(frame.scope) == {"client"}
    )
    for r in run.rounds:
        part = run.steps(r)
        assert set(part["round"]) == {r} and set(part.client) == set(run.checkpoint(r).client_ids)
        assert (part["slice"] == "client:" + part.client.astype(str) + "/train").all()
        last = part[part.metric == "update_norm"].groupby("client").value.last()
        moved = (run.checkpoint(r).clients - run.checkpoint(r).received).norm(dim=1)
        assert last.astype(float).tolist() == pytest.approx(moved.tolist(), rel=1e-9)
    assert set(run.metrics.metric) == {"accuracy", "loss", "minibatch_loss", "uplink", "downlink"}
    with pytest.raises(FldiagError, match=r"no local steps of round 9.*4 rounds up to 4"):
        run.steps(9)


def test_a_run_that_records_nothing_is_as_before(tmp_path):
    config = helpers.config(rounds=1)
    run = train.train(config, out=tmp_path)
    assert not (tmp_path / "steps").exists() and run.recorded == []
    with pytest.raises(FldiagError, match=r"recorded no local steps.*metrics\.steps=true"):
        run.steps()
    plain = config.replace(
        checkpoint__every=1, checkpoint__clients="none"
    )  # what is kept is no part of the identity
    tree = plain.model_dump(mode="json", exclude={"name": True, "data": {"root"}, "metrics": True})
    for section, *name, key in (dotted.split(".") for dotted in ADDED_KEYS):
        if not name or name == [tree[section]["name"]]:
            del tree[section][key]
    assert config.hash == hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]
    assert len({config.hash, recorded(config).hash, recorded(config, **KL).hash}) == 3


def test_some_rounds_only(tmp_path):
    config = recorded(helpers.config(rounds=5), metrics__every=2)
    assert train.train(config, out=tmp_path).recorded == [2, 4, 5]
    assert [t for t in range(1, 6) if MetricsSection(steps=True, every=2).of_round(t, 5)] == [
        2,
        4,
        5,
    ]
    assert not MetricsSection().of_round(5, 5)


def test_clients_trained_for_the_checkpoint_only_are_not_recorded(tmp_path):
    config = recorded(helpers.config(rounds=1, total=4, per_round=2, checkpoint={"clients": "all"}))
    run = train.train(config, out=tmp_path)
    assert len(run.checkpoint(1).client_ids) == 4 and len(set(run.steps().client)) == 2


@pytest.mark.slow
def test_the_same_table_whatever_the_executor_and_again(tmp_path):
    runs = [
        train.train(small(rounds_=2), out=tmp_path / n / "run", executor=e)
        for n, e in (("a", "serial"), ("b", "processes:2"), ("c", "serial"))
    ]
    for r in (1, 2):
        a, b, c = ((run.path / f"steps/000{r}.parquet").read_bytes() for run in runs)
        assert a == b == c


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.slow
def test_a_stopped_run_keeps_all_rows(every, tmp_path):
    whole = train.train(small(every=every), out=tmp_path / "whole" / "run")

    def stop(event):
        if event["event"] == "round" and event["round"] == 2:
            raise KeyboardInterrupt

    out = tmp_path / "cut" / "run"
    with pytest.raises(KeyboardInterrupt):
        train.train(small(every=every), out=out, on_event=stop)
    assert Run.open(out).recorded == ([1, 2] if every == 1 else [])
    (out / "steps").mkdir(exist_ok=True)
    (out / "steps" / "0009.parquet").write_bytes(b"left behind by a kill")
    resumed = train.train(small(every=every), out=out, resume=True)
    pd.testing.assert_frame_equal(resumed.steps(), whole.steps(), check_exact=True)
    assert torch.equal(resumed.checkpoint().clients, whole.checkpoint().clients)
    assert {f.name for f in (out / "steps").iterdir()} == {f"000{r}.parquet" for r in (1, 2, 3, 4)}


def test_a_diverged_run_shows_its_last_steps(tmp_path):
    config = recorded(helpers.config(rounds=50, lr=1e6, precision="fp32"), **KL)
    run = train.train(config, out=tmp_path)
    assert run.status == "diverged" and run.recorded[-1] == run.done + 1
    check(run.steps())


# -- refusals, and what drift makes of it


def test_wrong_choices():
    with pytest.raises(FldiagError, match=r"metrics\.steps = true"):
        helpers.config().replace(metrics__proximal="kl")
    with pytest.raises(FldiagError, match="own"):
        recorded(helpers.config(), metrics__proximal="kls")
    q = helpers.quadratics()
    with pytest.raises(FldiagError, match=r"metrics\.proximal = 'l2'"):
        Setup(recorded(q.config(), **KL), dataset=q.data[0], parts=q.data[1])
    assert Config().metrics == MetricsSection(steps=False)


def test_columns_are_a_table():
    rows = [
        {"client": 1, "metric": "loss", "value": 0.5, "extra": "a"},
        {"client": 2, "metric": "loss", "value": None, "extra": "b"},
    ]
    whole = columns({k: [row[k] for row in rows] for k in rows[0]}, run="r", round=3)
    pd.testing.assert_frame_equal(whole, table(rows, run="r", round=3))
    assert list(columns({"value": []}, run="r").dtypes.astype(str)) == list(
        table([]).dtypes.astype(str)
    )


DRIFT = {"gradients": False, "representation": False, "rho": ()}


def test_drift_shows_means_over_the_recorded_steps(tmp_path):
    run = train.train(small(), out=tmp_path)
    frame = fldiag.diagnose(run, "drift", **DRIFT)
    steps, found = run.steps(3), frame[(frame.estimator == "steps") & (frame["round"] == 3)]
    for metric, layer in (
        ("cos_gu_gp", None),
        ("cos_gu_gp", "part:head"),
        ("proximal_loss", None),
        ("lambda_mean", "classifier"),
    ):
        rows = steps[
            (steps.metric == metric)
            & (steps.layer.isna() if layer is None else steps.layer == layer)
        ]
        means = rows.groupby("client").value.mean().astype(float)
        assert len(means) == 2
        for k, value in means.items():
            row = one(found, metric, layer=layer, client=int(k))
            assert row.value == pytest.approx(value) and row.n_steps == (rows.client == k).sum()
        row = one(found, metric, layer=layer, scope="global")
        assert (
            row.value == pytest.approx(means.mean())
            and row.n_clients == 2
            and row.n_steps == len(rows)
        )
        assert row.stderr == pytest.approx(means.std() / 2**0.5)
        if metric == "lambda_mean":
            assert row.scaled == pytest.approx(rows.groupby("client").scaled.mean().mean())
    assert set(found[found.metric == "cos_gu_gp"].proximal) == {"kl:3"}
    assert set(
        frame[(frame.estimator == "exact") & (frame.metric == "proximal_loss")].proximal
    ) == {"kl:3"}
    assert set(
        fldiag.diagnose(run, "drift", rounds=[2], **DRIFT).query("estimator == 'steps'")["round"]
    ) == {2}


def test_damaged_and_changed_step_tables_are_noticed(tmp_path):
    run = train.train(small(rounds_=2), out=tmp_path)
    before = History.of(run).digest()
    (tmp_path / "steps" / "0001.parquet").write_bytes(b"")
    frame = fldiag.diagnose(run, "drift", **DRIFT)
    assert "0001.parquet is not the file this run wrote" in one(frame, "missing").note
    assert set(frame[frame.estimator == "steps"]["round"]) == {2}
    del run.files["steps/0001.parquet"]
    assert History.of(run).digest() != before
