"""How alike the clients' loss surfaces are: norms and directions of their Hessians, overlap of their sharpest directions.

H_N and H_D: Mendieta et al., "Local Learning Matters" (CVPR 2022), equations 3 and 4, as the paper defines them (diagonals, own
data) and as its released code computes them (one trace a parameter tensor, all clients' data, self pairs).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
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


class Unit(NamedTuple):
    """A model on one slice: the client at a place of the round (None: the aggregated model), on whose data."""

    round: int
    place: int | None
    data: str

    def __str__(self) -> str:
        return f"round {self.round}, model {self.place}, {DATA[self.data]}"


@dataclass(frozen=True)
class Curvature:
    """What is kept of a Hessian, on the CPU.

    Args:
        client: whose model it is; -1: the aggregated one.
        n: examples.
        rows: of the table.
        vectors: by form, D and the standard errors of its entries (None: exact).
        converged: by form.
        estimator: of D.
        space: top eigenvectors [k, P]; None where they were not asked for.
        is_defined: whether none of their eigenvalues is zero, so that they are not arbitrary.
        is_converged: whether they converged.
    """

    client: int
    n: int
    rows: list[Row]
    vectors: dict[str, tuple[Tensor, Tensor | None]]
    converged: dict[str, bool]
    estimator: str
    space: Tensor | None = None
    is_defined: bool = False
    is_converged: bool = True


# Hessians


def round_rows(
    history: History, stored: Stored, places: Sequence[str], options: dict[str, Any]
) -> list[Row]:
    """All rows of a round. A client whose Hessian cannot be computed is noted and left out."""
    # the longest first: the aggregated model, then clients on all clients' data, then on their own
    units = [Unit(stored.round, None, "global")]
    units += [
        Unit(stored.round, j, place) for place in reversed(places) for j in range(len(stored.ids))
    ]
    options = {**options, "spectrum_on": places[0]}
    whole, *parts = workspace().map(hessian, history, units, **options)
    rows: list[Row] = []
    noted: set[int | None] = set()
    spaces: list[Curvature] = []
    for place in places:
        results = [r for (_, _, p), r in zip(units[1:], parts, strict=True) if p == place]
        clients = [result for result in results if isinstance(result, Curvature)]
        for client, result in zip(stored.ids, results, strict=True):
            if isinstance(result, FldiagError) and client not in noted:
                history.note(stored.round, f"client {client} is left out: {result.what}", client)
                noted.add(client)
        if not clients:
            raise results[0]
        if len(clients) == 1:
            who = f"only client {clients[0].client} on {place} data"
            history.note(stored.round, f"{who}: there are no pairs to compare")
        rows += [row for client in clients for row in client.rows]
        rows += [row for form in FORMS for row in matching_rows(clients, form, place)]
        spaces += [client for client in clients if client.space is not None]
    if isinstance(whole, FldiagError):
        history.note(stored.round, f"the aggregated model is left out: {whole.what}")
        return rows + overlap_rows(spaces, None, slice_of(places[0]))
    return rows + whole.rows + overlap_rows(spaces, whole, slice_of(places[0]))


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
    stored, show = history.stored(round), workspace().show
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
        whole = diagonal(
            problem,
            rtol=rtol,
            entries=True,
            max_products=max_products,
            seed=seed,
            progress=show,
        )
        rows = problem.centre.rows(problem) + diagonal_rows(whole, rtol)
        space: dict[str, Any] = {}
        if k and (j is None or place == spectrum_on):
            most = max(100, 8 * k, max_products)
            # strict: the overlaps are of the vectors
            pairs = eigenpairs(problem, k, strict=True, max_products=most, seed=seed, progress=show)
            rows += eigenvalue_rows(problem, pairs, matrix="hessian")
            sizes = np.abs(pairs.values)
            space = {
                "space": pairs.vectors.to("cpu", problem.dtype),
                "is_defined": bool(sizes.min() > problem.noise * sizes.max()),
                "is_converged": bool(pairs.converged.all()),
            }
    except FldiagError as error:
        return error
    noise = whole.vector_stderr()
    traces, errors = np.array([whole.trace([n]) for n in problem.layout.names], dtype=float).T
    errors = np.nan_to_num(errors)
    is_close = np.linalg.norm(errors) <= rtol * np.linalg.norm(traces)
    common = {**problem.common, "data": None if j is None else place}
    return Curvature(
        client,
        problem.n,
        [{**common, **row} for row in rows],
        {
            "diag": (
                whole.vector().to("cpu", problem.dtype),
                None if noise is None else noise.to("cpu", problem.dtype),
            ),
            "tensor_trace": (
                torch.from_numpy(traces),
                None if noise is None else torch.from_numpy(errors),
            ),
        },
        {"diag": whole.converged, "tensor_trace": bool(is_close)},
        whole.estimator(),
        **space,
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
    rows: list[Row] = []
    for metric, compare in (("H_N", norm_difference), ("H_D", cosine)):
        values = []
        for i, j in combinations(range(len(clients)), 2):
            (value, error), a, b = compare(directions[i], directions[j]), clients[i], clients[j]
            is_defined = not np.isnan(value)
            values += [value] * is_defined
            pair = {"scope": "pair", "client": a.client, "client_b": b.client}
            numbers = {
                "value": value if is_defined else None,
                "stderr": None if is_exact or not np.isfinite(error) else error,
                "converged": a.converged[form] and b.converged[form],
                "n_examples": a.n if place == "global" else a.n + b.n,
            }
            rows.append({**common, "metric": metric, **pair, **numbers})
        # a client without curvature has no direction, not even with itself
        selves = [compare(d, d)[0] for d in directions]
        selves = [value for value in selves if not np.isnan(value)]
        for has_self_pairs, terms in ((False, values), (True, [*values, *values, *selves])):
            sizes = [client.n for client in clients]
            whole: Row = {
                "scope": "global",
                "self_pairs": has_self_pairs,
                "value": float(np.mean(terms)) if terms else None,
                "converged": all(client.converged[form] for client in clients),
                "n_clients": len(clients),
                "n_examples": sizes[0] if place == "global" else sum(sizes),
            }
            rows.append({**common, "metric": metric, **whole})
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


def overlap(a: Tensor, b: Tensor) -> float:
    """The mean squared cosine of the principal angles between the spaces of orthonormal rows a [k, P] and b [k, P].

    >>> round(overlap(torch.eye(3)[:2], torch.eye(3)[1:]), 6)
    0.5
    """
    return min(float((a.double() @ b.double().T).square().sum()) / len(a), 1.0)


def overlap_rows(
    clients: Sequence[Curvature], whole: Curvature | None, slice_name: str
) -> list[Row]:
    """Overlap of the top eigenspaces of every pair of clients, and of every client with the aggregated model, and their means."""
    if not clients:
        return []
    metrics, pairs = ["eigenspace_overlap"], list(combinations(clients, 2))
    if whole is not None:
        metrics, pairs = [*metrics, "global_overlap"], [*pairs, *((c, whole) for c in clients)]
    common: Row = {"moment": "trained", "slice": slice_name, "estimator": "lanczos"}
    rows: list[Row] = []
    for a, b in pairs:
        value = None
        if a.is_defined and b.is_defined and a.space is not None and b.space is not None:
            value = overlap(a.space, b.space)
        row = {"metric": metrics[0], "scope": "pair", "client": a.client, "client_b": b.client}
        if b is whole:
            row = {"metric": "global_overlap", "scope": "client", "client": a.client}
        row |= {"value": value, "converged": a.is_converged and b.is_converged}
        rows.append({**common, **row})
    for metric in metrics:
        each = [row for row in rows if row["metric"] == metric and row["value"] is not None]
        mean = float(np.mean([row["value"] for row in each])) if each else None
        row = {"metric": metric, "scope": "global", "value": mean, "n_clients": len(clients)}
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
    form, place = (
        ("diag", "client") if "client" in set(rows["data"]) else ("tensor_trace", "global")
    )
    of_form = only(table, diag_mode=form, data=place)
    about = f"\n{FORMS[form]}, {DATA[place]}"
    of_pairs = {
        f"$H_N$%s{about}": only(of_form, metric="H_N"),
        f"$H_D$%s{about}": only(of_form, metric="H_D"),
        "eigenspace overlap%s\n": only(table, metric="eigenspace_overlap"),
    }
    bars = {
        f"$\\lambda_1$, clients on {DATA[place]}": (
            only(table, metric="eigenvalue", index=1),
            "residual",
        ),
        f"trace, clients on {DATA[place]}": (only(table, metric="trace"), "stderr"),
    }
    of_pairs = {t: r for t, r in of_pairs.items() if only(r, scope="pair")["value"].notna().any()}
    bars = {title: part for title, part in bars.items() if len(part[0])}
    with style.paper():
        fig, axes = style.panels(len(of_pairs) + len(bars), 2.3, 0.2)
        for ax, (title, rows) in zip(axes, of_pairs.items(), strict=False):
            mean = number(rows, scope="global", self_pairs=[False, None])
            draw_pairs(ax, only(rows, scope="pair"), "H_N" in title)
            ax.set_title(title % f", mean {style.plain(style.number(mean, 3))}", fontsize=7.5)
        for ax, (title, (rows, error)) in zip(axes[len(of_pairs) :], bars.items(), strict=True):
            draw_bars(ax, rows.drop_duplicates(["moment", "client"]), error)
            ax.set_title(title, fontsize=7.5)
        is_hollow = any(rows["converged"].eq(False).any() for rows, _ in bars.values())
        hollow = "; hollow: not converged" if is_hollow else ""
        black = "; black: the aggregated model" if bars else ""
        fig.suptitle(f"round {int(table['round'].iloc[0])}{black}{hollow}", fontsize=8)
    return fig


def draw_pairs(ax: Axes, rows: pd.DataFrame, is_wide: bool) -> None:
    """The number of every pair in colour; those that may range ``is_wide``, on a logarithmic scale if they do."""
    wide = pairs(rows.astype({"client": int, "client_b": int}))
    low, high = float(np.nanmin(wide)), float(np.nanmax(wide))
    colors = Normalize(low, high if high > low else low + 1e-3)
    if (
        is_wide and low > 0 and high > 100 * low
    ):  # four decades: one odd pair shall not bleach the others
        colors = LogNorm(max(low, high * 1e-4), high)
    ticks = None if isinstance(colors, LogNorm) else MaxNLocator(4)
    cells(ax, wide, norm=colors, square=True, cbar_kws={"ticks": ticks, "fraction": 0.046})
    ax.set(xlabel="client", ylabel="client")


def draw_bars(ax: Axes, rows: pd.DataFrame, error: str) -> None:
    """A bar a client, with its error, and one of the aggregated model."""
    rows = rows.sort_values("client", na_position="last")
    values, errors = floats(rows["value"]), np.nan_to_num(floats(rows[error]))
    names = ["global" if pd.isna(client) else str(int(client)) for client in rows["client"]]
    is_done = rows["converged"].fillna(True).astype(bool)
    edges = ["black" if name == "global" else style.look(2).color for name in names]
    colors = [edge if done else "white" for edge, done in zip(edges, is_done, strict=True)]
    ax.bar(range(len(rows)), values, color=colors, edgecolor=edges, linewidth=0.8)
    ax.errorbar(
        range(len(rows)), values, errors, fmt="none", ecolor="#888888", elinewidth=0.8, capsize=0
    )
    stride = -(-len(names) // 10)
    ax.set_xticks(range(0, len(names), stride), names[::stride], rotation=90)
    ax.axhline(0, color="black", linewidth=0.5)
    ax.set_xlabel("client")
    ax.grid(True, axis="y")


def summary(table: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[Item]:
    """Clients of the last round, and the means over pairs of every round."""
    last = only(table, round=int(table["round"].dropna().max()))
    yield Say(f"round {int(last['round'].iloc[0])}, clients after local training")
    clients: list[Row] = []
    whole: list[Row] = []
    traces = only(last, metric="trace").drop_duplicates("client")
    for client, slice_name in zip(traces["client"], traces["slice"], strict=True):
        part = only(last, client=client, slice=slice_name)
        is_whole = pd.isna(client)
        row = {
            "client": "global model" if is_whole else str(int(client)),
            "slice": slice_name,
            "loss": number(part, "loss"),
            "λ_1": number(part, "eigenvalue", index=1),
            "± residual": number(part, "eigenvalue", index=1, column="residual"),
            "trace": number(part, "trace"),
            "± stderr": number(part, "trace", column="stderr"),
            "overlap with global": number(last, "global_overlap", scope="client", client=client),
        }
        (whole if is_whole else clients).append(row)
    clients = clients[:MANY] + whole  # a longer table is read from the csv
    yield Small(clients, {name: name for name in clients[0]})
    means = only(table, metric=("H_N", "H_D"), scope="global").astype({"self_pairs": str})
    keys = ["round", "diag_mode", "data", "self_pairs"]
    wide = means.pivot_table("value", keys, "metric", dropna=False).dropna(how="all").reset_index()
    wide = wide.astype({"round": int})
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
    rows = history.each_round(
        lambda stored: round_rows(history, stored, places, options), every_round=every_round
    )
    rows = [{"masked": row["value"] is None, **row} for row in rows]
    return table([*rows, *history.notes], **history.common)
