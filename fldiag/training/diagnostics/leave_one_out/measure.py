"""Training again without a client, what that does to the loss, and what was predicted of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor

from fldiag.errors import FldiagError
from fldiag.execution.pools import open_pool
from fldiag.method import Round
from fldiag.registry import Progress
from fldiag.results.kept_units import KeptUnits
from fldiag.results.select import only
from fldiag.results.table import Row
from fldiag.runs.history import History
from fldiag.runs.pool import Weights
from fldiag.runs.run import Run
from fldiag.seeding import numpy_rng
from fldiag.training.server import Federation
from fldiag.training.setup import Batches, Schedule, Setup, load_weights

#: Resamples of the bootstrap, and its level.
RESAMPLES, LEVEL = 2000, 0.95
#: Relative difference from the stored weights up to which training again has found the same model.
SAME = 1e-3
PREDICTIONS = ("quadratic", "linear", "rounds-quadratic", "rounds-linear")


@dataclass(frozen=True)
class Without:
    """A schedule in which one client never takes part; everybody else does what they did."""

    schedule: Schedule
    client: int

    def sampled(self, t: int) -> list[int]:
        return [i for i in self.schedule.sampled(t) if i != self.client]

    def batches(self, t: int, client: int, n: int) -> Batches:
        return self.schedule.batches(t, client, n)


@dataclass(frozen=True)
class Omission:
    """Train the last ``last`` rounds again without a client."""

    last: int
    client: int
    run: str

    def __str__(self) -> str:
        return f"{self.run}: the last {self.last} rounds without client {self.client}"


def without(starts: Mapping[int, Federation], unit: Omission) -> Weights:
    """The final weights; a round in which nobody else is sampled changes nothing."""
    federation = copied(starts[unit.last])
    federation.setup = copy.copy(federation.setup)
    federation.setup.schedule = Without(federation.setup.schedule, unit.client)
    for _ in range(unit.last):
        if federation.setup.schedule.sampled(federation.t):
            federation.round(partial(map, federation.setup.train))
        else:
            federation.t += 1
    return federation.w, federation.buffers


def copied(federation: Federation) -> Federation:
    """A copy that can train on by itself: it shares tensors, which rounds replace and never change."""
    clone = copy.copy(federation)
    clone.state, clone.clients = dict(federation.state), dict(federation.clients)
    return clone


@dataclass
class Replay:
    """The last rounds trained again with all clients.

    ``starts``: number of last rounds -> the federation before them. ``rounds``: what the server received in each round, and
    its new weights. ``final``: the final weights.
    """

    starts: dict[int, Federation]
    rounds: list[tuple[Round, Tensor]]
    final: Weights


def replayed(run: Run, setup: Setup, last: Sequence[int]) -> Replay:
    """Train the last rounds again, from stored weights where the method has no other state, else from the start."""
    federation, done, first = Federation(setup), run.done, run.done - max(last)
    if federation.stateless and first in run.rounds:
        federation.t, (federation.w, federation.buffers) = first, load_weights(run, setup, first)
    replay = Replay({}, [], (federation.w, federation.buffers))
    while federation.t < done:
        if done - federation.t in last:
            replay.starts[done - federation.t] = copied(federation)
        exchange, _ = federation.round(partial(map, setup.train))
        if federation.t > first:
            replay.rounds.append((exchange, federation.w))
    replay.final = federation.w, federation.buffers
    return replay


def of_run(
    run: Run,
    setup: Setup,
    last: Sequence[int],
    slice_name: str,
    executor: Any,
    progress: Progress | None,
    unit_store: KeptUnits | None = None,
) -> list[Row]:
    if setup.method.isolated:
        raise FldiagError(
            f"{run.path}: with {setup.config.method.name} nothing is aggregated",
            "choose another run",
        )
    rows: list[Row] = [
        _note(f"the run has {run.done} rounds, and not {r} to leave out")
        for r in last
        if r > run.done
    ]
    last = [r for r in last if r <= run.done] or [run.done]
    if progress:
        progress(0, 1, "training again with all clients")
    replay = replayed(run, setup, last)
    reference, _ = load_weights(run, setup)
    away = float((reference - replay.final[0]).norm() / reference.norm())
    if not away <= SAME:
        rows.append(
            _note(
                f"trained again, the weights differ from the stored ones by {away:.1e} of their norm (another "
                "machine or number of threads?): effects are those of the rounds trained here"
            )
        )
    view = History(
        setup.module, setup.dataset, setup.parts, {}, device=setup.device, dtype=setup.dtype
    )
    stretch = view.stretch(slice_name)
    before = view.evaluate([replay.final]).loss[0, stretch]
    if not np.isfinite(before.mean()):
        raise FldiagError(
            f"the final loss of {run.path} on {slice_name} is {before.mean()}",
            "choose a run that did not diverge",
        )

    def effect(model: Weights, about: Row) -> Row:
        change = view.evaluate([model]).loss[0, stretch] - before
        value = float(change.mean())
        if not np.isfinite(value):
            return {
                **about,
                "metric": "effect",
                "value": None,
                "masked": True,
                "note": "without it the training diverges",
            }
        return {
            **about,
            "metric": "effect",
            "value": value,
            "stderr": float(change.std(ddof=1) / len(change) ** 0.5),
        }

    common: Row = {
        "slice": slice_name,
        "scope": "client",
        "moment": "aggregated",
        "round": run.done,
        "n_examples": len(before),
        "masked": False,
    }
    rows += [{**common, **row} for row in _aggregate(replay, effect)]
    units = [
        Omission(r, k, run.name)
        for r in last
        for k in range(len(setup.parts))
        if _times(replay, r, k) >= min(2, r)
    ]
    rows += [
        {
            **common,
            "metric": "effect",
            "estimator": "retrained",
            "index": r,
            "client": k,
            "value": None,
            "masked": True,
            "note": f"sampled in {_times(replay, r, k)} of the last {r} rounds",
        }
        for r in last
        for k in range(len(setup.parts))
        if Omission(r, k, run.name) not in units
    ]

    def retrained(unit: Omission, model: Weights) -> Row:
        return effect(
            model, {**common, "estimator": "retrained", "index": unit.last, "client": unit.client}
        )

    with open_pool(executor, without, replay.starts, most=len(units)) as pool:
        rows += (unit_store or KeptUnits(None, str)).results(pool, units, progress, retrained)
    return [
        *rows,
        *({**common, **row} for row in _predicted(replay, view, stretch, slice_name, units, rows)),
    ]


def _note(text: str) -> Row:
    return {"metric": "missing", "note": text, "masked": True}


def _times(replay: Replay, last: int, client: int) -> int:
    return sum(client in exchange.ids for exchange, _ in replay.rounds[-last:])


def displacement(exchange: Round, new: Tensor, client: int) -> Tensor:
    """c (w - w_k), c = p_k / (1 - p_k): what the mean gains without the client, [P] in float64.

    Raises FldiagError for a client that is alone, and a server that does more than the weighted mean."""
    j, mean = exchange.ids.index(client), exchange.mean(exchange.rows, exchange.p)
    p = float(exchange.p[j])
    if p >= 1:
        raise FldiagError(
            f"client {client} is alone in round {exchange.t + 1}", "sample several clients"
        )
    if float((mean - new).norm()) > 1e-5 * float(new.norm()):
        raise FldiagError(
            "the server does more than the weighted mean of the clients",
            "see the effects of training again",
        )
    return p / (1 - p) * (new - exchange.rows[j]).double()


def _aggregate(replay: Replay, effect: Any) -> list[Row]:
    """Exact effects on the aggregate of the last round."""
    exchange, new = replay.rounds[-1]
    rows: list[Row] = []
    for j, k in enumerate(exchange.ids):
        about: Row = {"index": 0, "client": k, "estimator": "exact"}
        try:
            w = new.double() + displacement(exchange, new, k)
        except FldiagError as error:
            rows.append(
                {**about, "metric": "effect", "value": None, "masked": True, "note": error.what}
            )
            continue
        rest = [i for i in range(exchange.m) if i != j]
        p = exchange.p[rest] / exchange.p[rest].sum()
        buffers = {
            n: torch.tensordot(p.to(b.device), b[rest].double(), 1).to(b.dtype)
            if b.is_floating_point()
            else b[rest].amax(0)
            for n, b in exchange.buffers.items()
        }
        rows.append(effect((w.to(new.dtype), buffers), about))
    return rows


def _predicted(
    replay: Replay,
    view: History,
    stretch: slice,
    slice_name: str,
    units: Sequence[Omission],
    rows: Sequence[Row],
) -> list[Row]:
    """Predictions of all effects that were measured."""
    keys = [
        (0, row["client"]) for row in rows if row.get("index") == 0 and row["value"] is not None
    ]
    keys += [(unit.last, unit.client) for unit in units]
    values: dict[tuple[int, int], np.ndarray] = {key: np.zeros(4) for key in keys}
    moved: dict[tuple[int, int], Tensor] = {}
    why: dict[tuple[int, int], str] = {}
    for back, (exchange, new) in enumerate(reversed(replay.rounds), start=1):
        problem = view.problem((new, exchange.mean_buffers), stretch, slice_name)
        g, hessian = problem.gradient(), problem.hessian()
        for k in exchange.ids:
            mine = [key for key in keys if key[1] == k and back <= max(key[0], 1)]
            if not mine:
                continue
            try:
                d = displacement(exchange, new, k)
            except FldiagError as error:
                why |= dict.fromkeys(mine, error.what)
                continue
            linear, quadratic = float(g @ d), 0.5 * float(d @ hessian(d))
            for key in mine:
                values[key][2:] += linear + quadratic, linear
                moved[key] = moved[key] + d if key in moved else d
        hessian.release()
    problem = view.problem(replay.final, stretch, slice_name)
    g, hessian = problem.gradient(), problem.hessian()
    predictions: list[Row] = []
    for key in keys:
        about: Row = {"metric": "predicted_effect", "index": key[0], "client": key[1]}
        if key in why:
            predictions += [
                {**about, "estimator": name, "value": None, "masked": True, "note": why[key]}
                for name in PREDICTIONS
            ]
            continue
        linear = float(g @ moved[key])
        values[key][:2] = linear + 0.5 * float(moved[key] @ hessian(moved[key])), linear
        predictions += [
            {**about, "estimator": name, "value": float(v)}
            for name, v in zip(PREDICTIONS, values[key], strict=True)
        ]
    hessian.release()
    return predictions


def rank_correlations(frame: pd.DataFrame, seed: int) -> list[Row]:
    """Spearman's correlation of predicted and true effects over the clients of all runs, with its interval."""
    rows: list[Row] = []
    keys = ["run", "client", "index"]
    true = only(frame, metric="effect").dropna(subset="value")[[*keys, "value"]]
    for (index, how), part in (
        only(frame, metric="predicted_effect")
        .dropna(subset="value")
        .groupby(["index", "estimator"])
    ):
        pairs = (
            part[[*keys, "value"]]
            .merge(true, on=keys, suffixes=("", "_true"))
            .astype({"value": float, "value_true": float})
        )
        values = pairs[["client", "value", "value_true"]].to_numpy(dtype=float)
        low, high = _interval(values, seed)
        value = _spearman(values)
        rows.append(
            {
                "metric": "rank_correlation",
                "index": int(index),
                "estimator": how,
                "value": value,
                "low": low,
                "high": high,
                "n_clients": len(values),
                "masked": value is None,
                "note": "it takes three clients whose effects differ" if value is None else None,
            }
        )
    return rows


def _spearman(values: np.ndarray) -> float | None:
    """Of columns 1 and 2; None where one of them does not vary."""
    if len(values) < 3 or np.ptp(values[:, 1]) == 0 or np.ptp(values[:, 2]) == 0:
        return None
    return float(stats.spearmanr(values[:, 1], values[:, 2]).statistic)


def _interval(values: np.ndarray, seed: int) -> tuple[float | None, float | None]:
    """Percentiles over resampled clients (column 0), all of whose rows come along; none where all resamples agree, as of a
    perfect order, which leaves no spread to judge by."""
    rng, clients = numpy_rng(seed, "bootstrap of clients"), np.unique(values[:, 0])
    groups = [values[values[:, 0] == k] for k in clients]
    correlations = (
        []
        if len(groups) < 3
        else [
            _spearman(
                np.concatenate([groups[i] for i in rng.integers(len(groups), size=len(groups))])
            )
            for _ in range(RESAMPLES)
        ]
    )
    finite = [v for v in correlations if v is not None]
    if not finite or np.ptp(finite) <= 1e-12:
        return None, None
    low, high = np.percentile(finite, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return float(low), float(high)
