"""Several runs of one config: every combination of some keys' values, and a fair choice of hyper-parameters before."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fldiag import data
from fldiag.checkpoint.run import Run
from fldiag.config import Config
from fldiag.data.arrays import spread
from fldiag.errors import FldiagError
from fldiag.execution.executor import Shard, parse_executor
from fldiag.execution.pools import open_pool
from fldiag.seeding import numpy_rng
from fldiag.training import rounds
from fldiag.training.outcome import failure
from fldiag.training.setup import Setup

#: Share of the training examples that judge the candidates of ``tune``; no run trains on them while it is judged.
HELD_OUT = 0.1
Values = Mapping[str, Sequence[Any]]
Event = Callable[[dict[str, Any]], None]


@dataclass
class Tuned:
    """What ``tune`` found for one setting: the values chosen, and the score (accuracy on held-out training examples, or None
    for a run that failed) of every candidate tried."""

    chosen: dict[str, Any]
    tried: list[tuple[dict[str, Any], float | None]] = field(default_factory=list)


def combinations(over: Values) -> list[dict[str, Any]]:
    """Every combination of the values, the last key's changing fastest. Raises FldiagError for a key without values."""
    for key, values in over.items():
        if not values:
            raise FldiagError(f"{key} has no values", f"write for example {key}=1,2", usage=True)
    return [dict(zip(over, values, strict=True)) for values in itertools.product(*over.values())]


def configs(
    source: Config | str | Path, over: Values, fixed: Mapping[str, Any] | None = None
) -> list[Config]:
    """The configs of a sweep, all different. Of a preset or file each gets what that says of its method.

    Raises FldiagError for what a config refuses, and for combinations that mean the same run."""
    found = [_config(source, {**(fixed or {}), **keys}) for keys in combinations(over)]
    if len({c.hash for c in found}) < len(found):
        raise FldiagError(
            "two combinations of the sweep are the same run", "give every value once", usage=True
        )
    return found


def _config(source: Config | str | Path, keys: Mapping[str, Any]) -> Config:
    return source.replace(**keys) if isinstance(source, Config) else Config.load(source, **keys)


def sweep(
    source: Config | str | Path,
    over: Values,
    *,
    fixed: Mapping[str, Any] | None = None,
    out: Path | None = None,
    executor: Any = "serial",
    shard: Shard | None = None,
    device: str = "auto",
    download: bool = False,
    on_event: Event | None = None,
) -> list[Run]:
    """Train every combination; what a former call finished is read, and what it began goes on.

    Args:
        source: a config, or a preset's name or TOML file.
        over: key -> its values, such as {"method.name": ["fedavg", "fedsol"], "seed": [0, 1, 2]}.
        fixed: keys that are the same in all runs.
        out: folder of the runs; by default ``checkpoints``.
        executor: where the runs are trained (of a single one the clients of a round), see ``train``. Elsewhere than in this
            process a run tells its end only.
        shard: only these of the runs; they are what is returned.
        device: see ``train``.
        download: fetch a missing public data set.
        on_event: gets the events of every run, see ``train``.

    Returns:
        The runs, in the order of the combinations. A run that diverged is one of them.

    Raises:
        FldiagError: a config that is refused; before anything is trained.
    """
    wanted = configs(source, over, fixed)
    wanted = shard.part(wanted) if shard is not None else wanted
    return _all(
        wanted,
        [_folder(config, out) for config in wanted],
        executor,
        Bench(device, download),
        on_event,
    )


@dataclass(frozen=True)
class Bench:
    """What all runs share; ``dataset``: in the place of what their configs name."""

    device: str
    download: bool
    dataset: data.Dataset | None = None

    def train(
        self,
        config: Config,
        out: Path | None,
        executor: Any = "serial",
        on_event: Event | None = None,
    ) -> Run:
        setup = (
            None
            if self.dataset is None
            else Setup(config, device=self.device, download=self.download, dataset=self.dataset)
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


def _all(
    wanted: Sequence[Config],
    outs: Sequence[Path | None],
    executor: Any,
    bench: Bench,
    on_event: Event | None,
) -> list[Run]:
    if parse_executor(executor).kind == "serial" or len(wanted) <= 1:  # of one run the clients
        return [
            bench.train(config, out, executor, on_event)
            for config, out in zip(wanted, outs, strict=True)
        ]
    folders = [
        (out or rounds.run_path(config)).absolute()
        for config, out in zip(wanted, outs, strict=True)
    ]
    if bench.download and bench.dataset is None:  # once, rather than by every worker
        for config in {config.data: config for config in wanted}.values():
            data.of(config.data, True, config.allowed_code)
    with open_pool(
        executor, _trained, replace(bench, download=False), name=_name, most=len(wanted)
    ) as pool:
        for i, status in pool.completed(list(zip(wanted, folders, strict=True))):
            if on_event is not None:
                on_event(
                    {
                        "event": "end",
                        "status": status,
                        "round": wanted[i].rounds,
                        "path": str(folders[i]),
                    }
                )
    return [Run.open(folder) for folder in folders]


def _trained(bench: Bench, unit: tuple[Config, Path]) -> str:
    """A run trained where this is called. Returns its status."""
    return str(bench.train(*unit).status)


def _name(unit: tuple[Config, Path]) -> str:
    return unit[1].name


def _folder(config: Config, out: Path | None) -> Path | None:
    return None if out is None else out / rounds.run_path(config).name


def tune(
    source: Config | str | Path,
    grid: Values,
    budget: int,
    *,
    fixed: Mapping[str, Any] | None = None,
    out: Path | None = None,
    executor: Any = "serial",
    device: str = "auto",
    download: bool = False,
    on_event: Event | None = None,
) -> Tuned:
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
        drawn = numpy_rng(0, "tune").permutation(len(candidates))[:budget]
        candidates = [candidates[i] for i in sorted(drawn)]
    made = [_config(source, {**(fixed or {}), **keys}) for keys in candidates]
    bench = Bench(
        device, download, _held_out(data.of(made[0].data, download, made[0].allowed_code))
    )
    outs = [(out or rounds.RUNS) / "tuning" / rounds.run_path(config).name for config in made]
    runs = _all(made, outs, executor, bench, on_event)
    found = Tuned(
        {},
        [
            (keys, None if failure(run) else _score(run))
            for keys, run in zip(candidates, runs, strict=True)
        ],
    )
    scored = [(score, keys) for keys, score in found.tried if score is not None]
    if not scored:
        raise FldiagError("every candidate failed", "give smaller learning rates", usage=True)
    found.chosen = max(scored, key=lambda pair: pair[0])[1]  # of equal ones the first
    return found


def _held_out(dataset: data.Dataset) -> data.Dataset:
    """The training split without every tenth example of each class, and these in place of the test split."""
    if dataset.made:
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
    return replace(
        dataset,
        train_x=dataset.train_x[~mask],
        train_y=dataset.train_y[~mask],
        test_x=dataset.train_x[mask],
        test_y=dataset.train_y[mask],
    )


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
