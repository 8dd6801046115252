"""Networks that are piecewise linear in the weights of each layer: which problems have one, and what that gives.

Within a layer the Hessian of such a network is the Gauss-Newton matrix, whatever the loss: its diagonal is
computable, and its block of a layer has no negative eigenvalues if the loss is convex in the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fldiag.curvature import exact_diagonal as exact
from fldiag.curvature.hvp import Hessian, derivative, twice_differentiable
from fldiag.curvature.layer_rules import rules
from fldiag.curvature.piecewise_linear import obstacle
from fldiag.errors import FldiagError
from fldiag.models.stacked import hooked
from fldiag.problem.problem import Problem

Criterion = Callable[[Tensor, Tensor], Tensor]
#: Relative difference of an entry from its Hessian-vector product above which the exact form is not used.
AGREEMENT = {torch.float32: 1e-3, torch.float64: 1e-8}
#: Bytes of the cotangents of one piece of the exact computation; larger ones fall out of the processor's caches.
PIECE = 32 * 2**20


def inexact(problem: Problem) -> str | None:
    """Why diag(H) is not the computable diag(J^T H_L J) for this problem; None when it is. Found once.

    Decided from the module graph and the loss, and confirmed on a few examples: entries of three tensors are
    compared with Hessian-vector products.
    """
    return problem.recall("inexact", lambda: _inexact(problem))


def _inexact(problem: Problem) -> str | None:
    if problem.batch_dependent:
        return "outputs depend on the batch"
    if problem.probe().derivatives.wrong_products:
        return "its double backward, with which the exact form is compared, is wrong"
    why = obstacle(problem.module)
    if why:
        return why
    x, y = problem.sample(max(4, min(16, examples_at_once(problem))))
    try:
        piece(problem, x, y, total=True)
        # the loss is out of the comparison: where examples are fitted, curvature and products are rounding alone
        diagonal = piece(problem, x, y, total=False, criterion=_unit)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        return str(error)
    names = [n for n in problem.layout.names if n in diagonal]
    sample = sorted({names[0], names[len(names) // 2], names[-1]} if names else ())
    odd = _disagreeing(problem, x, y, diagonal, sample)
    return f"the entry of {odd} disagrees with a Hessian-vector product" if odd else None


def _disagreeing(
    problem: Problem, x: Tensor, y: Tensor, diagonal: Mapping[str, Tensor], names: Sequence[str]
) -> str | None:
    """The first of these tensors whose largest entry is not that of the Hessian of ``_unit``."""

    def loss(w: Tensor) -> Tensor:
        with problem.guarded():
            return _unit(problem.call(w, x), y)

    h = Hessian([loss], [1.0], problem.w)
    slices = problem.layout.slices()
    for name in names:
        flat = diagonal[name].reshape(-1)
        at = int(flat.abs().argmax())
        e = torch.zeros_like(problem.w)
        e[slices[name].start + at] = 1.0
        entry, exact_entry = float(h(e)[slices[name].start + at]), float(flat[at])
        if not abs(entry - exact_entry) <= AGREEMENT[problem.dtype] * max(
            abs(entry), abs(exact_entry)
        ):
            return name
    return None


def exact_tensors(problem: Problem) -> tuple[str, ...]:
    """The tensors whose blocks of the Hessian have a computable diagonal: all (``inexact``), or those in which the outputs are
    affine, such as a classifier behind the last non-linearity. Found once."""
    return problem.recall(
        "exact tensors",
        lambda: problem.layout.names if inexact(problem) is None else _affine(problem),
    )


def _affine(problem: Problem) -> tuple[str, ...]:
    """The second derivative of the outputs in such a tensor vanishes: the first one's graph does not lead back to it.

    Confirmed as ``inexact`` is, tensor by tensor.
    """
    owners = {n: n.rpartition(".")[0] for n in problem.layout.names}
    layers = {
        name
        for name, m in problem.module.named_modules()
        if rules(m).squares is not None and rules(m).obstacle(m) is None and not hooked(m)
    }
    if problem.by_differences or problem.batch_dependent or not layers & set(owners.values()):
        return ()
    x, y = problem.sample(4)
    with twice_differentiable(), problem.guarded():
        views = {n: v.detach().requires_grad_() for n, v in problem.layout.views(problem.w).items()}
        z = problem.call(views, x)
        if not isinstance(z, Tensor) or not z.requires_grad:
            return ()
        able = [n for n, owner in owners.items() if owner in layers]
        firsts = derivative(z, [views[n] for n in able], z.detach(), twice=True)
        names = [
            n
            for n, g in zip(able, firsts, strict=True)
            if g is not None and not _leads_to(g, views[n])
        ]
    sure: list[str] = []
    for owner in dict.fromkeys(owners[n] for n in names):
        try:
            piece(problem, x, y, total=True, only={owner})  # whether the loss allows it
            diagonal = piece(problem, x, y, total=False, criterion=_unit, only={owner})
        except (ValueError, RuntimeError, NotImplementedError):
            continue
        sure += [
            n for n in names if n in diagonal and not _disagreeing(problem, x, y, diagonal, [n])
        ]
    return tuple(sure)


def _leads_to(output: Tensor, leaf: Tensor) -> bool:
    try:
        return derivative(output.sum(), [leaf], twice=True)[0] is not None
    except FldiagError:  # on the way to it, what cannot be differentiated twice
        return True


def _unit(z: Tensor, y: Tensor) -> Tensor:
    """A loss whose Hessian in the outputs of every example is the identity, whatever they are."""
    return z.square().sum() / (2 * len(z))


def within_a_layer(problem: Problem, names: Sequence[str]) -> bool:
    """Whether these tensors belong to one layer of such a network."""
    return (
        any(set(names) <= set(layer) for layer in problem.layout.layers.values())
        and inexact(problem) is None
    )


def examples_at_once(problem: Problem) -> int:
    """Examples of one piece of the exact computation."""
    # the cotangents of all outputs lie side by side (a graph holds about four tensors to one of them), and the loss's
    # Hessian in the outputs, its eigenvectors and what becomes of them are matrices in double precision
    facts = problem.probe()
    side_by_side = facts.graph_bytes * (1 + facts.outputs / 4)
    fit = problem.memory / 4 / (side_by_side + 5 * 8 * facts.outputs**2)
    if problem.device.type == "cpu":
        fit = min(fit, PIECE / side_by_side)
    return max(1, int(fit))


def piece(
    problem: Problem,
    x: Tensor,
    y: Tensor,
    total: bool,
    criterion: Criterion | None = None,
    only: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """``exact.batch`` of the problem's mean loss (or of ``criterion``) on these examples at the problem's weights."""

    def call(x: Tensor) -> Any:
        with problem.guarded():
            return problem.call(problem.w, x)

    def mean_loss(z: Tensor, y: Tensor) -> Tensor:
        with problem.guarded():
            return problem.criterion(z, y).reshape(())

    parts = exact.batch(problem.module, call, criterion or mean_loss, x, y, total=total, only=only)
    return {name: value for name, value in parts.items() if name not in problem.frozen}
