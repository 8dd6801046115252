"""Langevin dynamics around a point: samples of exp(-f(w) - pull/2 ||w - start||^2), and whether chains of them agree.

Welling and Teh (ICML 2011), in the localised form of Lau et al. (arXiv 2308.12108) with a constant step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor


def langevin(
    gradient: Callable[[Tensor], Tensor],
    start: Tensor,
    step: float,
    pull: float,
    rng: torch.Generator,
) -> Iterator[Tensor]:
    """States after 1, 2, ... steps w <- w - step/2 (gradient(w) + pull (w - start)) + N(0, step I), without end.

    Args:
        gradient: w -> the gradient of f, or an unbiased estimate of it.
        start: [P], or one row a chain [K, P].
        step: in units of squared weights.
        pull: strength of the localising term.
        rng: of the CPU, so that the noise does not depend on the device.

    >>> chain = langevin(lambda w: 3 * w, torch.ones(2).double(), 0.5, 1.0, torch.Generator().manual_seed(0))
    >>> next(chain).shape
    torch.Size([2])
    """
    w = start.clone()
    while True:
        noise = torch.randn(w.shape, dtype=torch.float64, generator=rng).to(w)
        w = w - step / 2 * (gradient(w) + pull * (w - start)) + math.sqrt(step) * noise
        yield w


def inflation(curvature: float, step: float, gradient_variance: float = 0.0) -> float:
    """By what share such a chain has too large a variance in a direction of f + pull/2 ||w - start||^2 with this curvature.

    Exact on a quadratic: w <- (1 - step c/2) w + noise has the variance (step + step^2 s/4) / (step c - step^2 c^2/4), with s the
    variance of the estimated gradient along the direction; as step -> 0 it is 1/c. Infinite from step c = 4 on.

    >>> inflation(2.0, 0.2)
    0.11111111111111116
    """
    if step * curvature >= 4:
        return math.inf
    return (1 + step * gradient_variance / 4) / (1 - step * curvature / 4) - 1


def split_r_hat(chains: Tensor) -> float:
    """The potential scale reduction of chains [K, N] of one number, each split in halves so that a drift counts as well.

    sqrt(((N - 1)/N W + B/N) / W) with W the mean variance within halves of length N, and B/N the variance of their means
    (Gelman and Rubin 1992). 1 where they agree; 1 too where no number changes.

    >>> split_r_hat(torch.tensor([[0.0, 1, 0, 1], [5, 6, 5, 6]])) > 3
    True
    """
    half = chains.shape[1] // 2
    halves = torch.cat([chains[:, :half], chains[:, -half:]]).double()
    within = float(halves.var(1).mean())
    between = float(halves.mean(1).var())
    if within == 0:
        return 1.0 if between == 0 else math.inf
    return math.sqrt((half - 1) / half + between / within)
