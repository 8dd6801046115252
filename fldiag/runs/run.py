"""A run on disk: ``run.json`` is the one authority; what it does not list does not count.

::

    RUN/run.json          config, status, rounds done, every file with its sha256, and a digest of all that
    RUN/journal.jsonl     while it is trained: what changed in run.json since it was written, and the metrics (journal.py)
    RUN/owner.json        while it is trained: by which process; owner.lock is locked by it (owner.py)
    RUN/rounds/0030.pt    checkpoint of a round (.safetensors where this torch reads .pt files with consent only: trust.py)
    RUN/state/…           what training needs to go on: server and client state, only the newest
    RUN/metrics/0030.parquet  one row a number per round, up to that round; only the newest (0030-1: the second of that round)
    RUN/steps/0030.parquet  numbers of the local steps of that round, when they are recorded (metrics.steps)
    RUN/partition.npz     indices of every client's examples
    RUN/lost/…            of a recorded run that went on after its journal was damaged: the rounds after that (recording.py)

Order of writing in a round: new files, then a line of the journal, then removal of superseded state. A kill at any
moment leaves ``run.json`` and journal as they were, with all the files that they list. When training ends, and when the journal
has grown long, ``run.json`` is written anew, whole, and the journal goes.
"""

from __future__ import annotations

import io
import json
import operator
import os
import re
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pandas as pd
import pydantic

from fldiag import registry
from fldiag.errors import FldiagError, counted
from fldiag.results import files
from fldiag.results.table import Row, table
from fldiag.runs import schema
from fldiag.runs.index import CONTINUED, WHOLE, read_index, write_index
from fldiag.runs.journal import NAME, Journal, snapshot
from fldiag.runs.schema import Checkpoint
from fldiag.runs.trust import reads_pt
from fldiag.user_code import consent

if TYPE_CHECKING:
    from torch import Tensor

    from fldiag.config import Config
    from fldiag.runs.client_states import ClientStates

#: What is said of a folder that keeps no weights (``Run.is_record``).
RECORD = "is the record of a run: its metrics and answers, without weights"


#: What training itself writes into these folders (with the temporary names of a write that was cut off): nothing else is
#: ever removed from them.
_TABLE = r"\.?\d+(-\d+)?\.parquet.*"
OWN = {
    "state": r"\.?(server-\d+\.(pt|safetensors)|clients-\d+\.safetensors).*",
    "metrics": _TABLE,
    "steps": _TABLE,
    "rounds": r"\.?\d+\.(pt|safetensors)(\.\d+\.tmp)?",
    "": r"\.(run\.json|journal\.jsonl|partition\.npz|owner\.json)\.\w+\.tmp",
}
#: Bytes of the journal after which run.json is written whole, unless the run's index and table are larger still: so the cost of
#: a round does not grow with their number.
LONG = 2**20


class Run:
    """A run folder: what training wrote, read when it is asked for and verified against run.json.

    ``Run.open(folder)`` or ``fldiag.load(folder)`` make one. ``metrics`` is a tidy table of numbers a round, ``steps(r)`` one of
    the local steps where they were recorded, ``checkpoint(r)`` the weights after round r; ``model`` and ``data`` are those that
    its checkpoints get instead of what the run names.

    Args:
        path: the folder.
        index: the content of its run.json.
        rows: metrics that the stored table does not have yet.

    Raises:
        FldiagError: from what reads: a file is missing, or is not the one that the run wrote.

    >>> import tempfile, fldiag
    >>> start = fldiag.Config.load("digits", rounds=2, model__name="mlp", clients__per_round=2, train__epochs=1)
    >>> run = fldiag.train(start, out=tempfile.mkdtemp() + "/run")
    >>> run.rounds, run.checkpoint().round, sorted(run.metrics["round"].unique().tolist())
    ([1, 2], 2, [1, 2])
    """

    def __init__(self, path: Path, index: dict[str, Any], rows: Sequence[Row] = ()):
        self.path, self.index, self.rows = path, index, list(rows)
        self.name = path.name
        self.model: Any = None
        self.data: Any = None
        self.allow_code: frozenset[str] = frozenset()
        self._new: list[Row] = []  # those of the rows that the journal does not have yet
        self._journal: Journal | None = None
        self._on_disk = snapshot(index) if "state" in index else {}
        self._unsettled: set[Path] = set()

    @staticmethod
    def create(path: Path, config: Config, partition: bytes, provenance: dict[str, Any]) -> Run:
        """A new run folder. Raises FldiagError when the folder cannot be written."""
        try:
            (path / "rounds").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FldiagError(
                f"cannot create {path}: {error.strerror}", "choose another folder with --out"
            ) from None
        run = Run(
            path,
            {
                "schema": WHOLE,
                "config": config.model_dump(mode="json"),
                "hash": config.hash,
                "status": "running",
                "done": 0,
                "state": {},
                "files": {},
                "provenance": provenance,
            },
        )
        run.put("partition.npz", lambda f: f.write(partition))
        run.commit()
        return run

    @staticmethod
    def open(path: str | Path) -> Run:
        """Raises FldiagError when there is no run.json, or none that can be read."""
        return Run(*read_index(Path(path)))

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.status}, {counted(self.done, 'round')})"

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
        from fldiag.config import (
            Config,
        )  # only here: its schema takes a while, and what is read of a run seldom needs it

        try:
            return Config.from_stored(self.index["config"], self.allow_code)
        except pydantic.ValidationError as error:
            why = registry.explain(error, "config", ()).what
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
        ``examples`` of the clients by their number, and those ``outside`` the partition; empty for runs of fldiag.
        Raises FldiagError when it was edited."""
        origin = self.index.get("origin")
        if origin is None:
            return {}
        try:
            return {
                "recipe": dict(origin["recipe"]),
                "notes": [str(note) for note in origin["notes"]],
                "names": {int(k): str(v) for k, v in origin["names"].items()},
                "examples": {int(k): int(v) for k, v in origin["examples"].items()},
                "outside": [int(k) for k in origin.get("outside", [])],
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

    def round_file(self, round: int) -> str:
        """The name of the checkpoint of a round, as the index lists it."""
        name = f"rounds/{round:04d}"
        return (
            f"{name}.safetensors" if f"{name}.safetensors" in self.index["files"] else f"{name}.pt"
        )

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
            schema.read(self.verified(self.round_file(r))),
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
        name = self.index.get("metrics")
        if not self.rows and name is not None:
            return self._table(name)
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
        rounds = self.recorded
        if not rounds or (round is not None and round not in rounds):
            raise FldiagError(
                f"run {self.path} recorded no local steps"
                + (f" of round {round}" if rounds else ""),
                f"it has those of {counted(len(rounds), 'round')} up to {rounds[-1]}"
                if rounds
                else "train with --set metrics.steps=true",
                usage=True,
            )
        return pd.concat(
            [self._table(f"steps/{r:04d}.parquet") for r in (rounds if round is None else [round])],
            ignore_index=True,
        )

    @cached_property
    def states(self) -> ClientStates:
        """What the clients carry from round to round, as stored last; every row is read when it is asked for."""
        from fldiag.runs.client_states import ClientStates  # imports PyTorch

        return ClientStates(self.path, self.index["state"], self.verified)

    @property
    def server_state(self) -> dict[str, Any]:
        """The server's weights, buffers and state as stored last."""
        from fldiag.runs.tensor_files import read_tensors  # imports PyTorch

        state: dict[str, Any] = read_tensors(self.verified(self.index["state"]["server"]))
        return state

    # -- writing

    def put(self, name: str, writer: Any) -> None:
        """Write a file of the run and list it; ``writer`` gets the open file."""
        folder = (self.path / name).parent
        self._unsettled |= {folder} if folder.is_dir() else {folder, self.path}
        self.index["files"][name] = files.write_atomic(self.path / name, writer, settle=False)

    def put_tensors(self, stem: str, content: dict[str, Any]) -> str:
        """Write a file of tensors and list it: ``.pt``, or ``.safetensors`` where this process could not read that again.
        Returns its name."""
        import torch  # only here: who reads tables has no need of it
        from safetensors.torch import save

        from fldiag.runs.tensor_files import flatten

        if reads_pt():
            name = f"{stem}.pt"
            self.put(name, lambda f: torch.save(content, f))
        else:
            name, data = f"{stem}.safetensors", save(*flatten({"manifest": "", **content}))
            self.put(name, lambda f: f.write(data))
        return name

    def put_checkpoint(
        self, round: int, manifest: dict[str, Any], state: dict[str, Tensor], **tensors: Any
    ) -> None:
        """Write the checkpoint of a round and list it."""
        before = self.round_file(
            round
        )  # of a round that is written again, the ending may be another
        name = self.put_tensors(f"rounds/{round:04d}", schema.content(manifest, state, **tensors))
        if name != before:
            self.index["files"].pop(before, None)

    def add_metrics(self, rows: Sequence[Row]) -> None:
        """More metrics, written by the next ``append`` or ``commit``. They say nothing of run, method and seed."""
        self.rows += rows
        self._new += rows

    def drop_metrics(self, drop: Callable[[Row], bool]) -> bool:
        """Leave metrics out of the table. Whether it had such."""
        rows = [*self.stored_rows(), *self.rows]
        rest = [row for row in rows if not drop(row)]
        if len(rest) < len(rows):
            self.put_metrics(self._as_table(rest))
            self.rows.clear()
            self._new.clear()
        return len(rest) < len(rows)

    def append(self) -> None:
        """Write down what changed since the last time, in the journal, and remove the files that are listed no more."""
        if self._journal is None or self._journal.size > max(LONG, self._size()):
            self.commit(journal=True)
            return
        self._settle()
        self._journal.append(self._on_disk, self.index, self._new)
        self._done()

    def commit(self, *, journal: bool = False) -> None:
        """Write run.json whole, with the table of all metrics; ``journal``: it will be continued."""
        if self.rows:
            self.put_metrics(self.metrics)
        self._settle()
        index, begun = self.index, None
        if journal:
            begun = Journal(self.path / NAME, Journal.new_identity())
            index = {**index, "schema": CONTINUED, "journal": begun.identity}
        write_index(self.path, index)
        self.rows.clear()
        if begun is not None:
            begun.begin()
        else:
            (self.path / NAME).unlink(missing_ok=True)
        self._journal = begun
        self._done()

    def _settle(self) -> None:
        """Flush the names of new files to disk, before anything says that they are there."""
        files.settle(self._unsettled)
        self._unsettled.clear()

    def _done(self) -> None:
        """What is in memory is on disk: files that are listed no more can go."""
        for name in self._on_disk.get("files", {}).keys() - self.index["files"].keys():
            (self.path / name).unlink(missing_ok=True)
        self._on_disk = snapshot(self.index)
        self._new.clear()

    def _size(self) -> int:
        """Bytes of what ``commit`` writes, as it was written last."""
        names = ["run.json", self.index.get("metrics")]
        return sum((self.path / name).stat().st_size for name in names if name)

    def put_metrics(self, frame: pd.DataFrame) -> None:
        """A second table of the same round gets a name of its own: the one that run.json lists stays until that is written."""
        buffer = io.BytesIO()
        frame.to_parquet(buffer, index=False)
        before, name = self.index.get("metrics"), f"metrics/{frame['round'].max():04d}"
        match = re.fullmatch(re.escape(name) + r"(?:-(\d+))?\.parquet", str(before))
        self.index["files"].pop(before, None)
        self.index["metrics"] = (
            f"{name}.parquet" if match is None else f"{name}-{int(match[1] or 0) + 1}.parquet"
        )
        self.put(self.index["metrics"], lambda f: f.write(buffer.getvalue()))

    def put_steps(self, round: int, frame: pd.DataFrame) -> None:
        """Write the table of a round's local steps and list it."""
        buffer = io.BytesIO()
        frame.to_parquet(buffer, index=False)
        self.put(f"steps/{round:04d}.parquet", lambda f: f.write(buffer.getvalue()))

    # -- state for resuming: one file for the server, segments for the clients (client_states.py)

    def put_clients(self, limit: int = 0) -> None:
        """Take the clients' new states to the disk where they are more than ``limit`` bytes; ``put_state`` lists them."""
        if self.states.waiting > limit:
            self.states.flush(self.put, self._drop)

    def put_state(self, round: int, server: dict[str, Any]) -> None:
        """Store the training state after ``round`` rounds: the server's, and the clients' as they are in ``states``."""
        self.put_clients()
        name = self.put_tensors(f"state/server-{round:04d}", server)
        before, self.index["state"] = self.index["state"], {"server": name, **self.states.listed}
        for f in {*before.values()} - {*self.index["state"].values()}:
            self.index["files"].pop(f, None)

    def _drop(self, name: str) -> None:
        """A file is listed no more. It goes once the next ``append`` or ``commit`` has said so; at once, if it was never said
        to be there."""
        self.index["files"].pop(name, None)
        if name not in self._on_disk["files"]:
            (self.path / name).unlink(missing_ok=True)

    def clean(self) -> None:
        """Remove what training wrote and the index does not list: a process that was killed left it behind."""
        for folder, names in OWN.items():
            for f in (self.path / folder).glob("*"):
                name = f.relative_to(self.path).as_posix()
                if re.fullmatch(names, f.name) and f.is_file() and name not in self.index["files"]:
                    f.unlink(missing_ok=True)


def verify(path: Path) -> None:
    """A checkpoint that lies in a run must be the one that the run wrote; elsewhere there is nothing to compare it with.

    Raises FldiagError when it is not.
    """
    run = Path(os.path.realpath(path)).parent.parent
    if path.parent.name == "rounds" and os.path.isfile(run / "run.json"):
        Run.open(run).verified(f"rounds/{path.name}")


def select_rounds(
    text: str | int | Sequence[int] | None, stored_rounds: Sequence[int]
) -> list[int] | None:
    """The rounds of ``5``, ``1,5,20-30``, ``last`` or ``every:10``, or of numbers; None for all.

    A range and ``every`` take what is stored of it. Raises FldiagError for anything else.
    """
    if text is None or text == "all":
        return None
    if text == "last":
        return list(stored_rounds[-1:])
    try:
        if not isinstance(text, str):
            return sorted(
                {operator.index(r) for r in (text if isinstance(text, Iterable) else [text])}
            )
        if text.startswith("every:"):
            step = int(text.removeprefix("every:"))
            numbers = [r for r in stored_rounds if r % step == 0]
        else:
            numbers = []
            for part in text.split(","):
                first, dash, last = part.partition("-")
                numbers += (
                    [r for r in stored_rounds if int(first) <= r <= int(last)]
                    if dash
                    else [int(first)]
                )
    except (ValueError, TypeError, ZeroDivisionError):
        raise FldiagError(
            f"--rounds {text!r} is not valid",
            "write for example 5, 1,5,20-30, every:10 or last",
            usage=True,
        ) from None
    if not numbers:
        raise FldiagError(
            f"--rounds {text}: no such round is stored",
            f"stored are {stored_rounds[0]} to {stored_rounds[-1]}"
            if stored_rounds
            else "train first",
            usage=True,
        )
    return sorted(set(numbers))
