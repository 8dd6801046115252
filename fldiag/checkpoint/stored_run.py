"""A run on disk as its readers see it: nothing is read before it is asked for, and everything is verified when it is."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pandas as pd
import pydantic

from fldiag import registry
from fldiag.checkpoint import schema
from fldiag.checkpoint.schema import Checkpoint
from fldiag.config import Config
from fldiag.errors import FldiagError, counted
from fldiag.results import files
from fldiag.results.card import card
from fldiag.results.select import SPLITS, split_of
from fldiag.results.shares import wilson
from fldiag.results.table import Row, table
from fldiag.user_code import consent

if TYPE_CHECKING:
    from fldiag.checkpoint.client_states import ClientStates


#: What is said of a folder that keeps no weights (``StoredRun.is_record``).
RECORD = "is the record of a run: its metrics and answers, without weights"


class StoredRun:
    """A run folder. Reading is lazy; ``metrics`` is a tidy table. ``rows``: metrics that the stored table does not have yet.
    ``model`` and ``data``: those that its checkpoints get instead of what the run names. ``allow_code``: user code that may be
    imported although only the run names it."""

    def __init__(self, path: Path, index: dict[str, Any], rows: Sequence[Row] = ()):
        self.path, self.index, self.rows = path, index, list(rows)
        self.name = path.name
        self.model: Any = None
        self.data: Any = None
        self.allow_code: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.status}, {counted(self.done, 'round')})"

    def _repr_html_(self) -> str:
        config = self.index.get("config", {})
        chosen = {k: config.get(k, {}).get("name") for k in ("method", "model", "data")}
        facts = {
            "folder": self.path,
            "status": self.status,
            "rounds": f"{self.done} of {config.get('rounds', '?')}",
            **chosen,
            "seed": config.get("seed"),
        }
        wanted = "metric == 'accuracy' and moment == 'aggregated' and scope == 'global' and slice == @split and n_examples > 0"
        metrics = self.metrics if self.has_metrics else pd.DataFrame()
        split = split_of(metrics)
        if len(metrics) and len(scores := metrics.query(wanted)):
            last = scores.sort_values("round").iloc[-1]
            low, high = wilson(round(last["value"] * last["n_examples"]), int(last["n_examples"]))
            name = f"{SPLITS[split]} accuracy"
            facts[name] = (
                f"{last['value']:.1%} (95 % interval {low:.1%} to {high:.1%}, {last['n_examples']} examples)"
            )
        return card("Run", facts)

    def allow(self, code: str | Iterable[str]) -> Self:
        """The run with the consent to import this user code (``pkg.mod:name``, one or several). Raises FldiagError for another
        form."""
        allowed = self.allow_code | consent(code)
        if allowed == self.allow_code:
            return self
        run = copy(self)
        run.allow_code = allowed
        return run

    @property
    def status(self) -> str:
        """running, interrupted, finished or diverged."""
        return str(self.index["status"])

    @property
    def done(self) -> int:
        """Rounds trained so far (and safely stored)."""
        return int(self.index["done"])

    @property
    def config(self) -> Config:
        """What was trained. Raises FldiagError for rounds of another program, which have no config of fldiag."""
        if isinstance(self.index.get("origin"), dict):
            raise FldiagError(
                f"run {self.path} was trained by another program, so it has no config of fldiag",
                "it can be diagnosed (fldiag forgetting, matching, drift, landscape, spectrum), not trained",
                usage=True,
            )
        try:
            return Config.from_stored(self.index["config"], self.allow_code)
        except pydantic.ValidationError as error:
            why = registry.explain(error, "config", Config).what
            raise FldiagError(
                f"{self.path / 'run.json'}: its config is not valid ({why})",
                "the file was edited; restore it or train again",
            ) from None

    @property
    def method_version(self) -> int:
        """Of the formulas of the method with which the run was trained."""
        return int(self.index["provenance"].get("method_version", 1))

    @property
    def origin(self) -> dict[str, Any]:
        """Of rounds that another program trained: ``recipe`` (whence they are), ``notes`` (what was missing), ``names`` and
        ``examples`` of the clients by their number, and those ``outside`` the partition; empty for runs of fldiag. Raises
        FldiagError when it was edited."""
        found = self.index.get("origin")
        if found is None:
            return {}
        try:
            return {
                "recipe": dict(found["recipe"]),
                "notes": [str(note) for note in found["notes"]],
                "names": {int(k): str(v) for k, v in found["names"].items()},
                "examples": {int(k): int(v) for k, v in found["examples"].items()},
                "outside": [int(k) for k in found.get("outside", [])],
            }
        except (KeyError, TypeError, ValueError, AttributeError):
            raise FldiagError(
                f"{self.path / 'run.json'}: its origin is not valid",
                "the file was edited; convert again",
            ) from None

    @property
    def is_record(self) -> bool:
        """Whether only metrics and answers are kept here (``fldiag figures --records``), and no weights."""
        return self.index.get("record") is True

    @property
    def rounds(self) -> list[int]:
        """Rounds that have a checkpoint; round r is the state after r rounds of training."""
        return sorted(int(Path(f).stem) for f in self.index["files"] if f.startswith("rounds/"))

    def some_rounds(self) -> list[int]:
        """``rounds``. Raises FldiagError, with the reason, when there are none."""
        if not self.rounds and self.is_record:
            raise FldiagError(
                f"{self.path} {RECORD}",
                "ask where it was trained, or train it again with another --out",
                usage=True,
            )
        if not self.rounds:
            raise FldiagError(f"run {self.path} has no checkpoint yet", "train at least one round")
        return self.rounds

    def checkpoint(self, round: int | None = None) -> Checkpoint:
        """The checkpoint of a round (default: the last). Raises FldiagError if it is missing or was changed."""
        rounds = self.some_rounds()
        r = rounds[-1] if round is None else round
        if r not in rounds:
            raise FldiagError(
                f"run {self.path} has no checkpoint of round {r}",
                f"it has rounds {rounds[0]}..{rounds[-1]} (checkpoint.every = "
                f"{self.index['config']['checkpoint']['every']})",
                usage=True,
            )
        return replace(
            schema.read(self.verified(f"rounds/{r:04d}.pt")),
            model=self.model,
            data=self.data,
            allow_code=self.allow_code,
        )

    @property
    def has_metrics(self) -> bool:
        """Whether there are metrics to read."""
        return bool(self.rows) or isinstance(self.index.get("metrics"), str)

    @property
    def metrics(self) -> pd.DataFrame:
        """Raises FldiagError when the table is missing or is not the one that training wrote."""
        if not self.has_metrics:
            raise FldiagError(
                f"run {self.path} has no table of metrics", "train at least one round"
            )
        stored = self.index.get("metrics")
        if not self.rows and stored is not None:
            return self._table(stored)
        return self._as_table([*self.stored_rows(), *self.rows])

    @property
    def common(self) -> dict[str, Any]:
        """What stands in every row of this run's tables."""
        config = self.index["config"]
        return {
            "run": self.name,
            "method": config.get("method", {}).get("name"),
            "seed": config.get("seed"),
        }

    def _as_table(self, rows: Sequence[Row]) -> pd.DataFrame:
        return table(rows, **self.common)

    def stored_rows(self) -> list[Row]:
        """The metrics of the stored table, as ``add_metrics`` takes them."""
        name = self.index.get("metrics")
        if name is None:
            return []
        frame = self._table(name).drop(columns=["run", "method", "seed"]).astype(object)
        return [
            {str(k): v for k, v in row.items() if not pd.isna(v)}
            for row in frame.to_dict("records")
        ]

    @property
    def metrics_digest(self) -> str:
        """What tells the metrics of a run from others."""
        rows = files.sha256_of(json.dumps(self.rows, default=str).encode()) if self.rows else ""
        return str(self.index["files"].get(self.index.get("metrics"))) + rows

    def _table(self, name: str) -> pd.DataFrame:
        path = self.verified(name)
        try:
            return pd.read_parquet(path)
        except Exception as error:  # a table that run.json vouches for and is none can make the reader raise anything
            raise FldiagError(
                f"{path} cannot be read: {type(error).__name__}", "restore it, or train again"
            ) from None

    def verified(self, name: str) -> Path:
        """The path of a listed file after its sha256 was checked."""
        path = self.path / name
        if not os.path.isfile(path):
            raise FldiagError(
                f"{path} is listed in run.json but is not there", "restore it, or train again"
            )
        if files.sha256(path) != self.index["files"].get(name):
            raise FldiagError(
                f"{path} is not the file this run wrote (its sha256 differs from run.json)",
                "restore the original file; to diagnose this one as it is, copy it out of the run folder",
            )
        return path

    @property
    def recorded(self) -> list[int]:
        """Rounds whose local steps were recorded."""
        return sorted(int(Path(f).stem) for f in self.index["files"] if f.startswith("steps/"))

    def steps(self, round: int | None = None) -> pd.DataFrame:
        """The recorded numbers of the local steps (``metrics.steps = true``) of a round, or of all: a row for each sampled
        client, step (``index``, from 1) and metric.

        - ``loss``: of the minibatch, with all terms of the method's local loss, and ``grad_norm`` of its gradient g_u, where
          the method takes that (at w_k + e), before corrections and clipping; ``update_norm`` ||w_k - w_g|| after the step.
        - of a proximal loss L_p at w_k, the beginning of the step, on the same minibatch: ``proximal_loss``, and
          ``cos_gu_gp``: the cosine of g_u and the gradient g_p of L_p, over all parameters and over the head's (layer
          part:head). None where g_p is rounding noise, as in a round's first step. Column ``proximal`` names L_p: kl:TAU,
          l2, or own: that of the method that FedSOL is combined with. With ``metrics.proximal = "own"`` these are what the
          method computes anyway, if it has such a loss (FedSOL that perturbs the head with kl: the head's cosine only; a
          projection: of the projected gradient); with kl or l2, all of them for any method.
        - ``lambda_mean`` by layer: the mean of the adaptive strengths Lambda of FedSOL's perturbation at w_k, and in column
          ``scaled`` times the root of the layer's size (1 when all its entries moved alike).

        Raises FldiagError when there are none, or a table is missing or was changed.
        """
        there = self.recorded
        if not there or (round is not None and round not in there):
            raise FldiagError(
                f"run {self.path} recorded no local steps"
                + (f" of round {round}" if there else ""),
                f"it has those of {counted(len(there), 'round')} up to {there[-1]}"
                if there
                else "train with --set metrics.steps=true",
                usage=True,
            )
        return pd.concat(
            [self._table(f"steps/{r:04d}.parquet") for r in (there if round is None else [round])],
            ignore_index=True,
        )

    @cached_property
    def states(self) -> ClientStates:
        """What the clients carry from round to round, as stored last; every row is read when it is asked for."""
        from fldiag.checkpoint.client_states import ClientStates  # imports PyTorch

        return ClientStates(self.path, self.index["state"], self.verified)

    @property
    def server_state(self) -> dict[str, Any]:
        """The server's weights, buffers and state as stored last."""
        from fldiag.checkpoint.tensor_files import read_tensors  # imports PyTorch

        found: dict[str, Any] = read_tensors(self.verified(self.index["state"]["server"]))
        return found
