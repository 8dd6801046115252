"""The account of one round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fldiag.errors import FldiagError
from fldiag.execution import workspace
from fldiag.problem.eigenpairs import eigenpairs
from fldiag.problem.problem import Problem
from fldiag.results.means import sample_mean
from fldiag.results.table import Row
from fldiag.runs.history import History
from fldiag.runs.round_weights import Stored

#: Relative distance up to which the aggregated weights are the weighted mean of the clients.
SAME = 1e-5
TERMS = ("change", "linear", "quadratic", "rest")


def round_rows(
    history: History,
    cohort: Stored,
    slice_name: str,
    k: int,
    layers: bool,
    tol: float,
    max_products: int,
    seed: int,
) -> list[Row]:
    """The account of one round's updates."""
    assert cohort.clients is not None and cohort.received is not None
    problem = history.problem(cohort.start, history.stretch(slice_name), slice_name)
    cohort = history.finite(cohort)
    assert cohort.clients is not None and cohort.received is not None
    ids = list(cohort.ids)
    before = (received := problem.scores()).loss
    if not np.isfinite(before):
        raise FldiagError(
            f"round {cohort.round}: the loss of the received weights on {slice_name} is {before}",
            "choose earlier rounds",
        )
    models = [cohort.client(j) for j in range(len(ids))] + [(cohort.aggregated, cohort.buffers)]
    updates = [(w - cohort.received).double() for w, _ in models]
    about: list[Row] = [{"moment": "trained", "scope": "client", "client": c} for c in ids]
    about.append({"moment": "aggregated", "scope": "global"})
    g, hessian = problem.gradient(), problem.hessian()
    pairs = None
    if k:
        pairs = eigenpairs(
            problem,
            min(k, problem.layout.size),
            tol=tol,
            max_products=max_products,
            seed=seed,
            progress=workspace().show,
        )
    curved: list[Tensor] = []
    common = {"slice": slice_name, "n_examples": problem.n}
    rows: list[Row] = [
        {**common, "moment": "received", "scope": "global", **row} for row in received.rows(problem)
    ]
    for i, (d, base) in enumerate(zip(updates, about, strict=True)):
        workspace().show(i, len(updates), "updates")
        # with buffers of its own an update is not all that changed: their effect is in the rest
        scores = (
            history.problem(models[i], history.stretch(slice_name), slice_name).scores()
            if models[i][1]
            else problem.scores(problem.w.double() + d)
        )
        after = scores.loss
        curved.append(hessian(d))
        linear, quadratic = float(g @ d), 0.5 * float(d @ curved[-1])
        values = (after - before, linear, quadratic, after - before - linear - quadratic)
        update_rows = scores.rows(problem) if base["scope"] == "global" else []
        update_rows += [
            {"metric": name, "value": v, "estimator": "exact"}
            for name, v in zip(TERMS, values, strict=True)
        ]
        if pairs is not None:
            update_rows += _along(pairs, g, d, linear, quadratic)
        if layers:
            update_rows += _by_layer(problem, hessian, g, d, quadratic)
        rows += [{**common, **base, **row} for row in update_rows]
    rows += [
        {**common, "moment": "aggregated", **row}
        for row in _by_client(history.weights(ids), ids, g, updates, curved[-1])
    ]
    return rows + [{**common, **row} for row in _without_each(history, cohort, slice_name)]


def _along(pairs: Any, g: Tensor, d: Tensor, linear: float, quadratic: float) -> list[Row]:
    """The terms along eigenvectors, and along all the rest (index 0)."""
    rows: list[Row] = []
    sums = [0.0, 0.0]
    for i, (value, vector) in enumerate(zip(pairs.values, pairs.vectors, strict=True)):
        along = float(vector.double() @ d)
        terms = float(vector.double() @ g) * along, 0.5 * float(value) * along**2
        for j, name in enumerate(("linear", "quadratic")):
            sums[j] += terms[j]
            rows.append(
                {
                    "metric": name,
                    "index": i + 1,
                    "value": terms[j],
                    "estimator": "eigen",
                    "eigenvalue": float(value),
                    "residual": float(pairs.residuals[i]),
                    "converged": bool(pairs.converged[i]),
                }
            )
    return [
        *rows,
        *(
            {"metric": name, "index": 0, "value": total - part, "estimator": "eigen"}
            for name, total, part in zip(
                ("linear", "quadratic"), (linear, quadratic), sums, strict=True
            )
        ),
    ]


def _by_layer(
    problem: Problem, hessian: Callable[[Tensor], Tensor], g: Tensor, d: Tensor, quadratic: float
) -> list[Row]:
    slices, rows, blocks = problem.layout.slices(), [], 0.0
    for layer, names in problem.layout.layers.items():
        part = torch.zeros_like(d)
        for n in names:
            part[slices[n]] = d[slices[n]]
        block = 0.5 * float(part @ hessian(part))
        blocks += block
        rows += [
            {
                "metric": "linear",
                "layer": layer or names[0],
                "value": float(g @ part),
                "estimator": "layer",
            },
            {
                "metric": "quadratic",
                "layer": layer or names[0],
                "value": block,
                "estimator": "layer",
            },
        ]
    return [
        *rows,
        {
            "metric": "quadratic",
            "layer": "between layers",
            "value": quadratic - blocks,
            "estimator": "layer",
        },
    ]


def _by_client(
    p: np.ndarray, ids: list[int], g: Tensor, updates: list[Tensor], curved: Tensor
) -> list[Row]:
    """Shares of the aggregated update's terms; they sum up to them."""
    shares = [weight * d for weight, d in zip(p, updates[:-1], strict=True)]
    server = updates[-1] - sum(shares, torch.zeros_like(updates[-1]))
    rows: list[Row] = []
    for client, share in [*zip(ids, shares, strict=True), (None, server)]:
        for name, value in (
            ("linear", float(g @ share)),
            ("quadratic", 0.5 * float(share @ curved)),
        ):
            rows.append(
                {
                    "metric": name,
                    "value": value,
                    "estimator": "client",
                    "client": client,
                    "scope": "client" if client is not None else "global",
                }
            )
    return rows


def _without_each(history: History, cohort: Stored, slice_name: str) -> list[Row]:
    """What the loss gains when a client is left out of the mean: above 0 it helps."""
    assert cohort.clients is not None
    p = torch.as_tensor(history.weights(cohort.ids), device=cohort.clients.device)
    mean = p @ cohort.clients.double()
    about: list[Row] = [
        {"metric": "effect", "estimator": "exact", "moment": "aggregated", "scope": "client"}
        | {"client": client}
        for client in cohort.ids
    ]
    note = ""
    if float(p.max()) >= 1:
        note = "one client is all of the average"
    elif float((mean - cohort.aggregated).norm()) > SAME * float(cohort.aggregated.norm()):
        note = "the server does more than the weighted mean of the clients"
    if note:
        return [{**row, "value": None, "note": note} for row in about]
    models = [(cohort.aggregated, cohort.buffers)]
    for j in range(len(p)):
        others = p.clone()
        others[j] = 0
        others /= others.sum()
        buffers = {
            name: torch.tensordot(others, b.double(), 1).to(b.dtype)
            if b.is_floating_point()
            else b[others > 0].amax(0)
            for name, b in cohort.client_buffers.items()
        }
        w = (others @ cohort.clients.double()).to(cohort.clients.dtype)
        models.append((w, buffers or cohort.buffers))
    losses = history.evaluate(models).loss[:, history.stretch(slice_name)]
    return [
        {**row, **sample_mean(change)}
        for row, change in zip(about, losses[1:] - losses[0], strict=True)
    ]
