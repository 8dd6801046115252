"""Is the loss a function of the weights alone, and are its derivatives its derivatives? Small evaluations that say so if not.

What breaks this (dropout, running batch-norm, shuffled data, sums, detach) does not raise by itself: it makes numbers wrong.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import grad
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


def saved(run: Callable[[], Any]) -> list[Tensor]:
    """The tensors that an evaluation keeps for its gradient."""
    tensors: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        tensors.append(t)
        return t

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return tensors


def coarsest(run: Callable[[], Any], dtype: torch.dtype) -> torch.dtype:
    """The coarsest floating-point type, ``dtype`` among them, of the numbers that an evaluation keeps for its gradient."""
    dtypes = {dtype, *(t.dtype for t in saved(run) if t.is_floating_point())}
    return max(dtypes, key=lambda d: torch.finfo(d).eps)


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
        if not same((x, y), problem.sample()):
            raise FldiagError(
                f"the data of slice {problem.slice_name!r} change from one reading to the next",
                "switch augmentation and shuffling off: every reading must give the same",
            )
        with torch.no_grad():
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
    tolerance = max(1e-9, min(1e3 * torch.finfo(dtype).eps, 0.1))
    _disturb()
    if not same((inputs, buffers, w), (x, problem.buffers, problem.w)) or not same(
        z, problem.call(problem.w, x), tolerance
    ):
        training = [n or "the model" for n, m in problem.module.named_modules() if m.training]
        raise FldiagError(
            "two evaluations of the model disagree, or change its inputs, weights or buffers (in training mode: "
            f"{', '.join(training) or 'nothing'})",
            "make the model deterministic in eval mode: no torch.rand, batch statistics or first layer in place",
        )
    half = count(x) // 2
    if half and isinstance(z, Tensor):
        parts = [problem.call(problem.w, cut(x, part)) for part in (slice(half), slice(half, None))]
        if not same(torch.cat(parts), z, tolerance):
            raise FldiagError(
                "the outputs for an example depend on the others of its batch, or a batch has no axis of examples",
                "let batch-norm use its running statistics",
            )
    _check_module(problem, x, tolerance)
    return dtype, z


def _disturb() -> None:
    """So that random numbers in user code are others (their states are put back)."""
    torch.rand(1), np.random.rand(), random.random()


def _check_module(problem: Any, x: Tree, tolerance: float) -> None:
    """The module's own forward agrees with the function of its weights: with these weights and with moved ones, each of which it
    is given in training mode."""
    module, rng = copy_module(problem.module), torch_rng(0, "weights to move to")
    args, kwargs = arguments(problem.forward, x)
    step = torch.randn(problem.w.shape, generator=rng).to(problem.w)
    for w in (problem.w, problem.w + 0.05 * problem.size * step):
        tensors = {**problem.frozen, **problem.layout.views(w), **problem.buffers}
        module.train()
        for name, t in [*module.named_parameters(), *module.named_buffers()]:
            t.copy_(tensors[name])
        module.eval()
        own = _outputs(module, lambda: module(*args, **kwargs))
        expected = _outputs(problem.module, functools.partial(problem.call, w, x))
        wrong = [n for n in own if n in expected and not same(own[n], expected[n], tolerance)]
        if "" in wrong:
            raise FldiagError(
                f"layer {wrong[0]!r} of the model does not compute what its weights say: eval() or forward merges, rewrites or "
                "keeps weights",
                "give the model as it is trained: adapters not merged, weights composed at every call",
            )


def _outputs(module: nn.Module, run: Callable[[], Any]) -> dict[str, Any]:
    """Layer -> its outputs, inner layers first, and the module's own under ""."""
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
    total = problem.criterion.total
    value = total(z, y)
    if not bool(torch.isfinite(value)):
        raise FldiagError(
            f"the loss is {float(value)}",
            "diagnose a checkpoint from before the training diverged, on data without NaN",
        )
    originals = [(p, p.data) for p in problem.model.parameters()]
    _disturb()
    try:
        for p, data in originals:
            p.data = 1.1 * data + 0.1
        again = total(z, y)
    finally:
        for p, data in originals:
            p.data = data
    if not same(value, again, 1e-6):
        raise FldiagError(
            "the loss of the same outputs changes, from one evaluation to the next or with the model's weights",
            "make it deterministic, and give a penalty as weight_decay or add it in the model's forward",
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
        loss = functools.partial(twin.total, x=x, y=y)
        try:
            precision = coarsest(functools.partial(loss, twin.w.clone().requires_grad_()), dtype)
        except FldiagError:
            if dtype == problem.dtype:
                raise
            continue
        if precision not in DIFFERENCES:
            return False
        with problem.guarded(), torch.enable_grad():
            return _is_product_wrong(loss, twin.w, problem.size, DIFFERENCES[precision])
    return False


def _is_product_wrong(
    loss: Callable[[Tensor], Tensor],
    w: Tensor,
    size: float,
    limits: tuple[tuple[float, float], tuple[float, float]],
) -> bool:
    shape, rng = (DIRECTIONS + 1, len(w)), torch_rng(0, "probe")
    beside, *directions = size * torch.randn(shape, dtype=torch.float64, generator=rng).to(w)
    at = (w + 1e-3 * beside).requires_grad_()

    def gradient(w: Tensor, twice: bool = False) -> Tensor:
        return grad(loss(w), w, create_graph=twice)[0]

    def is_near(derivative: Any, of: Any, step: float, wrong: float) -> bool:
        """Whether it is once the difference of a function: a shorter step crosses fewer kinks, a longer one rounds less."""
        for h, v in itertools.product((step, step / 10), directions):
            ends = ((at + sign * h * v).detach().requires_grad_() for sign in (1, -1))
            ahead, behind = (of(end).detach() for end in ends)
            difference = (ahead - behind) / (2 * h)
            scale = max(float(difference.norm()), 1e-6 * float(slope.detach().norm()) * size)
            if float((derivative(v) - difference).norm()) <= wrong * scale:
                return True
        return False

    try:
        slope = gradient(at)
    except RuntimeError as error:
        raise FldiagError(
            f"the model cannot be differentiated: {error}",
            "remove detach() and no_grad, and use attn_implementation='eager' of transformers",
        ) from error
    if not is_near(lambda v: slope @ v, loss, *limits[0]):
        raise FldiagError(
            "the gradient of the loss is not the derivative that differences show: detach(), no_grad or a backward of one's own",
            "remove it: numbers about this loss would be wrong",
        )
    try:
        slope = gradient(at, twice=True)
        if not slope.requires_grad:
            return not is_near(torch.zeros_like, gradient, *limits[1])
        return not is_near(lambda v: grad(slope, at, v, retain_graph=True)[0], gradient, *limits[1])
    except RuntimeError:  # no second derivative
        return True
