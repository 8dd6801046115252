"""Which runs the studies need at a scale, each once: what is asked of it, what it has to keep, and where it lies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fldiag.config import Config, parse_override
from fldiag.errors import FldiagError, unknown
from fldiag.results.cache import Cache
from fldiag.results.provenance import digest
from fldiag.runs.run import Run
from fldiag_papers.scales import LeftOut, Scale, flat
from fldiag_papers.study import Ask, Study, Trial

#: Name and digest under which a cache has an answer.
Key = tuple[str, str]


def answer_key(scale: Scale, ask: Ask, rounds: tuple[int, ...] = ()) -> Key:
    """Of a question over the rounds each choice of rounds has an answer of its own."""
    decisive = {**scale.options(ask), **({"rounds": list(rounds)} if ask.needs == "rounds" else {})}
    return ask.name, digest(decisive)[:12]


def answers(run: Path) -> Cache:
    return Cache(run / "answers")


def open_run(path: Path) -> Run | None:
    try:
        return Run.open(path)
    except FldiagError:
        return None


def is_finished(run: Run) -> bool:
    return run.status in ("finished", "diverged")


@dataclass
class Task:
    """One run: its config with all that any study wants kept, and what the studies of the plan ask.

    ``core``: hash of what decides the training; ``rounds``: whose clients' weights stay; ``has_state``: the clients' states
    stay; ``is_timed``: the seconds of one thread are asked for."""

    core: str
    config: Config
    asks: dict[Key, Ask] = field(default_factory=dict)
    rounds: tuple[int, ...] = ()
    has_state: bool = False
    is_timed: bool = False
    users: list[str] = field(default_factory=list)

    @property
    def stem(self) -> str:
        c = self.config
        data = "".join(ch if ch.isalnum() or ch in "._" else "-" for ch in c.data.name)
        return f"{data}-{c.method.name}-s{c.seed}-{self.core[:10]}"

    @property
    def text(self) -> str:
        c = self.config
        split = "".join(
            f" {v}" for k, v in c.partition.options.items() if k != "min_size" and v is not None
        )
        return f"{c.method.name} on {c.data.name}, {c.partition.kind}{split}, seed {c.seed}"

    def fits(self, run: Run) -> bool:
        """Whether the run has, or can be given, all that is asked: an unfinished one, when it is continued."""
        if is_finished(run):
            cache = answers(run.path)
            return all(
                cache.has(*key) or self._can_answer(run, ask) for key, ask in self.asks.items()
            )
        try:
            fingerprint = run.config.fingerprint(version=run.method_version, checkpoint=True)
        except FldiagError:
            return False
        return fingerprint == self.config.fingerprint(checkpoint=True)

    def _can_answer(self, run: Run, ask: Ask) -> bool:
        config = run.index["config"]
        if ask.needs not in ("nothing", "metrics") and run.is_record:
            return False
        lacks_rounds = run.status == "finished" and not set(self.rounds) <= set(run.rounds)
        if ask.needs == "rounds" and lacks_rounds:
            return False
        if ask.needs in ("clients", "rounds") and config["checkpoint"]["clients"] == "none":
            return False
        metrics = config["metrics"]
        if ask.steps and not (metrics["steps"] and metrics["proximal"] == ask.steps):
            return False
        return ask.needs != "state" or not run.index.get("thinned", {}).get("state", False)

    def is_done(self, run: Run) -> bool:
        """Whether nothing is left to train or ask."""
        return is_finished(run) and all(answers(run.path).has(*key) for key in self.asks)


@dataclass
class Plan:
    """The runs of the studies, by the hash of what decides their training.

    ``cells``: (study, number of the trial, seed) -> the hash of its run; ``left_out``: the trials that the scale lacks, and
    why; ``failed``: questions to configs alone; ``records``: where finished runs lie without their weights."""

    scale: Scale
    store: Path
    records: Path | None = None
    tasks: dict[str, Task] = field(default_factory=dict)
    cells: dict[tuple[str, int, int], str] = field(default_factory=dict)
    left_out: dict[tuple[str, int], str] = field(default_factory=dict)
    failed: dict[tuple[str, int], str] = field(default_factory=dict)

    def runs(self, task: Task) -> list[Run]:
        """The task's runs on the disk, those with weights first."""
        folders = [self.store] + ([self.records] if self.records else [])
        paths = [path for f in folders for path in sorted(f.glob(f"{task.stem}-*"))]
        return [run for path in paths if (run := open_run(path)) is not None]

    def new_folder(self, task: Task) -> Path:
        content = [task.config.fingerprint(checkpoint=True), list(task.rounds), task.has_state]
        return self.store / f"{task.stem}-{digest(content)[:6]}"

    def questions(self, study: Study) -> Iterator[tuple[int, Trial, int, tuple[Ask, ...]]]:
        """Number of the trial, trial, seed and what is asked of it, also of trials that are not trained."""
        for number, trial in enumerate(study.trials):
            for place, seed in enumerate(self.scale.seed_list(study.seeds)):
                yield number, trial, seed, study.questions_for(trial, place)

    def cells_of(self, study: Study) -> dict[tuple[int, int], str]:
        """Number of the trial and seed -> hash of the run."""
        return {
            (n, seed): core for (name, n, seed), core in self.cells.items() if name == study.name
        }


def make_plan(
    scale: Scale,
    studies: Iterable[Study],
    everything: Iterable[Study],
    store: Path,
    records: Path | None = None,
) -> Plan:
    """The plan of ``studies``. What a run keeps is what any of ``everything`` wants, so that it does not depend on which
    figures are asked for first. Raises FldiagError for trials that are no valid configs."""
    plan, names = Plan(scale, store, records), {s.name for s in studies}
    wants: dict[str, list[Ask]] = {}
    questions: dict[str, list[Ask]] = {}
    configs: dict[tuple[object, ...], Config | LeftOut] = {}
    for study in {s.name: s for s in [*everything, *studies]}.values():
        for number, trial, seed, asks in plan.questions(study):
            key = (trial.preset, trial.method, repr(sorted(trial.over.items())), trial.train, seed)
            if key not in configs:
                configs[key] = _config(scale, trial, seed, store, study)
            config = configs[key]
            if isinstance(config, LeftOut):
                plan.left_out[study.name, number] = config.what
            elif trial.train:
                core = config.hash
                wants.setdefault(core, []).extend(asks)
                if study.name in names:
                    task = plan.tasks.setdefault(core, Task(core, config))
                    questions.setdefault(core, []).extend(asks)
                    task.users += [study.name] if study.name not in task.users else []
                    plan.cells[study.name, number, seed] = core
    for core, task in plan.tasks.items():
        _keep(task, wants[core], scale)
        task.asks = {answer_key(scale, ask, task.rounds): ask for ask in questions[core]}
    return plan


def _config(scale: Scale, trial: Trial, seed: int, store: Path, study: Study) -> Config | LeftOut:
    try:
        return scale.config(trial, seed, store)
    except LeftOut as reason:
        return reason
    except FldiagError as error:
        name = trial.label or trial.method or trial.preset
        raise FldiagError(f"{study.name}, trial {name}: {error.what}", error.remedy) from error


def _keep(task: Task, wants: list[Ask], scale: Scale) -> None:
    """Fill in what the run has to keep."""
    rounds, interval = task.config.rounds, min(scale.checkpoint_every, task.config.rounds)
    needs, steps = {a.needs for a in wants}, {a.steps for a in wants if a.steps}
    if len(steps) > 1:
        raise FldiagError(
            f"studies want different proximal losses of the steps of {task.text}: {', '.join(sorted(steps))}",
            "agree on one (drift(steps=...))",
        )
    if "rounds" in needs:
        checkpoints = [*range(interval, rounds, interval), rounds]
        count = min(len(checkpoints), scale.history)
        places = {round((i + 1) * len(checkpoints) / count) - 1 for i in range(count)}
        task.rounds = tuple(checkpoints[place] for place in sorted(places))
    task.has_state = "state" in needs
    task.is_timed = any(a.name == "seconds" for a in wants)
    changes: dict[str, Any] = {
        "checkpoint__every": interval,
        "checkpoint__clients": "sampled" if needs & {"clients", "rounds"} else "none",
    }
    if steps:
        changes |= {
            "metrics__steps": True,
            "metrics__every": interval,
            "metrics__proximal": steps.pop(),
        }
    task.config = task.config.replace(**changes)


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
            keys = {k for f in flat_configs for k, v in f.items() if v is not None}
            raise unknown("key of --only", key, keys)
        for value in values:
            if value not in values_of_key:
                raise unknown(f"{key} of --only", str(value), set(map(str, values_of_key)))
    return lambda config: all(flat(config).get(key) in values for key, values in choices.items())
