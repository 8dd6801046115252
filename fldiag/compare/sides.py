"""What is compared: on each side a run, a checkpoint, or several runs of one method, paired by seed; and its numbers, as training
measured them, from a diagnostic's table, or example by example.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from fldiag.config import recipe
from fldiag.device import full_precision
from fldiag.diagnosis.diagnose import Bar, ProblemOptions, diagnose, folder_of, load, open_subject
from fldiag.errors import FldiagError
from fldiag.results.numbers import Number
from fldiag.results.table import notebook_bar, only
from fldiag.runs.checkpoint import Checkpoint
from fldiag.runs.run import Run

Member = Run | Checkpoint
#: What a side may be given as.
Side = str | Path | Member | Sequence[str | Path | Member]


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
                "Question: do these two given models differ? Over test examples. The answer holds for other examples of the "
                "same kind. Another seed may reverse it, so it does not compare methods."
            )
        seeds = ", ".join(str(seed_of(member)) for member in self.a)
        return (
            f"Question: do the methods differ? Over {len(self.a)} runs, of seeds {seeds}. The answer holds for training again "
            "with other seeds on these data, clients and test examples."
        )


def sides(a: Side, b: Side | None = None) -> Sides:
    """Both sides, opened and paired by seed.

    Args:
        a: A run, a checkpoint, the path of one, a pattern, a folder that holds runs, or several of these.
        b: The baseline, likewise.

    Raises:
        FldiagError: A side cannot be opened, they are on different data, or have no two seeds in common.
    """
    first, second = (opened(side) if side is not None else [] for side in (a, b))
    labels, members = (label(first), label(second) if second else ""), [*first, *second]
    data = {about_of(member).get("provenance", {}).get("data") for member in members}
    if len(data - {None}) > 1:
        raise FldiagError("the sides are on different data", "compare runs of one", usage=True)
    if not second or len(members) == 2:
        return Sides(first, second, labels)
    one, other = ({seed_of(member): member for member in side} for side in (first, second))
    seeds = [seed for seed in one if seed in other and seed is not None]
    if len(seeds) < 2:
        raise FldiagError(
            "the sides have no two seeds in common",
            "for two given models give one run on each side",
            usage=True,
        )
    left = len(members) - 2 * len(seeds)
    notes = [f"left out, as its seed is on one side only: {left} of the runs"] if left else []
    return Sides([one[seed] for seed in seeds], [other[seed] for seed in seeds], labels, notes)


def opened(side: Any) -> list[Member]:
    """The members of a side. Raises FldiagError for several that are not runs which differ by the seed alone."""
    members = members_of(side)
    if len(members) < 2:
        return members
    if not all(isinstance(member, Run) for member in members):
        raise FldiagError("several members of a side must be runs", "give folders", usage=True)
    first, *others = [recipe(about_of(member)["config"]) for member in members]
    if any(other != first for other in others):
        raise FldiagError("the runs of a side differ by more than the seed", usage=True)
    if len({seed_of(member) for member in members}) < len(members):
        raise FldiagError("a seed is there twice on one side", "give each once", usage=True)
    return members


def members_of(side: Any) -> list[Member]:
    """What a path, a folder of runs, a pattern or a list of these names."""
    if isinstance(side, (list, tuple)):
        return [member for one in side for member in members_of(one)]
    if isinstance(side, (str, Path)):
        runs = sorted(Path(side).glob("*/run.json"))
        if runs and not os.path.exists(f"{side}/run.json"):
            return [Run.open(file.parent) for file in runs]
        if not os.path.exists(side) and (matches := sorted(glob.glob(str(side)))):
            return members_of(matches)
    return [side if isinstance(side, (Run, Checkpoint)) else load(side)]


def label(members: Sequence[Member]) -> str:
    """A short name of a side: its run or file, or the folder of its runs."""
    path = members[0].path
    return f"{path.absolute().parent.name} ({len(members)} runs)" if members[1:] else path.name


def about_of(member: Member) -> dict[str, Any]:
    """What a run or a checkpoint says of itself."""
    return member.about if isinstance(member, Run) else member.manifest


def seed_of(member: Member) -> Any:
    """Of the training, None where it is not known."""
    return about_of(member).get("config", {}).get("seed")


# Numbers


@dataclass
class Reader:
    """Reads members, each table once.

    Args:
        subject_options: Model, data, root, device and the like.
        cache: Whether tables are kept in the runs' folders.
        bar: Shows progress.
    """

    subject_options: Mapping[str, Any]
    cache: bool = False
    bar: Bar = notebook_bar
    tables: dict[Any, pd.DataFrame] = field(default_factory=dict)

    def samples(self, member: Member, number: Number, is_of_examples: bool) -> pd.Series:
        """The number of a member.

        Args:
            member: A run or a checkpoint.
            number: Which one.
            is_of_examples: For each test example [n] (of accuracy: whether it is right), or the number alone [1].

        Returns:
            Numbers; the index tells the examples (by label).

        Raises:
            FldiagError: There is none, and why.
        """
        try:
            if number.source == "metrics":
                values = self._scores(member, number, is_of_examples)
            else:
                rows = only(self._table(member, number), **{"scope": "global", **number.row})
                values = rows["value"][:1].dropna().astype(float)
                if values.empty:
                    raise FldiagError(f"{number.source} has no such number of it")
        except FldiagError as error:
            raise FldiagError(f"{member.path.name}: {error.what}", error.remedy) from None
        if not np.isfinite(values).all():
            what = f"{member.path.name}: its weights give no numbers"
            raise FldiagError(what, "use a checkpoint from before the training diverged")
        return values

    def _scores(self, member: Member, number: Number, is_of_examples: bool) -> pd.Series:
        """A number of training: what it wrote after its last round (unless model or data were named), or taken again."""
        others = (*map(self.subject_options.get, ("model", "data")), member.model, member.data)
        is_own = all(value is None for value in others)
        if isinstance(member, Run) and is_own and not is_of_examples:
            rows = only(member.metrics, **number.row, round=member.done)
            if len(rows):
                return rows["value"].astype(float)
        tested = self._table(member, number)
        if number.name not in tested:
            raise FldiagError("the data have no classes", "ask for the loss: loss > baseline")
        return tested[number.name] if is_of_examples else pd.Series([tested[number.name].mean()])

    def _table(self, member: Member, number: Number) -> pd.DataFrame:
        """The table that holds a number: of training's numbers those of each example, of others their diagnostic's."""
        key = number.source, id(member)
        if key not in self.tables:
            options = {**number.options, **self.subject_options}
            cache = folder_of([member]) / "cache" if self.cache else None
            seen: dict[str, Any] = {"write": False, "cache": cache, "bar": self.bar}
            self.tables[key] = (
                self._test(member)
                if number.source == "metrics"
                else diagnose(number.source, [member], options, **seen).table
            )
        return self.tables[key]

    @full_precision()
    def _test(self, member: Member) -> pd.DataFrame:
        """``loss`` of the last global model on each test example (of examples that were given, on these), and ``accuracy``:
        whether it is right, where there are classes."""
        try:
            options = ProblemOptions(slice="test", **self.subject_options)
            problem: Any = open_subject(member, options)
        except FldiagError:
            if self.subject_options.get("data") is None and member.data is None:
                raise
            problem = open_subject(member, ProblemOptions(**self.subject_options))
        scores, (_, y) = problem.scores(), problem.outputs()
        if scores.each is None or not isinstance(y, Tensor):
            raise FldiagError("the loss is not a mean over examples", "give one label an example")
        labels = [label.tobytes() for label in y.cpu().numpy()]
        tested = pd.DataFrame({"loss": scores.each.cpu().numpy()}, index=labels)
        if scores.right is not None and set(scores.right.tolist()) <= {0.0, 1.0}:
            tested["accuracy"] = scores.right.bool().cpu().numpy()
        return tested
