"""``train.local_decay``: a smaller learning rate in the later local epochs of every round."""

import pytest
import torch
from helpers import PLAIN, classification, config, federation, play, setup, trace

from fldiag import registry
from fldiag.config import build
from fldiag.errors import FldiagError
from fldiag.local import Local
from fldiag.method import Personal
from fldiag.training import train
from fldiag.training.optim import OPTIMIZERS
from fldiag.training.personalise import GlobalModel, fine_tune

DATA = classification((20, 13, 7))  # 3, 2 and 1 steps an epoch in minibatches of 8
STACKS = pytest.mark.parametrize("stack", ["off", "on"])


def rates(decay, data=DATA, **more):
    """Learning rates of the local steps of every client in round 1, from what the plain steps did to the weights."""
    made = federation(
        config(**{**PLAIN, "epochs": 5, "local_decay": decay, "lr_decay": 0.5, **more}), data
    )
    play(made)
    spy = trace(made)
    [(seen, _)] = play(made)
    found = {}
    for k, end in zip(seen.ids, seen.rows, strict=True):
        mine = [
            (w[ids.index(k)], g[ids.index(k)])
            for w, g, ids in zip(spy.w, spy.g, spy.ids, strict=True)
            if k in ids
        ]
        after = [w for w, _ in mine[1:]] + [end] * bool(mine)
        found[k] = [
            float((w - there).norm() / g.norm()) for (w, g), there in zip(mine, after, strict=True)
        ]
    return found


@STACKS
@pytest.mark.parametrize(("share", "before"), [(0.5, 2), (0.79, 3), (0.8, 4)])
def test_every_client_steps_more_slowly_after_its_own_share_of_whole_epochs(stack, share, before):
    found = rates(0.1, stack=stack, local_decay_after=share)
    for k, epoch in enumerate((3, 2, 1)):
        expected = [0.05] * (before * epoch) + [0.005] * ((5 - before) * epoch)
        assert found[k] == pytest.approx(expected, rel=1e-9), k


@STACKS
def test_incomplete_minibatches_that_are_dropped_do_not_shift_it(stack):
    found = rates(0.1, stack=stack, drop_last=True)
    assert found[0] == pytest.approx([0.05] * 4 + [0.005] * 6, rel=1e-9)
    assert found[1] == pytest.approx([0.05] * 2 + [0.005] * 3, rel=1e-9) and found[2] == []


def test_half_of_the_epochs_is_rounded_as_the_released_code_rounds():
    for epochs in range(2, 60):
        assert (
            build({"train": {"epochs": epochs, "local_decay": 0.1}}).train.epochs_before_decay
            == epochs // 2
        )
    assert (
        build(
            {"train": {"epochs": 100, "local_decay": 0.1, "local_decay_after": 0.29}}
        ).train.epochs_before_decay
        == 29
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "clip": 0.5},
        {"optimizer": "adam"},
    ],
)
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fednova"])
def test_a_stack_trains_as_one_client_after_another(method, options):
    ends = []
    for stack in ("off", "on"):
        made = federation(
            config(method, stack=stack, epochs=4, local_decay=0.2, **{"momentum": 0.0, **options}),
            DATA,
        )
        play(made, 3)
        ends.append(made.w)
    assert float((ends[0] - ends[1]).abs().max()) <= 1e-10


def test_without_it_the_rate_is_the_rounds_to_the_bit():
    made = federation(config(stack="on", momentum=0.9), DATA)
    plain = federation(config(stack="on", momentum=0.9, local_decay=1.0), DATA)
    play(made, 2), play(plain, 2)
    assert torch.equal(made.w, plain.w)
    local = Local(
        network=made.setup.network,
        train=made.setup.config.train,
        seed=0,
        t=0,
        lr=0.1,
        ids=[0, 1],
        w_g=made.w,
        w=made.w.expand(2, -1),
        n=torch.ones(2),
        steps=torch.tensor([3, 2]),
        state={},
        sent={},
    )
    assert [local.lr_at(s, 2) for s in range(3)] == [0.1] * 3


@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.0},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"optimizer": "adam"},
    ],
)
def test_rows_with_different_rates_step_as_torch_does(settings):
    train = config(**settings).train
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    ours, theirs = (
        OPTIMIZERS[train.optimizer](train, w),
        [torch.nn.Parameter(row.clone()) for row in w],
    )
    kind = torch.optim.Adam if train.optimizer == "adam" else torch.optim.SGD
    more = (
        {}
        if train.optimizer == "adam"
        else {"momentum": train.momentum, "nesterov": train.nesterov}
    )
    steppers = [kind([p], lr=1.0, weight_decay=train.weight_decay, **more) for p in theirs]
    for row_rates in ((0.1, 0.1), (0.1, 0.02), (0.02, 0.02)):
        g = torch.randn(2, 5, generator=generator, dtype=torch.float64)
        for p, stepper, rate, row in zip(theirs, steppers, row_rates, g, strict=True):
            stepper.param_groups[0]["lr"], p.grad = rate, row.clone()
            stepper.step()
        ours.step(w, g, lr=torch.tensor(row_rates, dtype=torch.float64).unsqueeze(1))
        torch.testing.assert_close(
            w, torch.stack([p.detach() for p in theirs]), rtol=1e-12, atol=1e-14
        )


@pytest.mark.parametrize(
    "settings", [{"momentum": 0.0}, {"momentum": 0.9}, {"momentum": 0.5, "nesterov": True}]
)
def test_effective_steps_are_the_displacement_under_a_constant_gradient(settings):
    """What SCAFFOLD, FedNova, FedDC and FedCM divide by."""
    chosen = config(epochs=4, local_decay=0.1, weight_decay=0.0, **settings)
    network = setup(chosen, DATA).network
    for steps in (4, 8, 12):
        w = torch.zeros(1, 1, dtype=torch.float64)
        local = Local(
            network=network,
            train=chosen.train,
            seed=0,
            t=0,
            lr=0.3,
            ids=[0],
            w_g=w[0],
            w=w,
            n=torch.ones(1),
            steps=torch.tensor([steps]),
            state={},
            sent={},
        )
        optimizer = OPTIMIZERS["sgd"](chosen.train, w)
        for s in range(steps):
            optimizer.step(w, torch.ones_like(w), lr=local.lr_at(s, 1))
        assert local.effective_steps().item() == pytest.approx(-w.item() / 0.3, rel=1e-12)


def test_scaffolds_control_variate_is_the_mean_gradient_weighed_by_the_rates():
    made = federation(config("scaffold", epochs=4, local_decay=0.1, **PLAIN), DATA)
    spy = trace(made, raw=True)
    play(made)
    for k in range(3):
        g = torch.stack([g[0] for g, ids in zip(spy.g, spy.ids, strict=True) if ids == [k]])
        shares = torch.tensor([1.0] * (len(g) // 2) + [0.1] * (len(g) // 2), dtype=torch.float64)
        expected = (shares[:, None] * g).sum(0) / shares.sum()
        assert float((made.clients[k]["c_k"] - expected).abs().max()) <= 1e-12


def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    chosen = config("scaffold", rounds=3, epochs=4, local_decay=0.1, momentum=0.9, stack="on")
    whole = train.train(chosen, out=tmp_path / "whole")

    def stop(event):
        if event.get("round") == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train.train(chosen, out=tmp_path / "run", on_event=stop)
    resumed = train.train(chosen, out=tmp_path / "run", resume=True)
    a, b = whole.checkpoint().state, resumed.checkpoint().state
    assert all(torch.equal(a[name], b[name]) for name in a)
    slower = (
        train.train(chosen.replace(train__local_decay=1.0), out=tmp_path / "plain")
        .checkpoint()
        .state
    )
    assert not all(torch.equal(a[name], slower[name]) for name in a)


def test_fine_tuning_after_the_last_round_does_not_slow_down():
    ends = []
    for decay in (1.0, 0.1):
        made = setup(config(epochs=4, local_decay=decay), DATA)
        ends.append(
            torch.cat(
                fine_tune(
                    made,
                    Personal((3,)),
                    GlobalModel(made.initial(), {}, {}, 2),
                    [0, 1, 2],
                    0,
                    lambda models: models.rows,
                )
            )
        )
    assert torch.equal(*ends)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"local_decay": 0.0}, "greater than 0"),
        ({"local_decay": 0.1, "local_decay_after": 1.0}, "less than 1"),
        (
            {"local_decay": 0.1, "epochs": 1},
            "no whole epoch lies before local_decay_after = 0.5 of epochs = 1",
        ),
        ({"local_decay": 0.1, "local_decay_after": 0.1}, "no whole epoch"),
        ({"local_decay_after": 0.3}, "local_decay_after says when local_decay applies"),
    ],
)
def test_what_makes_no_sense_is_refused(train, words):
    with pytest.raises(FldiagError, match=words) as caught:
        build({"train": train})
    assert caught.value.usage and caught.value.remedy


@pytest.mark.parametrize("method", ["fedproj", "feddf", "fedet"])
def test_methods_whose_released_code_does_so_say_it(method):
    assert "train.local_decay = 0.1" in registry.method.get(method).doc
