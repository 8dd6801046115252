"""The numbers of a run or a checkpoint: as training measured them, from a diagnostic's table, or example by example."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from fldiag.compare.sides import Member
from fldiag.device import full_precision
from fldiag.diagnosis.diagnose import Bar, diagnose, folder_of
from fldiag.diagnosis.options import ProblemOptions
from fldiag.diagnosis.subjects import open_subject
from fldiag.errors import FldiagError
from fldiag.results.numbers import Number
from fldiag.results.progress import notebook_bar
from fldiag.results.select import only
from fldiag.runs.run import Run


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
