"""The label distribution per client, of a run or of a config that was never trained."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from torch import Tensor

from fldiag import config as configs
from fldiag import data, user_code
from fldiag.config_files import read_partition
from fldiag.data import partition
from fldiag.data.public import deal
from fldiag.diagnosis import places
from fldiag.errors import FldiagError
from fldiag.plotting import words
from fldiag.runs.open_problem import load_dataset
from fldiag.runs.run import Run


@dataclass(frozen=True)
class DealtPartition:
    """``counts``: one row a client and class with its number of examples. ``parts``: the training indices of every client.
    ``folder`` and ``name``: where a picture of it belongs. ``title``: its data, how they were dealt, and to how many.
    ``remarks``: what to know of it. ``faults``: why training would refuse it."""

    counts: pd.DataFrame
    parts: Sequence[np.ndarray]
    folder: Path
    name: str
    title: str = ""
    remarks: Sequence[str] = ()
    faults: Sequence[str] = ()


def partition_of(
    source: str | Path,
    overrides: Iterable[str] = (),
    *,
    download: bool = False,
    allow_code: str | Iterable[str] = (),
) -> DealtPartition:
    """The partition of a run folder, or the one that a preset or TOML file would deal.

    Args:
        source: a run folder, a preset's name or a TOML file.
        overrides: ``section.key=value``, for a preset or file.
        download: fetch a missing public data set.
        allow_code: user code that may be imported although only the run names it.

    Raises:
        FldiagError: an unknown source, data that are not there, or user code that only a run names, without consent.
    """
    if os.path.isfile(Path(source) / "run.json"):
        return _of_run(Run.open(source).allow(allow_code), download)
    if Path(source).suffix in (".json", ".npz"):
        raise FldiagError(
            f"{source} is no preset and no run; a partition file does not say of which data it is",
            f"fldiag partition {source} --data NAME",
            usage=True,
        )
    return dealt(configs.load(source, overrides), download=download)


def check_file(path: str | Path, name: str, *, download: bool = False) -> DealtPartition:
    """The partition in a file, or of a run's folder, against the training examples of a data set, before any training.

    Its counts are of the indices that the data have; ``faults`` tells what is wrong with it.

    Args:
        path: an npz or JSON file, client -> indices of its training examples.
        name: of the data, as ``fldiag.data.load`` takes it.
        download: fetch a missing public data set.

    Raises:
        FldiagError: no partition can be read from the file, or data that are not there.
    """
    dataset = data.load(name, download=download, allow_code=[name])
    index_of_client = read_partition(path)
    examples, clients = len(dataset.train_y), len(index_of_client)
    usable = [index[index < examples] for index in index_of_client.values()]
    try:
        usable, faults = partition.from_file(str(path), None, clients, examples), []
    except FldiagError as error:
        faults = [str(error)]
    source = Path(path).stem
    return DealtPartition(
        count(usable, dataset.train_y),
        usable,
        places.FALLBACK,
        f"partition-{dataset.name.replace(':', '-').replace('/', '-')}-file-{source}",
        f"{words.data(dataset.name)}, {source}, {clients:,} clients",
        _remarks(usable, dataset, is_dealt=False),
        faults,
    )


def count(parts: Sequence[np.ndarray], labels: Tensor) -> pd.DataFrame:
    """Examples of every class at every client, zeros included: int64 columns client, class, count. Raises FldiagError for targets
    that are no classes."""
    if labels.ndim != 1 or labels.is_floating_point():
        raise FldiagError(f"the targets are no classes to count: {labels.dtype}", usage=True)
    n = int(labels.max()) + 1
    counts = np.stack([np.bincount(labels.numpy()[part], minlength=n) for part in parts])
    client, label = np.indices(counts.shape)
    return pd.DataFrame({"client": client.ravel(), "class": label.ravel(), "count": counts.ravel()})


def dealt(config: configs.Config, *, download: bool = False) -> DealtPartition:
    """The partition that a config deals. Raises FldiagError for data that are not there."""
    spec = config.partition
    dataset = data.load(config.data, download=download, allow_code=config.allowed_code)
    parts = deal(dataset, spec, config.clients.total, config.data.public)
    name = "-".join(
        ["partition", config.data.name.replace(":", "-").replace("/", "-"), spec.kind]
        + [Path(v).stem if k == "path" else f"{k}{v}" for k, v in _options(config).items()]
    )
    return DealtPartition(
        count(parts, dataset.train_y),
        parts,
        places.FALLBACK,
        name,
        title(config),
        _remarks(parts, dataset, is_dealt=spec.kind != "file"),
    )


def _options(config: configs.Config) -> dict[str, str]:
    """The options of the partition that tell it from others; of a file its name."""
    options = config.partition.options
    return {k: Path(v).name if k == "path" else v for k, v in options.items() if k != "min_size"}


def _of_run(run: Run, download: bool) -> DealtPartition:
    """The partition of a run, trained or recorded. Raises FldiagError for user code that only the run names."""
    if "partition.npz" not in run.files:
        raise FldiagError(
            f"{run.path} does not say which examples belong to which client",
            "record it with clients=, or convert it with --partition",
            usage=True,
        )
    parts = partition.load_parts(run.verified("partition.npz"))
    if run.origin:
        checkpoint = run.checkpoint()
        name = checkpoint.config.get("data", {}).get("name")
        user_code.check({"data": {"name": name}}, run.allow_code, run.path)
        dataset, is_dealt = load_dataset(checkpoint, None, download), False
        heading = f"{words.data(dataset.name)}, as recorded, {len(parts):,} clients"
    else:
        config = run.config
        user_code.check({"data": {"name": config.data.name}}, config.allowed_code, run.path)
        dataset = data.load(config.data, download=download, allow_code=config.allowed_code)
        is_dealt, heading = config.partition.kind != "file", title(config)
    return DealtPartition(
        count(parts, dataset.train_y),
        parts,
        run.path / "diagnostics",
        "partition",
        heading,
        _remarks(parts, dataset, is_dealt=is_dealt),
    )


def _remarks(parts: Sequence[np.ndarray], dataset: data.Dataset, *, is_dealt: bool) -> list[str]:
    """What to know of clients whose examples fldiag did not deal: examples of several clients, and of none."""
    if is_dealt:
        return []
    owners = np.zeros(len(dataset.train_y), dtype=np.int64)
    for part in parts:
        owners[np.unique(part)] += 1
    counts = {"several clients": int((owners > 1).sum()), "no client": int((owners == 0).sum())}
    return [
        f"partition: {n} of {len(owners)} training examples belong to {owner}"
        for owner, n in counts.items()
        if n
    ]


def title(config: configs.Config) -> str:
    """Data, partition and number of clients, as a picture says them."""
    options = [f"{words.name(k)} = {v}" for k, v in _options(config).items()]
    kind = words.name(config.partition.kind)
    return ", ".join(
        [words.data(config.data.name), kind, *options, f"{config.clients.total:,} clients"]
    )
