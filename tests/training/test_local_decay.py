"""``train.local_decay``: a smaller learning rate in the later local epochs of every round."""

import pytest
import torch
from helpers import PLAIN, classification, config, federation, play, setup, trace

from fldiag.config import build
from fldiag.local import Local
from fldiag.training.optim import OPTIMIZERS

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
    "settings",
    [
        {"momentum": 0.0},
        {"momentum": 0.9},
        {"momentum": 0.5, "nesterov": True},
        {"momentum": 0.9, "local_decay": 1.0},
    ],
)
def test_effective_steps_are_the_displacement_under_a_constant_gradient(settings):
    """What SCAFFOLD, FedNova, FedDC and FedCM divide by."""
    chosen = config(**{"epochs": 4, "local_decay": 0.1, "weight_decay": 0.0} | settings)
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
