"""The diagonal of a symmetric operator by random signs z: E[z * Hz].

Hutchinson (1990) for the trace, Bekas, Kokiopoulou and Saad (2007) for the diagonal. A Krylov space is counted exactly, which
halves the error of the rest (Meyer et al., "Hutch++", 2021).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fldiag.curvature.lanczos import Krylov
from fldiag.curvature.operator import Curvature, Differences
from fldiag.seeding import torch_rng


def estimates(
    operator: Curvature | Differences, steps: int, seed: int, noise: float, device: torch.device
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Estimates of the diagonal, each with one more product.

    Args:
        operator: the matrix H.
        steps: products for the Krylov space.
        seed: of its start and of the signs.
        noise: relative rounding error of a product.
        device: of the vectors.

    Yields:
        The mean over the random vectors and its standard error [P], and the trace of each vector and tensor [n, tensors].
    """
    space = Krylov(operator.size, noise, device, torch.float64)
    space.append_random(seed, 0)
    while space.done < min(steps, len(space.rows)):
        space.step(operator)
    rows = torch.stack(space.rows)
    q, hq = rows[: space.done], torch.from_numpy(space.coefficients().T).to(rows) @ rows
    # H = (1 - QQ')H(1 - QQ') + QQ'H + HQQ' - QQ'HQQ'
    measured = 2 * (q * hq).sum(0) - (q * ((hq @ q.T) @ q)).sum(0)
    mean, scatter = torch.zeros_like(measured), torch.zeros_like(measured)
    traces: list[Tensor] = []
    while True:
        rng = torch_rng(seed, "hutchinson probe", len(traces))
        z = torch.randint(0, 2, (operator.size,), generator=rng, dtype=torch.float64) * 2 - 1
        z = z.to(q)
        product = operator(z - (q @ z) @ q)
        sample = z * (product - (q @ product) @ q) + measured
        traces.append(torch.stack([part.sum() for part in sample.split(operator.sizes)]))
        n, step = len(traces), sample - mean  # Welford's update
        mean = mean + step / n
        scatter = scatter + step * (sample - mean)
        yield mean, (scatter / max(1, n - 1) / n).sqrt(), torch.stack(traces)


def stderr_of(samples: Tensor) -> float:
    """The standard error of the mean of numbers [n]; infinite of one."""
    return float(samples.std()) / math.sqrt(len(samples)) if len(samples) > 1 else math.inf
