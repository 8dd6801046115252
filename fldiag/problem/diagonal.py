"""Diagonal and trace of a problem's Hessian: exact for the layers where they are known, else by random signs.

Where the second derivative of the outputs within a layer vanishes, the layer's block of the Hessian of any loss is its block of
the Gauss-Newton matrix. With eigenvalues l_nc and eigenvectors s_nc of the Hessian of an example's loss in its outputs z_n, that
block's diagonal is the sum over n and c of l_nc times the squared gradients of s_nc^T z_n (Dangel, Kunstner and Hennig, ICLR
2020, DiagGGN); for an affine layer they follow from its inputs and the cotangents of its outputs.

Elsewhere: Hutchinson (1990) for the trace, Bekas, Kokiopoulou and Saad (2007) for the diagonal: E[z * Hz] with random signs z. A
Krylov space is counted exactly, which halves the error of the rest (Meyer et al., "Hutch++", 2021).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

from fldiag.curvature.lanczos import Krylov
from fldiag.curvature.operator import Curvature, Differences, finite, pull_back
from fldiag.problem.data import Tree
from fldiag.problem.problem import Problem
from fldiag.seeding import torch_rng

#: Probes that are drawn at least, to know their scatter; products for a Krylov space that is counted exactly.
LEAST, STEPS = 10, 20
#: Relative size of a layer's second derivative, or of a difference from a product, that is rounding.
ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-8}
GRAPH: dict[str, Any] = {"create_graph": True, "materialize_grads": True}
#: Numbers of an example's output, each of which takes a backward pass.
MOST_OUTPUTS = 1000


def _inputs(m: nn.Module, a: Tensor) -> Tensor:
    """The inputs of an affine layer with columns of positions [b, K, L], so that its outputs are W times them; of another layer
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


def _eigenpairs(loss: Callable[[Tensor], Tensor], z: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Eigenvalues [b] and eigenvectors [b, ...] of the Hessian of the loss in z [b, ...], example by example."""
    at = z.detach().double().requires_grad_()
    slope = grad(loss(at), at, create_graph=True)[0]
    if not slope.requires_grad:  # linear in the outputs
        return []
    units = torch.eye(z[0].numel()).to(at)
    columns: Any = [pull_back([slope], [at], [e.view_as(at[0])])[0] for e in units]
    values, vectors = torch.linalg.eigh(torch.stack(columns, -1).reshape(len(z), len(units), -1))
    values = values * (values.abs() > 1e-12 * values.abs().amax(1, keepdim=True))
    pairs = zip(values.to(z).unbind(1), vectors.to(z).unbind(2), strict=True)
    return [(value, vector.reshape(z.shape)) for value, vector in pairs if value.any()]


def ggn_diagonal(
    problem: Problem, layers: Mapping[str, nn.Module], x: Tree, loss: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """The diagonal of the Gauss-Newton matrix of a batch, by the names of the layers' tensors, in float64.

    Layers that are used twice, or not at all, or whose inputs are no arrays of examples, are left out.
    """
    uses: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {m: [] for m in layers.values()}

    def record(m: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Any:
        if m not in uses:
            return out
        out = out if out.requires_grad else out.detach().requires_grad_()
        uses[m].append((_inputs(m, inputs[0].detach()), out))
        return out.clone()  # an operation in place must not change the record

    with torch.enable_grad(), problem.guarded(), register_module_forward_hook(record):
        z = problem.call(problem.w, x)
        pairs = _eigenpairs(loss, z)
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
    with torch.enable_grad():
        z = problem.call(weights, x)
        if problem.by_differences or not isinstance(z, Tensor) or z[0].numel() > MOST_OUTPUTS:
            return {}
        u = torch.randn(z.shape, generator=rng).to(z)
        slopes, squares = (
            dict(zip(weights, grad(f, [*weights.values()], **GRAPH), strict=True))
            for f in ((u * z).sum(), half_square(z))
        )

    def is_linear(names: Sequence[str]) -> bool:
        """Whether the combined outputs have no second derivative within a layer, along a random vector."""
        curved = [n for n in names if slopes[n].requires_grad]
        outer, inner = ([of[n] for n in curved] for of in (slopes, weights))
        vectors = [torch.randn(t.shape, generator=rng).to(t) for t in outer]
        parts = pull_back(outer, inner, vectors) if curved else ()
        size = sum(float(slopes[n].detach().norm()) for n in names)
        return sum(float(p.norm()) for p in parts if p is not None) <= rounding * size

    def is_so(name: str) -> bool:
        """Whether the largest entry of a diagonal is that of the derivative of the slope."""
        entries = squared[name].reshape(-1)
        i = int(entries.argmax())
        column = grad(squares[name].reshape(-1)[i], weights[name], retain_graph=True)[0]
        entry = float(column.reshape(-1)[i])
        return abs(entry - float(entries[i])) <= rounding * abs(entry)

    modules, tensors = dict(problem.module.named_modules()), problem.layout.layers
    layers = {n: modules[n] for n in tensors if n in modules and is_linear(tensors[n])}
    squared = ggn_diagonal(problem, layers, x, half_square)
    return {
        layer: m
        for layer, m in layers.items()
        if all(n in squared and is_so(n) for n in tensors[layer])
    }


def exact_sums(problem: Problem) -> dict[str, Tensor]:
    """The diagonal of the mean loss's Hessian, by name, of the tensors of ``exact_layers``, flat and in float64.

    Raises FldiagError where it is not finite.
    """
    layers, views = exact_layers(problem), problem.layout.views(problem.w.double())
    names = [n for layer in layers for n in problem.layout.layers[layer]]
    sums = {n: torch.full_like(views[n].reshape(-1), problem.weight_decay) for n in names}
    for x, y in problem.batches() if layers else ():
        parts = ggn_diagonal(problem, layers, x, lambda z, y=y: problem.criterion.total(z, y))  # type: ignore[misc]
        for name in parts.keys() & sums.keys():
            sums[name] += parts[name].reshape(-1) / problem.weight
    return {n: finite(v) for n, v in sums.items()}


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

    def vector_stderr(self) -> Tensor:
        """Its standard errors [P]; 0 where it is exact."""
        return torch.cat(list(self.stderr.values()))

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
        parts = (
            torch.cat([p[n] for n in names or self.values]) for p in (self.values, self.stderr)
        )
        size, error = norm(*parts)
        return size, None if self.is_exact(names) else error


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
    names, values = problem.layout.names, exact_sums(problem)
    errors = {n: torch.zeros_like(v) for n, v in values.items()}
    rest = [n for n in names if n not in values]
    samples, products, is_close = dict[str, Tensor](), 0, True
    if rest:
        operator = problem.hessian(names=rest)
        fixed = torch.cat([*values.values(), problem.w.new_zeros(1).double()])
        if operator.size <= max_products:  # a product an entry
            unit = torch.eye(operator.size, dtype=torch.float64).to(problem.device)
            mean = torch.stack([operator(row)[i] for i, row in enumerate(unit)])
            error = torch.zeros_like(mean)
        else:
            space = Krylov(operator.size, problem.noise, problem.device, torch.float64)
            space.append_random(seed, 0)
            room = problem.memory // 4 // (8 * operator.size)
            while space.done < min(STEPS, max_products // 2, len(space.rows), room):
                space.step(operator)
            for mean, error, probes in _probes(operator, space, seed):
                n, traces = len(probes), fixed.sum() + probes.sum(1)
                spread = float(traces.std()) / math.sqrt(n) if n > 1 else math.inf
                size = abs(float(traces.mean()))
                if entries and n > 1:
                    spread, size = float(error.norm()), float(torch.cat([fixed, mean]).norm())
                is_close = spread <= rtol * size
                if progress:
                    progress(operator.products, max_products, "trace by probes")
                if (is_close and n >= LEAST) or operator.products >= max_products:
                    break
            samples = dict(zip(rest, probes.T, strict=True))
        values |= dict(zip(rest, mean.split(operator.sizes), strict=True))
        errors |= dict(zip(rest, error.split(operator.sizes), strict=True))
        products = operator.products
    return Diagonal(
        {n: values[n] for n in names},
        {n: errors[n] for n in names},
        samples,
        frozenset(names) - samples.keys(),
        is_close,
        products,
        problem.noise,
    )


def _probes(
    operator: Curvature | Differences, space: Krylov, seed: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """After each random vector: mean and standard error of the diagonal [P], and the traces by vector and tensor [n, T]."""
    rows = torch.stack(space.rows)
    q, hq = rows[: space.done], torch.from_numpy(space.coefficients().T).to(rows) @ rows
    # H = (1 - QQ')H(1 - QQ') + QQ'H + HQQ' - QQ'HQQ'
    measured = 2 * (q * hq).sum(0) - (q * ((hq @ q.T) @ q)).sum(0)
    mean, scatter = torch.zeros_like(measured), torch.zeros_like(measured)
    samples: list[Tensor] = []
    while True:
        rng = torch_rng(seed, "hutchinson probe", len(samples))
        z = torch.randint(0, 2, (operator.size,), generator=rng, dtype=torch.float64) * 2 - 1
        z = z.to(q)
        product = operator(z - (q @ z) @ q)
        sample = z * (product - (q @ product) @ q) + measured
        samples.append(torch.stack([part.sum() for part in sample.split(operator.sizes)]))
        n, step = len(samples), sample - mean  # Welford's update
        mean = mean + step / n
        scatter = scatter + step * (sample - mean)
        yield mean, (scatter / max(1, n - 1) / n).sqrt(), torch.stack(samples)
