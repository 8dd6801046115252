"""The loss and the right answers of one forward pass, and the accuracy of a guess."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fldiag.losses import IGNORED, multi_label
from fldiag.problem.data import Tree
from fldiag.problem.loss import form_of, is_probabilities
from fldiag.results.standing import guess_accuracy
from fldiag.results.table import Row


@dataclass(frozen=True)
class Scores:
    """What one set of weights does on a slice.

    Args:
        loss: the mean loss.
        each: the loss of every example [n] in float64, so that their mean is the loss; None where it cannot be taken.
        right: 1 where the answer is right and else 0 [n] in float64; with several labels an example their number, scaled so that
            the mean is over all labels. None where the loss is no classification.
        counts: by how much every example counts [n], 1 on average.
        shares: how often each class is the label, as a share of 1.
    """

    loss: float
    each: Tensor | None
    right: Tensor | None
    counts: Tensor | None = None
    shares: tuple[float, ...] = ()

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
            row: Row = {"metric": "accuracy", "value": float(self.right.mean())}
            row |= {"stderr": Scores(0.0, self.right, None).stderr}
            row |= {"guess": guess_accuracy(self.shares, problem.slice_name)}
            rows.append({**common, **row})
        return rows


def answers(loss: Any, z: Any, y: Any) -> tuple[Tensor, Tensor] | None:
    """How many answers of each example are right [b], and how often each class is the label [classes].

    The answer is the class of the largest output; of a binary cross entropy, whether each output is positive. None where the
    targets are no numbers of classes, nor one-hot or soft labels.
    """
    function, options = form_of(loss)
    if isinstance(y, Mapping):
        z, y = z.get("logits") if isinstance(z, Mapping) else z, y.get("labels")
        if isinstance(y, Tensor) and y.ndim > 1:  # the model may shift them
            return None
    if not isinstance(z, Tensor) or not isinstance(y, Tensor):
        return None
    if z.shape == y.shape and function in (F.binary_cross_entropy_with_logits, multi_label):
        answer, labels, classes = z > 0, (y > 0.5).long(), 2
    else:
        labels = y.argmax(1) if z.shape == y.shape and is_probabilities(y) else y
        if labels.is_floating_point() or z.ndim < 2:
            return None
        axis = 1 if z.ndim < 3 or z[:, 0].shape == labels.shape else -1
        answer, classes = z.argmax(axis), z.shape[axis]
        labels = labels.masked_fill(labels == options.get("ignore_index", IGNORED), -1)
    if answer.shape != labels.shape or int(labels.max()) >= classes:
        return None
    right = (answer == labels).reshape(len(y), -1).sum(1)
    return right, labels[labels >= 0].bincount(minlength=classes)


def score(problem: Any, w: Tensor, batches: Iterable[tuple[Any, Tree]]) -> Scores:
    """The scores at w [P] of (outputs, targets) of all the problem's batches."""
    loss, n, weight, totals, singles, replies = (
        problem.criterion,
        problem.n,
        problem.weight,
        [],
        [],
        [],
    )
    for z, y in batches:
        totals.append(float(loss.total(z, y)))
        singles.append(loss.each(z, y))
        replies.append(answers(problem.user_loss, z, y))
    penalty = problem.weight_decay / 2 * float(w.double().square().sum())
    each = counts = right = None
    shares: list[float] = []
    if None not in singles:
        each, counts = (torch.cat(part) * (n / weight) for part in zip(*singles, strict=True))
        each = each + penalty * counts
    if None not in replies:
        rights, labels = zip(*replies, strict=True)
        number = sum(labels)
        right = torch.cat(rights).double() * (n / int(number.sum()))
        shares = (number / number.sum()).tolist()
    return Scores(math.fsum(totals) / weight + penalty, each, right, counts, tuple(shares))
