"""The loss on straight ways through weight space: along directions, between models, or from a global model to its clients.

Lines beside the parabola of their curvature show how far a quadratic model of the loss holds. Barriers between models: Frankle et
al., "Linear Mode Connectivity and the Lottery Ticket Hypothesis" (ICML 2020).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from pydantic import Field
from torch import Tensor

from fldiag.errors import FldiagError
from fldiag.execution import workspace
from fldiag.landscape.directions import random_direction
from fldiag.landscape.paths import Path, rows_along
from fldiag.plotting import style
from fldiag.plotting.style import floats, wide_range
from fldiag.problem.data import same
from fldiag.problem.hessian import eigenpairs
from fldiag.problem.problem import Problem
from fldiag.registry import diagnostic
from fldiag.results.table import (
    Note,
    Options,
    Row,
    SmallTable,
    Summary,
    format_number,
    number,
    only,
    table,
)
from fldiag.sections import Products, Seed

GREY = "#8a8a8a"
#: Of more paths from one checkpoint those with the largest barriers have a colour and a name.
MANY = 6
DASHED: dict[str, Any] = {"linestyle": (0, (3, 2)), "linewidth": 0.9}
#: Key of the rows of ``of_paths`` -> heading.
LINES = {
    "run": "checkpoint",
    "end": "along",
    "loss": "loss",
    "slope": "slope",
    "curvature": "curvature",
    "residual": "± (residual)",
}
BARRIERS = {
    "run": "from",
    "end": "to",
    "barrier": "barrier",
    "stderr": "± (stderr)",
    "x": "at t",
    "distance": "distance",
}


def of_paths(frame: pd.DataFrame) -> list[Row]:
    """The numbers of every path in a row, the largest barrier first."""
    rows = []
    for (run, index), part in frame.groupby(["run", "index"], sort=False):
        row: Row = {"run": run, "index": index, "end": f"direction {index}"}
        row |= {name: number(part, name) for name in ("slope", "curvature", "barrier", "distance")}
        row |= {name: number(part, "barrier", column=name) for name in ("stderr", "x")}
        row |= {
            "residual": number(part, "curvature", column="residual"),
            "loss": number(part, "loss", x=0),
        }
        rows.append(row if row["barrier"] is None else {**row, "end": part["run_b"].iloc[0]})
    return sorted(rows, key=lambda row: -(row["barrier"] or 0.0))


def draw(frame: pd.DataFrame) -> style.Figure:
    """The loss along the paths of each checkpoint, a panel each, on one scale.

    Parabolas are dashed. A dot marks a barrier, dotted lines its height over the line between the ends.
    """
    frame = frame.assign(run=frame["run"].fillna("unnamed"))
    losses = only(frame, metric="loss").dropna(subset=["x"])
    runs, low, high = dict.fromkeys(losses["run"]), *band(losses)
    low, high = np.nanmin(low), np.nanmax(high[high < np.inf])
    longest = min(max(losses.groupby("run")["index"].nunique()), MANY) + 1
    with style.paper():
        width = style.ONE_COLUMN * 1.2 if len(runs) == 1 else style.TWO_COLUMNS
        fig, axes = style.panels(len(runs), 2.6 + 0.15 * longest, width=width, sharey=True)
        for ax, run in zip(axes, runs, strict=True):
            _panel(ax, only(frame, run=run), only(losses, run=run).sort_values("x"))
            ax.set_title(style.plain(style.shorten(run, 36)), weight="bold")
        # steep parabolas must not flatten the loss
        room = 0.05 * (high - low) or 1.0
        axes[0].set(ylabel="loss", ylim=(low - room, high + room))
        along = "coefficient of the direction"
        if len(only(frame, metric="barrier")):
            wide_range(axes[0], floats(losses["value"]))
            along = "t, from this model (0) to another (1)"
        about = f"{losses['slice'].iloc[0]}, n = {int(losses['n_examples'].iloc[0]):,}"
        about = f"{along}\n{style.plain(about)}; bands: one standard error"
        fig.supxlabel(about, fontsize=8)
        fig.draw_without_rendering()  # a legend below an axes takes its place in the second layout
    return fig


def band(losses: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """The losses minus and plus one standard error; not below 0 where they are not."""
    value, error = floats(losses["value"]), np.nan_to_num(floats(losses["stderr"]))
    return np.maximum(value - error, min(0.0, np.nanmin(value))), value + error


def _panel(ax: style.Axes, frame: pd.DataFrame, losses: pd.DataFrame) -> None:
    ways = of_paths(frame)
    are_lines = ways[0]["barrier"] is None
    thin: dict[str, Any] = {"color": GREY, "linewidth": 0.6}
    for place, way in enumerate(ways):
        rows, bowl = (only(part, index=way["index"]) for part in (losses, frame))
        x, value = floats(rows["x"]), floats(rows["value"])
        if place >= MANY:
            ax.plot(x, value, **thin, zorder=1)
            continue
        look = style.look(place)
        metric = "curvature" if are_lines else "barrier"
        text = f"{style.shorten(way['end'], 28)}: {metric} {format_number(way[metric], 3)}"
        text += f" ± {format_number(way['stderr'], 2)}" if way["stderr"] else ""
        ax.plot(x, value, color=look.color, linewidth=1.3, label=style.plain(text))
        ax.fill_between(x, *band(rows), color=look.color, alpha=0.15, linewidth=0)
        bowl = only(bowl, metric="parabola").sort_values("x")
        ax.plot(floats(bowl["x"]), floats(bowl["value"]), color=look.color, **DASHED)
        at, height = way["x"], way["barrier"]
        if height is not None and 0 < height < np.inf:
            ends = (1 - at) * value[0] + at * value[-1]
            ax.plot([at, at], [ends, ends + height], color=look.color, linewidth=0.8, linestyle=":")
            ax.plot(at, ends + height, **look.point)
    if are_lines:
        ax.plot([], [], color=GREY, **DASHED, label="parabola of slope and curvature")
    if len(ways) > MANY:
        ax.plot([], [], **thin, label=f"{len(ways) - MANY} more")
    ax.margins(x=0.02)
    ax.grid(True)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14))


def summary(frame: pd.DataFrame, options: Options) -> Summary:
    rows = of_paths(frame)
    if rows[0]["barrier"] is None:
        yield SmallTable(rows, LINES)
        return
    yield SmallTable(rows, BARRIERS)
    if frame["buffers"].notna().any():
        yield Note("batch-norm statistics go along the path: both ends are the models as stored")


@diagnostic(
    "paths",
    on="checkpoints",
    draw=draw,
    summary=summary,
    example="checkpoints/example/fedavg-digits.pt checkpoints/example/fedsol-digits.pt",
)
def paths(
    problems: Sequence[Problem],
    *,
    directions: Annotated[
        Literal["eigen", "random", "models", "clients"] | None,
        Field(
            description="eigen or random directions from each checkpoint; models: between each two; clients: to the models of "
            "its clients (default: models of several checkpoints, eigen of one)."
        ),
    ] = None,
    lines: Annotated[int, Field(ge=1, description="Number of eigen or random directions.")] = 2,
    points: Annotated[
        int, Field(ge=3, le=9999, description="Number of points along each path (odd).")
    ] = 21,
    span: Annotated[
        float, Field(gt=0, le=1e30, description="Largest coefficient of a direction.")
    ] = 1.0,
    max_products: Products = 100,
    seed: Seed = 0,
) -> pd.DataFrame:
    """Measure the loss along straight paths: eigen or random directions, between models, or to a round's clients.

    Rows ``loss`` and ``accuracy`` of every checkpoint, and along each path (``index``, from 1) at ``points`` places ``x``. F is
    the mean loss on the slice.

    - ``eigen`` (leading Hessian eigenvectors) and ``random`` (filter-normalised): x from -``span`` to ``span``; ``slope``
      g = <gradient, d>; ``curvature`` c = d.Hd; ``parabola`` F(w) + g x + c x^2 / 2.
    - ``models`` and ``clients``: the path (1 - t) w_1 + t w_2 at t = x. Floating-point buffers (batch-norm statistics) go along
      the same path (column ``buffers``). ``barrier``: the largest F(t) - [(1 - t) F(0) + t F(1)] of the points, at t = x; at
      least 0, as it is 0 at the ends; ``stderr`` over the examples, each with its own difference. ``distance`` of the ends.

    Args:
        problems: one or several losses around weights.
        directions: which paths.
        lines: directions from each checkpoint.
        points: evaluations of the slice on each path.
        span: of coefficients; eigenvectors have unit norm, random directions the norm of the weights, filter by filter.
        max_products: with the Hessian.
        seed: of Lanczos' start and of random directions.

    Returns:
        A row a number; losses in units of the loss.

    Raises:
        FldiagError: an even number of points, a checkpoint without clients, models of different architectures or on different
            examples, or a loss at the weights that is not finite.

    >>> from torch import nn, tensor, zeros
    >>> from fldiag.problem.problem import Problem
    >>> net, data = nn.Linear(1, 1, bias=False), (zeros(2, 1) + 1, zeros(2, 1))
    >>> a, b = (Problem(net, nn.functional.mse_loss, data, tensor([w])) for w in (-1.0, 1.0))
    >>> frame = paths([a, b], points=3)
    >>> frame[frame["x"].notna() & (frame["metric"] == "loss")]["value"].tolist()
    [1.0, 0.0, 1.0]
    """
    if points % 2 == 0:
        text = f"points = {points} puts no point in the middle of a path"
        raise FldiagError(text, "use an odd number", usage=True)
    rows = [{**p.common, **row} for p in problems for row in p.centre.rows(p)]
    kind = directions or ("models" if len(problems) > 1 else "eigen")
    ways: list[tuple[Path, Row, list[Row]]] = []
    if kind in ("eigen", "random"):
        places = np.linspace(-span, span, points)
        for p in problems:
            curvatures = _curvatures(p, kind, lines, max_products, seed)
            for i, (d, curvature) in enumerate(curvatures, start=1):
                slope = float(p.gradient() @ d)
                about = [{"metric": "slope", "value": slope, "estimator": "exact"}, curvature]
                bowl = p.centre.loss + slope * places + curvature["value"] * places**2 / 2
                common = {"metric": "parabola", "estimator": curvature["estimator"]}
                values = zip(places.tolist(), bowl.tolist(), strict=True)
                about += [{**common, "x": x, "value": value} for x, value in values]
                ways.append((Path(p, d), {**p.common, "index": i}, about))
    else:
        places = np.linspace(0, 1, points)
        pairs = list(combinations(problems, 2))
        if kind == "clients":
            pairs = [(p, client) for p in problems for client in _clients_of(p)]
        for i, (a, b) in enumerate(pairs, start=1):
            _check_alike(a, b)
            way = Path.between(a, b)
            columns = {k: v for k, v in a.common.items() if b.common.get(k) == v}
            columns |= {"run": a.name, "run_b": b.name, "scope": "pair", "index": i}
            columns["client"] = b.labels.get("client")
            columns["buffers"] = "interpolated" if way.buffers else None
            distance: Row = {"metric": "distance", "estimator": "exact"}
            about = [{**distance, "value": float(way.offset.norm())}]
            ways.append((way, columns, about))
    if not ways:
        raise FldiagError("there is one model", "give two, or --directions clients", usage=True)
    every, name = [way for way, *_ in ways], (lambda i: f"path {i + 1}")
    along = workspace().map(rows_along, every, range(len(ways)), name=name, places=places)
    for (_, columns, about), measured in zip(ways, along, strict=True):
        rows += [{**columns, **row} for row in (*measured, *about)]
    return table(rows)


def _curvatures(
    problem: Problem, kind: str, count: int, max_products: int, seed: int
) -> Iterator[tuple[Tensor, Row]]:
    """Directions [P], and their rows ``curvature``."""
    if kind == "random":
        for i in range(count):
            d = random_direction(problem, seed, i)
            value = float(d @ problem.hvp(d))
            yield d, {"metric": "curvature", "value": value, "estimator": "exact"}
        return
    pairs = eigenpairs(
        problem, count, max_products=max_products, seed=seed, progress=workspace().show
    )
    for d, value, residual in zip(pairs.vectors, pairs.values, pairs.residuals, strict=True):
        row = {"metric": "curvature", "value": float(value), "residual": float(residual)}
        yield d.to(problem.device), {**row, "estimator": "lanczos"}


def _clients_of(problem: Problem) -> list[Problem]:
    """The models that clients trained, of the checkpoint that a problem was opened from."""
    checkpoint = problem.checkpoint
    if checkpoint is None or checkpoint.clients is None or "client" in problem.labels:
        raise FldiagError(
            f"{problem.name or 'the problem'} is no checkpoint that holds trained weights of clients",
            "train with checkpoint.clients = 'sampled', and leave out --client",
            usage=True,
        )
    labels = {**problem.labels, "moment": "trained", "scope": "client"}
    return [
        problem.at(
            checkpoint.clients[row],
            {n: b[row] for n, b in checkpoint.buffers.items()} or None,
            name=f"client {k}",
            labels={**labels, "client": k},
        )
        for row, k in enumerate(checkpoint.client_ids)
    ]


def _check_alike(a: Problem, b: Problem) -> None:
    """Raises FldiagError for models between which there is no path."""
    is_one_model = (a.layout, repr(a.module), a.n) == (b.layout, repr(b.module), b.n)
    if not is_one_model or not same(a.sample(), b.sample()):
        examples = f"{a.slice_name}, {a.n}; {b.slice_name}, {b.n}"
        raise FldiagError(
            f"{a.name} and {b.name} are not of one architecture on the same examples ({examples})",
            "give models of one architecture, and one slice for both: --slice test, or --data",
            usage=True,
        )
