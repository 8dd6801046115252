"""Are gradient and Hessian-vector product the derivatives of the loss? Checked on a few examples, once per model and loss.

All comparisons are made at weights a little beside the problem's, in double precision where the model computes in it. There no
ReLU, maximum or absolute value lies at its kink, as it may at zero biases or zero inputs, and steps are so short that none is
crossed. A comparison counts only where two steps of different length agree with each other, and a gradient is wrong only if it
disagrees in most directions: kinks, jumps and rounding errors disagree with themselves first.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fldiag.curvature.finite_differences import difference
from fldiag.curvature.hvp import Hessian, derivative
from fldiag.errors import FldiagError, first_line
from fldiag.problem.ingredients import Criterion, Ingredients
from fldiag.problem.trees import Tree, clone, count, cut, same
from fldiag.seeding import torch_rng

#: Examples of a comparison, and directions in which slopes are compared, of which so many must disagree.
EXAMPLES, DIRECTIONS, DISAGREEING = 8, 4, 3
#: Steps, relative to the weights, are this power of the precision (in double precision, and not), and a derivative is wrong from
#: this relative error on. A longer step, this many times as long, must agree.
STEP, WRONG = {True: 0.5, False: 0.4}, {True: 1e-3, False: 1e-2}
FACTOR = 4.0
#: How the remark on what could not be compared begins.
UNCHECKED = "whether the gradient is the derivative of the loss was not checked: "
#: Vectors as long as the weights that the comparisons in double precision hold at a time.
VECTORS = 10


@dataclass(frozen=True)
class Derivatives:
    """``slopes``: of the loss along a direction, by differences and by the gradient, where the gradient is not its derivative.
    ``wrong_products``: double backward fails, or is not the derivative of the gradient. ``not_finite``: ``gradient`` or
    ``product``, where the loss is finite. ``remark``: why nothing could be compared."""

    slopes: tuple[float, float] | None = None
    wrong_products: bool = False
    not_finite: str = ""
    remark: str = ""


def compare_derivatives(
    problem: Ingredients, criterion: Criterion, x: Tree, y: Tree
) -> Derivatives:
    """The comparisons on up to ``EXAMPLES`` of these examples. What keeps them from being made is a remark."""
    step = max(1, count(x) // EXAMPLES)
    index = torch.arange(0, count(x), step, device=problem.device)[:EXAMPLES]
    x_few = clone(cut(x, index))
    y_few = x_few if y is x else clone(cut(y, index))
    attempts = [(problem, x_few, y_few)]
    if VECTORS * 8 * problem.layout.size <= problem.memory:
        attempts.insert(0, _double(problem, x_few, y_few))
    reason = ""
    for attempt in attempts:
        try:
            return _Comparison(criterion, *attempt).result()
        except Exception as error:  # the user's model or loss may raise anything, such as an assertion of single precision
            reason = first_line(error)
    return Derivatives(remark=UNCHECKED + reason)


def _double(problem: Ingredients, x: Tree, y: Tree) -> tuple[Ingredients, Tree, Tree]:
    """The problem and examples in double precision."""

    def wide(t: Tensor) -> Tensor:
        return t.double() if t.is_floating_point() else t

    twin = copy.copy(problem)
    twin.dtype, twin.w = torch.float64, problem.w.double()
    twin.frozen = {n: wide(t) for n, t in problem.frozen.items()}
    twin.buffers = {n: wide(t) for n, t in problem.buffers.items()}
    inputs = tree_map(wide, x)
    return twin, inputs, inputs if y is x else tree_map(wide, y)


def remarks_on(problem: Ingredients, derivatives: Derivatives) -> tuple[str, ...]:
    """What the comparisons say about every result of the problem.

    Raises FldiagError where the gradient is not the derivative of the loss.
    """
    if derivatives.slopes is not None:
        loss, gradient = derivatives.slopes
        text = (
            f"the gradient is not the derivative of the loss: along a random direction the loss changes by {loss:.3g}, by "
            f"the gradient {gradient:.3g} (detach(), torch.no_grad(), a straight-through estimator, a gradient reversal or "
            "another backward of one's own)"
        )
        remedy = "remove it"
        if not problem.frozen and any(not p.requires_grad for p in problem.module.parameters()):
            remedy += "; trainable = True leaves parameters that are frozen on purpose out"
        raise FldiagError(text, remedy)
    if derivatives.wrong_products:
        return (
            "double backward of this model fails or is not the derivative of its gradient: Hessian-vector products are taken "
            "by differences of gradients",
        )
    return (derivatives.remark,) if derivatives.remark else ()


class _Comparison:
    """The loss of a few examples as a function of the weights, with its derivatives beside differences."""

    def __init__(self, criterion: Criterion, problem: Ingredients, x: Tree, y: Tree):
        self.problem, self.criterion, self.x, self.y = problem, criterion, x, y
        w = problem.w.clone()
        precision = _Precision(w.dtype)
        with torch.no_grad(), precision, problem.guarded():
            outputs = problem.call(w, clone(x))
            value = criterion(outputs, y)
        self.eps = precision.eps
        if self.eps > torch.finfo(torch.float32).eps:
            raise FldiagError(f"the model computes in a precision of {self.eps:.0e}")
        self.is_double = self.eps == torch.finfo(torch.float64).eps
        self.step, self.wrong = self.eps ** STEP[self.is_double], WRONG[self.is_double]
        self.size = float(w.double().norm()) / math.sqrt(len(w)) or 0.1  # of a weight
        # of the loss: the largest number that may cancel in it
        leaves = [t for t in tree_leaves(outputs) if _eps(t) and t.numel()]
        largest = max([abs(float(value)), *(float(t.abs().max()) for t in leaves)])
        self.rounding = self.eps * largest
        self.saturated = isinstance(outputs, Tensor) and _saturated(outputs)
        self.w = (w.double() + math.sqrt(self.step) * self.vector("weights beside")).to(w)

    def vector(self, purpose: str, number: int = 0) -> Tensor:
        """A random direction [P] in which weights change by about their size. Rows of padding, to which torch gives no gradient,
        stay as they are."""
        layout, module = self.problem.layout, self.problem.module
        rng = torch_rng(0, f"derivatives: {purpose}", number)
        v = torch.randn(layout.size, generator=rng).to(self.problem.device).double() * self.size
        views, names = layout.views(v), {id(p): name for name, p in module.named_parameters()}
        for m in module.modules():
            if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.padding_idx is not None:
                name = names.get(id(m.weight))
                if name in views:
                    views[name][m.padding_idx] = 0
        return v

    def term(self, w: Any) -> Tensor:
        with self.problem.guarded():
            return self.criterion(self.problem.call(w, clone(self.x)), self.y).reshape(())

    def loss(self, w: Tensor) -> float:
        with torch.no_grad():
            return float(self.term(w))

    def gradient(self, w: Tensor) -> Tensor:
        at = w.detach().requires_grad_()
        with torch.enable_grad(), self.problem.guarded():
            (part,) = derivative(self.term(at), [at])
        return torch.zeros_like(w, dtype=torch.float64) if part is None else part.double()

    def result(self) -> Derivatives:
        value, gradient = self.loss(self.w), self.gradient(self.w)
        if not math.isfinite(value):
            raise FldiagError("the loss is not finite at weights beside the problem's")
        if not bool(self.gradient(self.problem.w).isfinite().all()):
            return Derivatives(not_finite="gradient")
        slopes = self.wrong_slopes(value, gradient)
        if slopes is not None and self.saturated:
            return Derivatives(
                remark=f"{UNCHECKED}some outputs are probabilities of 0 or 1, where torch cuts off the gradient of nn.BCELoss "
                "(BCEWithLogitsLoss of logits has it)"
            )
        if slopes is not None:
            return Derivatives(slopes)
        # of a product in which all that matters cancels
        rounding = 1e4 * (
            self.eps * float(gradient.norm()) + self.rounding / float(self.w.double().norm())
        )
        del gradient  # as long as the weights, like all that the products need
        try:
            return self.products(rounding)
        except FldiagError:  # not differentiable twice
            return Derivatives(wrong_products=True)

    def wrong_slopes(self, value: float, gradient: Tensor) -> tuple[float, float] | None:
        """The first slope, by differences and by the gradient, if they disagree in most directions. It stops where the
        directions that are left cannot decide otherwise."""
        wrong: list[tuple[float, float]] = []
        scale = float(gradient.norm()) * self.size
        for i in range(DIRECTIONS):
            if len(wrong) + DIRECTIONS - i < DISAGREEING:
                return None
            v = self.vector("slope", i)
            expected, near = float(gradient @ v), self.slopes(v, self.step, value)
            slope = sum(near) / 2
            error = abs(slope - expected)
            if not error > self.wrong * max(scale, abs(slope)) + 10 * self.rounding / self.step:
                continue
            far = self.slopes(v, FACTOR * self.step, value)
            # slopes to both sides differ by a multiple of the step, and over a kink by its jump whatever the step
            kink = (near[0] - near[1]) - (far[0] - far[1]) / FACTOR
            if max(abs(slope - sum(far) / 2), abs(kink)) <= error / 10:
                wrong.append((slope, expected))
        return wrong[0] if len(wrong) >= DISAGREEING else None

    def slopes(self, v: Tensor, step: float, value: float) -> tuple[float, float]:
        """Of the loss, which is ``value`` at the weights, ahead and behind."""
        ahead, behind = (
            self.loss((self.w.double() + sign * step * v).to(self.w)) for sign in (1, -1)
        )
        return (ahead - value) / step, (value - behind) / step

    def products(self, rounding: float) -> Derivatives:
        def product(w: Tensor, v: Tensor) -> Tensor:
            with self.problem.guarded():
                return Hessian([self.term], [1.0], w, 0, self.problem.layout)(v)

        # u and v, and what becomes of them, are as long as the weights: few of them live at a time
        v = self.vector("product", 1)
        if not bool(product(self.problem.w, v).isfinite().all()):
            return Derivatives(not_finite="product")
        hv = product(self.w, v)
        # in single precision steps are so long that they cross kinks, and what those add to a difference is no error
        if self.is_double and self.disagrees(v, hv, rounding):
            return Derivatives(wrong_products=True)
        u = self.vector("product", 0)
        norm, u_hv = float(hv.norm()), float(u @ hv)
        del hv
        hu = product(self.w, u)
        asymmetry, norms = abs(u_hv - float(v @ hu)), norm + float(hu.norm())
        return Derivatives(wrong_products=asymmetry > self.size * (self.wrong * norms + rounding))

    def disagrees(self, v: Tensor, hv: Tensor, rounding: float) -> bool:
        """Whether the product with v [P] is not the difference of gradients, which agrees with that of a longer step."""
        near = self.difference(v, self.step)
        error = float((near - hv).norm())
        if not error > self.wrong * float(near.norm()) + rounding:
            return False
        far = self.difference(v, FACTOR * self.step)
        return float((near - far).norm()) <= error / 10

    def difference(self, v: Tensor, step: float) -> Tensor:
        """The product with v [P] by a difference of gradients."""
        return float(v.norm()) * difference(self.gradient, self.w, v, step)


class _Precision(TorchDispatchMode):
    """The coarsest precision that values are rounded to on their way, at least that of ``dtype``."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.eps = torch.finfo(dtype).eps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        before = [eps for t in tree_leaves((args, kwargs)) if (eps := _eps(t))]
        after = [eps for t in tree_leaves(result) if (eps := _eps(t))]
        if before and after and max(after) > min(before):
            self.eps = max(self.eps, *after)
        return result


def _saturated(outputs: Tensor) -> bool:
    """Whether all outputs are probabilities p, and some so close to 0 or 1 that torch divides by 1e-12 in place of p (1 - p)."""
    return bool(((outputs >= 0) & (outputs <= 1)).all()) and bool(
        (outputs * (1 - outputs) < 1e-12).any()
    )


def _eps(t: Any) -> float:
    return (
        torch.finfo(t.dtype).eps
        if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex())
        else 0.0
    )


# -- a loss that reads the weights


def refuse_weights_in_loss(
    problem: Ingredients, criterion: Criterion, x: Tree, z: Any, y: Tree, tolerance: float
) -> None:
    """Raises FldiagError where the loss of fixed outputs depends on the model's weights: they are moved without the user's
    module, so such a term would stay as it is, and gradient and curvature would lack it."""
    try:
        reads = _reads_weights(problem, criterion, x, z, y, tolerance)
    except Exception:  # the user's loss may raise anything, and then it cannot be tried
        return
    if reads:
        raise FldiagError(
            "the loss reads the model's weights beside its outputs, as an L2 penalty does; such a term has no part "
            "in gradient and curvature here",
            "take it out of the loss: of λ/2 ‖w‖² say Problem(..., weight_decay=λ), any other term let the model "
            "return with its outputs",
        )


def _reads_weights(
    problem: Ingredients, criterion: Criterion, x: Tree, z: Any, y: Tree, tolerance: float
) -> bool:
    originals = (p for ref in problem.originals if (p := ref()) is not None)
    parameters = [*problem.module.parameters(), *originals]
    value = criterion(z, y)
    with _Moved(parameters):
        moved = criterion(z, y)
    if not same(value, moved, tolerance):
        return True
    with torch.enable_grad():
        leaves = [p for p in parameters if p.requires_grad]
        parts = derivative(criterion(z, y), leaves, twice=True)  # the user's graph stays
    if any(part is not None for part in parts):
        return True
    # what the model leaves behind for the loss, such as in a forward hook
    problem.call(1.5 * problem.w + 0.1, clone(x))
    after = criterion(z, y)
    problem.call(problem.w, clone(x))
    return not same(after, criterion(z, y), tolerance)


class _Moved(TorchFunctionMode):
    """Functions of torch, also ``numpy`` and ``tolist``, get other values in place of these tensors and of views of them."""

    def __init__(self, tensors: Sequence[Tensor]):
        super().__init__()
        self._memory = {t.untyped_storage().data_ptr() for t in tensors if t.numel()}

    def _value(self, t: Any) -> Any:
        if (
            not isinstance(t, Tensor)
            or not t.is_floating_point()
            or t.untyped_storage().data_ptr() not in self._memory
        ):
            return t
        return (1.5 * t.detach() + 0.1).requires_grad_(t.requires_grad)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map(self._value, args), **tree_map(self._value, kwargs or {}))
