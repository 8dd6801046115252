"""Many runs: every combination of some keys' values."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from fldiag.config import Config
from fldiag.errors import FldiagError
from fldiag.execution import open_pool
from fldiag.runs.run import Run
from fldiag.training import train
from fldiag.training.setup import Setup
from fldiag.training.train import Listener

#: The numbers of a sweep's table, as far as its runs have them.
METRICS = ["accuracy", "loss", "personal_accuracy"]
Values = Mapping[str, Sequence[Any]]


def sweep(
    config: Config | str | Path,
    over: Values,
    *,
    out: str | Path | None = None,
    executor: str | Executor = "serial",
    shard: str | None = None,
    device: str = "auto",
    download: bool = False,
    on_event: Listener | None = None,
) -> list[Run]:
    """Train every combination of the given values. Runs that an earlier call finished are read; unfinished ones are continued.

    Args:
        config: a config, or a preset's name or TOML file, whose settings for single methods apply to the runs of these methods.
        over: key -> values, such as ``{"method.name": ["fedavg", "fedsol"], "seed": [0, 1, 2]}``.
        out: folder of the runs; by default ``checkpoints``.
        executor: where the runs are trained, see ``train``.
        shard: train and return only a part of the runs, ``"I/N"``; a call without it returns all.
        device: see ``train``.
        download: fetch a missing public data set.
        on_event: gets a dict at the end of every run: ``status``, ``path``, and ``done`` of ``total`` runs.

    Returns:
        The runs in the order of the combinations, the last key changing fastest. One that diverged is among them.

    Raises:
        FldiagError: a config that is refused, before anything is trained.

    >>> import tempfile, fldiag
    >>> start = fldiag.Config.load("digits", rounds=1, model__name="mlp", clients__per_round=2, train__epochs=1)
    >>> [run.config.seed for run in fldiag.sweep(start, {"seed": [3, 4]}, out=tempfile.mkdtemp())]
    [3, 4]
    """
    make = config.replace if isinstance(config, Config) else partial(Config.load, config)
    plan = part_of([make(**keys) for keys in combinations(over)], shard or "1/1")
    paths = [Path(out or train.RUNS).absolute() / train.run_path(c).name for c in plan]
    if download:  # once, rather than by every worker
        for c in {c.data: c for c in plan}.values():
            Setup(c, download=True)
    with open_pool(executor, _train_one, device, name=lambda unit: unit[1].name) as pool:
        for i, status in enumerate(pool.map(zip(plan, paths, strict=True))):
            if on_event is not None:
                about = {"event": "end", "status": status, "path": str(paths[i])}
                on_event({**about, "done": i + 1, "total": len(plan)})
    return [Run.open(path) for path in paths]


def part_of(plan: list[Config], shard: str) -> list[Config]:
    """The part ``I/N`` of a plan: every N-th item from the I-th on. Raises FldiagError where there is no such part."""
    try:
        number, count = map(int, shard.split("/"))
        return plan[range(count).index(number - 1) :: count]
    except ValueError:
        raise FldiagError(f"shard = {shard!r}; four parts are 1/4 to 4/4", usage=True) from None


def _train_one(device: str, unit: tuple[Config, Path]) -> str:
    """Train a run in a worker. Returns its status."""
    config, path = unit
    return train.train(config, out=path, resume=True, device=device).status


def combinations(over: Values) -> list[dict[str, Any]]:
    """Every combination of the values, the last key's changing fastest."""
    return [dict(zip(over, values, strict=True)) for values in itertools.product(*over.values())]


def table(runs: Sequence[Run], over: Values) -> pd.DataFrame:
    """A row a setting: mean and standard deviation over the seeds of the last round's numbers.

    Args:
        runs: the runs of ``combinations(over)``, in this order.
        over: key -> values.

    Returns:
        The keys but the seed, ``runs``, the numbers, and ``diverged``: how many runs did, which are left out of the numbers.
    """
    rows = []
    for run, keys in zip(runs, combinations(over), strict=True):
        has_diverged = run.status == "diverged"
        last = run.metrics.query("scope == 'global' and slice != 'train'").groupby("metric")[
            "value"
        ]
        scores = {} if has_diverged else dict(last.last())
        rows.append({**{k: str(v) for k, v in keys.items()}, **scores, "diverged": has_diverged})
    names = [key for key in over if key != "seed"]
    members = pd.DataFrame(rows, columns=[*over, *METRICS, "diverged"])
    numbers = {"runs": ("diverged", "size")}
    for metric in METRICS:
        numbers |= {metric: (metric, "mean"), f"{metric}_std": (metric, "std")}
    numbers["diverged"] = "diverged", "sum"
    groups = members.astype(dict.fromkeys(METRICS, float)).groupby(
        names or (lambda i: 0), sort=False
    )
    return groups.agg(**numbers).reset_index(drop=not names).dropna(axis=1, how="all")
