"""What is counted of a config without training it: multiply-adds, what clients send and keep, examples and their labels.

A step's operations are counted while one is made, by torch's counter, on a few blank images of the data set's size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fldiag
from fldiag import registry
from fldiag.data import Dataset
from fldiag.models.slim import channels
from fldiag.training.server import Federation
from fldiag.training.setup import Setup
from fldiag.training.train import round_rows

#: Images of the one step of an epoch.
BATCH = 2
#: Shape and number of classes of the data sets whose costs are counted.
SHAPES = {
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
    "imagenet200": ((3, 224, 224), 200),
}
#: Products that only a forward pass makes; backward ones have other names.
FORWARD = ("convolution", "addmm", "baddbmm")
#: What profilers of layers count besides, an average over all positions of a map, and the layers whose parameters they count.
POOLING, LAYERS = "mean", (nn.Conv2d, nn.Linear)
#: Widths between the smallest and 1 that stand for all of them.
WIDTHS = 4096
#: Models that are in memory during training, as the FedAlign paper counts them.
STORED = {"fedprox": 2, "moon": 3}


def dataset_and_parts(config: fldiag.Config) -> tuple[Dataset, Sequence[np.ndarray]]:
    """The data set of a config, and the training indices of every client."""
    setup = Setup(config.replace(model__name="small_cnn"))  # whatever the images, it fits
    return setup.dataset, setup.parts


def partition(config: fldiag.Config) -> pd.DataFrame:
    """Rows ``count`` of examples by ``client`` and ``index``, the class."""
    dataset, parts = dataset_and_parts(config)
    labels = dataset.train_y.numpy()
    counts = [np.bincount(labels[part], minlength=dataset.classes) for part in parts]
    table = pd.DataFrame(counts).rename_axis("client").reset_index()
    return table.melt("client", var_name="index").assign(metric="count")


def examples(config: fldiag.Config) -> pd.DataFrame:
    """How many examples train and test."""
    dataset, _ = dataset_and_parts(config.replace(clients__total=1, clients__per_round=1))
    return _rows(train_examples=len(dataset.train_y), test_examples=len(dataset.test_y))


def flops(config: fldiag.Config) -> pd.DataFrame:
    """Multiply-adds of all forward passes of a step, an image (MFLOPs, GFLOPs), and the parameters kept (params_M), in millions
    (thousands of millions); all also as profilers of layers count (names that end in ``_profiled``).

    Counted in the second round, on images that are augmented, so that nothing is kept from step to step. What is drawn at random
    (blocks, sub-networks) counts with its expectation."""
    name = config.method.name
    if name in DRAWN:
        images = blank(config.data.name, augment=True)
        drawn = DRAWN[name](_federation(config, images, 1).setup, images.train_x[:1])
        simpler = {"name": registry.method.get(name).meta["equals"]}
        count, sizes = _of_step(config.replace(method=simpler))
        count = count + drawn
    else:
        count, sizes = _of_step(config)
    kept = STORED.get(name, 1) * np.array(sizes) / 1e6
    numbers = {"MFLOPs": count / 1e6, "GFLOPs": count / 1e9, "params_M": kept}
    ends = ("", "_profiled")
    return _rows(
        **{m + e: v for m, pair in numbers.items() for e, v in zip(ends, pair, strict=True)}
    )


@cache
def _of_step(config: fldiag.Config) -> tuple[np.ndarray, list[int]]:
    """Multiply-adds of a step's forward passes, an image, without and with pooling; parameters of the model and of its layers."""
    images = blank(config.data.name, augment=True)
    short, long = (_federation(config, images, epochs) for epochs in (1, 2))
    one, two = (_of_forward(operations(federation)) for federation in (short, long))
    module = long.setup.module
    layers = [m for m in module.modules() if isinstance(m, LAYERS)]
    sizes = [
        sum(p.numel() for m in modules for p in m.parameters()) for modules in ([module], layers)
    ]
    return (two - one) / (2 * BATCH), sizes


def relative(config: fldiag.Config) -> pd.DataFrame:
    """``flops_relative``: multiply-adds of an epoch over those of FedAvg, on images that are not augmented: the received
    model's outputs are then taken once a round, and not counted."""
    images = blank(config.data.name, augment=False)

    def epoch(config: fldiag.Config) -> int:
        one, two = (operations(_federation(config, images, epochs)) for epochs in (1, 2))
        return (two - one).total() - (two - one)[POOLING]

    return _rows(flops_relative=epoch(config) / epoch(config.replace(method__name="fedavg")))


def traffic(config: fldiag.Config) -> pd.DataFrame:
    """What a client sends and receives in a round, and keeps until its next, in multiples of the model's bytes: counted in the
    second round."""
    federation = _federation(config, blank(config.data.name, augment=False), epochs=1)
    execute = partial(map, federation.setup.train)
    federation.round(execute)
    record, trained = federation.round(execute)
    rows = round_rows({"n": 0}, record, trained, isolated=False)
    sent = {row["metric"]: row["value"] for row in rows}
    kept = sum(rows[0].numel() * rows.element_size() for rows in trained.state.values())
    size = record.w_g.numel() * record.w_g.element_size()
    return _rows(
        uplink=sent["uplink"] / size, downlink=sent["downlink"] / size, client_state=kept / size
    )


def _rows(**numbers: float) -> pd.DataFrame:
    return pd.DataFrame({"metric": list(numbers), "value": list(numbers.values())})


def blank(name: str, augment: bool) -> Dataset:
    """Black images as the data set has them, of different classes."""
    shape, classes = SHAPES[name]
    x, y = torch.zeros(BATCH, *shape), torch.arange(BATCH)
    return Dataset("blank", x, y, x, y, classes, augment=("hflip",) if augment else ())


# ---- what is drawn at random


def _dropped(setup: Setup, x: Tensor) -> np.ndarray:
    """What stochastic depth saves of a forward pass of ``x``, at its probabilities: a number below zero."""
    module: Any = setup.module.train()
    blocks: list[Any] = [m for m in module.modules() if hasattr(m, "keep")]
    keep = [block.keep for block in blocks]

    def without(dropped: Any) -> np.ndarray:
        for block in blocks:
            block.keep = 0.0 if block is dropped else 1.0
        return _count(module, x)

    whole = without(None)
    return sum(
        ((1 - p) * (without(b) - whole) for b, p in zip(blocks, keep, strict=True)), np.zeros(2)
    )


def _subnetworks(setup: Setup, x: Tensor) -> np.ndarray:
    """What GradAug's sub-networks cost on average over the widths and sides that it draws from."""
    part: Any = next(p for p in setup.method if hasattr(p, "sides"))
    module: Any = setup.module.train().to("meta")  # shapes alone are counted
    sizes = sorted({m.weight.shape[0] for m in module.modules() if isinstance(m, nn.Conv2d)})
    sides = [[max(1, round(side * s)) for s in x.shape[-2:]] for side in part.sides]

    def average(widths: Sequence[float]) -> np.ndarray:
        """Widths that keep the same channels cost the same."""
        layout = np.array([[channels(size, width) for size in sizes] for width in widths])
        _, first, counts = np.unique(layout, axis=0, return_index=True, return_counts=True)
        total = np.zeros(2)
        for i, n in zip(first, counts, strict=True):
            for side in sides:
                image = torch.empty(*x.shape[:2], *side, device="meta")
                total = total + n * _count(module.sub, image, widths[i])
        return total / (len(widths) * len(sides))

    smallest, is_fixed = part.smallest, part.widths == "code"  # the first width alone
    total = average([smallest]) if is_fixed else np.zeros(2)
    drawn = smallest + (1 - smallest) * (np.arange(WIDTHS) + 0.5) / WIDTHS
    return total + (part.n - is_fixed) * average(drawn) if part.n > is_fixed else total


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


@torch.no_grad()
def _count(forward: Callable[..., Any], *inputs: Any) -> np.ndarray:
    """Multiply-adds of a forward pass, without and with pooling."""
    return _of_forward(count_operations(partial(forward, *inputs))) / 2


def _of_forward(counts: Counter[str]) -> np.ndarray:
    """Operations of the forward passes, without and with pooling."""
    products = sum(counts[name] for name in FORWARD)
    return np.array([products, products + counts[POOLING]], float)


def _federation(config: fldiag.Config, images: Dataset, epochs: int) -> Federation:
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
    )
    indices = torch.arange(len(images.train_y))
    public = images.batch(indices, None)
    return Federation(Setup(small, dataset=images, parts=[np.arange(len(indices))], public=public))


def operations(federation: Federation) -> Counter[str]:
    """Of a federation's second round: what is made once is then made."""
    execute = partial(map, federation.setup.train)
    federation.round(execute)
    return count_operations(partial(federation.round, execute))
