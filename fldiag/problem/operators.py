"""The two forms of a problem's curvature products, and the check that the faster one may be trusted."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fldiag.choices import Matrix
from fldiag.curvature.hvp import DoubleBackward, GaussNewton, Hessian, Weights
from fldiag.curvature.r_operator import ChainOperator
from fldiag.errors import FldiagError, nearest
from fldiag.models.layers import network_links
from fldiag.problem.ingredients import Ingredients
from fldiag.problem.trees import Tree
from fldiag.seeding import torch_rng

#: Relative difference from double backward above which products by hand are not used.
AGREEMENT = {torch.float32: 1e-5, torch.float64: 1e-9}
#: Examples the two are compared on, spread over the slice.
COMPARED = 32

Batches = list[Callable[[], tuple[Tree, Tree]]]


def by_hand(
    problem: Ingredients,
    matrix: Matrix,
    w: Tensor,
    batches: Batches,
    shares: list[float],
    *,
    room: int = 0,
) -> ChainOperator | None:
    """Products written by hand, for sequential networks; None where the model is no such network."""
    chain = None if problem.frozen else network_links(problem.module, problem.buffers)
    if chain is None:
        return None
    return ChainOperator(
        chain, _criterion(problem), batches, shares, w, problem.layout, matrix=matrix, room=room
    )


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


def agrees(problem: Ingredients, matrix: Matrix) -> bool:
    """Whether there are products by hand, and they are those of double backward on a random vector and a few examples."""
    x, y = problem.sample(COMPARED)
    v = torch.randn(
        problem.layout.size, dtype=torch.float64, generator=torch_rng(0, "compared products")
    ).to(problem.device)
    try:
        fast = by_hand(problem, matrix, problem.w, [lambda: (x, y)], [1.0])
        if fast is None:
            return False
        product = fast(v)
        expected = double_backward(problem, matrix, problem.w, [lambda: (x, y)], [1.0])(v)
    except (
        RuntimeError,
        NotImplementedError,
        IndexError,
    ):  # an operation or shape that has no rule
        return False
    return bool((product - expected).norm() <= AGREEMENT[problem.dtype] * expected.norm())


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
