"""Flatness of one round, in parts that can be done anywhere: the whole, and every client."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fldiag.choices import Estimate
from fldiag.diagnostics.flatness.gaps import gaps, means
from fldiag.errors import FldiagError
from fldiag.execution.pool import Pool
from fldiag.losses import noise_floor
from fldiag.params import cosine
from fldiag.problem.diagonal import diagonal_of
from fldiag.problem.eigenpairs import eigenpairs, finite_scores, loss_rows
from fldiag.problem.problem import Problem
from fldiag.registry import Progress
from fldiag.results.kept_units import KeptUnits, packed, unpacked
from fldiag.results.table import Row
from fldiag.runs import proximal
from fldiag.runs.history import History
from fldiag.runs.pool import Weights
from fldiag.runs.proximal import Losses
from fldiag.runs.round_weights import Stored


@dataclass(frozen=True)
class Options:
    rho: float
    tol: float
    estimate: Estimate
    rtol: float
    max_products: int
    seed: int


@dataclass(frozen=True)
class Unit:
    """The whole (no client), or one client: at the aggregated weights, and at its own where it was trained."""

    round: int
    client: int | None = None

    def __str__(self) -> str:
        return f"round {self.round}, {'global model' if self.client is None else f'client {self.client}'}"


@dataclass
class Part:
    """Rows, and complaints: whose, of which client."""

    rows: list[Row] = field(default_factory=list)
    failed: list[tuple[str, int | None]] = field(default_factory=list)

    def packed(self) -> np.ndarray:
        return packed(vars(self))

    @staticmethod
    def unpacked(content: np.ndarray) -> Part:
        return Part(**unpacked(content))


class Work:
    """What a worker needs for any part of any round; it reads the rounds itself."""

    round: Round | None = None

    def __init__(self, history: History, options: Options):
        self.history, self.options = history, options

    def __getstate__(self) -> dict[str, Any]:
        return {"history": self.history, "options": self.options}

    def of(self, round: int) -> Round:
        if self.round is None or self.round.stored.round != round:
            self.round = Round(
                self.history, self.history.finite(self.history.stored(round)), self.options
            )
        return self.round


def done(work: Work, unit: Unit) -> Part:
    round = work.of(unit.round)
    return round.whole() if unit.client is None else round.client(unit.client)


def refuse_nothing(rows: Sequence[Row]) -> None:
    """Raises FldiagError, with the first reason, where no flatness at all could be measured."""
    if not any(
        row["metric"] in ("sharpness", "eigenvalue", "trace") and row["value"] is not None
        for row in rows
    ):
        why = next(
            (row["note"] for row in rows if row["metric"] == "sharpness" and row.get("note")),
            "no model can be evaluated",
        )
        raise FldiagError(
            f"no round has a flatness: {why}", "choose other rounds, or --precision fp64"
        )


class Round:
    """One round: everything about ``stored`` whose clients are finite."""

    def __init__(self, history: History, stored: Stored, options: Options):
        self.history, self.stored, self.options, self.pool = history, stored, options, history.pool
        self.everything = history.pool.clients
        self._at_received: Tensor | None = None

    def rows(self, pool: Pool, progress: Progress | None, kept: KeptUnits) -> list[Row]:
        r = self.stored.round
        owners = [
            c for c in range(len(self.history.parts)) if self._own(c).stop > self._own(c).start
        ]
        if not owners:
            self.history.problem((self.stored.aggregated, {}), self.everything, "train")  # says why
        for k in set(self.stored.ids) - set(owners):
            self.history.note(r, f"client {k} has no training examples: left out", k)
        units = [Unit(r), *(Unit(r, c) for c in owners)]
        rows: list[Row] = []
        for part in kept.results(pool, units, progress):
            rows += part.rows
            for text, client in part.failed:
                self.history.note(r, text, client)
        sizes = {c: self._own(c).stop - self._own(c).start for c in owners}
        return [{**row, "round": r} for row in [*rows, *gaps(rows, sizes), *means(rows)]]

    def _own(self, client: int) -> slice:
        return self.pool.train_slice(client)

    # -- the whole

    def whole(self) -> Part:
        """F at the aggregated weights."""
        about: Row = {"moment": "aggregated", "scope": "global", "slice": "train"}
        part = Part()
        self._flatness(
            part,
            (self.stored.aggregated, self.stored.buffers),
            self.everything,
            about,
            "the aggregated model",
        )
        return part

    # -- one client

    def client(self, client: int) -> Part:
        """F_k at the aggregated weights; at the trained ones too, where there are some; and how its gradients point."""
        own, part = self._own(client), Part()
        name = f"client:{client}/train"
        about: Row = {"scope": "client", "client": client, "slice": name}
        start = self.stored.start
        part.rows.append(
            self._cosine(
                "flatness_distance",
                2.0,
                self._gradient(start, own),
                self._of_all_at_received(),
                {**about, "moment": "received", "n_examples": own.stop - own.start},
            )
        )
        here = self.stored.aggregated, self.stored.buffers
        self._flatness(
            part,
            here,
            own,
            {**about, "moment": "aggregated"},
            f"client {client} at the aggregated weights",
        )
        if client in self.stored.ids:
            weights = self.stored.client(self.stored.ids.index(client))
            trained: Row = {**about, "moment": "trained"}
            self._flatness(part, weights, own, trained, f"client {client}")
            part.rows.append(
                self._cosine(
                    "perturbation_misalignment",
                    1.0,
                    self._gradient(weights, own),
                    self._gradient(weights, self.everything),
                    {**trained, "n_examples": own.stop - own.start},
                )
            )
            part.rows += self._score(weights, {**trained, "slice": self.pool.split})
        return part

    def _of_all_at_received(self) -> Tensor:
        if self._at_received is None:
            self._at_received = self._gradient(self.stored.start, self.everything)
        return self._at_received

    def _gradient(self, weights: Weights, where: slice) -> Tensor:
        w, buffers = weights
        some = proximal.batches(where, None)[0]
        return proximal.gradient(
            Losses(self.history.network, self.pool, buffers, weights, some, kind="l2").local(), w
        )[1]

    def _cosine(self, metric: str, scale: float, a: Tensor, b: Tensor, about: Row) -> Row:
        """scale (1 - cos(a, b)), masked where one of the two is rounding noise."""
        about = {**about, "metric": metric, "estimator": "exact"}
        floor = noise_floor(a.dtype)
        value, lengths = float(cosine(a, b)), [float(torch.linalg.vector_norm(v)) for v in (a, b)]
        if not all(map(math.isfinite, lengths)):
            return {**about, "value": None, "note": "a gradient is not finite"}
        if min(lengths) < floor:
            return {
                **about,
                "value": None,
                "note": f"a gradient of norm {min(lengths):.1e} is rounding noise (below {floor:g})",
            }
        return {**about, "value": scale * (1 - value)}

    def _score(self, weights: Weights, about: Row) -> list[Row]:
        """Norm of the gradient on the split by which models are judged, whole and by layer."""
        test, layout = self.pool.test, self.history.layout
        g = self._gradient(weights, test)
        about = {**about, "metric": "gradient_score", "estimator": "exact", "n_examples": test.stop}
        squares = {n: v.double().square().sum() for n, v in layout.views(g).items()}
        found: list[tuple[str | None, float]] = [
            (None, float(torch.linalg.vector_norm(g.double())))
        ]
        found += [
            (layer or names[0], math.sqrt(sum(float(squares[n]) for n in names)))
            for layer, names in layout.layers.items()
        ]
        return [
            {**about, "layer": layer, "value": value}
            if math.isfinite(value)
            else {**about, "layer": layer, "value": None, "note": "the gradient is not finite"}
            for layer, value in found
        ]

    # -- how flat a loss is at a point

    def _flatness(self, part: Part, weights: Weights, where: slice, about: Row, who: str) -> None:
        """Sharpness, lambda_1 and trace, as far as they can be computed; the complaint where they cannot."""
        options = self.options
        try:
            problem = self.history.problem(weights, where, str(about["slice"]))
            about = {**about, "n_examples": problem.n}
            found = [*loss_rows(problem), sharpness(problem, options.rho)]
            found.append(lambda_1(problem, options))
            found.append(trace(problem, options))
        except FldiagError as error:
            part.failed.append((f"{who} is left out: {error.what}", about.get("client")))
            return
        part.rows += [{**about, **row} for row in found]


def sharpness(problem: Problem, rho: float) -> Row:
    """F(w + rho G / ||G||) - F(w): what one ascent step adds; masked where G is rounding noise."""
    row: Row = {"metric": "sharpness", "estimator": "exact", "rho": rho}
    g, floor = problem.gradient(), noise_floor(problem.dtype)
    size = float(torch.linalg.vector_norm(g))
    if size < floor:
        return {
            **row,
            "value": None,
            "note": f"the gradient has norm {size:.1e}, rounding noise (below {floor:g})",
        }
    up = problem.w.double() + rho / size * g
    at_w, at_step = finite_scores(problem), problem.losses(up)
    before = at_w.loss
    if at_w.each is None or at_step is None:
        after = problem.loss(up)[0]
        change, stderr = after - before, None
    else:
        each = at_step - at_w.each
        after, change, stderr = float(at_step.mean()), float(each.mean()), problem.stderr(each)
    if not math.isfinite(change):
        raise FldiagError(
            f"the loss on slice {problem.slice_name!r} is {before:g}, and {after:g} after a step of length {rho:g}",
            "choose rounds from before the training diverged, or a smaller --rho",
        )
    return {
        **row,
        "value": change,
        "stderr": stderr,
        "residual": torch.finfo(problem.dtype).eps * (abs(before) + abs(after)),
    }


def lambda_1(problem: Problem, options: Options) -> Row:
    pairs = eigenpairs(
        problem, 1, tol=options.tol, max_products=max(100, options.max_products), seed=options.seed
    )
    return {
        "metric": "eigenvalue",
        "index": 1,
        "value": float(pairs.values[0]),
        "residual": float(pairs.residuals[0]),
        "bound": float(pairs.bounds[0]),
        "converged": bool(pairs.converged[0]),
        "estimator": "lanczos",
    }


def trace(problem: Problem, options: Options) -> Row:
    found = diagonal_of(
        problem,
        entries=False,
        estimate=options.estimate,
        rtol=options.rtol,
        max_products=options.max_products,
        seed=options.seed,
    )
    return {
        "metric": "trace",
        "value": found.trace,
        "stderr": found.trace_stderr,
        "estimator": found.estimator,
        "converged": found.trace_converged,
    }
