"""How alike the clients' loss surfaces are: norms and directions of their Hessians, their sharpest directions.

H_N and H_D of Mendieta et al., "Local Learning Matters" (CVPR 2022), equations 3 and 4, as the paper defines them and as
its released code computes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pandas as pd
import torch
from pydantic import Field
from torch import Tensor

from fldiag.diagnostics.comparison import Summary, matching_rows, overlap_rows
from fldiag.diagnostics.diagonal import Diagonal, Estimate, diagonal_of
from fldiag.diagnostics.history import History
from fldiag.diagnostics.problem import Problem
from fldiag.diagnostics.spectrum import eigenpairs, eigenvalue_rows, loss_row
from fldiag.diagnostics.stored import Stored
from fldiag.errors import FldiagError
from fldiag.registry import diagnostic
from fldiag.results.table import table

Progress = Callable[[int, int, str], None]
Row = dict[str, Any]
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

    def diagonal(self, problem: Problem, progress: Progress) -> Diagonal:
        return diagonal_of(problem, estimate=self.estimate, rtol=self.rtol, max_products=self.max_products,
                           deflate=self.deflate, seed=self.seed, progress=progress)


@diagnostic("matching", on="run")
def matching(history: History, progress: Progress | None = None, *, data: Literal["both", "client", "global"] = "both",
             k: Annotated[int, Field(ge=0)] = 5, split: bool = True, every_round: bool = False, estimate: Estimate = "auto",
             rtol: Annotated[float, Field(gt=0, lt=1)] = 0.02, max_products: Annotated[int, Field(ge=2)] = 200,
             deflate: Annotated[int, Field(ge=0)] = 20, tol: Annotated[float, Field(gt=0, lt=1)] = 1e-3,
             seed: int = 0) -> pd.DataFrame:
    """Cross-client Hessian matching: H_N and H_D, top eigenvalues and traces, overlap of the sharpest directions.

    Hessians H_k of the clients' trained weights, on each client's own training data (``data`` client) or on all clients'
    (global); by default both. Rows:

    - ``H_N`` (||D_k|| - ||D_j||)^2 and ``H_D`` <D_k, D_j> / (||D_k|| ||D_j||) of every pair (scope pair), and their means
      over ordered pairs (scope global) without and with the pairs k = j (column ``self_pairs``; they add 0 and 1, so
      with C clients H_N shrinks by (C-1)/C). Column ``diag_mode``: D is the ``diag``onal (the paper's form), or has one
      trace for every parameter tensor (``tensor_trace``; the released code's form, with global data and self pairs).
    - of every client, and of the aggregated model on global data: ``loss``, the top ``k`` ``eigenvalue`` with residuals
      (lambda_max is index 1), ``eigenvalue_ratio``, ``trace`` (H_T), ``diagonal_norm``.
    - ``eigenspace_overlap`` of the top-k eigenspaces on own data (global if not asked for): the mean squared cosine of the
      principal angles (``principal_angle``, by index); 1 for the same space, about k / P by chance, P weights. Of every
      pair and its mean; of every client with the aggregated model as ``global_overlap``.
    - with ``split``: for the top k eigenvectors v of the aggregated model's Hessian H on global data (column index),
      ``curvature`` v'H_k v of every client's own data, and ``curvature_share`` p_k v'H_k v, p_k the client's share of the
      examples: they sum up to the eigenvalue.

    Diagonals and traces are exact where ``diagonal`` is; else estimates with the same random probes for all clients
    (``rtol``, ``max_products``, ``deflate`` as there), and the entries of a diagonal are then rough: column ``converged``,
    and rows ``diagonal_error``, the relative error of D. Of the last round with client weights, or all with
    ``every_round``. Cost a client: about 4 Hessian-vector products on own and on global data, and one spectrum.

    Raises FldiagError when no round has client weights, or no client's Hessian can be computed.
    """
    options = Options(k, tol, estimate, rtol, max_products, deflate, seed)
    places: list[Data] = ["client", "global"] if data == "both" else [data]
    rows: list[Row] = []
    for stored in history.each() if every_round else [history.last()]:
        if stored.complete:
            rows += [{"masked": row["value"] is None, **row, "round": stored.round}
                     for row in _Round(history, stored, options, progress).rows(places, split)]
    return table([*rows, *history.notes], **history.common)


class _Round:
    """One round's rows; a client whose Hessian cannot be computed is noted and left out."""

    def __init__(self, history: History, stored: Stored, options: Options, progress: Progress | None):
        self.history, self.stored, self.options = history, stored, options
        self._progress, self._done, self._total = progress, 0, 1

    def rows(self, places: list[Data], split: bool) -> list[Row]:
        history, stored, options = self.history, self.stored, self.options
        owners = [c for c in range(len(history.parts)) if history.pool.own(c).stop > history.pool.own(c).start]
        self._total = len(places) * len(stored.ids) + 1 + (len(owners) if split and options.k else 0)
        rows: list[Row] = []
        spaces: dict[int, Tensor] = {}
        top: Tensor | None
        common: Row
        for place in places:
            found = self._clients(place, spectrum=place == places[0], rows=rows)
            spaces |= {s.client: s.eigenvectors for s in found if s.eigenvectors is not None}
            rows += matching_rows(found, place, self._slice(place))
        whole = history.problem((stored.aggregated, stored.buffers), history.pool.clients, "train", moment="aggregated",
                                scope="global")
        top, common = None, {}
        try:
            common, summary = self._of(whole, True, rows, "global model")
            top = summary.eigenvectors
        except FldiagError as error:
            history.note(stored.round, f"the aggregated model is left out: {error.what}")
        if spaces:
            rows += overlap_rows(spaces, top, self._slice(places[0]))
        if top is not None and split:
            rows += self._split(whole, top, owners, common)
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

    def _clients(self, place: Data, spectrum: bool, rows: list[Row]) -> list[Summary]:
        history, stored = self.history, self.stored
        found: list[Summary] = []
        first: FldiagError | None = None
        known = {(n["client"], n["round"]) for n in history.notes}
        for j, client in enumerate(stored.ids):
            where, name = (history.pool.clients, "train") if place == "global" else (
                history.pool.own(client), f"client:{client}/train")
            try:
                problem = history.problem(stored.client(j), where, name, moment="trained", scope="client", client=client)
                found.append(self._of(problem, spectrum, rows, f"client {client}", data=place)[1])
            except FldiagError as error:
                first = first or error
                if (client, stored.round) not in known:  # one complaint a client will do
                    history.note(stored.round, f"client {client} is left out: {error.what}", client)
            self._done += 1
        if first and not found:
            raise first
        if len(found) == 1:
            history.note(stored.round, f"only client {found[0].client} on {place} data: there are no pairs to compare")
        return found

    def _of(self, problem: Problem, spectrum: bool, rows: list[Row], who: str, **columns: Any) -> tuple[Row, Summary]:
        """Rows of one model's Hessian on one slice, appended only when all of them could be made."""
        options, common = self.options, {**problem.common, **columns}
        if not bool(torch.isfinite(problem.w).all()):
            raise FldiagError("its weights are not finite", "choose rounds from before the training diverged")
        mine = [loss_row(problem)]
        d = options.diagonal(problem, self._tell(who))
        assert d.values is not None  # entries were asked for
        norm, error = float(torch.linalg.vector_norm(d.values)), None
        if d.stderr is not None:
            error = float(torch.linalg.vector_norm(d.stderr))
            mine.append({"metric": "diagonal_error", "value": error / norm if norm else None, "estimator": d.estimator})
        mine.append({"metric": "diagonal_norm", "value": norm, "stderr": error, "estimator": d.estimator,
                     "converged": d.converged})
        mine.append({"metric": "trace", "value": d.trace, "stderr": d.trace_stderr, "estimator": d.estimator,
                     "converged": d.trace_stderr is None or d.trace_stderr <= options.rtol * abs(d.trace)})
        vectors = None
        if spectrum and options.k:
            # strict: the overlaps are of the vectors
            pairs = eigenpairs(problem, options.k, tol=options.tol, max_products=max(100, 8 * options.k, options.max_products),
                               strict=True, seed=options.seed, progress=self._tell(who))
            mine += eigenvalue_rows(pairs)
            vectors = pairs.vectors.to(self.history.dtype)
        rows += [{**common, **row} for row in mine]
        return common, self._summary(problem, d, vectors, common)

    def _summary(self, problem: Problem, d: Diagonal, vectors: Tensor | None, common: Row) -> Summary:
        assert d.values is not None
        traces = torch.tensor([d.traces[n] for n in problem.layout.names], dtype=torch.float64)
        errors = None
        if d.stderr is not None:
            errors = torch.tensor([d.trace_stderrs[n] or 0.0 for n in problem.layout.names], dtype=torch.float64)
        fine = errors is None or bool(errors.norm() <= self.options.rtol * traces.norm())
        kept = d.values.to(self.history.dtype), None if d.stderr is None else d.stderr.to(self.history.dtype)
        return Summary(int(common.get("client", -1)), problem.n, {"diag": kept, "tensor_trace": (traces, errors)},
                       d.estimator, {"diag": d.converged, "tensor_trace": fine}, vectors)

    def _split(self, whole: Problem, vectors: Tensor, owners: list[int], common: Row) -> list[Row]:
        history, rows = self.history, []
        if whole.batch_dependent:
            history.note(self.stored.round, "the model's outputs depend on the batch: curvature shares do not sum up")
        self._done += 1
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
