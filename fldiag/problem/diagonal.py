"""The diagonal and the trace of a problem's Hessian: exact where the network's structure allows it, else estimated."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fldiag.choices import Estimate, Per
from fldiag.curvature.hutchinson import Sampled, hutchinson
from fldiag.curvature.lanczos import krylov
from fldiag.curvature.operator import Operator, OperatorBlock, finite
from fldiag.errors import FldiagError
from fldiag.problem.eigenpairs import finite_scores, noise_of
from fldiag.problem.exact_curvature import exact_tensors, examples_at_once, inexact, piece
from fldiag.problem.operators import block_index
from fldiag.problem.problem import Problem
from fldiag.problem.trees import count, cut
from fldiag.registry import Progress
from fldiag.results.table import Row


@dataclass(frozen=True)
class Diagonal:
    """``values`` [P] (None if only traces were asked for) and ``traces`` per tensor name in float64, with standard
    errors (None, in ``stderr`` 0, when exact); ``trace``: of the whole. ``estimator``: exact, hutchinson-deflated or hutchinson;
    ``exact``: the tensors that are exact beside estimated ones.
    ``converged``: exact, or the target was reached (of the diagonal if it was asked for; ``trace_converged``: of the
    trace). ``why``: what kept it from being exact."""

    values: Tensor | None
    stderr: Tensor | None
    traces: dict[str, float]
    trace_stderrs: dict[str, float | None]
    trace: float
    trace_stderr: float | None
    estimator: str
    converged: bool
    products: int
    trace_converged: bool = True
    why: str | None = None
    exact: tuple[str, ...] = ()

    def how(self, names: Collection[str]) -> str:
        """The estimator of a part of these tensors."""
        return "exact" if set(names) <= set(self.exact) else self.estimator


def _exact_sums(
    problem: Problem, names: Collection[str], total: bool, progress: Progress | None
) -> dict[str, Tensor]:
    sums = {
        n: torch.full(
            () if total else shape,
            problem.weight_decay * (shape.numel() if total else 1),
            dtype=torch.float64,
            device=problem.device,
        )
        for n, shape in zip(problem.layout.names, problem.layout.shapes, strict=True)
        if n in names
    }
    only = {n.rpartition(".")[0] for n in sums}
    step = examples_at_once(problem)
    for i, (start, stop) in enumerate(problem.bounds):
        x, y = problem.batch(i)
        for at in range(0, stop - start, step):
            xs, ys = cut(x, slice(at, at + step)), cut(y, slice(at, at + step))
            for name, value in piece(problem, xs, ys, total, only=only).items():
                if name in sums:
                    sums[name].add_(value, alpha=count(xs) / problem.n)
        if progress:
            progress(stop, problem.n, "exact trace" if total else "exact diagonal")
    odd = next((n for n, v in sums.items() if not bool(torch.isfinite(v).all())), None)
    if odd:
        raise FldiagError(
            f"the curvature of {odd} on slice {problem.slice_name!r} is not finite",
            "use dtype float64, or weights from before the training diverged",
        )
    return sums


def _exact_diagonal(
    names: Sequence[str], sums: Mapping[str, Tensor], entries: bool, estimator: str, products: int
) -> Diagonal:
    """From the exact diagonal, or trace, of every tensor."""
    traces = {n: float(sums[n].sum()) for n in names}
    return Diagonal(
        torch.cat([sums[n].reshape(-1) for n in names]) if entries else None,
        None,
        traces,
        dict.fromkeys(names),
        math.fsum(traces.values()),
        None,
        estimator,
        True,
        products,
        exact=tuple(names),
    )


def _sums_by_products(
    problem: Problem,
    h: Operator | OperatorBlock,
    names: Sequence[str],
    progress: Progress | None,
) -> dict[str, Tensor]:
    """The diagonal on the tensors ``names``, one product with a unit vector an entry."""
    entries = torch.zeros(h.size, dtype=torch.float64, device=problem.device)
    unit = torch.zeros_like(entries)
    for i in range(h.size):
        unit[i] = 1.0
        entries[i] = finite(h(unit))[i]
        unit[i] = 0.0
        if progress:
            progress(i + 1, h.size, "exact diagonal by products")
    shapes = dict(zip(problem.layout.names, problem.layout.shapes, strict=True))
    pieces = entries.split([shapes[n].numel() for n in names])
    return {n: piece.reshape(shapes[n]) for n, piece in zip(names, pieces, strict=True)}


def diagonal_of(
    problem: Problem,
    *,
    entries: bool = True,
    estimate: Estimate = "auto",
    rtol: float = 0.02,
    max_products: int = 200,
    deflate: int = 20,
    seed: int = 0,
    progress: Progress | None = None,
) -> Diagonal:
    """Diagonal (with ``entries``) and per-tensor traces of the Hessian at ``problem.w``.

    ``auto``: exact if the network is piecewise linear in each layer's weights (``inexact`` says what is in the
    way) or has at most ``max_products`` weights (a product each); else exact for the tensors in which its outputs are affine, and
    for the others by random probes until the relative
    standard error is at most ``rtol`` or ``max_products`` Hessian-vector products are spent, the first ``deflate`` of them
    for a Krylov space that is counted exactly.

    Raises FldiagError when ``exact`` is asked for and not possible, or loss or curvature are not finite.
    """
    if not 0 < rtol < 1 or max_products < 2 or deflate < 0:
        raise FldiagError(
            f"no estimate with rtol = {rtol}, max_products = {max_products}, deflate = {deflate}",
            "0 < rtol < 1, max_products at least 2, deflate at least 0",
            usage=True,
        )
    finite_scores(problem)
    why = "it was not asked for" if estimate == "hutchinson" else inexact(problem)
    if why and estimate == "exact" and problem.layout.size > max_products:
        raise FldiagError(
            f"the exact diagonal is not known for this model: {why}", "use estimate = 'auto'"
        )
    names = problem.layout.names
    exact = () if estimate == "hutchinson" else exact_tensors(problem)
    sums = _exact_sums(problem, exact, not entries, progress) if exact else {}
    rest = [n for n in names if n not in exact]
    if not rest:
        return _exact_diagonal(names, sums, entries, "exact", 0)
    hessian = problem.hessian()
    h = OperatorBlock(hessian, block_index(problem, rest)) if exact else hessian
    if estimate != "hutchinson" and h.size <= max_products:
        sums |= _sums_by_products(problem, h, rest, progress)
        estimator = problem.estimator_name("exact")
        return _exact_diagonal(names, sums, entries, estimator, hessian.products)
    traces = {n: float(sums[n].sum()) for n in exact}
    s, how = _sampled(problem, h, rest, entries, rtol, max_products, deflate, seed, progress)
    errors = dict(zip(rest, s.stderrs.tolist()[:-1], strict=True))
    traces |= dict(zip(rest, s.traces.tolist()[:-1], strict=True))
    trace, error = math.fsum(traces[n] for n in exact) + float(s.traces[-1]), float(s.stderrs[-1])
    reached = error <= rtol * abs(trace)
    return Diagonal(
        _assemble(problem, rest, s.diagonal, sums),
        _assemble(problem, rest, s.diagonal_stderr, {}),
        traces,
        dict.fromkeys(names) | errors,
        trace,
        error,
        how,
        s.converged if entries else reached,
        hessian.products,
        reached,
        why,
        exact,
    )


def _sampled(
    problem: Problem,
    h: Operator | OperatorBlock,
    names: Sequence[str],
    entries: bool,
    rtol: float,
    max_products: int,
    deflate: int,
    seed: int,
    progress: Progress | None,
) -> tuple[Sampled, str]:
    """Traces (and the diagonal) of the operator on these tensors by random probes, and the estimator's name."""
    size = h.size
    count = min(deflate, size, max_products // 2, max(0, problem.memory // 4 // (8 * size)))

    def tell(before: int) -> Callable[[int], None] | None:
        return progress and (
            lambda done: progress(min(before + done, max_products), max_products, "trace by probes")
        )

    space = None
    if count:
        space = krylov(
            h,
            size,
            count,
            noise=noise_of(problem),
            seed=seed,
            device=problem.device,
            progress=tell(0),
        )
    slices = problem.layout.slices()
    groups = torch.arange(size, device=problem.device).split(
        [slices[n].stop - slices[n].start for n in names]
    )
    sampled = hutchinson(
        h,
        size,
        groups,
        krylov=space,
        rtol=rtol,
        most=max_products - h.products,
        diagonal=entries,
        seed=seed,
        device=problem.device,
        progress=tell(h.products),
    )
    return sampled, problem.estimator_name("hutchinson-deflated" if space else "hutchinson")


def _assemble(
    problem: Problem, names: Sequence[str], sampled: Tensor | None, exact: Mapping[str, Tensor]
) -> Tensor | None:
    """The vector [P] of the entries sampled on the tensors ``names``, and of the exact ones (default: 0)."""
    if sampled is None:
        return None
    vector = sampled.new_zeros(problem.layout.size)
    slices = problem.layout.slices()
    vector[block_index(problem, names)] = sampled
    for name, value in exact.items():
        vector[slices[name]] = value.reshape(-1)
    return vector


def trace_rows(problem: Problem, d: Diagonal, per: Per) -> list[Row]:
    """The trace of the whole and of every layer (a module's weight and bias) or tensor."""
    rows: list[Row] = [
        {
            "metric": "trace",
            "estimator": d.estimator,
            "value": d.trace,
            "stderr": d.trace_stderr,
            "converged": d.trace_converged,
        }
    ]
    for label, names in parts(problem, per).items():
        # the tensors' estimates share their probes, so their errors may add up
        errors = [e for e in (d.trace_stderrs[n] for n in names) if e is not None]
        rows.append(
            {
                "metric": "trace",
                "estimator": d.how(names),
                "layer": label,
                "value": math.fsum(d.traces[n] for n in names),
                "stderr": math.fsum(errors) if errors else None,
            }
        )
    return rows


def parts(problem: Problem, per: Per) -> dict[str, tuple[str, ...]]:
    """Label -> tensor names."""
    if per == "tensor":
        return {n: (n,) for n in problem.layout.names}
    return {label or "(model)": names for label, names in problem.layout.layers.items()}


def norm(values: Tensor, stderr: Tensor | None) -> tuple[float, float | None]:
    """The Euclidean norm without the part that noise adds to it (0 where it is all noise), and its standard error to first
    order."""
    square = float(values.square().sum())
    if stderr is None:
        return math.sqrt(square), None
    noise = stderr.square()
    size = math.sqrt(max(0.0, square - float(noise.sum())))
    spread = math.sqrt(float((4 * values.square() * noise).sum()))
    return size, spread / (2 * size) if size else math.sqrt(spread)
