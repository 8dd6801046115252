"""Diagonal and trace of a problem's Hessian: exact for the layers where they are known, else by random signs.

Hutchinson (1990) for the trace, Bekas, Kokiopoulou and Saad (2007) for the diagonal: E[z * Hz] with random signs z. A Krylov
space is counted exactly, which halves the error of the rest (Meyer et al., "Hutch++", 2021).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fldiag.curvature.lanczos import Krylov
from fldiag.problem.exact import exact_sums
from fldiag.problem.problem import Problem
from fldiag.seeding import torch_rng

#: Probes that are drawn at least, to know their scatter; products for a Krylov space that is counted exactly.
LEAST, STEPS = 10, 20


@dataclass(frozen=True)
class Diagonal:
    """What ``diagonal`` returns, by tensor.

    Args:
        values: the diagonal, flat in float64.
        stderr: standard errors of its entries; of the exact tensors 0.
        samples: the trace of every random probe; of the exact tensors none.
        exact: the names of the exact tensors.
        converged: exact, or the standard error that was asked for is reached.
        products: that were spent.
        noise: relative rounding error of a product.
    """

    values: dict[str, Tensor]
    stderr: dict[str, Tensor]
    samples: dict[str, Tensor]
    exact: frozenset[str]
    converged: bool
    products: int
    noise: float

    def is_exact(self, names: Sequence[str] | None = None) -> bool:
        """Whether these tensors (default: all) are exact."""
        return self.exact >= set(names or self.values)

    def estimator(self, names: Sequence[str] | None = None) -> str:
        """How these tensors' part (default: all) was computed."""
        return "exact" if self.is_exact(names) else "hutchinson"

    def vector(self) -> Tensor:
        """The diagonal [P]."""
        return torch.cat(list(self.values.values()))

    def vector_stderr(self) -> Tensor | None:
        """Its standard errors [P]; None where all of it is exact."""
        return None if self.is_exact() else torch.cat(list(self.stderr.values()))

    def trace(self, names: Sequence[str] | None = None) -> tuple[float, float | None]:
        """The trace over these tensors (default: all), and its standard error (None where it is exact)."""
        names = list(names or self.values)
        value = math.fsum(float(self.values[n].sum()) for n in names)
        samples = [self.samples[n] for n in names if n not in self.exact]
        if not samples:
            return value, None
        sums = torch.stack(samples).sum(0)
        scatter = float(sums.std()) / math.sqrt(len(sums)) if len(sums) > 1 else math.inf
        return value, math.hypot(scatter, self.noise * value)

    def norm(self, names: Sequence[str] | None = None) -> tuple[float, float | None]:
        """The Euclidean norm, without the part that noise adds to it, and its standard error to first order."""
        values, stderr = (
            torch.cat([part[n] for n in names or self.values])
            for part in (self.values, self.stderr)
        )
        return (float(values.norm()), None) if self.is_exact(names) else norm(values, stderr)


def _exact(names: Sequence[str], sums: dict[str, Tensor], products: int) -> Diagonal:
    values = {n: sums[n] for n in names}
    zeros = {n: torch.zeros_like(v) for n, v in values.items()}
    return Diagonal(values, zeros, {}, frozenset(names), True, products, 0.0)


def norm(values: Tensor, stderr: Tensor) -> tuple[float, float]:
    """The Euclidean norm of estimates, without the part that noise adds to it, and its standard error to first order."""
    size = math.sqrt(max(0.0, float(values.square().sum() - stderr.square().sum())))
    spread = 2 * float((values * stderr).norm())
    return size, spread / (2 * size) if size else math.sqrt(spread)


def diagonal(
    problem: Problem,
    *,
    rtol: float = 0.02,
    max_products: int = 200,
    entries: bool = False,
    seed: int = 0,
    progress: Callable[[int, int, str], None] | None = None,
) -> Diagonal:
    """The diagonal of the Hessian at the problem's weights.

    Args:
        problem: whose Hessian it is.
        rtol: target of the relative standard error of the trace, where it is estimated.
        max_products: Hessian-vector products that the estimate may spend.
        entries: the target is that of the whole diagonal instead, in the norm.
        seed: of the random signs.
        progress: is called with (done, total, what is done).

    Returns:
        The diagonal, with standard errors.

    Raises:
        FldiagError: the loss or its curvature is not finite.
    """
    assert math.isfinite(problem.centre.loss)
    sums = exact_sums(problem, progress)
    layout = problem.layout
    rest = [n for n in layout.names if n not in sums]
    stderr = {n: torch.zeros_like(v) for n, v in sums.items()}
    if not rest:
        return _exact(layout.names, sums, 0)
    operator = problem.hessian(names=rest)
    sizes = [layout.shapes[layout.names.index(n)].numel() for n in rest]
    if operator.size <= max_products:  # a product an entry
        unit = torch.eye(operator.size, dtype=torch.float64).to(problem.device)
        values = torch.stack([operator(row)[i] for i, row in enumerate(unit)])
        sums |= dict(zip(rest, values.split(sizes), strict=True))
        return _exact(layout.names, sums, operator.products)
    space = Krylov(operator.size, problem.noise, problem.device, torch.float64)
    space.append_random(seed, 0)
    room = problem.memory // 4 // (8 * operator.size)
    while space.done < min(STEPS, max_products // 2, len(space.rows), room):
        space.step(operator)
    rows = torch.stack(space.rows)
    q = rows[: space.done]
    hq = torch.from_numpy(space.coefficients().T).to(rows) @ rows
    # H = (1 - QQ')H(1 - QQ') + QQ'H + HQQ' - QQ'HQQ'
    measured = 2 * (q * hq).sum(0) - (q * ((hq @ q.T) @ q)).sum(0)
    known = math.fsum(float(v.sum()) for v in sums.values())
    fixed = math.fsum(float(v.square().sum()) for v in sums.values())
    samples: list[Tensor] = []
    mean, scatter = torch.zeros_like(measured), torch.zeros_like(measured)
    error = math.inf
    while operator.products < max(max_products, 2):
        rng = torch_rng(seed, "hutchinson probe", len(samples))
        z = torch.randint(0, 2, (operator.size,), generator=rng, dtype=torch.float64) * 2 - 1
        z = z.to(problem.device)
        product = operator(z - (q @ z) @ q)
        sample = z * (product - (q @ product) @ q) + measured
        samples.append(torch.stack([part.sum() for part in sample.split(sizes)]))
        step = sample - mean  # Welford's update
        mean = mean + step / len(samples)
        scatter = scatter + step * (sample - mean)
        if progress:
            progress(operator.products, max_products, "trace by probes")
        n = len(samples)
        if n < 2:
            continue
        spread = (scatter / (n - 1) / n).sqrt()
        traces = torch.stack(samples).sum(1)
        if entries:
            error = float(spread.norm()) / max(math.hypot(float(mean.norm()), fixed**0.5), 1e-300)
        else:
            trace = abs(known + float(traces.mean()))
            error = float(traces.std()) / math.sqrt(n) / max(trace, 1e-300)
        if n >= LEAST and error <= rtol:
            break
    spread = (scatter / max(1, len(samples) - 1) / len(samples)).sqrt()
    parts = zip(rest, mean.split(sizes), spread.split(sizes), torch.stack(samples).T, strict=True)
    by_name = {n: part for n, *part in parts}
    return Diagonal(
        {n: sums[n] if n in sums else by_name[n][0] for n in layout.names},
        {n: stderr[n] if n in sums else by_name[n][1] for n in layout.names},
        {n: by_name[n][2] for n in rest},
        frozenset(sums),
        error <= rtol,
        operator.products,
        problem.noise,
    )
