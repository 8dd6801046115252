"""How alike the clients' loss surfaces are: norms and directions of their Hessians, overlap of their sharpest directions.

H_N and H_D: Mendieta et al., "Local Learning Matters" (CVPR 2022), equations 3 and 4, as the paper defines them (diagonals, own
data) and as its released code computes them (one trace a parameter tensor, all clients' data, self pairs).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from fldiag.errors import FldiagError
from fldiag.execution import workspace
from fldiag.plotting import style
from fldiag.plotting.shapes import MANY, cells, floats, pairs, select
from fldiag.problem.diagonal import Diagonal, diagonal, norm
from fldiag.problem.eigenpairs import eigenpairs, eigenvalue_rows
from fldiag.registry import diagnostic
from fldiag.results.select import number, only
from fldiag.results.summary import Item, Note, Say, Small, missing_notes
from fldiag.results.table import Row, table
from fldiag.runs.history import History, Stored

#: What D is in H_N and H_D: the Hessian's diagonal, or its trace for every parameter tensor.
FORMS = {"diag": "diagonals", "tensor_trace": "tensor traces"}
DATA = {"client": "own data", "global": "all clients' data"}


class Curvature(NamedTuple):
    """What is kept of a Hessian, on the CPU.

    ``client``: whose model it is (-1: the aggregated one). ``n``: examples. ``rows``: of the table. ``vectors``: by form, D and
    the standard errors of its entries (None: exact). ``converged``: by form. ``estimator``: of D. ``space``: top eigenvectors
    [k, P]; None where they were not asked for, or an eigenvalue is zero, so that they are arbitrary.
    """

    client: int
    n: int
    rows: list[Row]
    vectors: dict[str, tuple[Tensor, Tensor | None]]
    converged: dict[str, bool]
    estimator: str
    space: Tensor | None
    is_converged: bool


#: A model on one slice: the round, the client's place in it (None: the aggregated model), and on whose data.
Unit = tuple[int, int | None, str]


# Hessians


def round_rows(
    history: History, stored: Stored, places: Sequence[str], options: dict[str, Any]
) -> list[Row]:
    """All rows of a round. A client whose Hessian cannot be computed is noted and left out."""
    # the longest first: the aggregated model, then clients on all clients' data, then on their own
    units: list[Unit] = [(stored.round, None, "global")]
    units += [
        (stored.round, j, place) for place in reversed(places) for j in range(len(stored.ids))
    ]
    results = workspace().map(hessian, history, units, spectrum_on=places[0], **options)
    groups: dict[str, list[Curvature]] = {}
    whole, rows, errors = None, list[Row](), dict[int | None, FldiagError]()
    for (_, j, place), result in zip(units, results, strict=True):
        if isinstance(result, FldiagError):
            errors.setdefault(None if j is None else stored.ids[j], result)
        elif j is None:
            whole = result
        else:
            groups.setdefault(place, []).append(result)
    for client, error in errors.items():
        who = "the aggregated model" if client is None else f"client {client}"
        history.note(stored.round, f"{who} is left out: {error.what}", client)
    if len(groups) < len(places):
        raise next(iter(errors.values()))
    for place in places:
        if len(groups[place]) == 1:
            who = f"only client {groups[place][0].client} on {place} data"
            history.note(stored.round, f"{who}: there are no pairs to compare")
        rows += [row for client in groups[place] for row in client.rows]
        rows += [row for form in FORMS for row in matching_rows(groups[place], form, place)]
    rows += whole.rows if whole else []
    return rows + (overlap_rows(groups[places[0]], whole, places[0]) if options["k"] else [])


def slice_of(place: str) -> str:
    """The slice of numbers of several clients."""
    return "train" if place == "global" else "client:*/train"


def hessian(
    history: History,
    unit: Unit,
    spectrum_on: str,
    k: int,
    rtol: float,
    max_products: int,
    seed: int,
) -> Curvature | FldiagError:
    """The Hessian of one model on one slice; the top eigenvectors of a client's on ``spectrum_on`` alone."""
    round, j, place = unit
    stored = history.stored(round)
    options: dict[str, Any] = {"seed": seed, "progress": workspace().show}
    labels: dict[str, Any] = {"moment": "aggregated", "scope": "global"}
    weights, client = (stored.aggregated, stored.buffers), -1
    examples, name = history.pool.clients, "train"
    try:
        if j is not None:
            weights, client = stored.client(j), stored.ids[j]
            labels = {"moment": "trained", "scope": "client", "client": client}
            if place == "client":
                examples, name = history.pool.train_slice(client), f"client:{client}/train"
        problem = history.problem(weights, examples, name, **labels)
        if not bool(torch.isfinite(problem.w).all()):
            raise FldiagError("its weights are not finite")
        whole = diagonal(problem, rtol=rtol, entries=True, max_products=max_products, **options)
        rows = problem.centre.rows(problem) + diagonal_rows(whole, rtol)
        space, is_converged = None, True
        if k and (j is None or place == spectrum_on):
            most = max(100, 8 * k, max_products)
            # strict: the overlaps are of the vectors
            pairs = eigenpairs(problem, k, strict=True, max_products=most, **options)
            rows += eigenvalue_rows(problem, pairs, matrix="hessian")
            sizes, is_converged = np.abs(pairs.values), bool(pairs.converged.all())
            if sizes.min() > problem.noise * sizes.max():
                space = pairs.vectors.to("cpu", problem.dtype)
    except FldiagError as error:
        return error
    noise = whole.vector_stderr()
    traces, errors = np.array([whole.trace([n]) for n in problem.layout.names], dtype=float).T
    errors = np.nan_to_num(errors)
    is_close = np.linalg.norm(errors) <= rtol * np.linalg.norm(traces)
    noise = None if noise is None else noise.to("cpu", problem.dtype)
    common = {**problem.common, "data": None if j is None else place}
    return Curvature(
        client,
        problem.n,
        [{**common, **row} for row in rows],
        {
            "diag": (whole.vector().to("cpu", problem.dtype), noise),
            "tensor_trace": (
                torch.from_numpy(traces),
                None if noise is None else torch.from_numpy(errors),
            ),
        },
        {"diag": whole.converged, "tensor_trace": bool(is_close)},
        whole.estimator(),
        space,
        is_converged,
    )


def diagonal_rows(result: Diagonal, rtol: float) -> list[Row]:
    """The diagonal's norm, how far off it may be, and the trace."""
    (size, error), (trace, stderr) = result.norm(), result.trace()
    about = {"estimator": result.estimator(), "stderr": error, "converged": result.converged}
    rows: list[Row] = [{**about, "metric": "diagonal_norm", "value": size}]
    is_close = stderr is None or stderr <= rtol * abs(trace)
    about |= {"stderr": stderr, "converged": is_close}
    rows.append({**about, "metric": "trace", "value": trace})
    noise, length = result.vector_stderr(), float(result.vector().norm())
    if noise is not None:
        share = float(noise.norm()) / length if length else None
        rows.append({**about, "metric": "diagonal_error", "value": share, "stderr": None})
    return rows


# Comparisons


def matching_rows(clients: Sequence[Curvature], form: str, place: str) -> list[Row]:
    """H_N and H_D of every pair, and their means without and with self pairs."""
    vectors = [client.vectors[form] for client in clients]
    directions = [direction(*vector) for vector in vectors]
    is_exact = all(errors is None for _, errors in vectors)
    common: Row = {"diag_mode": form, "data": place, "moment": "trained", "slice": slice_of(place)}
    common["estimator"] = " and ".join(sorted({client.estimator for client in clients}))
    is_global, sizes = place == "global", [client.n for client in clients]
    rows: list[Row] = []
    for metric, compare in (("H_N", norm_difference), ("H_D", cosine)):
        values = []
        for (a, of_a), (b, of_b) in combinations(zip(clients, directions, strict=True), 2):
            value, error = compare(of_a, of_b)
            is_defined = not np.isnan(value)
            values += [value] * is_defined
            pair = {"scope": "pair", "client": a.client, "client_b": b.client}
            numbers = {
                "value": value if is_defined else None,
                "stderr": None if is_exact or not np.isfinite(error) else error,
                "converged": a.converged[form] and b.converged[form],
                "n_examples": a.n if is_global else a.n + b.n,
            }
            rows.append({**common, "metric": metric, **pair, **numbers})
        # a client without curvature has no direction, not even with itself
        selves = [value for value in (compare(d, d)[0] for d in directions) if not np.isnan(value)]
        for has_self_pairs, terms in ((False, values), (True, [*values, *values, *selves])):
            whole: Row = {"metric": metric, "scope": "global", "self_pairs": has_self_pairs}
            whole |= {"value": float(np.mean(terms)) if terms else None, "n_clients": len(clients)}
            whole["converged"] = all(client.converged[form] for client in clients)
            rows.append({**common, **whole, "n_examples": sizes[0] if is_global else sum(sizes)})
    return rows


#: Entries in units of a vector's length, their standard errors, and the length without the part that noise adds to it.
Direction = tuple[Tensor, Tensor, float]


def direction(values: Tensor, errors: Tensor | None) -> Direction:
    """Of a vector; a zero one has none (NaN)."""
    values = values.double()
    errors = torch.zeros_like(values) if errors is None else errors.double()
    length = norm(values, errors)[0]
    return values / (length or torch.nan), errors / (length or torch.nan), length


def norm_difference(a: Direction, b: Direction) -> tuple[float, float]:
    """(||A|| - ||B||)^2 and its standard error from those of the entries, taken as independent."""
    difference = a[2] - b[2]
    variance = sum(float((unit * noise).square().sum()) * size**2 for unit, noise, size in (a, b))
    return difference**2, float(np.sqrt(4 * difference**2 * variance + 2 * variance**2))


def cosine(a: Direction, b: Direction) -> tuple[float, float]:
    """The cosine of two directions and its standard error; noise in their lengths does not shorten it."""
    if a is b:  # noise that a vector has in common with itself
        return 1.0 if a[2] else np.nan, 0.0
    value = float(torch.dot(a[0], b[0]).clamp(-1, 1))
    slopes = (b[0] - value * a[0]) * a[1], (a[0] - value * b[0]) * b[1]
    return value, float(torch.stack([slope.square().sum() for slope in slopes]).sum().sqrt())


def overlap(a: Tensor | None, b: Tensor | None) -> float | None:
    """The mean squared cosine of the principal angles between the spaces of orthonormal rows a [k, P] and b [k, P].

    >>> round(overlap(torch.eye(3)[:2], torch.eye(3)[1:]), 6)
    0.5
    """
    if a is None or b is None:
        return None
    return min(float((a.double() @ b.double().T).square().sum()) / len(a), 1.0)


def overlap_rows(clients: Sequence[Curvature], whole: Curvature | None, place: str) -> list[Row]:
    """Overlap of the top eigenspaces of every pair of clients, and of every client with the aggregated model, and their means."""
    common: Row = {"moment": "trained", "slice": slice_of(place), "estimator": "lanczos"}
    pairs = {"eigenspace_overlap": list(combinations(clients, 2))}
    if whole is not None:
        pairs["global_overlap"] = [(client, whole) for client in clients]
    rows: list[Row] = []
    for metric, both in pairs.items():
        for a, b in both:
            row: Row = {"scope": "pair", "client": a.client, "client_b": b.client}
            if b is whole:
                row = {"scope": "client", "client": a.client}
            row |= {"metric": metric, "value": overlap(a.space, b.space)}
            rows.append({**common, **row, "converged": a.is_converged and b.is_converged})
    for metric in pairs:
        each = [row for row in rows if row["metric"] == metric and row["value"] is not None]
        row = {"metric": metric, "scope": "global", "n_clients": len(clients)}
        row["value"] = float(np.mean([row["value"] for row in each])) if each else None
        rows.append({**common, **row, "converged": all(row["converged"] for row in each)})
    return rows


# Picture and summary


def draw(table: pd.DataFrame) -> Figure:
    """H_N, H_D and eigenspace overlap of every pair of clients, top eigenvalue and trace of every client, in the last round.

    H_N and H_D are of the paper's form, or of the released code's where own data were not asked for. Blank cells: a client with
    itself, and what is not defined. Raises FldiagError for another table, or one of several runs.
    """
    rows = select(table, "H_N", "picture of matching")
    if rows["run"].nunique() > 1:
        raise FldiagError("the picture of matching is of one run", "choose its rows", usage=True)
    table = only(table, round=int(rows["round"].max()))
    form, place = ("tensor_trace", "global")
    if "client" in set(rows["data"]):
        form, place = "diag", "client"
    of_form, about = only(table, diag_mode=form, data=place), f"\n{FORMS[form]}, {DATA[place]}"
    of_pairs = {
        f"$H_N$%s{about}": only(of_form, metric="H_N"),
        f"$H_D$%s{about}": only(of_form, metric="H_D"),
        "eigenspace overlap%s\n": only(table, metric="eigenspace_overlap"),
    }
    of_pairs = {t: r for t, r in of_pairs.items() if only(r, scope="pair")["value"].notna().any()}
    bars = {
        "$\\lambda_1$": (only(table, metric="eigenvalue", index=1), "residual"),
        "trace": (only(table, metric="trace"), "stderr"),
    }
    bars = {title: part for title, part in bars.items() if len(part[0])}
    with style.paper():
        fig, axes = style.panels(len(of_pairs) + len(bars), 2.3, 0.2)
        for ax, (title, rows) in zip(axes, of_pairs.items(), strict=False):
            mean = number(rows, scope="global", self_pairs=[False, None])
            wide = pairs(only(rows, scope="pair").astype({"client": int, "client_b": int}))
            low, high = float(np.nanmin(wide)), float(np.nanmax(wide))
            # at most four decades: one odd pair shall not bleach the others
            is_wide = "H_N" in title and high > 100 * low > 0
            norm = LogNorm(max(low, high * 1e-4), high) if is_wide else Normalize(low, high)
            cells(ax, wide, norm=norm, square=True, cbar_kws={"fraction": 0.046})
            ax.set(xlabel="client", ylabel="client")
            ax.set_title(title % f", mean {style.number(mean, 3)}", fontsize=7.5)
        for ax, (title, (rows, error)) in zip(axes[len(of_pairs) :], bars.items(), strict=True):
            draw_bars(ax, rows.drop_duplicates(["moment", "client"]), error)
            ax.set_title(f"{title}, clients on {DATA[place]}", fontsize=7.5)
        about = "; black: the aggregated model" if bars else ""
        if any(rows["converged"].eq(False).any() for rows, _ in bars.values()):
            about += "; hollow: not converged"
        fig.suptitle(f"round {int(table['round'].iloc[0])}{about}", fontsize=8)
    return fig


def draw_bars(ax: Axes, rows: pd.DataFrame, error: str) -> None:
    """A bar a client, with its error, and one of the aggregated model."""
    rows = rows.sort_values("client", na_position="last")
    names = ["global" if pd.isna(client) else str(int(client)) for client in rows["client"]]
    edges = ["black" if name == "global" else style.look(2).color for name in names]
    is_done = rows["converged"].fillna(True).astype(bool)
    colors = [edge if done else "white" for edge, done in zip(edges, is_done, strict=True)]
    options: dict[str, Any] = {"color": colors, "edgecolor": edges, "ecolor": "#888888"}
    ax.bar(names, floats(rows["value"]), yerr=np.nan_to_num(floats(rows[error])), **options)
    ax.set_xticks(range(0, len(names), -(-len(names) // 10)))
    ax.tick_params(axis="x", rotation=90)
    ax.set_xlabel("client")
    ax.grid(True, axis="y")


def summary(table: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[Item]:
    """Clients of the last round, and the means over pairs of every round."""
    last = only(table, round=int(table["round"].dropna().max()))
    yield Say(f"round {int(last['round'].iloc[0])}, clients after local training")
    traces = only(last, metric="trace").drop_duplicates("client")
    clients: list[Row] = []
    for client, slice_name in zip(traces["client"], traces["slice"], strict=True):
        part = only(last, client=client, slice=slice_name)
        row: Row = {"client": "global model" if pd.isna(client) else str(int(client))}
        row |= {"slice": slice_name, "loss": number(part, "loss")}
        row["λ_1"] = number(part, "eigenvalue", index=1)
        row["± residual"] = number(part, "eigenvalue", index=1, column="residual")
        row["trace"] = number(part, "trace")
        row["± stderr"] = number(part, "trace", column="stderr")
        overlaps = only(last, scope="client", client=client)
        clients.append({**row, "overlap with global": number(overlaps, "global_overlap")})
    yield Small(clients[-MANY:], {name: name for name in clients[0]})  # all are in the csv
    means = only(table, metric=("H_N", "H_D"), scope="global").astype({"self_pairs": str})
    keys = ["round", "diag_mode", "data", "self_pairs"]
    wide = means.pivot_table("value", keys, "metric", dropna=False).dropna(how="all").reset_index()
    yield Small(wide.tail(24).to_dict("records"), {name: name for name in wide})
    mean = number(last, "eigenspace_overlap", scope="global")
    if mean is not None:
        of = f"the top-{options['k']} eigenspaces of two clients"
        yield Say(f"mean squared cosine between {of}: {mean:.3g}")
    rough = only(last, metric="diagonal_error")["value"]
    if rough.notna().any():
        off = f"estimated diagonals are off by up to {rough.max():.0%} in norm"
        yield Note(f"{off}: H_N and H_D of tensor traces are better (or raise --max-products)")
    yield from missing_notes(table)


# The diagnostic


@diagnostic(
    "matching",
    on="clients",
    draw=draw,
    summary=summary,
    example="checkpoints/digits-fedavg-s0-1a2b3c4d --samples 500",
)
def matching(
    history: History,
    *,
    on: Annotated[
        Literal["both", "client", "global"],
        Field(
            description="Whose data to take the Hessians on: each client's own (client), all clients' "
            "(global), or both."
        ),
    ] = "both",
    k: Annotated[int, Field(ge=0, description="Number of eigenvectors (0: none).")] = 5,
    every_round: Annotated[
        bool | None,
        Field(
            description="Use all rounds instead of only the last (default if --rounds is given)."
        ),
    ] = None,
    rtol: Annotated[
        float,
        Field(
            gt=0, lt=1, description="Allowed relative standard error where diagonals are estimated."
        ),
    ] = 0.02,
    max_products: Annotated[
        int,
        Field(
            ge=2,
            description="Maximum number of Hessian-vector products for an estimate or a spectrum.",
        ),
    ] = 200,
    seed: Annotated[int, Field(description="Random seed.")] = 0,
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
    clients (``rtol``, ``max_products``), and the entries of a diagonal are then rough: column ``converged``, and rows
    ``diagonal_error``, the relative error of D; norms, also those in H_N and H_D, are without the part that noise
    adds. Of the last round with client weights, or all with ``every_round``. Cost a client: about 4 Hessian-vector
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
    rows = [{"masked": row["value"] is None, **row} for row in rows]
    return table([*rows, *history.notes], **history.common)
