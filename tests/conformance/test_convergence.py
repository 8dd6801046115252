"""Every registered method learns the digits from heterogeneous clients (LDA 0.1) at its documented defaults."""

import dataclasses
from functools import partial

import pytest
import torch
from helpers import needs

from fldiag import config as configs
from fldiag import registry
from fldiag.data.slices import personal_test
from fldiag.training.evaluate import evaluate
from fldiag.training.federation import Federation
from fldiag.training.setup import Setup

ROUNDS = 10
#: Where it takes more: client momentum moves a tenth of a gradient at a time, and Per-FedAvg's papers take lr = 0.01.
MORE = {"fedcm": {"rounds": 20}, "mofedsam": {"rounds": 20}, "perfedavg": {"train.momentum": 0.9, "train.lr": 0.02}}


def digits(name):
    """The digits with plain SGD, for ten clients of whom five take part, with what the method needs.

    The MLP reaches the accuracies of the preset's small CNN in a third of the time.
    """
    world = needs(name)
    keys = {"method.name": name, "model.name": "mlp", "clients.total": 10, "clients.per_round": 5, "rounds": ROUNDS,
            "train.epochs": 3, "train.lr": 0.1, "train.momentum": 0.0, "train.clip": 10.0}
    if "public" in world:
        keys["data.public"] = "holdout:200"
    if "model" in world:
        keys |= {"model.name": "small_resnet", "train.epochs": 1, "rounds": 6}
    return configs.load("digits", [f"{k}={v}" for k, v in {**keys, **MORE.get(name, {})}.items()])


@pytest.mark.slow
@pytest.mark.parametrize("name", registry.method.names())
def test_learns_at_its_defaults(name):
    config = digits(name)
    setup = Setup(config)
    made = Federation(setup)
    before = evaluate(setup.network, made.w, made.buffers, setup.dataset)
    for _ in range(config.rounds):
        _, trained = made.round(partial(map, setup.train))
    if setup.method.isolated:  # no common model: each client is tested on its own mixture of classes
        scores = []
        for i, row in zip(trained.ids, trained.rows, strict=True):
            mine = torch.from_numpy(personal_test(setup.dataset.train_y[setup.parts[i]], setup.dataset.test_y, i))
            own = dataclasses.replace(setup.dataset, test_x=setup.dataset.test_x[mine], test_y=setup.dataset.test_y[mine])
            scores.append(evaluate(setup.network, row, {}, own)["accuracy"])
        assert min(scores) > 0.5
    else:
        after = evaluate(setup.network, made.w, made.buffers, setup.dataset)
        assert after["loss"] < before["loss"]
        assert after["accuracy"] > 0.4  # ten classes
