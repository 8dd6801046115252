"""Whether models lie in one valley: the loss barriers on the straight paths between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from pydantic import Field

from fldiag.errors import FldiagError
from fldiag.execution import workspace
from fldiag.plotting import style
from fldiag.plotting.curves import barrier as draw_barrier
from fldiag.plotting.heatmap import draw_cells, of_pairs
from fldiag.plotting.tables import floats, need, select
from fldiag.registry import diagnostic
from fldiag.results.select import number, only
from fldiag.results.summary import Item, Say, Small
from fldiag.results.table import Row, table

if TYPE_CHECKING:
    from fldiag.problem.problem import Problem

PICTURE = "picture of connectivity"
#: Of more pairs than this only the one with the largest barrier stands out, and the barriers have a panel.
MANY = 6
GREY = "#8a8a8a"
PATHS = {
    "run": "from",
    "run_b": "to",
    "barrier": "barrier",
    "stderr": "± (stderr)",
    "at": "at t",
    "midpoint": "at the midpoint",
    "distance": "distance",
}
#: Of more paths the table shows those with the largest barriers.
MOST = 15


def draw(table: pd.DataFrame) -> Figure:
    """The loss along the paths, with barriers; of many pairs with barriers also a panel of these.

    Raises FldiagError for another table.
    """
    need(table, ("metric", "run", "run_b", "index", "x", "value", "stderr"), PICTURE)
    heights = select(table, "barrier", PICTURE).set_index("index")["value"].astype(float)
    is_crowded = len(heights) > MANY
    has_barriers = bool((heights.fillna(0) > 0).any())
    with style.paper():
        count = 1 + (is_crowded and has_barriers)
        width = style.ONE_COLUMN * 1.2 if count == 1 else style.TWO_COLUMNS
        fig, axes = style.panels(count, 3.6, width=width, least=3.2)
        shown = [heights.idxmax()] if is_crowded and has_barriers else list(heights.index)
        _paths(axes[0], table, [] if is_crowded and not has_barriers else shown)
        if count > 1:
            _pairs(fig, axes[1], only(table, metric="barrier"))
    return fig


def _paths(ax: Axes, table: pd.DataFrame, shown: Sequence[int]) -> None:
    """The paths; in colour and by name those of ``shown``."""
    losses = only(table, metric="loss").sort_values("x")
    handles, texts = [], []
    for index, rows in losses.groupby("index", sort=False):
        x, value, error = (floats(rows[c]) for c in ("x", "value", "stderr"))
        if index not in shown:
            ax.plot(x, value, color=GREY, linewidth=0.6)
            continue
        look = style.look(shown.index(index))
        ax.plot(x, value, color=look.color, linewidth=1.3, zorder=3)
        error = np.nan_to_num(error)
        ax.fill_between(x, value - error, value + error, color=look.color, alpha=0.15, linewidth=0)
        at, height, stderr = (
            number(table, "barrier", index=index, column=c) for c in ("x", "value", "stderr")
        )
        draw_barrier(ax, value, at, height, look)
        handles.append(Line2D([], [], **look.line))
        text = f"barrier {style.number(height, 3)}" if height else "no barrier"
        text += f" ± {style.number(stderr, 2)}" if height and stderr is not None else ""
        ends = (style.shorten(rows[c].iloc[0], 22) for c in ("run", "run_b"))
        texts.append(f"{' – '.join(ends)}: {text}")
    if others := losses["index"].nunique() - len(shown):
        handles.append(Line2D([], [], color=GREY, linewidth=0.6))
        texts.append(f"{others} other pairs" if shown else f"{others} pairs, no barrier on any")
    about = f"{losses['slice'].iloc[0]}, n = {int(losses['n_examples'].iloc[0]):,}"
    ax.set(xlabel=f"along the path (t)\n{style.plain(about)}", ylabel="loss")
    ax.set_title("Paths between models")
    ax.margins(x=0.02)
    ax.grid(True)
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.24)}
    style.legend(ax, handles, texts, **below, handlelength=2.8, labelspacing=0.3)


def _pairs(fig: Figure, ax: Axes, rows: pd.DataFrame) -> None:
    """The barrier between each two models."""
    names = list(dict.fromkeys([*rows["run"], *rows["run_b"]]))
    cells = of_pairs(rows, "run", "run_b").loc[names, names]
    image = draw_cells(ax, cells, Normalize(0, np.nanmax(cells.to_numpy(), initial=0.0)))
    fig.colorbar(image, ax=ax, shrink=0.8, label="barrier")
    labels = [style.plain(style.shorten(n.rpartition(" client ")[2], 14)) for n in names]
    ax.set_xticks(range(len(names)), labels, rotation=60, ha="right")
    ax.set_yticks(range(len(names)), labels)
    ax.set_title("Barriers on straight paths")


def summary(frame: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[Item]:
    rows: list[Row] = []
    for _, part in only(frame, scope="pair").groupby("index", sort=False):
        rows.append(
            {
                "run": part["run"].iloc[0],
                "run_b": part["run_b"].iloc[0],
                "barrier": number(part, "barrier"),
                "stderr": number(part, "barrier", column="stderr"),
                "at": number(part, "barrier", column="x"),
                "midpoint": number(part, "midpoint"),
                "distance": number(part, "distance"),
            }
        )
    largest = sorted(rows, key=lambda row: -(row["barrier"] or 0.0))[:MOST]
    yield Small(largest if len(rows) > MOST else rows, PATHS)
    if len(rows) > MOST:
        mean = only(frame, metric="barrier")["value"].mean()
        yield Say(f"the {MOST} largest barriers of {len(rows)}; mean of all {mean:.3g}")


@diagnostic(
    "connectivity",
    on="checkpoints",
    draw=draw,
    summary=summary,
    example="checkpoints/digits-fedavg-s0-1a2b3c4d checkpoints/digits-fedsol-s0-1a2b3c4d",
)
def connectivity(
    problems: Sequence[Problem],
    *,
    pairs: Annotated[
        Literal["all", "first"],
        Field(
            description="Paths between models: all (every pair) or first (from the first model to each other)."
        ),
    ] = "all",
    points: Annotated[
        int, Field(ge=3, le=9999, description="Number of points along each path (odd).")
    ] = 21,
) -> pd.DataFrame:
    """Measure loss barriers on the straight paths between models: of several checkpoints, or the clients of a round.

    Of one run or checkpoint, the models that its clients trained; of several, these. F is the mean loss on the slice. Rows:

    - ``model_loss`` and ``model_accuracy`` of every model, with its own buffers.
    - along each path (1 - t) w_1 + t w_2 (``index`` its number), at t = ``x``: ``loss`` and ``accuracy``. The floating-point
      buffers (batch-norm statistics) go along the same path.
    - of each path ``barrier``: the largest F(t) - [(1 - t) F(0) + t F(1)] of the points, at t = ``x``; at least 0, as it is 0 at
      the ends. ``stderr`` is over the examples, each with its own difference. ``midpoint``: the same difference at t = 1/2,
      negative where the mean of the models is better than they are. ``distance`` of the ends.

    Raises FldiagError for models of different architectures or on different examples, and for fewer than two.
    """
    from fldiag.problem.eigenpairs import loss_rows

    if len(problems) == 1:
        problems = client_problems(problems[0])
    check_alike(problems)
    if points % 2 == 0:
        text = f"points = {points} puts no point in the middle of a path"
        raise FldiagError(text, "use an odd number", usage=True)
    paths = [
        pair for pair in combinations(range(len(problems)), 2) if pairs == "all" or not pair[0]
    ]
    states = [{**p.layout.views(p.w), **p.frozen, **p.buffers} for p in problems]
    results = workspace().map(
        path_rows,
        (problems[0], states),
        paths,
        name=lambda path: f"path {path[0] + 1}-{path[1] + 1}",
        points=points,
    )
    rows = [
        {**_columns(p), **row, "metric": f"model_{row['metric']}"}
        for p in problems
        for row in loss_rows(p)
    ]
    for index, ((i, j), result) in enumerate(zip(paths, results, strict=True), start=1):
        a, b = problems[i], problems[j]
        columns: Row = {"run": a.name, "run_b": b.name, "scope": "pair", "index": index}
        if "client" in a.labels and "client" in b.labels:
            columns |= {"client": a.labels["client"], "client_b": b.labels["client"]}
        rows += [{**row, **columns} for row in result]
    return table(rows, **common_columns(problems))


def path_rows(
    models: tuple[Problem, Sequence[Mapping[str, Any]]], path: tuple[int, int], points: int
) -> list[Row]:
    """The rows of the straight path between two of the models, named weights and buffers, on the problem's slice."""
    from fldiag.landscape.interpolation import StraightPath, barrier

    base, states = models
    problem = base.at(states[path[0]])
    straight = StraightPath.to(problem, states[path[1]])
    places = np.linspace(0.0, 1.0, points)
    rows: list[Row] = []
    losses = []
    for t in map(float, places):
        scores = straight.evaluate.scores(t)
        losses.append(scores.loss)
        stderr = None if scores.each is None else problem.stderr(scores.each)
        row: Row = {"metric": "loss", "x": t, "estimator": "exact"}
        rows.append({**row, "value": scores.loss, "stderr": stderr})
        if scores.right is not None:
            error = scores.accuracy_stderr
            rows.append({**row, "metric": "accuracy", "value": scores.accuracy, "stderr": error})
    middle = losses[points // 2] - (losses[0] + losses[-1]) / 2
    return [
        *rows,
        barrier(straight, places, np.array(losses)),
        {"metric": "midpoint", "x": 0.5, "value": middle, "estimator": "exact"},
        {"metric": "distance", "value": straight.length, "estimator": "exact"},
    ]


def check_alike(problems: Sequence[Problem]) -> None:
    """Raises FldiagError for models that cannot be mixed."""
    from fldiag.problem.trees import same

    first = problems[0]
    for p in problems[1:]:
        if (p.layout.names, p.layout.shapes, repr(p.module)) != (
            first.layout.names,
            first.layout.shapes,
            repr(first.module),
        ):
            raise FldiagError(
                f"{first.name or 'the first model'} and {p.name or 'another'} have different architectures, so "
                "there is no path between them",
                "give models of one architecture",
                usage=True,
            )
        if p.n != first.n or not all(
            same(a, b, 0.0) for a, b in zip(p.sample(32), first.sample(32), strict=True)
        ):
            raise FldiagError(
                f"{first.name or 'the first model'} and {p.name or 'another'} are evaluated on different examples "
                f"({first.slice_name}, {first.n}; {p.slice_name}, {p.n})",
                "choose one slice: --slice test, or --data for both",
                usage=True,
            )


def client_problems(problem: Problem) -> list[Problem]:
    """The models that clients trained, of the checkpoint that a problem was opened from.

    Raises FldiagError for one that holds no two of them.
    """
    checkpoint = problem.checkpoint
    if checkpoint is None:
        raise FldiagError("connectivity needs at least two models", "give two or more", usage=True)
    if "client" in problem.labels:
        raise FldiagError(
            "connectivity needs at least two models, and --client chooses one",
            "leave out --client, or give several checkpoints",
            usage=True,
        )
    ids = checkpoint.client_ids if checkpoint.clients is not None else ()
    if len(ids) < 2:
        weights = (
            f"the trained weights of one client ({ids[0]})"
            if ids
            else "no trained weights of clients"
        )
        raise FldiagError(
            f"{checkpoint.path} holds {weights}, and connectivity needs at least two models",
            "give several checkpoints, or train with checkpoint.clients = 'sampled'",
            usage=True,
        )
    labels = {**problem.labels, "moment": "trained", "scope": "client"}
    return [
        problem.at(
            checkpoint.clients[row],
            {n: b[row] for n, b in checkpoint.buffers.items()} or None,
            name=f"{problem.name} client {k}",
            labels={**labels, "client": k},
        )
        for row, k in enumerate(ids)
    ]


def common_columns(problems: Sequence[Problem]) -> Row:
    """The columns that are the same in all rows."""
    columns = {
        k: v
        for k, v in problems[0].common.items()
        if k not in ("client", "run") and all(p.common.get(k) == v for p in problems)
    }
    return {**columns, "run": ", ".join(p.name for p in problems)}


def _columns(p: Problem) -> Row:
    names = ("client", "scope", "method", "round", "seed", "moment")
    return {"run": p.name, **{k: v for k, v in p.labels.items() if k in names}}
