"""The loss and the right answers of one forward pass, and what guessing would give."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fldiag.problem.ingredients import Ingredients
from fldiag.problem.objective import IGNORED, Each, entropy_of
from fldiag.problem.trees import Tree, count

#: Relative difference below which two losses in single precision are the same one.
SAME = 1e-4


@dataclass(frozen=True)
class Scores:
    """What one set of weights does on a slice.

    Args:
        loss: the mean loss.
        each: the loss of each example [n] in float64; None where it cannot be taken.
        right: whether the answer to each example is right [n]; with several targets an example their number, scaled so that the
            mean is over all targets. None where the loss is no classification.
        guess_loss: the loss of outputs that favour no class; None where these are unknown.
        shares: how often each class is the label, as a share of 1.
        penalty: weight decay's part of all these losses.
    """

    loss: float
    each: Tensor | None
    right: Tensor | None
    guess_loss: float | None = None
    shares: tuple[float, ...] = ()
    penalty: float = 0.0

    @property
    def accuracy(self) -> float | None:
        return None if self.right is None else float(self.right.double().mean())

    @property
    def accuracy_stderr(self) -> float | None:
        """The standard error of the accuracy over the examples; None of a single one."""
        if self.right is None or len(self.right) < 2:
            return None
        return float(self.right.double().std()) / math.sqrt(len(self.right))


def score(
    problem: Ingredients, batches: Iterable[tuple[Any, Tree]], per_example: Each | None
) -> Scores:
    """The scores of (outputs, targets) of all the problem's batches; ``per_example``: the loss of each example, where it can be
    taken."""
    answers = AnswerCounter(problem)
    each, means = [], []
    with problem.guarded(), torch.no_grad():
        for z, y in batches:
            if per_example is None:
                means.append(float(problem.criterion(z, y)) * count(y) / problem.n)
            else:
                each.append(per_example(z, y))
            answers.add(z, y)
    losses = torch.cat(each) if each else None
    return answers.scores(math.fsum(means) if losses is None else float(losses.mean()), losses)


class AnswerCounter:
    """Counts the right answers batch by batch; what kind of classification it is follows from the first batch."""

    def __init__(self, problem: Ingredients):
        self.problem, self.entropy = problem, entropy_of(problem.user_loss)
        self.kind: _Kind | None = None
        self.batches = 0
        self.right: list[Tensor] = []
        self.counts, self.guess_loss, self.several = torch.zeros(0, dtype=torch.float64), 0.0, False

    def add(self, z: Any, y: Any) -> None:
        if not self.batches:
            self.kind = self._kind_of(z, y)
        self.batches += 1
        if self.kind is None:
            return
        outputs, labels = _parts(z, y)
        counted = labels != self.kind.ignored
        valid = labels[counted].long()
        if valid.numel() and not 0 <= int(valid.min()) <= int(valid.max()) < self.kind.classes:
            self.kind = None  # numbers, not classes
            return
        counts = torch.bincount(valid, minlength=self.kind.classes).double().cpu()
        self.counts = counts + self.counts if len(self.counts) else counts
        right = (self.kind.answer(outputs, labels) == labels) & counted
        self.several |= (labels.ndim > 1 and labels[0].numel() > 1) or not bool(counted.all())
        self.right.append(right.reshape(len(labels), -1).sum(1))
        if self.kind.uniform is None or isinstance(z, Mapping):
            self.guess_loss = math.nan
        else:
            loss = float(self.problem.criterion(torch.full_like(z, self.kind.uniform), y))
            self.guess_loss += loss * len(labels) / self.problem.n

    def scores(self, loss: float, losses: Tensor | None) -> Scores:
        total = float(self.counts.sum())
        if self.kind is None or not total:
            return Scores(loss, losses, None)
        right = torch.cat(self.right)
        right = right.double() * (len(right) / total) if self.several else right.bool()
        return Scores(
            loss,
            losses,
            right,
            None if math.isnan(self.guess_loss) else self.guess_loss,
            tuple((self.counts / total).tolist()),
        )

    def _kind_of(self, z: Any, y: Any) -> _Kind | None:
        outputs, labels = _parts(z, y)
        if not isinstance(outputs, Tensor) or not isinstance(labels, Tensor):
            return None
        if not outputs.is_floating_point() or not outputs.ndim or not labels.ndim:
            return None
        if outputs.numel() == labels.numel() and len(outputs) == len(labels):
            return self._binary(z, y, outputs, labels)
        integers = not labels.is_floating_point() and labels.dtype != torch.bool
        if not integers or outputs.ndim != labels.ndim + 1:
            return None
        axis = 1 if outputs[:, 0].shape == labels.shape else outputs.ndim - 1
        if outputs.shape[axis] < 2 or outputs.select(axis, 0).shape != labels.shape:
            return None
        if self.entropy is None and not self._takes_classes(z, y, axis):
            return None  # counts, times or ranks
        uniform = None if isinstance(z, Mapping) else self._uniform(outputs, y, axis)
        return _Kind(
            outputs.shape[axis],
            axis,
            uniform,
            IGNORED if self.entropy is None else self.entropy.ignored,
        )

    def _takes_classes(self, z: Any, y: Any, axis: int) -> bool:
        """Whether the labels are class numbers to the loss, and so the largest of the outputs along ``axis`` its answer.

        It is then their cross entropy, or another label within range pulls its own output up and lets the former one's down, in
        every example.
        """
        outputs, labels = _parts(z, y)
        classes, labels = outputs.shape[axis], labels.long()
        counted = labels != IGNORED
        if bool(((labels < 0) | (labels >= classes))[counted].any()):
            return False
        value = float(self.problem.criterion(z, y))
        if _is_same_loss(F.cross_entropy(outputs.movedim(axis, 1), labels), value):
            return True
        other = torch.where(counted, (labels + 1) % classes, labels)
        try:
            with torch.enable_grad():
                leaf = outputs.detach().requires_grad_()
                before, after = (
                    torch.autograd.grad(
                        self.problem.criterion(*_with_parts(z, y, leaf, k)).sum(), leaf
                    )[0]
                    for k in (labels, other)
                )
        except Exception:  # the user's loss takes no other labels, or has no gradient
            return False
        pull = before - after
        up, down = (
            pull.gather(axis, (k * counted).unsqueeze(axis)).squeeze(axis)[counted]
            for k in (other, labels)
        )
        return bool((up > 0).all() and (down < 0).all())

    def _uniform(self, outputs: Tensor, y: Any, axis: int) -> float | None:
        """The output of every class that favours none: a probability, its logarithm or, where the loss sees differences
        alone, 0."""
        classes = outputs.shape[axis]
        if bool((outputs >= 0).all()) and bool(((outputs.sum(axis) - 1).abs() < 1e-3).all()):
            return 1 / classes
        if bool((outputs.logsumexp(axis).abs() < 1e-3).all()):
            return -math.log(classes)
        try:
            value, shifted = (float(self.problem.criterion(outputs + shift, y)) for shift in (0, 1))
        except Exception:  # a loss that takes such outputs only as its model gives
            return None
        return 0.0 if math.isclose(value, shifted, rel_tol=SAME, abs_tol=1e-5) else None

    def _binary(self, z: Any, y: Any, outputs: Tensor, labels: Tensor) -> _Kind | None:
        """One output for two classes, or several with two each: only where the loss is a binary cross entropy."""
        if isinstance(z, Mapping) or not bool(((labels == 0) | (labels == 1)).all()):
            return None
        value, loss = float(self.problem.criterion(z, y)), self.problem.user_loss
        flat, target = outputs.reshape(-1), labels.reshape(-1).to(outputs.dtype)
        if isinstance(loss, nn.BCEWithLogitsLoss) or _is_same_loss(
            F.binary_cross_entropy_with_logits(flat, target), value
        ):
            return _Kind(2, None, 0.0)
        if bool(((flat >= 0) & (flat <= 1)).all()) and (
            isinstance(loss, nn.BCELoss)
            or _is_same_loss(F.binary_cross_entropy(flat, target), value)
        ):
            return _Kind(2, None, 0.5)
        return None


def _is_same_loss(loss: Tensor, value: float) -> bool:
    return math.isclose(float(loss), value, rel_tol=SAME, abs_tol=1e-7)


@dataclass(frozen=True)
class _Kind:
    """``axis``: of the classes; None where one output decides between two, on which side of ``uniform`` it is. ``uniform``: what
    outputs are that favour no class. ``ignored``: a label that does not count."""

    classes: int
    axis: int | None
    uniform: float | None
    ignored: int = IGNORED

    def answer(self, outputs: Tensor, labels: Tensor) -> Tensor:
        if self.axis is not None:
            return outputs.argmax(self.axis)
        assert self.uniform is not None  # it is where the loss is a binary one
        return (outputs > self.uniform).reshape(labels.shape).to(labels.dtype)


def _parts(z: Any, y: Any) -> tuple[Any, Any]:
    """Outputs and labels, also of models and data that name them as those of transformers do."""
    return (
        z.get("logits") if isinstance(z, Mapping) else z,
        y.get("labels", y.get("label")) if isinstance(y, Mapping) else y,
    )


def _with_parts(z: Any, y: Any, outputs: Tensor, labels: Tensor) -> tuple[Any, Any]:
    """z and y with other outputs and labels in the places where ``_parts`` finds them."""
    label = "labels" if isinstance(y, Mapping) and "labels" in y else "label"
    return _with_entry(z, "logits", outputs), _with_entry(y, label, labels)


def _with_entry(tree: Any, name: str, part: Tensor) -> Any:
    """A copy of a mapping with another entry; of a tensor the entry itself."""
    if not isinstance(tree, Mapping):
        return part
    tree = copy.copy(tree)
    tree[name] = part  # type: ignore[index]
    return tree
