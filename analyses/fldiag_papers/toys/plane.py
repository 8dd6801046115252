"""FedSOL against FedProx in the plane (Lee et al., "FedSOL", CVPR 2024, appendix H, figure 12).

Client k has the loss L_k(w) = 1/2 [a_k (x - x*)^2 + (y - y*)^2] around w_l* = (x*, y*), and every client
starts from w_g. Below A = diag(a, 1), d = w_l* - w_g, D = ||d||, u = w - w_g, and the proximal loss is
||u||^2 / 2. FedSOL comes to rest on the line from w_g to w_l*, rho short of w_l*, whatever a is; FedProx
comes to rest off the line unless a = 1. The paths are those of the training core: no loop of its own here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fldiag import models
from fldiag.config import build
from fldiag.data import Dataset
from fldiag.errors import FldiagError
from fldiag.local import Local
from fldiag.method import Method, Part
from fldiag.results.table import table
from fldiag.step import Step
from fldiag.training.server import Federation
from fldiag.training.setup import Setup

Point = Sequence[float] | np.ndarray
CURVATURES = (
    0.2,
    0.5,
    1.0,
    3.0,
)  # not reciprocal of each other: FedProx's mean would land on the line by symmetry
A_RANGE = (1e-6, 1e6)  # beyond it gradient descent takes millions of steps
CLOSEST = 1e-6  # w_g and w_l* nearer than this leave FedSOL's direction to rounding
CONVERGED = 1e-7  # at rest: ||gradient|| below this, in units of min(a, 1) D
MIN_STEPS, MAX_STEPS = 500, 20_000


def fedprox_end(w_g: Point, w_l: Point, a: float, beta: float) -> np.ndarray:
    """u = (a/(a + beta) d_x, 1/(1 + beta) d_y), [2]: the solution of A (w - w_l*) + beta (w - w_g) = 0.

    Parallel to d if and only if a = 1, beta = 0 or d lies on an axis.
    """
    w_g, w_l, (a,) = *_points(w_g, w_l), _curvatures((a,))
    beta = _number("beta", beta)
    curvature = np.array([a, 1.0])
    return w_g + curvature / (curvature + beta) * (w_l - w_g)


def fedsol_end(w_g: Point, w_l: Point, rho: float, eps: float = 0.0) -> np.ndarray:
    """w_g + s d/D, s + rho s/(s + eps) = D, [2]: A (w + rho u/(||u|| + eps) - w_l*) = 0; A drops out: u || d.

    Without guard (eps = 0) this is s = D - rho, which exists for rho < D only: raises FldiagError otherwise.
    With one, s = (b + sqrt(b^2 + 4 eps D))/2, b = D - rho - eps, exists for every rho.
    """
    w_g, w_l = _points(w_g, w_l)
    rho, eps = _number("rho", rho), _number("eps", eps)
    d = w_l - w_g
    distance = math.hypot(*d)
    if eps == 0 and rho >= distance:
        raise FldiagError(
            f"FedSOL has no equilibrium for rho = {rho:g} and w_l* only {distance:g} from w_g: "
            "it hovers around w_g",
            f"give rho below {distance:g}, or eps > 0",
            usage=True,
        )
    b = distance - rho - eps
    root = math.sqrt(b * b + 4 * eps * distance)
    s = (
        (b + root) / 2 if b > 0 else 2 * eps * distance / (root - b)
    )  # the same root, without cancellation
    return w_g + s / distance * d


def fedsol_unnormalised_end(w_g: Point, w_l: Point, rho: float) -> np.ndarray:
    """u = d/(1 + rho), [2]: the solution of A (w + rho u - w_l*) = 0, for the perturbation rho g_p."""
    w_g, w_l = _points(w_g, w_l)
    return w_g + (w_l - w_g) / (1 + _number("rho", rho))


def stability_bound(a: float, rho: float, radius: float) -> float:
    """Gradient descent on FedSOL's field is stable around its equilibrium for lr < 2/(max(a, 1) (1 + rho/s)).

    s = ``radius`` = ||u|| there. The Jacobian A (I + (rho/s)(I - dd^T/D^2)) has positive real eigenvalues,
    the largest at most max(a, 1)(1 + rho/s), and equal to it when d lies on the axis of smaller curvature.
    """
    (a,), rho, radius = _curvatures((a,)), _number("rho", rho), _number("radius", radius)
    if radius == 0:
        raise FldiagError(
            "radius = 0: FedSOL's field has no Jacobian at w_g", "give radius > 0", usage=True
        )
    return 2 / (max(a, 1.0) * (1 + rho / radius))


def geometry(
    rho: float = 1.5,
    beta: float = 1.0,
    a: Iterable[float] = CURVATURES,
    w_g: Point = (0.5, -0.4),
    w_l: Point = (3.0, 2.0),
) -> dict[str, Any]:
    """What a picture needs besides the table: plain numbers and lists, ``equilibrium`` None when D <= rho."""
    start, goal = _points(w_g, w_l)
    rho, beta, curvatures = _number("rho", rho), _number("beta", beta), _curvatures(a)
    distance = math.hypot(*(goal - start))
    rest = fedsol_end(start, goal, rho).tolist() if rho < distance else None
    return {
        "w_g": start.tolist(),
        "w_l": goal.tolist(),
        "a": curvatures,
        "rho": rho,
        "beta": beta,
        "distance": distance,
        "equilibrium": rest,
    }


class Recorder(Part):
    """Notes where each client is: w before every step and after the last, [steps + 1, P] by client id."""

    def __init__(self) -> None:
        self.paths: dict[int, Tensor] = {}
        self._cohort: list[Tensor] = []

    def begin(self, local: Local) -> None:
        self._cohort = []

    def correct(self, step: Step, g: Tensor) -> Tensor:
        self._cohort.append(step.w.clone())
        return g

    def finish(self, local: Local) -> dict[str, Tensor]:
        rows = torch.stack([*self._cohort, local.w], dim=1)
        self.paths.update(zip(local.ids, rows, strict=True))
        return {}


def clients(a: Sequence[float]) -> tuple[Dataset, list[np.ndarray]]:
    """Two examples a client, (sqrt(a), 1) and (-sqrt(a), 1) with target 0, and the partition.

    For weights (x, y) of a linear model without bias the mean of half the squared residuals is then
    1/2 (a x^2 + y^2): L_k in coordinates around w_l*, where storing targets in float32 costs no precision.
    """
    root = torch.tensor(a, dtype=torch.float64).sqrt().float()
    one = torch.ones_like(root)
    x = torch.stack([torch.stack([root, one], 1), torch.stack([-root, one], 1)], 1).flatten(0, 1)
    y = torch.zeros(len(x), 1)
    return Dataset("plane", x, y, x, y, 1), [np.array([2 * k, 2 * k + 1]) for k in range(len(a))]


def simulate(
    method: dict[str, Any], a: Sequence[float], w_g: Point, w_l: Point, *, lr: float, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """One round of the method (name and options, as in a config) from w_g: plain full-batch SGD in float64.

    Returns the clients' paths [len(a), steps + 1, 2] and the aggregate [2]. Raises FldiagError for wrong
    values and when the weights overflow because ``lr`` is too large.
    """
    start, goal = _points(w_g, w_l)
    curvatures, lr, steps = _curvatures(a), _positive("lr", lr), _count(steps)
    config = build(
        {
            "name": "plane",
            "rounds": 1,
            "method": method,
            "model": {"name": "mlp", "hidden": (), "bias": False},
            "partition": {"kind": "iid"},
            "clients": {"total": len(curvatures), "per_round": len(curvatures)},
            "train": {
                "epochs": steps,
                "batch_size": 2,
                "lr": lr,
                "lr_decay": 1.0,
                "momentum": 0.0,
                "weight_decay": 0.0,
                "aggregate": "uniform",
                "precision": "fp64",
            },
        }
    )
    dataset, parts = clients(curvatures)
    module = models.build("mlp", dataset.shape, dataset.classes, config.model.options).double()
    with torch.no_grad():
        next(module.parameters()).copy_(torch.from_numpy(start - goal))
    setup = Setup(config, dataset=dataset, parts=parts, module=module)
    recorder = Recorder()
    setup.method = Method(*setup.method, recorder)
    federation = Federation(setup)
    federation.round(partial(map, setup.train))
    paths = goal + torch.stack([recorder.paths[k] for k in range(len(curvatures))]).numpy()
    if not np.isfinite(paths).all():
        raise FldiagError(f"{method['name']} diverged with lr = {lr:g}", "lower lr", usage=True)
    return paths, goal + federation.w.numpy()


def run(
    rho: float = 1.5,
    beta: float = 1.0,
    a: Iterable[float] = CURVATURES,
    w_g: Point = (0.5, -0.4),
    w_l: Point = (3.0, 2.0),
    steps: int | None = None,
    lr: float | None = None,
) -> pd.DataFrame:
    """The toy as a table: FedSOL (L_p = l2, fixed strength, full model) and FedProx (mu = ``beta``).

    Unless given, ``lr`` is half of what is stable for every client (each method its own) and ``steps`` are
    enough to come to rest. Rows (with ``x``, ``y``, ``a``; the value is ||w - w_g|| unless said):

    - ``trajectory`` (``index`` = step), ``end_point`` (``residual`` = norm of the last gradient,
      ``converged``), ``closed_form``, for each client and method;
    - ``distance``: ||end point - closed form||; ``angle``: between end point - w_g and d, in degrees;
    - ``aggregate`` and ``aggregate_closed_form``, ``_distance``, ``_angle``: the same for the clients' mean
      (FedProx's leaves the line too, unless curvatures come in pairs a, 1/a: then a/(a + 1) is 1/2 in the mean);
    - ``hover_radius``: largest ||w - w_g|| in the last quarter of the steps, for FedSOL when rho >= D, in
      place of closed form, distance and angle: no equilibrium, ``converged`` is False, the client hovers.

    Raises FldiagError for a outside 1e-6..1e6, negative rho or beta, w_g at w_l* and steps beyond 20,000.
    """
    start, goal = _points(w_g, w_l)
    rho, beta, curvatures = _number("rho", rho), _number("beta", beta), _curvatures(a)
    distance = math.hypot(*(goal - start))
    rates = _rates(curvatures, rho, beta, distance)
    if lr is not None:
        rates = dict.fromkeys(rates, _positive("lr", lr))
    steps = _step_count(curvatures, rho, beta, distance, rates) if steps is None else _count(steps)
    methods: list[dict[str, Any]] = [
        {"name": "fedsol", "rho": rho, "loss": "l2", "strength": "fixed", "part": "full"},
        {"name": "fedprox", "mu": beta},
    ]
    rows: list[dict[str, Any]] = []
    for method in methods:
        exact: list[np.ndarray] | None = None
        rate = rates[method["name"]]
        if method["name"] == "fedprox":
            exact = [fedprox_end(start, goal, v, beta) for v in curvatures]
        elif rho < distance:
            exact = [fedsol_end(start, goal, rho)] * len(curvatures)
        paths, mean = simulate(method, curvatures, start, goal, lr=rate, steps=steps)
        common = {"method": method["name"], "round": 1}
        for k, (v, path) in enumerate(zip(curvatures, paths, strict=True)):
            rows += [
                {**row, **common, "moment": "trained", "scope": "client", "client": k, "a": v}
                for row in _client(path, start, goal, v, rate, None if exact is None else exact[k])
            ]
        common |= {"moment": "aggregated", "scope": "global"}
        rows.append({**_at("aggregate", mean, start), **common})
        rows += [
            {**row, **common, "metric": f"aggregate_{row['metric']}"}
            for row in _against(mean, start, goal, None if exact is None else np.mean(exact, 0))
        ]
    return table(rows)


def _client(
    path: np.ndarray,
    start: np.ndarray,
    goal: np.ndarray,
    a: float,
    lr: float,
    exact: np.ndarray | None,
) -> list[dict[str, Any]]:
    residual = math.hypot(*(path[-1] - path[-2])) / lr
    at_rest = residual <= CONVERGED * min(a, 1.0) * math.hypot(*(goal - start))
    rows = [{**_at("trajectory", w, start), "index": t} for t, w in enumerate(path)]
    rows.append(
        {
            **_at("end_point", path[-1], start),
            "index": len(path) - 1,
            "residual": residual,
            "converged": exact is not None and at_rest,
        }
    )
    if exact is None:
        tail = path[-max(1, len(path) // 4) :] - start
        return [
            *rows,
            {
                "metric": "hover_radius",
                "value": float(np.linalg.norm(tail, axis=1).max()),
                "estimator": "simulated",
                "converged": False,
            },
        ]
    return rows + _against(path[-1], start, goal, exact)


def _against(
    end: np.ndarray, start: np.ndarray, goal: np.ndarray, exact: np.ndarray | None
) -> list[dict[str, Any]]:
    """Closed form, distance from it and angle to the line; nothing where there is no equilibrium."""
    if exact is None:
        return []
    (ux, uy), (dx, dy) = end - start, goal - start
    angle = math.degrees(math.atan2(abs(dx * uy - dy * ux), dx * ux + dy * uy))
    return [
        _at("closed_form", exact, start, "exact"),
        {"metric": "distance", "value": math.hypot(*(end - exact)), "estimator": "simulated"},
        {"metric": "angle", "value": angle, "unit": "degrees", "estimator": "simulated"},
    ]


def _at(
    metric: str, w: np.ndarray, start: np.ndarray, estimator: str = "simulated"
) -> dict[str, Any]:
    return {
        "metric": metric,
        "x": float(w[0]),
        "y": float(w[1]),
        "value": math.hypot(*(w - start)),
        "estimator": estimator,
    }


def _rates(a: list[float], rho: float, beta: float, distance: float) -> dict[str, float]:
    """Half the bound of the steepest client; without equilibrium, as if it were at D/10 (small hovering)."""
    radius = distance - rho if rho < distance else distance / 10
    return {
        "fedsol": stability_bound(max(a), rho, radius) / 2,
        "fedprox": 1 / (max(*a, 1.0) + beta),
    }


def _step_count(
    a: list[float], rho: float, beta: float, distance: float, rates: dict[str, float]
) -> int:
    """Steps that shrink the flattest direction of either method by 1e-10; hovering needs none."""
    flattest = min(*a, 1.0)
    shrink = [rates["fedprox"] * (flattest + beta)] + (
        [rates["fedsol"] * flattest] if rho < distance else []
    )
    steps = max(
        MIN_STEPS, *(math.ceil(math.log(1e10) / -math.log1p(-min(share, 0.9))) for share in shrink)
    )
    if steps > MAX_STEPS:
        raise FldiagError(
            f"coming to rest takes {steps} steps (a in {min(a):g}..{max(a):g}, rho = {rho:g}, "
            f"D = {distance:g})",
            "give a nearer to 1, a lower rho, or steps",
            usage=True,
        )
    return steps


def _points(w_g: Point, w_l: Point) -> tuple[np.ndarray, np.ndarray]:
    pair = []
    for name, point in (("w_g", w_g), ("w_l", w_l)):
        try:
            value = np.asarray(point, dtype=np.float64)
        except (TypeError, ValueError):
            value = np.empty(0)
        if value.shape != (2,) or not np.isfinite(value).all():
            raise FldiagError(
                f"{name} = {point!r} is not a point", "give two finite numbers", usage=True
            )
        pair.append(value)
    start, goal = pair
    if math.hypot(*(goal - start)) < CLOSEST:
        raise FldiagError(
            f"w_g = {start.tolist()} and w_l = {goal.tolist()} coincide: no line joins them",
            f"give points at least {CLOSEST:g} apart",
            usage=True,
        )
    return start, goal


def _curvatures(a: Iterable[float]) -> list[float]:
    try:
        values = [float(v) for v in a]
    except (TypeError, ValueError):
        values = []
    low, high = A_RANGE
    if not values or not all(low <= v <= high for v in values):
        raise FldiagError(
            f"a = {a!r} are not curvatures", f"give numbers in {low:g}..{high:g}", usage=True
        )
    return values


def _number(name: str, value: float) -> float:
    if not isinstance(value, (int, float, np.number)) or not 0 <= value < math.inf:
        raise FldiagError(
            f"{name} = {value!r} is not valid", "give a finite number >= 0", usage=True
        )
    return float(value)


def _positive(name: str, value: float) -> float:
    if _number(name, value) == 0:
        raise FldiagError(f"{name} = 0 moves nothing", f"give {name} > 0", usage=True)
    return float(value)


def _count(steps: int) -> int:
    if isinstance(steps, bool) or not isinstance(steps, (int, np.integer)) or steps < 1:
        raise FldiagError(
            f"steps = {steps!r} is not valid", "give a whole number of at least 1", usage=True
        )
    return int(steps)
