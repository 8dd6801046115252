"""FedSOL against FedProx in the plane (Lee et al., "FedSOL", CVPR 2024, appendix H, figure 12).

Client k has the loss L_k(w) = 1/2 [a_k (x - x*)^2 + (y - y*)^2] around w_l* = (x*, y*), and every client
starts from w_g. Below A = diag(a, 1), d = w_l* - w_g, D = ||d||, u = w - w_g, and the proximal loss is
||u||^2 / 2. FedSOL comes to rest on the line from w_g to w_l*, rho short of w_l*, whatever a is; FedProx
comes to rest off the line unless a = 1. The paths are those of the training core: no loop of its own here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from fldiag.results.table import Row, table
from fldiag.step import Step
from fldiag.training.server import Federation
from fldiag.training.setup import Setup

#: Not reciprocal of each other: FedProx's mean would land on the line by symmetry.
CURVATURES = (0.2, 0.5, 1.0, 3.0)
A_RANGE = (1e-6, 1e6)  # beyond it gradient descent takes millions of steps
W_G, W_L = np.array([0.5, -0.4]), np.array([3.0, 2.0])
D = math.hypot(*(W_L - W_G))
CONVERGED = 1e-7  # at rest: ||gradient|| below this, in units of min(a, 1) D
MIN_STEPS, MAX_STEPS = 500, 20_000


def fedprox_end(w_g: np.ndarray, w_l: np.ndarray, a: float, beta: float) -> np.ndarray:
    """u = (a/(a + beta) d_x, 1/(1 + beta) d_y), [2]: the solution of A (w - w_l*) + beta (w - w_g) = 0.

    Parallel to d if and only if a = 1, beta = 0 or d lies on an axis.
    """
    curvature = np.array([a, 1.0])
    return w_g + curvature / (curvature + beta) * (w_l - w_g)


def fedsol_end(w_g: np.ndarray, w_l: np.ndarray, rho: float) -> np.ndarray:
    """w_g + (D - rho) d/D, [2]: A (w + rho u/||u|| - w_l*) = 0, in which A drops out. It exists for rho < D only."""
    distance = math.hypot(*(w_l - w_g))
    return w_g + (distance - rho) / distance * (w_l - w_g)


def stability_bound(a: float, rho: float, radius: float) -> float:
    """Gradient descent on FedSOL's field is stable around its equilibrium for lr < 2/(max(a, 1) (1 + rho/s)).

    s = ``radius`` = ||u|| there. The Jacobian A (I + (rho/s)(I - dd^T/D^2)) has positive real eigenvalues,
    the largest at most max(a, 1)(1 + rho/s), and equal to it when d lies on the axis of smaller curvature.
    """
    return 2 / (max(a, 1.0) * (1 + rho / radius))


def geometry(
    rho: float = 1.5, beta: float = 1.0, a: Sequence[float] = CURVATURES
) -> dict[str, Any]:
    """What a picture needs besides the table; ``equilibrium`` is None for rho >= D."""
    return {
        "w_g": W_G.tolist(),
        "w_l": W_L.tolist(),
        "a": list(a),
        "rho": rho,
        "beta": beta,
        "distance": D,
        "equilibrium": fedsol_end(W_G, W_L, rho).tolist() if rho < D else None,
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
    method: dict[str, Any],
    a: Sequence[float],
    *,
    lr: float,
    steps: int,
    w_g: np.ndarray = W_G,
    w_l: np.ndarray = W_L,
) -> tuple[np.ndarray, np.ndarray]:
    """One round of the method (name and options, as in a config) from w_g: plain full-batch SGD in float64.

    Returns the clients' paths [len(a), steps + 1, 2] and the aggregate [2]. Raises FldiagError when the weights
    overflow."""
    config = build(
        {
            "name": "plane",
            "rounds": 1,
            "method": method,
            "model": {"name": "mlp", "hidden": (), "bias": False},
            "partition": {"kind": "iid"},
            "clients": {"total": len(a), "per_round": len(a)},
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
    dataset, parts = clients(a)
    module = models.build("mlp", dataset.shape, dataset.classes, config.model.options).double()
    with torch.no_grad():
        next(module.parameters()).copy_(torch.from_numpy(w_g - w_l))
    setup = Setup(config, dataset=dataset, parts=parts, module=module)
    recorder = Recorder()
    setup.method = Method(*setup.method, recorder)
    federation = Federation(setup)
    federation.round(partial(map, setup.train))
    paths = w_l + torch.stack([recorder.paths[k] for k in range(len(a))]).numpy()
    if not np.isfinite(paths).all():
        raise FldiagError(f"{method['name']} diverged with lr = {lr:g}", "lower lr", usage=True)
    return paths, w_l + federation.w.numpy()


def run(rho: float = 1.5, beta: float = 1.0, a: Sequence[float] = CURVATURES) -> pd.DataFrame:
    """The toy as a table: FedSOL (L_p = l2, fixed strength, full model) and FedProx (mu = ``beta``).

    The learning rate is half of what is stable for every client (each method its own), and the steps are
    enough to come to rest. Rows (with ``x``, ``y``, ``a``; the value is ||w - w_g|| unless said):

    - ``trajectory`` (``index`` = step), ``end_point`` (``residual`` = norm of the last gradient,
      ``converged``), ``closed_form``, for each client and method;
    - ``distance``: ||end point - closed form||; ``angle``: between end point - w_g and d, in degrees;
    - ``aggregate`` and ``aggregate_closed_form``, ``_distance``, ``_angle``: the same for the clients' mean
      (FedProx's leaves the line too, unless curvatures come in pairs a, 1/a: then a/(a + 1) is 1/2 in the mean);
    - ``hover_radius``: largest ||w - w_g|| in the last quarter of the steps, for FedSOL when rho >= D, in
      place of closed form, distance and angle: no equilibrium, ``converged`` is False, the client hovers.

    Raises FldiagError for a outside 1e-6..1e6, negative rho or beta, and steps beyond 20,000.
    """
    for name, value in (("rho", rho), ("beta", beta)):
        if not 0 <= value < math.inf:
            raise FldiagError(
                f"{name} = {value!r} is not valid", "give a finite number >= 0", usage=True
            )
    low, high = A_RANGE
    if not a or not all(low <= value <= high for value in a):
        raise FldiagError(
            f"a = {a!r} are not curvatures", f"give numbers in {low:g}..{high:g}", usage=True
        )
    # Half the bound of the steepest client; without equilibrium, as if it were at D/10 (small hovering).
    rates = {
        "fedsol": stability_bound(max(a), rho, D - rho if rho < D else D / 10) / 2,
        "fedprox": 1 / (max(*a, 1.0) + beta),
    }
    ends = {
        "fedsol": [fedsol_end(W_G, W_L, rho)] * len(a) if rho < D else None,
        "fedprox": [fedprox_end(W_G, W_L, value, beta) for value in a],
    }
    options: dict[str, Row] = {
        "fedsol": {"rho": rho, "loss": "l2", "strength": "fixed", "part": "full"},
        "fedprox": {"mu": beta},
    }
    steps = _step_count(a, rho, beta, rates)
    rows: list[Row] = []
    for method in rates:
        exact, rate = ends[method], rates[method]
        paths, mean = simulate({"name": method, **options[method]}, a, lr=rate, steps=steps)
        common = {"method": method, "round": 1}
        for k, path in enumerate(paths):
            client = {**common, "moment": "trained", "scope": "client", "client": k, "a": a[k]}
            end = None if exact is None else exact[k]
            rows += [{**row, **client} for row in _client(path, a[k], rate, end)]
        common |= {"moment": "aggregated", "scope": "global"}
        rows.append({**_at("aggregate", mean), **common})
        if exact is not None:
            rows += [
                {**row, **common, "metric": f"aggregate_{row['metric']}"}
                for row in _against(mean, np.mean(exact, 0))
            ]
    return table(rows)


def _client(path: np.ndarray, a: float, lr: float, exact: np.ndarray | None) -> list[Row]:
    residual = math.hypot(*(path[-1] - path[-2])) / lr
    rows = [{**_at("trajectory", w), "index": t} for t, w in enumerate(path)]
    rows.append(
        {
            **_at("end_point", path[-1]),
            "index": len(path) - 1,
            "residual": residual,
            "converged": exact is not None and residual <= CONVERGED * min(a, 1.0) * D,
        }
    )
    if exact is not None:
        return rows + _against(path[-1], exact)
    tail = path[-max(1, len(path) // 4) :] - W_G
    hover = {
        "metric": "hover_radius",
        "value": float(np.linalg.norm(tail, axis=1).max()),
        "estimator": "simulated",
        "converged": False,
    }
    return [*rows, hover]


def _against(end: np.ndarray, exact: np.ndarray) -> list[Row]:
    """Closed form, distance from it and angle to the line."""
    (ux, uy), (dx, dy) = end - W_G, W_L - W_G
    angle = math.degrees(math.atan2(abs(dx * uy - dy * ux), dx * ux + dy * uy))
    return [
        _at("closed_form", exact, "exact"),
        {"metric": "distance", "value": math.hypot(*(end - exact)), "estimator": "simulated"},
        {"metric": "angle", "value": angle, "unit": "degrees", "estimator": "simulated"},
    ]


def _at(metric: str, w: np.ndarray, estimator: str = "simulated") -> Row:
    return {
        "metric": metric,
        "x": float(w[0]),
        "y": float(w[1]),
        "value": math.hypot(*(w - W_G)),
        "estimator": estimator,
    }


def _step_count(a: Sequence[float], rho: float, beta: float, rates: dict[str, float]) -> int:
    """Steps that shrink the flattest direction of either method by 1e-10; hovering needs none."""
    flattest = min(*a, 1.0)
    shrink = [rates["fedprox"] * (flattest + beta)]
    if rho < D:
        shrink.append(rates["fedsol"] * flattest)
    steps = max(
        MIN_STEPS, *(math.ceil(math.log(1e10) / -math.log1p(-min(share, 0.9))) for share in shrink)
    )
    if steps > MAX_STEPS:
        raise FldiagError(
            f"coming to rest takes {steps} steps (a in {min(a):g}..{max(a):g}, rho = {rho:g}, D = {D:g})",
            "give a nearer to 1 or a lower rho",
            usage=True,
        )
    return steps
