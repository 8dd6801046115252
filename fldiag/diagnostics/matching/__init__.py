"""How alike the clients' loss surfaces are: norms and directions of their Hessians, their sharpest directions.

H_N and H_D of Mendieta et al., "Local Learning Matters" (CVPR 2022), equations 3 and 4, as the paper defines them and as
its released code computes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pandas as pd
import torch
from pydantic import Field
from torch import Tensor

from fldiag.curvature.lanczos import EigenPairs
from fldiag.diagnostics.matching import picture
from fldiag.diagnostics.matching.comparison import Space, Summary, matching_rows, overlap_rows
from fldiag.diagnostics.matching.section import section
from fldiag.diagnostics.matching.summary import summary
from fldiag.errors import FldiagError
from fldiag.execution.pool import Pool
from fldiag.execution.start import started
from fldiag.problem import stack as stacks
from fldiag.problem.diagonal import Diagonal, Estimate, diagonal_of, norm
from fldiag.problem.eigenpairs import NOISE, check_count, eigenvalue_rows, loss_row, strict_pairs
from fldiag.problem.problem import Problem
from fldiag.problem.stack import Stack
from fldiag.registry import Progress, diagnostic
from fldiag.results.table import Row, table
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


def cost(history: History, options: Mapping[str, Any]) -> float:
    """Of every client: a spectrum and a diagonal on its own data, and as much on everybody's where that is asked for."""
    rounds = len(history.rounds) if options["every_round"] else 1
    one = 2.0 * (2 * options["k"] + 12 + 5)
    clients = history.sampled
    return rounds * (one * 2 + (0 if options["on"] == "client" else clients * (10 if options["on"] == "both" else one)))


def check(history: History, options: Mapping[str, Any]) -> None:
    """Refuse more eigenvectors than there are."""
    check_count(options["k"], history.layout.size)


@diagnostic("matching", on="run", needs="clients", draw=picture.draw_last, summary=summary, cost=cost, check=check,
            section=section, order=50,
            example="checkpoints/digits-fedavg-s0-1a2b3c4d --samples 500")
def matching(history: History, progress: Progress | None = None, *,
             on: Annotated[Literal["both", "client", "global"], Field(
                 description="Hessians on each client's own data (client), on everybody's (global), or both.")] = "both",
             k: Annotated[int, Field(ge=0, description="How many eigenvectors (0: none).")] = 5,
             split: Annotated[bool, Field(description="The clients' shares of the global model's curvature.")] = True,
             every_round: Annotated[bool | None, Field(description="All rounds, not only the last (default: where --rounds "
                                                                   "chooses them).")] = None,
             estimate: Annotated[Estimate, Field(description="Diagonals: auto, exact or hutchinson.")] = "auto",
             rtol: Annotated[float, Field(gt=0, lt=1, description="Relative standard error allowed where diagonals are "
                                                                  "estimated.")] = 0.02,
             max_products: Annotated[int, Field(ge=2, description="Hessian-vector products allowed for an estimate or a "
                                                                  "spectrum.")] = 200,
             deflate: Annotated[int, Field(ge=0, description="Products of an estimate that span what is counted exactly.")] = 20,
             tol: Annotated[float, Field(gt=0, lt=1, description="Relative error allowed in each eigenvalue.")] = 1e-3,
             seed: Annotated[int, Field(description="Random seed.")] = 0,
             stack: Annotated[Stack, Field(description="Clients side by side: auto, on or off.")] = "auto") -> pd.DataFrame:
    """How alike the clients' Hessians are: H_N, H_D, top eigenvalues, traces, overlap of eigenspaces.

    Hessians H_k of the clients' trained weights, on each client's own training data (``on`` client) or on all clients'
    (global); by default both. Rows:

    - ``H_N`` (||D_k|| - ||D_j||)^2 and ``H_D`` <D_k, D_j> / (||D_k|| ||D_j||) of every pair (scope pair), and their means
      over ordered pairs (scope global) without and with the pairs k = j (column ``self_pairs``; they add 0 and 1, so
      with C clients H_N shrinks by (C-1)/C). Column ``diag_mode``: D is the ``diag``onal (the paper's form), or has one
      trace for every parameter tensor (``tensor_trace``; the released code's form, with global data and self pairs).
    - of every client, and of the aggregated model on global data: ``loss``, the top ``k`` ``eigenvalue`` with residuals
      (lambda_max is index 1), ``eigenvalue_ratio``, ``trace`` (H_T), ``diagonal_norm``.
    - ``eigenspace_overlap`` of the top-k eigenspaces on own data (global if not asked for): the mean squared cosine of the
      principal angles (``principal_angle``, by index); 1 for the same space, about k / P by chance, P weights. Of every
      pair and its mean; of every client with the aggregated model as ``global_overlap``. None (``masked``, and not in the
      mean) where one of the k eigenvalues is zero: its eigenvector is arbitrary.
    - with ``split``: for the top k eigenvectors v of the aggregated model's Hessian H on global data (column index),
      ``curvature`` v'H_k v of every client's own data, and ``curvature_share`` p_k v'H_k v, p_k the client's share of the
      examples: they sum up to the eigenvalue.

    Diagonals and traces are exact where ``diagonal`` is; else estimates with the same random probes for all clients
    (``rtol``, ``max_products``, ``deflate`` as there), and the entries of a diagonal are then rough: column ``converged``,
    and rows ``diagonal_error``, the relative error of D; norms, also those in H_N and H_D, are without the part that noise
    adds. Of the last round with client weights, or all with ``every_round``. Cost a client: about 4 Hessian-vector
    products on own and on global data, and one spectrum.
    ``stack``: the clients' Hessians are multiplied side by side, never (off), where that is faster by a fixed rule on
    shapes (auto: small networks of affine layers on few examples), or wherever they can be (on); the numbers stay the same.

    Raises FldiagError when no round has client weights, or no client's Hessian can be computed.
    """
    options = Options(k, tol, estimate, rtol, max_products, deflate, seed, stack)
    places: list[Data] = ["client", "global"] if on == "both" else [on]
    rows: list[Row] = []
    work = _Work(history, options)
    with started(history.executor, _part, work, name=_named) as pool:
        for stored in history.asked(every_round):
            if stored.complete:
                work.round = _Round(history, stored, options, progress)
                rows += [{"masked": row["value"] is None, **row, "round": stored.round}
                         for row in work.round.rows(places, split, pool)]
    return table([*rows, *history.notes], **history.common)


_Unit = tuple[int, Data | None, list[int], bool]  # round, whose data (None: the aggregated model), clients, with a spectrum


@dataclass
class _Part:
    """Of each client (-1: the aggregated model) its rows, their columns with the summary, or why there are none."""

    rows: dict[int, list[Row]] = field(default_factory=dict)
    made: dict[int, tuple[Row, Summary]] = field(default_factory=dict)
    failed: dict[int, FldiagError] = field(default_factory=dict)


class _Work:
    """What a worker needs for any part of any round; it reads the rounds itself."""

    def __init__(self, history: History, options: Options):
        self.history, self.options, self.round = history, options, None

    round: _Round | None

    def __getstate__(self) -> dict[str, Any]:
        return {"history": self.history, "options": self.options, "round": None}

    def of(self, round: int) -> _Round:
        if self.round is None or self.round.stored.round != round:
            self.round = _Round(self.history, self.history.stored(round), self.options, None)
        return self.round


def _part(work: _Work, unit: _Unit) -> _Part:
    round, place, group, spectrum = unit
    return work.of(round).part(place, group, spectrum)


def _named(unit: _Unit) -> str:
    round, place, group, _ = unit
    return f"round {round}, " + ("global model" if place is None else f"clients {', '.join(map(str, group))} on {place} data")


class _Round:
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

    def _parts(self, places: list[Data], pool: Pool) -> dict[Data | None, list[_Part]]:
        """What takes long, wherever work runs: groups of clients on their own or on all data, and the aggregated model (None)."""
        r = self.stored.round
        units: list[_Unit] = [(r, place, group, place == places[0]) for place in places
                              for group in self._groups(place, place == places[0])]
        units.append((r, None, [], True))
        found: dict[Data | None, list[_Part]] = {}
        for unit, part in zip(units, pool.map(units), strict=True):
            found.setdefault(unit[1], []).append(part)
            self._done += len(unit[2]) or 1
            self._tell(_named(unit))(0, 1, "done")
        return found

    @property
    def _whole(self) -> Problem:
        stored, history = self.stored, self.history
        return history.problem((stored.aggregated, stored.buffers), history.pool.clients, "train", moment="aggregated",
                               scope="global")

    def part(self, place: Data | None, group: list[int], spectrum: bool) -> _Part:
        """Rows and summaries of some clients' Hessians, or (None) of the aggregated model's."""
        done = _Part()
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

    def _clients(self, place: Data, parts: list[_Part], rows: list[Row]) -> list[Summary]:
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
