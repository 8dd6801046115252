"""Trace and diagonal of an operator from products with random signs, beside a part that is computed exactly.

E[z^T A z] = tr A and E[z * A z] = diag A for random signs z (Hutchinson 1990; Bekas, Kokiopoulou and Saad 2007).
The variance comes from what is off the diagonal, so the part of A that a few Lanczos steps have measured is
counted exactly and only the rest is sampled (as in Hutch++; Meyer et al. 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fldiag.curvature.basis import Krylov
from fldiag.curvature.operator import finite
from fldiag.seeding import torch_rng

#: Fewer samples say too little about their own scatter.
LEAST = 10


@dataclass(frozen=True)
class Sampled:
    """``diagonal`` [P] with ``diagonal_stderr`` [P] (None unless asked for); per group and last of all for the
    whole: ``traces`` [groups + 1] with ``stderrs``. ``converged``: the target was reached."""

    traces: Tensor
    stderrs: Tensor
    diagonal: Tensor | None
    diagonal_stderr: Tensor | None
    probes: int
    converged: bool


def hutchinson(
    operator: Callable[[Tensor], Tensor],
    size: int,
    groups: Sequence[Tensor],
    *,
    krylov: Krylov | None = None,
    rtol: float = 0.02,
    most: int = 200,
    diagonal: bool = False,
    seed: int = 0,
    device: str | torch.device = "cpu",
    progress: Callable[[int], None] | None = None,
) -> Sampled:
    """Trace of the symmetric operator [P] -> [P], of its blocks on the index sets ``groups``, and its diagonal.

    Samples until the standard error is at most ``rtol`` times the trace (with ``diagonal``: the norm of the
    diagonal's standard errors at most ``rtol`` times its norm), at least ``LEAST``, at most ``most`` times.
    """
    zero = torch.zeros(size, dtype=torch.float64, device=device)
    exact = zero if krylov is None else krylov.diagonal()
    sums = _Sums(exact, groups)
    vectors = _Sums(exact, None) if diagonal else None
    count = 0
    while count < (0 if krylov is not None and krylov.dimension >= size else max(most, 2)):
        rng = torch_rng(seed, "hutchinson probe", count)
        z = (torch.randint(0, 2, (size,), generator=rng, dtype=torch.float64) * 2 - 1).to(device)
        product = finite(
            operator(z if krylov is None else krylov.project(z)).to(device, torch.float64)
        )
        sample = z * (product if krylov is None else krylov.project(product))
        sums.add(sample)
        if vectors is not None:
            vectors.add(sample)
        count += 1
        if progress:
            progress(count)
        if count >= LEAST and (vectors or sums).error() <= rtol:
            break
    converged = (vectors or sums).error() <= rtol
    return Sampled(
        sums.mean(),
        sums.stderr(),
        None if vectors is None else vectors.mean(),
        None if vectors is None else vectors.stderr(),
        count,
        converged,
    )


class _Sums:
    """Running mean and scatter of samples, as they are or summed over groups and over all."""

    def __init__(self, exact: Tensor, groups: Sequence[Tensor] | None):
        self._groups, self.count = groups, 0
        self._exact = self._reduce(exact)
        self._mean, self._scatter = torch.zeros_like(self._exact), torch.zeros_like(self._exact)

    def _reduce(self, v: Tensor) -> Tensor:
        if self._groups is None:
            return v
        return torch.stack([v[g].sum() for g in self._groups] + [v.sum()])

    def add(self, sample: Tensor) -> None:
        """Welford's update."""
        value = self._reduce(sample)
        self.count += 1
        step = value - self._mean
        self._mean = self._mean + step / self.count
        self._scatter = self._scatter + step * (value - self._mean)

    def mean(self) -> Tensor:
        return self._exact + self._mean

    def stderr(self) -> Tensor:
        return (self._scatter / max(1, self.count - 1) / max(1, self.count)).sqrt()

    def error(self) -> float:
        """Relative: of the whole trace, or of the vector in the norm."""
        mean, stderr = self.mean(), self.stderr()
        if self._groups is not None:
            mean, stderr = mean[-1:], stderr[-1:]
        return float(stderr.norm()) / max(float(mean.norm()), 1e-300)
