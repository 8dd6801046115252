"""The change of the loss along an update's straight path: what no Taylor polynomial at its start leaves out.

L(w + d) - L(w) is the integral of grad L(w + t d)'d over t from 0 to 1, by Gauss-Legendre points: the 7-point rule inside its
15-point Kronrod extension (Kronrod 1965), whose difference is the error; the stretch with the largest is halved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from fldiag.problem.problem import Problem
from fldiag.results.table import Row

#: The rest that is good enough, as a share of the change.
SHARE = 0.05
#: Of Kronrod's rule on [-1, 1], from the end to the middle: nodes, weights, and Gauss's weights of every other node.
_NODES = (
    0.991455371120812639206854697526329,
    0.949107912342758524526189684047851,
    0.864864423359769072789712788640926,
    0.741531185599394439863864773280788,
    0.586087235467691130294144691693013,
    0.405845151377397166906606412076961,
    0.207784955007898467600689403773245,
    0.0,
)
_KRONROD = (
    0.022935322010529224963732008058970,
    0.063092092629978553290700663189204,
    0.104790010322250183839876322541518,
    0.140653259715525918745189590510238,
    0.169004726639267902826583426598550,
    0.190350578064785409913256402421014,
    0.204432940075298892414161999234649,
    0.209482141084727828012999174891714,
)
_GAUSS = (
    0.129484966168869693270611432679082,
    0.279705391489276667901467771423780,
    0.381830050505118944950369775488975,
    0.417959183673469387755102040816327,
)
T = np.array([*(-v for v in _NODES), *_NODES[-2::-1]])
K = np.array([*_KRONROD, *_KRONROD[-2::-1]])
G = np.zeros(15)
G[1::2] = [*_GAUSS, *_GAUSS[-2::-1]]


def integral(
    f: Callable[[float], np.ndarray], points: int, done: Callable[[np.ndarray, np.ndarray], bool]
) -> tuple[np.ndarray, np.ndarray]:
    """The integral of f [m] from 0 to 1 and its error [m], with at most so many ``points`` (but 15 at least).

    ``done``: whether (integral, error) is good enough.
    """

    def panel(a: float, b: float) -> tuple[np.ndarray, np.ndarray, float, float]:
        values = np.stack([f((a + b) / 2 + t * (b - a) / 2) for t in T]) * (b - a) / 2
        return K @ values, np.abs((K - G) @ values), a, b

    panels, evaluations = [panel(0.0, 1.0)], len(T)
    while True:
        total, error = (
            np.sum([p[0] for p in panels], axis=0),
            np.sum([p[1] for p in panels], axis=0),
        )
        if done(total, error) or evaluations + 2 * len(T) > points:
            return total, error
        worst = max(range(len(panels)), key=lambda i: panels[i][1][0])
        _, _, a, b = panels.pop(worst)
        panels += [panel(a, (a + b) / 2), panel((a + b) / 2, b)]
        evaluations += 2 * len(T)


def along_path(
    problem: Problem,
    d: Tensor,
    change: float,
    buffers: float,
    pairs: Any,
    layers: bool,
    points: int,
) -> list[Row]:
    """The change by the straight path of the update d [P]: whole, along the eigenvectors of ``pairs`` (None: not), by layer.

    ``change``: of the loss by the weights alone, evaluated; ``buffers``: what the change of the buffers adds to it.
    """
    slices = problem.layout.slices()
    groups = (
        [[slices[n] for n in names] for names in problem.layout.layers.values()] if layers else []
    )
    vectors = [] if pairs is None else [v.double() for v in pairs.vectors]

    def slopes(t: float) -> np.ndarray:
        g = problem.gradient(problem.w.double() + t * d)
        each = g * d
        along = [float(g @ v) * float(v @ d) for v in vectors]
        return np.array(
            [
                float(each.sum()),
                *along,
                *(sum(float(each[s].sum()) for s in group) for group in groups),
            ]
        )

    size = SHARE * abs(change + buffers)

    def done(total: np.ndarray, error: np.ndarray) -> bool:
        return bool(abs(change - total[0]) <= size and error[0] <= size)

    total, error = integral(slopes, points, done)
    common = {"estimator": "path", "converged": done(total, error)}
    rows: list[Row] = [
        {**common, "metric": "path", "value": total[0], "residual": error[0]},
        {**common, "metric": "rest", "value": change - total[0]},
    ]
    if buffers:
        rows.append({**common, "metric": "buffers", "value": buffers})
    k = len(vectors)
    for i in range(k):
        rows.append(
            {
                **common,
                "metric": "path",
                "index": i + 1,
                "value": total[1 + i],
                "residual": error[1 + i],
            }
        )
    if k:
        rows.append(
            {
                **common,
                "metric": "path",
                "index": 0,
                "value": total[0] - total[1 : k + 1].sum(),
                "residual": error[: k + 1].sum(),
            }
        )
    for (layer, names), value, e in zip(
        problem.layout.layers.items(), total[1 + k :], error[1 + k :], strict=False
    ):
        rows.append(
            {**common, "metric": "path", "layer": layer or names[0], "value": value, "residual": e}
        )
    return rows
