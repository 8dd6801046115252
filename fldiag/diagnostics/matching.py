"""How alike the clients' loss surfaces are: norms and directions of their Hessians, overlap of their sharpest directions.

H_N and H_D: Mendieta et al., "Local Learning Matters" (CVPR 2022), equations 3 and 4, as the paper defines them (diagonals, own
data) and as its released code computes them (one trace a parameter tensor, all clients' data, self pairs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from pydantic import Field
from torch import Tensor

from fldiag.diagnostics.spectrum import eigenvalue_rows
from fldiag.errors import FldiagError
from fldiag.execution import workspace
from fldiag.plotting import style
from fldiag.plotting.style import MANY, cells, square
from fldiag.problem.hessian import Diagonal, diagonal, eigenpairs, norm
from fldiag.problem.problem import Problem
from fldiag.registry import diagnostic
from fldiag.results.table import (
    Options,
    Row,
    SmallTable,
    Summary,
    format_number,
    last_round,
    number,
    only,
)
from fldiag.runs.history import History, Stored
from fldiag.sections import EveryRound, Products, Rtol, Seed

#: What D is in H_N and H_D: the Hessian's diagonal, or its trace for every parameter tensor.
FORMS = {"diag": "diagonals", "tensor_trace": "tensor traces"}
#: Whose data -> the slice of numbers of several clients.
SLICES = {"client": "client:*/train", "global": "train"}
#: Metric of pairs -> the title of its panel.
TITLES = {"H_N": "$H_N$", "H_D": "$H_D$", "eigenspace_overlap": "eigenspace overlap"}


class HessianSummary(NamedTuple):
    """What is kept of a Hessian, on the CPU.

    ``client``: whose model it is, and ``place``: on whose data (both None of the aggregated one). ``n``: examples. ``rows``: of
    the table. ``forms``: by form, D, the standard errors of its entries, and whether it converged. ``estimator``: of D.
    ``space``: top eigenvectors [k, P]; None where they were not asked for, or an eigenvalue is zero, so that they are arbitrary;
    ``is_converged``: whether these did.
    """

    client: int | None
    place: str | None
    n: int
    rows: list[Row]
    forms: dict[str, tuple[Tensor, Tensor, bool]]
    estimator: str
    space: Tensor | None
    is_converged: bool


#: A model on examples: the round, the moment, the client (None: the aggregated model on all data), and a key of ``SLICES``.
Unit = tuple[int, str, Any, str]


# Loss surfaces of a round


def on_surfaces(
    history: History, units: Sequence[Unit], function: Callable[..., Any], **options: Any
) -> Iterator[Any]:
    """``function(problem, unit, **options)`` of these loss surfaces, wherever the workspace computes.

    A model whose curvature cannot be computed is left out, with a note."""
    results = workspace().map(_measure, history, units, function=function, options=options)
    for unit, result in zip(units, results, strict=True):
        if isinstance(result, FldiagError):
            r, _, client, _ = unit
            who = "the aggregated model" if client is None else f"client {client}"
            history.note(r, f"{who} is left out: {result.what}", client)
        else:
            yield result


def _measure(
    history: History, unit: Unit, function: Callable[..., Any], options: dict[str, Any]
) -> Any:
    round, moment, client, place = unit
    stored, examples, name = history.stored(round), history.pool.clients, "train"
    weights, scope = stored.end, "global" if client is None else "client"
    if moment == "trained":
        weights = stored.client(stored.ids.index(client))
    if place == "client":
        examples, name = history.pool.train_slice(client), f"client:{client}/train"
    about: Row = {"round": round, "moment": moment, "scope": scope, "client": client}
    try:
        return function(history.problem(weights, examples, name, **about), unit, **options)
    except FldiagError as error:
        return error


# Hessians


def round_rows(
    history: History, stored: Stored, places: Sequence[str], options: dict[str, Any]
) -> list[Row]:
    """All rows of a round."""
    r = stored.round
    # the longest first: the aggregated model, then clients on all clients' data, then on their own
    units: list[Unit] = [
        (r, "aggregated", None, "global"),
        *((r, "trained", k, place) for place in reversed(places) for k in stored.ids),
    ]
    models = list(on_surfaces(history, units, hessian_summary, spectrum_on=places[0], **options))
    whole, *groups = ([m for m in models if m.place == place] for place in (None, *places))
    if not all(groups):
        raise FldiagError(history.notes[-1]["note"])
    rows: list[Row] = []
    for place, clients in zip(places, groups, strict=True):
        rows += [row for client in clients for row in client.rows]
        rows += [row for form in FORMS for row in matching_rows(clients, form, place)]
    rows += [row for model in whole for row in model.rows]
    return rows + (overlap_rows(groups[0], whole, SLICES[places[0]]) if options["k"] else [])


def hessian_summary(
    problem: Problem,
    unit: Unit,
    spectrum_on: str,
    k: int,
    rtol: float,
    max_products: int,
    seed: int,
) -> HessianSummary:
    """The Hessian of one model on one slice; the top eigenvectors of a client's on ``spectrum_on`` alone."""
    *_, client, place = unit
    data = None if client is None else place
    options: dict[str, Any] = {"seed": seed, "progress": workspace().show}
    whole = diagonal(problem, rtol=rtol, entries=True, max_products=max_products, **options)
    rows = problem.centre.rows(problem) + norm_and_trace(whole, rtol)
    space, is_converged = None, True
    if k and data in (None, spectrum_on):
        most = max(100, 8 * k, max_products)
        # strict: the overlaps are of the vectors
        top = eigenpairs(problem, k, strict=True, max_products=most, **options)
        rows += eigenvalue_rows(problem, top, matrix="hessian")
        sizes, is_converged = np.abs(top.values), bool(top.converged.all())
        if sizes.min() > problem.noise * sizes.max():
            space = top.vectors.to("cpu", problem.dtype)
    of_tensors = np.array([whole.part([n]).trace() for n in problem.layout.names], dtype=float)
    traces, errors = torch.from_numpy(np.nan_to_num(of_tensors)).T
    entries, noise = (v.to("cpu", problem.dtype) for v in whole.vectors())
    forms = {
        "diag": (entries, noise, whole.converged),
        "tensor_trace": (traces, errors, bool(errors.norm() <= rtol * traces.norm())),
    }
    rows = [{**problem.common, "data": data, **row} for row in rows]
    estimator = whole.estimator()
    return HessianSummary(client, data, problem.n, rows, forms, estimator, space, is_converged)


def norm_and_trace(result: Diagonal, rtol: float) -> list[Row]:
    """The diagonal's norm, and the trace."""
    (size, error), (trace, stderr) = result.norm(), result.trace()
    about: Row = {"estimator": result.estimator(), "converged": result.converged}
    rows = [{**about, "metric": "diagonal_norm", "value": size, "stderr": error}]
    about["converged"] = stderr is None or stderr <= rtol * abs(trace)
    return [*rows, {**about, "metric": "trace", "value": trace, "stderr": stderr}]


# Comparisons


def matching_rows(clients: Sequence[HessianSummary], form: str, place: str) -> list[Row]:
    """H_N and H_D of every pair, and their means without and with self pairs."""
    directions = [direction(*client.forms[form][:2]) for client in clients]
    count = max if place == "global" else sum
    common: Row = {"diag_mode": form, "data": place, "moment": "trained", "slice": SLICES[place]}
    common["estimator"] = " and ".join(sorted({client.estimator for client in clients}))
    # a client without curvature has no direction, not even with itself
    selves = {"H_N": [0.0] * len(clients), "H_D": [1.0 for *_, size in directions if size]}
    rows: list[Row] = []

    def add(some: Sequence[HessianSummary], **about: Any) -> None:
        about["converged"] = all(client.forms[form][2] for client in some)
        rows.append({**common, **about, "n_examples": count(client.n for client in some)})

    for metric, compare in (("H_N", norm_difference), ("H_D", cosine)):
        common["metric"], values = metric, list[float]()
        for (a, of_a), (b, of_b) in combinations(zip(clients, directions, strict=True), 2):
            value, error = compare(of_a, of_b)
            values += [value] * (value == value)
            pair = {"client": a.client, "client_b": b.client}
            add((a, b), scope="pair", **pair, value=value, stderr=error or None)
        for has_self_pairs in (False, True):
            terms = [*values, *values, *selves[metric] * has_self_pairs]
            mean = {"n_clients": len(clients), "value": np.mean(terms) if terms else None}
            add(clients, scope="global", self_pairs=has_self_pairs, **mean)
    return rows


#: Entries in units of a vector's length, their standard errors, and the length without the part that noise adds to it.
Direction = tuple[Tensor, Tensor, float]


def direction(values: Tensor, errors: Tensor) -> Direction:
    """Of a vector; a zero one has none (NaN)."""
    values, errors = values.double(), errors.double()
    length = norm(values, errors)[0]
    return values / (length or torch.nan), errors / (length or torch.nan), length


def norm_difference(a: Direction, b: Direction) -> tuple[float, float]:
    """(||A|| - ||B||)^2 and its standard error from those of the entries, taken as independent."""
    difference = a[2] - b[2]
    variance = sum(float((unit * noise).square().sum()) * size**2 for unit, noise, size in (a, b))
    return difference**2, float(np.sqrt(4 * difference**2 * variance + 2 * variance**2))


def cosine(a: Direction, b: Direction) -> tuple[float, float]:
    """The cosine of two directions and its standard error; noise in their lengths does not shorten it."""
    value = float(torch.dot(a[0], b[0]).clamp(-1, 1))
    slopes = torch.stack([(b[0] - value * a[0]) * a[1], (a[0] - value * b[0]) * b[1]])
    return value, float(slopes.norm())


def overlap_rows(
    clients: Sequence[HessianSummary], whole: Sequence[HessianSummary], slice_name: str
) -> list[Row]:
    """Overlap of the top eigenspaces of every pair of clients, and of every client with the aggregated model, and their means:
    the mean squared cosine of the principal angles of two orthonormal bases [k, P]."""
    common: Row = {"moment": "trained", "slice": slice_name, "estimator": "lanczos"}
    rows, means = list[Row](), list[Row]()
    couples = {
        "eigenspace_overlap": ("pair", combinations(clients, 2)),
        "global_overlap": ("client", product(clients, whole)),
    }
    for metric, (scope, both) in couples.items():
        common["metric"], values, is_converged = metric, list[float](), True
        for a, b in both:
            row: Row = {"scope": scope, "client": a.client, "client_b": b.client, "value": None}
            row["converged"] = a.is_converged and b.is_converged
            is_converged &= row["converged"]
            if a.space is not None and b.space is not None:
                cosines = a.space.double() @ b.space.double().T
                row["value"] = min(float(cosines.square().sum()) / len(a.space), 1.0)
                values.append(row["value"])
            rows.append({**common, **row})
        mean = float(np.mean(values)) if values else None
        about: Row = {"scope": "global", "n_clients": len(clients), "converged": is_converged}
        means.append({**common, **about, "value": mean})
    return rows + means


# Picture and summary


def draw(table: pd.DataFrame) -> style.Figure | None:
    """H_N, H_D and eigenspace overlap of every pair of clients in the last round; None where there is one client.

    H_N and H_D are of the paper's form, or of the released code's where own data were not asked for. Blank cells: a client with
    itself, and what is not defined. Raises FldiagError for a table of several runs.
    """
    from matplotlib.colors import LogNorm

    if table["run"].nunique() > 1:
        raise FldiagError("the picture of matching is of one run", "choose its rows", usage=True)
    rows = only(table, metric="H_N")
    last, is_own = last_round(rows), "client" in set(rows["data"])
    form, place = ("diag", "client") if is_own else ("tensor_trace", "global")
    rows = only(table, round=last, diag_mode=[form, None], data=[place, None])
    matrices = {
        metric: square(part)
        for metric, part in only(rows, scope="pair").groupby("metric", sort=False)
        if part["value"].notna().any()
    }
    if not matrices:
        return None
    with style.paper():
        fig, axes = style.panels(len(matrices), 2.3)
        for ax, (metric, wide) in zip(axes, matrices.items(), strict=True):
            low, high = np.nanmin(wide), np.nanmax(wide)
            # at most four decades: a pair that is nearly equal shall not bleach the others
            is_wide = metric == "H_N" and high > 100 * low > 0
            norm = LogNorm(max(low, high / 1e4), high, clip=True) if is_wide else None
            cells(ax, wide, norm=norm, square=True, cbar_kws={"fraction": 0.046})
            mean = format_number(number(rows, metric, scope="global", self_pairs=[False, None]), 3)
            ax.set(xlabel="client", ylabel="client", title=f"{TITLES[metric]}, mean {mean}")
        whose = "own data" if is_own else "all clients' data"
        fig.suptitle(f"round {last}; $H_N$ and $H_D$: {FORMS[form]}, {whose}", fontsize=8)
    return fig


def summary(table: pd.DataFrame, options: Options) -> Summary:
    """Clients of the last round, and the means over pairs of every round."""
    last, clients = only(table, round=last_round(table)), list[Row]()
    for _, trace in only(last, metric="trace").drop_duplicates("client")[-MANY:].iterrows():
        client, slice_name = trace["client"], trace["slice"]
        part = only(last, client=client, slice=slice_name)
        top = only(part, metric="eigenvalue", index=1)
        clients.append(
            {
                "client": "global model" if pd.isna(client) else str(client),
                "slice": slice_name,
                "loss": number(part, "loss"),
                "λ_1": number(top),
                "± residual": number(top, column="residual"),
                "trace": trace["value"],
                "± stderr": trace["stderr"],
                "overlap with global": number(
                    last, "global_overlap", client=client, scope="client"
                ),
            }
        )
    yield SmallTable.of(clients)
    means = only(table, metric=set(TITLES), scope="global").astype({"self_pairs": str})
    keys = ["round", "diag_mode", "data", "self_pairs"]
    wide = means.pivot_table("value", keys, "metric", dropna=False).dropna(how="all").reset_index()
    yield SmallTable.of(wide.tail(24))


# The diagnostic


@diagnostic(
    "matching",
    on="run",
    draw=draw,
    summary=summary,
    example="checkpoints/digits-fedavg-s0-1a2b3c4d --samples 500",
)
def matching(
    history: History,
    *,
    on: Annotated[
        Literal["both", "client", "global"],
        Field(description="Whose data to take the Hessians on: own (client), all (global), both."),
    ] = "both",
    k: Annotated[int, Field(ge=0, description="Number of eigenvectors (0: none).")] = 5,
    every_round: EveryRound = None,
    rtol: Rtol = 0.02,
    max_products: Products = 200,
    seed: Seed = 0,
) -> pd.DataFrame:
    """Measure how similar the clients' Hessians are: H_N, H_D, top eigenvalues, traces, overlap of eigenspaces.

    Hessians H_k of the clients' trained weights, on each client's own training data (``on`` client) or on all clients'
    (global); by default both. Rows:

    - ``H_N`` (||D_k|| - ||D_j||)^2 and ``H_D`` <D_k, D_j> / (||D_k|| ||D_j||) of every pair (scope pair), and their means
      over ordered pairs (scope global) without and with the pairs k = j (column ``self_pairs``; they add 0 and 1, so
      with C clients H_N shrinks by (C-1)/C). Column ``diag_mode``: D is the ``diag``onal (the paper's form), or has one
      trace for every parameter tensor (``tensor_trace``; the released code's form, with global data and self pairs).
    - of every client, and of the aggregated model on global data: ``loss``, the top ``k`` ``eigenvalue`` with residuals
      (index 1 is the largest), ``eigenvalue_ratio``, ``trace`` (H_T), ``diagonal_norm``.
    - ``eigenspace_overlap`` of the top-k eigenspaces on own data (global if not asked for): the mean squared cosine of their
      principal angles; 1 for the same space, about k / P by chance, P weights. Of every pair and its mean; of every client with
      the aggregated model as ``global_overlap``. None (``masked``, and not in the mean) where one of the k eigenvalues is zero:
      its eigenvector is arbitrary.

    Diagonals and traces are exact where ``spectrum --trace`` has them so; else estimates with the same random probes for all
    clients (``rtol``, ``max_products``), and the entries of a diagonal are then rough: columns ``stderr`` and ``converged``.
    Norms, also those in H_N and H_D, are without the part that noise adds. Of the last round with client
    weights, or all with ``every_round``. Cost a client: about 4 Hessian-vector
    products on own and on global data, and one spectrum.

    Raises FldiagError when no round has client weights, or no client's Hessian can be computed.
    """
    places = ["client", "global"] if on == "both" else [on]
    options = {"k": k, "rtol": rtol, "max_products": max_products, "seed": seed}
    rows = [
        {"round": stored.round, **row}
        for stored in history.each(every_round=every_round)
        for row in round_rows(history, stored, places, options)
    ]
    return history.table(rows)
