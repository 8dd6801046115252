"""Directions in weight space: filter-normalised random ones, the plane of three models, a trajectory's principal axes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fldiag.errors import FldiagError
from fldiag.problem.problem import Problem
from fldiag.seeding import torch_rng


def random_direction(problem: Problem, seed: int, number: int) -> Tensor:
    """A filter-normalised Gaussian direction (Li et al., NeurIPS 2018, section 4).

    Each filter (slice along axis 0 of a tensor with two or more axes: an output channel or neuron) gets the norm of the same
    filter of the weights; biases and other one-dimensional tensors stay zero, as in that paper's code.

    Args:
        problem: whose weights give the lengths.
        seed: of the numbers.
        number: another one gives another direction.

    Returns:
        [P] in float64.

    Raises:
        FldiagError: no tensor with two axes has weights.
    """
    rng = torch_rng(seed, "landscape direction", number)
    direction = torch.randn(problem.layout.size, dtype=torch.float64, generator=rng)
    direction = direction.to(problem.device)
    weights = problem.layout.views(problem.w.double())
    for name, d in problem.layout.views(direction).items():  # views: writing fills the direction
        if d.ndim < 2:
            d.zero_()
        else:
            rows, filters = d.view(len(d), -1), weights[name].reshape(len(d), -1)
            rows *= filters.norm(dim=1, keepdim=True) / rows.norm(dim=1, keepdim=True).clamp_min(
                1e-30
            )
    if not bool(direction.any()):
        raise FldiagError(
            "the filter-normalised direction is zero: no tensor with two axes has weights",
            "use directions = 'eigen'",
        )
    return direction


def offsets(problems: Sequence[Problem], origin: Problem) -> Tensor:
    """Weights relative to those of ``origin`` [T, P] in float64."""
    return torch.stack([p.w.double() - origin.w.double() for p in problems])


def plane_axes(points: Tensor) -> Tensor:
    """The orthonormal axes [2, P] of the plane through the origin and two points [2, P]; the first points to the first.

    Raises FldiagError where they lie on a line.
    """
    first, second = points
    size = float(first.norm())
    first = first / (size or 1.0)
    for _ in range(2):  # orthogonal to rounding
        second = second - (first @ second) * first
    height = float(second.norm())
    if height <= 1e-6 * max(size, float(points[1].norm())) or not size:
        raise _on_a_line()
    return torch.stack([first, second / height])


def principal_axes(points: Tensor) -> tuple[Tensor, Tensor]:
    """The two leading principal axes of a trajectory of weights (Li et al., NeurIPS 2018, section 7).

    Args:
        points: [T, P], the last one at the end of the trajectory.

    Returns:
        Axes [2, P], along which the first point has no negative coordinate relative to the last; and the share of the
        variance along each [2].

    Raises:
        FldiagError: the points lie on a line.
    """
    centred = points - points.mean(0)
    values, vectors = torch.linalg.eigh((centred @ centred.T).cpu())
    total = float(values.clamp_min(0).sum())
    if total <= 0 or float(values[-2]) <= 1e-12 * total:
        raise _on_a_line()
    axes = plane_axes(vectors[:, [-1, -2]].T.to(points) @ centred)
    signs = torch.where(axes @ (points[0] - points[-1]) < 0, -1.0, 1.0)
    return signs[:, None] * axes, values[[-1, -2]] / total


def _on_a_line() -> FldiagError:
    return FldiagError(
        "the models lie on one line, so they span no plane",
        "choose other checkpoints",
        usage=True,
    )
