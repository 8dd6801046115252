"""Eigenpairs, diagonal and trace of a problem's Hessian.

Where the second derivative of the outputs within a layer vanishes, the layer's block of the Hessian of any loss is its block of
the Gauss-Newton matrix. With eigenvalues l_nc and eigenvectors s_nc of the Hessian of an example's loss in its outputs z_n, that
block's diagonal is the sum over n and c of l_nc times the squared gradients of s_nc^T z_n (Dangel, Kunstner and Hennig, ICLR
2020, DiagGGN); for an affine layer they follow from its inputs and the cotangents of its outputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

from fldiag.curvature.hutchinson import estimates, stderr_of
from fldiag.curvature.lanczos import EigenPairs, lanczos
from fldiag.curvature.operator import finite, pull_back, slopes
from fldiag.problem.data import Function, Tree
from fldiag.problem.problem import Problem
from fldiag.sections import Matrix
from fldiag.seeding import torch_rng

#: Random vectors that are drawn at least, to know their scatter; products for a Krylov space that is counted exactly.
LEAST, STEPS = 10, 20
#: Relative size of a layer's second derivative, or of a difference from a product, that is rounding.
ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-8}
#: Numbers of an example's output, each of which takes a backward pass.
MOST_OUTPUTS = 1000


def eigenpairs(
    problem: Problem,
    k: int,
    *,
    matrix: Matrix = "hessian",
    names: Sequence[str] | None = None,
    **options: Any,
) -> EigenPairs:
    """The k leading eigenpairs of the Hessian (or Gauss-Newton matrix) at the problem's weights.

    Args:
        problem: whose curvature it is.
        k: eigenpairs; all that there are of fewer weights.
        matrix: hessian or ggn.
        names: only the block of these tensors; the vectors have one entry a weight of the block, in order.
        options: of ``lanczos``: which, tol, max_products, miss, strict, seed, progress.

    Returns:
        The eigenpairs.

    Raises:
        FldiagError: a fault that the probe finds, or a product that is not finite.
    """
    operator = problem.hessian(matrix=matrix, names=names)
    # vectors of each of the two sequences
    limit = min(max(100, 3 * k + 20), problem.rows_in_memory(operator.size))
    return lanczos(
        operator,
        operator.size,
        k,
        limit=limit,
        noise=problem.noise,
        device=problem.device,
        dtype=problem.dtype,
        **options,
    )


# -- exact diagonals


def _columns(m: nn.Module, a: Tensor) -> Tensor:
    """The inputs of an affine layer as columns of positions [b, K, L], so that its outputs are W times them; of another layer
    none."""
    if type(m) is nn.Linear:
        return a.reshape(len(a), -1, a.shape[-1]).transpose(1, 2)
    is_plain = type(m) is nn.Conv2d and (m.groups, m.padding_mode) == (1, "zeros")
    if is_plain and type(m.padding) is tuple:
        return F.unfold(a, m.kernel_size, m.dilation, m.padding, m.stride)
    if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d) and m.running_mean is not None:
        return F.batch_norm(a, m.running_mean, m.running_var, eps=m.eps)
    return a[:0]


def _squares(m: nn.Module, a: Tensor, g: Tensor, shares: Tensor) -> dict[str, Tensor]:
    """The sums over examples, with shares [b], of the squared gradients of weight and bias, by those g of the layer's outputs."""
    if isinstance(m, nn.Linear):
        g = g.reshape(len(g), -1, g.shape[-1]).transpose(1, 2)
    g = g.reshape(*g.shape[:2], -1)  # [b, O, L]
    if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d):
        weight = shares @ (g * a.reshape(g.shape)).sum(2).square()
    elif a.shape[2] == 1:  # one position: an outer product squares entry by entry
        weight = (shares * g.square().squeeze(2).T) @ a.square().squeeze(2)
    else:
        weight = torch.tensordot(shares, (g @ a.transpose(1, 2)).square_(), 1)
    return {"weight": weight, "bias": shares @ g.sum(2).square()}


def _eigenpairs_in_outputs(loss: Function, z: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Eigenvalues [b] and eigenvectors [b, ...] of the Hessian of the loss in z [b, ...], example by example."""
    at = z.detach().double().requires_grad_()
    slope = slopes(loss(at), [at], twice=True)
    units = torch.eye(z[0].numel()).to(at)
    columns = [pull_back(slope, [at], [e.view_as(at[0])])[0] for e in units]
    values, vectors = torch.linalg.eigh(torch.stack(columns, -1).reshape(len(z), len(units), -1))
    values = values * (values.abs() > 1e-12 * values.abs().amax(1, keepdim=True))
    pairs = zip(values.to(z).unbind(1), vectors.to(z).unbind(2), strict=True)
    return [(value, vector.reshape(z.shape)) for value, vector in pairs if value.any()]


def ggn_diagonal(
    problem: Problem, layers: Mapping[str, nn.Module], x: Tree, loss: Function
) -> dict[str, Tensor]:
    """The diagonal of the Gauss-Newton matrix of a batch, by the names of the layers' tensors, in float64.

    Layers that are used twice, or not at all, or whose inputs are no arrays of examples, are left out.
    """
    uses: dict[nn.Module, Any] = {m: [] for m in layers.values()}

    def record(m: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Any:
        if m not in uses:
            return out
        out = out if out.requires_grad else out.detach().requires_grad_()
        uses[m].append((_columns(m, inputs[0].detach()), out))
        return out.clone()  # an operation in place must not change the record

    with torch.enable_grad(), problem.guarded(), register_module_forward_hook(record):
        z = problem.call(problem.w, x)
        pairs = _eigenpairs_in_outputs(loss, z)
    used = {n: uses[m][0] for n, m in layers.items() if [len(a) for a, _ in uses[m]] == [len(z)]}
    sums: dict[str, Tensor] = {}
    for values, vectors in pairs if used else ():
        gs = pull_back([z], [out for _, out in used.values()], [vectors])
        for (name, (a, _)), g in zip(used.items(), gs, strict=True):
            for tensor, value in _squares(layers[name], a, g, values).items():
                key = f"{name}.{tensor}".lstrip(".")
                sums[key] = sums.get(key, 0.0) + value.double()
    return sums


def half_square(z: Tensor) -> Tensor:
    """A loss whose Hessian in the outputs of every example is a multiple of the identity."""
    return z.square().sum() / (2 * len(z))


def exact_layers(problem: Problem) -> dict[str, nn.Module]:
    """The layers whose block of the Hessian is their block of the Gauss-Newton matrix.

    Shown numerically on a few examples, layer by layer and at random vectors: the second derivative of a random combination of
    the outputs within the layer vanishes, and the largest entry of its diagonal is that of a Hessian-vector product.

    Args:
        problem: is evaluated at its own weights.

    Returns:
        Name -> layer; empty for a model whose outputs are no tensor, or too many.
    """
    x, _ = problem.sample()
    weights = {n: v.detach().requires_grad_() for n, v in problem.layout.views(problem.w).items()}
    rng, rounding = torch_rng(0, "exact layers"), max(ROUNDING[problem.dtype], problem.noise)

    def random(t: Tensor) -> Tensor:
        return torch.randn(t.shape, generator=rng).to(t)

    with torch.enable_grad():
        z = problem.call(weights, x)
        if problem.by_differences or not isinstance(z, Tensor) or z[0].numel() > MOST_OUTPUTS:
            return {}
        combined, squared = (
            dict(zip(weights, slopes(f, [*weights.values()], twice=True), strict=True))
            for f in ((random(z) * z).sum(), half_square(z))
        )

    def is_linear(names: Sequence[str]) -> bool:
        """Whether the combined outputs have no second derivative within a layer, along a random vector."""
        slope, leaves = ([of[n] for n in names] for of in (combined, weights))
        parts = pull_back(slope, leaves, [*map(random, slope)])
        bend, size = (sum(float(t.detach().norm()) for t in of) for of in (parts, slope))
        return bend <= rounding * size

    def is_diagonal(name: str, values: Tensor) -> bool:
        """Whether the largest of the values is that entry of the derivative of the slope."""
        i = int(values.argmax())
        [column] = slopes(squared[name].reshape(-1)[i], [weights[name]])
        entry = float(column.reshape(-1)[i])
        return abs(entry - float(values.max())) <= rounding * abs(entry)

    modules, tensors = dict(problem.module.named_modules()), problem.layout.layers
    layers = {n: modules[n] for n, names in tensors.items() if is_linear(names)}
    values = ggn_diagonal(problem, layers, x, half_square)
    return {
        layer: m
        for layer, m in layers.items()
        if all(n in values and is_diagonal(n, values[n]) for n in tensors[layer])
    }


def exact_sums(problem: Problem) -> dict[str, Tensor]:
    """The diagonal of the mean loss's Hessian, by name, of the tensors of ``exact_layers``, flat and in float64.

    Raises FldiagError where it is not finite.
    """
    layers, w = exact_layers(problem), problem.layout.views(problem.w.double())
    names = [n for layer in layers for n in problem.layout.layers[layer]]
    sums = {n: torch.full_like(w[n], problem.weight_decay).reshape(-1) for n in names}
    for x, y in problem.batches() if layers else ():
        parts = ggn_diagonal(problem, layers, x, partial(problem.criterion.total, y=y))
        for name in parts.keys() & sums.keys():
            sums[name] += parts[name].reshape(-1) / problem.centre.weight
    return {n: finite(v) for n, v in sums.items()}


# -- the whole diagonal


@dataclass(frozen=True)
class Diagonal:
    """What ``diagonal`` returns.

    Args:
        tensors: name -> its values, flat in float64; their standard errors, 0 where they are exact; and of what is estimated the
            trace of every random vector.
        converged: exact, or the standard error that was asked for is reached.
        products: that were spent.
        noise: relative rounding error of a product.
        by_differences: whether products are differences of gradients.
    """

    tensors: Mapping[str, tuple[Tensor, Tensor, Tensor]]
    converged: bool
    products: int
    noise: float
    by_differences: bool

    def part(self, names: Sequence[str]) -> Diagonal:
        """That of some tensors."""
        return replace(self, tensors={n: self.tensors[n] for n in names})

    @property
    def samples(self) -> list[Tensor]:
        """Of each tensor that is estimated the trace of every random vector."""
        return [traces for *_, traces in self.tensors.values() if len(traces)]

    def is_exact(self) -> bool:
        """Whether no tensor is estimated."""
        return not self.samples

    def estimator(self) -> str:
        """How it was computed."""
        method = "exact" if self.is_exact() else "hutchinson"
        return f"{method}, differences" if self.by_differences else method

    def vectors(self) -> tuple[Tensor, Tensor]:
        """The diagonal [P], and its standard errors [P], which are 0 where it is exact."""
        values, errors, _ = zip(*self.tensors.values(), strict=True)
        return torch.cat(values), torch.cat(errors)

    def trace(self) -> tuple[float, float | None]:
        """The trace and its standard error (None where it is exact)."""
        value = math.fsum(float(values.sum()) for values, *_ in self.tensors.values())
        if self.is_exact():
            return value, None
        samples = torch.stack(self.samples).sum(0)
        return value, math.hypot(stderr_of(samples), self.noise * value)

    def norm(self) -> tuple[float, float | None]:
        """The Euclidean norm, without the part that noise adds to it, and its standard error to first order."""
        size, error = norm(*self.vectors())
        return size, None if self.is_exact() else error


def norm(values: Tensor, stderr: Tensor) -> tuple[float, float]:
    """The Euclidean norm of estimates, without the part that noise adds to it, and its standard error to first order."""
    size = math.sqrt(max(0.0, float(values.square().sum() - stderr.square().sum())))
    spread = float((values * stderr).norm())
    return size, spread / size if size else math.sqrt(2 * spread)


def diagonal(
    problem: Problem,
    *,
    rtol: float = 0.02,
    max_products: int = 200,
    entries: bool = False,
    seed: int = 0,
    progress: Function | None = None,
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
    exact, names = exact_sums(problem), problem.layout.names
    tensors = {n: (v, torch.zeros_like(v), v[:0]) for n, v in exact.items()}
    products, is_close = 0, True
    if rest := [n for n in names if n not in exact]:
        operator = problem.hessian(names=rest)
        if operator.size <= max_products:  # a product an entry
            products, mean = operator.size, problem.dense(rest).diagonal()
            error, traces = torch.zeros_like(mean), mean.new_empty(0, len(rest))
        else:
            steps = min(STEPS, max_products // 2, problem.rows_in_memory(operator.size))
            for mean, error, traces in estimates(
                operator, steps, seed, problem.noise, problem.device
            ):
                sums = sum(float(v.sum()) for v in exact.values()) + traces.sum(1)
                spread, size = stderr_of(sums), abs(float(sums.mean()))
                if entries and len(sums) > 1:
                    spread, size = (
                        float(error.norm()),
                        float(torch.cat([*exact.values(), mean]).norm()),
                    )
                is_close, products = spread <= rtol * size, operator.products
                if progress:
                    progress(products, max_products, "trace by probes")
                if (is_close and len(sums) >= LEAST) or products >= max_products:
                    break
        parts = mean.split(operator.sizes), error.split(operator.sizes), traces.T
        tensors |= zip(rest, zip(*parts, strict=True), strict=True)
    whole = Diagonal(tensors, is_close, products, problem.noise, problem.by_differences)
    return whole.part(names)
