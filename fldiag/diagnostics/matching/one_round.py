"""One round of ``matching``: the clients' Hessians and the aggregated model's, in parts that can be done anywhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fldiag.curvature.lanczos import EigenPairs
from fldiag.diagnostics.matching.comparison import Space, Summary, matching_rows, overlap_rows
from fldiag.errors import FldiagError
from fldiag.execution.pool import Pool
from fldiag.problem import stack as stacks
from fldiag.problem.diagonal import Diagonal, Estimate, diagonal_of, norm
from fldiag.problem.eigenpairs import NOISE, eigenvalue_rows, loss_row, strict_pairs
from fldiag.problem.problem import Problem
from fldiag.problem.stack import Stack
from fldiag.registry import Progress
from fldiag.results.table import Row
from fldiag.rounds.history import History
from fldiag.rounds.round_weights import Stored

Data = Literal["client", "global"]


@dataclass(frozen=True)
class Options:
    k: int
    tol: float
    estimate: Estimate
    rtol: float
    max_products: int
    deflate: int
    seed: int
    stack: Stack

    @property
    def spectrum(self) -> dict[str, Any]:
        return {"k": self.k, "tol": self.tol, "max_products": max(100, 8 * self.k, self.max_products), "seed": self.seed}

    def diagonal(self, problem: Problem, progress: Progress) -> Diagonal:
        return diagonal_of(problem, estimate=self.estimate, rtol=self.rtol, max_products=self.max_products,
                           deflate=self.deflate, seed=self.seed, progress=progress)


Unit = tuple[int, Data | None, list[int], bool]  # round, whose data (None: the aggregated model), clients, with a spectrum


@dataclass
class Part:
    """Of each client (-1: the aggregated model) its rows, their columns with the summary, or why there are none."""

    rows: dict[int, list[Row]] = field(default_factory=dict)
    made: dict[int, tuple[Row, Summary]] = field(default_factory=dict)
    failed: dict[int, FldiagError] = field(default_factory=dict)


class Work:
    """What a worker needs for any part of any round; it reads the rounds itself."""

    def __init__(self, history: History, options: Options):
        self.history, self.options, self.round = history, options, None

    round: Round | None

    def __getstate__(self) -> dict[str, Any]:
        return {"history": self.history, "options": self.options, "round": None}

    def of(self, round: int) -> Round:
        if self.round is None or self.round.stored.round != round:
            self.round = Round(self.history, self.history.stored(round), self.options, None)
        return self.round


def done(work: Work, unit: Unit) -> Part:
    round, place, group, spectrum = unit
    return work.of(round).part(place, group, spectrum)


def named(unit: Unit) -> str:
    round, place, group, _ = unit
    return f"round {round}, " + ("global model" if place is None else f"clients {', '.join(map(str, group))} on {place} data")


class Round:
    """One round's rows; a client whose Hessian cannot be computed is noted and left out."""

    def __init__(self, history: History, stored: Stored, options: Options, progress: Progress | None):
        self.history, self.stored, self.options = history, stored, options
        self._progress, self._done, self._total = progress, 0, 1

    def rows(self, places: list[Data], split: bool, pool: Pool) -> list[Row]:
        history, stored, options = self.history, self.stored, self.options
        owners = [c for c in range(len(history.parts)) if history.pool.own(c).stop > history.pool.own(c).start]
        self._total = len(places) * len(stored.ids) + 1 + (len(owners) if split and options.k else 0)
        rows: list[Row] = []
        spaces: dict[int, Space] = {}
        top: Space | None
        common: Row
        parts = self._parts(places, pool)
        for place in places:
            found = self._clients(place, parts[place], rows)
            spaces |= {s.client: s.space for s in found if s.space is not None}
            rows += matching_rows(found, place, self._slice(place))
        top, common = None, {}
        whole = self._whole
        if parts[None][0].failed:
            history.note(stored.round, f"the aggregated model is left out: {parts[None][0].failed[-1].what}")
        else:
            rows += parts[None][0].rows[-1]
            common, summary = parts[None][0].made[-1]
            top = summary.space
        if spaces:
            rows += overlap_rows(spaces, top, self._slice(places[0]))
        if top is not None and split:
            rows += self._split(whole, top.vectors, owners, common)
        return rows

    def _slice(self, place: Data) -> Row:
        return {"slice": "train" if place == "global" else "client:*/train"}

    def _tell(self, text: str) -> Progress:
        """Progress within the step at hand, as thousandths of all steps."""
        def tell(done: int, total: int, what: str) -> None:
            if self._progress:
                at = self._done + min(done / max(total, 1), 1)
                self._progress(int(1000 * at), 1000 * self._total, f"round {self.stored.round}, {text}: {what}")

        return tell

    def _parts(self, places: list[Data], pool: Pool) -> dict[Data | None, list[Part]]:
        """What takes long, wherever work runs: groups of clients on their own or on all data, and the aggregated model (None)."""
        r = self.stored.round
        units: list[Unit] = [(r, place, group, place == places[0]) for place in places
                              for group in self._groups(place, place == places[0])]
        units.append((r, None, [], True))
        found: dict[Data | None, list[Part]] = {}
        for unit, part in zip(units, pool.map(units), strict=True):
            found.setdefault(unit[1], []).append(part)
            self._done += len(unit[2]) or 1
            self._tell(named(unit))(0, 1, "done")
        return found

    @property
    def _whole(self) -> Problem:
        stored, history = self.stored, self.history
        return history.problem((stored.aggregated, stored.buffers), history.pool.clients, "train", moment="aggregated",
                               scope="global")

    def part(self, place: Data | None, group: list[int], spectrum: bool) -> Part:
        """Rows and summaries of some clients' Hessians, or (None) of the aggregated model's."""
        done = Part()
        if place is None:
            own: list[Row] = []
            try:
                done.made[-1] = self._of(self._whole, True, own, "global model")
                done.rows[-1] = own
            except FldiagError as error:
                done.failed[-1] = error
            return done
        problems = self._problems(place, group, done.failed)
        pairs = stacks.eigenpairs([*problems.values()], **self.options.spectrum,
                                  progress=self._tell(f"{len(problems)} clients side by side"))
        for (client, problem), found in zip(problems.items(), pairs, strict=True):
            done.rows[client] = []
            try:
                done.made[client] = self._of(problem, spectrum, done.rows[client], f"client {client}", found, data=place)
            except FldiagError as error:
                done.failed[client] = error
        return done

    def _clients(self, place: Data, parts: list[Part], rows: list[Row]) -> list[Summary]:
        history, stored = self.history, self.stored
        known = {(n["client"], n["round"]) for n in history.notes}
        made = {client: summary for part in parts for client, (_, summary) in part.made.items()}
        failed = {client: error for part in parts for client, error in part.failed.items()}
        own = {client: mine for part in parts for client, mine in part.rows.items()}
        for client in stored.ids:
            rows += own.get(client, [])
            if client in failed and (client, stored.round) not in known:  # one complaint a client will do
                history.note(stored.round, f"client {client} is left out: {failed[client].what}", client)
        if failed and not made:
            raise failed[next(c for c in stored.ids if c in failed)]
        if len(made) == 1:
            history.note(stored.round, f"only client {next(iter(made))} on {place} data: there are no pairs to compare")
        return [made[client] for client in stored.ids if client in made]

    def _groups(self, place: Data, spectrum: bool) -> list[list[int]]:
        """The clients of the round whose Hessians are multiplied together."""
        pool, ids = self.history.pool, self.stored.ids
        if not spectrum or not self.options.k:
            return [[c] for c in ids]
        where = {c: pool.clients if place == "global" else pool.own(c) for c in ids}
        return stacks.groups(self.history.network, {c: w.stop - w.start for c, w in where.items()}, self.options.stack)

    def _problems(self, place: Data, group: list[int], failed: dict[int, FldiagError]) -> dict[int, Problem]:
        history, stored = self.history, self.stored
        found: dict[int, Problem] = {}
        for client in group:
            where, name = (history.pool.clients, "train") if place == "global" else (
                history.pool.own(client), f"client:{client}/train")
            try:
                found[client] = history.problem(stored.client(stored.ids.index(client)), where, name, moment="trained",
                                                scope="client", client=client)
            except FldiagError as error:
                failed[client] = error
        return found

    def _of(self, problem: Problem, spectrum: bool, rows: list[Row], who: str, pairs: EigenPairs | None = None,
            **columns: Any) -> tuple[Row, Summary]:
        """Rows of one model's Hessian on one slice, appended only when all of them could be made.

        ``pairs``: its eigenpairs, where they are known already.
        """
        options, common = self.options, {**problem.common, **columns}
        if not bool(torch.isfinite(problem.w).all()):
            raise FldiagError("its weights are not finite", "choose rounds from before the training diverged")
        mine = [loss_row(problem)]
        d = options.diagonal(problem, self._tell(who))
        assert d.values is not None  # entries were asked for
        size, error = norm(d.values, d.stderr)
        if d.stderr is not None:
            rough, whole = (float(torch.linalg.vector_norm(v)) for v in (d.stderr, d.values))
            mine.append({"metric": "diagonal_error", "value": rough / whole if whole else None, "estimator": d.estimator})
        mine.append({"metric": "diagonal_norm", "value": size, "stderr": error, "estimator": d.estimator,
                     "converged": d.converged})
        mine.append({"metric": "trace", "value": d.trace, "stderr": d.trace_stderr, "estimator": d.estimator,
                     "converged": d.trace_converged})
        space = None
        if spectrum and options.k:
            # strict: the overlaps are of the vectors
            pairs = pairs or strict_pairs(problem, **options.spectrum, progress=self._tell(who))
            mine += eigenvalue_rows(pairs, noise=NOISE[problem.dtype])
            space = Space.of(pairs, self.history.dtype, NOISE[problem.dtype])
        rows += [{**common, **row} for row in mine]
        return common, self._summary(problem, d, space, common)

    def _summary(self, problem: Problem, d: Diagonal, space: Space | None, common: Row) -> Summary:
        assert d.values is not None
        traces = torch.tensor([d.traces[n] for n in problem.layout.names], dtype=torch.float64)
        errors = None
        if d.stderr is not None:
            errors = torch.tensor([d.trace_stderrs[n] or 0.0 for n in problem.layout.names], dtype=torch.float64)
        fine = errors is None or bool(errors.norm() <= self.options.rtol * traces.norm())
        kept = d.values.to(self.history.dtype), None if d.stderr is None else d.stderr.to(self.history.dtype)
        return Summary(int(common.get("client", -1)), problem.n, {"diag": kept, "tensor_trace": (traces, errors)},
                       d.estimator, {"diag": d.converged, "tensor_trace": fine}, space)

    def _split(self, whole: Problem, vectors: Tensor, owners: list[int], common: Row) -> list[Row]:
        history, rows = self.history, []
        if whole.batch_dependent:
            history.note(self.stored.round, "the model's outputs depend on the batch: curvature shares do not sum up")
        for client in owners:
            where = history.pool.own(client)
            problem = history.problem((whole.w, whole.buffers), where, f"client:{client}/train")
            h = problem.hessian()
            about = {**common, "client": client, "scope": "client", "slice": problem.slice_name, "n_examples": problem.n,
                     "estimator": "exact"}
            for i, v in enumerate(vectors, start=1):
                own = float(v.double() @ h(v))
                rows += [{**about, "metric": "curvature", "index": i, "value": own},
                         {**about, "metric": "curvature_share", "index": i, "value": own * problem.n / whole.n}]
            self._done += 1
            self._tell(f"client {client}")(0, 1, "share of the curvature")
        return rows
