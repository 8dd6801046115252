"""Training again without a client, what that does to the loss, and what was predicted of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor

from fldiag.errors import FldiagError
from fldiag.execution.workspace import workspace
from fldiag.method import Round
from fldiag.results.means import sample_mean
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


def of_run(run: Run, setup: Setup, last: Sequence[int], slice_name: str) -> list[Row]:
    """The rows of one run, without the rank correlations. ``last``: numbers of last rounds to train again."""
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
    workspace().show(0, 1, f"{run.name}: training again with all clients")
    replay = Replay.of(run, setup, last)
    reference, _ = load_weights(run, setup)
    distance = float((reference - replay.final[0]).norm() / reference.norm())
    if not distance <= SAME:
        rows.append(
            _note(
                f"trained again, the weights differ from the stored ones by {distance:.1e} of their norm (another "
                "machine or number of threads?): effects are those of the rounds trained here"
            )
        )
    history = History(
        setup.module, setup.dataset, setup.parts, {}, device=setup.device, dtype=setup.dtype
    )
    examples = history.stretch(slice_name)
    losses = history.evaluate([replay.final]).loss[0, examples]
    if not np.isfinite(losses.mean()):
        raise FldiagError(
            f"the final loss of {run.path} on {slice_name} is {losses.mean()}",
            "choose a run that did not diverge",
        )
    comparison = Comparison(history, examples, losses)
    common: Row = {
        "slice": slice_name,
        "scope": "client",
        "moment": "aggregated",
        "round": run.done,
        "n_examples": len(losses),
        "masked": False,
    }
    effects = aggregate_effects(replay, comparison)
    omissions = []
    for r in last:
        for client in range(len(setup.parts)):
            count = sum(client in exchange.ids for exchange, _ in replay.rounds[-r:])
            if count >= min(2, r):
                omissions.append(Omission(r, client))
                continue
            effects.append(
                {
                    "metric": "effect",
                    "estimator": "retrained",
                    "index": r,
                    "client": client,
                    "value": None,
                    "masked": True,
                    "note": f"sampled in {count} of the last {r} rounds",
                }
            )
    results = workspace().map(
        effect_of_omission,
        (replay.starts, comparison),
        omissions,
        name=lambda omission: f"{run.name}: {omission}",
    )
    effects += [
        {"estimator": "retrained", "index": omission.last, "client": omission.client, **effect}
        for omission, effect in zip(omissions, results, strict=True)
    ]
    keys = [(0, row["client"]) for row in effects if row["index"] == 0 and row["value"] is not None]
    keys += [(omission.last, omission.client) for omission in omissions]
    effects += predicted_effects(replay, history, examples, slice_name, keys)
    return [*rows, *({**common, **row} for row in effects)]


def _note(text: str) -> Row:
    return {"metric": "missing", "note": text, "masked": True}


# -- training again


@dataclass
class Replay:
    """The last rounds trained again with all clients.

    ``starts``: number of last rounds -> the federation before them. ``rounds``: what the server received in each round, and
    its new weights. ``final``: the final weights.
    """

    starts: dict[int, Federation]
    rounds: list[tuple[Round, Tensor]]
    final: Weights

    @staticmethod
    def of(run: Run, setup: Setup, last: Sequence[int]) -> Replay:
        """From stored weights where the method has no other state, else from the start of the run."""
        federation, first = Federation(setup), run.done - max(last)
        if federation.stateless and first in run.rounds:
            federation.t, (federation.w, federation.buffers) = (
                first,
                load_weights(run, setup, first),
            )
        starts, rounds = {}, []
        while federation.t < run.done:
            if run.done - federation.t in last:
                starts[run.done - federation.t] = _copy(federation)
            exchange, _ = federation.round(partial(map, setup.train))
            if federation.t > first:
                rounds.append((exchange, federation.w))
        return Replay(starts, rounds, (federation.w, federation.buffers))


def _copy(federation: Federation) -> Federation:
    """One that can train on by itself: it shares tensors, which rounds replace and never change."""
    clone = copy.copy(federation)
    clone.state, clone.clients = dict(federation.state), dict(federation.clients)
    return clone


@dataclass(frozen=True)
class ScheduleWithout:
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

    def __str__(self) -> str:
        return f"the last {self.last} rounds without client {self.client}"


def retrain(start: Federation, omission: Omission) -> Weights:
    """The final weights; a round in which nobody else is sampled changes nothing."""
    federation = _copy(start)
    federation.setup = copy.copy(federation.setup)
    federation.setup.schedule = ScheduleWithout(federation.setup.schedule, omission.client)
    for _ in range(omission.last):
        if federation.setup.schedule.sampled(federation.t):
            federation.round(partial(map, federation.setup.train))
        else:
            federation.t += 1
    return federation.w, federation.buffers


# -- effects


@dataclass(frozen=True)
class Comparison:
    """What models without a client are compared with: the final model's ``losses`` on some ``examples`` of a history's pool."""

    history: History
    examples: slice
    losses: np.ndarray

    def effect(self, model: Weights) -> Row:
        """By how much the mean loss is larger, with a paired standard error over the examples."""
        change = self.history.evaluate([model]).loss[0, self.examples] - self.losses
        if not np.isfinite(change.mean()):
            note = "without it the training diverges"
            return {"metric": "effect", "value": None, "masked": True, "note": note}
        return {"metric": "effect", **sample_mean(change)}


def effect_of_omission(
    shared: tuple[Mapping[int, Federation], Comparison], omission: Omission
) -> Row:
    starts, comparison = shared
    return comparison.effect(retrain(starts[omission.last], omission))


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


def aggregate_effects(replay: Replay, comparison: Comparison) -> list[Row]:
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
        rows.append({**about, **comparison.effect((w.to(new.dtype), buffers))})
    return rows


def predicted_effects(
    replay: Replay,
    history: History,
    examples: slice,
    slice_name: str,
    keys: Sequence[tuple[int, int]],
) -> list[Row]:
    """The predictions of the effects of ``keys``: (number of last rounds, 0 for the aggregate; client)."""
    values = {key: np.zeros(len(PREDICTIONS)) for key in keys}
    displacements: dict[tuple[int, int], Tensor] = {}
    refusals: dict[tuple[int, int], str] = {}
    for back, (exchange, new) in enumerate(reversed(replay.rounds), start=1):
        problem = history.problem((new, exchange.mean_buffers), examples, slice_name)
        gradient, hessian = problem.gradient(), problem.hessian()
        for client in exchange.ids:
            client_keys = [key for key in keys if key[1] == client and back <= max(key[0], 1)]
            if not client_keys:
                continue
            try:
                d = displacement(exchange, new, client)
            except FldiagError as error:
                refusals |= dict.fromkeys(client_keys, error.what)
                continue
            linear, quadratic = float(gradient @ d), 0.5 * float(d @ hessian(d))
            for key in client_keys:
                values[key][2:] += linear + quadratic, linear
                displacements[key] = displacements[key] + d if key in displacements else d
        hessian.release()
    problem = history.problem(replay.final, examples, slice_name)
    gradient, hessian = problem.gradient(), problem.hessian()
    rows: list[Row] = []
    for key in keys:
        about: Row = {"metric": "predicted_effect", "index": key[0], "client": key[1]}
        if key in refusals:
            rows += [
                {**about, "estimator": name, "value": None, "masked": True, "note": refusals[key]}
                for name in PREDICTIONS
            ]
            continue
        d = displacements[key]
        linear = float(gradient @ d)
        values[key][:2] = linear + 0.5 * float(d @ hessian(d)), linear
        rows += [
            {**about, "estimator": name, "value": float(value)}
            for name, value in zip(PREDICTIONS, values[key], strict=True)
        ]
    hessian.release()
    return rows


# -- rank correlations


def rank_correlations(frame: pd.DataFrame, seed: int) -> list[Row]:
    """Spearman's correlation of predicted and true effects over the clients of all runs, with its interval."""
    rows: list[Row] = []
    keys = ["run", "client", "index"]
    true = only(frame, metric="effect").dropna(subset="value")[[*keys, "value"]]
    for (index, estimator), part in (
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
                "estimator": estimator,
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
