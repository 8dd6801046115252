"""Which form a problem's curvature products take, and the check that the form may be trusted."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fldiag.choices import Matrix
from fldiag.curvature.hvp import GaussNewton, Hessian, Linearized, Weights
from fldiag.curvature.operator import Operator
from fldiag.curvature.r_operator import ChainOperator
from fldiag.errors import FldiagError, nearest
from fldiag.models.chain import links
from fldiag.problem.ingredients import Ingredients
from fldiag.problem.trees import Tree
from fldiag.seeding import torch_rng

Form = Literal["auto", "double backward", "r-operator", "linearize"]
#: Relative difference from double backward above which a form is not used.
AGREEMENT = {torch.float32: 1e-5, torch.float64: 1e-9}
#: Examples the forms are compared on, spread over the slice.
COMPARED = 32

Batches = list[Callable[[], tuple[Tree, Tree]]]


def build(problem: Ingredients, form: str, matrix: Matrix, w: Tensor, batches: Batches, shares: list[float], *,
          keep: int = 0, room: int = 0) -> Operator | None:
    """The operator in this form, None when the model has no such form."""
    def criterion(z: Any, y: Tensor) -> Tensor:
        with problem.guarded():
            return problem.criterion(z, y).reshape(())

    def outputs(w: Weights, x: Tensor) -> Any:
        with problem.guarded():
            return problem.call(w, x)

    if form == "r-operator":
        found = None if problem.frozen else links(problem.module, problem.buffers)
        if found is None:
            return None
        return ChainOperator(found, criterion, batches, shares, w, problem.layout, matrix=matrix, room=room)

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

    if form == "double backward":
        if matrix == "ggn":
            return GaussNewton([parts_of(b) for b in batches], shares, w, keep, problem.layout)
        return Hessian([loss_of(b) for b in batches], shares, w, keep, problem.layout)
    return Linearized([loss_of(b) for b in batches], shares, w) if matrix == "hessian" else None


def agrees(problem: Ingredients, form: str, matrix: Matrix) -> bool:
    """Whether this form gives the product of double backward on a random vector and a few examples."""
    x, y = problem.sample(COMPARED)
    v = torch.randn(problem.layout.size, dtype=torch.float64, generator=torch_rng(0, "compared products"))
    try:
        pair = [build(problem, f, matrix, problem.w, [lambda: (x, y)], [1.0]) for f in (form, "double backward")]
        if pair[0] is None or pair[1] is None:
            return False
        found, expected = pair[0](v.to(problem.device)), pair[1](v.to(problem.device))
    except (RuntimeError, NotImplementedError, IndexError):  # an operation or shape that has no rule
        return False
    return bool((found - expected).norm() <= AGREEMENT[problem.dtype] * expected.norm())


def choose(form: str, matrix: str, fits: Callable[[str], bool]) -> str:
    """The form to use: ``auto`` is by hand where that ``fits``, else double backward.

    Raises FldiagError for an unknown form or matrix, and when the form asked for does not fit.
    """
    if matrix not in ("hessian", "ggn"):
        raise FldiagError(f"matrix = {matrix!r} is not known", "use 'hessian' or 'ggn'", usage=True)
    if form not in get_args(Form):
        raise FldiagError(f"form = {form!r} is not known", nearest(form, get_args(Form)), usage=True)
    if form == "auto":
        return "r-operator" if fits("r-operator") else "double backward"
    if form != "double backward" and not fits(form):
        raise FldiagError(f"form = {form!r} does not fit this model ({matrix})",
                          "use form = 'double backward', or 'auto'", usage=True)
    return form


def block_names(problem: Ingredients, which: str | Sequence[str]) -> list[str]:
    """The tensors whose names match a pattern (as file names do: ``features.*``) or are listed.

    Raises FldiagError when no tensor is meant.
    """
    known = problem.layout.names
    names = [n for n in known if (fnmatch.fnmatchcase(n, which) if isinstance(which, str) else n in which)]
    if not names:
        raise FldiagError(f"params = {which!r} matches no parameter", nearest(str(which), known), usage=True)
    return names


def block_index(problem: Ingredients, which: str | Sequence[str]) -> Tensor:
    """Where the tensors of ``block_names`` lie in the weights."""
    slices = problem.layout.slices()
    return torch.cat([torch.arange(slices[n].start, slices[n].stop) for n in block_names(problem, which)]).to(problem.device)
