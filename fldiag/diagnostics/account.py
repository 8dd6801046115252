"""Why it forgot: a second-order account of what each client's update does to the loss on everybody's data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import pandas as pd
import torch
from pydantic import Field
from torch import Tensor

from fldiag.curvature.lanczos import EigenPairs
from fldiag.diagnostics.geometry import Split
from fldiag.execution import workspace
from fldiag.plotting import style
from fldiag.plotting.style import floats
from fldiag.problem.hessian import eigenpairs
from fldiag.registry import diagnostic
from fldiag.results.statistics import sample_mean
from fldiag.results.table import (
    Options,
    Row,
    Sentence,
    SmallTable,
    Summary,
    last_round,
    number,
    only,
    thin,
)
from fldiag.runs.history import History, Stored
from fldiag.sections import EveryRound, Products, Seed, Tol

#: Relative distance up to which the aggregated weights are the weighted mean of the clients.
SAME = 1e-5
NO_MEAN = (
    "not the weighted mean of the clients, or of one alone: it has no average without a client"
)
#: Term -> how pictures call it.
TERMS = {"linear": "linear: gᵀd", "quadratic": "quadratic: dᵀHd / 2", "rest": "rest"}


# The measure


def round_rows(
    history: History, stored: Stored, slice_name: str, k: int, **options: Any
) -> list[Row]:
    """The account of one round's updates."""
    segment = history.segment(slice_name)
    problem = history.problem(stored.start, segment, slice_name)
    before, g, hessian = problem.centre, problem.gradient(), problem.hessian()
    pairs = eigenpairs(problem, k, progress=workspace().show, **options) if k else None
    whole: Row = {"moment": "aggregated", "scope": "global"}
    client: Row = {"moment": "trained", "scope": "client"}
    ends = [({**client, "client": c}, stored.client(j)) for j, c in enumerate(stored.ids)]
    ends.append((whole, stored.end))
    rows: list[Row] = [{**whole, **row, "moment": "received"} for row in before.rows(problem)]
    updates: list[Tensor] = []
    for about, (w, buffers) in ends:
        d = (w - stored.start[0]).double()
        # with buffers of its own an update is not all that changed: their effect is in the rest
        after, curved = problem.scores(w, buffers), hessian(d)
        terms = {"linear": float(g @ d), "quadratic": 0.5 * float(d @ curved)}
        change = after.loss - before.loss
        exact = {"change": change, **terms, "rest": change - sum(terms.values())}
        about["estimator"] = "exact"
        rows += [{**about, "metric": metric, "value": v} for metric, v in exact.items()]
        rows += [{**about, **row} for row in eigen_rows(pairs, g, d, terms)] if pairs else []
        updates.append(d)
    rows += [{**whole, **row} for row in after.rows(problem)]
    # what each client's share of the aggregated update gives, and what the server added
    shares = [p * d for p, d in zip(history.weights(stored.ids), updates, strict=False)]
    shares.append(updates[-1] - sum(shares))
    for (about, _), share in zip(ends, shares, strict=True):
        numbers = {"linear": float(g @ share), "quadratic": 0.5 * float(share @ curved)}
        about |= {"moment": "aggregated", "estimator": "client"}
        rows += [{**about, "metric": metric, "value": v} for metric, v in numbers.items()]
    rows += effect_rows(history, stored, segment)
    return [{"slice": slice_name, "n_examples": problem.n, **row} for row in rows]


def eigen_rows(
    pairs: EigenPairs, g: Tensor, d: Tensor, terms: Mapping[str, float]
) -> Iterator[Row]:
    """The terms of an update along the top eigenvectors, and along everything else (index 0)."""
    vectors, values = pairs.vectors.double(), torch.as_tensor(pairs.values).to(d)
    along = vectors @ d
    each = {"linear": (vectors @ g) * along, "quadratic": values * along**2 / 2}
    top = pd.DataFrame({"residual": pairs.residuals, "converged": pairs.converged})
    top = top.assign(eigenvalue=pairs.values, index=top.index + 1)
    for metric, numbers in each.items():
        about: Row = {"metric": metric, "estimator": "eigen"}
        yield from top.assign(**about, value=numbers.tolist()).to_dict("records")
        yield {**about, "index": 0, "value": terms[metric] - float(numbers.sum())}


def effect_rows(history: History, stored: Stored, segment: slice) -> Iterator[Row]:
    """What the loss gains when a client is left out of the mean: above 0 it helps."""
    p = torch.as_tensor(history.weights(stored.ids), device=stored.clients.device)
    clients, row = stored.clients.double(), {"metric": "effect", "estimator": "exact"}
    row |= {"moment": "aggregated", "scope": "client"}
    w = stored.aggregated.double()
    is_mean = (p @ clients - w).norm() <= SAME * w.norm()
    others = p.expand(len(p), -1).clone().fill_diagonal_(0)
    others /= others.sum(1, keepdim=True)  # nan for a client that is alone
    models = [stored.end]
    for q, w in zip(others, (others @ clients).to(stored.clients), strict=True):
        means = {
            name: torch.tensordot(q, b.double(), 1).to(b)
            for name, b in stored.client_buffers.items()
            if b.is_floating_point()  # counts are the aggregated model's
        }
        models.append((w, {**stored.buffers, **means}))
    losses = history.evaluate(models).loss[:, segment]
    for k, q, loss in zip(stored.ids, others, losses[1:], strict=True):
        is_known = is_mean and not q.isnan().any()
        numbers = sample_mean(loss - losses[0]) if is_known else {"note": NO_MEAN}
        yield {**row, "client": k, "value": None, **numbers}


# Picture and summary


def draw(frame: pd.DataFrame) -> style.Figure:
    """The last round: the terms of every update beside the true change of the loss, and what the loss gains without each client,
    with standard errors over the examples."""
    rows = only(frame, round=last_round(frame, "change"), estimator="exact")
    change, effect = only(rows, metric="change"), only(rows, metric="effect")
    names = ["all" if pd.isna(client) else f"{client:g}" for client in change["client"]]
    values = {text: floats(only(rows, metric=m)["value"]) for m, text in TERMS.items()}
    colors = [style.look(place).color for place in (2, 5, 4)]
    with style.paper():
        fig, axes = style.panels(1 + effect["value"].notna().any(), 2.4)
        pd.DataFrame(values, names).plot.bar(ax=axes[0], stacked=True, color=colors, legend=False)
        axes[0].plot(
            floats(change["value"]), "D", c="black", mfc="white", ms=3, label="true change"
        )
        axes[0].set(title="every update", xlabel="client (all: aggregated)")
        for ax in axes[1:]:
            effects, errors = floats(effect["value"]), floats(effect["stderr"])
            ax.errorbar(range(len(effects)), effects, errors, elinewidth=0.7, **style.look(1).point)
            ax.set(title="average without a client, ± standard error", xlabel="client left out")
        for ax, last in zip(axes, (len(names), len(effect)), strict=False):
            places = thin(range(last), 10)
            ax.set_xticks(places, [names[place] for place in places], rotation=0)
            ax.set_ylabel(f"change of the {rows['slice'].dropna().iloc[0]} loss")
            ax.axhline(0, color="black", linewidth=0.6)
            ax.grid(True, axis="y")
        style.legend(fig, *axes[0].get_legend_handles_labels())
        fig.suptitle(f"round {int(rows['round'].iloc[0])}")
    return fig


def summary(frame: pd.DataFrame, options: Options) -> Summary:
    """The terms of every client's update in the last round."""
    last = only(frame, round=last_round(frame, "change"), estimator="exact")
    yield Sentence(
        f"change of the {options['slice']} loss by every update = linear + quadratic + rest; change of the loss of the average "
        "when a client is left out"
    )
    lines: list[Row] = []
    for client in only(last, metric="change")["client"]:
        rows = only(last, client=client)
        lines.append(
            {
                "client": "all" if pd.isna(client) else f"{client:g}",
                **{m: number(rows, m) for m in ("change", *TERMS)},
                "without it": number(rows, "effect"),
                "± stderr": number(rows, "effect", column="stderr"),
            }
        )
    yield SmallTable.of(lines)


# The diagnostic


@diagnostic(
    "account",
    on="run",
    draw=draw,
    summary=summary,
    example="checkpoints/digits-fedavg-s0-1a2b3c4d",
)
def account(
    history: History,
    *,
    slice: Split = "train",
    k: Annotated[int, Field(ge=0, description="Number of Hessian eigenvectors.")] = 5,
    tol: Tol = 1e-3,
    max_products: Products = 100,
    every_round: EveryRound = None,
    seed: Seed = 0,
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
    rows = history.map_rounds(
        round_rows,
        every_round=every_round,
        slice_name=slice,
        k=k,
        tol=tol,
        max_products=max_products,
        seed=seed,
    )
    return history.table(rows)
