"""Several runs of one config: every combination of some keys' values, and a fair choice of hyper-parameters before."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from fldiag import data
from fldiag.config import Config
from fldiag.data import partition
from fldiag.data.arrays import spread
from fldiag.errors import FldiagError
from fldiag.execution.executor import Shard, parse_executor
from fldiag.execution.pools import open_pool
from fldiag.runs.run import Run
from fldiag.seeding import numpy_rng
from fldiag.training import rounds
from fldiag.training.rounds import Listener, failure
from fldiag.training.setup import Setup

#: Share of the training examples that judge the candidates of ``tune``; no run trains on them while it is judged.
HELD_OUT = 0.1
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
    part = Shard.parse(shard)
    plan = configs(config.allow(allow_code) if isinstance(config, Config) else config, over)
    return train_configs(
        part.part(plan) if part is not None else plan,
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
    outs = [None if out is None else Path(out) / rounds.run_path(c).name for c in plan]
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
    tunings: Mapping[str, Tuning] | None = None,
) -> list[Config]:
    """The configs of a sweep, all different. Of a preset or file each gets what that says of its method.

    Args:
        source: a config, or a preset's name or TOML file.
        over: key -> values.
        fixed: keys of all runs.
        tunings: ``label`` of a setting -> its tuning, whose best values it gets.

    Raises:
        FldiagError: what a config refuses, and combinations that mean the same run.
    """
    plan = []
    for keys in combinations(over):
        best = tunings[_setting_label(keys)].best if tunings else {}
        plan.append(_config(source, {**(fixed or {}), **best, **keys}))
    if len({config.hash for config in plan}) < len(plan):
        raise FldiagError(
            "two combinations of the sweep are the same run", "give every value once", usage=True
        )
    return plan


def _config(source: Config | str | Path, keys: Mapping[str, Any]) -> Config:
    return source.replace(**keys) if isinstance(source, Config) else Config.load(source, **keys)


@dataclass(frozen=True)
class RunTrainer:
    """What all runs share; ``dataset``: in the place of what their configs name, with these ``rows`` of its training examples."""

    device: str
    download: bool
    dataset: data.Dataset | None = None
    rows: np.ndarray | None = None

    def train(
        self,
        config: Config,
        out: Path | None,
        executor: str | Executor = "serial",
        on_event: Listener | None = None,
    ) -> Run:
        setup = None
        if self.dataset is not None:
            setup = Setup(
                config,
                device=self.device,
                download=self.download,
                dataset=self.dataset,
                parts=self._parts(config),
            )
        return rounds.train(
            config,
            out=out,
            resume=True,
            executor=executor,
            device=self.device,
            download=self.download,
            on_event=on_event,
            setup=setup,
        )

    def _parts(self, config: Config) -> list[np.ndarray] | None:
        """The clients' rows of a partition from a file, which numbers the examples of the complete training split."""
        spec = config.partition
        if spec.kind != "file" or self.dataset is None or self.rows is None:
            return None
        examples = len(self.rows) + len(self.dataset.test_y)
        parts = partition.from_file(str(spec.path), spec.digest, config.clients.total, examples)
        return [np.searchsorted(self.rows, part[np.isin(part, self.rows)]) for part in parts]


def _train_all(
    plan: Sequence[Config],
    outs: Sequence[Path | None],
    executor: str | Executor,
    trainer: RunTrainer,
    on_event: Listener | None,
) -> list[Run]:
    if parse_executor(executor).kind == "serial" or len(plan) <= 1:  # of one run the clients
        return [
            trainer.train(config, out, executor, on_event)
            for config, out in zip(plan, outs, strict=True)
        ]
    folders = [
        (out or rounds.run_path(config)).absolute() for config, out in zip(plan, outs, strict=True)
    ]
    if trainer.download and trainer.dataset is None:  # once, rather than by every worker
        for config in {config.data: config for config in plan}.values():
            data.of(config.data, True, config.allowed_code)
    shared = replace(trainer, download=False)
    with open_pool(executor, _train_one, shared, name=_run_name, most=len(plan)) as pool:
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


# -- hyper-parameters


@dataclass
class Tuning:
    """What ``tune`` did for one setting: the ``best`` values, and the score (accuracy on held-out training examples, or None
    for a run that failed) of every candidate."""

    best: dict[str, Any]
    scores: list[tuple[dict[str, Any], float | None]]


def tune(
    source: Config | str | Path,
    grid: Values,
    budget: int,
    *,
    fixed: Mapping[str, Any] | None = None,
    out: Path | None = None,
    executor: str | Executor = "serial",
    device: str = "auto",
    download: bool = False,
    on_event: Listener | None = None,
) -> Tuning:
    """Choose hyper-parameters of one setting on held-out training examples.

    Every tenth training example of each class (``HELD_OUT``) is taken out before the data are dealt to clients; the final
    global model of every candidate is judged on them. The test set is never looked at. ``budget`` candidates are tried, drawn
    without replacement from the grid where it has more, the same ones for every setting: a method that is given more tries than
    another would win by that alone.

    Args:
        source: a config, or a preset's name or TOML file.
        grid: key -> its candidate values.
        budget: how many candidates are tried.
        fixed: the keys of the setting; its first seed.
        out: folder of the candidates' runs (they are kept, and read when asked again).
        executor: where the candidates are trained, see ``sweep``.
        device: see ``train``.
        download: fetch a missing public data set.
        on_event: gets the events of every run.

    Raises:
        FldiagError: a candidate is refused, or all of them failed.
    """
    candidates = combinations(grid)
    if budget < 1:
        raise FldiagError(f"a budget of {budget} candidates", "try at least one", usage=True)
    if budget < len(candidates):
        sample = numpy_rng(0, "tune").permutation(len(candidates))[:budget]
        candidates = [candidates[i] for i in sorted(sample)]
    plan = [_config(source, {**(fixed or {}), **keys}) for keys in candidates]
    dataset, rows = _hold_out(data.of(plan[0].data, download, plan[0].allowed_code))
    outs = [(out or rounds.RUNS) / "tuning" / rounds.run_path(config).name for config in plan]
    runs = _train_all(plan, outs, executor, RunTrainer(device, download, dataset, rows), on_event)
    scores = [None if failure(run) else _score(run) for run in runs]
    scored = [(s, values) for s, values in zip(scores, candidates, strict=True) if s is not None]
    if not scored:
        raise FldiagError("every candidate failed", "give smaller learning rates", usage=True)
    _, best = max(scored, key=lambda pair: pair[0])  # of equal ones the first
    return Tuning(best, list(zip(candidates, scores, strict=True)))


def _hold_out(dataset: data.Dataset) -> tuple[data.Dataset, np.ndarray]:
    """The training split without every tenth example of each class, and these in place of the test split; and which rows of
    the training split stay."""
    if dataset.is_lazy:
        raise FldiagError(
            f"tuning holds out examples of the training split, and those of {dataset.name!r} are made client by "
            "client",
            "tune on another data set",
            usage=True,
        )
    n = len(dataset.train_y)
    count = max(1, round(HELD_OUT * n))
    mask = torch.zeros(n, dtype=torch.bool)
    mask[spread(dataset.train_y.cpu(), count)] = True
    split = replace(
        dataset,
        train_x=dataset.train_x[~mask],
        train_y=dataset.train_y[~mask],
        test_x=dataset.train_x[mask],
        test_y=dataset.train_y[mask],
    )
    return split, (~mask).nonzero()[:, 0].numpy()


def _score(run: Run) -> float | None:
    """The final accuracy: of the global model, or of the clients' own where there is none."""
    frame = run.metrics
    for metric in ("accuracy", "personal_accuracy"):
        rows = frame[
            (frame["metric"] == metric) & (frame["scope"] == "global") & (frame["slice"] != "train")
        ]
        if len(rows):
            return float(rows.sort_values("round")["value"].iloc[-1])
    return None


# -- the result


def table(runs: Sequence[Run], over: Values, tunings: Mapping[str, Tuning]) -> pd.DataFrame:
    """A row a setting: mean and standard deviation over the seeds of the last round's numbers, and what was tuned.

    Runs that failed are counted in ``diverged``, and left out of the numbers.

    Args:
        runs: the runs of ``combinations(over)``, in this order.
        over: key -> values.
        tunings: ``label`` of a setting -> its tuning.
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
        if tunings:
            tuning = tunings[label(setting)]
            row |= {"tuned": label(tuning.best), "tries": len(tuning.scores)}
        rows.append(row)
    return pd.DataFrame(rows)


def _last_scores(run: Run) -> dict[str, float]:
    frame = run.metrics.query("scope == 'global' and slice != 'train'").sort_values("round")
    last = frame.groupby("metric")["value"].last()
    return {metric: float(last[metric]) for metric in METRICS if metric in last}
