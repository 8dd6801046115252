"""Two directions in weight space: Hessian eigenvectors, filter-normalised random, a plane, or a trajectory's axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fldiag.errors import FldiagError
from fldiag.landscape.interpolation import StraightPath
from fldiag.problem import inputs
from fldiag.problem.eigenpairs import eigenpairs, eigenvalue_rows, noise_of
from fldiag.problem.problem import Problem
from fldiag.registry import Progress
from fldiag.results.table import Row
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


def eigen(
    problem: Problem,
    *,
    k: int,
    tol: float,
    max_products: int,
    seed: int,
    progress: Progress | None = None,
) -> Directions:
    """The eigenvectors of the two largest Hessian eigenvalues, unit norm; rows: the k leading eigenvalues.

    Raises FldiagError for a model of one parameter, which has no plane.
    """
    if problem.layout.size < 2:
        raise FldiagError(
            "the model has one parameter, a landscape needs two", "diagnose its spectrum instead"
        )
    pairs = eigenpairs(
        problem, max(k, 2), tol=tol, max_products=max_products, seed=seed, progress=progress
    )
    if len(pairs.values) < 2:
        raise FldiagError(
            f"max_products = {max_products} gives one eigenvector, a landscape needs two",
            "allow at least 20 products",
            usage=True,
        )
    return Directions(
        pairs.vectors[0], pairs.vectors[1], eigenvalue_rows(pairs, noise=noise_of(problem))
    )


def random(problem: Problem, *, seed: int) -> Directions:
    """Two filter-normalised Gaussian directions; they are not made orthogonal."""
    return Directions(random_direction(problem, seed, 0), random_direction(problem, seed, 1))


def random_direction(problem: Problem, seed: int, number: int) -> Tensor:
    """A filter-normalised Gaussian direction [P] in float64 (Li et al., NeurIPS 2018, section 4).

    Each filter (slice along axis 0 of a tensor with two or more axes: an output channel or neuron) gets the norm
    of the same filter of the weights; biases and other one-dimensional tensors stay zero, as in that paper's
    code. Raises FldiagError when no tensor with two axes has weights.
    """
    rng = torch_rng(seed, "landscape direction", number)
    raw = torch.randn(problem.layout.size, dtype=torch.float64, generator=rng).to(problem.device)
    views, weights = problem.layout.views(raw), problem.layout.views(problem.w.double())
    for name, d in views.items():  # views: writing to them fills ``raw``
        if d.ndim < 2:
            d.zero_()
            continue
        rows, filters = d.view(len(d), -1), weights[name].reshape(len(d), -1)
        rows *= filters.norm(dim=1, keepdim=True) / rows.norm(dim=1, keepdim=True).clamp_min(1e-30)
    if not bool(raw.any()):
        raise FldiagError(
            "the filter-normalised direction is zero: no tensor with two axes has weights",
            "use directions = 'eigen'",
        )
    return raw


def plane(problem: Problem, others: Sequence[Any]) -> Directions:
    """The plane through the problem's weights and two more weight sets (vectors or dicts of named tensors).

    ``d1`` points to the first one, ``d2`` is the rest of the second one; both have unit norm, so coordinates
    are Euclidean distances. Rows ``point`` (index 0, 1, 2): where the three lie, and their losses. Those are with their own
    buffers (batch-norm statistics) if the weight sets are dicts that hold them; the surface has the problem's everywhere.
    Column ``buffers`` of a model that has any: ``own``, or ``fixed`` (the problem's).
    Raises FldiagError when the three lie on a line or do not fit the model.
    """
    ends = [
        inputs.weights(problem.module, problem.layout, end, problem.dtype, problem.device)
        for end in others
    ]
    a, b = (end.double() - problem.w.double() for end in ends)
    size_a, size_b = float(a.norm()), float(b.norm())
    d1 = a / size_a if size_a else a
    x_b = float(d1 @ b)
    rest = b - x_b * d1
    rest -= (d1 @ rest) * d1
    y_b = float(rest.norm())
    if not size_a or y_b <= 1e-6 * max(size_a, size_b):
        raise FldiagError(
            "the three weight sets lie on one line, so they span no plane",
            "choose three different checkpoints",
            usage=True,
        )
    rows: list[Row] = []
    running = any(b.is_floating_point() for b in problem.buffers.values())
    for index, (w, x, y) in enumerate(
        ((problem.w, 0.0, 0.0), (ends[0], size_a, 0.0), (ends[1], x_b, y_b))
    ):
        path = StraightPath.to(problem, others[index - 1]) if running and index else None
        value, stderr = (
            path.evaluate(1.0) if path and path.buffers == "interpolated" else problem.loss(w)
        )
        kind = (
            {"buffers": "fixed" if path and path.buffers == "fixed" else "own"} if running else {}
        )
        rows.append(
            {
                "metric": "point",
                "index": index,
                "x": x,
                "y": y,
                "value": value,
                "stderr": stderr,
                "estimator": "exact",
                **kind,
            }
        )
    return Directions(d1, rest / y_b, rows, reach=max(size_a, abs(x_b), y_b))


def principal(offsets: Tensor) -> tuple[Tensor, Tensor]:
    """The two leading principal axes [2, P] of the rows [T, P], and the share of the variance along each [2].

    By the eigenvectors of the rows' centred Gram matrix [T, T]. The first row has no negative coordinate
    relative to the last one. Raises FldiagError for rows on one line.
    """
    gram = offsets @ offsets.T
    gram = (gram - gram.mean(0) - gram.mean(1, keepdim=True) + gram.mean()).cpu()
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0).clamp_min(0), vectors.flip(1).to(offsets.device)
    total = float(values.sum())
    if total <= 0 or float(values[1]) <= 1e-12 * total:
        raise FldiagError(
            "the trajectory lies on one line, so it spans no plane",
            "give more checkpoints of a run",
            usage=True,
        )
    axes: list[Tensor] = []
    for i in range(2):
        axis = (vectors[:, i] - vectors[:, i].mean()) @ offsets
        for other in axes * 2:  # twice: orthogonal to rounding
            axis = axis - (axis @ other) * other
        axis = axis / axis.norm()
        axes.append(-axis if float(axis @ (offsets[0] - offsets[-1])) < 0 else axis)
    return torch.stack(axes), values[:2] / total


def pca(
    problem: Problem,
    others: Sequence[tuple[int | None, Any]],
    progress: Progress | None = None,
) -> Directions:
    """The two principal axes of a trajectory of weights (Li et al., NeurIPS 2018, section 7).

    ``others``: the weight sets before the problem's own, which are the last, with their rounds. The axes are those of the
    mean-centred weights, the origin is the problem's weights. Rows, by ``index`` from 0: ``trajectory`` (coordinates, and the
    loss at the weights themselves, not at their projection), ``projection_error`` (distance from the plane);
    ``explained_variance`` (index 1, 2: the axis's share of the variance). Losses use the problem's buffers. Raises
    FldiagError for a trajectory on one line.
    """
    offsets = torch.zeros(
        len(others) + 1, problem.layout.size, dtype=torch.float64, device=problem.device
    )
    # the last row is the problem itself
    for row, (_, w) in zip(offsets, others, strict=False):
        row += inputs.weights(problem.module, problem.layout, w, problem.dtype, problem.device)
        row -= problem.w
    axes, shares = principal(offsets)
    rows: list[Row] = [
        {
            "metric": "explained_variance",
            "index": i + 1,
            "value": float(shares[i]),
            "estimator": "exact",
        }
        for i in range(2)
    ]
    reach = 0.0
    for index, (r, offset) in enumerate(zip([*(r for r, _ in others), None], offsets, strict=True)):
        x, y = (float(c) for c in axes @ offset)
        value, stderr = problem.loss(problem.w.double() + offset)
        when = {} if r is None else {"round": r}
        away = float((offset - x * axes[0] - y * axes[1]).norm())
        rows += [
            {
                "metric": "trajectory",
                "index": index,
                "x": x,
                "y": y,
                "value": value,
                "stderr": stderr,
                "estimator": "exact",
                **when,
            },
            {
                "metric": "projection_error",
                "index": index,
                "x": x,
                "y": y,
                "value": away,
                "estimator": "exact",
                **when,
            },
        ]
        reach = max(reach, abs(x), abs(y))
        if progress:
            progress(index + 1, len(offsets), "losses along the trajectory")
    return Directions(axes[0], axes[1], rows, reach)
