"""FedSOL against FedProx in the plane (Lee et al., "FedSOL", CVPR 2024, appendix H, figure 12).

Client k has the loss L_k(w) = 1/2 [a_k (x - x*)^2 + (y - y*)^2] around w_l* = (x*, y*), and every client starts from w_g.
Below, d = w_l* - w_g, D = ||d|| and u = w - w_g; the proximal loss is ||u||^2 / 2. FedSOL comes to rest on the line from w_g
to w_l*, rho before w_l*, whatever a is. FedProx comes to rest off the line unless a = 1. fldiag trains both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Ellipse
from torch import Tensor, nn

import fldiag
from fldiag.data import Dataset
from fldiag.plotting import style
from fldiag.training.setup import Setup

Row = dict[str, Any]
CURVATURES = (0.2, 0.5, 1.0, 3.0)
W_G: Any = np.array([0.5, -0.4])
W_L: Any = np.array([3.0, 2.0])
D = math.hypot(*(W_L - W_G))
MIN_STEPS, MAX_STEPS = 500, 20_000


def fedprox_end(a: float, beta: float) -> np.ndarray:
    """u = (a/(a + beta) d_x, 1/(1 + beta) d_y): the solution of diag(a, 1) (w - w_l*) + beta (w - w_g) = 0, [2]."""
    curvature = np.array([a, 1.0])
    return W_G + curvature / (curvature + beta) * (W_L - W_G)


def fedsol_end(rho: float) -> np.ndarray:
    """w_g + (D - rho) d/D, [2]: diag(a, 1) (w + rho u/||u|| - w_l*) = 0, for every a. It exists for rho < D only."""
    return W_G + (D - rho) / D * (W_L - W_G)


class Recorder(fldiag.Part):
    """Notes w before every step: for each stack of clients a list of [k, P]."""

    def __init__(self) -> None:
        self.stacks: dict[tuple[int, ...], list[Tensor]] = {}

    def correct(self, step: Any, g: Tensor) -> Tensor:
        self.stacks.setdefault(tuple(step.local.ids), []).append(step.w.clone())
        return g


def simulate(method: Row, a: Sequence[float], lr: float, steps: int) -> np.ndarray:
    """The clients' paths in one round from w_g by full-batch gradient descent in float64, [len(a), steps + 1, 2].

    A client has two examples, (sqrt(a), 1) and (-sqrt(a), 1), with target 0. For the weights (x, y) of a linear model the mean
    of half the squared residuals is then 1/2 (a x^2 + y^2), which is L_k in coordinates around w_l*.
    """
    config = fldiag.Config(
        rounds=1,
        method=method,
        clients={"total": len(a), "per_round": len(a)},
        train={
            "epochs": steps + 1,  # the recorder sees w before a step
            "batch_size": 2,
            "lr": lr,
            "momentum": 0.0,
            "weight_decay": 0.0,
            "precision": "fp64",
        },
    )
    x = torch.tensor([[sign * value**0.5, 1.0] for value in a for sign in (1, -1)])
    y = torch.zeros(len(x), 1)
    parts = list(np.arange(len(x)).reshape(-1, 2))
    module = nn.Linear(2, 1, bias=False, device="meta")  # draws no random numbers
    module.weight = nn.Parameter(torch.from_numpy(W_G - W_L)[None])
    data = Dataset("plane", x, y, x, y, 1)
    setup = Setup(config, device="cpu", dataset=data, parts=parts, module=module)
    recorder = Recorder()
    setup.method = fldiag.Method(*setup.method, recorder)
    with TemporaryDirectory() as folder:
        fldiag.train(config, out=Path(folder, "run"), setup=setup)
    return W_L + torch.cat([torch.stack(w, 1) for w in recorder.stacks.values()]).numpy()


def run(
    rho: float = 1.5,
    beta: float = 1.0,
    a: Sequence[float] = CURVATURES,
    track: Callable[[list[Any]], Iterable[Any]] = list,
) -> pd.DataFrame:
    """The toy as a table: FedSOL (L_p = l2, fixed strength, full model) and FedProx (mu = ``beta``).

    The learning rate is half of what is stable for every client, and the steps are enough to come to rest. Rows, with ``x``,
    ``y`` and the client's ``a``; the value is ||w - w_g|| unless said:

    - ``trajectory`` (``index`` = step), ``end_point`` and ``closed_form``, for each client and method;
    - ``distance``: ||end point - closed form||; ``angle``: between end point - w_g and d, in degrees;
    - ``hover_radius``, for FedSOL with rho >= D, which has no equilibrium: largest ||w - w_g|| in the last quarter of the steps,
      in place of closed form, distance and angle.

    Raises FldiagError for more than 20,000 steps.
    """
    # FedSOL is stable around its equilibrium for lr < 2/(max(a, 1) (1 + rho/||u||)): the Jacobian is
    # diag(a, 1) (I + (rho/||u||)(I - dd^T/D^2)). Without equilibrium, as if it were at D/10.
    steepest, flattest = max(*a, 1.0), min(*a, 1.0)
    sol_lr = 1 / (steepest * (1 + rho / (D - rho if rho < D else D / 10)))
    prox_lr = 1 / (steepest + beta)
    # Steps that shrink the flattest direction of either method by 1e-10; hovering needs none.
    share = max(1e-9, min(prox_lr * (flattest + beta), sol_lr * flattest if rho < D else 1, 0.9))
    steps = max(MIN_STEPS, math.ceil(math.log(1e10) / -math.log1p(-share)))
    if steps > MAX_STEPS:
        what = f"coming to rest takes {steps} steps"
        raise fldiag.FldiagError(what, "give a nearer to 1, or a lower rho", usage=True)
    fedsol: Row = {"name": "fedsol", "rho": rho, "loss": "l2", "strength": "fixed", "part": "full"}
    fedprox: Row = {"name": "fedprox", "mu": beta}
    sol_ends = [fedsol_end(rho) if rho < D else None] * len(a)
    prox_ends = [fedprox_end(value, beta) for value in a]
    rows: list[Row] = []
    jobs = [(fedsol, sol_lr, sol_ends), (fedprox, prox_lr, prox_ends)]
    for method, lr, ends in track(jobs):
        paths = simulate(method, a, lr, steps)
        for k, (path, end) in enumerate(zip(paths, ends, strict=True)):
            client = {"method": method["name"], "client": k, "a": a[k]}
            rows += [_at("trajectory", w, index=t, **client) for t, w in enumerate(path)]
            rows.append(_at("end_point", path[-1], index=steps, **client))
            if end is None:
                farthest = max(path[-(len(path) // 4) :], key=lambda w: math.dist(w, W_G))
                rows.append(_at("hover_radius", farthest, **client))
                continue
            rows.append(_at("closed_form", end, estimator="exact", **client))
            rows.append({"metric": "distance", "value": math.dist(path[-1], end), **client})
            u, d = path[-1] - W_G, W_L - W_G
            angle = math.degrees(math.atan2(abs(np.linalg.det([d, u])), d @ u))
            rows.append({"metric": "angle", "value": angle, "unit": "degrees", **client})
    table = pd.DataFrame(rows).convert_dtypes()
    table["estimator"] = table["estimator"].fillna("simulated")
    return table.assign(round=1, moment="trained", scope="client")


def _at(metric: str, w: np.ndarray, **labels: Any) -> Row:
    return {"metric": metric, "x": w[0], "y": w[1], "value": math.dist(w, W_G), **labels}


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """All numbers but the trajectories."""
    return table.loc[table["metric"] != "trajectory", ["method", "a", "metric", "x", "y", "value"]]


# ---- the picture
LINE: dict[str, Any] = {"color": "#777777", "linewidth": 0.8, "dashes": (5, 3)}
CROSS: dict[str, Any] = {"linestyle": "none", "color": "k", "marker": "x", "markeredgewidth": 0.8}
REACH = 0.8  # longer half axis of a client's contour


def draw(table: pd.DataFrame) -> Figure:
    """One panel a method: the clients' loss contours, their trajectories, end points and closed forms."""
    curvatures = [float(a) for a in table["a"].dropna().unique()]
    # Later markers are smaller: those that share a place still show.
    rings: list[dict[str, Any]] = [
        {"marker": style.look(i).marker, "markersize": max(14 - 2.5 * i, 4), "linestyle": "none"}
        for i in range(len(curvatures))
    ]
    with style.paper():
        fig, axes = style.panels(2, 3.7, sharex=True, sharey=True)
        for ax, method in zip(axes, table["method"].dropna().unique(), strict=True):
            ax.plot(*np.stack([W_G, W_L]).T, **LINE)
            color = style.looks([method])[method].color
            for a, ring in zip(curvatures, rings, strict=True):
                _contour(ax, a)
                looks: dict[str, dict[str, Any]] = {
                    "trajectory": {"linewidth": 0.9, "alpha": 0.75},
                    "end_point": {**ring, "markerfacecolor": "none"},
                    "closed_form": {**CROSS, "markersize": 3.2, "zorder": 3},
                }
                for metric, look in looks.items():
                    is_here = (table["method"] == method) & (table["a"] == a)
                    places = table[is_here & (table["metric"] == metric)]
                    ax.plot(places["x"], places["y"], **{"color": color, **look})
            # Each name stands beyond its end of the line, away from the paths between the two.
            for point, name, sign in ((W_G, "$w_g$", -1), (W_L, "$w_l^*$", 1)):
                ax.plot(*point, "k*", markersize=11, markeredgecolor="white", zorder=3)
                shift = sign * 11 * (W_L - W_G) / D
                place = {"xytext": shift, "textcoords": "offset points", "fontsize": 9}
                ax.annotate(name, point, ha="center", va="center", **place)
            ax.margins(0.15)
            ax.set(title=style.display_name(method), xlabel="x", ylabel="y", aspect="equal")
        hollow = {"color": "k", "markerfacecolor": "none", "markersize": 6}
        handles = [Line2D([], [], **{**ring, **hollow}) for ring in rings]
        handles += [Line2D([], [], **LINE), Line2D([], [], **CROSS)]
        texts = [f"client with a = {a:g}" for a in curvatures]
        style.legend(fig, handles, [*texts, "line to the optimum", "closed form"], ncols=3)
    return fig


def _contour(ax: Axes, a: float) -> None:
    """A level line of the client's loss, with its curvature where the line is alone."""
    half = REACH * np.minimum([a**-0.5, a**0.5], 1)
    ax.add_patch(Ellipse(W_L, *2 * half, fill=False, edgecolor="#9a9a9a", linewidth=0.7))
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}
    place = W_L - half * (a > 1, a <= 1)
    ax.annotate(f"$a$ = {a:g}", place, ha="center", va="center", fontsize=6, bbox=box)
