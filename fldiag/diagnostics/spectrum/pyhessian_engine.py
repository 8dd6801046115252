"""PyHessian as an engine: the eigenvalues and traces that papers report, with its own stopping rules and defects.

PyHessian (Yao et al., 2020) runs a power iteration with deflation until two estimates differ by less than a share
``tol`` (100 products an eigenvalue at most), which says little about the distance to the truth; it has no residuals.
For numbers to trust use ``spectrum`` and ``trace``; this is for comparison with published ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fldiag.errors import FldiagError, first_line
from fldiag.execution.workspace import workspace
from fldiag.problem.eigenpairs import RATIO_INDEX, finite_scores, loss_rows
from fldiag.problem.problem import Problem
from fldiag.results.means import standard_error
from fldiag.results.table import Row
from fldiag.seeding import seed_for, torch_rng

#: The limit on products for each eigenvalue, and on probes of a trace, that the papers left as PyHessian has it.
MOST = 100
#: Fewer samples of a trace than this, which agreed by chance, do not tell their scatter.
FEW = 10


@dataclass(frozen=True)
class Batching:
    """Which examples a product sees: every batch of the slice (``batches`` None), or the first ``batches`` of
    ``size`` examples of a shuffled pass (the last one dropped when incomplete), drawn once, or with ``resample``
    anew for every product, as the code of Mendieta et al. (CVPR 2022) does with 10 batches of 64."""

    batches: int | None = None
    size: int = 64
    resample: bool = False


class _Loader:
    """What PyHessian iterates over for each product: pairs (x, y)."""

    def __init__(self, problem: Problem, sampling: Batching, seed: int):
        self.problem, self.sampling, self.seed, self.passes = problem, sampling, seed, 0
        if sampling.batches is not None and problem.n < sampling.size:
            raise FldiagError(
                f"slice {problem.slice_name!r} has {problem.n} examples, fewer than one batch of "
                f"{sampling.size}",
                "choose a smaller batch or all batches",
                usage=True,
            )
        self.n = (
            problem.n
            if sampling.batches is None
            else sampling.size * min(sampling.batches, problem.n // sampling.size)
        )
        self._examples = None if sampling.batches is None else problem.read(0, problem.n)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self._examples is None:
            yield from (self.problem.batch(i) for i in range(len(self.problem.bounds)))
            return
        turn = self.passes if self.sampling.resample else 0
        self.passes += 1
        order = torch.randperm(
            self.problem.n, generator=torch_rng(self.seed, "pyhessian batches", turn)
        )
        x, y = self._examples
        for batch in order[: self.n].to(x.device).split(self.sampling.size):
            yield x[batch], y[batch]


def _engine(problem: Problem, loader: _Loader, most: int, text: str) -> Any:
    """PyHessian's object on a copy of the model, which keeps the Rayleigh quotients of its products, and shows their number
    of ``most``."""
    try:
        import pyhessian
    except ImportError:
        raise FldiagError(
            "PyHessian is not installed", "pip install pyhessian, or leave out --engine"
        ) from None
    if problem.weight_decay:
        raise FldiagError(
            "PyHessian sees the model and its loss, not weight decay",
            "leave out --engine pyhessian",
            usage=True,
        )
    if problem.dtype != torch.float32:
        raise FldiagError(
            "PyHessian draws its vectors in single precision",
            "use precision fp32 with this engine",
            usage=True,
        )

    class Counting(pyhessian.hessian):  # type: ignore[misc, name-defined]
        def dataloader_hv_product(self, v: list[Tensor]) -> tuple[float, list[Tensor]]:
            value, product = super().dataloader_hv_product(v)
            if not np.isfinite(value):
                raise FldiagError(
                    "a Hessian-vector product is not finite", "diagnose earlier weights"
                )
            self.quotients.append(value)
            workspace().show(len(self.quotients), most, text)
            return value, product

    engine = Counting(
        problem.loaded(problem.w),
        problem.criterion,
        dataloader=loader,
        cuda=problem.device.type == "cuda",
    )
    engine.quotients = []
    return engine


def _run(problem: Problem, seed: int, purpose: str, work: Callable[[], Any]) -> Any:
    """``work`` under a seeded global generator, which is afterwards as before."""
    with problem.guarded(), torch.enable_grad(), warnings.catch_warnings():
        # it takes its gradients by backward(); the copy they hang on does not outlive this module's functions
        warnings.filterwarnings("ignore", message="Using backward\\(\\) with create_graph=True")
        torch.default_generator.manual_seed(seed_for(seed, purpose))
        if problem.device.type == "cuda":
            torch.cuda.manual_seed(seed_for(seed, purpose))
        try:
            return work()
        except (RuntimeError, AttributeError, TypeError) as error:
            raise FldiagError(
                f"PyHessian cannot differentiate this model: {first_line(error)}",
                "leave out --engine pyhessian",
            ) from error


def iterations(
    quotients: list[float], count: int, tol: float, most: int = MOST
) -> list[tuple[int, bool]]:
    """How many products PyHessian spent on each of ``count`` eigenvalues, and whether its rule stopped it: its loop
    replayed on the Rayleigh quotients of all its products."""
    results, at = [], 0
    for _ in range(count):
        spent, stopped = min(most, len(quotients) - at), False
        for i in range(1, spent):
            before, now = quotients[at + i - 1], quotients[at + i]
            if abs(before - now) / (abs(before) + 1e-6) < tol:
                spent, stopped = i + 1, True
                break
        results.append((spent, stopped))
        at += spent
    return results


def eigenvalues(
    problem: Problem,
    k: int = 5,
    *,
    tol: float = 1e-3,
    most: int = MOST,
    sampling: Batching | None = None,
    seed: int = 0,
) -> list[Row]:
    """Rows as of ``spectrum`` with estimator ``pyhessian``: k eigenvalues of largest magnitude as PyHessian finds them.

    Each value is, as there, the Rayleigh quotient of the iteration before the last. ``residual``: ||Hv - lambda v|| of
    its vector, from one more product each (an eigenvalue lies within it of the value). ``converged``: its
    stopping rule was met within ``most`` products; column ``products`` says how many it took.

    Raises FldiagError when the loss is not finite, the precision is not float32 or PyHessian fails on the model.
    """
    if k < 1 or most < 2 or not 0 < tol < 1:
        raise FldiagError(
            f"no eigenvalues for k = {k}, most = {most}, tol = {tol}",
            "k >= 1, most >= 2, 0 < tol < 1",
            usage=True,
        )
    rows, k = loss_rows(problem), min(k, problem.layout.size)
    loader = _Loader(problem, sampling or Batching(), seed)
    engine = _engine(problem, loader, k * (most + 1), "power iteration")

    def work() -> tuple[list[float], list[float], list[tuple[int, bool]]]:
        values, vectors = engine.eigenvalues(maxIter=most, tol=tol, top_n=k)
        spent = iterations(list(engine.quotients), k, tol, most)
        residuals = []
        for value, v in zip(values, vectors, strict=True):
            # by the engine itself, so that it is of the examples that it saw
            hv = torch.cat([p.reshape(-1) for p in engine.dataloader_hv_product(v)[1]]).double()
            flat = torch.cat([p.reshape(-1) for p in v]).double()
            size = float(flat.norm()) or 1.0
            residuals.append(float((hv - value * flat).norm()) / size)
        return values, residuals, spent

    values, residuals, spent = _run(problem, seed, "pyhessian eigenvalues", work)
    common: Row = {
        "estimator": "pyhessian",
        "n_examples": loader.n,
        "which": "magnitude",
        "matrix": "hessian",
    }
    for i, (value, residual, (products, stopped)) in enumerate(
        zip(values, residuals, spent, strict=True), start=1
    ):
        rows.append(
            {
                **common,
                "metric": "eigenvalue",
                "index": i,
                "value": float(value),
                "residual": residual,
                "converged": stopped,
                "products": products,
            }
        )
    last = min(RATIO_INDEX, k)
    if last == 1:
        return [{**problem.common, **row} for row in rows]
    rows.append(
        {
            **common,
            "metric": "eigenvalue_ratio",
            "index": last,
            "value": values[0] / values[last - 1] if values[last - 1] else None,
            "converged": spent[0][1] and spent[last - 1][1],
        }
    )
    return [{**problem.common, **row} for row in rows]


def trace(
    problem: Problem,
    *,
    tol: float = 1e-3,
    most: int = MOST,
    sampling: Batching | None = None,
    seed: int = 0,
) -> list[Row]:
    """The row ``trace`` (H_T) by PyHessian's Hutchinson estimator: it stops when the running mean moves by less than the
    share ``tol`` (at once when the mean is negative: it divides by the signed mean), which two probes that happen to agree
    bring about. ``stderr``: of its samples, from ``FEW`` on; column ``products`` says how many there were.

    Raises FldiagError as ``eigenvalues`` does.
    """
    if most < 2 or not 0 < tol < 1:
        raise FldiagError(
            f"no trace for most = {most}, tol = {tol}", "most >= 2, 0 < tol < 1", usage=True
        )
    finite_scores(problem)
    loader = _Loader(problem, sampling or Batching(), seed)
    engine = _engine(problem, loader, most, "trace by probes")
    samples = np.asarray(
        _run(problem, seed, "pyhessian trace", lambda: engine.trace(maxIter=most, tol=tol)),
        dtype=float,
    )
    error = standard_error(samples) if len(samples) >= FEW else None
    return [
        {
            **problem.common,
            "metric": "trace",
            "value": float(samples.mean()),
            "stderr": error,
            "estimator": "pyhessian",
            "converged": len(samples) < most,
            "products": len(samples),
            "n_examples": loader.n,
        }
    ]
