"""Is the loss a function of the weights alone? Small evaluations that name the culprit when it is not.

Every diagnostic assumes a deterministic loss that is the mean over the examples of the slice. What breaks
this assumption (dropout, running batch-norm, augmented or shuffled data, sums, class weights) does not
raise by itself: it only makes the numbers wrong.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fldiag.curvature.layer_rules import inherited_rules
from fldiag.errors import FldiagError, error_place, out_of_memory
from fldiag.models.network import batch_dependent
from fldiag.problem.derivatives import (
    Derivatives,
    compare_derivatives,
    refuse_weights_in_loss,
    remarks_on,
)
from fldiag.problem.ingredients import Criterion, Ingredients
from fldiag.problem.memory import bytes_of_graph, refuse_hooks
from fldiag.problem.objective import Each, Objective, fits, make_objective, per_example
from fldiag.problem.trees import Tree, clone, count, cut, describe, of_examples, same
from fldiag.seeding import torch_rng

#: Examples that the checks look at.
SAMPLE = 32
#: What a model or loss of one's own raises for what it does not take.
FAILURES = (
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    AttributeError,
    KeyError,
    AssertionError,
)


@dataclass(frozen=True)
class Facts:
    """What the probe learnt about a problem."""

    batch_dependent: bool  # an example's output depends on the other examples of its batch
    objective: Objective  # the loss as a mean over the examples
    outputs: int  # numbers an example's output has
    per_example: Each | None  # (outputs, y) -> losses [b], None when the loss cannot be taken apart
    channels_last: bool  # whether evaluations without gradients use the channels-last memory format
    graph_bytes: int  # memory an example takes in a graph that is differentiated twice
    derivatives: Derivatives  # whether gradient and products are derivatives
    remarks: tuple[str, ...]  # what stands beside every result


def _check_data(problem: Ingredients) -> tuple[Tree, Tree]:
    x, y = problem.sample(SAMPLE)
    x2, y2 = problem.sample(SAMPLE)
    if not (same(x, x2, 0.0) and same(y, y2, 0.0)):
        raise FldiagError(
            f"the data of slice {problem.slice_name!r} change from one reading to the next",
            "switch augmentation and shuffling off: every reading must give the same",
        )
    if not all(bool(torch.isfinite(t).all()) for t in tree_leaves(x) if t.is_floating_point()):
        raise FldiagError(
            f"the inputs of slice {problem.slice_name!r} hold NaN or infinite values",
            "clean or normalise the data",
        )
    return x, y


def _culprits(module: nn.Module) -> str:
    in_training = {
        f"{n or 'the model'} ({type(m).__name__})": m
        for n, m in module.named_modules()
        if m.training
    }
    dropout = [text for text, m in in_training.items() if inherited_rules(m).random]
    if dropout:
        return f"dropout is active in {', '.join(dropout)} although the model is in eval mode"
    if in_training:
        return f"still in training mode after eval(): {', '.join(in_training)}"
    return "no module is in training mode: look for torch.rand, or F.dropout without training=self.training"


def _check_model(problem: Ingredients, x: Tree, tolerance: float) -> Any:
    """The outputs on x, after checking that they are reproducible and that nothing is written to."""
    inputs, w = clone(x), problem.w.clone()
    buffers = {n: b.clone() for n, b in problem.buffers.items()}
    try:
        z = problem.call(w, inputs, buffers)
    except FldiagError:
        raise
    except Exception as error:  # the user's model may raise anything
        if out_of_memory(error):
            raise
        batch = (
            f"shape {list(x.shape)} and type {x.dtype}" if isinstance(x, Tensor) else describe(x)
        )
        raise FldiagError(
            f"the model failed on a batch of {batch}: {type(error).__name__}: {error}{error_place(error)}"
            + "".join(f" ({text})" for text in problem.data_remarks),
            "give pairs (inputs, target), with inputs that belong together in a tuple, such as "
            "[((a, b), y) for a, b, y in loader]"
            if problem.data_remarks
            else "check that the data are what the model takes (shape, type, normalised)",
        ) from error
    if not same(x, inputs, 0.0):
        raise FldiagError(
            "the model changes its input in place",
            "let it work on a copy (first layer inplace=False)",
        )
    if not same(w, problem.w, 0.0):
        raise FldiagError(
            "an evaluation changes the weights",
            "take Embedding(..., max_norm=None), and write to no parameter in forward",
        )
    moved = [n for n, b in buffers.items() if not same(b, problem.buffers[n], 0.0)]
    if moved:
        raise FldiagError(
            f"an evaluation changes the buffers {', '.join(moved[:4])}: "
            f"{_culprits(problem.module)}",
            "let eval() reach these modules (batch-norm must use its running statistics)",
        )
    if not same(z, problem.call(problem.w, clone(x), buffers), tolerance):
        raise FldiagError(
            f"two evaluations of the model disagree: {_culprits(problem.module)}",
            "make the model deterministic in eval mode",
        )
    return z


def _check_loss(
    problem: Ingredients, criterion: Criterion, x: Tree, z: Any, y: Tree, tolerance: float
) -> Tensor:
    value = criterion(z, y)
    if not bool(torch.isfinite(value)):
        culprits = {"weights": problem.w, "outputs of the model": z}
        place = next(
            (
                name
                for name, t in culprits.items()
                if isinstance(t, Tensor) and not bool(torch.isfinite(t).all())
            ),
            "loss alone",
        )
        raise FldiagError(
            f"the loss is {float(value)} (not finite: the {place})",
            "diagnose a checkpoint from before the training diverged",
        )
    if not same(value, criterion(z, y), tolerance):
        raise FldiagError(
            "two evaluations of the loss on the same outputs disagree",
            "make the loss deterministic",
        )
    if not isinstance(z, Tensor):
        _check_mean_through_model(problem, criterion, x, y)
    elif z.ndim and isinstance(y, Tensor) and len(z) == len(y):
        _check_mean(criterion, z, y, value)
    elif z.ndim and len(z) == count(y) and _is_mean(criterion, z, y) is False:
        raise _uneven(criterion, z, y)
    return value


def _check_mean(loss: Criterion, z: Tensor, y: Tensor, value: Tensor) -> None:
    twice = _loss_or_nan(loss, torch.cat([z, z]), torch.cat([y, y]))
    doubles = same(twice, 2 * value, 1e-3) and float(value.abs()) > 0
    fair = (
        same(twice, value, 1e-3)
        and _is_mean(loss, z, y) is not False
        and _is_mean_of_far_outputs(loss, z, y) is not False
    )
    if (
        (doubles or not fair)
        and z.shape != y.shape
        and z.numel() == y.numel()
        and _is_mean(loss, z, y.reshape(z.shape))
    ):
        raise FldiagError(
            f"the loss compares outputs {list(z.shape)} with targets {list(y.shape)}: broadcasting "
            "pairs every example with every other one",
            f"reshape the targets to {['n', *z.shape[1:]]}".replace("'", ""),
        )
    if doubles:
        raise FldiagError(
            "the loss doubles when every example is given twice: it is a sum",
            "use the mean over the examples",
        )
    if not fair:
        raise _uneven(loss, z, y)


def _uneven(loss: Criterion, z: Any, y: Tree) -> FldiagError:
    """What is wrong with a loss that is not the mean over the examples: it couples them, or weighs them differently."""
    if isinstance(z, Tensor) and _couples(loss, z, y):
        return FldiagError(
            "the loss of a batch is not the mean over its examples: it couples them (as contrastive, Dice, "
            "root-mean-square, correlation and ranking losses do), so it has no loss of one example",
            "diagnose a loss that is a mean over the examples",
        )
    return FldiagError(
        "the loss of a batch is not the mean over its examples: class weights, ignored labels or another "
        "normalisation make batches count differently",
        "return (sum, count): the sum over what counts and how much that is, or give torch's own cross entropy",
    )


def _loss_or_nan(loss: Criterion, z: Tensor, y: Tree) -> Tensor:
    """The loss, NaN where it takes no such batch (an odd number of views, say)."""
    try:
        return loss(z, y)
    except FAILURES:
        return torch.tensor(math.nan)


def _couples(loss: Criterion, z: Tensor, y: Tree) -> bool:
    """Whether what an example's outputs add to the loss depends on those of other examples.

    Otherwise exchanging the outputs of one half and of the other adds up to exchanging both.
    """
    half = torch.arange(len(z), device=z.device) < len(z) // 2
    half = half.reshape(-1, *[1] * (z.ndim - 1))
    full = torch.ones_like(half)
    for other in (z.roll(1, 0), *_far_outputs(z, y)):
        values = [
            float(_loss_or_nan(loss, torch.where(mask, other, z), y))
            for mask in (~full, half, ~half, full)
        ]
        error = abs(values[0] + values[3] - values[1] - values[2])
        if all(map(math.isfinite, values)) and error > 1e-4 * max(map(abs, values)):
            return True
    return False


def _far_outputs(z: Tensor, y: Tree) -> list[Tensor]:
    """Outputs that differ from example to example: far from z, and between 0 and 1 (probabilities, say)."""
    size = max(
        1.0,
        *(float(t.abs().max()) for t in (z, y) if isinstance(t, Tensor) and t.is_floating_point()),
    )
    rng = torch_rng(0, "outputs to try the loss on")
    noise, shares = torch.randn(z.shape, generator=rng), torch.rand(z.shape, generator=rng)
    return [z + 3 * size * noise.to(z), shares.to(z)]


def _check_mean_through_model(problem: Ingredients, loss: Criterion, x: Tree, y: Tree) -> None:
    """``_is_mean`` through the model, whose outputs cannot be cut: at its weights and at others."""
    if batch_dependent(problem.module):
        return
    noise = torch.randn(len(problem.w), generator=torch_rng(0, "weights to try the loss at")).to(
        problem.w
    )
    for w in (problem.w, problem.w + 0.3 * problem.w.std(correction=0) * noise):
        values = {}
        b = count(y)
        for part in (slice(0, b), slice(0, b // 2), slice(b // 2, b)):
            if part.stop > part.start:
                values[part.start, part.stop] = float(
                    loss(problem.call(w, cut(x, part)), cut(y, part))
                )
        value = values.pop((0, b))
        mean = math.fsum(v * (stop - start) / b for (start, stop), v in values.items())
        if (
            values
            and math.isfinite(value)
            and not abs(mean - value) <= 1e-3 * max(abs(value), abs(mean))
        ):
            raise _uneven(loss, None, y)


def _is_mean(loss: Criterion, z: Tensor, y: Tree) -> bool | None:
    """Whether the loss of the batch is the mean of those of its parts; None where it is not finite."""
    b, value = len(z), float(_loss_or_nan(loss, z, y))
    if not math.isfinite(value):
        return None
    sizes, fair = {1, b // 2} - {0, b}, []
    for k in sizes:
        try:
            parts = [
                k / b * float(loss(z[:k], cut(y, slice(0, k)))),
                (1 - k / b) * float(loss(z[k:], cut(y, slice(k, b)))),
            ]
        except FAILURES:  # it takes no batch of this size
            continue
        fair.append(abs(sum(parts) - value) <= 1e-3 * abs(value) + 1e-5 * max(map(abs, parts)))
    return all(fair) and len(fair) >= min(len(sizes), 1)


def _is_mean_of_far_outputs(loss: Criterion, z: Tensor, y: Tensor) -> bool | None:
    """``_is_mean`` for outputs that differ: where all examples have one loss, every way to weigh them is the mean.

    On the CPU, where a loss that takes only some outputs (probabilities, say) raises and does no harm.
    """
    z, y = z.detach().cpu(), y.cpu()
    criterion = copy.deepcopy(loss).cpu() if isinstance(loss, nn.Module) else loss
    for outputs in _far_outputs(z, y):
        try:
            is_mean = _is_mean(criterion, outputs, y)
        except Exception:  # not one of this loss's outputs
            continue
        if is_mean is not None:
            return is_mean
    return None


def _batch_dependent(problem: Ingredients, x: Tree, z: Any, tolerance: float) -> bool:
    if batch_dependent(problem.module):
        return True
    b = count(x)
    leaves = [t for t in tree_leaves(z) if of_examples(t, b)]
    if b < 2 or not leaves:
        return False
    pieces = [cut(x, slice(0, b // 2)), cut(x, slice(b // 2, b))]
    first, second = (
        [
            t
            for t in tree_leaves(problem.call(problem.w, clone(piece)))
            if of_examples(t, count(piece))
        ]
        for piece in pieces
    )
    if len(first) != len(second) or len(first) != len(leaves):
        return False  # what else the model returns has as many rows as there are examples
    return any(
        p.shape[1:] == t.shape[1:] == q.shape[1:] and not same(torch.cat([p, q]), t, tolerance)
        for p, q, t in zip(first, second, leaves, strict=True)
    )


def _channels_last(problem: Ingredients, x: Tree, z: Any) -> bool:
    """Convolutions without gradients run about 1.4 times faster so; a model that uses view() may refuse."""
    if (
        not isinstance(x, Tensor)
        or x.ndim != 4
        or not any(inherited_rules(m).channels_last for m in problem.module.modules())
    ):
        return False
    try:
        return same(problem.call(problem.w, x.to(memory_format=torch.channels_last)), z, 1e-4)
    except RuntimeError:
        return False


def examine(problem: Ingredients) -> Facts:
    """The checks on up to 32 examples at the problem's weights. Raises FldiagError naming the culprit."""
    if torch.is_inference_mode_enabled():
        raise FldiagError(
            "torch.inference_mode is on, in which nothing can be differentiated",
            "leave it out around fldiag's calls; torch.no_grad may stay",
            usage=True,
        )
    tolerance = 1e-4 if problem.dtype == torch.float32 else 1e-9
    with problem.guarded(), torch.no_grad():
        x, y = _check_data(problem)
        z = _check_model(problem, x, tolerance)
        refuse_hooks(problem, cut(x, slice(0, 2)))
        objective = make_objective(problem, x, y, z)
        criterion = objective.criterion
        value = _check_loss(problem, criterion, x, z, y, tolerance)
        refuse_weights_in_loss(problem, criterion, x, z, y, tolerance)
        each = objective.each
        if each is None:
            each = per_example(criterion, z, y, value)
        elif not fits(each, z, y, value):
            each = None
        graph_bytes = bytes_of_graph(problem, criterion, x, y)
        derivatives = problem.shared.get("derivatives") or compare_derivatives(
            problem, criterion, x, y
        )
        if not derivatives.not_finite:  # which is a matter of these weights
            problem.shared["derivatives"] = derivatives
        return Facts(
            batch_dependent=_batch_dependent(problem, x, z, tolerance),
            objective=objective,
            outputs=z[0].numel() if isinstance(z, Tensor) and z.ndim else 1,
            per_example=each,
            channels_last=_channels_last(problem, x, z),
            graph_bytes=graph_bytes,
            derivatives=derivatives,
            remarks=(*objective.remarks, *remarks_on(problem, derivatives)),
        )
