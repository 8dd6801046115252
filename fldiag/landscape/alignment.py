"""Permutation alignment: one model's hidden units in the order in which they match another's.

Weight matching of Ainsworth, Hayase and Srinivasa, "Git Re-Basin: Merging Models modulo Permutation Symmetries" (ICLR 2023),
algorithm 1: the order of one group of units after the other by a linear assignment, until nothing moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fldiag.errors import FldiagError
from fldiag.landscape.mixtures import Model
from fldiag.models.units import Axis, Units
from fldiag.problem.problem import Problem
from fldiag.problem.trees import same

Tensors = Mapping[str, Tensor]
#: A sweep over the groups only ever raises the sum of products; more than this are never needed in practice.
SWEEPS = 100


def match(units: Units, to: Tensors, of: Tensors) -> list[Tensor]:
    """For each group, which unit of ``of`` comes to which place, so that the sum of products with ``to`` is large.

    Two starts, the better one counts: the order as it is, and groups matched one after the other by the weights whose
    other units are matched already, which finds the order of a permuted copy. The sum cannot be raised by another order of any
    one group; the best order of all is not known to be found (the problem is NP-hard).
    """

    def product(orders: Sequence[Tensor]) -> float:
        return sum(float((to[n] * units.reorder(of[n], n, orders)).sum()) for n in of)

    same_order = [torch.arange(size) for size in units.sizes]
    first = list(same_order)
    matched: set[int] = set()
    for group in sorted({axis.group for axis in units.axes}):
        matched.add(group)
        first[group] = _assign(_products(units, to, of, first, group, matched))
    return max((_improved(units, to, of, start) for start in (first, same_order)), key=product)


def _improved(units: Units, to: Tensors, of: Tensors, orders: Sequence[Tensor]) -> list[Tensor]:
    orders = list(orders)
    groups = sorted({axis.group for axis in units.axes})
    for _ in range(SWEEPS):
        moved = False
        for group in groups:
            gain = _products(units, to, of, orders, group, set(groups))
            new = _assign(gain)
            at = torch.arange(len(new))
            # only upwards: between orders that are equal up to rounding it could go back and forth
            if float(gain[at, new].sum()) > float(gain[at, orders[group]].sum()) + 1e-12 * float(
                gain.abs().sum()
            ):
                orders[group], moved = new, True
        if not moved:
            break
    return orders


def _products(
    units: Units, to: Tensors, of: Tensors, orders: Sequence[Tensor], group: int, matched: set[int]
) -> Tensor:
    """The sum of products when unit j of ``of`` comes to place i [n, n], over tensors whose other groups are ``matched``."""
    total = torch.zeros(units.sizes[group], units.sizes[group], dtype=torch.float64)
    for axis in units.axes:
        other_groups = {a.group for a in units.of_tensor(axis.tensor) if a != axis}
        if axis.group == group and axis.tensor in of and other_groups <= matched:
            reordered = units.reorder(of[axis.tensor], axis.tensor, orders, but=axis)
            size = len(total)
            total += _by_unit(to[axis.tensor], axis, size) @ _by_unit(reordered, axis, size).T
    return total


def _by_unit(t: Tensor, axis: Axis, size: int) -> Tensor:
    return (
        t.double()
        .cpu()
        .unflatten(axis.axis, (size, axis.positions))
        .movedim(axis.axis, 0)
        .flatten(1)
    )


def _assign(gain: Tensor) -> Tensor:
    return torch.from_numpy(
        np.asarray(linear_sum_assignment(gain.numpy(), maximize=True)[1], dtype=np.int64)
    )


def align(problem: Problem, models: Sequence[Model]) -> tuple[list[Model], list[dict[str, int]]]:
    """The models after the first with their units in the order of the first's; and of each, how many units of which layer moved.

    The outputs of every model are compared before and after. Raises FldiagError naming a layer whose units have no known order,
    and where the outputs differ.
    """
    if problem.frozen:
        raise FldiagError(
            "models of which only some parameters count as weights cannot be aligned",
            "leave out --trainable",
            usage=True,
        )
    units, layout = Units.of(problem.module), problem.layout
    first = {n: t.double().cpu() for n, t in layout.views(models[0][0]).items()}
    result, moved = [models[0]], []
    x, _ = problem.sample(32)
    for w, buffers in models[1:]:
        views = layout.views(w)
        orders = match(units, first, {n: t.double().cpu() for n, t in views.items()})
        new_w = torch.cat([units.reorder(views[n], n, orders).reshape(-1) for n in layout.names])
        new_buffers = {n: units.reorder(b, n, orders) for n, b in buffers.items()}
        with problem.guarded(), torch.no_grad():
            before, after = (
                problem.call(v.to(problem.dtype), x, {n: b.clone() for n, b in bufs.items()})
                for v, bufs in ((w, buffers), (new_w, new_buffers))
            )
        if not same(before, after, 1e-3 if problem.dtype == torch.float32 else 1e-9):
            raise FldiagError(
                "with its units in another order the model has other outputs, so it does more than its layers say",
                "leave out --align",
            )
        result.append((new_w, new_buffers))
        moved.append(
            {
                units.names[g]: int((order != torch.arange(len(order))).sum())
                for g, order in enumerate(orders)
                if any(a.group == g for a in units.axes)
            }
        )
    return result, moved
