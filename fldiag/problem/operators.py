"""A problem's curvature products, and the blocks of its weights."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fldiag.choices import Matrix
from fldiag.curvature.hvp import DoubleBackward, GaussNewton, Hessian, Weights
from fldiag.errors import FldiagError, nearest
from fldiag.problem.ingredients import Ingredients
from fldiag.problem.trees import Tree

Batches = list[Callable[[], tuple[Tree, Tree]]]


def double_backward(
    problem: Ingredients,
    matrix: Matrix,
    w: Tensor,
    batches: Batches,
    shares: list[float],
    *,
    keep: int = 0,
) -> DoubleBackward:
    """Products by automatic differentiation, for any network that autograd can differentiate twice."""
    criterion = _criterion(problem)

    def outputs(w: Weights, x: Tensor) -> Any:
        with problem.guarded():
            return problem.call(w, x)

    def loss_of(batch: Callable[[], tuple[Tensor, Tensor]]) -> Callable[[Weights], Tensor]:
        def loss(w: Weights) -> Tensor:
            x, y = batch()
            return criterion(outputs(w, x), y)

        return loss

    def parts_of(batch: Callable[[], tuple[Tensor, Tensor]]) -> Any:
        def parts(w: Weights) -> tuple[Any, Callable[[Any], Tensor]]:
            x, y = batch()
            return outputs(w, x), lambda z: criterion(z, y)

        return parts

    if matrix == "ggn":
        return GaussNewton([parts_of(b) for b in batches], shares, w, keep, problem.layout)
    return Hessian([loss_of(b) for b in batches], shares, w, keep, problem.layout)


def _criterion(problem: Ingredients) -> Callable[[Any, Tensor], Tensor]:
    def criterion(z: Any, y: Tensor) -> Tensor:
        with problem.guarded():
            return problem.criterion(z, y).reshape(())

    return criterion


def block_names(
    problem: Ingredients, which: str | Sequence[str], option: str = "params"
) -> list[str]:
    """The tensors whose names match a pattern (as file names do: ``features.*``) or are listed.

    Raises FldiagError, which names the ``option``, when there is none.
    """
    names = [
        n
        for n in problem.layout.names
        if (fnmatch.fnmatchcase(n, which) if isinstance(which, str) else n in which)
    ]
    if not names:
        raise FldiagError(
            f"{option} = {which!r} matches no parameter",
            nearest(str(which), problem.layout.names),
            usage=True,
        )
    return names


def block_index(problem: Ingredients, which: str | Sequence[str], option: str = "params") -> Tensor:
    """Where the tensors of ``block_names`` lie in the weights."""
    slices = problem.layout.slices()
    return torch.cat(
        [torch.arange(slices[n].start, slices[n].stop) for n in block_names(problem, which, option)]
    ).to(problem.device)
