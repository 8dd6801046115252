"""What is compared: one run, several runs of a method, or a checkpoint on each side; and which question that asks."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fldiag.config import recipe
from fldiag.diagnosis.subjects import load
from fldiag.errors import FldiagError
from fldiag.results.uncertainty import SEEDS
from fldiag.runs.checkpoint import Checkpoint
from fldiag.runs.run import Run

#: What a side may be given as.
Given = str | Path | Run | Checkpoint | Sequence[str | Path | Run | Checkpoint]
Pairing = Literal["seed", "order"]
Member = Run | Checkpoint


@dataclass
class Sides:
    """The members of both sides, pair by pair; without a baseline ``b`` is empty. ``labels``: names of both. ``notes``: what was
    left out, and what a reader must know."""

    a: list[Member]
    b: list[Member]
    labels: tuple[str, str]
    pairing: Pairing = "seed"
    notes: list[str] = field(default_factory=list)

    @property
    def methods(self) -> bool:
        """Whether methods are compared, over seeds; else two given models, over examples."""
        return len(self.a) > 1

    @property
    def question(self) -> str:
        """Which of the two questions is asked, and what its answer carries."""
        verb = "differ" if self.b else "meet its conditions"
        if not self.methods:
            who = "do these two given models" if self.b else "does this given model"
            return (
                f"Question: {who} {verb}? Over test examples and "
                "clients, the models as they are. The answer holds for other examples of the same kind. It says nothing "
                "about training again: another seed may reverse it, so it does not compare methods."
            )
        by = (
            "seed " + ", ".join(str(seed(m)) for m in self.a)
            if self.pairing == "seed"
            else "the order in which they are given"
        )
        pairs = f"{len(self.a)} {'pairs of runs, paired by' if self.b else 'runs,'} {by}"
        caution = (
            "" if len(self.a) >= SEEDS else f" Fewer than {SEEDS} are not enough for a decision."
        )
        who = "do the methods" if self.b else "does the method"
        return (
            f"Question: {who} {verb}? Over {pairs}. The answer holds for training again with other seeds on these data, "
            f"clients and test examples. It says nothing about others.{caution}"
        )


def sides(
    a: Given,
    b: Given | None = None,
    pairing: Pairing = "seed",
    allow_code: str | Iterable[str] = (),
) -> Sides:
    """Both sides, opened and paired. ``allow_code``: user code that may be imported although only their files name it.

    Raises FldiagError for what cannot be opened, compared or paired.
    """
    first, second = (
        [m.allow(allow_code) for m in opened(side)] if side is not None else [] for side in (a, b)
    )
    _same_data([*first, *second])
    return paired(first, second, pairing)


def opened(side: Given) -> list[Member]:
    """The runs or the checkpoint that a side names: a run's folder, a checkpoint file, a pattern, a folder that holds runs, or
    several of these.

    Raises FldiagError for what is none of these, for several runs that differ in more than the seed, and for a seed twice.
    """
    members: list[Member] = []
    for one in side if isinstance(side, (list, tuple)) else [side]:
        members += [one] if isinstance(one, (Run, Checkpoint)) else _read(one)
    if len(members) > 1:
        _one_method(members)
    return members


def _read(path: Any) -> list[Member]:
    if not isinstance(path, (str, os.PathLike)):
        raise FldiagError(
            f"a {type(path).__name__} cannot be compared",
            "give runs, checkpoints or their paths",
            usage=True,
        )
    path = Path(path)
    exists, is_folder = (
        os.path.exists(path),
        os.path.isdir(path),
    )  # Path's own raise where a name is too long
    if not exists and glob.has_magic(str(path)):
        matched = sorted(glob.glob(str(path)))
        if not matched:
            raise FldiagError(
                f"nothing matches {path}",
                "give a run's folder, or a pattern that names some",
                usage=True,
            )
        return [member for one in matched for member in _read(one)]
    if is_folder and not (path / "run.json").is_file():
        runs = sorted(file.parent for file in path.glob("*/run.json"))
        if runs:
            return [Run.open(run) for run in runs]
    if is_folder or path.name == "run.json" or not exists:
        return [Run.open(path)]
    return [load(path)]


def _one_method(members: Sequence[Member]) -> None:
    """Several members of a side are runs that differ by the seed only."""
    if any(isinstance(m, Checkpoint) for m in members):
        raise FldiagError(
            f"{len(members)} members on one side, and {_name(members[0])} is a checkpoint",
            "several are runs of one method: give their folders",
            usage=True,
        )
    first, *rest = [recipe(m.about["config"]) for m in members if isinstance(m, Run)]
    for member, other in zip(members[1:], rest, strict=True):
        keys = _differing(first, other)
        if keys:
            raise FldiagError(
                f"{_name(members[0])} and {_name(member)} differ in {', '.join(keys[:4])}, so they are not runs of "
                "one method",
                "put on one side only runs that differ by the seed",
                usage=True,
            )
    seeds = [seed(m) for m in members]
    twice = next((s for s in seeds if s is not None and seeds.count(s) > 1), None)
    if twice is not None:
        raise FldiagError(
            f"seed {twice} is there twice on one side", "give every seed once", usage=True
        )


def _differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [key for key in dict.fromkeys([*a, *b]) if a.get(key) != b.get(key)]


def seed(member: Member) -> Any:
    """The training seed, None where it is not known."""
    return (
        member.about["config"].get("seed")
        if isinstance(member, Run)
        else member.manifest.get("seed")
    )


def _name(member: Member) -> str:
    return str(member.path)


def paired(a: list[Member], b: list[Member], pairing: Pairing) -> Sides:
    """Both sides, pair by pair. One member on each side is a pair, whatever its seed.

    Raises FldiagError when no seed is on both sides, or when pairs are to be made by order of different numbers of runs.
    """
    if pairing not in ("seed", "order"):
        raise FldiagError(
            f"pair = {pairing!r} is not one of seed, order", "choose one of them", usage=True
        )
    labels = label(a), label(b) if b else ""
    if not b or len(a) == len(b) == 1:
        return Sides(a, b, labels, pairing)
    if pairing == "order":
        if len(a) != len(b):
            raise FldiagError(
                f"{len(a)} runs on one side and {len(b)} on the other cannot be paired by order",
                "give as many on both",
                usage=True,
            )
        return Sides(
            a,
            b,
            labels,
            pairing,
            ["paired by order: effects that runs of one seed share are not removed"],
        )
    first, second = {seed(m): m for m in a}, {seed(m): m for m in b}
    common = [s for s in first if s in second and s is not None]
    seeds_text = f"({labels[0]}: {_listed(first)}; {labels[1]}: {_listed(second)})"
    if len(common) < 2:
        raise FldiagError(
            f"{'no seed is' if not common else f'only seed {common[0]} is'} on both sides {seeds_text}",
            "train the same seeds on both, or pair them by order; for two given models give one run on each side",
            usage=True,
        )
    left = len(a) + len(b) - 2 * len(common)
    notes = [f"left out: {left} runs whose seed is on one side only {seeds_text}"] if left else []
    return Sides([first[s] for s in common], [second[s] for s in common], labels, pairing, notes)


def _same_data(members: Sequence[Member]) -> None:
    """Raises FldiagError where members say that they were trained on different data."""
    members_by_data: dict[str, Member] = {}
    for m in members:
        about = m.about["provenance"] if isinstance(m, Run) else m.manifest.get("provenance", {})
        if about.get("data"):
            members_by_data.setdefault(str(about["data"]), m)
    if len(members_by_data) > 1:
        one, other, *_ = members_by_data.values()
        raise FldiagError(
            f"{one.path} and {other.path} are on different data, so their numbers cannot be compared",
            "compare runs on the same data set",
            usage=True,
        )


def _listed(seeds: Any) -> str:
    return "seeds " + ", ".join("unknown" if s is None else str(s) for s in seeds)


def label(members: Sequence[Member]) -> str:
    """A short name of a side: its run or file, or the folder of its runs and their method, if it is one."""
    first = members[0].path
    if len(members) > 1:
        configs = [m.about["config"] for m in members if isinstance(m, Run)]
        methods = {config.get("method", {}).get("name") for config in configs}
        method = f"{methods.pop()}, " if len(methods) == 1 and None not in methods else ""
        return f"{first.absolute().parent.name} ({method}{len(members)} runs)"
    if isinstance(members[0], Run):
        method = members[0].about["config"].get("method", {}).get("name")
        return first.name + (f" ({method}, seed {seed(members[0])})" if method else "")
    return (
        f"{first.absolute().parent.parent.name}/{first.name}"
        if first.absolute().parent.name == "rounds"
        else first.name
    )
