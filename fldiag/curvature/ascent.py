"""How far a function rises within a ball: projected gradient ascent with normalised steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

#: Length of the first step in radii: long enough that the projection leaves little of where it began, as in the power method.
LONGEST = 8.0
#: A step that does not rise is shortened by this factor.
SHORTENED = 0.25


@dataclass(frozen=True)
class Ascent:
    """``rise`` above the centre at ``point`` [P] of the ball, the largest that was met (0 at the centre); ``gradients`` that were
    taken. ``converged``: the last steps added less than the tolerance."""

    rise: float
    point: Tensor
    gradients: int
    converged: bool


def climb(
    rise: Callable[[Tensor], float],
    gradient: Callable[[Tensor], Tensor],
    radius: float,
    start: Tensor,
    *,
    steps: int = 10,
    tol: float = 1e-3,
) -> Ascent:
    """The largest rise f(u) - f(0) over ||u||_2 <= radius that an ascent from ``start`` meets: a lower bound of the maximum.

    A step goes from u to the projection of u + s g / ||g|| on the ball, and counts only if it rises; else s is shortened. On a
    convex quadratic long steps are those of the power method, so they end at the maximum but for starts of measure zero.

    Args:
        rise: u [P] -> f(u) - f(0).
        gradient: u [P] -> the gradient of f [P].
        radius: of the ball.
        start: where the ascent begins [P], within the ball.
        steps: gradients at most.
        tol: an ascent ends when a step adds less than this share of the rise.

    >>> curvatures = torch.tensor([4.0, 1.0, -9.0])
    >>> top = climb(lambda u: float(curvatures @ u**2) / 2, lambda u: curvatures * u, 0.5, torch.full((3,), 0.2), steps=50)
    >>> round(top.rise, 3), top.converged
    (0.5, True)
    """
    u, height, step, gradients = start, rise(start), LONGEST * radius, 0
    converged = False
    while gradients < steps and not converged and math.isfinite(height):
        g = gradient(u)
        gradients += 1
        size = float(torch.linalg.vector_norm(g))
        if not 0 < size < math.inf:
            converged = size == 0
            break
        while step > tol * radius:
            next_u = project(u + step / size * g, radius)
            next_height = rise(next_u)
            if next_height > height:
                break
            step *= SHORTENED
        else:
            converged = True
            break
        converged = next_height - height <= tol * next_height
        u, height = next_u, next_height
    if height > 0:
        return Ascent(height, u, gradients, converged)
    return Ascent(0.0, torch.zeros_like(start), gradients, converged)


def project(u: Tensor, radius: float) -> Tensor:
    """The nearest point of the ball around 0."""
    size = float(torch.linalg.vector_norm(u))
    return u if size <= radius else u * (radius / size)
