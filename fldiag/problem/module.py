"""A user's module: its copy, the weights that it takes by its own rules, and whether it is what it seems.

Is the loss a function of the weights alone, and are its derivatives its derivatives? What breaks this (dropout, running
batch-norm, shuffled data, sums, detach) does not raise by itself: it makes numbers wrong. Small evaluations say so.
"""

from __future__ import annotations

import copy
import math
import random
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_map

from fldiag.curvature.operator import Curvature, Differences, finite
from fldiag.errors import FldiagError
from fldiag.models import without_prefix
from fldiag.params import Layout
from fldiag.problem.data import Function, Tensors, Tree, arguments, count, cut, same
from fldiag.seeding import torch_rng

#: Steps of the differences of losses and of gradients.
LOSS_STEP, GRADIENT_STEP = 1e-6, 1e-8
#: Directions; kinks disturb a difference in some of them.
DIRECTIONS = 3


def copy_module(module: nn.Module) -> nn.Module:
    """A copy; results of forward that the module keeps as attributes, as weight_norm does, lose their graph."""
    values = [v for m in module.modules() for v in vars(m).values() if isinstance(v, Tensor)]
    return copy.deepcopy(module, {id(v): v.detach().clone() for v in values if not v.is_leaf})


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers by name."""
    return dict([*module.named_parameters(), *module.named_buffers()])


def load(module: nn.Module, params: Any, buffers: Tensors | None) -> None:
    """Let a module load weights, and buffers, by its own ``load_state_dict``, strictly.

    Args:
        module: which is changed.
        params: a vector [P], or named tensors; a state_dict has buffers, too. What they call by one of several names of a
            tied tensor goes by all of them.
        buffers: by name. Where neither these nor ``params`` name any, the module keeps its own.

    Raises:
        FldiagError: they hold two values of one tied tensor.
    """
    own = module.state_dict(keep_vars=True)
    tensors = dict(named(own if params is None else params, Layout.of(module)))
    state = without_prefix(tensors, module)
    state |= buffers or {}
    for name, b in module.named_buffers():
        if name in state and name not in own:  # a buffer that is not persistent
            b.copy_(state.pop(name))
    rest = {n: t for n, t in own.items() if not isinstance(t, nn.Parameter)}
    if not state.keys() & rest.keys():
        state |= rest
    first = {id(t): n for n, t in reversed(own.items()) if n in state}  # of a tied tensor's names
    for name, t in own.items():
        other = first.get(id(t), name)
        if other in state and not same(state[other], state.setdefault(name, state[other])):
            raise FldiagError(
                f"{other} and {name} are one tensor of the model, and two different ones here"
            )
    module.load_state_dict(state)


def named(w: Tensor | Tensors, layout: Layout) -> Tensors:
    """Weights w [P] by name; those with names as they are. Raises FldiagError for a vector of another length."""
    if not isinstance(w, Tensor):
        return w
    if w.shape != (layout.size,):
        raise FldiagError(
            f"weights {list(w.shape)} for a model of {layout.size} parameters",
            "give a flat vector in the order of layout.names",
        )
    return layout.views(w)


# -- the probe


def saved(run: Function) -> list[Tensor]:
    """The tensors that an evaluation keeps for its gradient."""
    tensors: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        tensors.append(t)
        return t

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        run()
    return tensors


def coarsest(run: Function, dtype: torch.dtype) -> torch.dtype:
    """The coarsest floating-point type, ``dtype`` among them, of the numbers that an evaluation keeps for its gradient."""
    dtypes = {dtype, *(t.dtype for t in saved(run) if t.is_floating_point())}
    return max(dtypes, key=lambda d: torch.finfo(d).eps)


def check_problem(problem: Any) -> tuple[torch.dtype, bool]:
    """Check the problem on a sample.

    Returns:
        The coarsest precision in which the model computes, and whether products must be taken by differences of gradients.

    Raises:
        FldiagError: naming what is wrong.
    """
    with problem.guarded():
        x, y = problem.sample()
        # random numbers of user code shall be others: a reading puts their states back, an evaluation in here does not
        torch.rand(1), np.random.rand(), random.random()
        if not same((x, y), problem.sample()):
            raise FldiagError(
                f"the data of slice {problem.slice_name!r} change from one reading to the next",
                "switch augmentation and shuffling off: every reading must give the same",
            )
        leaf, copies = problem.w.clone().requires_grad_(), tree_map(torch.clone, x)
        dtype = coarsest(partial(problem.call, leaf, copies), problem.dtype)
        with torch.no_grad():
            _check_model(problem, x, max(1e-9, min(1e3 * torch.finfo(dtype).eps, 0.1)))
            z, total = problem.call(problem.w, x), problem.criterion.total
            value, weights = finite(total(z, y)), [(p, p.data) for p in problem.model.parameters()]
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
        return dtype, _is_product_wrong(problem)


def _check_model(problem: Any, x: Tree, tolerance: float) -> None:
    """The module's own forward agrees with the function of its weights, layer by layer: with these weights and with moved ones,
    each of which it is given in training mode. It changes nothing, and examples do not depend on each other."""
    before = tree_map(torch.clone, (x, problem.state))
    w, module = problem.w, copy_module(problem.module)
    noise = F.normalize(torch.randn(w.shape, generator=torch_rng(0, "moved")), dim=0).to(w)
    for place in (w + 0.05 * (float(w.norm()) or 1.0) * noise, w):
        tensors = problem.state | problem.layout.views(place)
        module.train()
        for name, t in tensors_of(module).items():
            t.copy_(tensors[name])
        module.eval()
        own = _outputs(module, {}, x)
        outputs = _outputs(problem.module, tensors, x)
        wrong = [n for n in own if n in outputs and not same(own[n], outputs[n], tolerance)]
        if "" in wrong:
            raise FldiagError(
                f"layer {wrong[0]!r} of the model does not compute what its weights say, or not twice the same: it is random, or "
                "eval() or forward merges, rewrites or keeps weights",
                "give the model as it is trained, deterministic in eval mode: no torch.rand, adapters not merged, weights "
                "composed at every call",
            )
    if not same(before, (x, problem.state)):
        raise FldiagError("the model changes its inputs, weights or buffers in forward")
    half, z = count(x) // 2, outputs[""]
    for part in (slice(half), slice(half, None)) if half and isinstance(z, Tensor) else ():
        if not same(problem.call(w, cut(x, part)), z[part], tolerance):
            raise FldiagError(
                "the outputs for an example depend on the others of its batch, or a batch has no axis of examples",
                "let batch-norm use its running statistics",
            )


def _outputs(module: nn.Module, tensors: Any, x: Tree) -> dict[str, Any]:
    """Layer -> its outputs with these tensors instead of its own, inner layers first, and the module's under ""."""
    names = {m: n for n, m in module.named_modules()}
    outputs: dict[str, Any] = {}
    # some modules are made in forward, and have no name
    with register_module_forward_hook(
        lambda m, _, out: outputs.update({names.get(m, type(m).__name__): out})
    ):
        torch.func.functional_call(module, tensors, *arguments(module, x))
    return outputs


def _is_product_wrong(problem: Any) -> bool:
    """Whether products are not the differences of gradients, in double precision at weights a little beside the problem's, off
    kinks. Of a model that computes in a lower precision of its own differences show nothing.

    Raises FldiagError where the gradients are not the differences of losses.
    """
    twin, double = copy.copy(problem), torch.float64
    twin.module, twin.dtype = copy_module(problem.module).to(double), double
    twin.place(problem.state)
    x, y = twin.sample(8)
    rows = torch.randn(DIRECTIONS + 1, len(twin.w), dtype=double, generator=torch_rng(0, "probe"))
    beside, *ways = F.normalize(rows).to(twin.w)
    length = float(twin.w.norm()) or 1.0
    at = twin.w + 1e-3 * length * beside
    gradient = partial(twin.slope, x=x, y=y)
    try:
        if coarsest(partial(gradient, at), double) != double:
            return False
    except FldiagError:  # it takes no double precision
        return False

    def batch(leaves: Tensors) -> Any:
        return twin.call(leaves["w"], x), lambda z: twin.criterion.total(z, y)

    slope = gradient(at)
    floor = 1e-6 * float(slope.norm()) / math.sqrt(len(at))
    loss = Differences(partial(twin.total, x=x, y=y), at)
    if not loss.show(lambda v: slope @ v, ways, LOSS_STEP * length, floor):
        raise FldiagError(
            "the gradient of the loss is not the derivative that differences show: detach(), no_grad or an own backward",
            "remove it: numbers about this loss would be wrong",
        )
    product = Curvature([batch], {"w": at}, keep=1)
    try:
        return not Differences(gradient, at).show(product, ways, GRADIENT_STEP * length, floor)
    except FldiagError:  # no second derivative
        return True
