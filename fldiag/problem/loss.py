"""A loss as two sums, and what weights score by it.

The loss of a slice is the sum of ``total`` over its batches, divided by the sum of ``count``. So class weights, ignored labels
and padding count the same whatever the batch size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fldiag.errors import FldiagError
from fldiag.losses import IGNORED, form_of, is_probabilities, multi_label, with_classes_second
from fldiag.problem.data import Function, Tree, count, cut, describe
from fldiag.results.table import Row, guess_accuracy

#: What a loss may be the mean of.
COUNTS: dict[str, Function] = {
    "examples": count,
    "labels that count": lambda y: (y["labels"] != IGNORED).sum(),
    "labels after the first": lambda y: (y["labels"][:, 1:] != IGNORED).sum(),
}


@dataclass(frozen=True)
class Loss:
    """A loss as sums.

    Args:
        sums: (outputs, y) of a batch -> total and count.
        mean_over: what it counts.
        single: of every example [b], where that is known.
    """

    sums: Function
    mean_over: str = "examples"
    single: Function | None = None

    def total(self, z: Any, y: Tree) -> Tensor:
        """The sum over a batch."""
        return self.sums(z, y)[0]

    def each(self, z: Any, y: Tree) -> tuple[Tensor, Tensor] | None:
        """Total and count of every example [b] in float64; None where the loss cannot be taken one by one."""

        def one(*example: Tree) -> Any:
            batch = cut(example, None)  # type: ignore[arg-type]
            return [torch.as_tensor(t, dtype=torch.float64) for t in self.sums(*batch)]

        try:
            totals, counts = (self.single or torch.func.vmap(one))(z, y)
        except Exception:  # whatever a user's loss cannot do this way
            return None
        return totals.double(), counts.to(totals.device)


def as_sums(loss: Function, call: Function, x: Tree, y: Tree) -> Loss:
    """A loss as sums.

    Args:
        loss: (outputs, y) -> the mean over the examples, or a pair (sum, count). Of dicts it may also be the mean over the
            ``labels`` that count, or over those after the first, as no two models say it alike.
        call: inputs -> outputs.
        x: inputs to try it on.
        y: their targets.

    Returns:
        Its sums. Torch's losses of class labels are known with all their options.

    Raises:
        FldiagError: the loss is none of these.
    """
    function, options = form_of(loss)
    is_mean = options.pop("reduction", "mean") == "mean"
    is_labels = isinstance(y, Tensor) and not y.is_floating_point()
    if function in (F.cross_entropy, F.nll_loss) and is_mean and is_labels:
        return _entropy(function, **options)
    if function is F.binary_cross_entropy_with_logits and is_labels:
        return as_sums(lambda z, y: loss(z, y.to(z)), call, x, y)
    z = call(x)
    value, forms = loss(z, y), [_mean(loss, "examples")]
    if isinstance(value, (tuple, list)):
        # the outputs decide nothing about what counts
        is_of_targets = bool(value[1] == loss(2 * z, y)[1])
        forms = [Loss(loss, "what it counts")] if is_of_targets else []
    elif isinstance(z, Mapping) and isinstance(y, Mapping) and y["labels"].ndim > 1:
        forms = [_mean(loss, what) for what in COUNTS]
        # halves must differ in how much counts: of the examples with fewer labels the first label alone
        x, y = cut((x, y), (y["labels"] != IGNORED).flatten(1).sum(1).argsort(descending=True))
        labels = y["labels"].clone()
        few = labels.flatten(1)[len(labels) // 2 :]
        few[few.ne(IGNORED).cumsum(1) > 1] = IGNORED
        x, y = {**x, "labels": labels}, {**y, "labels": labels}
    for sums in forms:
        if is_sum(sums, call, x, y):
            return sums
    raise FldiagError(
        f"the loss of outputs {describe(z)} and targets {describe(y)} is not the mean over the examples: it is a sum, "
        "couples the examples, or weighs them",
        "return the mean over the examples, or (sum, count): the sum over what counts, and how much that is by the targets "
        "alone",
    )


def _mean(loss: Function, what: str) -> Loss:
    """A mean over one of ``COUNTS``, as sums. The mean over nothing, NaN, is a sum of 0."""

    def sums(z: Any, y: Tree) -> Any:
        number = COUNTS[what](y)
        return loss(z, y).reshape(()) * number if number else torch.zeros(()), number

    return Loss(sums, what)


def is_sum(loss: Loss, call: Function, x: Tree, y: Tree) -> bool:
    """Whether the total of a batch is the sum of those of its halves, or is not finite itself."""
    half = count(y) // 2
    if not half:
        return True
    cuts = slice(None), slice(half), slice(half, None)
    whole, *parts = (float(loss.total(call(cut(x, part)), cut(y, part))) for part in cuts)
    bound = 1e-4 * abs(whole) + 1e-5 * sum(map(abs, parts))
    return not math.isfinite(whole) or abs(math.fsum(parts) - whole) <= bound


def _entropy(
    function: Function,
    weight: Tensor | None = None,
    ignore_index: int = IGNORED,
    **options: Any,
) -> Loss:
    def single(z: Tensor, y: Tensor) -> Any:
        z = with_classes_second(z, y)
        common: Any = {"weight": None if weight is None else weight.to(z), "reduction": "none"}
        common["ignore_index"] = ignore_index
        losses = function(z, y, **common, **options)
        counts = F.nll_loss(-torch.ones_like(z), y, **common).double()
        return [t.reshape(len(y), -1).sum(1) for t in (losses, counts)]

    return Loss(lambda z, y: [t.sum() for t in single(z, y)], single=single)


# -- scores


@dataclass(frozen=True)
class Scores:
    """What one set of weights does on a slice.

    Args:
        loss: the mean loss.
        each: the loss of every example [n] in float64, so that their mean is the loss; None where it cannot be taken.
        right: 1 where the answer is right and else 0 [n] in float64; with several labels an example their number, scaled so that
            the mean is over all labels. None where the loss is no classification.
        counts: by how much every example counts [n], 1 on average.
        labels: how often each class is the label [classes].
        weight: what was divided by.
    """

    loss: float
    each: Tensor | None
    right: Tensor | None
    counts: Tensor | None = None
    labels: Tensor | None = None
    weight: float = 1.0

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
        rows: list[Row] = [{"metric": "loss", "value": self.loss, "stderr": self.stderr}]
        if self.right is not None and self.labels is not None:
            guess = guess_accuracy((self.labels / self.labels.sum()).tolist(), problem.slice_name)
            error = Scores(0.0, self.right, None).stderr
            value = float(self.right.mean())
            rows.append({"metric": "accuracy", "value": value, "stderr": error, "guess": guess})
        return [{"estimator": "exact", "inputs": problem.inputs, **row} for row in rows]


def answers(loss: Any, z: Any, y: Any) -> tuple[Tensor, Tensor] | None:
    """How many answers of each example are right [b], and how often each class is the label [1, classes].

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
        z, y = torch.stack([-z, z], 1), (y > 0.5).long()
    elif z.shape == y.shape and is_probabilities(y):
        y = y.argmax(1)
    if y.is_floating_point() or z.ndim < 2:
        return None
    z = with_classes_second(z, y)
    labels = y.masked_fill(y == options.get("ignore_index", IGNORED), -1)
    if z[:, 0].shape != y.shape or int(labels.max()) >= z.shape[1]:
        return None
    right = (z.argmax(1) == labels).reshape(len(y), -1).sum(1)
    return right, labels[labels >= 0].bincount(minlength=z.shape[1])[None]
