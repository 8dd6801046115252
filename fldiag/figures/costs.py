"""What a local step of a method costs, counted in multiply-adds while one is made."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fldiag import data
from fldiag.config import Config
from fldiag.results.table import table
from fldiag.training.federation import Federation
from fldiag.training.setup import Setup

#: Images a step; steps an epoch.
BATCH, STEPS = 2, 2
#: Further epochs that are counted; more where blocks or sub-networks are drawn at random.
EPOCHS = {"stochdepth": 12, "gradaug": 12}
#: Products that only a forward pass makes; backward ones have other names.
FORWARD = ("convolution", "addmm", "baddbmm")
#: Models that are in memory during training, as the FedAlign paper counts them.
STORED = {"fedavg": 1, "fedprox": 2, "moon": 3, "mixup": 1, "stochdepth": 1, "gradaug": 1, "fedalign": 1}


def flops(config: Config, download: bool = False) -> pd.DataFrame:
    """Multiply-adds of all forward passes of a step, an image (MFLOPs, GFLOPs), and the parameters kept (params_M, where the
    number of models is known), both in millions (GFLOPs: in thousands of millions).

    Counted in the second round on a few images, which are augmented, so that nothing is kept from step to step."""
    whole = data.of(config.data, download)
    few, further = BATCH * STEPS, EPOCHS.get(config.method.name, 1)
    images = replace(whole, train_x=whole.train_x[:few], train_y=whole.train_y[:few],
                     augment=("hflip",) if len(whole.shape) == 3 else ())
    (short, _), (long, module) = (_count(config, images, epochs) for epochs in (1, 1 + further))
    forward = (long - short) / 2 / (further * STEPS * BATCH)
    rows = [{"metric": "MFLOPs", "value": forward / 1e6}, {"metric": "GFLOPs", "value": forward / 1e9}]
    if config.method.name in STORED:
        size = sum(p.numel() for p in module.parameters())
        rows.append({"metric": "params_M", "value": STORED[config.method.name] * size / 1e6})
    return table(rows, method=config.method.name, seed=config.seed, scope="global")


def _count(config: Config, images: data.Dataset, epochs: int) -> tuple[int, nn.Module]:
    """Operations (two a multiply-add) of a round's forward passes, and the module."""
    made = config.replace(
        clients__total=1, clients__per_round=1, train__epochs=epochs, train__batch_size=BATCH, train__drop_last=False,
        train__aggregate="n", train__stack="off", train__precision="fp32", data__public=None, data__public_size=None)
    every = torch.arange(len(images.train_y))
    setup = Setup(made, dataset=images, parts=[np.arange(len(every))], public=images.batch(every, None))
    counts = operations(Federation(setup))
    return sum(n for op, n in counts.items() if op in FORWARD), setup.module


def operations(federation: Federation) -> dict[str, int]:
    """Name of a product -> operations (two a multiply-add) in a federation's second round: what is made once is then made."""
    execute = partial(map, federation.setup.train)
    federation.round(execute)
    with FlopCounterMode(display=False) as seen:
        federation.round(execute)
    return {str(op).rpartition(".")[2]: n for op, n in seen.get_flop_counts()["Global"].items()}
