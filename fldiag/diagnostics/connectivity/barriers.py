"""Paths and mixtures of models: how far the loss on them lies above those of the models."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import combinations
from typing import Any, Literal

import numpy as np
import torch

from fldiag.errors import FldiagError
from fldiag.execution.workspace import workspace
from fldiag.landscape.alignment import align
from fldiag.landscape.interpolation import highest
from fldiag.landscape.mixtures import (
    Buffers,
    Mixtures,
    Model,
    bend_path,
    bezier_shares,
    has_running_statistics,
)
from fldiag.problem.eigenpairs import rows_of_scores
from fldiag.problem.problem import Problem
from fldiag.problem.scores import Scores
from fldiag.problem.trees import same
from fldiag.results.table import Row
from fldiag.seeding import numpy_rng

#: Nothing higher is looked for on a path when it is expected to be less than this share of the range of the loss.
GRID_RTOL = 0.01
#: Points on an edge of the simplex of three models.
EDGE = np.arange(1, 8) / 8
Shares = tuple[float, ...]


@dataclass(frozen=True)
class Settings:
    """Which paths and mixtures, and how; the options of ``connectivity``."""

    pairs: Literal["all", "first", "none"]
    points: int
    refine: int
    curve: int
    mixtures: int
    align: bool
    buffers: Buffers | None
    seed: int
    layers: bool = False


@dataclass
class Models:
    """What paths and mixtures have in common. ``on_paths`` and ``mixed`` differ in what becomes of batch-norm's statistics."""

    problem: Problem
    models: list[Model]
    settings: Settings

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def on_paths(self) -> Mixtures:
        return Mixtures(self.problem, self.models, self.settings.buffers or "reestimated")

    @cached_property
    def mixed(self) -> Mixtures:
        return Mixtures(self.problem, self.models, self.settings.buffers or "mixed")

    @cached_property
    def corners(self) -> list[Scores]:
        """The scores of the models themselves, as mixtures."""
        return [self.mixed(shares) for shares in np.eye(len(self.models)).tolist()]


def connectivity_rows(problems: Sequence[Problem], settings: Settings) -> list[Row]:
    if settings.points % 2 == 0:
        raise FldiagError(
            f"points = {settings.points} puts no point in the middle of a path",
            "use an odd number",
            usage=True,
        )
    sound = [p for p in problems if bool(torch.isfinite(p.w).all())]
    if len(sound) < 2:
        raise FldiagError(
            f"{len(sound)} of {len(problems)} models have finite weights", "two are needed"
        )
    rows: list[Row] = [
        {
            **columns_of(p),
            "metric": "model_loss",
            "masked": True,
            "note": "weights that are not finite",
        }
        for p in problems
        if p not in sound
    ]
    base, count = sound[0], len(sound)
    for p in sound:
        scores = base.at(p.w, p.buffers).scores() if p is not base else p.scores()
        rows += [
            {**columns_of(p), **row, "metric": f"model_{row['metric']}"}
            for row in rows_of_scores(base, scores)
        ]
    weights: list[Model] = [(p.w, p.buffers) for p in sound]
    if settings.align:
        weights, moves = align(base, weights)
        rows += [
            {
                **columns_of(p),
                "metric": "moved",
                "layer": layer,
                "value": units,
                "unit": "units",
                "estimator": "exact",
            }
            for p, layers in zip(sound[1:], moves, strict=True)
            for layer, units in layers.items()
        ]
    models = Models(base, weights, settings)
    pairs = [] if settings.pairs == "none" else list(combinations(range(count), 2))
    if settings.pairs == "first":
        pairs = [pair for pair in pairs if pair[0] == 0]
    shares = mixture_shares(count, settings) if count > 2 and settings.mixtures else []
    parts = 1 + settings.layers + bool(shares)
    with workspace().part(0, parts, "paths"):
        rows += all_path_rows(models, sound, pairs)
    if settings.layers:
        with workspace().part(1, parts, "layers"):
            rows += all_layer_rows(models, sound, pairs)
    if shares:
        with workspace().part(parts - 1, parts, "mixtures"):
            results = workspace().map(
                mixture_excess, models, shares, name=lambda shares: f"mixture {shares}"
            )
            rows += mixture_rows(models, shares, [Excess(**result) for result in results])
    return rows


def all_path_rows(
    models: Models, sound: Sequence[Problem], pairs: Sequence[tuple[int, int]]
) -> list[Row]:
    """The rows of the paths between these pairs, and the distances of their ends."""
    kinds = ("straight", "curve") if models.settings.curve else ("straight",)
    paths = [(kind, *pair) for pair in pairs for kind in kinds]
    results = workspace().map(
        path_rows, models, paths, name=lambda path: f"{path[0]} path {path[1] + 1}-{path[2] + 1}"
    )
    buffers: Row = (
        {"buffers": models.on_paths.buffers} if has_running_statistics(models.problem) else {}
    )
    rows: list[Row] = []
    for (kind, *pair), result in zip(paths, results, strict=True):
        columns = {
            **columns_of_pair(sound[pair[0]], sound[pair[1]]),
            "path": kind,
            "index": pairs.index((pair[0], pair[1])) + 1,
            **buffers,
        }
        rows += [{"masked": False, **row, **columns} for row in result]
    for number, (i, j) in enumerate(pairs, start=1):
        difference = models.models[i][0].double() - models.models[j][0].double()
        rows.append(
            {
                **columns_of_pair(sound[i], sound[j]),
                "metric": "distance",
                "path": "straight",
                "index": number,
                "estimator": "exact",
                "value": float(difference.norm()),
            }
        )
    return rows


def path_rows(models: Models, path: tuple[str, int, int]) -> list[Row]:
    """The rows of the straight or the bent path between two models."""
    kind, i, j = path
    if kind == "straight":

        def straight(t: float) -> Scores:
            shares = [0.0] * len(models.models)
            shares[i], shares[j] = 1 - t, t
            return models.on_paths(shares)

        return Path(models, straight).rows()
    first, second = models.models[i], models.models[j]
    problem, buffers, budget = (
        models.problem.at(*first),
        models.on_paths.buffers,
        models.settings.curve,
    )
    theta = bend_path(
        Mixtures(problem, [first, second], buffers), budget, progress=workspace().show
    )
    bent = Mixtures(problem, [first, second, theta], buffers)
    gradients: Row = {
        "metric": "budget",
        "value": budget,
        "unit": "gradients",
        "estimator": "exact",
    }
    return [*Path(models, lambda t: bent(bezier_shares(t))).rows(), gradients]


def all_layer_rows(
    models: Models, sound: Sequence[Problem], pairs: Sequence[tuple[int, int]]
) -> list[Row]:
    """The barriers of single layers between these pairs, with the rest from either end."""
    layers = models.problem.layout.layers
    paths = [(i, j, layer, rest) for i, j in pairs for layer in layers for rest in (i, j)]
    results = workspace().map(
        layer_rows,
        models,
        paths,
        name=lambda path: (
            f"layer {path[2]} of path {path[0] + 1}-{path[1] + 1}, rest of {path[3] + 1}"
        ),
    )
    buffers: Row = (
        {"buffers": models.on_paths.buffers} if has_running_statistics(models.problem) else {}
    )
    rows: list[Row] = []
    for (i, j, layer, rest), result in zip(paths, results, strict=True):
        columns = {
            **columns_of_pair(sound[i], sound[j]),
            "index": pairs.index((i, j)) + 1,
            "layer": layer or layers[layer][0],
            "rest": "first" if rest == i else "second",
            **buffers,
        }
        rows += [{"masked": False, **row, **columns} for row in result]
    return rows


def layer_rows(models: Models, path: tuple[int, int, str, int]) -> list[Row]:
    """``layer_barrier`` and ``layer_midpoint`` on the path from model i's weights of a layer to model j's, all other weights
    (and buffers) being those of model ``rest``; and ``layer_average`` of its middle."""
    i, j, layer, rest = path
    ends = [_with_layer(models, rest, layer, source) for source in (i, j)]
    mixtures = Mixtures(models.problem.at(*ends[0]), ends, models.on_paths.buffers)
    between = Path(models, lambda t: mixtures((1 - t, t)))
    rows = [
        {**row, "metric": f"layer_{row['metric']}"}
        for row in between.rows()
        if row["metric"] in ("barrier", "midpoint")
    ]
    corners = [models.corners[i], models.corners[j]]
    average = Excess.of(models.problem, between.scores(0.5), corners, (0.5, 0.5))
    row: Row = {"metric": "layer_average", "x": 0.5, "estimator": "exact"}
    return [*rows, {**row, "value": average.value, "stderr": average.stderr}]


def _with_layer(models: Models, rest: int, layer: str, source: int) -> Model:
    """Model ``rest`` with a layer, and its buffers, of model ``source``."""
    layout = models.problem.layout
    (w, buffers), (other, other_buffers) = models.models[rest], models.models[source]
    w, slices = w.clone(), layout.slices()
    for name in layout.layers[layer]:
        w[slices[name]] = other[slices[name]].to(w)
    layer_buffers = {n: b for n, b in other_buffers.items() if n.rpartition(".")[0] == layer}
    return w, {**buffers, **layer_buffers}


def mixture_excess(models: Models, shares: Shares) -> dict[str, Any]:
    """The ``Excess`` of one mixture of all models, as plain values."""
    return vars(Excess.of(models.problem, models.mixed(shares), models.corners, shares))


@dataclass(frozen=True)
class Excess:
    """The loss at a mixture above the mixture of the losses: in the mean, its standard error, and of ``each`` example."""

    loss: float
    value: float
    stderr: float | None
    each: np.ndarray | None

    @staticmethod
    def of(problem: Problem, at: Scores, ends: Sequence[Scores], shares: Sequence[float]) -> Excess:
        if at.each is None or any(end.each is None for end in ends):
            return Excess(
                at.loss,
                at.loss - sum(a * end.loss for a, end in zip(shares, ends, strict=True)),
                None,
                None,
            )
        each = at.each - sum(
            a * end.each for a, end in zip(shares, ends, strict=True) if end.each is not None
        )
        return Excess(at.loss, float(each.mean()), problem.stderr(each), each.cpu().numpy())


class Path:
    """One path: its points, and where it is highest above the straight line between its ends' losses."""

    def __init__(self, models: Models, evaluate: Callable[[float], Scores]):
        self.problem, self.settings, self.evaluate = models.problem, models.settings, evaluate
        self._scores: dict[float, Scores] = {}

    def scores(self, t: float) -> Scores:
        if t not in self._scores:
            self._scores[t] = self.evaluate(t)
        return self._scores[t]

    def excess(self, t: float) -> Excess:
        return Excess.of(
            self.problem, self.scores(t), [self.scores(0.0), self.scores(1.0)], (1 - t, t)
        )

    def rows(self) -> list[Row]:
        grid = np.linspace(0.0, 1.0, self.settings.points)
        at_grid = np.array([self.excess(float(t)).value for t in grid])
        places, values, error = highest(
            lambda t: self.excess(t).value, grid, at_grid, self.settings.refine, GRID_RTOL
        )
        rows: list[Row] = []
        for t in map(float, places):
            s = self.scores(t)
            rows.append(
                {
                    "metric": "loss",
                    "x": t,
                    "value": s.loss,
                    "estimator": "exact",
                    "stderr": None if s.each is None else self.problem.stderr(s.each),
                }
            )
            if s.right is not None:
                rows.append(
                    {
                        "metric": "accuracy",
                        "x": t,
                        "value": s.accuracy,
                        "estimator": "exact",
                        "stderr": _deviation(s.right.double()),
                    }
                )
        middle = self.excess(0.5)
        losses = [self.scores(float(t)).loss for t in grid]
        return [
            *rows,
            self._barrier(places, values, error),
            *self._accuracy(places),
            {
                "metric": "midpoint",
                "x": 0.5,
                "value": middle.value,
                "stderr": middle.stderr,
                "estimator": "exact",
            },
            {
                "metric": "mean_loss",
                "value": float(np.trapezoid(losses, grid)),
                "estimator": "grid",
            },
        ]

    def _barrier(self, places: np.ndarray, values: np.ndarray, error: float) -> Row:
        row: Row = {"metric": "barrier", "estimator": "grid"}
        if not np.isfinite(values).all():  # overflow between sound ends is a barrier without end
            sound = all(math.isfinite(self.scores(t).loss) for t in (0.0, 1.0))
            return (
                {**row, "value": math.inf}
                if sound
                else {**row, "masked": True, "note": "the loss of an end is not finite"}
            )
        t = float(places[values.argmax()])
        top = self.excess(t)
        rounding = torch.finfo(self.problem.dtype).eps * max(
            abs(self.scores(end).loss) for end in (0.0, 1.0)
        )
        if top.value <= rounding or t in (0.0, 1.0):
            return {**row, "value": 0.0, "residual": error}
        return {**row, "value": top.value, "x": t, "stderr": top.stderr, "residual": error}

    def _accuracy(self, places: np.ndarray) -> list[Row]:
        ends = [self.scores(t).right for t in (0.0, 1.0)]
        if ends[0] is None or ends[1] is None:
            return []
        lost = []
        for t in map(float, places):
            right = self.scores(t).right
            assert right is not None
            lost.append((1 - t) * ends[0].double() + t * ends[1].double() - right.double())
        most = int(np.argmax([float(each.mean()) for each in lost]))
        value = float(lost[most].mean())
        row: Row = {"metric": "accuracy_barrier", "value": max(value, 0.0), "estimator": "grid"}
        if value > 0:
            row |= {"x": float(places[most]), "stderr": _deviation(lost[most])}
        return [row]


def _deviation(each: torch.Tensor) -> float | None:
    return float(each.std()) / math.sqrt(len(each)) if len(each) > 1 else None


def mixture_shares(count: int, settings: Settings) -> list[Shares]:
    """The corners, the centre, of three models points on the edges (or their picture would guess them from the corners), and
    last the points uniform on the simplex."""
    rng = numpy_rng(settings.seed, "mixtures of models")
    draws = rng.dirichlet(np.ones(count), settings.mixtures)
    corners = np.eye(count)
    edges = (
        [((1 - t) * a + t * b).tolist() for a, b in combinations(corners, 2) for t in EDGE]
        if count == 3
        else []
    )
    return [
        *map(tuple, corners.tolist()),
        (1 / count,) * count,
        *map(tuple, edges),
        *map(tuple, draws.tolist()),
    ]


def mixture_rows(models: Models, shares: Sequence[Shares], excesses: Sequence[Excess]) -> list[Row]:
    """The rows of the mixtures with these shares, of their mean and the largest."""
    count, problem = len(models.models), models.problem
    columns: Row = {"scope": "global"}
    if has_running_statistics(problem):
        columns["buffers"] = models.mixed.buffers
    rows: list[Row] = [
        {
            "metric": "mixture",
            "index": i,
            "shares": " ".join(map(repr, a)),
            "value": e.value,
            "stderr": e.stderr,
            "loss": e.loss,
            "estimator": "exact",
            **columns,
        }
        for i, (a, e) in enumerate(zip(shares, excesses, strict=True), start=1)
    ]
    draws = excesses[-models.settings.mixtures :]
    values, drawn_values = (np.array([e.value for e in group]) for group in (excesses, draws))
    each = [e.each for e in draws if e.each is not None]
    stderr = (
        problem.stderr(torch.from_numpy(np.mean(each, axis=0)).to(problem.device)) if each else None
    )
    top = int(np.nan_to_num(values, nan=-np.inf).argmax())
    rows.append(
        {
            "metric": "mixture_mean",
            "value": float(drawn_values.mean()),
            "stderr": stderr,
            "estimator": "monte-carlo",
            "residual": float(drawn_values.std(ddof=1) / math.sqrt(len(draws)))
            if len(draws) > 1
            else None,
            **columns,
        }
    )
    for metric, i in (("mixture_max", top), ("mixture_centre", count)):
        rows.append(
            {
                "metric": metric,
                "value": excesses[i].value,
                "stderr": excesses[i].stderr,
                "shares": rows[i]["shares"],
                "estimator": "monte-carlo" if metric == "mixture_max" else "exact",
                **columns,
            }
        )
    return rows


# -- who is who


def check_alike(problems: Sequence[Problem]) -> None:
    """Raises FldiagError for models that cannot be mixed."""
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


def are_clients(problems: Sequence[Problem]) -> bool:
    """Whether the models are those of clients of one checkpoint."""
    clients = [p.labels.get("client") for p in problems]
    names = {p.name.removesuffix(f" client {k}") for p, k in zip(problems, clients, strict=True)}
    return None not in clients and len(set(clients)) == len(clients) and len(names) == 1


def common_columns(problems: Sequence[Problem]) -> Row:
    """The columns that are the same in all rows."""
    first = next((p for p in problems if bool(torch.isfinite(p.w).all())), problems[0])
    columns = {
        k: v
        for k, v in first.common.items()
        if k not in ("client", "run") and all(p.common.get(k) == v for p in problems)
    }
    name = ", ".join(p.name for p in problems)
    if are_clients(problems):
        name = problems[0].name.removesuffix(f" client {problems[0].labels['client']}")
    return {**columns, "run": name}


def columns_of(p: Problem) -> Row:
    return {
        "run": p.name,
        **{
            k: v
            for k, v in p.labels.items()
            if k in ("client", "scope", "method", "round", "seed", "moment")
        },
    }


def columns_of_pair(a: Problem, b: Problem) -> Row:
    clients = {"client": a.labels.get("client"), "client_b": b.labels.get("client")}
    return {
        "run": a.name,
        "run_b": b.name,
        "scope": "pair",
        **(clients if None not in clients.values() else {}),
    }
