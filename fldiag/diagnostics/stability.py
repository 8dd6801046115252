"""How close local training is to the edge of stability: learning rate times curvature, round by round and client by client.

Cohen et al., "Gradient descent on neural networks typically occurs at the edge of stability" (ICLR 2021).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from pydantic import Field

from fldiag.errors import FldiagError
from fldiag.execution.workspace import workspace
from fldiag.plotting import style
from fldiag.plotting.curves import dots, mean_line, rounds_axis
from fldiag.plotting.tables import need, select
from fldiag.registry import diagnostic
from fldiag.results.means import sample_mean
from fldiag.results.select import number, only, spread_rounds
from fldiag.results.summary import Item, Note, Say, Small, missing_notes
from fldiag.results.table import Row, table

if TYPE_CHECKING:
    from fldiag.problem.problem import Problem
    from fldiag.runs.history import History
    from fldiag.runs.pool import Weights
    from fldiag.runs.round_weights import Stored

PICTURE = "picture of stability"
TITLES = {
    "stability": "stability: 1 is the edge",
    "eigenvalue": "largest eigenvalue λ₁",
    "update_curvature": "curvature along the update",
    "gradient_alignment": "|cos| of gradient and v₁",
}
MOMENTS = {"received": "at the received weights", "trained": "at the trained weights"}
COLUMNS = {
    "round": "round",
    "where": "where",
    "stability": "stability",
    "stderr": "± stderr",
    "eigenvalue": "λ1",
    "update_curvature": "curvature along the update",
    "gradient_alignment": "|cos(gradient, v1)|",
    "largest": "largest stability of a client",
}
#: Rounds shown.
MOST = 6


def draw(frame: pd.DataFrame) -> Figure:
    """Over the rounds the clients' mean with its standard error, and a dot each, before and after local training; a line at the
    edge. A number without values (stability, where the learning rate is unknown) has no panel. Raises FldiagError for
    another table."""
    need(frame, ("metric", "round", "moment", "scope", "value", "stderr"), PICTURE)
    select(frame, "stability", PICTURE)
    looks = {moment: style.look(i) for i, moment in enumerate(MOMENTS)}
    titles = {m: t for m, t in TITLES.items() if only(frame, metric=m)["value"].notna().any()}
    with style.paper():
        fig, axes = style.panels(len(titles or TITLES), 2.1, across=4, least=1.6)
        for ax, (metric, title) in zip(axes, (titles or TITLES).items(), strict=True):
            for moment, look in looks.items():
                rows = only(frame, metric=metric, moment=moment)
                dots(ax, only(rows, scope="client"), look.color)
                mean_line(ax, only(rows, scope="global"), look)
            if metric == "stability":
                ax.axhline(1, color="black", linewidth=0.6)
            ax.set_title(title)
            rounds_axis(ax)
            ax.grid(True, axis="y")
        handles = [Line2D([], [], **look.line) for look in looks.values()]
        style.legend(fig, handles, list(MOMENTS.values()), ncols=2, handlelength=2.4)
    return fig


def summary(frame: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[Item]:
    overall, clients = only(frame, scope="global"), only(frame, scope="client")
    rows: list[Row] = []
    for r in spread_rounds(overall, "stability", MOST):
        for moment, text in MOMENTS.items():
            place: dict[str, Any] = {"round": r, "moment": moment}
            largest = only(clients, metric="stability", **place)["value"].astype(float).max()
            rows.append(
                {
                    "round": r,
                    "where": text,
                    **{metric: number(overall, metric, **place) for metric in TITLES},
                    "stderr": number(overall, "stability", column="stderr", **place),
                    "largest": None if np.isnan(largest) else largest,
                }
            )
    yield Small(rows, COLUMNS)
    yield Say(
        "means over the clients; above 1, full-batch gradient descent with this learning rate diverges on the quadratic that "
        "fits the loss there; minibatches are unstable earlier"
    )
    eigenvalues = only(clients, metric="eigenvalue")
    if count := len(only(eigenvalues, converged=False)):
        yield Note(
            f"{count} of {len(eigenvalues)} largest eigenvalues are not within their tolerance: raise --max-products"
        )
    masked = only(frame, masked=True)
    for note in masked[masked["metric"] != "missing"]["note"].dropna().unique():
        yield Note(f"no number where {note}")
    yield from missing_notes(frame)


def client_rows(
    history: History,
    record: Stored,
    client: int,
    rounds: Sequence[int],
    training: Mapping[str, Any],
    tol: float,
    max_products: int,
    seed: int,
) -> list[Row]:
    """The numbers of one client before and after its local training; none in other rounds."""
    if record.round not in rounds:
        return []
    j, examples = record.ids.index(client), history.pool.train_slice(client)
    name, update = f"client:{client}/train", record.moved[j].double()
    if examples.stop <= examples.start:
        history.note(record.round, f"client {client} has no training examples: left out", client)
        return []
    if not bool(update.isfinite().all()):
        history.note(
            record.round,
            f"received or trained weights of client {client} are not finite: left out",
            client,
        )
        return []
    models: dict[str, Weights] = {"received": record.start_of(j), "trained": record.client(j)}
    rows: list[Row] = []
    for moment, weights in models.items():
        problem = history.problem(weights, examples, name)
        about = {"moment": moment, "slice": name, "n_examples": problem.n}
        rows += [
            {**about, **row}
            for row in numbers_at(problem, update, training, record.round, tol, max_products, seed)
        ]
    return rows


def numbers_at(
    problem: Problem,
    update: Any,
    training: Mapping[str, Any],
    round: int,
    tol: float,
    max_products: int,
    seed: int,
) -> Iterator[Row]:
    """lambda_1, stability, alignment of the gradient and curvature along the update, at the weights of a problem."""
    from fldiag.losses import noise_floor
    from fldiag.params import cosine
    from fldiag.problem.eigenpairs import eigenpairs

    product = problem.hessian()
    pairs = eigenpairs(
        problem,
        1,
        tol=tol,
        max_products=max_products,
        seed=seed,
        operator=product,
        strict=True,
        progress=workspace().show,
    )
    top, residual = float(pairs.values[0]), float(pairs.residuals[0])
    solved = {"estimator": "lanczos", "converged": bool(pairs.converged[0])}
    yield {"metric": "eigenvalue", "index": 1, "value": top, "residual": residual, **solved}
    rate, decay, reason = threshold(training, round)
    row: Row = {"metric": "stability", **solved}
    if reason:
        yield {**row, "value": None, "note": reason}
    else:
        yield {**row, "value": rate * (top + decay), "residual": rate * residual}
    gradient, floor = problem.gradient(), noise_floor(problem.dtype)
    length, distance = float(gradient.norm()), float(update.norm())
    row = {"metric": "gradient_alignment", **solved}
    if length < floor:
        text = f"a gradient of norm {length:.1e} is rounding noise (below {floor:g})"
        yield {**row, "value": None, "note": text}
    else:
        yield {**row, "value": abs(float(cosine(gradient, pairs.vectors[0].double())))}
    row = {"metric": "update_curvature", "estimator": "exact"}
    if distance == 0:
        yield {**row, "value": None, "note": "the client did not move"}
    else:
        direction = update / distance
        yield {**row, "value": float(direction @ product(direction).double())}


def threshold(training: Mapping[str, Any], round: int) -> tuple[float, float, str]:
    """By what lambda_1 + decay is multiplied so that the edge is 1, the decay, and why there is no such number.

    >>> threshold({"lr": 0.5, "lr_decay": 0.5, "momentum": 0.25, "weight_decay": 0.1}, round=2)
    (0.1, 0.1, '')
    """
    if training.get("lr") is None:
        return 0.0, 0.0, "the run does not say its learning rate: give --lr"
    if training.get("optimizer", "sgd") != "sgd":
        return 0.0, 0.0, f"the optimizer is {training['optimizer']}: the edge is that of SGD"
    if training.get("nesterov", False):
        return 0.0, 0.0, "momentum is Nesterov's, whose edge is another one"
    lr = float(training["lr"]) * float(training.get("lr_decay", 1.0)) ** (round - 1)
    momentum = float(training.get("momentum", 0.0))
    return lr / (2 * (1 + momentum)), float(training.get("weight_decay", 0.0)), ""


def means(rows: Sequence[Row]) -> list[Row]:
    """Over the clients of a round, with a standard error as a sample."""
    groups: dict[tuple[int, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["round"], row["metric"], row["moment"]), []).append(row)
    mean_rows: list[Row] = []
    for (round, metric, moment), members in groups.items():
        values = [row["value"] for row in members if row["value"] is not None]
        mean_rows.append(
            {
                "round": round,
                "metric": metric,
                "moment": moment,
                "scope": "global",
                "slice": "client:*/train",
                "estimator": members[0]["estimator"],
                "index": members[0].get("index"),
                "n_clients": len(values),
                **sample_mean(values),
                "note": None if values else members[0]["note"],
            }
        )
    return mean_rows


@diagnostic(
    "stability",
    meta={"read": "Cohen et al.: excerpts, and the authors' script"},
    on="clients",
    draw=draw,
    summary=summary,
    example="checkpoints/digits-fedavg-s0-1a2b3c4d --every 5",
)
def stability(
    history: History,
    *,
    lr: Annotated[
        float | None,
        Field(gt=0, description="Learning rate (default: that of the run in each round)."),
    ] = None,
    momentum: Annotated[
        float | None,
        Field(ge=0, lt=1, description="Momentum, heavy ball (default: that of the run)."),
    ] = None,
    weight_decay: Annotated[
        float | None, Field(ge=0, description="Weight decay (default: that of the run).")
    ] = None,
    every: Annotated[int, Field(ge=1, description="Measure every N-th round and the last.")] = 5,
    tol: Annotated[
        float, Field(gt=0, lt=1, description="Allowed relative error of each eigenvalue.")
    ] = 1e-2,
    max_products: Annotated[
        int, Field(ge=2, description="Maximum number of Hessian-vector products per eigenvalue.")
    ] = 100,
    seed: Annotated[int, Field(description="Random seed.")] = 0,
) -> pd.DataFrame:
    """Measure how close local training is to the edge of stability: learning rate times curvature, and where updates point.

    Of every measured round and client k, with F_k its training loss and H the Hessian of F_k, at the weights that it received
    (moment received) and at those that it trained (moment trained); d is its update, trained minus received weights:

    - ``stability`` lr (lambda_1 + weight decay) / (2 (1 + momentum)): above 1, gradient descent with heavy-ball momentum diverges
      on a quadratic with this curvature (lr lambda_1 > 2 without momentum: Cohen et al. 2021, section 2). ``lr`` is that of the
      round, lr * lr_decay^(round - 1). It is that of the whole batch: noise of minibatches diverges earlier, and gradient
      clipping, SAM and other methods' own terms are not in it.
    - ``eigenvalue`` lambda_1 (index 1, ``residual``).
    - ``gradient_alignment`` |cos(grad F_k, v_1)|, with v_1 the eigenvector of lambda_1, whose sign means nothing.
    - ``update_curvature`` d'Hd / ||d||^2, at most lambda_1.

    Rows of scope global are means over the clients, with their standard error as a sample. Rounds whose number ``every`` divides,
    and the last, are measured. Cost of a client: two largest eigenvalues.

    Of the source excerpts and the authors' training script were read; the edge of heavy-ball momentum is that of the
    characteristic polynomial z^2 - (1 + beta - lr lambda) z + beta.

    Args:
        history: A run with client weights.
        lr: In place of the run's, without decay; units of weight over gradient.
        momentum: In place of the run's.
        weight_decay: In place of the run's; in units of curvature.
        every: Rounds.
        tol: Relative.
        max_products: Products an eigenvalue.
        seed: Of the first vector.

    Returns:
        A row a number; masked with a reason in ``note`` where it is not defined: an unknown learning rate, Adam, Nesterov's
        momentum, a gradient of rounding noise, a client that did not move.

    Raises:
        FldiagError: no round has client weights, or no client can be measured.

    >>> edge, _, _ = threshold({"lr": 0.1}, round=1)
    >>> edge * 20.0  # lambda_1 = 2 / lr
    1.0
    """
    training = dict(history.training)
    if lr is not None:
        training |= {"lr": lr, "lr_decay": 1.0}
    if momentum is not None:
        training["momentum"] = momentum
    if weight_decay is not None:
        training["weight_decay"] = weight_decay
    rounds = tuple(sorted({r for r in history.rounds if r % every == 0} | {history.rounds[-1]}))
    rows = history.map_clients(
        client_rows,
        every_round=True,
        rounds=rounds,
        training=training,
        tol=tol,
        max_products=max_products,
        seed=seed,
    )
    if not rows:
        reason = next((n["note"] for n in history.notes), "there are no clients with examples")
        raise FldiagError(f"no client can be measured: {reason}", "choose other rounds: --rounds")
    rows += means(rows)
    rows = [{"masked": row["value"] is None, **row} for row in rows]
    return table([*rows, *history.final_rows(), *history.notes], **history.common)
