"""The curvature of a model with adapters, seen from the adapters and from the matrices that they change."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from fldiag import losses
from fldiag.models.lora import adapters, merge
from fldiag.problem.eigenpairs import eigenpairs
from fldiag.problem.problem import Problem
from fldiag.registry import Progress
from fldiag.results.table import Row
from fldiag.runs.history import History
from fldiag.runs.round_weights import Stored


def rows(
    history: History,
    cohort: Stored,
    k: int,
    tol: float,
    max_products: int,
    seed: int,
    progress: Progress | None,
) -> list[Row]:
    """The top ``k`` eigenvalues in adapter space and in the adapted matrices, at the aggregated weights."""
    adapted = history.problem((cohort.aggregated, cohort.buffers), history.pool.clients, "train")
    module = copy.deepcopy(history.network.module)
    nn.utils.vector_to_parameters(cohort.aggregated, module.parameters())
    examples = history.pool.take(history.pool.clients, "train")
    matrices = Problem(
        merge(module),
        losses.criterion(history.dataset.regression),
        examples,
        buffers=cohort.buffers,
        name=history.name,
        dtype=history.dtype,
        device=history.device,
        memory=history.memory,
        trainable=True,
    )
    table_rows: list[Row] = []
    factors = [name for layer in adapters(module).values() for name in (layer.a, layer.b)]
    for problem, params, estimator in (
        (adapted, factors, "lanczos"),
        (matrices, None, "lanczos-matrices"),
    ):
        pairs = eigenpairs(
            problem,
            k,
            tol=tol,
            max_products=max_products,
            seed=seed,
            params=params,
            progress=progress,
        )
        common: dict[str, Any] = {
            "moment": "aggregated",
            "scope": "global",
            "slice": "train",
            "metric": "eigenvalue",
            "estimator": estimator,
            "n_examples": problem.n,
        }
        table_rows += [
            {
                **common,
                "index": i + 1,
                "value": float(value),
                "residual": float(pairs.residuals[i]),
                "converged": bool(pairs.converged[i]),
            }
            for i, value in enumerate(pairs.values)
        ]
    return table_rows
