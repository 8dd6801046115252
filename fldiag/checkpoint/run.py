"""A run on disk: ``run.json`` is the one authority; what it does not list does not count.

::

    RUN/run.json          config, status, rounds done, every file with its sha256
    RUN/rounds/0030.pt    checkpoint of a round
    RUN/state/…           what training needs to go on: server and client state, only the newest
    RUN/metrics/0030.parquet  one row a number per round, up to that round; only the newest (0030-1: the second of that round)
    RUN/steps/0030.parquet  numbers of the local steps of that round, when they are recorded (metrics.steps)
    RUN/partition.npz     indices of every client's examples

Order of writing in a round: new files, then ``run.json``, then removal of superseded state. A kill at any
moment leaves the previous ``run.json`` with all its files.
"""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pydantic
import torch
from torch import Tensor

from fldiag import registry
from fldiag.checkpoint import schema
from fldiag.checkpoint.index import SCHEMA, read_index
from fldiag.checkpoint.schema import Checkpoint
from fldiag.checkpoint.tensor_files import read_tensors
from fldiag.config import Config
from fldiag.errors import FldiagError
from fldiag.results import files

#: What training itself writes into these folders (with the temporary names of a write that was cut off): nothing else is
#: ever removed from them.
_TABLE = r"\.?\d+(-\d+)?\.parquet.*"
OWN = {"state": r"\.?(server|client-\d+)-\d+\.pt.*", "metrics": _TABLE, "steps": _TABLE}


class Run:
    """A run folder. Reading is lazy; ``metrics`` is a tidy table."""

    def __init__(self, path: Path, index: dict[str, Any]):
        self.path, self.index = path, index

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.status}, {self.done} rounds)"

    @staticmethod
    def create(path: Path, config: Config, partition: bytes, provenance: dict[str, Any]) -> Run:
        """A new run folder. Raises FldiagError when the folder cannot be written."""
        try:
            (path / "rounds").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FldiagError(f"cannot create {path}: {error.strerror}", "choose another folder with --out") from None
        run = Run(path, {"schema": SCHEMA, "config": config.model_dump(mode="json"), "hash": config.hash,
                         "status": "running", "done": 0, "state": {}, "files": {}, "provenance": provenance})
        run.put("partition.npz", lambda f: f.write(partition))
        run.commit()
        return run

    @staticmethod
    def open(path: str | Path) -> Run:
        """Raises FldiagError when there is no run.json, or none that can be read."""
        return Run(*read_index(Path(path)))

    @property
    def status(self) -> str:
        return str(self.index["status"])

    @property
    def done(self) -> int:
        """Rounds trained so far (and safely stored)."""
        return int(self.index["done"])

    @property
    def config(self) -> Config:
        if isinstance(self.index.get("origin"), dict):
            raise FldiagError(f"run {self.path} was trained by another program, so it has no config of fldiag",
                              "it can be diagnosed (fldiag forgetting, matching, drift, landscape, spectrum), not trained",
                              usage=True)
        try:
            return Config.stored(self.index["config"])
        except pydantic.ValidationError as error:
            why = registry.explain(error, "config", Config).what
            raise FldiagError(f"{self.path / 'run.json'}: its config is not valid ({why})",
                              "the file was edited; restore it or train again") from None

    @property
    def method_version(self) -> int:
        """Of the formulas of the method with which the run was trained."""
        return int(self.index["provenance"].get("method_version", 1))

    @property
    def origin(self) -> dict[str, Any]:
        """Of rounds that another program trained: ``recipe`` (whence they are), ``notes`` (what was missing), ``names`` and
        ``examples`` of the clients by their number; empty for runs of fldiag. Raises FldiagError when it was edited."""
        found = self.index.get("origin")
        if found is None:
            return {}
        try:
            return {"recipe": dict(found["recipe"]), "notes": [str(note) for note in found["notes"]],
                    "names": {int(k): str(v) for k, v in found["names"].items()},
                    "examples": {int(k): int(v) for k, v in found["examples"].items()}}
        except (KeyError, TypeError, ValueError, AttributeError):
            raise FldiagError(f"{self.path / 'run.json'}: its origin is not valid",
                              "the file was edited; convert again") from None

    @property
    def rounds(self) -> list[int]:
        """Rounds that have a checkpoint; round r is the state after r rounds of training."""
        return sorted(int(Path(f).stem) for f in self.index["files"] if f.startswith("rounds/"))

    def checkpoint(self, round: int | None = None) -> Checkpoint:
        """The checkpoint of a round (default: the last). Raises FldiagError if it is missing or was changed."""
        rounds = self.rounds
        if not rounds:
            raise FldiagError(f"run {self.path} has no checkpoint yet", "train at least one round")
        r = rounds[-1] if round is None else round
        if r not in rounds:
            raise FldiagError(f"run {self.path} has no checkpoint of round {r}",
                              f"it has rounds {rounds[0]}..{rounds[-1]} (checkpoint.every = "
                              f"{self.index['config']['checkpoint']['every']})", usage=True)
        return schema.read(self.verified(f"rounds/{r:04d}.pt"))

    @property
    def metrics(self) -> pd.DataFrame:
        """Raises FldiagError when the table is missing or is not the one that training wrote."""
        name = self.index.get("metrics")
        if not isinstance(name, str):
            raise FldiagError(f"run {self.path} has no table of metrics", "train at least one round")
        return self._table(name)

    def _table(self, name: str) -> pd.DataFrame:
        path = self.verified(name)
        try:
            return pd.read_parquet(path)
        except Exception as error:  # a table that run.json vouches for and is none can make the reader raise anything
            raise FldiagError(f"{path} cannot be read: {type(error).__name__}", "restore it, or train again") from None

    def verified(self, name: str) -> Path:
        """The path of a listed file after its sha256 was checked."""
        path = self.path / name
        if not os.path.isfile(path):
            raise FldiagError(f"{path} is listed in run.json but is not there", "restore it, or train again")
        if files.sha256(path) != self.index["files"].get(name):
            raise FldiagError(f"{path} is not the file this run wrote (its sha256 differs from run.json)",
                              "restore the original file; to diagnose this one as it is, copy it out of the run folder")
        return path

    def put(self, name: str, writer: Any) -> None:
        self.index["files"][name] = files.write_atomic(self.path / name, writer)

    def put_tensors(self, name: str, content: dict[str, Any]) -> None:
        self.put(name, lambda f: torch.save(content, f))

    def commit(self) -> None:
        text = json.dumps(self.index, indent=1, sort_keys=True)
        files.write_atomic(self.path / "run.json", lambda f: f.write(text.encode()))

    def put_metrics(self, frame: pd.DataFrame) -> None:
        """A second table of the same round gets a name of its own: the one that run.json lists stays until that is written."""
        buffer = io.BytesIO()
        frame.to_parquet(buffer, index=False)
        before, name = self.index.get("metrics"), f"metrics/{frame['round'].max():04d}"
        found = re.fullmatch(re.escape(name) + r"(?:-(\d+))?\.parquet", str(before))
        self.index["files"].pop(before, None)
        self.index["metrics"] = f"{name}.parquet" if found is None else f"{name}-{int(found[1] or 0) + 1}.parquet"
        self.put(self.index["metrics"], lambda f: f.write(buffer.getvalue()))

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
            raise FldiagError(f"run {self.path} recorded no local steps" + (f" of round {round}" if there else ""),
                              f"it has those of {len(there)} rounds up to {there[-1]}" if there else
                              "train with --set metrics.steps=true", usage=True)
        return pd.concat([self._table(f"steps/{r:04d}.parquet") for r in (there if round is None else [round])],
                         ignore_index=True)

    def put_steps(self, round: int, frame: pd.DataFrame) -> None:
        buffer = io.BytesIO()
        frame.to_parquet(buffer, index=False)
        self.put(f"steps/{round:04d}.parquet", lambda f: f.write(buffer.getvalue()))

    # -- state for resuming: one file for the server, one a client, named by the round that wrote it

    def put_state(self, round: int, server: dict[str, Any], clients: dict[int, dict[str, Tensor]]) -> None:
        """Store the training state after ``round`` rounds; ``clients`` are those that changed since the last call."""
        old = dict(self.index["state"])
        name = f"state/server-{round:04d}.pt"
        self.put_tensors(name, server)
        new = {**old, "server": name}
        for i, tensors in clients.items():
            new[str(i)] = f"state/client-{i:05d}-{round:04d}.pt"
            self.put_tensors(new[str(i)], tensors)
        self.index["state"] = new
        self._superseded = [f for f in old.values() if f not in new.values()]
        for f in self._superseded:
            self.index["files"].pop(f, None)

    def clean(self) -> None:
        """Remove state, metrics and steps that the committed run.json does not list."""
        for folder in ("state", "metrics", "steps"):
            for f in (self.path / folder).glob("*"):
                ours = re.fullmatch(OWN[folder], f.name) and f.is_file()
                if ours and f"{folder}/{f.name}" not in self.index["files"]:
                    f.unlink(missing_ok=True)

    def get_state(self) -> tuple[dict[str, Any], dict[int, dict[str, Tensor]]]:
        """(server, clients) as stored last."""
        read = {key: read_tensors(self.verified(name)) for key, name in self.index["state"].items()}
        return read.pop("server"), {int(k): v for k, v in read.items()}


def verify(path: Path) -> None:
    """A checkpoint that lies in a run must be the one that the run wrote; elsewhere there is nothing to compare it with.

    Raises FldiagError when it is not.
    """
    run = Path(os.path.realpath(path)).parent.parent
    if path.parent.name == "rounds" and os.path.isfile(run / "run.json"):
        Run.open(run).verified(f"rounds/{path.name}")
