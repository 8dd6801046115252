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

#: Modules that are functions of torch, and the options that these have in common.
FUNCTIONS = {
    nn.CrossEntropyLoss: F.cross_entropy,
    nn.NLLLoss: F.nll_loss,
    nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
}
OPTIONS = ("weight", "ignore_index", "reduction", "label_smoothing")


@dataclass(frozen=True)
class Loss:
    """``total(outputs, y)``: the sum over a batch; ``count(y)``: how much the batch counts; ``mean_over``: what it counts."""

    total: Callable[[Any, Tree], Tensor]
    count: Callable[[Tree], Any]
    mean_over: str = "examples"

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


def as_sums(loss: Callable[[Any, Any], Any], call: Callable[[Tree], Any], x: Tree, y: Tree) -> Loss:
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
    is_integer = isinstance(y, Tensor) and not y.is_floating_point()
    if function is F.binary_cross_entropy_with_logits and is_integer:
        return as_sums(lambda z, y: loss(z, y.to(z)), call, x, y)
    z, is_mean = call(x), options.pop("reduction", "mean") == "mean"
    if function in (F.cross_entropy, F.nll_loss) and is_mean and is_integer:
        return _entropy(function, **options)
    if isinstance(loss(z, y), (tuple, list)):
        forms = [_counted(loss, z)]
        is_sound = float(forms[0].count(y)) == float(_counted(loss, 2 * z).count(y))
    else:
        forms, is_sound = [_mean(loss, count)], True
    if isinstance(z, Mapping) and isinstance(y, Mapping) and y["labels"].ndim > 1:
        forms.append(_mean(loss, lambda y: (y["labels"] != IGNORED).sum(), "labels that count"))
        after = "labels after the first"
        forms.append(_mean(loss, lambda y: (y["labels"][:, 1:] != IGNORED).sum(), after))
        labels = y["labels"].clone()
        for i, row in enumerate(labels):  # ever fewer, as rows alike tell no form from another
            row[len(row) - (len(row) - 1) * i // len(labels) :] = IGNORED
        x, y = {**x, "labels": labels}, {**y, "labels": labels}
    for sums in forms:
        if is_sound and is_sum(sums, call, x, y):
            return sums
    raise FldiagError(
        f"the loss of outputs {describe(z)} and targets {describe(y)} is not the mean over the examples: it is a sum, "
        "couples the examples, or weighs them",
        "return the mean over the examples, or (sum, count): the sum over what counts, and how much that is by the targets "
        "alone",
    )


def _counted(loss: Callable[[Any, Any], Any], z: Tensor) -> Loss:
    """A pair (sum, count) as sums. The outputs z decide nothing about the count."""

    def counted(y: Tree) -> Any:
        return loss(z[torch.arange(count(y)) % len(z)], y)[1]

    return Loss(lambda z, y: loss(z, y)[0], counted, "what it counts")


def _mean(
    loss: Callable[[Any, Any], Tensor], count: Callable[[Tree], Any], *mean_over: str
) -> Loss:
    """A mean over what ``count`` counts, as sums."""

    def total(z: Any, y: Tree) -> Tensor:
        value, size = loss(z, y).reshape(()), count(y)
        return value * size if isinstance(size, Tensor) or size else torch.zeros_like(value)

    return Loss(total, count, *mean_over)


def is_sum(loss: Loss, call: Callable[[Tree], Any], x: Tree, y: Tree) -> bool:
    """Whether the total of a batch is the sum of those of its halves."""
    half = count(y) // 2
    if not half:
        return True
    cuts = slice(None), slice(half), slice(half, None)
    whole, *parts = (float(loss.total(call(cut(x, part)), cut(y, part))) for part in cuts)
    return not abs(math.fsum(parts) - whole) > 1e-4 * abs(whole) + 1e-5 * sum(map(abs, parts))


def form_of(loss: Any) -> tuple[Any, dict[str, Any]]:
    """The function that a loss is, and its options, where it is one of torch or partial."""
    if type(loss) in FUNCTIONS:
        options = {name: getattr(loss, name) for name in OPTIONS if hasattr(loss, name)}
        return FUNCTIONS[type(loss)], options
    if isinstance(loss, functools.partial) and not loss.args:
        return loss.func, dict(loss.keywords)
    return loss, {}


def _entropy(
    function: Callable[..., Tensor],
    weight: Tensor | None = None,
    ignore_index: int = IGNORED,
    **options: Any,
) -> Loss:
    def total(z: Tensor, y: Tensor) -> Tensor:
        w = None if weight is None else weight.to(z)
        # the axis of the classes is 1, as torch has it, or the last, as language models do
        z = z if z.ndim < 3 or z[:, 0].shape == y.shape else z.movedim(-1, 1)
        return function(z, y, weight=w, ignore_index=ignore_index, reduction="sum", **options)

    def counted(y: Tensor) -> Tensor:
        is_counted = y != ignore_index
        if weight is None:
            return is_counted.sum()
        return (weight.to(y.device).double()[y * is_counted] * is_counted).sum()

    return Loss(total, counted)


def is_probabilities(y: Tensor) -> bool:
    """Whether each row of targets [n, classes] holds probabilities of classes: one-hot or soft labels."""
    if not y.is_floating_point() or y.ndim != 2 or y.shape[1] < 2:
        return False
    return bool((y >= 0).all() and ((y.sum(1) - 1).abs() < 1e-3).all())
