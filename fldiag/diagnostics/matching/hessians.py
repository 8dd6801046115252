"""The Hessians of one round: the aggregated model's and the clients', summed up in rows and in what comparisons need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fldiag.choices import Estimate
from fldiag.diagnostics.matching.comparison import (
    HessianSummary,
    Space,
    matching_rows,
    overlap_rows,
)
from fldiag.errors import FldiagError
from fldiag.execution import workspace
from fldiag.problem.diagonal import Diagonal, diagonal_of, norm
from fldiag.problem.eigenpairs import NOISE, eigenvalue_rows, loss_rows, strict_pairs
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
    estimate: Estimate
    rtol: float
    max_products: int
    deflate: int
    seed: int

    @property
    def spectrum(self) -> dict[str, Any]:
        products = max(100, 8 * self.k, self.max_products)
        return {"k": self.k, "tol": self.tol, "max_products": products, "seed": self.seed}

    @property
    def diagonal(self) -> dict[str, Any]:
        names = ("estimate", "rtol", "max_products", "deflate", "seed")
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
        rows = loss_rows(problem)
        diagonal = diagonal_of(problem, **settings.diagonal, progress=workspace().show)
        rows += diagonal_rows(diagonal)
        space = None
        if has_spectrum and settings.k:
            # strict: the overlaps are of the vectors
            pairs = strict_pairs(problem, **settings.spectrum, progress=workspace().show)
            rows += eigenvalue_rows(pairs, noise=NOISE[problem.dtype])
            space = vars(Space.of(pairs, problem.dtype, NOISE[problem.dtype]))
    except FldiagError as error:
        return {"failure": [error.what, error.remedy]}
    return {
        "rows": [{**common, **row} for row in rows],
        "summary": {**_summary(problem, diagonal, settings.rtol), "space": space},
    }


def diagonal_rows(diagonal: Diagonal) -> list[Row]:
    """The diagonal's norm, how far off it may be, and the trace."""
    assert diagonal.values is not None  # entries were asked for
    size, error = norm(diagonal.values, diagonal.stderr)
    rows: list[Row] = []
    if diagonal.stderr is not None:
        noise, length = (
            float(torch.linalg.vector_norm(v)) for v in (diagonal.stderr, diagonal.values)
        )
        share = noise / length if length else None
        rows.append({"metric": "diagonal_error", "value": share})
    rows.append(
        {
            "metric": "diagonal_norm",
            "value": size,
            "stderr": error,
            "converged": diagonal.converged,
        }
    )
    rows.append(
        {
            "metric": "trace",
            "value": diagonal.trace,
            "stderr": diagonal.trace_stderr,
            "converged": diagonal.trace_converged,
        }
    )
    return [{**row, "estimator": diagonal.estimator} for row in rows]


def _summary(problem: Problem, diagonal: Diagonal, rtol: float) -> dict[str, Any]:
    """What comparisons need of a Hessian, but for its eigenspace: the arguments of ``HessianSummary``."""
    assert diagonal.values is not None
    names = problem.layout.names
    traces = torch.tensor([diagonal.traces[n] for n in names], dtype=torch.float64)
    errors = None
    if diagonal.stderr is not None:
        errors = torch.tensor(
            [diagonal.trace_stderrs[n] or 0.0 for n in names], dtype=torch.float64
        )
    is_exact_enough = errors is None or bool(errors.norm() <= rtol * traces.norm())
    entry_errors = None if diagonal.stderr is None else diagonal.stderr.to("cpu", problem.dtype)
    return {
        "client": int(problem.common.get("client", -1)),
        "n": problem.n,
        "vectors": {
            "diag": (diagonal.values.to("cpu", problem.dtype), entry_errors),
            "tensor_trace": (traces, errors),
        },
        "estimator": diagonal.estimator,
        "converged": {"diag": diagonal.converged, "tensor_trace": is_exact_enough},
    }
