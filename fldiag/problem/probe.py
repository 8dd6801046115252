"""Is the loss a function of the weights alone? Small evaluations that name the culprit when it is not.

Every diagnostic assumes a deterministic loss that is the mean over the examples of the slice. What breaks
this assumption (dropout, running batch-norm, augmented or shuffled data, sums, class weights) does not
raise by itself: it only makes the numbers wrong.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fldiag.errors import FldiagError
from fldiag.models.layers import batch_dependent, kin
from fldiag.problem.ingredients import Ingredients
from fldiag.seeding import torch_rng

PerExample = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Facts:
    """What the probe learnt about a problem."""

    batch_dependent: bool  # an example's output depends on the other examples of its batch
    classes: int | None  # labels must lie in 0..classes-1; None when the targets are not class numbers
    outputs: int  # numbers an example's output has
    per_example: PerExample | None  # (outputs, y) -> losses [b], None when the loss cannot be taken apart
    channels_last: bool  # whether evaluations without gradients use the channels-last memory format
    graph_bytes: int  # memory an example takes in a graph that is differentiated twice


def same(a: Any, b: Any, tolerance: float) -> bool:
    """Equal up to rounding (NaN equals NaN); outputs that are no tensors are not compared."""
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(same(p, q, tolerance) for p, q in zip(a, b, strict=True))
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return True
    if a.shape != b.shape:
        return False
    scale = float(a.detach().abs().nan_to_num(posinf=0.0).max()) if a.numel() else 0.0
    return torch.allclose(a.detach().double(), b.detach().double(), rtol=tolerance, atol=tolerance * scale,
                          equal_nan=True)


def _runs(n: int, count: int = 32) -> list[range]:
    """Up to ``count`` examples in four runs spread over the slice (a slice is often sorted by class)."""
    return [range(i * n // 4, i * n // 4 + count // 4) for i in range(4)] if n > count else [range(n)]


def sample(problem: Ingredients, count: int) -> tuple[Tensor, Tensor]:
    """Up to ``count`` examples spread over the slice."""
    return _sample(problem, _runs(problem.n, count))


def _sample(problem: Ingredients, runs: list[range]) -> tuple[Tensor, Tensor]:
    parts = [problem.read(r.start, r.stop) for r in runs]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _check_data(problem: Ingredients, runs: list[range]) -> tuple[Tensor, Tensor]:
    x, y = _sample(problem, runs)
    again_x, again_y = _sample(problem, runs)
    if not (same(x, again_x, 0.0) and same(y, again_y, 0.0)):
        raise FldiagError(f"the data of slice {problem.slice_name!r} change from one reading to the next",
                          "switch augmentation and shuffling off: every reading must give the same")
    if x.is_floating_point() and not bool(torch.isfinite(x).all()):
        raise FldiagError(f"the inputs of slice {problem.slice_name!r} hold NaN or infinite values",
                          "clean or normalise the data")
    return x, y


def _culprits(module: nn.Module) -> str:
    awake = [f"{n or 'the model'} ({type(m).__name__})" for n, m in module.named_modules() if m.training]
    drop = [f"{n} ({type(m).__name__})" for n, m in module.named_modules() if kin(m).random and m.training]
    if drop:
        return f"dropout is active in {', '.join(drop)} although the model is in eval mode"
    if awake:
        return f"still in training mode after eval(): {', '.join(awake)}"
    return "no module is in training mode: look for torch.rand, or F.dropout without training=self.training"


def _check_model(problem: Ingredients, x: Tensor, y: Tensor, tolerance: float) -> Any:
    """The outputs on x, after checking that they are reproducible and that nothing is written to."""
    seen, held = x.clone(), {n: b.clone() for n, b in problem.buffers.items()}
    try:
        z = problem.call(problem.w, seen, held)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise FldiagError(f"the model failed on a batch of shape {list(x.shape)} and type {x.dtype}: {error}",
                          "check that the data are what the model takes (shape, type, normalised)") from error
    if not same(x, seen, 0.0):
        raise FldiagError("the model changes its input in place", "let it work on a copy (first layer inplace=False)")
    moved = [n for n, b in held.items() if not same(b, problem.buffers[n], 0.0)]
    if moved:
        raise FldiagError(f"an evaluation changes the buffers {', '.join(moved[:4])}: "
                          f"{_culprits(problem.module)}",
                          "let eval() reach these modules (batch-norm must use its running statistics)")
    if not same(z, problem.call(problem.w, x.clone(), held), tolerance):
        raise FldiagError(f"two evaluations of the model disagree: {_culprits(problem.module)}",
                          "make the model deterministic in eval mode")
    return z


def _classes(z: Any, y: Tensor) -> int | None:
    if y.is_floating_point() or y.dtype == torch.bool:
        return None
    if not isinstance(z, Tensor) or z.ndim < 2 or z.shape[1] < 2:
        return None
    return z.shape[1] if y.ndim == z.ndim - 1 else None


def check_labels(y: Tensor, classes: int | None, numbers: Sequence[int], where: str) -> None:
    """Raises FldiagError naming the first label outside 0..classes-1; ``numbers``: of the examples."""
    if classes is None or (int(y.min()) >= 0 and int(y.max()) < classes):
        return
    flat = y.reshape(len(y), -1)
    at = int(((flat < 0) | (flat >= classes)).any(1).nonzero()[0])
    bad = flat[at][(flat[at] < 0) | (flat[at] >= classes)][0]
    raise FldiagError(f"example {numbers[at]} of slice {where!r} has label {int(bad)}, "
                      f"the model has {classes} outputs",
                      f"labels must lie in 0..{classes - 1}")


def _check_loss(problem: Ingredients, z: Any, y: Tensor, tolerance: float) -> Tensor:
    def loss(z: Any, y: Tensor) -> Tensor:
        try:
            return problem.criterion(z, y)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise FldiagError(f"the loss failed on outputs {_shape(z)} and targets {_shape(y)}: {error}",
                              "check that the loss takes (outputs, y) of this shape and type") from error

    value = loss(z, y)
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise FldiagError(f"the loss returns {_shape(value)} for {len(y)} examples, not one number",
                          'use the mean over examples (reduction="mean")')
    if not bool(torch.isfinite(value)):
        culprits = {"weights": problem.w, "outputs of the model": z}
        place = next((name for name, t in culprits.items()
                      if isinstance(t, Tensor) and not bool(torch.isfinite(t).all())), "loss alone")
        raise FldiagError(f"the loss is {float(value)} (not finite: the {place})",
                          "diagnose a checkpoint from before the training diverged")
    if not same(value, loss(z, y), tolerance):
        raise FldiagError("two evaluations of the loss on the same outputs disagree", "make the loss deterministic")
    b = len(y)
    if isinstance(z, Tensor) and z.ndim and len(z) == b:
        twice = loss(torch.cat([z, z]), torch.cat([y, y]))
        doubles = same(twice, 2 * value, 1e-3) and float(value.abs()) > 0
        fair = same(twice, value, 1e-3) and _is_mean(loss, z, y) is not False and _shaken(problem, z, y) is not False
        if (doubles or not fair) and y.is_floating_point() and z.shape != y.shape and z.numel() == y.numel():
            raise FldiagError(f"the loss compares outputs {list(z.shape)} with targets {list(y.shape)}: broadcasting "
                              "pairs every example with every other one",
                              f"reshape the targets to {['n', *z.shape[1:]]}".replace("'", ""))
        if doubles:
            raise FldiagError("the loss doubles when every example is given twice: it is a sum",
                              'use the mean over examples (reduction="mean")')
        if not fair:
            raise FldiagError("the loss of a batch is not the mean over its examples: class weights, "
                              "ignored labels or another normalisation make batches count differently",
                              "give a loss that is the plain mean over examples")
    return value


def _is_mean(loss: Callable[[Any, Tensor], Tensor], z: Tensor, y: Tensor) -> bool | None:
    """Whether the loss of the batch is the mean of those of its parts; None where it is not finite."""
    b, whole = len(y), float(loss(z, y))
    for cut in {1, b // 2} - {0, b}:
        parts = [cut / b * float(loss(z[:cut], y[:cut])), (1 - cut / b) * float(loss(z[cut:], y[cut:]))]
        if math.isfinite(whole) and not abs(sum(parts) - whole) <= 1e-3 * abs(whole) + 1e-5 * max(map(abs, parts)):
            return False
    return True if math.isfinite(whole) else None


def _shaken(problem: Ingredients, z: Tensor, y: Tensor) -> bool | None:
    """``_is_mean`` for outputs that differ: where all examples have one loss, every way to weigh them is the mean.

    On the CPU, where a loss that takes only some outputs (probabilities, say) raises and does no harm.
    """
    z, y = z.detach().cpu(), y.cpu()
    criterion = copy.deepcopy(problem.criterion).cpu() if isinstance(problem.criterion, nn.Module) else problem.criterion
    size = max(1.0, *(float(t.abs().max()) for t in (z, y) if t.is_floating_point()))
    rng = torch_rng(0, "outputs to try the loss on")
    noise, shares = torch.randn(z.shape, generator=rng), torch.rand(z.shape, generator=rng)
    for tried in (z + 3 * size * noise, shares):
        try:
            found = _is_mean(criterion, tried.to(z), y)
        except Exception:  # not one of this loss's outputs
            continue
        if found is not None:
            return found
    return None


def _shape(thing: Any) -> str:
    return f"a tensor {list(thing.shape)}" if isinstance(thing, Tensor) else f"a {type(thing).__name__}"


def _batch_dependent(problem: Ingredients, x: Tensor, z: Any, tolerance: float) -> bool:
    if batch_dependent(problem.module):
        return True
    half = len(x) // 2
    if half < 1 or not isinstance(z, Tensor) or z.ndim == 0 or len(z) != len(x):
        return False
    parts = [problem.call(problem.w, part.clone()) for part in (x[:half], x[half:])]
    return not same(torch.cat(parts), z, tolerance)


def _per_example(criterion: Callable[..., Tensor], z: Any, y: Tensor, mean: Tensor) -> PerExample | None:
    """The loss of each example [b]: by its own ``reduction="none"``, else by mapping it over the batch."""
    ways: list[Callable[..., Tensor]] = []
    if isinstance(criterion, nn.Module):
        if isinstance(getattr(criterion, "reduction", None), str):
            each = copy.deepcopy(criterion)
            setattr(each, "reduction", "none")  # noqa: B010 (modules declare no such attribute)
            ways.append(each)
    else:
        try:
            if "reduction" in inspect.signature(criterion).parameters:
                ways.append(functools.partial(criterion, reduction="none"))
        except (TypeError, ValueError):
            pass

    def alone(z: Tensor, y: Tensor) -> Tensor:
        return criterion(z.unsqueeze(0), y.unsqueeze(0))

    ways.append(torch.func.vmap(alone))
    for way in ways:
        def take(z: Any, y: Tensor, way: Callable[..., Tensor] = way) -> Tensor:
            return way(z, y).reshape(len(y), -1).double().mean(1)

        try:
            losses = take(z, y)
        except Exception:  # whatever the user's loss cannot do this way, the mean loss still stands
            continue
        if losses.shape == (len(y),) and same(losses.mean(), mean.double().reshape(()), 1e-4):
            return take
    return None


def _graph_bytes(problem: Ingredients, x: Tensor, y: Tensor) -> int:
    """Bytes an example holds in the graph of the gradient: the growth from 4 examples to 8."""
    def held(count: int) -> int:
        index = torch.arange(count, device=x.device) % len(x)
        w = problem.w.clone().requires_grad_()
        kept: dict[int, tuple[Tensor, int]] = {}  # the tensors are held, so that no address is used twice

        def pack(t: Tensor) -> Tensor:
            kept[t.untyped_storage().data_ptr()] = (t, t.untyped_storage().nbytes())
            return t

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = problem.criterion(problem.call(w, x[index]), y[index])
            if not loss.requires_grad:
                raise FldiagError("the loss does not depend on the weights",
                                  "remove detach() or torch.no_grad() from the model's forward")
            torch.autograd.grad(loss, w, create_graph=True)
        return sum(size for _, size in kept.values())

    return max(1, (held(8) - held(4)) // 4)


def _channels_last(problem: Ingredients, x: Tensor, z: Any) -> bool:
    """Convolutions without gradients run about 1.4 times faster so; a model that uses view() may refuse."""
    if x.ndim != 4 or not any(kin(m).channels_last for m in problem.module.modules()):
        return False
    try:
        return same(problem.call(problem.w, x.to(memory_format=torch.channels_last)), z, 1e-4)
    except RuntimeError:
        return False


def examine(problem: Ingredients) -> Facts:
    """The checks on up to 32 examples at the problem's weights. Raises FldiagError naming the culprit."""
    tolerance = 1e-4 if problem.dtype == torch.float32 else 1e-9
    with problem.guarded(), torch.no_grad():
        runs = _runs(problem.n)
        x, y = _check_data(problem, runs)
        z = _check_model(problem, x, y, tolerance)
        classes = _classes(z, y)
        check_labels(y, classes, [i for r in runs for i in r], problem.slice_name)
        value = _check_loss(problem, z, y, tolerance)
        return Facts(batch_dependent=_batch_dependent(problem, x, z, tolerance), classes=classes,
                     outputs=z[0].numel() if isinstance(z, Tensor) and z.ndim else 1,
                     per_example=_per_example(problem.criterion, z, y, value),
                     channels_last=_channels_last(problem, x, z), graph_bytes=_graph_bytes(problem, x, y))
