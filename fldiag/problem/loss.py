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
from torch.utils._pytree import tree_map

from fldiag.errors import FldiagError
from fldiag.losses import IGNORED
from fldiag.problem.data import Tree, count, cut, describe
from fldiag.seeding import torch_rng


@dataclass(frozen=True)
class Loss:
    """``total(outputs, y)``: the sum over a batch; ``count(y)``: how much the batch counts; ``check(y)``: raises for labels that
    do not fit; ``remark``: what the loss is the mean over, where that is not plain."""

    total: Callable[[Any, Tree], Tensor]
    count: Callable[[Tree], Any]
    check: Callable[[Tree], None] = lambda y: None
    remark: str = ""

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
        return _of_pairs(loss, z, y)
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise FldiagError(
            f"the loss returns {describe(value)} for {count(y)} examples, not one number",
            "use the mean over the examples, or return (sum, count)",
        )
    sums = mean_over(loss, count)
    if isinstance(z, Tensor) and couples(sums, z, y):
        raise FldiagError(
            f"the loss of outputs {describe(z)} and targets {describe(y)} is not the mean over the examples: it is a sum, "
            "couples the examples, or weighs them",
            "return the mean over the examples, or (sum, count): the sum over what counts and how much that is",
        )
    return sums


def mean_over(loss: Callable[[Any, Any], Tensor], count: Callable[[Tree], Any], remark="") -> Loss:
    """A loss that is a mean over what ``count`` counts, as sums."""

    def total(z: Any, y: Tree) -> Tensor:
        value, size = loss(z, y).reshape(()), count(y)
        return value * size if isinstance(size, Tensor) or size else torch.zeros_like(value)

    return Loss(total, count, remark=remark)


def _of_pairs(loss: Callable[[Any, Any], Any], z: Any, y: Tree) -> Loss:
    def counted(y: Tree, change: Callable[[Tensor], Tensor] = torch.clone) -> Any:
        index = torch.arange(count(y)) % len(z)  # the outputs decide nothing here
        return loss(change(z[index.to(z.device)]), y)[1]

    sums = Loss(
        lambda z, y: loss(z, y)[0], counted, remark="the loss is the mean over what it counts"
    )
    if float(counted(y)) != float(counted(y, lambda z: 2 * z + 1)) or couples(sums, z, y):
        raise FldiagError(
            "the loss returns a pair that is not (sum, count): it must be the sum over what counts, and how much that is by the "
            "targets alone",
        )
    return sums


def couples(loss: Loss, z: Tensor, y: Tree) -> bool:
    """Whether the total of a batch differs from the sum of those of its halves, at z or at outputs that differ more.

    Other outputs than the model's are tried on the CPU, where a loss that refuses them does no harm.
    """
    half, rng = len(z) // 2, torch_rng(0, "outputs to try the loss on")
    far = 3 * max(1.0, float(z.abs().max())) * torch.randn(z.shape, generator=rng)
    trials = [(loss, z, y)]
    for outputs in (z.cpu() + far, torch.rand(z.shape, generator=rng)):
        trials.append((loss, outputs.to(z.dtype), tree_map(Tensor.cpu, y)))
    for sums, outputs, targets in trials if half else ():
        try:
            whole, *parts = (
                float(sums.total(outputs[part], cut(targets, part)))
                for part in (slice(None), slice(half), slice(half, None))
            )
        except Exception:  # not one of this loss's outputs
            continue
        error = abs(math.fsum(parts) - whole)
        if error > 1e-3 * abs(whole) + 1e-5 * sum(map(abs, parts)):
            return True
    return False


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
    classes = z.shape[axis]

    def total(z: Tensor, y: Tensor) -> Tensor:
        z = z.movedim(axis, 1) if axis != 1 else z
        w = None if weight is None else weight.to(z)
        return take(z, y, weight=w, ignore_index=ignore_index, reduction="sum", **options)

    def counted(y: Tensor) -> Tensor:
        counts = (y != ignore_index).double()
        if weight is not None:
            counts = counts * weight.to(y.device).double()[y.clamp(0, classes - 1)]
        return counts.sum()

    def check(y: Tensor) -> None:
        wrong = ((y < 0) | (y >= classes)) & (y != ignore_index)
        if bool(wrong.any()):
            raise FldiagError(
                f"the label {int(y[wrong][0])} is not among those of the model's {classes} outputs",
                f"labels must lie in 0..{classes - 1}",
            )

    return Loss(total, counted, check)


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

    Found by trying, on ever more masked labels and at other weights, because no two models say it alike.

    Raises FldiagError where it is none of them.
    """

    def labels(y: Tree, start: int = 0) -> Tensor:
        return (y["labels"][:, start:] != IGNORED).sum()

    rules: dict[str, Callable[[Tree], Any]] = {"examples": count}
    rng = torch_rng(0, "labels to mask")
    noise = torch.randn(len(problem.w), generator=rng).to(problem.w)
    w = problem.w + 0.3 * problem.w.std() * noise
    if isinstance(y, Mapping) and "labels" in y and y["labels"].ndim > 1:
        rules[f"labels that are not {IGNORED}"] = labels
        rules[f"labels after the first that are not {IGNORED}"] = functools.partial(labels, start=1)
        shares = torch.linspace(0, 0.7, count(y)).reshape(-1, *[1] * (y["labels"].ndim - 1))
        places = (torch.rand(y["labels"].shape, generator=rng) < shares).to(problem.device)
        x, y = ({**t, "labels": t["labels"].masked_fill(places, IGNORED)} for t in (x, y))
    half = count(y) // 2
    parts = [slice(None), *([slice(half), slice(half, None)] if half else [slice(None)])]
    pieces = [(problem.call(w, cut(x, part)), cut(y, part)) for part in parts]
    errors = {}
    for name, rule in rules.items():
        whole, *rest = (float(problem.user_loss(z, y)) * float(rule(y)) for z, y in pieces)
        errors[name] = abs(math.fsum(rest) - whole) / max(abs(whole), 1e-30)
    best = min(errors, key=lambda name: errors[name])
    if errors[best] > 1e-4:
        raise FldiagError(
            "the model's own loss is the mean neither over the examples nor over the labels",
            "give a loss (outputs, batch) that returns (sum, count)",
        )
    return mean_over(
        problem.user_loss, rules[best], f"the model's own loss is the mean over the {best}"
    )


@dataclass(frozen=True)
class Classes:
    """How outputs answer: the largest along ``axis``, or their sign (None). ``guess_loss``: of outputs that favour no class."""

    axis: int | None
    number: int
    ignored: int
    guess_loss: float | None

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
    """How the outputs answer, None where the loss is no classification."""
    outputs, labels = parts(z, y)
    if not isinstance(outputs, Tensor) or not isinstance(labels, Tensor) or outputs.ndim < 2:
        return None
    options, value = entropy_options(user_loss), float(loss.total(z, y)) / float(loss.count(y))

    def is_mean_of(take: Callable[[Tensor, Tensor], Tensor], labels: Tensor, axis: int = 1) -> bool:
        mean = float(take(outputs.movedim(axis, 1), labels))
        return math.isclose(mean, value, rel_tol=1e-4, abs_tol=1e-7)

    if outputs.shape == labels.shape:
        y = labels.to(outputs)
        if is_probabilities(y) and (options or is_mean_of(F.cross_entropy, y)):
            guess = math.log(y.shape[1]) if (options or {}).get("weight") is None else None
            return Classes(1, y.shape[1], IGNORED, guess)
        is_bit = bool(((y == 0) | (y == 1)).all())
        binary = F.binary_cross_entropy_with_logits
        if is_bit and (is_binary(user_loss) or is_mean_of(binary, y)):
            guess = math.log(2) if is_mean_of(binary, y) else None
            return Classes(None, 2, IGNORED, guess)
        return None
    if labels.is_floating_point() or outputs.ndim != labels.ndim + 1:
        return None
    axis = class_axis(outputs, labels)
    number = outputs.shape[axis]
    ignored = IGNORED if options is None else options.get("ignore_index", IGNORED)
    counted = labels != ignored
    if bool(((labels < 0) | (labels >= number))[counted].any()):
        return None
    is_entropy = options is not None or is_mean_of(F.cross_entropy, labels, axis)
    if not is_entropy and (isinstance(z, Mapping) or not _takes_classes(loss, z, y, axis, counted)):
        return None
    return Classes(axis, number, ignored, math.log(number) if is_entropy else None)


def _takes_classes(loss: Loss, z: Tensor, y: Tensor, axis: int, counted: Tensor) -> bool:
    """Whether labels are class numbers to a loss: another label pulls its own output up and lets the former one's down."""
    other = torch.where(counted, (y + 1) % z.shape[axis], y)
    with torch.enable_grad():
        leaf = z.detach().requires_grad_()
        try:
            before, after = (torch.autograd.grad(loss.total(leaf, t), leaf)[0] for t in (y, other))
        except Exception:  # it takes no other labels, or has no gradient
            return False
    up, down = (
        (before - after).gather(axis, (t * counted).unsqueeze(axis)).squeeze(axis)[counted]
        for t in (other, y)
    )
    return bool((up > 0).all() and (down < 0).all())
