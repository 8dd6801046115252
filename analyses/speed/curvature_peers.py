"""The tools that curvature.py compares, behind one interface: a case goes in, an answer comes out.

Every answer starts from a module and tensors, so what a tool prepares (graphs, checks) counts. Each peer runs in
its fastest form: one batch, no check of determinism, its own stopping rules at the tolerance asked for.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fldiag import Problem
from fldiag.curvature.lanczos import quadrature
from fldiag.problem.hessian import diagonal, eigenpairs

TOL = 1e-3
STEPS = 30  # of the density
PROBES = 30  # of the estimators that have no default
PRODUCTS = 10  # in the job that only multiplies


@dataclass
class Answer:
    """``value``: eigenvalues in descending order, upper edge of the density, trace or diagonal. ``products``: Hessian-
    vector products spent (None: none, or not known). ``note``: what a reader must know of this answer."""

    value: Any
    products: int | None = None
    note: str = ""


@dataclass
class Tool:
    """``jobs``: name -> f(module, x, y, seed). ``magnitude``: its eigenvalues are the largest in magnitude."""

    name: str
    package: str
    jobs: dict[str, Callable[[nn.Module, Tensor, Tensor, int], Answer]] = field(
        default_factory=dict
    )
    magnitude: bool = False

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None

    def job(self, *names: str) -> Callable[[Any], Any]:
        def add(function: Any) -> Any:
            self.jobs.update(dict.fromkeys(names, function))
            return function

        return add

    def prepare(
        self, job: str, module: nn.Module, x: Tensor, y: Tensor, seed: int
    ) -> Callable[[], Answer]:
        """The job on a copy of its own: some tools leave gradients, and graphs in them."""
        own = copy.deepcopy(module).eval()
        torch.manual_seed(seed)
        return lambda: self.jobs[job](own, x, y, seed)


# ---- fldiag

FLDIAG = Tool("fldiag", "fldiag")


def _multiply(prepared: Callable[[nn.Module, Tensor, Tensor], Callable[[Tensor], Any]]) -> Any:
    """Ten products with one vector, with what they need beforehand."""

    def run(module: nn.Module, x: Tensor, y: Tensor, seed: int) -> Answer:
        product, v = (
            prepared(module, x, y),
            torch.randn(sum(p.numel() for p in module.parameters())),
        )
        for _ in range(PRODUCTS):
            last = product(v)
        return Answer((v, last), PRODUCTS)

    return run


def lanczos(k: int) -> Callable[[nn.Module, Tensor, Tensor, int], Answer]:
    def run(module: nn.Module, x: Tensor, y: Tensor, seed: int) -> Answer:
        pairs = eigenpairs(Problem(module, cross_entropy, (x, y)), k, tol=TOL, seed=seed)
        lost = int((~pairs.converged).sum())
        return Answer(pairs.values, pairs.products, f"{lost} not converged" if lost else "")

    return run


FLDIAG.jobs.update(
    top5=lanczos(5),
    top1=lanczos(1),
    products=_multiply(lambda module, x, y: Problem(module, cross_entropy, (x, y)).hessian()),
)


@FLDIAG.job("density")
def _density(module: nn.Module, images: Tensor, y: Tensor, seed: int) -> Answer:
    problem = Problem(module, cross_entropy, (images, y))
    start = torch.randn(problem.layout.size, generator=torch.Generator().manual_seed(seed))
    nodes, _ = quadrature(problem.hessian(), start, STEPS, problem.noise)
    return Answer(float(nodes.max()), STEPS)


@FLDIAG.job("trace")
def _trace(module: nn.Module, x: Tensor, y: Tensor, seed: int) -> Answer:
    d = diagonal(Problem(module, cross_entropy, (x, y)), seed=seed)
    return Answer(d.trace()[0], d.products or None, "" if d.is_exact() else d.estimator())


@FLDIAG.job("diagonal")
def _diagonal(module: nn.Module, x: Tensor, y: Tensor, seed: int) -> Answer:
    d = diagonal(Problem(module, cross_entropy, (x, y)), seed=seed)
    return Answer(d.vectors()[0], d.products or None, "" if d.is_exact() else d.estimator())


# ---- PyHessian: power iteration with deflation, Hutchinson until the mean moves by less than the tolerance

PYHESSIAN = Tool("PyHessian", "pyhessian", magnitude=True)


def _engine(module: nn.Module, x: Tensor, y: Tensor) -> Any:
    import pyhessian

    return pyhessian.hessian(module, nn.CrossEntropyLoss(), data=(x, y), cuda=False)


@contextlib.contextmanager
def _counted() -> Iterator[mock.Mock]:
    """``call_count``: products so far."""
    import pyhessian

    home = sys.modules[pyhessian.hessian.__module__]
    with mock.patch.object(
        home, "hessian_vector_product", side_effect=pyhessian.utils.hessian_vector_product
    ) as product:
        yield product


def _pyhessian_product(module: nn.Module, x: Tensor, y: Tensor) -> Callable[[Tensor], Any]:
    from pyhessian.utils import hessian_vector_product

    engine = _engine(module, x, y)

    def product(v: Tensor) -> Tensor:
        pieces = v.split([p.numel() for p in engine.params])
        found = hessian_vector_product(
            engine.gradsH,
            engine.params,
            [a.view_as(p) for a, p in zip(pieces, engine.params, strict=True)],
        )
        return torch.cat([h.reshape(-1) for h in found])

    return product


def power(k: int) -> Callable[[nn.Module, Tensor, Tensor, int], Answer]:
    """At most 100 products for each eigenvalue."""

    def run(module: nn.Module, x: Tensor, y: Tensor, seed: int) -> Answer:
        with _counted() as product:
            values, _ = _engine(module, x, y).eigenvalues(maxIter=100, tol=TOL, top_n=k)
        return Answer(np.sort(values)[::-1], product.call_count)

    return run


PYHESSIAN.jobs.update(products=_multiply(_pyhessian_product), top5=power(5), top1=power(1))


@PYHESSIAN.job("trace")
def _(module: nn.Module, x: Tensor, y: Tensor, seed: int) -> Answer:
    samples = _engine(module, x, y).trace(maxIter=100, tol=TOL)
    return Answer(float(np.mean(samples)), len(samples))


@PYHESSIAN.job("density")
def _(module: nn.Module, x: Tensor, y: Tensor, seed: int) -> Answer:
    nodes, _ = _engine(module, x, y).density(iter=STEPS, n_v=1)
    return Answer(float(np.max(nodes[0])), STEPS)


# ---- curvlinops: operators for scipy's eigsh; estimators take one column at a time, or they would multiply with all
# probes in one go and hold the activations of all

CURVLINOPS = Tool("curvlinops + eigsh", "curvlinops")


def _linear_operator(module: nn.Module, x: Tensor, y: Tensor) -> Any:
    from curvlinops import HessianLinearOperator

    return HessianLinearOperator(
        module,
        nn.CrossEntropyLoss(),
        list(module.parameters()),
        [(x, y)],
        check_deterministic=False,
    )


def _eigsh(k: int) -> Callable[[nn.Module, Tensor, Tensor, int], Answer]:
    def run(module: nn.Module, x: Tensor, y: Tensor, seed: int) -> Answer:
        operator, count = _linear_operator(module, x, y).to_scipy(), 0

        def product(v: np.ndarray) -> np.ndarray:
            nonlocal count
            count += 1
            return operator @ v

        start = np.random.default_rng(seed).standard_normal(operator.shape[0]).astype(np.float32)
        values = eigsh(
            LinearOperator(operator.shape, product, dtype=operator.dtype),
            k=k,
            which="LA",
            tol=TOL,
            v0=start,
            return_eigenvectors=False,
        )
        return Answer(np.sort(values)[::-1], count)

    return run


def _curvlinops_product(module: nn.Module, x: Tensor, y: Tensor) -> Callable[[Tensor], Any]:
    operator = _linear_operator(module, x, y)
    return lambda v: operator @ v


CURVLINOPS.jobs.update(top5=_eigsh(5), top1=_eigsh(1), products=_multiply(_curvlinops_product))


@CURVLINOPS.job("density")
def _(module: nn.Module, x: Tensor, y: Tensor, seed: int) -> Answer:
    from curvlinops import lanczos_approximate_spectrum

    grid, _ = lanczos_approximate_spectrum(_linear_operator(module, x, y), STEPS)
    # 5 % of the range were added at each end
    return Answer(float(grid[-1] - (grid[-1] - grid[0]) * 0.05 / 1.1))


@CURVLINOPS.job("trace")
def _(module: nn.Module, x: Tensor, y: Tensor, seed: int) -> Answer:
    from curvlinops import hutchinson_trace

    operator = _linear_operator(module, x, y)
    return Answer(
        float(np.mean([float(hutchinson_trace(operator, 1)) for _ in range(PROBES)])), PROBES
    )


@CURVLINOPS.job("diagonal")
def _(module: nn.Module, x: Tensor, y: Tensor, seed: int) -> Answer:
    from curvlinops import hutchinson_diag

    operator = _linear_operator(module, x, y)
    return Answer(sum(hutchinson_diag(operator, 1) for _ in range(PROBES)) / PROBES, PROBES)


# ---- hessian-eigenthings: the fewest of 20, 30, … Lanczos steps with which it says that all eigenvalues converged;
# its default of 100 products (Hutch++) for the trace

EIGENTHINGS = Tool("hessian-eigenthings", "hessian_eigenthings")


def _eigenthings(module: nn.Module, x: Tensor, y: Tensor) -> Any:
    import hessian_eigenthings as h

    return h.HessianOperator(module, [(x, y)], h.supervised_loss(nn.CrossEntropyLoss()))


def _lanczos(k: int) -> Callable[[nn.Module, Tensor, Tensor, int], Answer]:
    steps = [20]  # more, from then on, where not all converge

    def run(module: nn.Module, x: Tensor, y: Tensor, seed: int) -> Answer:
        import hessian_eigenthings as h

        operator = _eigenthings(module, x, y)
        while True:
            found = h.lanczos(operator, k=k, max_iter=steps[0], tol=TOL, which="LA", seed=seed)
            if found.converged.all():
                return Answer(found.eigenvalues.numpy(), found.iterations)
            steps[0] += 10

    return run


EIGENTHINGS.jobs.update(
    top5=_lanczos(5),
    top1=_lanczos(1),
    products=_multiply(lambda module, x, y: _eigenthings(module, x, y).matvec),
)


@EIGENTHINGS.job("density")
def _(module: nn.Module, x: Tensor, y: Tensor, seed: int) -> Answer:
    import hessian_eigenthings as h

    found = h.spectral_density(
        _eigenthings(module, x, y), num_runs=1, lanczos_steps=STEPS, seed=seed
    )
    return Answer(float(found.raw_eigenvalues.max()), STEPS)


@EIGENTHINGS.job("trace")
def _(module: nn.Module, x: Tensor, y: Tensor, seed: int) -> Answer:
    import hessian_eigenthings as h

    return Answer(h.trace(_eigenthings(module, x, y), seed=seed).estimate, 99)


PEERS = (PYHESSIAN, CURVLINOPS, EIGENTHINGS)
