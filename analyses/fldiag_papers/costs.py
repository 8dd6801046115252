"""What a local step of a method costs, counted in multiply-adds while one is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fldiag import data, registry
from fldiag.config import Config
from fldiag.errors import FldiagError
from fldiag.models.layers import channels
from fldiag.models.residual import ResidualBlock
from fldiag.results.table import table
from fldiag.training.server import Federation
from fldiag.training.setup import Setup
from fldiag.training.storing import round_rows
from fldiag_papers import shapes
from fldiag_papers.study import PROFILED

#: Images a step; steps an epoch.
BATCH, STEPS = 2, 2
#: Products that only a forward pass makes; backward ones have other names.
FORWARD = ("convolution", "addmm", "baddbmm")
#: What profilers of layers count besides, an average over all positions of a map, and the layers whose parameters they count.
POOLING, LAYERS = "mean", (nn.Conv2d, nn.Linear)
#: Widths between the smallest and 1 that stand for all of them.
WIDTHS = 4096
#: Models that are in memory during training, as the FedAlign paper counts them.
STORED = {
    "fedavg": 1,
    "fedprox": 2,
    "moon": 3,
    "mixup": 1,
    "stochdepth": 1,
    "gradaug": 1,
    "fedalign": 1,
}


def flops(config: Config) -> pd.DataFrame:
    """Multiply-adds of all forward passes of a step, an image (MFLOPs, GFLOPs), and the parameters kept (params_M, where the
    number of models is known), both in millions (GFLOPs: in thousands of millions); all of them also as profilers of layers count
    (names that end in :data:`~fldiag_papers.study.PROFILED`).

    Counted in the second round, on a few blank images of the data set's size with its number of classes, which are augmented,
    so that nothing is kept from step to step. What is drawn at random (blocks, sub-networks) counts with its expectation.

    Raises FldiagError for data whose size is not known without them."""
    images, name = blank(config.data.name, augment=True), config.method.name
    neutral = registry.method.get(name).meta["neutral"] if name in DRAWN else {}
    undrawn = config.replace(**{f"method__{key}": value for key, value in neutral.items()})
    (short, _), (long, module) = (_forward(undrawn, images, epochs) for epochs in (1, 2))
    count = (long - short) / (2 * STEPS * BATCH)
    if name in DRAWN:
        count = count + DRAWN[name](_federation(config, images, 1).setup, images.train_x[:1])
    rows = [
        {"metric": metric + end, "value": value / unit}
        for metric, unit in (("MFLOPs", 1e6), ("GFLOPs", 1e9))
        for end, value in zip(("", PROFILED), count, strict=True)
    ]
    if name in STORED:
        layers = [m for m in module.modules() if isinstance(m, LAYERS)]
        rows += [
            {
                "metric": f"params_M{end}",
                "value": STORED[name]
                * sum(p.numel() for m in modules for p in m.parameters())
                / 1e6,
            }
            for end, modules in (("", [module]), (PROFILED, layers))
        ]
    return table(rows, method=name, seed=config.seed, scope="global")


def traffic(config: Config) -> pd.DataFrame:
    """What a client sends and receives in a round, and keeps until its next, in multiples of the model's bytes: counted in the
    second round, on a few blank images. Raises FldiagError for data whose size is not known without them."""
    federation = _federation(config, blank(config.data.name, augment=False), epochs=1)
    execute = partial(map, federation.setup.train)
    federation.round(execute)
    record, trained = federation.round(execute)
    bytes_of = {
        row["metric"]: row["value"]
        for row in round_rows(2, {"n": 0}, record, trained, isolated=False)
    }
    state_bytes = sum(rows[0].numel() * rows.element_size() for rows in trained.state.values())
    size = record.w_g.numel() * record.w_g.element_size()
    return table(
        [
            {"metric": name, "value": value / size, "unit": "x"}
            for name, value in (
                ("uplink", bytes_of["uplink"]),
                ("downlink", bytes_of["downlink"]),
                ("client_state", state_bytes),
            )
        ],
        method=config.method.name,
        seed=config.seed,
        scope="client",
    )


def relative(config: Config) -> float:
    """Multiply-adds of an epoch over those of FedAvg on the same model, on blank images that are not augmented: the received
    model's outputs are then taken once a round, and not counted."""
    images = blank(config.data.name, augment=False)
    operations_of_method, fedavg = (
        _epoch(variant, images) for variant in (config, config.replace(method__name="fedavg"))
    )
    return operations_of_method / fedavg


def blank(name: str, augment: bool) -> data.Dataset:
    """Black images as the data set has them, of different classes. Raises FldiagError where their size is not known."""
    shape_and_classes = shapes.shape_of(name)
    if shape_and_classes is None:
        raise FldiagError(
            f"the size of the images of {name} is not known", "add it to fldiag_papers/shapes.py"
        )
    shape, classes = shape_and_classes
    x, y = torch.zeros(BATCH * STEPS, *shape), torch.arange(BATCH * STEPS) % classes
    return data.Dataset(
        "blank", x, y, x, y, classes, augment=("hflip",) if augment and len(shape) == 3 else ()
    )


# ---- what is drawn at random


def _dropped(setup: Setup, x: Tensor) -> np.ndarray:
    """What stochastic depth saves of a forward pass of ``x``, at its probabilities: a number below zero."""
    blocks = [m for m in setup.module.modules() if isinstance(m, ResidualBlock)]
    keep, module = [b.keep for b in blocks], setup.module.train()

    def without(dropped: ResidualBlock | None) -> np.ndarray:
        for b in blocks:
            b.keep = 0.0 if b is dropped else 1.0
        return _count(module, x)

    undropped = without(None)
    return np.asarray(
        np.sum(
            [(1 - p) * (without(b) - undropped) for b, p in zip(blocks, keep, strict=True)], axis=0
        )
    )


def _subnetworks(setup: Setup, x: Tensor) -> np.ndarray:
    """What GradAug's sub-networks cost on average over the widths and sides that it draws from."""
    part: Any = next(p for p in setup.method if hasattr(p, "sides"))
    module: Any = setup.module.train()
    sizes = sorted({m.weight.shape[0] for m in module.modules() if isinstance(m, nn.Conv2d)})

    sides = [[max(1, round(side * s)) for s in x.shape[-2:]] for side in part.sides]

    def average(widths: Sequence[float]) -> np.ndarray:
        """Widths that keep the same channels cost the same."""
        layout = np.array([[channels(size, width) for size in sizes] for width in widths])
        _, first, counts = np.unique(layout, axis=0, return_index=True, return_counts=True)
        each = [
            n * _count(module.sub, x.new_zeros(*x.shape[:2], *side), widths[i])
            for i, n in zip(first, counts, strict=True)
            for side in sides
        ]
        return np.asarray(np.sum(each, axis=0) / (len(widths) * len(sides)))

    fixed = part.widths == "code"  # the first alone
    total = average([part.smallest]) if fixed else np.zeros(2)
    if part.n > fixed:
        total = total + (part.n - fixed) * average(
            part.smallest + (1 - part.smallest) * (np.arange(WIDTHS) + 0.5) / WIDTHS
        )
    return np.asarray(total)


#: Method -> what its draws add to the forward passes of its neutral setting, an image.
DRAWN: dict[str, Callable[[Setup, Tensor], np.ndarray]] = {
    "stochdepth": _dropped,
    "gradaug": _subnetworks,
}


# ---- counting


def count_operations(call: Callable[[], Any]) -> Counter[str]:
    """Name of a product (or of pooling) -> operations, two a multiply-add and an entry of the map that is pooled."""

    def pooling(shape: Sequence[int], *_: Any, **__: Any) -> int:
        return 2 * int(np.prod(shape)) if len(shape) == 4 else 0

    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.mean: pooling})
    with counter:
        call()
    totals = counter.get_flop_counts()["Global"]
    return Counter({str(op).rpartition(".")[2]: n for op, n in totals.items()})


def _count(forward: Callable[..., Any], *inputs: Any) -> np.ndarray:
    """Multiply-adds of a forward pass, without and with pooling."""
    with torch.no_grad():
        return _of_forward(count_operations(partial(forward, *inputs))) / 2


def _of_forward(operations: Counter[str]) -> np.ndarray:
    """Operations of the forward passes, without and with pooling."""
    products = sum(operations[name] for name in FORWARD)
    return np.array([products, products + operations[POOLING]], float)


def _epoch(config: Config, images: data.Dataset) -> int:
    first, both = (operations(_federation(config, images, epochs)) for epochs in (1, 2))
    return (both - first).total() - (both - first)[POOLING]


def _forward(config: Config, images: data.Dataset, epochs: int) -> tuple[np.ndarray, nn.Module]:
    """Operations of the forward passes of the second round, and the module."""
    federation = _federation(config, images, epochs)
    return _of_forward(operations(federation)), federation.setup.module


def _federation(config: Config, images: data.Dataset, epochs: int) -> Federation:
    """One client that has all images."""
    small = config.replace(
        clients__total=1,
        clients__per_round=1,
        train__epochs=epochs,
        train__batch_size=BATCH,
        train__drop_last=False,
        train__aggregate="n",
        train__stack="off",
        train__precision="fp32",
        data__public=None,
        data__public_size=None,
        metrics={},
    )
    indices = torch.arange(len(images.train_y))
    return Federation(
        Setup(
            small,
            dataset=images,
            parts=[np.arange(len(indices))],
            public=images.batch(indices, None),
        )
    )


def operations(federation: Federation) -> Counter[str]:
    """Of a federation's second round: what is made once is then made."""
    execute = partial(map, federation.setup.train)
    federation.round(execute)
    return count_operations(partial(federation.round, execute))
