"""One round of ``matching``: the clients' Hessians and the aggregated model's, in parts that can be done anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fldiag.choices import Estimate, Stack
from fldiag.curvature.lanczos import EigenPairs
from fldiag.diagnostics.matching.comparison import Space, Summary, matching_rows, overlap_rows
from fldiag.errors import FldiagError
from fldiag.execution.pool import Pool
from fldiag.problem import stack as stacks
from fldiag.problem.diagonal import Diagonal, diagonal_of, norm
from fldiag.problem.eigenpairs import NOISE, eigenvalue_rows, loss_rows, strict_pairs
from fldiag.problem.problem import Problem
from fldiag.registry import Progress
from fldiag.results.table import Row
from fldiag.runs.history import History
from fldiag.runs.round_weights import Stored

Data = Literal["client", "global"]
#: Clients whose shares of the curvature are one unit; the eigenvectors are sent along.
TOGETHER = 5


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
        return {
            "k": self.k,
            "tol": self.tol,
            "max_products": max(100, 8 * self.k, self.max_products),
            "seed": self.seed,
        }

    def diagonal(self, problem: Problem, progress: Progress) -> Diagonal:
        return diagonal_of(
            problem,
            estimate=self.estimate,
            rtol=self.rtol,
            max_products=self.max_products,
            deflate=self.deflate,
            seed=self.seed,
            progress=progress,
        )


@dataclass(frozen=True)
class Unit:
    """Some clients' Hessians on their own (``client``) or on all data (``global``), the aggregated model's (``aggregated``), or
    the curvature of its Hessian along ``vectors`` on some clients' data (``share``)."""

    round: int
    of: Data | Literal["aggregated", "share"]
    clients: tuple[int, ...] = ()
    spectrum: bool = True
    vectors: Tensor | None = None

    def __str__(self) -> str:
        if self.of == "aggregated":
            return f"round {self.round}, global model"
        if self.of == "share":
            return f"round {self.round}, curvature on the data of clients {', '.join(map(str, self.clients))}"
        return f"round {self.round}, clients {', '.join(map(str, self.clients))} on {self.of} data"


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
    return work.of(unit.round).part(unit)


class Round:
    """One round's rows; a client whose Hessian cannot be computed is noted and left out."""

    def __init__(
        self, history: History, stored: Stored, options: Options, progress: Progress | None
    ):
        self.history, self.stored, self.options = history, stored, options
        self._progress, self._done, self._total = progress, 0, 1

    def rows(self, places: list[Data], split: bool, pool: Pool) -> list[Row]:
        history, stored, options = self.history, self.stored, self.options
        owners = [
            c
            for c in range(len(history.parts))
            if history.pool.train_slice(c).stop > history.pool.train_slice(c).start
        ]
        self._total = (
            len(places) * len(stored.ids) + 1 + (len(owners) if split and options.k else 0)
        )
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
        whole = parts["aggregated"][0]
        if whole.failed:
            history.note(stored.round, f"the aggregated model is left out: {whole.failed[-1].what}")
        else:
            rows += whole.rows[-1]
            common, summary = whole.made[-1]
            top = summary.space
        if spaces:
            rows += overlap_rows(spaces, top, self._slice(places[0]))
        if top is not None and split:
            rows += self._split(top.vectors, owners, common, pool)
        return rows

    def _slice(self, place: Data) -> Row:
        return {"slice": "train" if place == "global" else "client:*/train"}

    def _tell(self, text: str) -> Progress:
        """Progress within the step at hand, as thousandths of all steps."""

        def tell(done: int, total: int, what: str) -> None:
            if self._progress:
                at = self._done + min(done / max(total, 1), 1)
                self._progress(
                    int(1000 * at), 1000 * self._total, f"round {self.stored.round}, {text}: {what}"
                )

        return tell

    def _parts(self, places: list[Data], pool: Pool) -> dict[str, list[Part]]:
        """What takes long, wherever work runs, the longest first: the aggregated model, clients on all data, on their own."""
        r = self.stored.round
        units = [
            Unit(r, "aggregated"),
            *(
                Unit(r, place, tuple(group), place == places[0])
                for place in reversed(places)
                for group in self._groups(place, place == places[0])
            ),
        ]
        found: dict[str, list[Part]] = {}
        for unit, part in zip(units, pool.map(units), strict=True):
            found.setdefault(unit.of, []).append(part)
            self._told(unit)
        return found

    def _told(self, unit: Unit) -> None:
        self._done += len(unit.clients) or 1
        self._tell(str(unit))(0, 1, "done")

    @property
    def _whole(self) -> Problem:
        stored, history = self.stored, self.history
        return history.problem(
            (stored.aggregated, stored.buffers),
            history.pool.clients,
            "train",
            moment="aggregated",
            scope="global",
        )

    def part(self, unit: Unit) -> Part:
        done = Part()
        if unit.of == "aggregated":
            own: list[Row] = []
            try:
                done.made[-1] = self._of(self._whole, True, own, "global model")
                done.rows[-1] = own
            except FldiagError as error:
                done.failed[-1] = error
            return done
        if unit.of == "share":
            assert unit.vectors is not None
            whole = self._whole
            done.rows = {
                client: self._share(whole, unit.vectors, client) for client in unit.clients
            }
            return done
        problems = self._problems(unit.of, unit.clients, done.failed)
        pairs = stacks.eigenpairs(
            [*problems.values()],
            **self.options.spectrum,
            progress=self._tell(f"{len(problems)} clients side by side"),
        )
        for (client, problem), found in zip(problems.items(), pairs, strict=True):
            done.rows[client] = []
            try:
                done.made[client] = self._of(
                    problem,
                    unit.spectrum,
                    done.rows[client],
                    f"client {client}",
                    found,
                    data=unit.of,
                )
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
            if (
                client in failed and (client, stored.round) not in known
            ):  # one complaint a client will do
                history.note(
                    stored.round, f"client {client} is left out: {failed[client].what}", client
                )
        if failed and not made:
            raise failed[next(c for c in stored.ids if c in failed)]
        if len(made) == 1:
            history.note(
                stored.round,
                f"only client {next(iter(made))} on {place} data: there are no pairs to compare",
            )
        return [made[client] for client in stored.ids if client in made]

    def _groups(self, place: Data, spectrum: bool) -> list[list[int]]:
        """The clients of the round whose Hessians are multiplied together."""
        pool, ids = self.history.pool, self.stored.ids
        if not spectrum or not self.options.k:
            return [[c] for c in ids]
        where = {c: pool.clients if place == "global" else pool.train_slice(c) for c in ids}
        return stacks.groups(
            self.history.network,
            {c: w.stop - w.start for c, w in where.items()},
            self.options.stack,
        )

    def _problems(
        self, place: Data, group: Sequence[int], failed: dict[int, FldiagError]
    ) -> dict[int, Problem]:
        history, stored = self.history, self.stored
        found: dict[int, Problem] = {}
        for client in group:
            where, name = (
                (history.pool.clients, "train")
                if place == "global"
                else (history.pool.train_slice(client), f"client:{client}/train")
            )
            try:
                found[client] = history.problem(
                    stored.client(stored.ids.index(client)),
                    where,
                    name,
                    moment="trained",
                    scope="client",
                    client=client,
                )
            except FldiagError as error:
                failed[client] = error
        return found

    def _of(
        self,
        problem: Problem,
        spectrum: bool,
        rows: list[Row],
        who: str,
        pairs: EigenPairs | None = None,
        **columns: Any,
    ) -> tuple[Row, Summary]:
        """Rows of one model's Hessian on one slice, appended only when all of them could be made.

        ``pairs``: its eigenpairs, where they are known already.
        """
        options, common = self.options, {**problem.common, **columns}
        if not bool(torch.isfinite(problem.w).all()):
            raise FldiagError(
                "its weights are not finite", "choose rounds from before the training diverged"
            )
        mine = loss_rows(problem)
        d = options.diagonal(problem, self._tell(who))
        assert d.values is not None  # entries were asked for
        size, error = norm(d.values, d.stderr)
        if d.stderr is not None:
            rough, whole = (float(torch.linalg.vector_norm(v)) for v in (d.stderr, d.values))
            mine.append(
                {
                    "metric": "diagonal_error",
                    "value": rough / whole if whole else None,
                    "estimator": d.estimator,
                }
            )
        mine.append(
            {
                "metric": "diagonal_norm",
                "value": size,
                "stderr": error,
                "estimator": d.estimator,
                "converged": d.converged,
            }
        )
        mine.append(
            {
                "metric": "trace",
                "value": d.trace,
                "stderr": d.trace_stderr,
                "estimator": d.estimator,
                "converged": d.trace_converged,
            }
        )
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
            errors = torch.tensor(
                [d.trace_stderrs[n] or 0.0 for n in problem.layout.names], dtype=torch.float64
            )
        fine = errors is None or bool(errors.norm() <= self.options.rtol * traces.norm())
        kept = (
            d.values.to(self.history.dtype),
            None if d.stderr is None else d.stderr.to(self.history.dtype),
        )
        return Summary(
            int(common.get("client", -1)),
            problem.n,
            {"diag": kept, "tensor_trace": (traces, errors)},
            d.estimator,
            {"diag": d.converged, "tensor_trace": fine},
            space,
        )

    def _split(self, vectors: Tensor, owners: list[int], common: Row, pool: Pool) -> list[Row]:
        rows: list[Row] = []
        if self._whole.batch_dependent:
            self.history.note(
                self.stored.round,
                "the model's outputs depend on the batch: the curvature shares do not add up "
                "to the whole",
            )
        units = [
            Unit(self.stored.round, "share", tuple(owners[i : i + TOGETHER]), vectors=vectors)
            for i in range(0, len(owners), TOGETHER)
        ]
        for unit, part in zip(units, pool.map(units), strict=True):
            rows += [{**common, **row} for mine in part.rows.values() for row in mine]
            self._told(unit)
        return rows

    def _share(self, whole: Problem, vectors: Tensor, client: int) -> list[Row]:
        problem = self.history.problem(
            (whole.w, whole.buffers),
            self.history.pool.train_slice(client),
            f"client:{client}/train",
        )
        h = problem.hessian()
        about: Row = {
            "client": client,
            "scope": "client",
            "slice": problem.slice_name,
            "n_examples": problem.n,
            "estimator": "exact",
        }
        rows: list[Row] = []
        for i, v in enumerate(vectors, start=1):
            own = float(v.double() @ h(v))
            rows += [
                {**about, "metric": "curvature", "index": i, "value": own},
                {
                    **about,
                    "metric": "curvature_share",
                    "index": i,
                    "value": own * problem.n / whole.n,
                },
            ]
        return rows
