"""What a loss is divided by: the examples, or what it counts of them (masks, ignored labels, class weights).

A mean over the examples is the same whichever batches it is taken in. A mean over counted targets is not: a batch in which
little is counted weighs as much as a full one. So such a loss is taken as a sum, and divided by what is counted in the whole
slice, which is found before anything is evaluated::

    L(w) = sum_j s_j(w) / W = mean_j of (n / W) s_j(w)        s_j: the sum over example j's targets, W: all that is counted

Written so it is a mean over the examples again, and everything that is known of those holds for it: batches of any size give
the same loss, gradient and curvature.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from fldiag.errors import FldiagError, error_place, first_line, out_of_memory
from fldiag.losses import IGNORED
from fldiag.problem.ingredients import Criterion, Ingredients
from fldiag.problem.trees import Tree, clone, count, cut, describe, of_examples, rows, same

#: (outputs, y) -> a number of each example [b].
Each = Callable[[Any, Any], Tensor]
#: (outputs, y) of a batch -> the sum of its losses, and how much is counted in it.
Pair = Callable[[Any, Any], tuple[Tensor, Any]]


@dataclass(frozen=True)
class Objective:
    """``criterion``: (outputs, y) of a batch -> the mean over its examples. ``each``: the loss of every example, None where
    nobody knows how to take it. ``counts``: by how much every example is counted, 1 on average (None: all alike).
    ``remarks``: what was found out, in words."""

    criterion: Criterion
    each: Each | None = None
    counts: Each | None = None
    remarks: tuple[str, ...] = ()


def make_objective(problem: Ingredients, x: Tree, y: Tree, z: Any) -> Objective:
    """How the problem's loss is taken, from what it is and what it returns for a sample and its outputs z.

    Raises FldiagError when the loss fails, returns neither a number nor a pair, or counts nothing.
    """
    loss, entropy = problem.user_loss, entropy_of(problem.user_loss)
    if (
        entropy is not None
        and isinstance(z, Tensor)
        and isinstance(y, Tensor)
        and _is_integer(y)
        and z.ndim > 1
    ):
        if entropy.reduction == "mean":
            return _classes(problem, entropy, z, y)
        for start, labels in _pieces(problem):
            check_labels(
                labels, z.shape[_class_axis(z, y)], start, problem.slice_name, entropy.ignored
            )
    else:
        _check_failing_labels(problem, z, y)
    value = _value(loss, z, y)
    if isinstance(value, Tensor) and isinstance(z, Mapping) and value is z.get("loss"):
        return _loss_of_model(problem, x, y)
    if isinstance(value, (tuple, list)) and len(value) == 2:
        return _counted(problem, loss, z, y)
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise FldiagError(
            f"the loss returns {describe(value)} for {count(y)} examples, not one number",
            "use the mean over the examples, or return (sum, count)",
        )
    return Objective(loss)


def _pieces(problem: Ingredients) -> Iterator[tuple[int, Tree]]:
    """The targets of the whole slice in pieces, each with the number of its first example."""
    start = 0
    for targets in problem.targets():
        yield start, targets
        start += count(targets)


def _check_failing_labels(problem: Ingredients, z: Any, y: Any) -> None:
    """Raises FldiagError for labels outside 0..outputs-1 on which the loss fails, though it takes others.

    Only a trial tells whether integers are class numbers: counts, times and ranks are integers, too. It is made on the CPU, as
    an accelerator does not survive an index out of range.
    """
    classes = _class_count(z, y)
    if classes is None:
        return
    loss, outputs = problem.user_loss, z.detach().cpu()
    criterion = copy.deepcopy(loss).cpu() if isinstance(loss, nn.Module) else loss
    for start, labels in _pieces(problem):
        labels = labels.cpu().long()
        outside = (
            ((labels < 0) | (labels >= classes)).reshape(len(labels), -1).any(1).nonzero().flatten()
        )
        for numbers in outside.split(len(outputs)):
            if _failure(criterion, outputs, labels[numbers], classes) is None:
                continue
            for number in numbers.tolist():
                error = _failure(criterion, outputs, labels[number : number + 1], classes)
                if error is not None:
                    check_labels(
                        labels[number : number + 1],
                        classes,
                        start + number,
                        problem.slice_name,
                        reason=f" ({first_line(error)})",
                    )


def _failure(
    criterion: Criterion, outputs: Tensor, labels: Tensor, classes: int
) -> Exception | None:
    """What the loss raises for these labels, and not for labels within range."""
    outputs = outputs[: len(labels)]
    try:
        criterion(outputs, labels)
    except Exception as error:  # of whatever kind the user's loss raises
        try:
            criterion(outputs, labels.clamp(0, classes - 1))
        except Exception:  # the labels are not what is wrong
            return None
        return error
    return None


def _class_count(z: Any, y: Any) -> int | None:
    """The number of outputs that a label may choose from, where the shapes say it."""
    if (
        not isinstance(z, Tensor)
        or not isinstance(y, Tensor)
        or not _is_integer(y)
        or z.ndim != y.ndim + 1
    ):
        return None
    first, last = y.shape == z[:, 0].shape, y.shape == z.shape[:-1]
    classes = z.shape[1] if first else z.shape[-1]
    return classes if first != last or (z.ndim == 2 and classes > 1) else None


def _is_integer(y: Tensor) -> bool:
    return not y.is_floating_point() and y.dtype != torch.bool


def _value(loss: Callable[..., Any], z: Any, y: Tree) -> Any:
    try:
        with warnings.catch_warnings():
            # an error instead of torch's warning
            warnings.filterwarnings("error", message="Using a target size", category=UserWarning)
            return loss(z, y)
    except UserWarning as warning:
        if not str(warning).startswith("Using a target size"):  # made an error by whoever calls
            raise
        raise FldiagError(
            f"the loss compares outputs {describe(z)} with targets {describe(y)}: one would be spread over the "
            "other",
            "give the targets the shape of the outputs, or a loss that says how they are compared",
        ) from None
    except FldiagError:
        raise
    except Exception as error:  # the user's loss may raise anything
        if out_of_memory(error):
            raise
        several = not isinstance(z, Tensor)
        raise FldiagError(
            f"the loss failed on outputs {describe(z)} and targets {describe(y)}: {type(error).__name__}: {error}"
            f"{error_place(error)}",
            "give a loss (outputs, y) that picks what it compares: lambda out, y: F.cross_entropy(out[0], y)"
            if several
            else "check that the loss takes (outputs, y) of this shape and type",
        ) from error


def _scaled(pair: Pair, factor: float) -> Criterion:
    def criterion(z: Any, y: Any) -> Tensor:
        return pair(z, y)[0] * (factor / count(y))

    return criterion


def _alone(pair: Pair, which: int, factor: float) -> Each:
    return lambda z, y: (
        map_over_examples(lambda z, y: torch.as_tensor(pair(z, y)[which]), z, y).double() * factor
    )


# -- a loss that says itself what it counts


def _counted(problem: Ingredients, pair: Pair, z: Any, y: Tree) -> Objective:
    b, parts = count(y), []
    if float(pair(z, y)[1]) != float(pair(_other(z), y)[1]):
        raise FldiagError(
            "what the loss counts depends on the outputs",
            "let the second of (sum, count) depend on the targets alone",
        )
    for targets in problem.targets():  # the outputs decide nothing here, so any will do
        for i in range(0, count(targets), b):
            piece = cut(targets, slice(i, i + b))
            parts.append(
                float(pair(rows(z, b, slice(0, count(piece))), _placed(problem, piece))[1])
            )
    total = _total(parts)
    factor = problem.n / total
    return Objective(
        _scaled(pair, factor),
        each=_alone(pair, 0, factor),
        counts=_alone(pair, 1, factor),
        remarks=(f"the loss is the mean over what it counts: {total:g} in {problem.n:,} examples",),
    )


def _other(z: Any) -> Any:
    return tree_map(
        lambda t: 2 * t + 1 if isinstance(t, Tensor) and t.is_floating_point() else t, z
    )


def _placed(problem: Ingredients, y: Tree) -> Tree:
    return tree_map(
        lambda t: t.to(problem.device, problem.dtype if t.is_floating_point() else t.dtype), y
    )


def _total(parts: list[float]) -> float:
    total = sum(parts)
    if not total > 0:
        raise FldiagError(
            "the loss counts none of the targets",
            "give data in which some targets are neither masked nor ignored",
        )
    return total


# -- torch's losses of class labels


@dataclass(frozen=True)
class _Entropy:
    """Cross entropy or its half that starts at logarithms, with its settings."""

    take: Callable[..., Tensor]
    weight: Tensor | None
    ignored: int
    reduction: str
    options: dict[str, Any]

    def losses(self, z: Tensor, y: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight.to(z)
        return self.take(
            z, y, weight=weight, ignore_index=self.ignored, reduction="none", **self.options
        )

    def weights(self, y: Tensor) -> Tensor:
        """How much every label counts, in float64."""
        counted = (y != self.ignored).double()
        if self.weight is None:
            return counted
        return counted * self.weight.to(y.device).double()[y.clamp_min(0) * counted.long()]


def entropy_of(loss: Any) -> _Entropy | None:
    """The settings of torch's losses of class labels; None for any other loss."""
    if type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss):
        take = F.cross_entropy if isinstance(loss, nn.CrossEntropyLoss) else F.nll_loss
        options = {
            k: getattr(loss, k)
            for k in ("weight", "ignore_index", "reduction", "label_smoothing")
            if hasattr(loss, k)
        }
    elif isinstance(loss, functools.partial) and not loss.args:
        take, options = loss.func, dict(loss.keywords)
    else:
        take, options = loss, {}
    if take not in (F.cross_entropy, F.nll_loss):
        return None
    weight = options.pop("weight", None)
    ignored = options.pop("ignore_index", IGNORED)
    reduction = options.pop("reduction", "mean")
    if set(options) - {"label_smoothing"}:
        return None
    return _Entropy(take, weight, ignored, reduction, options)


def _classes(problem: Ingredients, entropy: _Entropy, z: Tensor, y: Tensor) -> Objective:
    axis, remarks = _class_axis(z, y), []
    classes = z.shape[axis]
    if entropy.weight is not None and len(entropy.weight) != classes:
        raise FldiagError(
            f"the loss has {len(entropy.weight)} class weights, and the model {classes} outputs",
            "give one weight per class",
        )
    parts: list[Tensor] = []
    missing = 0
    for start, labels in _pieces(problem):
        check_labels(labels, classes, start, problem.slice_name, entropy.ignored)
        parts.append(entropy.weights(labels).reshape(len(labels), -1).sum(1))
        missing += int((labels == entropy.ignored).sum())
    if axis != 1:
        remarks.append(f"outputs {list(z.shape[1:])} an example: the classes are on the last axis")
    if not missing and entropy.weight is None and axis == 1:
        return Objective(problem.user_loss, remarks=tuple(remarks))
    each_weight = torch.cat(parts)
    factor = problem.n / _total([float(each_weight.sum())])
    if missing:
        remarks.append(f"{missing:,} targets are ignored (label {entropy.ignored})")
    if entropy.weight is not None:
        remarks.append("the loss is the mean weighted by class")

    def losses(z: Tensor, y: Tensor) -> Tensor:
        return entropy.losses(z.movedim(-1, 1) if axis != 1 else z, y)

    def pair(z: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        return losses(z, y).sum(), None

    return Objective(
        criterion=_scaled(pair, factor),
        remarks=tuple(remarks),
        each=lambda z, y: losses(z, y).reshape(len(y), -1).double().sum(1) * factor,
        counts=lambda z, y: entropy.weights(y).reshape(len(y), -1).sum(1) * factor,
    )


def _class_axis(z: Tensor, y: Tensor) -> int:
    """1 as torch has it, or the last, as language models do."""
    first, last = y.shape == z[:, 0].shape, y.shape == z.shape[:-1]
    if first and last and z.ndim > 2:
        raise FldiagError(
            f"outputs {list(z.shape)} and targets {list(y.shape)}: it is unclear which axis holds the classes",
            "give a loss that says it: lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten())",
            usage=True,
        )
    if not first and not last:
        raise FldiagError(
            f"the loss failed on outputs a tensor {list(z.shape)} and targets a tensor {list(y.shape)}: the "
            "targets have another shape than the outputs without their classes",
            "check that the loss takes (outputs, y) of this shape and type",
        )
    return 1 if first else z.ndim - 1


def check_labels(
    y: Tensor,
    classes: int,
    start: int,
    slice_name: str,
    ignored: int | None = None,
    reason: str = "",
) -> None:
    """Raises FldiagError naming the first label outside 0..classes-1; ``start``: the number of the first example."""
    if int(y.min()) >= 0 and int(y.max()) < classes:
        return
    bad = ((y < 0) | (y >= classes)).reshape(len(y), -1)
    if ignored is not None:
        bad &= (y != ignored).reshape(len(y), -1)
    if bool(bad.any()):
        at = int(bad.any(1).nonzero()[0])
        raise FldiagError(
            f"example {start + at} of slice {slice_name!r} has label {int(y.reshape(len(y), -1)[at][bad[at]][0])}, "
            f"the model has {classes} outputs{reason}",
            f"labels must lie in 0..{classes - 1}",
        )


# -- a loss that the model takes itself


def _loss_of_model(problem: Ingredients, x: Tree, y: Tree) -> Objective:
    """What the mean is over that the model returns as its ``loss``: found by trying, at other weights and with other labels
    masked, because no two models say it alike."""
    labels = y.get("labels") if isinstance(y, Mapping) else None
    rules: dict[str, Callable[[Any], float]] = {"examples": lambda y: count(y)}
    if isinstance(labels, Tensor) and not labels.is_floating_point() and labels.ndim > 1:
        rules[f"labels that are not {IGNORED}"] = lambda y: int((y["labels"] != IGNORED).sum())
        rules[f"labels after the first that are not {IGNORED}"] = lambda y: int(
            (y["labels"][:, 1:] != IGNORED).sum()
        )
    name, counted = _fitting(problem, x, rules)
    total = _total([float(counted(targets)) for targets in problem.targets()])

    def pair(z: Any, y: Any) -> tuple[Tensor, float]:
        c = counted(y)
        return (z["loss"] * c if c else z["loss"].new_zeros(())), c

    return Objective(
        _scaled(pair, problem.n / total),
        remarks=(f"the model's own loss is the mean over {total:g} {name}",),
    )


def _fitting(
    problem: Ingredients, x: Tree, rules: dict[str, Callable[[Any], float]]
) -> tuple[str, Callable[[Any], float]]:
    b = count(x)
    if b < 2:
        return next(iter(rules.items()))
    rng = torch.Generator().manual_seed(0)
    w = problem.w + 0.3 * torch.randn(len(problem.w), generator=rng).to(problem.w) * problem.w.std()
    x = clone(x)
    if len(rules) > 1:  # ever more masked from example to example
        places = torch.rand(x["labels"].shape, generator=rng) < torch.linspace(0, 0.7, b)[:, None]
        x["labels"][places.to(problem.device)] = IGNORED
    half = b // 2
    pieces = [slice(0, b), slice(0, half), slice(half, b)]
    try:
        values = [float(problem.call(w, cut(x, piece))["loss"]) for piece in pieces]
    except (RuntimeError, IndexError):  # not a model that passes over labels
        return next(iter(rules.items()))
    errors = {}
    for name, rule in rules.items():
        total, first, second = (rule(cut(x, piece)) for piece in pieces)
        if total:
            expected = (values[1] * first + values[2] * second) / total
            errors[name] = abs(expected - values[0]) / max(abs(values[0]), 1e-30)
    name = min(errors, key=lambda k: errors[k])
    if not errors[name] <= 1e-4:
        raise FldiagError(
            "the model's own loss is the mean neither over the examples nor over the labels",
            "give a loss (outputs, batch) that returns (sum, count)",
        )
    return name, rules[name]


# -- the loss of every example


def map_over_examples(loss: Callable[[Any, Any], Tensor], z: Any, y: Any) -> Tensor:
    """The loss of each example alone, by mapping it over the batch."""
    b = count(y)

    def loss_of_one(*leaves: Tensor) -> Tensor:
        example = iter(leaves)
        batch_of_one = [next(example).unsqueeze(0) if of_examples(t, b) else t for t in flat]
        return loss(*tree_unflatten(batch_of_one, form))

    flat, form = tree_flatten((z, y))
    return torch.func.vmap(loss_of_one)(*(t for t in flat if of_examples(t, b)))


def per_example(criterion: Callable[..., Tensor], z: Any, y: Any, mean: Tensor) -> Each | None:
    """The loss of each example [b]: by its own ``reduction="none"``, else by mapping it over the batch."""
    ways: list[Callable[..., Tensor]] = []
    if isinstance(criterion, nn.Module):
        if isinstance(getattr(criterion, "reduction", None), str):
            unreduced = copy.deepcopy(criterion)
            setattr(unreduced, "reduction", "none")  # noqa: B010 (modules declare no such attribute)
            ways.append(unreduced)
    else:
        try:
            if "reduction" in inspect.signature(criterion).parameters:
                ways.append(functools.partial(criterion, reduction="none"))
        except (TypeError, ValueError):
            pass
    ways.append(functools.partial(map_over_examples, criterion))
    for way in ways:

        def take(z: Any, y: Any, way: Callable[..., Tensor] = way) -> Tensor:
            return way(z, y).reshape(count(y), -1).double().mean(1)

        if fits(take, z, y, mean):
            return take
    return None


def fits(take: Each, z: Any, y: Any, mean: Tensor) -> bool:
    """Whether these losses of the examples are there, and their mean is the mean."""
    try:
        losses = take(z, y)
    except Exception:  # whatever the user's loss cannot do this way, the mean loss still stands
        return False
    return losses.shape == (count(y),) and same(losses.mean(), mean.double().reshape(()), 1e-4)
