"""What the members of the sides say: numbers of their tables, and what their models answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch

from fldiag.choices import FEWEST
from fldiag.compare.sides import Member
from fldiag.device import full_precision
from fldiag.diagnosis import places
from fldiag.diagnosis.measure import Bar, measure_all
from fldiag.diagnosis.options import HistoryOptions, ProblemOptions
from fldiag.diagnosis.question import parse_question
from fldiag.diagnosis.subjects import open_subject, open_subjects
from fldiag.diagnostics import fairness
from fldiag.diagnostics.fairness import Answers, Groups
from fldiag.errors import FldiagError
from fldiag.problem.problem import Problem
from fldiag.results import select
from fldiag.results.numbers import Number
from fldiag.results.select import last_round, only
from fldiag.runs.history import History
from fldiag.runs.run import Run


def no_numbers(name: str = "") -> FldiagError:
    """Of weights, those of ``name`` if there are others, that are or give NaN or infinity."""
    return FldiagError(
        f"{name}{': ' * bool(name)}its weights give no numbers",
        "use a checkpoint from before the training diverged",
    )


def no_classes() -> FldiagError:
    return FldiagError("the data have no classes", "ask for the loss: loss > baseline")


@dataclass(frozen=True)
class Tested:
    """A model on the test examples: ``right`` [n] (None: no classes), ``loss`` [n] of each, and their labels."""

    right: np.ndarray | None
    loss: np.ndarray
    y: np.ndarray


@dataclass
class Reader:
    """Reads members, each thing once.

    ``subject_options``: model, data, root, device and the like. ``cache``: whether tables are kept in the runs' folders.
    """

    subject_options: Mapping[str, Any] = field(default_factory=dict)
    cache: bool = False
    bar: Bar = lambda title: nullcontext(lambda done, total, text: None)
    _results: dict[Any, Any] = field(default_factory=dict)

    def _once(self, key: Any, find: Callable[[], Any]) -> Any:
        if key not in self._results:
            try:
                self._results[key] = find()
            except FldiagError as error:
                self._results[key] = error
        if isinstance(self._results[key], FldiagError):
            raise self._results[key]
        return self._results[key]

    def table(self, member: Member, number: Number) -> pd.DataFrame:
        """The table of the diagnostic that measures the number. Raises FldiagError where the member has none."""

        def find() -> pd.DataFrame:
            question = parse_question(number.source, {**number.options, **self.subject_options})
            subjects = open_subjects([member], question)
            store = places.cache(places.folder([member.path])) if self.cache else None
            tables = measure_all(
                question, subjects, bar=self.bar, tell=lambda text: None, cache=store
            )
            return tables[question.entry]

        return self._once((number.source, id(member)), find)

    def value(self, member: Member, number: Number) -> float:
        """The number of the last round. Raises FldiagError that says why there is none."""
        if number.source == "metrics":
            value = self._trained(member, number)
            if value is not None:
                return value
            tested = self.tested(member)
            if number.name == "accuracy" and tested.right is None:
                raise no_classes()
            if not np.isfinite(tested.loss).all():
                raise no_numbers()
            return float((tested.loss if number.name == "loss" else tested.right).mean())  # type: ignore[union-attr]
        frame = self.table(member, number)
        value = select.number(frame, **{"scope": "global", **number.row})
        if value is None or not np.isfinite(value):
            raise FldiagError(self._why(frame, number))
        return value

    def _trained(self, member: Member, number: Number) -> float | None:
        """What training itself measured after its last round, or None."""
        if (
            not isinstance(member, Run)
            or not member.has_metrics
            or member.model is not None
            or member.data is not None
        ):
            return None
        if (
            self.subject_options.get("model") is not None
            or self.subject_options.get("data") is not None
        ):
            return None
        rows = only(self._once(("metrics", id(member)), lambda: member.metrics), **number.row)
        value = select.number(rows, round=member.done) if last_round(rows) == member.done else None
        if value is not None and not np.isfinite(value):
            raise no_numbers()
        return value

    @staticmethod
    def _why(frame: pd.DataFrame, number: Number) -> str:
        """What the table says of a number that it lacks."""
        rows = only(frame, **{"scope": "global", **number.row})
        notes = [
            *rows.get("note", pd.Series(dtype=object)).dropna(),
            *only(frame, metric="missing").get("note", []),
        ]
        return str(notes[0]) if notes else "there is no such number"

    def tested(self, member: Member) -> Tested:
        """What the last global model does on the test examples; where the examples themselves were given, on these."""

        @full_precision()
        def find() -> Tested:
            options = ProblemOptions(slice="test", **self.subject_options)
            try:
                problem = open_subject(member, options)
            except FldiagError:
                if options.data is None and member.data is None:
                    raise
                problem = open_subject(member, ProblemOptions(**self.subject_options))
            assert isinstance(problem, Problem)
            scores, (_, y) = problem.scores(), problem.outputs()
            if scores.each is None:
                raise FldiagError(
                    "the loss cannot be taken example by example",
                    "give data with one label an example",
                )
            right = scores.right
            if right is not None and right.dtype != torch.bool:  # several targets an example
                right = None
            y = y if isinstance(y, torch.Tensor) else torch.empty(0)
            return Tested(
                None if right is None else right.cpu().numpy(),
                scores.each.cpu().numpy(),
                y.cpu().numpy(),
            )

        return self._once(("tested", id(member)), find)

    def served(self, member: Member) -> tuple[Groups, Answers]:
        """The examples of every client, and what the last global model answers, as the diagnostic ``fairness`` has them."""

        def find() -> tuple[Groups, Answers]:
            if not isinstance(member, Run):
                raise FldiagError("a checkpoint alone has no clients", "give the run's folder")
            options = HistoryOptions(rounds=member.rounds[-1:], **self.subject_options)
            history = open_subject(member, options)
            assert isinstance(history, History)
            if not history.dataset.tested:
                raise FldiagError(
                    f"{history.name} has no test examples", "give them: --data with a test split"
                )
            final_round = history.last(clients=False)
            model = fairness.answers(history, (final_round.aggregated, final_round.buffers), "test")
            if model is None:
                raise no_numbers()
            return fairness.groups_of(history, "test", FEWEST), model

        return self._once(("served", id(member)), find)
