"""The loss and the right answers of one forward pass, and the accuracy of a guess."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fldiag.problem.data import Tree
from fldiag.results.standing import guess_accuracy
from fldiag.results.table import Row


@dataclass(frozen=True)
class Scores:
    """What one set of weights does on a slice.

    Args:
        loss: the mean loss.
        each: the loss of every example [n] in float64, so that their mean is the loss; None where it cannot be taken.
        right: whether every answer is right [n]; with several labels an example their number, scaled so that the mean is over
            all labels. None where the loss is no classification.
        counts: by how much every example counts [n], 1 on average.
        shares: how often each class is the label, as a share of 1.
    """

    loss: float
    each: Tensor | None
    right: Tensor | None
    counts: Tensor | None = None
    shares: tuple[float, ...] = ()

    @property
    def accuracy(self) -> float | None:
        return None if self.right is None else float(self.right.double().mean())

    @property
    def stderr(self) -> float | None:
        """The standard error of the loss over the examples; None of a single one."""
        return None if self.each is None else self.stderr_of(self.each)

    def stderr_of(self, each: Tensor) -> float | None:
        """The standard error of the mean of numbers of the examples [n] that count as their losses do.

        As the examples may count differently it is that of a ratio of sums, to first order.
        """
        rest = each if self.counts is None else each - each.mean() * self.counts
        return float(rest.double().std()) / math.sqrt(len(each)) if len(each) > 1 else None

    def rows(self, problem: Any) -> list[Row]:
        """Rows ``loss`` and, of a classification, ``accuracy``, with that of a guess; standard errors over the examples."""
        common: Row = {"estimator": "exact", "inputs": problem.inputs}
        rows: list[Row] = [{**common, "metric": "loss", "value": self.loss, "stderr": self.stderr}]
        if self.right is not None:
            right, n = self.right.double(), len(self.right)
            accuracy: Row = {**common, "metric": "accuracy", "value": self.accuracy}
            accuracy["stderr"] = float(right.std()) / math.sqrt(n) if n > 1 else None
            accuracy["guess"] = guess_accuracy(self.shares, problem.slice_name)
            rows.append(accuracy)
        return rows


def score(problem: Any, w: Tensor, batches: Iterable[tuple[Any, Tree]]) -> Scores:
    """The scores at w [P] of (outputs, targets) of all the problem's batches."""
    loss, classes, weight = problem.criterion, problem.criterion.classes, problem.weight
    totals, singles, answers = [], [], []
    with torch.no_grad(), problem.guarded():
        for z, y in batches:
            totals.append(float(loss.total(z, y)))
            singles.append(loss.each(z, y))
            if classes is not None:
                answers.append(classes.answers(z, y))
    penalty = problem.weight_decay / 2 * float(w.double().square().sum())
    mean, scale = math.fsum(totals) / weight + penalty, problem.n / weight
    each = counts = right = None
    shares: tuple[float, ...] = ()
    if None not in singles:
        each, counts = (scale * torch.cat(parts) for parts in zip(*singles, strict=True))
        each = each + penalty * counts
    if classes is not None:
        right, labels = (
            torch.cat(parts).reshape(problem.n, -1) for parts in zip(*answers, strict=True)
        )
        labels = labels[labels >= 0]
        shares = tuple((labels.bincount(minlength=classes.number).double() / len(labels)).tolist())
        is_one_each = right.shape[1] == 1 and len(labels) == problem.n
        right = right[:, 0] if is_one_each else right.sum(1).double() * (problem.n / len(labels))
    return Scores(mean, each, right, counts, shares)
