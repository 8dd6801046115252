"""Paths and mixtures of models, measured in units that can be done anywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal

import numpy as np
import torch

from fldiag.errors import FldiagError
from fldiag.execution.pools import open_pool
from fldiag.problem.eigenpairs import rows_of_scores
from fldiag.problem.problem import Problem
from fldiag.problem.scores import Scores
from fldiag.problem.trees import same
from fldiag.registry import Progress
from fldiag.results.kept_units import KeptUnits, packed, unpacked
from fldiag.results.provenance import digest
from fldiag.results.table import Row
from fldiag.seeding import numpy_rng
from fldiag.surface import bezier
from fldiag.surface.alignment import aligned
from fldiag.surface.batch_norm import running
from fldiag.surface.highest import highest
from fldiag.surface.mixtures import Buffers, Mixtures, Model

#: Nothing higher is looked for on a path when it is expected to be less than this share of the range of the loss.
GRID_RTOL = 0.01
#: Points on an edge of the simplex of three models.
EDGE = np.arange(1, 8) / 8


@dataclass(frozen=True)
class Options:
    pairs: Literal["all", "first", "none"]
    points: int
    refine: int
    curve: int
    mixtures: int
    align: bool
    buffers: Buffers | None
    seed: int


@dataclass(frozen=True)
class Unit:
    """A path between two models, straight or bent, or with ``shares`` one mixture of all."""

    ends: tuple[int, int] = (0, 0)
    path: str = ""
    shares: tuple[float, ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.path} path {self.ends[0] + 1}-{self.ends[1] + 1}"
            if self.path
            else f"mixture {self.shares}"
        )


@dataclass
class Work:
    """What units have in common. ``paths`` and ``group`` differ in what becomes of batch-norm's statistics."""

    problem: Problem
    models: list[Model]
    options: Options
    paths: Mixtures = field(init=False)
    group: Mixtures = field(init=False)

    def __post_init__(self) -> None:
        self.paths = Mixtures(self.problem, self.models, self.options.buffers or "reestimated")
        self.group = Mixtures(self.problem, self.models, self.options.buffers or "mixed")

    def straight(self, ends: tuple[int, int], t: float) -> Scores:
        shares = [0.0] * len(self.models)
        shares[ends[0]], shares[ends[1]] = 1 - t, t
        return self.paths(shares)


def done(work: Work, unit: Unit) -> Any:
    if unit.shares:
        corners = [
            work.group(np.eye(len(work.models))[k].tolist()) for k in range(len(work.models))
        ]
        return Excess.of(work.problem, work.group(unit.shares), corners, unit.shares)
    if unit.path == "straight":
        return Path(work, lambda t: work.straight(unit.ends, t)).rows()
    first, second = (work.models[i] for i in unit.ends)
    problem = work.problem.at(*first)
    theta = bezier.bent(Mixtures(problem, [first, second], work.paths.buffers), work.options.curve)
    bent = Mixtures(problem, [first, second, theta], work.paths.buffers)
    return [
        *Path(work, lambda t: bent(bezier.shares(t))).rows(),
        {
            "metric": "budget",
            "value": work.options.curve,
            "unit": "gradients",
            "estimator": "exact",
        },
    ]


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

    def packed(self) -> np.ndarray:
        start = [self.loss, self.value, math.nan if self.stderr is None else self.stderr]
        return np.array(start) if self.each is None else np.concatenate([start, self.each])

    @staticmethod
    def unpacked(content: np.ndarray) -> Excess:
        loss, value, stderr = content[:3].tolist()
        return Excess(
            loss,
            value,
            None if math.isnan(stderr) else stderr,
            content[3:] if len(content) > 3 else None,
        )


class Path:
    """One path: its points, and where it is highest above the straight line between its ends' losses."""

    def __init__(self, work: Work, evaluate: Any):
        self.problem, self.options, self.evaluate = work.problem, work.options, evaluate
        self.found: dict[float, Scores] = {}

    def scores(self, t: float) -> Scores:
        if t not in self.found:
            self.found[t] = self.evaluate(t)
        return self.found[t]

    def excess(self, t: float) -> Excess:
        return Excess.of(
            self.problem, self.scores(t), [self.scores(0.0), self.scores(1.0)], (1 - t, t)
        )

    def rows(self) -> list[Row]:
        grid = np.linspace(0.0, 1.0, self.options.points)
        at_grid = np.array([self.excess(float(t)).value for t in grid])
        places, values, error = highest(
            lambda t: self.excess(t).value, grid, at_grid, self.options.refine, GRID_RTOL
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
        found = {} if value <= 0 else {"x": float(places[most]), "stderr": _deviation(lost[most])}
        return [
            {"metric": "accuracy_barrier", "value": max(value, 0.0), "estimator": "grid", **found}
        ]


def _deviation(each: torch.Tensor) -> float | None:
    return float(each.std()) / math.sqrt(len(each)) if len(each) > 1 else None


def rows(
    problems: Sequence[Problem], options: Options, progress: Progress | None, store: Any = None
) -> tuple[Row, list[Row]]:
    """What all rows have in common, and the rows."""
    if options.points % 2 == 0:
        raise FldiagError(
            f"points = {options.points} puts no point in the middle of a path",
            "use an odd number",
            usage=True,
        )
    sound = [p for p in problems if bool(torch.isfinite(p.w).all())]
    found: list[Row] = [
        {**_who(p), "metric": "model_loss", "masked": True, "note": "weights that are not finite"}
        for p in problems
        if p not in sound
    ]
    if len(sound) < 2:
        raise FldiagError(
            f"{len(sound)} of {len(problems)} models have finite weights", "two are needed"
        )
    base = sound[0]
    for p in sound:
        scores = base.at(p.w, p.buffers).scores() if p is not base else p.scores()
        found += [
            {**_who(p), **row, "metric": f"model_{row['metric']}"}
            for row in rows_of_scores(base, scores)
        ]
    models: list[Model] = [(p.w, p.buffers) for p in sound]
    if options.align:
        models, moved = aligned(base, models)
        found += [
            {
                **_who(p),
                "metric": "moved",
                "layer": layer,
                "value": count,
                "unit": "units",
                "estimator": "exact",
            }
            for p, layers in zip(sound[1:], moved, strict=True)
            for layer, count in layers.items()
        ]
    kept = KeptUnits(
        store,
        lambda: digest("connectivity", [p.digest() for p in sound], vars(options)),
        _packed,
        _unpacked,
    )
    found += _measured(sound, Work(base, models, options), progress, kept)
    common = {
        k: v
        for k, v in base.common.items()
        if k not in ("client", "run") and all(p.common.get(k) == v for p in problems)
    }
    return {**common, "run": _name(problems)}, found


def _packed(result: Any) -> np.ndarray:
    return result.packed() if isinstance(result, Excess) else packed(result)


def _unpacked(content: np.ndarray) -> Any:
    return unpacked(content) if content.dtype == np.uint8 else Excess.unpacked(content)


def _measured(
    sound: Sequence[Problem], work: Work, progress: Progress | None, kept: KeptUnits
) -> list[Row]:
    options, count = work.options, len(sound)
    ends = (
        []
        if options.pairs == "none"
        else [
            pair for pair in combinations(range(count), 2) if options.pairs == "all" or pair[0] == 0
        ]
    )
    units = [
        Unit(pair, path)
        for pair in ends
        for path in ("straight", *(["curve"] if options.curve else []))
    ]
    shares = _shares(count, options) if count > 2 and options.mixtures else []
    units += [Unit(shares=a) for a in shares]
    with open_pool(sound[0].executor, done, work, most=len(units)) as pool:
        results = kept.results(pool, units, progress)
    buffers = running(work.problem)
    found: list[Row] = []
    for unit, result in zip(units, results, strict=True):
        if unit.path:
            about = {
                **_both(sound, unit.ends),
                "path": unit.path,
                "index": ends.index(unit.ends) + 1,
            }
            about |= {"buffers": work.paths.buffers} if buffers else {}
            found += [{"masked": False, **row, **about} for row in result]
    for number, pair in enumerate(ends, start=1):
        (a, _), (b, _) = (work.models[i] for i in pair)
        found.append(
            {
                **_both(sound, pair),
                "metric": "distance",
                "path": "straight",
                "index": number,
                "estimator": "exact",
                "value": float((a.double() - b.double()).norm()),
            }
        )
    excesses = [r for unit, r in zip(units, results, strict=True) if unit.shares]
    return found + (
        _group(work, shares, excesses, {"buffers": work.group.buffers} if buffers else {})
        if shares
        else []
    )


def _shares(count: int, options: Options) -> list[tuple[float, ...]]:
    """The corners, the centre, of three models points on the edges (or their picture would guess them from the corners), and
    last the points uniform on the simplex."""
    drawn = numpy_rng(options.seed, "mixtures of models").dirichlet(
        np.ones(count), options.mixtures
    )
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
        *map(tuple, drawn.tolist()),
    ]


def _group(
    work: Work, shares: Sequence[tuple[float, ...]], found: Sequence[Excess], more: Row
) -> list[Row]:
    count = len(work.models)
    rows: list[Row] = [
        {
            "metric": "mixture",
            "index": i,
            "shares": " ".join(map(repr, a)),
            "value": e.value,
            "stderr": e.stderr,
            "loss": e.loss,
            "estimator": "exact",
            "scope": "global",
            **more,
        }
        for i, (a, e) in enumerate(zip(shares, found, strict=True), start=1)
    ]
    values, drawn = np.array([e.value for e in found]), found[-work.options.mixtures :]
    spread = np.array([e.value for e in drawn])
    each = [e.each for e in drawn if e.each is not None]
    stderr = (
        work.problem.stderr(torch.from_numpy(np.mean(each, axis=0)).to(work.problem.device))
        if each
        else None
    )
    top = int(np.nan_to_num(values, nan=-np.inf).argmax())
    rows.append(
        {
            "metric": "mixture_mean",
            "value": float(spread.mean()),
            "stderr": stderr,
            "estimator": "monte-carlo",
            "residual": float(spread.std(ddof=1) / math.sqrt(len(spread)))
            if len(spread) > 1
            else None,
            "scope": "global",
            **more,
        }
    )
    for metric, i in (("mixture_max", top), ("mixture_centre", count)):
        rows.append(
            {
                "metric": metric,
                "value": found[i].value,
                "stderr": found[i].stderr,
                "shares": rows[i]["shares"],
                "estimator": "monte-carlo" if metric == "mixture_max" else "exact",
                "scope": "global",
                **more,
            }
        )
    return rows


# -- who is who


def alike(problems: Sequence[Problem]) -> None:
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


def _clients(problems: Sequence[Problem]) -> bool:
    """Whether the models are those of clients of one checkpoint."""
    clients = [p.labels.get("client") for p in problems]
    names = {p.name.removesuffix(f" client {k}") for p, k in zip(problems, clients, strict=True)}
    return None not in clients and len(set(clients)) == len(clients) and len(names) == 1


def _name(problems: Sequence[Problem]) -> str:
    first = problems[0]
    if _clients(problems):
        return first.name.removesuffix(f" client {first.labels['client']}")
    return ", ".join(p.name for p in problems)


def _who(p: Problem) -> Row:
    return {
        "run": p.name,
        **{
            k: v
            for k, v in p.labels.items()
            if k in ("client", "scope", "method", "round", "seed", "moment")
        },
    }


def _both(problems: Sequence[Problem], ends: tuple[int, int]) -> Row:
    a, b = (problems[i] for i in ends)
    clients = {"client": a.labels.get("client"), "client_b": b.labels.get("client")}
    return {
        "run": a.name,
        "run_b": b.name,
        "scope": "pair",
        **(clients if None not in clients.values() else {}),
    }
