"""Many runs: every combination of some keys' values."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import pandas as pd

from fldiag import data
from fldiag.config import Config
from fldiag.errors import FldiagError
from fldiag.execution import open_pool, shard_of
from fldiag.runs.run import Run
from fldiag.training import train
from fldiag.training.train import Listener, failure

#: The numbers of a sweep's table, as far as its runs have them.
METRICS = ("accuracy", "loss", "personal_accuracy")
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
    allow_code: str | Iterable[str] = (),
    on_event: Listener | None = None,
) -> list[Run]:
    """Train every combination of the given values. Runs that an earlier call finished are read; unfinished ones are continued.

    Args:
        config: a config, or a preset's name or TOML file, whose settings for single methods apply to the runs of these methods.
        over: key -> values, such as ``{"method.name": ["fedavg", "fedsol"], "seed": [0, 1, 2]}``.
        out: folder of the runs; by default ``checkpoints``.
        executor: where the runs are trained (of a single one the clients of a round), see ``train``. A run that is trained
            elsewhere than in this process tells its end only.
        shard: train and return only a part of the runs, ``"I/N"``; a call without it returns all.
        device: see ``train``.
        download: fetch a missing public data set.
        allow_code: see ``train``.
        on_event: gets the events of every run, see ``train``.

    Returns:
        The runs in the order of the combinations, the last key changing fastest. One that diverged is among them.

    Raises:
        FldiagError: a config that is refused, before anything is trained.

    >>> import tempfile, fldiag
    >>> start = fldiag.Config.load("digits", rounds=1, model__name="mlp", clients__per_round=2, train__epochs=1)
    >>> [run.config.seed for run in fldiag.sweep(start, {"seed": [3, 4]}, out=tempfile.mkdtemp())]
    [3, 4]
    """
    plan = configs(config.allow(allow_code) if isinstance(config, Config) else config, over)
    return train_configs(
        shard_of(plan, shard),
        out=out,
        executor=executor,
        device=device,
        download=download,
        on_event=on_event,
    )


def train_configs(
    plan: Sequence[Config],
    *,
    out: str | Path | None,
    executor: str | Executor,
    on_event: Listener | None,
    **options: Any,
) -> list[Run]:
    """Train all of them, or read the runs that are finished; the arguments are those of ``sweep``."""
    paths = [Path(out or train.RUNS) / train.run_path(config).name for config in plan]
    units = list(zip(plan, paths, strict=True))
    if executor == "serial" or len(plan) == 1:  # of one run the clients
        options |= {"executor": executor, "on_event": on_event}
        return [_train(options, unit) for unit in units]
    if options["download"]:  # once, rather than by every worker
        for config in {config.data: config for config in plan}.values():
            data.load(config.data, download=True, allow_code=config.allowed_code)
    options, paths = {**options, "download": False}, [path.absolute() for path in paths]
    with open_pool(executor, _train_one, options, name=_name) as pool:
        for i, status in pool.completed(list(zip(plan, paths, strict=True))):
            event = {"event": "end", "status": status, "round": plan[i].rounds}
            (on_event or dict)({**event, "path": str(paths[i])})
    return [Run.open(path) for path in paths]


def _train(options: Mapping[str, Any], unit: tuple[Config, Path]) -> Run:
    config, path = unit
    return train.train(config, out=path, resume=True, **options)


def _train_one(options: Mapping[str, Any], unit: tuple[Config, Path]) -> str:
    """Train a run in a worker. Returns its status."""
    return str(_train(options, unit).status)


def _name(unit: tuple[Config, Path]) -> str:
    return unit[1].name


def combinations(over: Values) -> list[dict[str, Any]]:
    """Every combination of the values, the last key's changing fastest. Raises FldiagError for a key without values."""
    if missing := [key for key, values in over.items() if not values]:
        raise FldiagError(f"{missing[0]} has no values", "write for example seed=1,2", usage=True)
    return [dict(zip(over, values, strict=True)) for values in itertools.product(*over.values())]


def configs(
    source: Config | str | Path, over: Values, fixed: Mapping[str, Any] | None = None
) -> list[Config]:
    """The configs of a sweep, all different. Of a preset or file each gets what that says of its method.

    Args:
        source: a config, or a preset's name or TOML file.
        over: key -> values.
        fixed: keys of all runs.

    Raises:
        FldiagError: what a config refuses, and combinations that mean the same run.
    """
    plan = [
        source.replace(**keys) if isinstance(source, Config) else Config.load(source, **keys)
        for keys in ({**(fixed or {}), **keys} for keys in combinations(over))
    ]
    if len({config.hash for config in plan}) < len(plan):
        raise FldiagError(
            "two combinations of the sweep are the same run", "give every value once", usage=True
        )
    return plan


def table(runs: Sequence[Run], over: Values) -> pd.DataFrame:
    """A row a setting: mean and standard deviation over the seeds of the last round's numbers.

    Args:
        runs: the runs of ``combinations(over)``, in this order.
        over: key -> values.

    Returns:
        The keys but the seed, ``runs``, the numbers, and ``diverged``: how many runs failed, which are left out of the numbers.
    """
    rows = []
    for run, keys in zip(runs, combinations(over), strict=True):
        frame = run.metrics.query("scope == 'global' and slice != 'train'").sort_values("round")
        last = frame.groupby("metric")["value"].last().astype(float).reindex(METRICS)
        failed = failure(run) is not None
        rows.append({k: str(v) for k, v in keys.items() if k != "seed"} | {"diverged": failed})
        rows[-1] |= {} if failed else dict(last)
    members, names = pd.DataFrame(rows), [key for key in over if key != "seed"]
    groups = members.groupby(names or (lambda i: 0), sort=False)
    scores = {"runs": groups.size()}
    for metric in members.columns.intersection(METRICS, sort=False):
        scores |= {metric: groups[metric].mean(), f"{metric}_std": groups[metric].std()}
    result = pd.DataFrame({**scores, "diverged": groups["diverged"].sum()})
    result = result.reset_index(drop=not names).dropna(axis=1, how="all")
    return result if result["diverged"].any() else result.drop(columns="diverged")
