"""How clients drift apart, and in which sense: weights, gradients, proximal loss and representations, round by round.

Distances, proximal loss and cosine of g_u and g_p as in Lee et al., "FedSOL" (CVPR 2024), figures 3, 5b and 6; the squared
distance to the new global model is what the FL-Simulator code of Sun et al. calls divergence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Annotated, Any

import pandas as pd
import torch
from pydantic import Field
from torch import Tensor

from fldiag import losses
from fldiag.diagnostics.geometry import seen_by_head
from fldiag.params import Layout, cosine
from fldiag.plotting import style
from fldiag.plotting.style import compares_runs, lines
from fldiag.registry import diagnostic
from fldiag.results.numbers import Number
from fldiag.results.table import Options, Row, Sentence, Summary, of_rounds, only
from fldiag.runs.history import History, Stored, Weights
from fldiag.sections import Proximal

#: What training records of every local step when asked to (``Run.steps``), and is also measured here.
STEP_METRICS = ("cos_gu_gp", "proximal_loss", "lambda_mean")
#: Examples in one pass of a gradient over many.
CHUNK = 512
#: The mean over examples (x, y) as a function of the weights [P], the first argument.
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
#: Measured client by client on examples; their means over the clients are taken at the end.
AVERAGED = (*STEP_METRICS, "cka", "gradient_cosine")

DISTANCE = Number(
    "drift",
    "distance of client weights from the received, mean over clients",
    "lower",
    {"metric": "global_local_divergence", "moment": "trained", "layer": None, "estimator": "exact"},
    needs=("model", "partition"),
    column="Drift: distance of client weights from the received",
    options={"rounds": "last", "rho": (), "gradients": False, "representation": False},
)

#: Panel of the picture -> metric -> name of its line.
PANELS = {
    "distance of weights": {
        "global_local_divergence": "global–local",
        "local_local_divergence": "local–local",
    },
    "cosine": {
        "update_cosine": "update, update",
        "server_cosine": "update, server",
        "gradient_cosine": "gradient, global gradient",
    },
    "proximal loss": {"proximal_loss": "trained weights"},
    "cosine of $g_u$ and $g_p$": {"cos_gu_gp": ""},
    "CKA with the received model": {"cka": ""},
}


def round_rows(
    history: History,
    stored: Stored,
    gradients: bool,
    representation: bool,
    **options: Any,
) -> list[Row]:
    """The numbers of one round; of weights alone where there are no examples."""
    rows = weight_rows(stored, history.layout, torch.from_numpy(history.weights(stored.ids)))
    if history.alone:
        return rows
    rows += gradient_rows(history, stored) if gradients else []
    for j, k in enumerate(stored.ids):
        if of_client(history, k)["n_examples"]:
            rows += proximal_rows(history, stored, j, **options)
    return [*rows, *(cka_rows(history, stored) if representation else [])]


# Weights


def products(rows: Tensor, layout: Layout) -> dict[str | None, tuple[Tensor, Tensor]]:
    """Inner products and squared distances [K, K] of rows [K, P], in float64: of the whole (None), every layer, ``part:body``
    and ``part:head``. Distances are those of differences: inner products cancel for close rows."""
    sums: dict[str | None, tuple[Tensor, Tensor]] = {}
    slices = layout.slices()
    for layer, names in layout.layers.items():
        for name in names:
            part = rows[:, slices[name]].double().cpu()
            apart = torch.cdist(part, part, compute_mode="donot_use_mm_for_euclid_dist").square()
            owners = [None, layer or name]
            if layout.has_head:
                is_head = slices[name].start >= layout.span("head")[0]
                owners.append("part:head" if is_head else "part:body")
            for owner in owners:
                inner, distances = sums.get(owner, (0.0, 0.0))
                sums[owner] = inner + part @ part.T, distances + apart
    return sums


def weight_rows(stored: Stored, layout: Layout, p: Tensor) -> list[Row]:
    """Distances and cosines of the clients' weights and updates; ``p``: the clients' shares [K] of the average."""
    server, moved = (stored.aggregated - stored.received).double(), stored.moved
    sums = products(moved, layout)
    whole: Row = {"moment": "trained", "scope": "global", "n_clients": int((p > 0).sum())}
    ids, rows = stored.ids, list[Row]()
    for layer, (inner, distances) in sums.items():
        lengths = inner.diagonal().sqrt()
        rows += rows_of("global_local_divergence", ids, lengths, layer)
        rows += rows_of("local_local_divergence", ids, distances.sqrt(), layer)
        mean = (p @ inner @ p).clamp(min=0).sqrt()  # the length of the mean update
        consensus = float((mean / (p @ lengths)).clamp(max=1))
        rows.append({**whole, "metric": "update_consensus", "layer": layer, "value": consensus})
    inner, _ = sums[None]
    lengths = inner.diagonal().sqrt()
    cosines = (inner / torch.outer(lengths, lengths)).clamp(-1, 1)
    squared = (stored.clients - stored.aggregated).double().square().sum(1)
    rows += rows_of("squared_divergence", ids, squared)
    rows += rows_of("update_cosine", ids, cosines)
    rows += rows_of("server_cosine", ids, cosine(moved.double(), server))
    row = {"metric": "update_norm", "moment": "aggregated", "scope": "global"}
    return [*rows, {**row, "value": float(server.norm())}]


def rows_of(
    metric: str, ids: tuple[int, ...], values: Tensor, layer: str | None = None
) -> list[Row]:
    """A row for every client [K] or (of the whole network alone) pair [K, K], and their mean."""
    base: Row = {"metric": metric, "moment": "trained", "layer": layer}
    places: list[Row] = [{"scope": "client", "client": k} for k in ids]
    if values.ndim == 2:
        values = values[torch.triu_indices(len(ids), len(ids), 1).unbind()]
        pairs = combinations(ids, 2) if layer is None else ()
        places = [{"scope": "pair", "client": a, "client_b": b} for a, b in pairs]
    rows = [{**base, **p, "value": v} for p, v in zip(places, values.tolist(), strict=False)]
    mean = {"scope": "global", "n_clients": len(ids), "value": float(values.nanmean())}
    return [*rows, {**base, **mean}]


# Gradients, proximal loss, representations


def of_client(history: History, k: int) -> Row:
    """Columns of what is measured on a client's training examples."""
    examples = history.pool.train_slice(k)
    place: Row = {"scope": "client", "client": k, "slice": f"client:{k}/train"}
    return {**place, "n_examples": examples.stop - examples.start}


def outputs(history: History, weights: Weights, x: Tensor) -> Tensor:
    """[b, out]; with gradients to the weights."""
    w, buffers = weights
    bound = history.network.bind(w[None], {n: b[None].clone() for n, b in buffers.items()})
    return bound(x[None])[0]


def local_loss(history: History, buffers: dict[str, Tensor]) -> Loss:
    """What clients minimise."""
    return lambda w, x, y: losses.per_example(outputs(history, (w, buffers), x), y).mean()


def gradient(history: History, k: int, loss: Loss, w: Tensor) -> tuple[float, Tensor]:
    """Value and gradient [P] at w [P] of a loss on all training examples of client k."""
    at, total, g = w.detach().clone().requires_grad_(), 0.0, torch.zeros_like(w)
    pool, examples = history.pool, history.pool.train_slice(k)
    for piece in pool.batches(examples, CHUNK):
        x, y = pool.read(piece.start, piece.stop)
        share = len(x) / (examples.stop - examples.start)
        with torch.enable_grad():
            part = loss(at, x, y)
            g.add_(torch.autograd.grad(part, at)[0], alpha=share)
        total += share * float(part.detach())
    return total, g


def gradient_rows(history: History, stored: Stored) -> list[Row]:
    """Cosines of the stored clients' gradients with that of all data, at the received weights."""
    (w, buffers), everybody = stored.start, history.pool.clients
    n, gradients = everybody.stop - everybody.start, list[tuple[Row, Tensor]]()
    total = torch.zeros_like(w, dtype=torch.float64)
    for k in range(len(history.parts)):
        place = of_client(history, k)
        if size := place["n_examples"]:
            g = gradient(history, k, local_loss(history, buffers), w)[1].double()
            total.add_(g, alpha=size / n)
            if k in stored.ids:
                gradients.append((place, g))
    base = {"metric": "gradient_cosine", "moment": "received"}
    return [{**place, **base, "value": float(cosine(g, total))} for place, g in gradients]


def proximal_rows(
    history: History,
    stored: Stored,
    j: int,
    *,
    rho: tuple[float, ...],
    loss: Proximal,
    tau: float,
) -> list[Row]:
    """Proximal loss, cosines of g_u and g_p, and Lambda, at the trained weights of client j of the round.

    FedSOL's proximal loss: mean KL(softmax(f(x; w_g) / tau) || softmax(f(x; w) / tau)), w_g what the client received."""
    (w, buffers), start, layout = stored.client(j), stored.start_of(j), history.layout
    k, d, local = stored.ids[j], w - start[0], local_loss(history, buffers)

    def divergence(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            expected = outputs(history, start, x)
        return losses.kl(expected, outputs(history, (w, buffers), x), tau).mean()

    value, g_p = float(losses.l2(d)), d
    if loss == "kl":
        value, g_p = gradient(history, k, divergence, w)
    base = {**of_client(history, k), "moment": "trained"}
    name = {**base, "proximal": losses.proximal_name(loss, tau)}
    floor, Lambda = losses.noise_floor(g_p.dtype), losses.strengths(d, layout)
    rows = [{**name, "metric": "proximal_loss", "value": value}]
    spans: dict[str | None, slice] = {None: slice(None)}
    if layout.has_head:
        spans["part:head"] = slice(*layout.span("head"))
    for radius in rho:
        g_u = gradient(history, k, local, w + losses.perturbation(g_p, radius, Lambda))[1]
        for layer, span in spans.items():
            row = {**name, "metric": "cos_gu_gp", "rho": radius, "layer": layer}
            # nan where g_p is rounding noise
            rows.append({**row, "value": float(cosine(g_u[span], g_p[span], floor))})
    for layer, (mean, n) in losses.mean_strengths(Lambda, layout).items():
        row = {**base, "metric": "lambda_mean", "layer": layer, "value": float(mean)}
        rows.append({**row, "scaled": float(mean) * n**0.5})
    return rows


def cka_rows(history: History, stored: Stored) -> Iterator[Row]:
    """The similarity of representations of every client with what the clients received."""
    test = history.pool.test
    received, *_ = seen_by_head(history, stored.start, test)
    base: Row = {"metric": "cka", "moment": "trained", "scope": "client"}
    base |= {"slice": history.pool.split, "n_examples": test.stop}
    for j, k in enumerate(stored.ids):
        trained, *_ = seen_by_head(history, stored.client(j), test)
        yield {**base, "client": k, "value": cka(trained, received)}


def cka(a: Tensor, b: Tensor) -> float | None:
    """Linear centred kernel alignment of two representations [n, d] and [n, e] of the same examples, in [0, 1]; None where one
    is the same for all examples (Kornblith et al., ICML 2019, equation 3).

    >>> a = torch.eye(3)[:, :2]
    >>> round(cka(a, 2 * a.flip(1) + 1), 6)  # unchanged by rotation, shift and scale
    1.0
    """
    a, b = (v.double() - v.double().mean(0) for v in (a, b))
    cross, *sizes = ((u.T @ v).norm() for u, v in ((a, b), (a, a), (b, b)))
    size = float(sizes[0] * sizes[1])
    return float(cross.square()) / size if size else None


# Steps and means


def recorded_rows(history: History) -> list[Row]:
    """Means over the local steps that training recorded, of every client, in the rounds that were read."""
    rows: list[Row] = []
    for r in history.rounds:
        if (steps := history.run.steps(r)) is None:
            continue
        steps = only(steps, metric=STEP_METRICS).dropna(subset=["index", "client"])
        keys = ["metric", "layer", "proximal", "client"]
        for row in means(steps, keys, n_steps=("value", "count")):
            row |= {"round": r, "moment": "trained", "scope": "client", "estimator": "steps"}
            rows.append({**row, "slice": f"client:{int(row['client'])}/train"})
    return rows


def means(frame: pd.DataFrame, keys: list[str], **others: tuple[str, str]) -> list[Row]:
    """The mean ``value`` and ``scaled`` of the rows that are alike in the keys, and ``others`` (of ``agg``)."""
    frame = frame.reindex(columns=[*keys, "value", "scaled", "n_steps"])
    groups = frame.astype({"value": float, "scaled": float}).groupby(keys, dropna=False, sort=False)
    frame = groups.agg(value=("value", "mean"), scaled=("scaled", "mean"), **others).reset_index()
    return frame.to_dict("records")


def mean_rows(history: History, rows: list[Row]) -> list[Row]:
    """The mean over the clients of what is measured on examples, of every round."""
    keys = ["round", "metric", "moment", "layer", "rho", "proximal", "estimator"]
    frame = only(pd.DataFrame(rows), scope="client", metric=AVERAGED)
    counts = {"n_clients": ("value", "count"), "n_steps": ("n_steps", "sum")}
    averages = means(frame, keys, stderr=("value", "sem"), **counts)
    for row in averages:
        row |= {"scope": "global", "slice": "train"}
        if row["estimator"] == "exact":
            pool = history.pool
            row |= {"n_steps": None, "n_examples": pool.clients.stop - pool.clients.start}
            if row["metric"] == "cka":
                row |= {"slice": pool.split, "n_examples": pool.test.stop}
    return averages


# Picture and summary


@compares_runs
def draw(table: pd.DataFrame) -> style.Figure:
    """Means over the clients of every round, with standard errors; of several runs each panel's first line, a line a run."""
    rows = only(table, scope="global", moment=("trained", "received"), layer=None)
    rows = rows.dropna(subset=["value"])
    looks = style.looks(table["run"]) if table["run"].nunique() > 1 else None
    panels: dict[str, dict[str, pd.DataFrame]] = {}
    for label, metrics in PANELS.items():
        parts: dict[str, pd.DataFrame] = {}
        keys, chosen = ["metric", "estimator", "rho"], only(rows, metric=set(metrics))
        for (metric, estimator, rho), part in chosen.groupby(keys, dropna=False, sort=False):
            name = metrics[metric] if pd.isna(rho) else f"ρ = {rho:g}"
            parts["local steps" if estimator == "steps" else name] = part
        if looks and parts:
            name, part = next(iter(parts.items()))
            label, parts = f"{label}\n{name}".strip(), dict(list(part.groupby("run", sort=False)))
        if parts:
            panels[label] = parts
    with style.paper():
        fig, axes = style.panels(len(panels), 2.1 if looks else 2.6)
        for ax, (label, parts) in zip(axes, panels.items(), strict=True):
            lines(ax, parts, looks)
            ax.set_title(label)
        fig.suptitle("means over clients; bands: ± standard error", fontsize=7)
        if looks:
            style.legend_of_runs(fig, looks)
    return fig


def summary(table: pd.DataFrame, options: Options) -> Summary:
    """The means over the clients of some rounds."""
    angle = "cos_gu_gp"
    columns: dict[str, str | Row] = {
        "global–local": "global_local_divergence",
        "local–local": "local_local_divergence",
        "cos updates": "update_cosine",
        "consensus": "update_consensus",
        "cos gradients": "gradient_cosine",
        **{f"cos g_u g_p, ρ = {r:g}": {"metric": angle, "rho": r} for r in options["rho"]},
        "cos g_u g_p": {"metric": angle, "rho": None},
        "in the head": {"metric": angle, "rho": None, "layer": "part:head"},
        "proximal loss": "proximal_loss",
        "CKA": "cka",
    }
    yield of_rounds(only(table, estimator="exact"), columns)
    steps = only(table, estimator="steps")
    if len(steps):
        yield Sentence("means over the local steps that training recorded:")
        yield of_rounds(steps, columns)


# The diagnostic


@diagnostic(
    "drift",
    on="run",
    draw=draw,
    summary=summary,
    numbers=(DISTANCE,),
    example="checkpoints/digits-fedavg-s0-1a2b3c4d --rho 0 --rho 2",
)
def drift(
    history: History,
    *,
    rho: Annotated[
        tuple[Annotated[float, Field(ge=0)], ...],
        Field(description="Radius ρ of the perturbation in the FedSOL gradient g_u."),
    ] = (0.0, 0.5, 1.0, 2.0),
    loss: Annotated[Proximal, Field(description="Proximal loss: kl or l2.")] = "kl",
    tau: Annotated[float, Field(gt=0, description="Temperature of the KL loss.")] = 3.0,
    gradients: Annotated[
        bool, Field(description="Also compute cosines with the global gradient.")
    ] = True,
    representation: Annotated[
        bool,
        Field(description="Also compare representations (CKA) of trained and received models."),
    ] = True,
) -> pd.DataFrame:
    """Measure how clients drift apart: distances and cosines of weights, updates and gradients, proximal loss, CKA.

    Rows of every stored round with client weights; scope client (each), pair (two clients) and global (the mean, over
    ``n_clients`` clients or their pairs). d_k is a client's update: trained minus received weights.

    - ``global_local_divergence`` ||d_k||, ``local_local_divergence`` ||w_k - w_j||, whole and by ``layer`` (also
      ``part:body``, ``part:head``); ``squared_divergence`` ||w_k - w_new||^2 to the aggregated model; ``update_norm`` of
      the server (moment aggregated); ``update_cosine`` between two updates, ``server_cosine`` between a client's and the
      server's.
    - ``update_consensus``, whole and by ``layer``: ||sum p_k d_k|| / sum p_k ||d_k||, p_k the aggregation weights: 1 where all
      point the same way.
    - with ``gradients``: ``gradient_cosine`` between the gradient of a client's own training loss and that of all clients'
      data, at the received weights.
    - at the trained weights, on all of the client's training data: ``proximal_loss`` L_p (``loss``: kl with temperature
      ``tau``, or l2); ``cos_gu_gp`` for every radius ``rho``, with g_u the gradient of the local loss at w + e, e as in
      FedSOL (Algorithm 1; layer part:head: over the head's entries only); ``lambda_mean`` by layer, and in column ``scaled``
      times the root of the layer's size (1 when all entries moved alike).
    - The same names with estimator ``steps`` are means over the ``n_steps`` local steps that training recorded with
      ``metrics.steps = true`` (see ``Run.steps``), at the weights and minibatches of those steps and the method's own
      perturbation. Column ``proximal`` names the proximal loss.
    - with ``representation``: ``cka`` between what the heads of the trained and the received model see of the test data.

    A cosine with a vector that is zero (or g_p below its rounding noise) has no value and is ``masked``.
    Of a recorded run without data only the distances and cosines of weights and updates are measured.
    Cost a round: one gradient of all training data, and 1 + len(rho) of every stored client's own.

    Raises FldiagError when no round has client weights.
    """
    if history.alone or history.dataset.regression:
        loss = "l2"
    rows = history.map_rounds(
        round_rows,
        rho=rho,
        loss=loss,
        tau=tau,
        gradients=gradients,
        representation=representation,
    )
    if history.alone:
        missing = "gradients, proximal losses and representations are left out"
        history.note(None, f"there are no examples: {missing}")
    rows = [{"estimator": "exact", **row} for row in rows] + recorded_rows(history)
    rows += [*mean_rows(history, rows), *history.final_rows()]
    return history.table(rows, rho=None, proximal=None)
