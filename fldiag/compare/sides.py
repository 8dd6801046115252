"""What is compared: on each side a run, a checkpoint, or several runs of one method."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fldiag.config import recipe
from fldiag.diagnosis.subjects import load
from fldiag.errors import FldiagError, counted
from fldiag.runs.checkpoint import Checkpoint
from fldiag.runs.run import Run

Member = Run | Checkpoint
#: What a side may be given as.
Side = str | Path | Member | Sequence[str | Path | Member]
Pairing = Literal["seed", "order"]


@dataclass
class Sides:
    """The members of both sides, pair by pair; without a baseline ``b`` is empty. ``notes``: what a reader must know."""

    a: list[Member]
    b: list[Member]
    labels: tuple[str, str]
    notes: list[str] = field(default_factory=list)

    @property
    def has_methods(self) -> bool:
        """Whether methods are compared, over seeds; else two given models, over examples."""
        return len(self.a) > 1

    @property
    def question(self) -> str:
        """Which of the two questions is asked, and what its answer carries."""
        if not self.has_methods:
            return (
                "Question: do these two given models differ? Over test examples and clients. The answer holds for other "
                "examples of the same kind. Another seed may reverse it, so it does not compare methods."
            )
        seeds = ", ".join(str(config_of(member).get("seed")) for member in self.a)
        return (
            f"Question: do the methods differ? Over {len(self.a)} runs, of seeds {seeds}. The answer holds for training again "
            "with other seeds on these data, clients and test examples."
        )


def sides(
    a: Side, b: Side | None = None, pairing: Pairing = "seed", allow_code: str | Iterable[str] = ()
) -> Sides:
    """Both sides, opened and paired.

    Args:
        a: A run, a checkpoint, the path of one, a pattern, a folder that holds runs, or several of these.
        b: The baseline, likewise.
        pairing: By ``seed``, or by ``order``.
        allow_code: User code that may be imported although only a file names it.

    Raises:
        FldiagError: A side cannot be opened or paired, or they are on different data.
    """
    first, second = (
        [member.allow(allow_code) for member in members_of(side)] if side is not None else []
        for side in (a, b)
    )
    check_one_method(first)
    check_one_method(second)
    members = [*first, *second]
    data = {about_of(member).get("provenance", {}).get("data"): member.path for member in members}
    data.pop(None, None)  # not known
    if len(data) > 1:
        what = f"{' and '.join(map(str, data.values()))} are on different data"
        raise FldiagError(what, "compare runs on the same data", usage=True)
    notes = []
    if second and pairing == "seed" and len(members) > 2:
        one, other = ({config_of(m).get("seed"): m for m in side} for side in (first, second))
        seeds = [seed for seed in one if seed in other and seed is not None]
        first, second = [one[seed] for seed in seeds], [other[seed] for seed in seeds]
        if left := len(members) - 2 * len(seeds):
            notes.append(f"left out: {counted(left, 'run')} whose seed is on one side only")
    if b is not None and (len(first) != len(second) or len(first) < min(2, len(members) - 1)):
        raise FldiagError(
            "the sides have no two seeds in common, or by order not as many runs",
            "train the same seeds on both; for two given models give one run on each side",
            usage=True,
        )
    rounds = {str(m.done if isinstance(m, Run) else m.round) for m in [*first, *second]}
    if len(rounds) > 1:
        notes.append(f"different numbers of rounds: {', '.join(sorted(rounds))}")
    return Sides(first, second, (label(first), label(second) if second else ""), notes)


def members_of(side: Any) -> list[Member]:
    """What a path, a folder of runs, a pattern or a list of these names."""
    if isinstance(side, (list, tuple)):
        return [member for one in side for member in members_of(one)]
    if isinstance(side, (str, Path)):
        runs = sorted(glob.glob(f"{glob.escape(str(side))}/*/run.json"))
        if runs and not os.path.exists(f"{side}/run.json"):
            return [Run.open(Path(file).parent) for file in runs]
        if not os.path.exists(side) and (matches := sorted(glob.glob(str(side)))):
            return members_of(matches)
    return [side if isinstance(side, (Run, Checkpoint)) else load(side)]


def check_one_method(members: Sequence[Member]) -> None:
    """Raises FldiagError for several members of a side that are not runs, or differ by more than the seed."""
    if len(members) < 2:
        return
    if not all(isinstance(member, Run) for member in members):
        raise FldiagError("several members of a side must be runs", "give folders", usage=True)
    first, *others = [recipe(config_of(member)) for member in members]
    keys = {key for other in others for key in {*first, *other} if first.get(key) != other.get(key)}
    if keys:
        what = f"the runs of a side differ in {', '.join(sorted(keys))}"
        raise FldiagError(what, "put runs there that differ by the seed only", usage=True)
    seeds = [config_of(member).get("seed") for member in members]
    if None not in seeds and len(set(seeds)) < len(seeds):
        raise FldiagError("a seed is there twice on one side", "give each once", usage=True)


def label(members: Sequence[Member]) -> str:
    """A short name of a side: its run or file, or the folder of its runs."""
    path, config = members[0].path, config_of(members[0])
    method, is_one = config.get("method", {}).get("name"), len(members) == 1
    name = path.name if is_one else path.absolute().parent.name
    detail = f"seed {config.get('seed')}" if is_one else f"{len(members)} runs"
    return f"{name} ({method}, {detail})" if method else name


def about_of(member: Member) -> dict[str, Any]:
    """What a run or a checkpoint says of itself."""
    return member.about if isinstance(member, Run) else member.manifest


def config_of(member: Member) -> dict[str, Any]:
    """The config as it was stored."""
    return dict(about_of(member).get("config", {}))
