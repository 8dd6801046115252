"""Why it forgot: a second-order account of what each client's update does to the loss on everybody's data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from fldiag.errors import FldiagError
from fldiag.execution import workspace
from fldiag.plotting import style
from fldiag.plotting.shapes import floats, select
from fldiag.problem.eigenpairs import eigenpairs
from fldiag.registry import diagnostic
from fldiag.results.means import sample_mean
from fldiag.results.select import last_round, number, only
from fldiag.results.summary import Item, Say, Small, missing_notes
from fldiag.results.table import Row, table
from fldiag.runs.history import History, Stored
from fldiag.runs.pool import Weights

#: Relative distance up to which the aggregated weights are the weighted mean of the clients.
SAME = 1e-5
#: Term -> how pictures call it.
TERMS = {
    "linear": "linear: gᵀd",
    "quadratic": "quadratic: dᵀHd / 2",
    "rest": "rest",
}
SUMMARY = {
    "client": "client",
    "change": "change",
    **{term: term for term in TERMS},
    "effect": "without it",
    "stderr": "± stderr",
}


# The measure


def round_rows(
    history: History,
    stored: Stored,
    slice_name: str,
    k: int,
    tol: float,
    max_products: int,
    seed: int,
) -> list[Row]:
    """The account of one round's updates."""
    stretch = history.stretch(slice_name)
    problem = history.problem(stored.start, stretch, slice_name)
    stored = history.finite(stored)
    before = problem.centre
    if not np.isfinite(before.loss):
        raise FldiagError(
            f"round {stored.round}: the loss of the received weights on {slice_name} is {before.loss}",
            "choose earlier rounds",
        )
    whole: Row = {"moment": "aggregated", "scope": "global"}
    ends: list[tuple[Row, Weights]] = [
        ({"moment": "trained", "scope": "client", "client": client}, stored.client(j))
        for j, client in enumerate(stored.ids)
    ]
    ends.append((whole, (stored.aggregated, stored.buffers)))
    start, g, hessian = stored.start[0], problem.gradient(), problem.hessian()
    values, vectors = np.zeros(0), torch.zeros(0, len(g)).to(g)
    errors = []
    if k:
        options: dict[str, Any] = {"tol": tol, "max_products": max_products, "seed": seed}
        most = min(k, problem.layout.size)
        pairs = eigenpairs(problem, most, progress=workspace().show, **options)
        values, vectors = pairs.values, pairs.vectors.double()
        triples = zip(pairs.values, pairs.residuals, pairs.converged, strict=True)
        errors = [
            {"eigenvalue": float(v), "residual": float(r), "converged": bool(c)}
            for v, r, c in triples
        ]
    rows: list[Row] = [{**whole, **row, "moment": "received"} for row in before.rows(problem)]
    updates, curved = [], torch.empty(0)
    for i, (columns, (w, buffers)) in enumerate(ends):
        workspace().show(i, len(ends), "updates")
        d = (w - start).double()
        # with buffers of its own an update is not all that changed: their effect is in the rest
        end = history.problem((w, buffers), stretch, slice_name) if buffers else None
        after = end.scores() if end else problem.scores(problem.w.double() + d)
        change, curved = after.loss - before.loss, hessian(d)
        terms = {"linear": float(g @ d), "quadratic": 0.5 * float(d @ curved)}
        exact = {"change": change, **terms, "rest": change - sum(terms.values())}
        parts = after.rows(problem) if columns == whole else []
        parts += [{"metric": m, "value": v, "estimator": "exact"} for m, v in exact.items()]
        along = (vectors @ d).cpu().numpy()
        each = {"linear": (vectors @ g).cpu().numpy() * along, "quadratic": values * along**2 / 2}
        for metric, numbers in each.items() if k else ():
            common = {"metric": metric, "estimator": "eigen"}
            for index, value in enumerate(numbers.tolist()):
                parts.append({**common, "index": index + 1, "value": value, **errors[index]})
            rest = terms[metric] - float(numbers.sum())
            parts.append({**common, "index": 0, "value": rest})
        updates.append(d)
        rows += [{**columns, **row} for row in parts]
    # what each client's share of the aggregated update gives, and what the server added
    shares = [p * d for p, d in zip(history.weights(stored.ids), updates, strict=False)]
    shares.append(updates[-1] - sum(shares))
    for (columns, _), share in zip(ends, shares, strict=True):
        common = {**columns, "moment": "aggregated", "estimator": "client"}
        numbers = {"linear": float(g @ share), "quadratic": 0.5 * float(share @ curved)}
        rows += [{**common, "metric": metric, "value": v} for metric, v in numbers.items()]
    rows += effect_rows(history, stored, stretch)
    return [{"slice": slice_name, "n_examples": problem.n, **row} for row in rows]


def effect_rows(history: History, stored: Stored, stretch: slice) -> list[Row]:
    """What the loss gains when a client is left out of the mean: above 0 it helps."""
    assert stored.clients is not None
    p = torch.as_tensor(history.weights(stored.ids), device=stored.clients.device)
    clients = stored.clients.double()
    distance = float((p @ clients - stored.aggregated).norm())
    note = ""
    if len(p) and float(p.max()) >= 1:
        note = "one client is all of the average"
    elif distance > SAME * float(stored.aggregated.norm()):
        note = "the server does more than the weighted mean of the clients"
    models = [(stored.aggregated, stored.buffers)]
    for j in range(0 if note else len(p)):
        others = p.clone()
        others[j] = 0
        others /= others.sum()
        buffers = {name: mean_of(b, others) for name, b in stored.client_buffers.items()}
        models.append(((others @ clients).to(stored.clients.dtype), buffers or stored.buffers))
    losses = history.evaluate(models).loss[:, stretch]
    rows: list[Row] = []
    for j, client in enumerate(stored.ids):
        row: Row = {"metric": "effect", "estimator": "exact", "moment": "aggregated"}
        row |= {"scope": "client", "client": client, "value": None, "note": note or None}
        rows.append(row if note else {**row, **sample_mean(losses[j + 1] - losses[0])})
    return rows


def mean_of(buffer: Tensor, p: Tensor) -> Tensor:
    """Of a buffer [K, ...] of clients with weights p [K]; of counts the largest."""
    if not buffer.is_floating_point():
        return buffer[p > 0].amax(0)
    return torch.tensordot(p, buffer.double(), 1).to(buffer.dtype)


# Picture and summary


def draw(frame: pd.DataFrame) -> Figure:
    """The last round: the terms of every update beside the true change of the loss, the terms along the top Hessian eigenvectors
    (means over the clients), and what the loss gains without each client. Raises FldiagError for another table."""
    select(frame, "change", "picture of the account")
    rows = only(frame, round=last_round(frame, "change"))
    exact = only(rows, estimator="exact")
    eigen = only(rows, estimator="eigen", moment="trained")
    loss = f"{rows['slice'].dropna().iloc[0]} loss"
    looks = dict(zip(TERMS, (style.look(i) for i in (2, 5, 4)), strict=True))
    with style.paper():
        fig, (terms, along, without) = style.panels(3, 2.4, least=2.0)
        clients = only(exact, metric="change")["client"].tolist()
        names = ["all" if pd.isna(k) else f"{k:g}" for k in clients]
        values = {m: floats(only(exact, metric=m)["value"]) for m in TERMS}
        bars(terms, values, looks, names)
        change = floats(only(exact, metric="change")["value"])
        size = 4 if len(names) <= 20 else 2
        mark = {**style.Look("black", "D", "-").point, "markersize": size}
        terms.plot(range(len(names)), change, **mark, markerfacecolor="white", label="true change")
        terms.set(title="every update", xlabel="client (all: aggregated)")
        if len(eigen):
            means = {
                m: only(eigen, metric=m).groupby("index")["value"].mean()
                for m in TERMS
                if m != "rest"
            }
            order = [*sorted(means["linear"].index[1:]), 0]
            values = {m: floats(v.reindex(order)) for m, v in means.items()}
            bars(along, values, looks, ["rest" if i == 0 else f"{i:g}" for i in order])
            along.set(title="along eigenvectors", xlabel="eigenvector (mean of clients)")
        else:
            along.remove()
        effect = only(exact, metric="effect").dropna(subset=["value"])
        if len(effect):
            error = np.nan_to_num(floats(effect["stderr"]))
            names = [f"{k:g}" for k in effect["client"]]
            points = {**style.look(1).point, "markersize": size, "elinewidth": 0.7}
            without.errorbar(range(len(names)), floats(effect["value"]), error, **points)
            frame_of(without, names)
            without.set(title="average without a client", xlabel="client left out")
        else:
            without.remove()
        for ax in (terms, along, without):
            ax.set_ylabel(f"change of the {loss}")
        handles, labels = terms.get_legend_handles_labels()
        style.legend(fig, handles, labels)
        fig.suptitle(f"round {int(rows['round'].iloc[0])}", fontsize=8.5)
    return fig


def bars(
    ax: Axes, values: Mapping[str, np.ndarray], looks: Mapping[str, style.Look], names: list[str]
) -> None:
    """Stacked bars, those below zero downwards."""
    up, down = np.zeros(len(names)), np.zeros(len(names))
    for term, numbers in values.items():
        bottom = np.where(numbers >= 0, up, down)
        colors: dict[str, Any] = {
            "color": looks[term].color,
            "edgecolor": "white",
            "linewidth": 0.3,
        }
        ax.bar(range(len(names)), numbers, 0.72, bottom, label=TERMS[term], **colors)
        up, down = up + np.fmax(numbers, 0), down + np.fmin(numbers, 0)
    frame_of(ax, names)


def frame_of(ax: Axes, names: list[str]) -> None:
    """A line at zero, and about eight of the names, the last among them."""
    stride = -(-len(names) // 8)
    places = range(len(names) - 1, -1, -stride)
    ax.set_xticks(places, [names[i] for i in places])
    ax.axhline(0, color="black", linewidth=0.6)
    ax.grid(True, axis="y")


def summary(frame: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[Item]:
    """The terms of every client's update in the last round."""
    last = only(frame, round=last_round(frame, "change"), estimator="exact")
    yield Say(
        f"change of the {options['slice']} loss by every update = linear + quadratic + rest; change of the loss of the average "
        "when a client is left out"
    )
    lines = []
    for client in only(last, metric="change")["client"]:
        rows = only(last, client=client)
        line = {m: number(rows, m) for m in ("change", *TERMS, "effect")}
        line["stderr"] = number(rows, "effect", column="stderr")
        lines.append({"client": "all" if pd.isna(client) else f"{client:g}", **line})
    yield Small(lines, SUMMARY)
    yield from missing_notes(frame)


# The diagnostic


@diagnostic(
    "account",
    on="clients",
    draw=draw,
    summary=summary,
    example="checkpoints/digits-fedavg-s0-1a2b3c4d",
)
def account(
    history: History,
    *,
    slice: Annotated[
        Literal["train", "test"],
        Field(description="Examples on which the loss is taken: train or test."),
    ] = "train",
    k: Annotated[int, Field(ge=0, description="Number of Hessian eigenvectors.")] = 5,
    tol: Annotated[
        float, Field(gt=0, lt=1, description="Allowed relative error of each eigenvalue.")
    ] = 1e-3,
    max_products: Annotated[
        int,
        Field(ge=1, description="Maximum number of Hessian-vector products for the eigenvalues."),
    ] = 100,
    every_round: Annotated[
        bool | None,
        Field(
            description="Use all rounds instead of only the last (default if --rounds is given)."
        ),
    ] = None,
    seed: Annotated[int, Field(description="Random seed.")] = 0,
) -> pd.DataFrame:
    """Explain forgetting: decompose each update's change of the global loss to second order.

    At the received weights, with g and H gradient and Hessian of the loss on ``slice`` (all clients' training data, or
    the test split) and d a client's update: L(w + d) - L(w) = g'd + d'Hd / 2 + rest. Rows of each client (moment trained)
    and of the aggregated update (moment aggregated), with ``estimator``:

    - ``exact``: ``loss`` and ``accuracy`` (of the received and the aggregated model), ``change`` (the true one), ``linear``,
      ``quadratic``, ``rest`` = change - linear - quadratic.
    - ``eigen``: ``linear`` and ``quadratic`` along the top ``k`` Hessian eigenvectors (index from 1; ``residual`` of the
      eigenpair as in the spectrum), and along everything else (index 0), which sums up to the totals.
    - ``client``: how much each client's update contributes to the aggregated one by its aggregation weight p: linear
      p g'd, quadratic p d'H(aggregated update) / 2; client NA: what the server added beyond the weighted mean.

    - ``effect`` (moment aggregated, ``exact``): the loss of the mean of all other clients minus that of the aggregated model,
      with a paired ``stderr`` over the examples. Above 0 the client helps, below 0 it harms. Masked where the aggregated model
      is not the weighted mean, and for a client that is alone.

    Cost a round: one spectrum, and one Hessian-vector product an update.

    Args:
        history: A run with client weights.
        slice: Which examples.
        k: Eigenvectors; 0: no rows ``eigen``.
        tol: Of the eigenvalues.
        max_products: For the eigenvalues.
        every_round: All rounds with client weights, or the last one.
        seed: Of the start of Lanczos.

    Returns:
        A row a number, in units of the loss.

    Raises:
        FldiagError: no round has client weights, or a loss is not finite.
    """
    options: dict[str, Any] = {"slice_name": slice, "k": k, "tol": tol, "seed": seed}
    options |= {"max_products": max_products, "every_round": every_round}
    rows = history.map_rounds(round_rows, **options)
    rows = [
        {"masked": row["value"] is None or not np.isfinite(row["value"]), **row} for row in rows
    ]
    return table([*rows, *history.notes], **history.common)
