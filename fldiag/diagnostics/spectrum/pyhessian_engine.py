"""Eigenvalues and trace as PyHessian gives them, by its own estimators and stopping rules, for comparison."""

from __future__ import annotations

import warnings

import numpy as np
import torch

from fldiag.errors import FldiagError
from fldiag.problem.problem import Problem
from fldiag.results.table import Row
from fldiag.seeding import seed_for


def pyhessian_rows(
    problem: Problem, k: int, has_trace: bool, tol: float, most: int, seed: int
) -> list[Row]:
    """Rows ``eigenvalue`` (of largest magnitude) and, with ``has_trace``, ``trace``, of at most ``most`` products each.

    Raises FldiagError for what PyHessian would leave out: weight decay, and double precision.
    """
    import pyhessian

    if problem.weight_decay or problem.dtype != torch.float32:
        raise FldiagError(
            "PyHessian knows neither weight decay nor double precision",
            "leave out --engine pyhessian",
            usage=True,
        )
    problem.probe()
    batches = [problem.batch(i) for i in range(len(problem.bounds))]
    with problem.guarded(), torch.enable_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using backward\\(\\) with create_graph=True")
        engine = pyhessian.hessian(
            problem.loaded(problem.w),
            problem.criterion,
            dataloader=batches,
            cuda=problem.device.type == "cuda",
        )
        torch.manual_seed(seed_for(seed, "pyhessian"))
        values, _ = engine.eigenvalues(maxIter=most, tol=tol, top_n=min(k, problem.layout.size))
        samples = engine.trace(maxIter=most, tol=tol) if has_trace else []
    common: Row = {"estimator": "pyhessian", "which": "magnitude", "matrix": "hessian"}
    rows: list[Row] = [
        {**common, "metric": "eigenvalue", "index": i, "value": value}
        for i, value in enumerate(values, start=1)
    ]
    if has_trace:
        rows.append({**common, "metric": "trace", "value": float(np.mean(samples))})
    return rows
