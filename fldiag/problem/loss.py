"""A loss as two sums: that of a slice is the sum of ``total`` over its batches, divided by the sum of ``count``.

So class weights, ignored labels and padding count the same whatever the batch size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fldiag.errors import FldiagError
from fldiag.losses import IGNORED
from fldiag.problem.data import Tree, count, cut, describe
from fldiag.seeding import torch_rng


@dataclass(frozen=True)
class Loss:
    """``total(outputs, y)``: the sum over a batch; ``count(y)``: how much the batch counts; ``remark``: what the loss is the mean
    over, where that is not plain; ``classes``: how the outputs answer."""

    total: Callable[[Any, Tree], Tensor]
    count: Callable[[Tree], Any]
    remark: str = ""
    classes: Classes | None = None

    def each(self, z: Any, y: Tree) -> tuple[Tensor, Tensor] | None:
        """Total and count of every example [b] in float64; None where the loss cannot be taken one by one."""

        def one(*example: Tree) -> tuple[Tensor, Tensor]:
            z, y = cut(example, None)  # type: ignore[arg-type]
            return self.total(z, y), torch.as_tensor(self.count(y), dtype=torch.float64)

        try:
            totals, counts = torch.func.vmap(one)(z, y)
        except Exception:  # whatever a user's loss cannot do this way
            return None
        return totals.double(), counts.to(totals.device)


def as_sums(loss: Callable[[Any, Any], Any], z: Any, y: Tree) -> Loss:
    """A loss as sums.

    Args:
        loss: (outputs, y) -> the mean over the examples, or a pair (sum, count).
        z: outputs to try it on.
        y: their targets.

    Returns:
        Its sums. Torch's losses of class labels are known with all their options.

    Raises:
        FldiagError: the loss is neither a mean over the examples nor a pair.
    """
    options = entropy_options(loss)
    if options is not None and isinstance(z, Tensor) and not y.is_floating_point():
        return _entropy(z, y, **options)
    if is_binary(loss) and not y.is_floating_point():
        return as_sums(lambda z, y: loss(z, y.to(z)), z, y)
    value = loss(z, y)
    if isinstance(value, (tuple, list)) and len(value) == 2:

        def counted(y: Tree, scale: float = 1.0) -> Any:
            index = torch.arange(count(y)) % len(z)  # the outputs decide nothing here
            return loss(scale * z[index.to(z.device)], y)[1]

        sums = Loss(lambda z, y: loss(z, y)[0], counted, "the loss is the mean over what it counts")
        is_sound = float(counted(y)) == float(counted(y, 2.0))
    else:
        is_sound = isinstance(value, Tensor) and value.numel() == 1
        sums = mean_over(loss, count)
    if not is_sound or (isinstance(z, Tensor) and couples(sums, z, y)):
        raise FldiagError(
            f"the loss of outputs {describe(z)} and targets {describe(y)} is not the mean over the examples: it is a sum, "
            "couples the examples, or weighs them",
            "return the mean over the examples, or (sum, count): the sum over what counts, and how much that is by the targets "
            "alone",
        )
    return sums


def mean_over(loss: Callable[[Any, Any], Tensor], count: Callable[[Tree], Any], remark="") -> Loss:
    """A loss that is a mean over what ``count`` counts, as sums."""

    def total(z: Any, y: Tree) -> Tensor:
        value, size = loss(z, y).reshape(()), count(y)
        return value * size if isinstance(size, Tensor) or size else torch.zeros_like(value)

    return Loss(total, count, remark)


def couples(loss: Loss, z: Tensor, y: Tree) -> bool:
    """Whether the total of a batch is not the sum of those of its halves, at z or at outputs that differ more."""
    rng = torch_rng(0, "outputs to try the loss on")
    far = 3 * max(1.0, float(z.abs().max())) * torch.randn(z.shape, generator=rng)
    for outputs in (z, z + far.to(z), torch.rand(z.shape, generator=rng).to(z)):
        try:
            if not is_sum(loss, lambda part, z=outputs: (z[part], cut(y, part)), count(y)):  # type: ignore[misc]
                return True
        except Exception:  # not one of this loss's outputs
            continue
    return False


def is_sum(loss: Loss, batch: Callable[[slice], tuple[Any, Tree]], n: int) -> bool:
    """Whether the total of n examples is the sum of those of their halves; ``batch``: examples -> (outputs, y)."""
    if n < 2:
        return True
    cuts = slice(n), slice(n // 2), slice(n // 2, n)
    whole, *parts = (float(loss.total(*batch(part))) for part in cuts)
    return not abs(math.fsum(parts) - whole) > 1e-4 * abs(whole) + 1e-5 * sum(map(abs, parts))


def entropy_options(loss: Any) -> dict[str, Any] | None:
    """The options of a mean of torch's cross entropy or negative log-likelihood in any of their forms, with the function under
    ``take``; None for another loss."""
    if type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss):
        names = ("weight", "ignore_index", "reduction", "label_smoothing")
        options = {name: getattr(loss, name) for name in names if hasattr(loss, name)}
        options["take"] = F.cross_entropy if type(loss) is nn.CrossEntropyLoss else F.nll_loss
    elif isinstance(loss, functools.partial) and not loss.args:
        options = {**loss.keywords, "take": loss.func}
    else:
        options = {"take": loss}
    is_mean = options.pop("reduction", "mean") == "mean"
    return options if is_mean and options["take"] in (F.cross_entropy, F.nll_loss) else None


def is_binary(loss: Any) -> bool:
    """Whether a loss is torch's binary cross entropy of logits."""
    function = loss.func if isinstance(loss, functools.partial) else loss
    return function is F.binary_cross_entropy_with_logits or type(loss) is nn.BCEWithLogitsLoss


def _entropy(
    z: Tensor,
    y: Tensor,
    take: Callable[..., Tensor],
    weight: Tensor | None = None,
    ignore_index: int = IGNORED,
    **options: Any,
) -> Loss:
    axis = class_axis(z, y)
    table = (torch.ones(z.shape[axis]) if weight is None else weight).cpu().double()

    def total(z: Tensor, y: Tensor) -> Tensor:
        w = None if weight is None else weight.to(z)
        z = z.movedim(axis, 1)
        return take(z, y, weight=w, ignore_index=ignore_index, reduction="sum", **options)

    def counted(y: Tensor) -> Tensor:
        y = y.cpu()  # where a label out of range is an error
        is_counted = y != ignore_index
        return (table[y * is_counted] * is_counted).sum()

    return Loss(total, counted)


def is_probabilities(y: Tensor) -> bool:
    """Whether each row of targets [n, classes] holds probabilities of classes: one-hot or soft labels."""
    if not y.is_floating_point() or y.ndim != 2 or y.shape[1] < 2:
        return False
    return bool((y >= 0).all() and ((y.sum(1) - 1).abs() < 1e-3).all())


def class_axis(z: Tensor, y: Tensor) -> int:
    """The axis of the classes: 1 as torch has it, or the last, as language models do."""
    return 1 if z.ndim < 3 or z[:, 0].shape == y.shape else z.ndim - 1


def own_loss(problem: Any, x: Tree, y: Tree) -> Loss:
    """What the mean is over that a model returns as its ``loss``: examples, labels, or labels after the first.

    Found by trying, on ever more masked labels, because no two models say it alike.

    Raises FldiagError where it is none of them.
    """
    rules: dict[str, Callable[[Tree], Any]] = {"examples": count}
    if isinstance(y, Mapping) and "labels" in y and y["labels"].ndim > 1:
        rules["labels that count"] = lambda y: (y["labels"] != IGNORED).sum()
        rules["labels after the first"] = lambda y: (y["labels"][:, 1:] != IGNORED).sum()
        labels = y["labels"].clone()
        for i, row in enumerate(labels):
            row[len(row) - (len(row) - 1) * i // len(labels) :] = IGNORED
        x, y = {**x, "labels": labels}, {**y, "labels": labels}
    for name, rule in rules.items():
        remark = f"the model's own loss is the mean over the {name}"
        sums = mean_over(problem.user_loss, rule, remark)
        if is_sum(
            sums, lambda part: (problem.call(problem.w, cut(x, part)), cut(y, part)), count(y)
        ):
            return sums
    raise FldiagError(
        "the model's own loss is the mean neither over the examples nor over the labels",
        "give a loss (outputs, batch) that returns (sum, count)",
    )


@dataclass(frozen=True)
class Classes:
    """How outputs answer: the largest along ``axis``, or their sign (None)."""

    axis: int | None
    number: int
    ignored: int

    def answers(self, z: Any, y: Any) -> tuple[Tensor, Tensor]:
        """Whether each answer is right, and the labels, [b, ...]; ignored labels are -1."""
        z, y = parts(z, y)
        if self.axis is None:
            labels = (y > 0.5).long()
            return (z > 0).reshape(y.shape).long() == labels, labels
        labels = y.argmax(1) if y.is_floating_point() else y.masked_fill(y == self.ignored, -1)
        return z.argmax(self.axis) == labels, labels


def parts(z: Any, y: Any) -> tuple[Any, Any]:
    """Outputs and labels, also of models and data that name them as those of transformers do."""
    z = z.get("logits") if isinstance(z, Mapping) else z
    return z, y.get("labels", y.get("label")) if isinstance(y, Mapping) else y


def classes_of(user_loss: Any, loss: Loss, z: Any, y: Any) -> Classes | None:
    """How the outputs answer: by class numbers, one-hot or soft labels, or bits; None where it is none of these.

    Only a cross entropy is known to answer by bits, or for a model that returns its own loss (which may shift its labels).
    """
    outputs, labels = parts(z, y)
    if not isinstance(outputs, Tensor) or not isinstance(labels, Tensor) or outputs.ndim < 2:
        return None
    outputs, labels = outputs.cpu(), labels.cpu()  # where a label out of range is an error
    options = entropy_options(user_loss)
    ignored = (options or {}).get("ignore_index", IGNORED)
    is_same, is_bits = outputs.shape == labels.shape, is_binary(user_loss)
    if is_same and (is_bits or not is_probabilities(labels)):
        axis, labels = None, labels.to(outputs)
        if bool((labels * (1 - labels)).any()):
            return None
        entropy = F.binary_cross_entropy_with_logits(outputs, labels)
    else:
        axis = class_axis(outputs, labels)
        try:
            entropy = F.cross_entropy(outputs.movedim(axis, 1), labels, ignore_index=ignored)
        except (RuntimeError, IndexError, ValueError):  # they are no labels of these outputs
            return None
    if options is None and not is_bits and (axis is None or isinstance(z, Mapping)):
        value = float(loss.total(z, y)) / float(loss.count(y))
        if not math.isclose(float(entropy), value, rel_tol=1e-4, abs_tol=1e-7):
            return None
    return Classes(axis, 2 if axis is None else outputs.shape[axis], ignored)
