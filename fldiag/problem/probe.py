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
from fldiag.problem.data import Tree, arguments, convert, count, cut, join, same
from fldiag.problem.weights import copy_module
from fldiag.seeding import torch_rng

#: Steps of the differences of losses and of gradients, and the relative error from which on a derivative is wrong.
LOSS_STEP, GRADIENT_STEP, WRONG = 1e-6, 1e-8, 1e-3
#: Directions; kinks disturb a difference in some of them.
DIRECTIONS = 3


def saved(run: Callable[[], Any]) -> list[Tensor]:
    """The tensors that an evaluation keeps for its gradient."""
    tensors: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        tensors.append(t)
        return t

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
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
        leaf = problem.w.clone().requires_grad_()
        dtype = coarsest(lambda: problem.call(leaf, tree_map(torch.clone, x)), problem.dtype)
        tolerance = max(1e-9, min(1e3 * torch.finfo(dtype).eps, 0.1))
        with torch.no_grad():
            _check_model(problem, x, tolerance)
            _check_loss(problem, problem.call(problem.w, x), y)
        return dtype, _is_product_wrong(problem)


def _disturb() -> None:
    """So that random numbers in user code are others (their states are put back)."""
    torch.rand(1), np.random.rand(), random.random()


def _check_model(problem: Any, x: Tree, tolerance: float) -> None:
    """The module's own forward agrees with the function of its weights, layer by layer: with these weights and with moved ones,
    each of which it is given in training mode. It changes nothing, and examples do not depend on each other."""
    before = tree_map(torch.clone, (x, problem.w, problem.buffers))
    module, rng = copy_module(problem.module), torch_rng(0, "weights to move to")
    args, kwargs = arguments(problem.forward, x)
    step = _size(problem.w) * torch.randn(problem.w.shape, generator=rng).to(problem.w)
    for w in (problem.w + 0.05 * step, problem.w):
        tensors = {**problem.frozen, **problem.layout.views(w), **problem.buffers}
        module.train()
        for name, t in [*module.named_parameters(), *module.named_buffers()]:
            t.copy_(tensors[name])
        module.eval()
        own = _outputs(module, functools.partial(module, *args, **kwargs))
        _disturb()
        outputs = _outputs(problem.module, functools.partial(problem.call, w, x))
        wrong = [n for n in own if n in outputs and not same(own[n], outputs[n], tolerance)]
        if "" in wrong:
            raise FldiagError(
                f"layer {wrong[0]!r} of the model does not compute what its weights say, or not twice the same: it is random, or "
                "eval() or forward merges, rewrites or keeps weights",
                "give the model as it is trained, deterministic in eval mode: no torch.rand, adapters not merged, weights "
                "composed at every call",
            )
    if not same(before, (x, problem.w, problem.buffers)):
        raise FldiagError(
            "the model changes its inputs, weights or buffers", "leave them in forward"
        )
    half, z = count(x) // 2, outputs[""]
    if half and isinstance(z, Tensor):
        cuts = slice(half), slice(half, None)
        if not same(join([problem.call(problem.w, cut(x, part)) for part in cuts]), z, tolerance):
            raise FldiagError(
                "the outputs for an example depend on the others of its batch, or a batch has no axis of examples",
                "let batch-norm use its running statistics",
            )


def _size(w: Tensor) -> float:
    """The root mean square of weights."""
    return float(w.double().square().mean().sqrt()) or 0.1


def _outputs(module: nn.Module, run: Callable[[], Any]) -> dict[str, Any]:
    """Layer -> its outputs, inner layers first, and the module's own under ""."""
    outputs: dict[str, Any] = {}

    def record(name: str, module: nn.Module, args: Any, out: Any) -> None:
        outputs[name] = out

    handles = [
        m.register_forward_hook(functools.partial(record, n)) for n, m in module.named_modules()
    ]
    run()
    for handle in handles:
        handle.remove()
    return outputs


def _check_loss(problem: Any, z: Any, y: Tree) -> None:
    """The loss is finite, the same twice, and reads no weights."""
    total = problem.criterion.total
    value, weights = total(z, y), [(p, p.data) for p in problem.model.parameters()]
    if not bool(torch.isfinite(value)):
        raise FldiagError(
            f"the loss is {float(value)}",
            "diagnose a checkpoint from before the training diverged, on data without NaN",
        )
    _disturb()
    try:
        for p, data in weights:
            p.data = 1.1 * data + 0.1
        again = total(z, y)
    finally:
        for p, data in weights:
            p.data = data
    if not same(value, again, 1e-6):
        raise FldiagError(
            "the loss of the same outputs changes, from one evaluation to the next or with the model's weights",
            "make it deterministic, and give a penalty as weight_decay or add it in the model's forward",
        )


def _is_product_wrong(problem: Any) -> bool:
    """Whether products are not the differences of gradients, in double precision at weights a little beside the problem's, off
    kinks. Of a model that computes in a lower precision of its own differences show nothing.

    Raises FldiagError where the gradients are not the differences of losses.
    """
    twin, double, size = copy.copy(problem), torch.float64, _size(problem.w)
    twin.module, twin.dtype = copy_module(problem.module).to(double), double
    twin.w, twin.frozen, twin.buffers, (x, y) = convert(
        (problem.w, problem.frozen, problem.buffers, problem.sample(8)), double, problem.device
    )
    loss, gradient = (functools.partial(f, x=x, y=y) for f in (twin.total, twin.slope))
    shape, rng = (DIRECTIONS + 1, len(twin.w)), torch_rng(0, "probe")
    beside, *ways = size * torch.randn(shape, dtype=double, generator=rng).to(twin.w)
    at = (twin.w + 1e-3 * beside).requires_grad_()
    try:
        if coarsest(functools.partial(loss, at), double) != double:
            return False
    except FldiagError:  # it takes no double precision
        return False

    def is_near(derivative: Any, of: Any, step: float) -> bool:
        """Whether it is once the difference of a function: a shorter step crosses fewer kinks, a longer one rounds less."""
        for h, v in itertools.product((step, step / 10), ways):
            ends = ((at + sign * h * v).detach().requires_grad_() for sign in (1, -1))
            ahead, behind = (of(end).detach() for end in ends)
            difference = (ahead - behind) / (2 * h)
            scale = max(float(difference.norm()), 1e-6 * float(slope.detach().norm()) * size)
            if float((derivative(v) - difference).norm()) <= WRONG * scale:
                return True
        return False

    def product(v: Tensor) -> Tensor:
        return grad(slope, at, v, retain_graph=True)[0] if slope.requires_grad else 0 * v

    with torch.enable_grad():
        slope = gradient(at)
        if not is_near(lambda v: slope @ v, loss, LOSS_STEP):
            raise FldiagError(
                "the gradient of the loss is not the derivative that differences show: detach(), no_grad or an own backward",
                "remove it: numbers about this loss would be wrong",
            )
        try:
            slope = gradient(at, twice=True)
            return not is_near(product, gradient, GRADIENT_STEP)
        except RuntimeError:  # no second derivative
            return True
