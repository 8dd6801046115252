"""Many runs: every combination of some keys' values."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
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
    device: str,
    download: bool,
    on_event: Listener | None,
) -> list[Run]:
    """Train all of them, or read the runs that are finished; the arguments are those of ``sweep``."""
    outs = [None if out is None else Path(out) / train.run_path(c).name for c in plan]
    return _train_all(plan, outs, executor, RunTrainer(device, download), on_event)


def combinations(over: Values) -> list[dict[str, Any]]:
    """Every combination of the values, the last key's changing fastest. Raises FldiagError for a key without values."""
    for key, values in over.items():
        if not values:
            raise FldiagError(f"{key} has no values", f"write for example {key}=1,2", usage=True)
    return [dict(zip(over, values, strict=True)) for values in itertools.product(*over.values())]


def settings(over: Values) -> list[dict[str, Any]]:
    """The combinations without their seeds."""
    return combinations({key: values for key, values in over.items() if key != "seed"})


def label(setting: Mapping[str, Any]) -> str:
    """Keys and values in words.

    >>> label({"method.name": "fedprox", "train.lr": 0.1})
    'name fedprox, lr 0.1'
    """
    names = [f"{k.removeprefix('method.').removeprefix('train.')} {v}" for k, v in setting.items()]
    return ", ".join(names) or "all"


def _setting_label(keys: Mapping[str, Any]) -> str:
    return label({key: value for key, value in keys.items() if key != "seed"})


def configs(
    source: Config | str | Path,
    over: Values,
    fixed: Mapping[str, Any] | None = None,
) -> list[Config]:
    """The configs of a sweep, all different. Of a preset or file each gets what that says of its method.

    Args:
        source: a config, or a preset's name or TOML file.
        over: key -> values.
        fixed: keys of all runs.

    Raises:
        FldiagError: what a config refuses, and combinations that mean the same run.
    """
    plan = [_config(source, {**(fixed or {}), **keys}) for keys in combinations(over)]
    if len({config.hash for config in plan}) < len(plan):
        raise FldiagError(
            "two combinations of the sweep are the same run", "give every value once", usage=True
        )
    return plan


def _config(source: Config | str | Path, keys: Mapping[str, Any]) -> Config:
    return source.replace(**keys) if isinstance(source, Config) else Config.load(source, **keys)


@dataclass(frozen=True)
class RunTrainer:
    """What all runs share."""

    device: str
    download: bool

    def train(
        self,
        config: Config,
        out: Path | None,
        executor: str | Executor = "serial",
        on_event: Listener | None = None,
    ) -> Run:
        return train.train(
            config,
            out=out,
            resume=True,
            executor=executor,
            device=self.device,
            download=self.download,
            on_event=on_event,
        )


def _train_all(
    plan: Sequence[Config],
    outs: Sequence[Path | None],
    executor: str | Executor,
    trainer: RunTrainer,
    on_event: Listener | None,
) -> list[Run]:
    if executor == "serial" or len(plan) <= 1:  # of one run the clients
        return [
            trainer.train(config, out, executor, on_event)
            for config, out in zip(plan, outs, strict=True)
        ]
    folders = [
        (out or train.run_path(config)).absolute() for config, out in zip(plan, outs, strict=True)
    ]
    if trainer.download:  # once, rather than by every worker
        for config in {config.data: config for config in plan}.values():
            data.of(config.data, True, config.allowed_code)
    shared = replace(trainer, download=False)
    with open_pool(executor, _train_one, shared, name=_run_name) as pool:
        for i, status in pool.completed(list(zip(plan, folders, strict=True))):
            if on_event is not None:
                on_event(
                    {
                        "event": "end",
                        "status": status,
                        "round": plan[i].rounds,
                        "path": str(folders[i]),
                    }
                )
    return [Run.open(folder) for folder in folders]


def _train_one(trainer: RunTrainer, unit: tuple[Config, Path]) -> str:
    """Train a run in a worker. Returns its status."""
    return str(trainer.train(*unit).status)


def _run_name(unit: tuple[Config, Path]) -> str:
    return unit[1].name


def table(runs: Sequence[Run], over: Values) -> pd.DataFrame:
    """A row a setting: mean and standard deviation over the seeds of the last round's numbers.

    Runs that failed are counted in ``diverged``, and left out of the numbers.

    Args:
        runs: the runs of ``combinations(over)``, in this order.
        over: key -> values.
    """
    has_failed = [failure(run) is not None for run in runs]
    scores = pd.DataFrame([_last_scores(run) for run in runs])
    names = [_setting_label(keys) for keys in combinations(over)]
    rows = []
    for setting in settings(over):
        members = [i for i, name in enumerate(names) if name == label(setting)]
        row: dict[str, Any] = {key: str(value) for key, value in setting.items()}
        row["runs"] = len(members)
        ended = [i for i in members if not has_failed[i]]
        for metric in METRICS:
            if metric in scores and ended:
                values = scores[metric].iloc[ended]
                row[metric] = values.mean()
                row[f"{metric}_std"] = values.std(ddof=1) if len(ended) > 1 else None
        if len(ended) < len(members):
            row["diverged"] = len(members) - len(ended)
        rows.append(row)
    return pd.DataFrame(rows)


def _last_scores(run: Run) -> dict[str, float]:
    frame = run.metrics.query("scope == 'global' and slice != 'train'").sort_values("round")
    last = frame.groupby("metric")["value"].last()
    return {metric: float(last[metric]) for metric in METRICS if metric in last}
