"""Flatness of one round: at the aggregated weights on all data, and of every client; these are computed anywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fldiag.diagnostics.flatness.gaps import gaps, means
from fldiag.diagnostics.sharpness import adaptive_scale, worst_case
from fldiag.errors import FldiagError
from fldiag.execution import workspace
from fldiag.losses import noise_floor
from fldiag.problem.diagonal import diagonal
from fldiag.problem.eigenpairs import eigenpairs
from fldiag.problem.problem import Problem
from fldiag.results.table import Row
from fldiag.runs.history import History
from fldiag.runs.pool import Weights
from fldiag.runs.round_weights import Stored


@dataclass(frozen=True)
class Settings:
    """How flatness is measured; the options of ``flatness``."""

    rho: float
    adaptive_rho: float
    steps: int
    tol: float
    rtol: float
    max_products: int
    seed: int


def round_rows(history: History, record: Stored, settings: Settings) -> list[Row]:
    """All rows of a round whose clients' weights are finite."""
    r, slices = record.round, [history.pool.train_slice(c) for c in range(len(history.parts))]
    sizes = {c: s.stop - s.start for c, s in enumerate(slices) if s.stop > s.start}
    if not sizes:
        history.problem((record.aggregated, {}), history.pool.clients, "train")  # says why
    for client in sorted(set(record.ids) - set(sizes)):
        history.note(r, f"client {client} has no training examples: left out", client)
    results = workspace().map(
        flatness_of,
        history,
        [(r, None), *((r, client) for client in sizes)],
        name=lambda item: (
            f"round {item[0]}, {'global model' if item[1] is None else f'client {item[1]}'}"
        ),
        settings=settings,
    )
    rows: list[Row] = []
    for result in results:
        rows += result["rows"]
        for text, client in result["failures"]:
            history.note(r, text, client)
    rows += [*gaps(rows, sizes), *means(rows)]
    return [{**row, "round": r} for row in rows]


def flatness_of(
    history: History,
    item: tuple[int, int | None],
    settings: Settings,
) -> dict[str, Any]:
    """The rows of the aggregated model on all data, or those of a client; and the ``failures``: what could not be computed,
    and whose it is.

    Of a client: F_k at the aggregated weights and, where it was trained, at its own.
    """
    round, client = item
    record = history.stored(round).finite()
    aggregated = record.aggregated, record.buffers
    if client is None:
        columns: Row = {"moment": "aggregated", "scope": "global", "slice": "train"}
        slice_ = history.pool.clients
        return point_flatness(
            history, aggregated, slice_, columns, "the aggregated model", settings
        )
    slice_ = history.pool.train_slice(client)
    columns = {"scope": "client", "client": client, "slice": f"client:{client}/train"}
    text = f"client {client} at the aggregated weights"
    result = point_flatness(
        history, aggregated, slice_, {**columns, "moment": "aggregated"}, text, settings
    )
    rows, failures = result["rows"], result["failures"]
    if client in record.ids:
        weights = record.client(record.ids.index(client))
        columns["moment"] = "trained"
        result = point_flatness(history, weights, slice_, columns, f"client {client}", settings)
        rows += result["rows"] + stability_rows(result["rows"], history.training, round)
        failures += result["failures"]
    return {"rows": rows, "failures": failures}


def point_flatness(
    history: History,
    weights: Weights,
    examples: slice,
    columns: Row,
    model: str,
    settings: Settings,
) -> dict[str, Any]:
    """Loss, sharpness, lambda_1 and trace at weights, or why they cannot be computed."""
    try:
        problem = history.problem(weights, examples, str(columns["slice"]))
        rows = [
            *problem.centre.rows(problem),
            sharpness(problem, settings.rho),
            adaptive_sharpness(problem, settings),
            lambda_1(problem, settings),
            trace(problem, settings),
        ]
    except FldiagError as error:
        text = f"{model} is left out: {error.what}"
        return {"rows": [], "failures": [(text, columns.get("client"))]}
    columns = {**columns, "n_examples": problem.n}
    return {"rows": [{**columns, **row} for row in rows], "failures": []}


def stability_rows(rows: Sequence[Row], training: Mapping[str, Any], round: int) -> list[Row]:
    """lr lambda_1 / 2 for the lambda_1 among a client's rows; none where no learning rate of SGD is known."""
    if training.get("lr") is None or training.get("optimizer", "sgd") != "sgd":
        return []
    half = float(training["lr"]) * float(training.get("lr_decay", 1.0)) ** (round - 1) / 2
    return [
        {
            **row,
            "metric": "stability",
            "value": half * row["value"],
            **{error: half * row[error] for error in ("residual", "bound")},
        }
        for row in rows
        if row["metric"] == "eigenvalue"
    ]


def check_measured(rows: Sequence[Row], notes: Sequence[Row]) -> None:
    """Raises FldiagError, with the first reason, where no flatness at all could be measured."""
    if not any(
        row["metric"] in ("sharpness", "eigenvalue", "trace") and row["value"] is not None
        for row in rows
    ):
        masked = [row for row in rows if row["metric"] == "sharpness"]
        reason = next(
            (row["note"] for row in (*masked, *reversed(notes)) if row.get("note")),
            "no model can be evaluated",
        )
        raise FldiagError(
            f"no round has a flatness: {reason}", "choose other rounds, or --precision fp64"
        )


def sharpness(problem: Problem, rho: float) -> Row:
    """F(w + rho G / ||G||) - F(w): what one ascent step adds; masked where G is rounding noise."""
    row: Row = {"metric": "sharpness", "estimator": "exact", "rho": rho}
    g, floor = problem.gradient(), noise_floor(problem.dtype)
    size = float(torch.linalg.vector_norm(g))
    if size < floor:
        return {
            **row,
            "value": None,
            "note": f"the gradient has norm {size:.1e}, rounding noise (below {floor:g})",
        }
    up = problem.w.double() + rho / size * g
    at_w, scores = problem.centre, problem.scores(up)
    at_step = scores.each
    before = at_w.loss
    if at_w.each is None or at_step is None:
        after = scores.loss
        change, stderr = after - before, None
    else:
        each = at_step - at_w.each
        after, change, stderr = float(at_step.mean()), float(each.mean()), at_w.stderr_of(each)
    if not math.isfinite(change):
        raise FldiagError(
            f"the loss on slice {problem.slice_name!r} is {before:g}, and {after:g} after a step of length {rho:g}",
            "choose rounds from before the training diverged, or a smaller --rho",
        )
    return {
        **row,
        "value": change,
        "stderr": stderr,
        "residual": torch.finfo(problem.dtype).eps * (abs(before) + abs(after)),
    }


def adaptive_sharpness(problem: Problem, settings: Settings) -> Row:
    """The worst case with each weight in its own scale, as ``sharpness`` of the weights alone has it."""
    scale, rho = adaptive_scale(problem), settings.adaptive_rho
    row = worst_case(problem, scale, rho, steps=settings.steps, seed=settings.seed)
    return {**row, "metric": "adaptive_sharpness"}


def lambda_1(problem: Problem, settings: Settings) -> Row:
    pairs = eigenpairs(
        problem,
        1,
        tol=settings.tol,
        max_products=max(100, settings.max_products),
        seed=settings.seed,
        progress=workspace().show,
    )
    return {
        "metric": "eigenvalue",
        "index": 1,
        "value": float(pairs.values[0]),
        "residual": float(pairs.residuals[0]),
        "bound": float(pairs.bounds[0]),
        "converged": bool(pairs.converged[0]),
        "estimator": "lanczos",
    }


def trace(problem: Problem, settings: Settings) -> Row:
    result = diagonal(
        problem,
        rtol=settings.rtol,
        max_products=settings.max_products,
        seed=settings.seed,
        progress=workspace().show,
    )
    value, stderr = result.trace()
    return {
        "metric": "trace",
        "value": value,
        "stderr": stderr,
        "estimator": result.estimator(),
        "converged": result.converged,
    }
