"""The label distribution per client, of a run or of a config that was never trained."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

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
    parts: dict[Any, np.ndarray] = {**read_partition(path)}
    examples, faults = len(dataset.train_y), []
    lacking = [str(k) for k in range(len(parts)) if str(k) not in parts]
    if lacking:
        faults.append(
            f"{len(parts)} clients, and none is called {lacking[0]}: number them from 0 to "
            f"{len(parts) - 1} (until then they are counted in the order of the file)"
        )
    else:
        parts = {int(name): index for name, index in parts.items()}
    faults += [
        f"{message}: {remedy}"
        for message, remedy in partition.file_faults(
            parts, examples, may_repeat=os.path.isdir(path)
        )
    ]
    in_order = parts.values() if lacking else (parts[k] for k in range(len(parts)))
    usable = [index[index < examples] for index in in_order]
    source = Path(path).stem
    return DealtPartition(
        partition.summary(usable, dataset.train_y),
        usable,
        places.FALLBACK,
        f"partition-{dataset.name.replace(':', '-').replace('/', '-')}-file-{source}",
        f"{words.data(dataset.name)}, {source}, {len(usable):,} clients",
        partition.file_remarks(usable, examples),
        faults,
    )


def dealt(config: configs.Config, *, download: bool = False) -> DealtPartition:
    """The partition that a config deals. Raises FldiagError for data that are not there."""
    spec = config.partition
    dataset = data.of(config.data, download, config.allowed_code)
    parts = deal(dataset, spec, config.clients.total, config.data.public)
    name = "-".join(
        ["partition", config.data.name.replace(":", "-").replace("/", "-"), spec.kind]
        + [Path(v).stem if k == "path" else f"{k}{v}" for k, v in _options(config).items()]
    )
    return DealtPartition(
        partition.summary(parts, dataset.train_y),
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
        dataset = data.of(config.data, download, config.allowed_code)
        is_dealt, heading = config.partition.kind != "file", title(config)
    return DealtPartition(
        partition.summary(parts, dataset.train_y),
        parts,
        run.path / "diagnostics",
        "partition",
        heading,
        _remarks(parts, dataset, is_dealt=is_dealt),
    )


def _remarks(parts: Sequence[np.ndarray], dataset: data.Dataset, *, is_dealt: bool) -> list[str]:
    """What to know of clients whose examples fldiag did not deal."""
    return [] if is_dealt else partition.file_remarks(parts, len(dataset.train_y))


def title(config: configs.Config) -> str:
    """Data, partition and number of clients, as a picture says them."""
    options = [f"{words.symbol(k)} = {v}" for k, v in _options(config).items()]
    kind = words.PARTITIONS.get(config.partition.kind, config.partition.kind)
    return ", ".join(
        [words.data(config.data.name), kind, *options, f"{config.clients.total:,} clients"]
    )
