"""Propositions 1 and 2 of Lee et al., "FedSOL" (CVPR 2024), as numbers: what one perturbed step does to both losses.

With g_u = grad L_l(w + e), e = rho g_p / ||g_p||, and a plain step w' = w - eta g_u (equations 11 and 12):

    1:  change of L_p = -eta (<g_l, g_p> + rho g_p' H_l g_p / ||g_p||) + O(eta^2) + eta O(rho^2)
    2:  change of L_l = -eta ||grad L_l(w + e / 2)||^2               + O(eta^2) + eta O(rho^2)

The two errors are measured apart: ``step`` compares the change with the exact first-order term -eta <g, g_u> and falls
as eta, relative to that term; ``perturbation`` compares <g, g_u> with the predicted bracket, relative to its value at
rho = 0, and falls as rho^2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fldiag.curvature.hvp import Hessian
from fldiag.errors import FldiagError
from fldiag.execution.workspace import workspace
from fldiag.losses import noise_floor, perturbation
from fldiag.models.network import Network
from fldiag.results.table import Row, table
from fldiag.runs import proximal
from fldiag.runs.history import History
from fldiag.runs.proximal import Losses, gradient, value

#: Predicted orders: the relative error falls as this power of eta, of rho.
ORDER_STEP, ORDER_PERTURBATION = 1.0, 2.0
TINY = torch.finfo(torch.float64).tiny


def check(
    losses: Losses, g_p: Tensor, w: Tensor, etas: Sequence[float], rhos: Sequence[float]
) -> list[Row]:
    """Rows for a client's losses at its weights w [P] in float64, where ``g_p`` is the gradient of the proximal one.

    ``proposition_1``, ``proposition_2`` (columns eta, rho; ``value`` the change of the loss, ``predicted``, ``residual``
    the absolute difference) and ``proposition_1_step_order``, ..., ``proposition_2_perturbation_order`` (the slope of
    log error over log eta or log rho; ``predicted`` 1 or 2; no value where the error is rounding noise throughout).
    Raises FldiagError when a value is not positive or g_p is zero.
    """
    if min([*etas, *rhos], default=0.0) <= 0:
        raise FldiagError(
            f"etas {list(etas)} and rhos {list(rhos)} of the propositions",
            "give positive numbers",
            usage=True,
        )
    size = float(torch.linalg.vector_norm(g_p))
    if size == 0:
        raise FldiagError(
            "the gradient of the proximal loss is zero here",
            "choose weights away from the received ones",
        )

    def local(v: Tensor) -> float:
        return value(losses.local(), v)

    def local_gradient(v: Tensor) -> Tensor:
        return gradient(losses.local(), v)[1]

    def proximal(v: Tensor) -> float:
        return value(losses.proximal(), v)

    unit = perturbation(g_p, 1.0, guard=0.0)
    terms, shares = zip(*losses.local(), strict=True)
    g_l, hessian = local_gradient(w), Hessian(terms, shares, w)(unit)
    limits = float(g_l @ g_p), float(g_l @ g_l)  # of <g_p, g_u> and <g_l, g_u> for rho to 0
    before = proximal(w), local(w)
    rows: list[Row] = []
    errors: dict[str, list[tuple[float, float]]] = {
        f"proposition_{i}_{kind}": [] for i in (1, 2) for kind in ("step", "perturbation")
    }
    for rho in rhos:
        g_u = local_gradient(w + rho * unit)
        half = local_gradient(w + 0.5 * rho * unit)
        exact = float(g_p @ g_u), float(g_l @ g_u)
        predicted = float(g_l @ g_p + rho * (unit @ hessian) * size), float(half @ half)
        for i in (1, 2):
            error = abs(exact[i - 1] - predicted[i - 1]) / max(abs(limits[i - 1]), TINY)
            errors[f"proposition_{i}_perturbation"].append((rho, error))
        for eta in etas:
            after = proximal(w - eta * g_u), local(w - eta * g_u)
            for i, (a, b, p, e) in enumerate(
                zip(after, before, predicted, exact, strict=True), start=1
            ):
                change = a - b
                rows.append(
                    {
                        "metric": f"proposition_{i}",
                        "eta": eta,
                        "rho": rho,
                        "value": change,
                        "predicted": -eta * p,
                        "residual": abs(change + eta * p),
                    }
                )
                if rho == rhos[0]:
                    errors[f"proposition_{i}_step"].append(
                        (eta, abs(change + eta * e) / max(abs(eta * e), TINY))
                    )
    for name, points in errors.items():
        order = ORDER_STEP if name.endswith("step") else ORDER_PERTURBATION
        rows.append({"metric": f"{name}_order", "value": slope(points), "predicted": order})
    return rows


def slope(points: Sequence[tuple[float, float]], noise: float = 1e-11) -> float | None:
    """The slope of a power law error ~ size^slope through (size, error), least squares on logarithms; None with fewer than two
    errors above rounding noise."""
    significant = [(size, error) for size, error in points if error > noise]
    if len({size for size, _ in significant}) < 2:
        return None
    x, y = np.log([k[0] for k in significant]), np.log([k[1] for k in significant])
    return float(np.polyfit(x, y, 1)[0])


ETAS, RHOS = (1e-4, 1e-3, 1e-2), (3e-3, 1e-2, 3e-2)


def of_history(history: History, round: int) -> pd.DataFrame:
    """What ``check`` says of every client of a round, with the KL loss at temperature 3."""
    rows, unmoved = propositions(history, round, {"kind": "kl", "tau": 3.0})
    for client in unmoved:
        history.note(round, f"client {client} did not move: no propositions", client)
    rows = [{"masked": row["value"] is None, "estimator": "exact", **row} for row in rows]
    return table([*rows, *history.notes], **history.common)


def propositions(history: History, round: int, loss: dict[str, Any]) -> tuple[list[Row], list[int]]:
    """Propositions 1 and 2 at every client's trained weights, in float64, and the clients that did not move."""
    cohort = history.stored(round).finite()
    network = Network(history.network.module)
    network.module.double()
    pool = history.pool.to(torch.float64)
    rows: list[Row] = []
    unmoved: list[int] = []

    def double(buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: b.double() if b.is_floating_point() else b for n, b in buffers.items()}

    start = cohort.start[0].double(), double(cohort.start[1])
    for j, k in enumerate(cohort.ids):
        workspace().show(j, len(cohort.ids), f"client {k}")
        examples, (w, buffers) = pool.train_slice(k), cohort.client(j)
        if examples.stop <= examples.start:
            continue
        w = w.double()
        losses = Losses(
            network, pool, double(buffers), start, proximal.batches(examples, None)[0], **loss
        )
        g_p = proximal.gradient(losses.proximal(), w)[1]
        if float(torch.linalg.vector_norm(g_p)) < noise_floor(torch.float64):
            unmoved.append(k)
            continue
        checks = check(losses, g_p, w, ETAS, RHOS)
        rows += [
            {
                "round": round,
                "moment": "trained",
                "scope": "client",
                "client": k,
                "slice": f"client:{k}/train",
                "n_examples": examples.stop - examples.start,
                **row,
            }
            for row in checks
        ]
    return rows, unmoved
