"""Which runs the studies need at a scale, each once: what they ask of it and what it has to keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from fldiag.config import Config, parse_override
from fldiag.errors import FldiagError, unknown
from fldiag.results.cache import Cache, Tell
from fldiag.results.provenance import digest, provenance
from fldiag.runs.run import Run
from fldiag_papers.scales import LeftOut, Scale, flat
from fldiag_papers.study import Ask, Study, Trial


def ask_key(scale: Scale, ask: Ask, rounds: tuple[int, ...] = ()) -> str:
    """Names the answer's file; of questions over the rounds each choice of rounds has its own."""
    decisive = {**scale.options(ask), **({"rounds": list(rounds)} if ask.needs == "rounds" else {})}
    return f"{ask.name}-{digest(decisive)[:12]}"


@dataclass
class Task:
    """One run: its config with all that any study wants kept, and what the studies at hand ask."""

    core: str  # hash of what decides the training
    config: Config
    scale: Scale
    questions: list[Ask] = field(default_factory=list)
    rounds: tuple[int, ...] = ()  # whose clients' weights stay
    state: bool = False  # whether the clients' states stay
    timed: bool = False  # whether somebody wants to know how long one thread takes
    users: list[str] = field(default_factory=list)
    records: Path | None = None  # where finished runs lie without their weights

    @property
    def asks(self) -> dict[str, Ask]:
        """By the name of the answer's file."""
        return {ask_key(self.scale, a, self.rounds): a for a in self.questions}

    @property
    def stem(self) -> str:
        c = self.config
        data = "".join(ch if ch.isalnum() or ch in "._" else "-" for ch in c.data.name)
        return f"{data}-{c.method.name}-s{c.seed}-{self.core[:10]}"

    @property
    def text(self) -> str:
        c = self.config
        split = "".join(
            f"{v}" for k, v in c.partition.options.items() if k != "min_size" and v is not None
        )
        return (
            f"{c.method.name} on {c.data.name}, {c.partition.kind} {split}, seed {c.seed}".replace(
                " ,", ","
            )
        )

    def folder(self, store: Path) -> Path:
        """The run's folder: one that is there and has what is asked, or the one to train in."""
        for path in self._folders(store):
            if self.fits(path):
                return path
        suffix = digest([self.config.fingerprint(checkpoint=True), list(self.rounds), self.state])
        return store / f"{self.stem}-{suffix[:6]}"

    def ended(self, store: Path) -> Path | None:
        """Where a run lies that ended, whether it has what is asked or not."""
        return next(
            (path for path in [self.folder(store), *self._folders(store)] if finished(path)), None
        )

    def is_record(self, path: Path) -> bool:
        """Whether a run there is without weights: what it has no answer to is asked of its metrics."""
        try:
            return Run.open(path).is_record
        except FldiagError:
            return False

    def _folders(self, store: Path) -> list[Path]:
        """The run's folders, those with weights first."""
        return [
            path
            for folder in (store, self.records)
            if folder
            for path in sorted(folder.glob(f"{self.stem}-*"))
        ]

    def fits(self, path: Path) -> bool:
        try:
            run = Run.open(path)
        except FldiagError:
            return False
        if run.status not in ("finished", "diverged"):
            return self._goes_on(run)
        config, stored_answers = run.index["config"], answers(path)
        return all(
            stored_answers.has(key) or self._has(run, config, ask) for key, ask in self.asks.items()
        )

    def _goes_on(self, run: Run) -> bool:
        """Whether training can take the run up and all of its rounds then hold what is wanted."""
        try:
            fingerprint = run.config.fingerprint(version=run.method_version, checkpoint=True)
        except FldiagError:
            return False
        return fingerprint == self.config.fingerprint(checkpoint=True)

    def _has(self, run: Run, config: dict, ask: Ask) -> bool:  # type: ignore[type-arg]
        if ask.needs not in ("nothing", "metrics") and run.is_record:
            return False
        if (
            ask.needs == "rounds"
            and run.status == "finished"
            and not set(self.rounds) <= set(run.rounds)
        ):
            return False
        if ask.needs in ("clients", "rounds") and config["checkpoint"]["clients"] == "none":
            return False
        if ask.steps and (
            not config["metrics"]["steps"] or config["metrics"]["proximal"] != ask.steps
        ):
            return False
        return ask.needs != "state" or not run.index.get("thinned", {}).get("state", False)

    def done(self, path: Path) -> bool:
        """Whether nothing is left to train or ask."""
        stored_answers = answers(path)
        return (
            all(stored_answers.has(key) for key in self.asks) and self.fits(path) and finished(path)
        )


def finished(path: Path) -> bool:
    try:
        return Run.open(path).status in ("finished", "diverged")
    except FldiagError:
        return False


class Answers:
    """The kept answers in a folder, by the key of the question (``ask_key``)."""

    def __init__(self, folder: Path):
        self.cache = Cache(folder)

    def has(self, key: str) -> bool:
        return self.cache.has(*_split(key))

    def get(self, key: str, on_damage: Tell | None = None) -> pd.DataFrame | None:
        return self.cache.get(*_split(key), on_damage)

    def save(self, key: str, answer: pd.DataFrame, about: dict[str, Any]) -> None:
        self.cache.put(*_split(key), answer, {**provenance(), **about})


def _split(key: str) -> tuple[str, str]:
    name, _, digits = key.rpartition("-")
    return name, digits


def answers(run: Path) -> Answers:
    """Those of a run's folder."""
    return Answers(run / "answers")


@dataclass
class Plan:
    """``cells``: (study, number of the trial, seed) -> the hash of its run; ``left_out``: those that the scale has not;
    ``records``: where finished runs lie without their weights."""

    scale: Scale
    store: Path
    tasks: dict[str, Task] = field(default_factory=dict)
    cells: dict[tuple[str, int, int], str] = field(default_factory=dict)
    left_out: dict[tuple[str, int], str] = field(default_factory=dict)
    failed: dict[tuple[str, int], str] = field(default_factory=dict)  # questions to configs alone
    records: Path | None = None


def make_plan(
    scale: Scale,
    studies: Iterable[Study],
    everything: Iterable[Study],
    store: Path,
    records: Path | None = None,
) -> Plan:
    """The plan of ``studies``. What a run keeps is what any of ``everything`` wants, so that it does not depend on which
    figures are asked for first. Raises FldiagError for trials that are no valid configs."""
    plan, names = Plan(scale, store, records=records), {s.name for s in studies}
    wants: dict[str, list[Ask]] = {}
    configs: dict[str, Config] = {}
    cache: dict[tuple[object, ...], Config | LeftOut] = {}
    for study in {s.name: s for s in [*everything, *studies]}.values():
        for number, trial in enumerate(study.trials):
            for place, seed in enumerate(scale.seed_list(study.seeds)):
                config = _config(scale, trial, seed, store, cache, study)
                if isinstance(config, LeftOut):
                    plan.left_out[study.name, number] = config.what
                    continue
                if not trial.train:
                    continue
                core, asks = config.hash, study.questions_for(trial, place)
                configs[core] = config
                wants.setdefault(core, []).extend(asks)
                if study.name in names:
                    task = plan.tasks.setdefault(core, Task(core, config, scale, records=records))
                    task.questions += [a for a in asks if a not in task.questions]
                    task.users += [study.name] if study.name not in task.users else []
                    plan.cells[study.name, number, seed] = core
    for core, task in plan.tasks.items():
        _keep(task, wants[core], scale)
    return plan


def _config(
    scale: Scale,
    trial: Trial,
    seed: int,
    store: Path,
    cache: dict[tuple[object, ...], Config | LeftOut],
    study: Study,
) -> Config | LeftOut:
    key = (trial.preset, trial.method, repr(sorted(trial.over.items())), trial.train, seed)
    if key not in cache:
        try:
            cache[key] = scale.config(trial, seed, store)
        except LeftOut as reason:
            cache[key] = reason
        except FldiagError as error:
            raise FldiagError(
                f"{study.name}, trial {trial.label or trial.method or trial.preset}: {error.what}",
                error.remedy,
            ) from error
    return cache[key]


def _keep(task: Task, wants: list[Ask], scale: Scale) -> None:
    """Fill in what the run has to keep."""
    rounds, interval = task.config.rounds, min(scale.checkpoint_every, task.config.rounds)
    needs, steps = {a.needs for a in wants}, {a.steps for a in wants if a.steps}
    if len(steps) > 1:
        raise FldiagError(
            f"studies want different proximal losses of the steps of {task.text}: {', '.join(sorted(steps))}",
            "agree on one (drift(steps=...))",
        )
    checkpoints = [*range(interval, rounds, interval), rounds]
    if "rounds" in needs:
        count = min(len(checkpoints), scale.history)
        task.rounds = tuple(
            sorted(
                {checkpoints[round((i + 1) * len(checkpoints) / count) - 1] for i in range(count)}
            )
        )
    task.state = "state" in needs
    task.timed = any(a.name == "seconds" for a in wants)
    keep = {
        "checkpoint__every": interval,
        "checkpoint__clients": "sampled" if needs & {"clients", "rounds"} else "none",
    }
    if steps:
        keep |= {
            "metrics__steps": True,
            "metrics__every": interval,
            "metrics__proximal": steps.pop(),
        }
    task.config = task.config.replace(**keep)


def only(texts: Iterable[str], configs: Iterable[Config]) -> Callable[[Config], bool]:
    """The choice that ``--only`` makes: all of ``seed=0``, ``method.name=fedavg,fedsol``, ... hold, values as ``--set`` reads
    them.

    Raises FldiagError for what is no KEY=VALUE, and for keys and values that none of ``configs`` has (where there are any)."""
    choices: dict[str, list[Any]] = {}
    for text in texts:
        key, _, choice = text.partition("=")
        if not key or not choice:
            raise FldiagError(
                f"--only {text}",
                "give KEY=VALUE, such as --only method.name=fedavg or --only seed=0",
                usage=True,
            )
        choices.setdefault(key, []).extend(
            parse_override(f"{key}={value}")[1] for value in choice.split(",")
        )
    flat_configs = [flat(c) for c in configs]
    for key, values in choices.items() if flat_configs else ():
        values_of_key = [f[key] for f in flat_configs if f.get(key) is not None]
        if not values_of_key:
            raise unknown(
                "key of --only",
                key,
                {k for f in flat_configs for k, v in f.items() if v is not None},
            )
        for value in values:
            if value not in values_of_key:
                raise unknown(f"{key} of --only", str(value), set(map(str, values_of_key)))
    return lambda config: all(flat(config).get(key) in values for key, values in choices.items())
