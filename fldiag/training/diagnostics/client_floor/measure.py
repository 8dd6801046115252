"""Training the clients to their optima, and the swing of the stored global weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from fldiag.checkpoint.run import Run
from fldiag.losses import noise_floor
from fldiag.method import Personal
from fldiag.registry import Progress
from fldiag.results.kept_units import KeptUnits
from fldiag.results.table import Row
from fldiag.rounds import proximal
from fldiag.rounds.history import History
from fldiag.rounds.pool import Weights
from fldiag.training.finetune import Models, tuned
from fldiag.training.setup import Setup
from fldiag.training.setup_of_run import weights


def of_run(run: Run, setup: Setup, epochs: Sequence[int], fall: float, lr: str, seed: int, executor: Any,
           progress: Progress | None, kept: KeptUnits | None = None) -> list[Row]:
    """Rows of every client after every number of epochs, its floor, and the mean of these."""
    view = History(setup.module, setup.dataset, setup.parts, {}, device=setup.device, dtype=setup.dtype)
    start = weights(run, setup)
    before = {k: _gradient(view, start, k) for k in range(len(setup.parts)) if len(setup.parts[k])}
    floor = noise_floor(setup.dtype)
    common: Row = {"round": run.done, "moment": "trained", "scope": "client", "estimator": "trained", "masked": False}
    rows: list[Row] = []
    for k in range(len(setup.parts)):
        why = "it has no examples" if k not in before else "its gradient is rounding noise" if before[k] < floor else None
        if why or not np.isfinite(before[k]):
            rows.append({**common, "client": k, "metric": "client_floor", "value": None, "masked": True,
                         "note": why or "its gradient is not finite"})
    ids = [k for k in before if floor <= before[k] < float("inf")]

    def way(models: Models) -> list[tuple[int, int, float, float]]:
        """(client, e, distance, the gradient's norm over that at w) of each."""
        at = [(w, {n: b[j] for n, b in models.buffers.items()}) for j, w in enumerate(models.rows)]
        return [(k, models.e, float((w - start[0]).double().norm()), _gradient(view, (w, buffers), k) / before[k])
                for k, (w, buffers) in zip(models.ids, at, strict=True)]

    found: dict[int, list[tuple[int, float, float]]] = {k: [] for k in ids}
    plan = Personal(tuple(epochs), lr=lr)
    for each in tuned(setup, plan, *start, {}, run.done, ids, seed, way, executor, kept, run.name, progress) if ids else ():
        for k, e, distance, ratio in each:
            found[k].append((e, distance, ratio))
    floors, reached = [], []
    for k, each in found.items():
        about = {**common, "client": k, "slice": f"client:{k}/train", "n_examples": len(setup.parts[k])}
        for e, distance, ratio in sorted(each):
            rows += [_number({**about, "metric": "floor_distance", "index": e}, distance),
                     _number({**about, "metric": "floor_gradient", "index": e}, ratio)]
        e, distance, ratio = next((v for v in sorted(each) if v[2] <= fall), max(each))
        rows.append(_number({**about, "metric": "client_floor", "index": e, "fall": ratio, "converged": ratio <= fall}, distance))
        floors += [distance] if np.isfinite(distance) else []
        reached.append(ratio <= fall)
    if floors:
        rows.append({**common, "scope": "global", "slice": "client:*/train", "metric": "client_floor", "n_clients": len(floors),
                     "value": float(np.mean(floors)), "converged": all(reached),
                     "stderr": float(np.std(floors, ddof=1) / len(floors)**0.5) if len(floors) > 1 else None})
    return rows


def _number(about: Row, value: float) -> Row:
    if np.isfinite(value):
        return {**about, "value": value}
    return {**about, "value": None, "masked": True, "note": "the client's training diverges"}


def _gradient(view: History, at: Weights, client: int) -> float:
    """The norm of the gradient of a client's own training loss."""
    some = proximal.batches(view.pool.own(client), None)[0]
    losses = proximal.Losses(view.network, view.pool, at[1], at, some, kind="l2")
    return float(proximal.gradient(losses.local(), at[0])[1].double().norm())


def oscillation(run: Run, setup: Setup, late: int) -> list[Row]:
    """How far the global weights of the last stored rounds lie from their mean; two passes, one vector in memory."""
    rounds = [r for r in run.rounds if r][-late:]
    about: Row = {"metric": "oscillation", "round": run.done, "moment": "aggregated", "scope": "global", "estimator": "exact",
                  "n_rounds": len(rounds)}
    if len(rounds) < 2:
        return [{**about, "value": None, "masked": True, "note": "fewer than two rounds are stored"}]
    mean: Tensor = sum(weights(run, setup, r)[0].double() for r in rounds) / len(rounds)  # type: ignore[assignment]
    each = [float((weights(run, setup, r)[0].double() - mean).norm()) for r in rounds]
    return [{**about, "value": float(np.mean(each)), "stderr": float(np.std(each, ddof=1) / len(each)**0.5), "masked": False}]
