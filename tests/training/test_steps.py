"""Recorded local steps: what the numbers are, against plain autograd, and that recording leaves training alone."""

import helpers
import pandas as pd
import pytest
import torch
from histories import one
from torch.func import functional_call
from torch.nn import functional as F

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


@pytest.mark.parametrize("stack", [pytest.param("off", marks=pytest.mark.slow), "on"])
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


@pytest.mark.parametrize("name", ["fedavg", "fedsol", "fedsam"])
def test_statistics_and_random_numbers_of_layers_are_left_alone(name):
    plain, data = helpers.config(name, precision="fp32"), helpers.classification((20, 13, 7))
    net = helpers.normed(dropout=0.4)
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
