"""``train.local_decay``: a smaller learning rate in the later local epochs of every round."""

import pytest
import torch
from helpers import PLAIN, classification, config, federation, local_of, play, setup, trace

from fldiag.config import build
from fldiag.training.optim import OPTIMIZERS

DATA = classification((20, 13, 7))  # 3, 2 and 1 steps an epoch in minibatches of 8


def test_half_of_the_epochs_is_rounded_as_the_released_code_rounds():
    def before(**train):
        return build({"train": {"local_decay": 0.1, **train}}).train.epochs_before_decay

    assert all(before(epochs=epochs) == epochs // 2 for epochs in range(2, 60))
    assert before(epochs=100, local_decay_after=0.29) == 29


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
        local = local_of(network, chosen.train, w, [steps], lr=0.3)
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
