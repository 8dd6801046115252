"""Two directions in weight space: Hessian eigenvectors, filter-normalised random, or a plane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fldiag.diagnostics import inputs
from fldiag.diagnostics.problem import Problem
from fldiag.diagnostics.spectrum import Progress, Row, eigenpairs, eigenvalue_rows
from fldiag.errors import FldiagError
from fldiag.seeding import torch_rng


@dataclass(frozen=True)
class Directions:
    """``d1``, ``d2`` [P] in float64, and the ``rows`` of the result table that come with them.

    ``reach``: the farthest coordinate that should be seen (0 where nothing asks for one).
    """

    d1: Tensor
    d2: Tensor
    rows: list[Row] = field(default_factory=list)
    reach: float = 0.0


def eigen(problem: Problem, *, k: int, tol: float, max_products: int, seed: int,
          progress: Progress | None = None) -> Directions:
    """The eigenvectors of the two largest Hessian eigenvalues, unit norm; rows: the k leading eigenvalues.

    Raises FldiagError for a model of one parameter, which has no plane.
    """
    if problem.layout.size < 2:
        raise FldiagError("the model has one parameter, a landscape needs two",
                          "diagnose its spectrum instead")
    pairs = eigenpairs(problem, max(k, 2), tol=tol, max_products=max_products, seed=seed, progress=progress)
    if len(pairs.values) < 2:
        raise FldiagError(f"max_products = {max_products} gives one eigenvector, a landscape needs two",
                          "allow at least 20 products", usage=True)
    return Directions(pairs.vectors[0], pairs.vectors[1], eigenvalue_rows(pairs))


def random(problem: Problem, *, seed: int) -> Directions:
    """Two filter-normalised Gaussian directions (Li et al., NeurIPS 2018, section 4).

    Each filter of a direction (slice along axis 0 of a tensor with two or more axes: an output channel or
    neuron) gets the norm of the same filter of the weights; biases and other one-dimensional tensors stay
    zero, as in that paper's code. The directions are not normalised or made orthogonal beyond that.
    """
    found = []
    for i in range(2):
        rng = torch_rng(seed, "landscape direction", i)
        raw = torch.randn(problem.layout.size, dtype=torch.float64, generator=rng).to(problem.device)
        views, weights = problem.layout.views(raw), problem.layout.views(problem.w.double())
        for name, d in views.items():  # views: writing to them fills ``raw``
            if d.ndim < 2:
                d.zero_()
                continue
            rows, filters = d.view(len(d), -1), weights[name].reshape(len(d), -1)
            rows *= filters.norm(dim=1, keepdim=True) / rows.norm(dim=1, keepdim=True).clamp_min(1e-30)
        if not bool(raw.any()):
            raise FldiagError("the filter-normalised direction is zero: no tensor with two axes has weights",
                              "use directions = 'eigen'")
        found.append(raw)
    return Directions(found[0], found[1])


def plane(problem: Problem, through: Sequence[Any] | None) -> Directions:
    """The plane through the problem's weights and two more weight sets (vectors or dicts of named tensors).

    ``d1`` points to the first one, ``d2`` is the rest of the second one; both have unit norm, so coordinates
    are Euclidean distances. Rows ``point`` (index 0, 1, 2): where the three lie, and the loss there.
    Raises FldiagError when the three lie on a line or do not fit the model.
    """
    if through is None or isinstance(through, (str, bytes)) or len(through) != 2:
        raise FldiagError("a plane needs two weight sets besides the problem's own",
                          "give through = [weights_a, weights_b]", usage=True)
    ends = [inputs.weights(problem.module, problem.layout, given, problem.dtype, problem.device)
            for given in through]
    a, b = (end.double() - problem.w.double() for end in ends)
    size_a, size_b = float(a.norm()), float(b.norm())
    d1 = a / size_a if size_a else a
    x_b = float(d1 @ b)
    rest = b - x_b * d1
    rest -= (d1 @ rest) * d1
    y_b = float(rest.norm())
    if not size_a or y_b <= 1e-6 * max(size_a, size_b):
        raise FldiagError("the three weight sets lie on one line, so they span no plane",
                          "choose three different checkpoints", usage=True)
    rows: list[Row] = []
    for index, (w, x, y) in enumerate(((problem.w, 0.0, 0.0), (ends[0], size_a, 0.0), (ends[1], x_b, y_b))):
        value, stderr = problem.loss(w)
        rows.append({"metric": "point", "index": index, "x": x, "y": y, "value": value, "stderr": stderr,
                     "estimator": "exact"})
    return Directions(d1, rest / y_b, rows, reach=max(size_a, abs(x_b), y_b))
