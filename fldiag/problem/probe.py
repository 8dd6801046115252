"""Is the loss a function of the weights alone, and are its derivatives its derivatives? Small evaluations that say so if not.

What breaks this (dropout, running batch-norm, shuffled data, sums, detach) does not raise by itself: it makes numbers wrong.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fldiag.errors import FldiagError
from fldiag.problem.data import Tree, arguments, convert, count, cut, same
from fldiag.problem.weights import copy_module
from fldiag.seeding import torch_rng

#: Steps of the differences of losses and of gradients, and the relative errors from which on gradients and products are wrong.
DIFFERENCES = {
    torch.float64: ((1e-6, 1e-3), (1e-8, 1e-3)),
    torch.float32: ((1e-3, 0.05), (1e-3, 0.3)),
}
#: Directions; kinks disturb a difference in some of them.
DIRECTIONS = 3


def coarsest(run: Callable[[], Any], dtype: torch.dtype) -> torch.dtype:
    """The coarsest floating-point type, ``dtype`` among them, of the numbers that an evaluation keeps for its gradient."""
    dtypes = {dtype}

    def pack(t: Tensor) -> Tensor:
        if t.is_floating_point():
            dtypes.add(t.dtype)
        return t

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return max(dtypes, key=_eps)


def check(problem: Any) -> tuple[torch.dtype, bool]:
    """Check the problem on a sample.

    Returns:
        The coarsest precision in which the model computes, and whether products must be taken by differences of gradients.

    Raises:
        FldiagError: naming what is wrong.
    """
    with problem.guarded():
        x, y = problem.sample()
        _disturb()
        again = problem.sample()
    if not same((x, y), again):
        raise FldiagError(
            f"the data of slice {problem.slice_name!r} change from one reading to the next",
            "switch augmentation and shuffling off: every reading must give the same",
        )
    with problem.guarded(), torch.no_grad():
        dtype, z = _check_model(problem, x)
        _check_loss(problem, z, y)
    return dtype, _differentiates_once(problem)


def _check_model(problem: Any, x: Tree) -> tuple[torch.dtype, Any]:
    """The precision and the outputs of a model that is a function of weights and inputs."""
    inputs, w = tree_map(torch.clone, x), problem.w.clone()
    buffers = {n: b.clone() for n, b in problem.buffers.items()}
    z = problem.call(problem.w, inputs, buffers)
    leaf = problem.w.clone().requires_grad_()
    dtype = coarsest(lambda: problem.call(leaf, tree_map(torch.clone, x)), problem.dtype)
    tolerance = max(1e-9, min(1e3 * _eps(dtype), 0.1))
    if not same(inputs, x):
        raise FldiagError(
            "the model changes its input in place",
            "let it work on a copy (first layer inplace=False)",
        )
    _disturb()
    if not same((buffers, w), (problem.buffers, problem.w)) or not same(
        z, problem.call(problem.w, x), tolerance
    ):
        training = [
            f"{n or 'the model'} ({type(m).__name__})"
            for n, m in problem.module.named_modules()
            if m.training
        ]
        raise FldiagError(
            "two evaluations of the model disagree, or change its weights or buffers ("
            + (f"in training mode: {', '.join(training)})" if training else "it is in eval mode)"),
            "make the model deterministic in eval mode, without torch.rand or batch statistics",
        )
    half = count(x) // 2
    if half and isinstance(z, Tensor):
        parts = [problem.call(problem.w, cut(x, part)) for part in (slice(half), slice(half, None))]
        if not same(torch.cat(parts), z, tolerance):
            raise FldiagError(
                "the outputs for an example depend on the others of its batch, or a batch has no axis of examples",
                "let batch-norm use its running statistics",
            )
    _check_module(problem, x, z, tolerance)
    return dtype, z


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _disturb() -> None:
    """So that random numbers in user code are others (their states are put back)."""
    torch.rand(1), np.random.rand(), random.random()


def _check_module(problem: Any, x: Tree, z: Any, tolerance: float) -> None:
    """The module's own forward agrees with the function of its weights, here and at weights that it is given in training mode."""
    module, tensors = (
        copy_module(problem.module),
        {**problem.frozen, **problem.layout.views(problem.w)},
    )
    rng, size = torch_rng(0, "weights to move to"), 0.05 * problem.size
    moved = {n: t + size * torch.randn(t.shape, generator=rng).to(t) for n, t in tensors.items()}
    args, kwargs = arguments(problem.forward, x)
    for name, t in [*module.named_parameters(), *module.named_buffers()]:
        t.copy_({**tensors, **problem.buffers}[name])
    # outputs may be views of weights
    own = [tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, module(*args, **kwargs))]
    module.train()
    for name, p in module.named_parameters():
        p.add_(moved[name] - tensors[name])
    module.eval()
    own.append(module(*args, **kwargs))
    if same(own, [z, problem.call(moved, x)], tolerance):
        return
    outputs = _outputs(module, lambda: module(*args, **kwargs))
    others = _outputs(problem.module, lambda: problem.call(moved, x))
    names = [n for n in outputs if n in others and not same(outputs[n], others[n], tolerance)]
    raise FldiagError(
        f"layer {names[0] if names else ''!r} of the model does not compute what its weights say: eval() or forward merges, "
        "rewrites or keeps weights",
        "give the model as it is trained: adapters not merged, weights composed at every call",
    )


def _outputs(module: nn.Module, run: Callable[[], Any]) -> dict[str, Any]:
    """Layer -> its outputs, inner layers first."""
    outputs: dict[str, Any] = {}
    handles = [
        m.register_forward_hook(lambda m, args, out, name=n: outputs.update({name: out}))
        for n, m in module.named_modules()
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return outputs


def _check_loss(problem: Any, z: Any, y: Tree) -> None:
    """The loss is finite, the same twice, and reads no weights."""
    loss = problem.criterion
    value = loss.total(z, y)
    if not bool(torch.isfinite(value)):
        raise FldiagError(
            f"the loss is {float(value)}",
            "diagnose a checkpoint from before the training diverged, on data without NaN",
        )
    _disturb()
    if not same(value, loss.total(z, y), 1e-6):
        raise FldiagError(
            "two evaluations of the loss on the same outputs disagree",
            "make the loss deterministic",
        )
    originals = [p for p in problem.model.parameters() if p.is_floating_point()]
    values = [p.data for p in originals]
    try:
        for p in originals:
            p.data = 1.1 * p.data + 0.1
        changed = loss.total(z, y)
    finally:
        for p, data in zip(originals, values, strict=True):
            p.data = data
    if not same(value, changed, 1e-6):
        raise FldiagError(
            "the loss reads the model's weights, so its gradient and curvature are not those of the outputs alone",
            "leave the penalty out and give weight_decay, or add it in the model's forward",
        )


def _differentiates_once(problem: Any) -> bool:
    """Compare gradient and product with central differences at weights a little beside the problem's, off kinks.

    In double precision, unless the model insists on another; where that is lower than single, differences show nothing.
    Returns whether the product is wrong, or not there. Raises FldiagError where the gradient is wrong.
    """
    sample = problem.sample(8)
    for dtype in (torch.float64, problem.dtype):
        twin = copy.copy(problem)
        twin.module, twin.dtype = copy_module(problem.module).to(dtype), dtype
        twin.w, twin.frozen, twin.buffers, (x, y) = convert(
            (problem.w, problem.frozen, problem.buffers, sample), dtype, problem.device
        )
        twin.criterion = problem.criterion

        def loss(w: Tensor, twin=twin, x=x, y=y) -> Tensor:
            return twin.total(w, x, y)

        try:
            leaf = twin.w.clone().requires_grad_()
            precision = coarsest(functools.partial(loss, leaf), dtype)
        except FldiagError:
            if dtype == problem.dtype:
                raise
            continue
        if precision not in DIFFERENCES:
            return False
        with problem.guarded(), torch.enable_grad():
            return _is_product_wrong(loss, twin.w, problem.size, *DIFFERENCES[precision])
    return False


def _is_product_wrong(
    loss: Callable[[Tensor], Tensor],
    w: Tensor,
    size: float,
    of_losses: tuple[float, float],
    of_gradients: tuple[float, float],
) -> bool:
    def direction(number: int) -> Tensor:
        rng = torch_rng(0, "probe", number)
        return size * torch.randn(len(w), dtype=torch.float64, generator=rng).to(w)

    def gradient(w: Tensor, twice: bool = False) -> Tensor:
        w = w.detach().requires_grad_()
        value = loss(w)
        if not value.requires_grad:
            raise FldiagError(
                "the loss does not depend on the weights", "remove detach() or no_grad"
            )
        try:
            return torch.autograd.grad(value, w, create_graph=twice)[0]
        except RuntimeError as error:
            raise FldiagError(
                f"the model cannot be differentiated: {error}",
                "evaluate it in a way that has a derivative here, such as attn_implementation='eager' of transformers",
            ) from error

    def is_near(derivative: Tensor, difference: Tensor, wrong: float) -> bool:
        scale = max(float(difference.norm()), 1e-6 * float(g.norm()) * size)
        return float((derivative - difference).norm()) <= wrong * scale

    w = w + 1e-3 * direction(0)
    g = gradient(w)

    def slopes() -> Iterator[bool]:
        for number in range(1, DIRECTIONS + 1):
            v, (step, wrong) = direction(number), of_losses
            difference = (loss(w + step * v) - loss(w - step * v)).detach() / (2 * step)
            yield is_near(g @ v, difference, wrong)

    if not any(slopes()):
        raise FldiagError(
            "the gradient of the loss is not the derivative that differences show: detach(), no_grad or a backward of one's own",
            "remove it: numbers about this loss would be wrong",
        )
    try:
        at = w.detach().requires_grad_()
        slope = torch.autograd.grad(loss(at), at, create_graph=True)[0]
        for number in range(1, DIRECTIONS + 1):
            v, (step, wrong) = direction(number), of_gradients
            difference = (gradient(w + step * v) - gradient(w - step * v)) / (2 * step)
            product = torch.zeros_like(v)
            if slope.requires_grad:
                product = torch.autograd.grad(slope, at, v, retain_graph=True)[0]
            if is_near(product, difference, wrong):
                return False
    except RuntimeError:  # no second derivative
        pass
    return True
