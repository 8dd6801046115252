"""Base optimisers against torch.optim, step by step, each row as a model of its own."""

import pytest
import torch
from helpers import config

from fldiag.training.optim import OPTIMIZERS

SETTINGS = [
    {"momentum": 0.0, "weight_decay": 0.0},
    {"momentum": 0.0},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.5, "weight_decay": 0.3, "clip": 0.7},
    {"momentum": 0.9, "nesterov": True, "clip": 1e-3},
    {"optimizer": "adam"},
    {"optimizer": "adam", "weight_decay": 0.2},
    {"optimizer": "adam", "clip": 0.5, "weight_decay": 0.0},
]


def reference(train, p):
    if train.optimizer == "adam":
        return torch.optim.Adam([p], lr=0.05, weight_decay=train.weight_decay)
    return torch.optim.SGD(
        [p],
        lr=0.05,
        momentum=train.momentum,
        nesterov=train.nesterov,
        weight_decay=train.weight_decay,
    )


@pytest.mark.parametrize(
    "settings", SETTINGS, ids=lambda s: " ".join(f"{k}={v}" for k, v in s.items())
)
def test_rows_step_as_torch_does(settings):
    """Rows stop one after another, as clients with fewer steps do; those that stopped stay where they are."""
    train = config(**settings).train
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(3, 11, generator=generator, dtype=torch.float64)
    ours = OPTIMIZERS[train.optimizer](train, w)
    theirs = [torch.nn.Parameter(row.clone()) for row in w]
    steppers = [reference(train, p) for p in theirs]
    for k in (3, 3, 3, 2, 2, 1, 1, 1):
        # gradients on both sides of the clipping threshold
        g = (
            torch.randn(k, 11, generator=generator, dtype=torch.float64)
            * torch.tensor([[1.0], [0.1], [0.01]])[:k]
        )
        for p, stepper, row in zip(theirs, steppers, g, strict=False):
            p.grad = row.clone()
            if train.clip:
                torch.nn.utils.clip_grad_norm_([p], train.clip)
            stepper.step()
        ours.step(w[:k], g, lr=0.05)
        for row, p in zip(w, theirs, strict=True):
            torch.testing.assert_close(row, p.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"optimizer": "adam"}])
def test_a_new_optimiser_has_no_memory(settings):
    train = config(**settings).train
    start, g = torch.ones(1, 4), torch.full((1, 4), 0.3)
    ends = []
    for _ in range(2):
        w = start.clone()
        OPTIMIZERS[train.optimizer](train, w).step(w, g.clone(), lr=0.1)
        ends.append(w)
    assert torch.equal(*ends)
    assert not torch.equal(ends[0], start)


def test_clipping_is_of_each_client_and_before_weight_decay():
    train = config(momentum=0.0, weight_decay=0.5, clip=1.0).train
    w = torch.full((2, 4), 2.0, dtype=torch.float64)
    g = torch.tensor([[3.0, 4.0, 0, 0], [0.3, 0.4, 0, 0]], dtype=torch.float64)
    OPTIMIZERS["sgd"](train, w).step(w, g, lr=1.0)
    assert torch.allclose(
        w[0], torch.tensor([2 - 1 - 0.6, 2 - 1 - 0.8, 1, 1], dtype=torch.float64), atol=1e-6
    )
    assert torch.allclose(w[1], torch.tensor([0.7, 0.6, 1, 1], dtype=torch.float64), atol=1e-12)
