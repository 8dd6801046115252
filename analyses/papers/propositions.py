"""Propositions 1 and 2 of FedSOL as numbers: what one perturbed step does to the proximal loss L_p and to the local loss L_l.

With g_u = grad L_l(w + e), e = rho g_p / ||g_p||, and a plain step w' = w - eta g_u (equations 11 and 12):

    1:  change of L_p = -eta (<g_l, g_p> + rho g_p' H_l g_p / ||g_p||) + O(eta^2) + eta O(rho^2)
    2:  change of L_l = -eta ||grad L_l(w + e / 2)||^2               + O(eta^2) + eta O(rho^2)

The two errors are measured apart: ``step`` compares the change with the exact first-order term -eta <g, g_u> and falls as eta,
relative to that term; ``perturbation`` compares <g, g_u> with the predicted bracket, relative to its value at rho = 0, and falls
as rho^2.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import vector_to_parameters

import fldiag
from fldiag.training.setup import Setup

ETAS, RHOS, TAU = np.array([1e-4, 1e-3, 1e-2]), np.array([3e-3, 1e-2, 3e-2]), 3.0
#: Errors below are rounding.
NOISE = 1e-11


def propositions(run: fldiag.Run) -> pd.DataFrame:
    """``proposition_1_step_order`` and the like at every client's trained weights after the last round: the exponent with which
    the error falls, predicted 1 for the step and 2 for the perturbation; none where the error is rounding."""
    checkpoint: Any = run.checkpoint()
    setup = Setup(run.config)
    module, rows = setup.module.double().eval(), []
    vector_to_parameters(checkpoint.received.double(), module.parameters())
    for k, w in zip(checkpoint.client_ids, checkpoint.clients, strict=True):
        index = torch.as_tensor(setup.parts[k])
        x, y = setup.dataset.batch(index).double(), setup.dataset.train_y[index]
        local = fldiag.Problem(module, F.cross_entropy, (x, y), params=w, dtype=torch.float64)
        teacher = module(x).detach()
        proximal = fldiag.Problem(module, _kl, (x, teacher), params=w, dtype=torch.float64)
        for name, order in _orders(local, proximal).items():
            rows.append({"client": k, "metric": name, "value": order})
    return pd.DataFrame(rows).assign(round=checkpoint.round)


def _kl(outputs: Tensor, teacher: Tensor) -> Tensor:
    p, q = F.log_softmax(teacher / TAU, -1), F.log_softmax(outputs / TAU, -1)
    return (p.exp() * (p - q)).sum(-1).mean()


def _orders(local: fldiag.Problem, proximal: fldiag.Problem) -> dict[str, float]:
    """The order of each error by its name."""
    w, g_l, g_p = local.w, local.gradient(), proximal.gradient()
    unit = g_p / g_p.norm()
    bend = unit @ local.hvp(unit) * g_p.norm()
    steps, perturbations = [], []  # of both propositions
    for rho in RHOS:
        g_u, half = local.gradient(w + rho * unit), local.gradient(w + rho / 2 * unit)
        pairs = (
            (g_p @ g_u, g_l @ g_p + rho * bend, g_l @ g_p),
            (g_l @ g_u, half @ half, g_l @ g_l),
        )
        perturbations.append([float(abs((exact - said) / at_0)) for exact, said, at_0 in pairs])
    g_u = local.gradient(w + RHOS[0] * unit)
    for eta in ETAS:
        changes = [p.loss(w - eta * g_u)[0] - p.loss()[0] for p in (proximal, local)]
        terms = [float(eta * g @ g_u) for g in (g_p, g_l)]
        steps.append([abs((c + t) / t) for c, t in zip(changes, terms, strict=True)])
    return {
        f"proposition_{i + 1}_{kind}_order": _slope(sizes, np.array(errors)[:, i])
        for i in (0, 1)
        for kind, sizes, errors in (("step", ETAS, steps), ("perturbation", RHOS, perturbations))
    }


def _slope(sizes: np.ndarray, errors: np.ndarray) -> float:
    """The exponent of a power law error ~ size^exponent, by least squares on logarithms."""
    real = errors > NOISE
    if real.sum() < 2:
        return np.nan
    return float(np.polyfit(np.log(sizes[real]), np.log(errors[real]), 1)[0])
