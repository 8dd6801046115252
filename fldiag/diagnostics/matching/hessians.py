"""The Hessians of one round: the aggregated model's and the clients', summed up in rows and in what comparisons need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fldiag.diagnostics.matching.comparison import (
    HessianSummary,
    Space,
    matching_rows,
    overlap_rows,
)
from fldiag.errors import FldiagError
from fldiag.execution import workspace
from fldiag.problem.diagonal import Diagonal, diagonal
from fldiag.problem.eigenpairs import eigenpairs, eigenvalue_rows
from fldiag.problem.problem import Problem
from fldiag.results.table import Row
from fldiag.runs.history import History
from fldiag.runs.round_weights import Stored

#: On whose examples a client's Hessian is taken: its own, or those of all clients.
Data = Literal["client", "global"]


@dataclass(frozen=True)
class Settings:
    """How Hessians are computed; the options of ``matching``."""

    k: int
    tol: float
    rtol: float
    max_products: int
    seed: int

    @property
    def spectrum(self) -> dict[str, Any]:
        products = max(100, 8 * self.k, self.max_products)
        return {"k": self.k, "tol": self.tol, "max_products": products, "seed": self.seed}

    @property
    def diagonal(self) -> dict[str, Any]:
        names = ("rtol", "max_products", "seed")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Item:
    """A Hessian of one round: of a client's trained weights on its own or on all clients' data, with its top eigenpairs or
    without; with no client, of the aggregated weights."""

    round: int
    client: int | None = None
    data: Data = "global"
    has_spectrum: bool = True

    def __str__(self) -> str:
        if self.client is None:
            return f"round {self.round}, global model"
        return f"round {self.round}, client {self.client} on {self.data} data"


def round_rows(
    history: History,
    record: Stored,
    places: Sequence[Data],
    settings: Settings,
) -> list[Row]:
    """All rows of a round. A client whose Hessian cannot be computed is noted and left out."""
    r = record.round
    # the longest first: the aggregated model, then clients on all clients' data, then on their own
    items = [Item(r)] + [
        Item(r, client, place, place == places[0])
        for place in reversed(places)
        for client in record.ids
    ]
    (aggregated, *of_clients) = workspace().map(hessians, history, items, settings=settings)
    rows: list[Row] = []
    spaces: dict[int, Space] = {}
    for place in places:
        results = {
            item.client: result
            for item, result in zip(items[1:], of_clients, strict=True)
            if item.data == place
        }
        summaries = sound_clients(history, record, place, results, rows)
        spaces |= {s.client: s.space for s in summaries if s.space is not None}
        rows += matching_rows(summaries, place, _slice(place))
    if "failure" in aggregated:
        history.note(r, f"the aggregated model is left out: {aggregated['failure'][0]}")
        return rows + (overlap_rows(spaces, None, _slice(places[0])) if spaces else [])
    rows += aggregated["rows"]
    top = HessianSummary.of(aggregated["summary"]).space
    if spaces:
        rows += overlap_rows(spaces, top, _slice(places[0]))
    return rows


def _slice(place: Data) -> str:
    return "train" if place == "global" else "client:*/train"


def _examples(history: History, place: Data, client: int) -> tuple[slice, str]:
    """Where the examples lie in the pool, and what their slice is called."""
    if place == "global":
        return history.pool.clients, "train"
    return history.pool.train_slice(client), f"client:{client}/train"


def sound_clients(
    history: History,
    record: Stored,
    place: Data,
    results: dict[int | None, Any],
    rows: list[Row],
) -> list[HessianSummary]:
    """The clients' Hessians in the order of the round; their rows are appended, and what failed is noted once a client.

    Raises FldiagError where all failed.
    """
    noted = {note["client"] for note in history.notes}
    summaries = []
    for client in record.ids:
        result = results[client]
        if "failure" not in result:
            rows += result["rows"]
            summaries.append(HessianSummary.of(result["summary"]))
        elif client not in noted:
            text = f"client {client} is left out: {result['failure'][0]}"
            history.note(record.round, text, client)
    if not summaries:
        raise FldiagError(*results[record.ids[0]]["failure"])
    if len(summaries) == 1:
        history.note(
            record.round,
            f"only client {summaries[0].client} on {place} data: there are no pairs to compare",
        )
    return summaries


def hessians(history: History, item: Item, settings: Settings) -> dict[str, Any]:
    """Rows and summary of the item's Hessian, or its ``failure``."""
    record = history.stored(item.round)
    if item.client is None:
        return _result(_aggregated_problem(history, record), True, settings)
    try:
        problem = history.problem(
            record.client(record.ids.index(item.client)),
            *_examples(history, item.data, item.client),
            moment="trained",
            scope="client",
            client=item.client,
        )
    except FldiagError as error:
        return {"failure": [error.what, error.remedy]}
    return _result(problem, item.has_spectrum, settings, data=item.data)


def _aggregated_problem(history: History, record: Stored) -> Problem:
    return history.problem(
        (record.aggregated, record.buffers),
        history.pool.clients,
        "train",
        moment="aggregated",
        scope="global",
    )


def _result(
    problem: Problem,
    has_spectrum: bool,
    settings: Settings,
    **columns: Any,
) -> dict[str, Any]:
    """Rows and summary of the Hessian of one model on one slice, or why it cannot be computed."""
    common = {**problem.common, **columns}
    try:
        if not bool(torch.isfinite(problem.w).all()):
            raise FldiagError(
                "its weights are not finite", "choose rounds from before the training diverged"
            )
        rows = problem.centre.rows(problem)
        result = diagonal(problem, **settings.diagonal, entries=True, progress=workspace().show)
        rows += diagonal_rows(result, settings.rtol)
        space = None
        if has_spectrum and settings.k:
            # strict: the overlaps are of the vectors
            pairs = eigenpairs(problem, **settings.spectrum, strict=True, progress=workspace().show)
            rows += eigenvalue_rows(problem, pairs, matrix="hessian")
            space = vars(Space.of(pairs, problem.dtype, problem.noise))
    except FldiagError as error:
        return {"failure": [error.what, error.remedy]}
    return {
        "rows": [{**common, **row} for row in rows],
        "summary": {**_summary(problem, result, settings.rtol), "space": space},
    }


def diagonal_rows(result: Diagonal, rtol: float) -> list[Row]:
    """The diagonal's norm, how far off it may be, and the trace."""
    (size, error), (trace, stderr) = result.norm(), result.trace()
    rows: list[Row] = []
    noise, length = result.vector_stderr(), float(result.vector().norm())
    if noise is not None:
        share = float(noise.norm()) / length if length else None
        rows.append({"metric": "diagonal_error", "value": share})
    about: Row = {"metric": "diagonal_norm", "converged": result.converged}
    rows.append({**about, "value": size, "stderr": error})
    is_reached = stderr is None or stderr <= rtol * abs(trace)
    rows.append({"metric": "trace", "value": trace, "stderr": stderr, "converged": is_reached})
    return [{**row, "estimator": result.estimator()} for row in rows]


def _summary(problem: Problem, result: Diagonal, rtol: float) -> dict[str, Any]:
    """What comparisons need of a Hessian, but for its eigenspace: the arguments of ``HessianSummary``."""
    pairs = [result.trace([name]) for name in problem.layout.names]
    traces = torch.tensor([value for value, _ in pairs], dtype=torch.float64)
    errors = None
    if not result.is_exact():
        errors = torch.tensor([error or 0.0 for _, error in pairs], dtype=torch.float64)
    noise = result.vector_stderr()
    is_exact_enough = errors is None or bool(errors.norm() <= rtol * traces.norm())
    return {
        "client": int(problem.common.get("client", -1)),
        "n": problem.n,
        "vectors": {
            "diag": (
                result.vector().to("cpu", problem.dtype),
                None if noise is None else noise.to("cpu", problem.dtype),
            ),
            "tensor_trace": (traces, errors),
        },
        "estimator": result.estimator(),
        "converged": {"diag": result.converged, "tensor_trace": is_exact_enough},
    }
