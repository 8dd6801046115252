"""What a local step of a method costs, counted in multiply-adds while one is made."""

from __future__ import annotations

from functools import partial

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fldiag import data
from fldiag.config import Config
from fldiag.errors import FldiagError
from fldiag.figures import shapes
from fldiag.results.table import table
from fldiag.training.federation import Federation
from fldiag.training.setup import Setup

#: Images a step; steps an epoch.
BATCH, STEPS = 2, 2
#: Rounds that are counted where blocks or sub-networks are drawn at random, and how many further epochs each has.
DRAWN, EPOCHS = {"stochdepth": 4, "gradaug": 4}, 2
#: Products that only a forward pass makes; backward ones have other names.
FORWARD = ("convolution", "addmm", "baddbmm")
#: Models that are in memory during training, as the FedAlign paper counts them.
STORED = {"fedavg": 1, "fedprox": 2, "moon": 3, "mixup": 1, "stochdepth": 1, "gradaug": 1, "fedalign": 1}


def flops(config: Config) -> pd.DataFrame:
    """Multiply-adds of all forward passes of a step, an image (MFLOPs, GFLOPs), and the parameters kept (params_M, where the
    number of models is known), both in millions (GFLOPs: in thousands of millions).

    Counted from the second round on, on a few blank images of the data set's size with its number of classes, which are
    augmented, so that nothing is kept from step to step. ``stderr``: of the mean over what is drawn at random.

    Raises FldiagError for data whose size is not known without them."""
    images = blank(config.data.name, augment=True)
    rounds = DRAWN.get(config.method.name, 1)
    further = EPOCHS if rounds > 1 else 1
    (short, _), (long, module) = (_forward(config, images, epochs, rounds) for epochs in (1, 1 + further))
    scale = 2 * further * STEPS * BATCH
    forward = (short.mean(), long.mean())
    value = (forward[1] - forward[0]) / scale
    error = float(np.sqrt((short.var(ddof=1) + long.var(ddof=1)) / rounds) / scale) if rounds > 1 else None
    rows = [{"metric": name, "value": value / unit, "stderr": None if error is None else error / unit}
            for name, unit in (("MFLOPs", 1e6), ("GFLOPs", 1e9))]
    if config.method.name in STORED:
        size = sum(p.numel() for p in module.parameters())
        rows.append({"metric": "params_M", "value": STORED[config.method.name] * size / 1e6})
    return table(rows, method=config.method.name, seed=config.seed, scope="global")


def relative(config: Config) -> float:
    """Multiply-adds of an epoch over those of FedAvg on the same model, on blank images that are not augmented: the received
    model's outputs are then taken once a round, and not counted."""
    images = blank(config.data.name, augment=False)
    own, fedavg = (_epoch(made, images) for made in (config, config.replace(method__name="fedavg")))
    return own / fedavg


def blank(name: str, augment: bool) -> data.Dataset:
    """Black images as the data set has them, of different classes. Raises FldiagError where their size is not known."""
    found = shapes.known(name)
    if found is None:
        raise FldiagError(f"the size of the images of {name} is not known", "add it to fldiag/figures/shapes.py")
    shape, classes = found
    x, y = torch.zeros(BATCH * STEPS, *shape), torch.arange(BATCH * STEPS) % classes
    return data.Dataset("blank", x, y, x, y, classes, augment=("hflip",) if augment and len(shape) == 3 else ())


def _epoch(config: Config, images: data.Dataset) -> int:
    first, both = (sum(operations(_federation(config, images, epochs)).values()) for epochs in (1, 2))
    return both - first


def _forward(config: Config, images: data.Dataset, epochs: int, rounds: int) -> tuple[np.ndarray, nn.Module]:
    """Operations (two a multiply-add) of the forward passes of each of the rounds after the first, and the module."""
    federation = _federation(config, images, epochs)
    counts = [operations(federation, begin=i == 0) for i in range(rounds)]
    return np.array([sum(n for op, n in c.items() if op in FORWARD) for c in counts], float), federation.setup.module


def _federation(config: Config, images: data.Dataset, epochs: int) -> Federation:
    """One client that has all images."""
    made = config.replace(
        clients__total=1, clients__per_round=1, train__epochs=epochs, train__batch_size=BATCH, train__drop_last=False,
        train__aggregate="n", train__stack="off", train__precision="fp32", data__public=None, data__public_size=None, metrics={})
    every = torch.arange(len(images.train_y))
    return Federation(Setup(made, dataset=images, parts=[np.arange(len(every))], public=images.batch(every, None)))


def operations(federation: Federation, begin: bool = True) -> dict[str, int]:
    """Name of a product -> operations (two a multiply-add) in a federation's next round, by default after a first one: what is
    made once is then made."""
    execute = partial(map, federation.setup.train)
    if begin:
        federation.round(execute)
    with FlopCounterMode(display=False) as seen:
        federation.round(execute)
    return {str(op).rpartition(".")[2]: n for op, n in seen.get_flop_counts()["Global"].items()}
