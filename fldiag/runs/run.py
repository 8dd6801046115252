"""A run on disk.

::

    RUN/run.json                   config, provenance, and files that never change; written once, and again for more rounds
    RUN/rounds.jsonl               one line a stored round: its files with their sha256, and its metrics; only appended to
    RUN/rounds/0030.safetensors    checkpoint of a round
    RUN/state/0030.safetensors     what the server carries on, and those clients that trained since the state before
    RUN/steps/0030.parquet         numbers of the local steps of that round, when they are recorded (metrics.steps)
    RUN/partition.npz              indices of every client's examples
    RUN/.lock                      locked by the process that writes the run

run.json and every line hold a digest of themselves. A round counts from the moment its line is on the disk. A process that is
killed before that leaves files that no line lists, which ``Run.resume`` removes, and perhaps half a line, which the next one is
written over. Where more is missing than one killed round can leave, the run is refused, and nothing is deleted.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from filelock import FileLock, Timeout
from safetensors import safe_open
from torch.utils.data import default_collate

from fldiag.errors import FldiagError, check_name
from fldiag.models import State
from fldiag.results import files
from fldiag.results.table import Row, table
from fldiag.runs.checkpoint import Checkpoint, Json, pack, read_checkpoint, read_tensors

if TYPE_CHECKING:
    from fldiag.config import Config

ABOUT, LINES, LOCK, FORMAT = "run.json", "rounds.jsonl", ".lock", 2
#: Stands for the server among the clients.
SERVER = -1
#: What training writes (also in a write that was cut off): of a run that was begun nothing else is ever removed.
OWN = re.compile(r"(rounds|state|steps)/\.?\d+\.(safetensors|parquet)(\.\d+\.tmp)?")


class Run:
    """A run folder: what training or a Recorder wrote, read when it is asked for and verified.

    ``Run.open(folder)`` or ``fldiag.load(folder)`` make one. ``metrics`` is a tidy table of numbers a round, ``steps(r)`` one of
    the local steps where they were recorded, ``checkpoint(r)`` the weights after round r; ``model`` and ``data`` are those that
    its checkpoints get instead of what the run names.

    Args:
        path: The folder.
        about: The content of its run.json.

    Raises:
        FldiagError: From what reads: a file is missing, or is not the one that the run wrote.

    >>> import tempfile, fldiag
    >>> start = fldiag.Config.load("digits", rounds=2, model__name="mlp", clients__per_round=2, train__epochs=1)
    >>> run = fldiag.train(start, out=tempfile.mkdtemp() + "/run")
    >>> run.rounds, run.checkpoint().round, sorted(run.metrics["round"].unique().tolist())
    ([1, 2], 2, [1, 2])
    """

    def __init__(self, path: Path, about: Json):
        check_name(path)
        self.path, self.name, self.about = path, path.name, about
        self.model: Any = None
        self.data: Any = None
        self.records: list[Json] = []
        self.files: dict[str, str] = dict(about["files"])  # name -> sha256
        #: Client (SERVER: the server) -> file and row of its newest state.
        self.state_of: dict[int, tuple[str, int]] = {}
        self._size = 0  # bytes of the lines
        self._new: dict[str, str] = {}  # files written since the last line

    # Reading

    @staticmethod
    def open(path: str | Path) -> Run:
        """The run in a folder.

        Raises:
            FldiagError: There is none, one of another format, or one whose run.json or lines were changed.
        """
        path = Path(path)
        # the folder first: of a run that is being trained the lines are then newer
        stored = _checkpoints(path)
        try:
            text, lines = ((path / name).read_bytes() for name in (ABOUT, LINES))
        except OSError as error:
            raise FldiagError(f"{path} is no run that can be read: {error}", usage=True) from None
        about = files.intact(text, path / ABOUT)
        if about.get("format") != FORMAT:
            raise FldiagError(f"{path} is a run of another format", "train it again")
        run = Run(path, about)
        for line in re.findall(rb".*\n", lines):  # what stands behind is half a line
            run._add(line)
        if len(stored.difference(*(record["files"] for record in run.records))) > 1:
            raise FldiagError(f"{path / LINES} lacks rounds whose files are there", "restore it")
        return run

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.status}, rounds done: {self.done})"

    @property
    def done(self) -> int:
        """Rounds trained so far (and safely stored)."""
        return self.records[-1]["round"] if self.records else 0

    @property
    def status(self) -> str:
        """finished, diverged, or unfinished (being trained, stopped, or to get more rounds)."""
        status = self.records[-1].get("status") if self.records else None
        is_extended = status == "finished" and self.done < self.about["config"].get("rounds", 0)
        return "unfinished" if is_extended else status or "unfinished"

    @property
    def config(self) -> Config:
        """What was trained.

        Raises:
            FldiagError: It is not valid, such as that of another program's rounds.
        """
        # only here: what is read of a run seldom needs its schema
        from fldiag.config import Config

        return Config.model_validate(self.about["config"])

    @property
    def origin(self) -> Json:
        """Of rounds that another program trained: ``notes``, on what was missing; empty for runs of fldiag."""
        return self.about.get("origin", {})  # type: ignore[no-any-return]

    @property
    def rounds(self) -> list[int]:
        """Rounds that have a checkpoint; round r is the state after r rounds of training."""
        return sorted(int(Path(f).stem) for f in self.files if f.startswith("rounds/"))

    @staticmethod
    def round_file(round: int) -> str:
        """The name of the checkpoint of a round."""
        return f"rounds/{round:04d}.safetensors"

    def checkpoint(self, round: int | None = None) -> Checkpoint:
        """The checkpoint of a round (default: the last). Raises FldiagError if it is missing or was changed."""
        r = max(self.rounds, default=1) if round is None else round
        if r not in self.rounds:
            what = f"run {self.path} has no checkpoint of round {r}"
            raise FldiagError(what, f"the last are {self.rounds[-3:]}", usage=True)
        file = self.verified(self.round_file(r))
        return read_checkpoint(file, run=self, model=self.model, data=self.data)

    @property
    def common(self) -> Json:
        """What stands in every row of this run's tables."""
        config = self.about["config"]
        return {"run": self.name, "method": config["method"].get("name"), "seed": config["seed"]}

    @property
    def metrics(self) -> pd.DataFrame:
        """A row for each number of a round. What was measured at the end counts until the run gets more rounds."""
        stored = self.records
        records = (r for r in stored if r.get("status") != "finished" or r["round"] == self.done)
        return table((row for record in records for row in record["rows"]), **self.common)

    def verified(self, name: str) -> Path:
        """The path of a file of the run after its sha256 was checked."""
        path = self.path / name
        if not path.is_file():
            raise FldiagError(
                f"{path} belongs to the run and is not there",
                "restore it; a pruned run cannot be continued",
            )
        if files.sha256(path) != self.files.get(name):
            raise FldiagError(
                f"{path} is not the file this run wrote (its sha256 differs)",
                "restore the original file; to diagnose this one as it is, copy it out of the run folder",
            )
        return path

    def steps(self, round: int) -> pd.DataFrame | None:
        """The recorded numbers of the local steps (``metrics.steps = true``) of a round (None: there are none): a row for each
        sampled client, step (``index``, from 1) and metric.

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

        Raises FldiagError when the table is missing or was changed.
        """
        name = f"steps/{round:04d}.parquet"
        return pd.read_parquet(self.verified(name)) if name in self.files else None

    @cached_property
    def states(self) -> ClientStates:
        """What the clients carry from round to round, as stored last; a row is read when it is asked for."""
        return ClientStates(self)

    @property
    def server_state(self) -> State:
        """What the server carries on after the last stored round, besides the weights."""
        name, _ = self.state_of.get(SERVER, (None, 0))
        return read_tensors(self.verified(name)).get("server", {}) if name else {}

    # Writing

    @staticmethod
    def create(path: Path, config: Json, provenance: Json, **about: Any) -> Run:
        """A new run in a folder that holds no files of one; what never changes is written with ``put`` before ``begin``.

        Raises:
            FldiagError: There are rounds already.
        """
        if _checkpoints(path):
            raise FldiagError(
                f"{path} holds rounds and no {ABOUT}", "restore it, or choose another", usage=True
            )
        about |= {"format": FORMAT, "config": config, "provenance": provenance, "files": {}}
        return Run(path, about)

    def begin(self) -> None:
        """Write run.json. Raises FldiagError when the disk refuses."""
        self.about["files"] |= self._new
        if not self.records:
            files.write_bytes(self.path / LINES, b"")
        files.write_text(self.path / ABOUT, json.dumps(files.with_digest(self.about), indent=1))
        self.files |= self._new
        self._new = {}

    def resume(self) -> None:
        """Remove the files that a killed process left and no line lists; half a line is written over.

        Raises:
            FldiagError: A file of the run is missing.
        """
        present = {file.relative_to(self.path).as_posix() for file in self.path.glob("**/*")}
        for name in self.files.keys() - present:
            self.verified(name)
        for name in filter(OWN.fullmatch, present - self.files.keys()):
            (self.path / name).unlink()

    def discard(self) -> None:
        """Remove the files of a run that could not be begun."""
        for name in (ABOUT, LINES, *self._new):
            (self.path / name).unlink(missing_ok=True)

    def put(self, name: str, content: bytes | Callable[[Any], Any]) -> None:
        """Write a file of the run: bytes, or what a function writes to it. The next ``append`` or ``begin`` lists it."""
        self._new[name] = ""  # also of a write that fails something may be there
        write = content if callable(content) else lambda f: f.write(content)
        self._new[name] = files.write_atomic(self.path / name, write)

    def put_checkpoint(self, round: int, manifest: Json, state: State, **tensors: Any) -> None:
        """Write the checkpoint of a round: the model and what goes with it (see ``checkpoint``)."""
        content = pack({"manifest": manifest}, model=state, **tensors)
        self.put(self.round_file(round), content)

    def put_state(self, round: int, server: State, clients: Mapping[int, State]) -> Json:
        """Write what the server and these clients carry on; returns what the round's line says of it."""
        ids, name = sorted(clients), f"state/{round:04d}.safetensors"
        rows = default_collate([clients[i] for i in ids]) if ids else {}
        self.put(name, pack({}, server=server, clients=rows))
        return {"state": name, "clients": ids}

    def append(self, round: int, rows: Sequence[Row], **facts: Any) -> None:
        """Say that a round is stored, with its metrics and the files written since the last line.

        Args:
            round: Rounds done.
            rows: Metrics; they say nothing of run, method and seed.
            facts: ``status`` at the end; ``state`` and ``clients`` (``put_state``); ``removed``, names of files; ``about``, what
                changed in ``self.about``; anything else is kept for people.

        Raises:
            FldiagError: The disk refuses; the run is as it was.
        """
        record = {"round": round, "rows": list(rows), **facts, "files": self._new}
        record["line"] = len(self.records) + 1
        text = json.dumps(record, default=lambda value: value.item())
        content = files.with_digest(json.loads(text))
        line = json.dumps(content, sort_keys=True).encode() + b"\n"
        files.append(self.path / LINES, line, self._size)
        self._new = {}
        for name in self._add(line):
            (self.path / name).unlink(missing_ok=True)

    def _add(self, line: bytes) -> set[str]:
        """Take in a line; returns the names of files that the run no longer needs."""
        number = len(self.records) + 1
        source = f"line {number} of {self.path / LINES}"
        record = files.intact(line, source)
        if record.get("line") != number:
            raise FldiagError(f"{source} was another line", "restore it from a copy")
        self._size += len(line)
        self.records.append(record)
        self.files |= record["files"]
        self.about = {**self.about, **record.get("about", {})}
        before = {name for name, _ in self.state_of.values()}
        if "state" in record:
            ids = [*record["clients"], SERVER]
            self.state_of |= {i: (record["state"], j) for j, i in enumerate(ids)}
        removed = before.difference(name for name, _ in self.state_of.values())
        removed |= {*record.get("removed", ())}
        for name in removed:
            self.files.pop(name, None)
        return removed

    # Removing

    def unneeded(self, rounds: Collection[int] | None) -> list[str]:
        """The names of the files that may go: the clients' states, without which the run cannot be given more rounds, and the
        checkpoints of all rounds but ``rounds`` (None: of none) and the last.

        Raises:
            FldiagError: The run is not finished.
        """
        if self.status == "unfinished":
            raise FldiagError(f"{self.path} is not finished", "finish it: --resume", usage=True)
        others = [] if rounds is None else sorted({*self.rounds[:-1]}.difference(rounds))
        return [*map(self.round_file, others), *(n for n in self.files if n.startswith("state/"))]

    def remove(self, names: Sequence[str]) -> None:
        """Remove these files. Raises FldiagError when the disk refuses."""
        with lock(self.path):
            self.append(self.done, [], status=self.status, removed=names)


class ClientStates(dict[int, State]):
    """What clients carry from round to round: the states that are not stored yet. ``get`` reads any other from the run.

    Args:
        run: The run; the files are verified now.
    """

    def __init__(self, run: Run):
        super().__init__()
        self.run = run
        for name in {file for file, _ in run.state_of.values()}:
            run.verified(name)

    def get(self, client: int, default: Any = None) -> Any:
        """A client's state (name -> tensor), or the default for one that has none."""
        if client in self or client not in self.run.state_of:
            return super().get(client, default)
        name, j = self.run.state_of[client]
        with safe_open(self.run.path / name, framework="pt") as file:
            names = [key for key in file.keys() if key.startswith("clients/")]  # noqa: SIM118
            # clones: a slice holds on to the whole file
            return {n.partition("/")[2]: file.get_slice(n)[j : j + 1][0].clone() for n in names}


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Own a run folder, which is made, for as long as the block runs.

    Raises:
        FldiagError: Another process owns it, it cannot be written, it holds symbolic links, or its name is no text.
    """
    for entry in path.rglob("*"):
        if entry.is_symlink():
            raise files.link_error(entry)
    try:
        path.mkdir(parents=True, exist_ok=True)
        # a recorder may be closed by another thread
        owner = FileLock(path / LOCK, thread_local=False).acquire(blocking=False)
    except Timeout:
        what = f"{path} is being written by another process"
        raise FldiagError(what, "wait for it, or stop it", usage=True) from None
    except OSError as error:
        raise FldiagError(f"cannot write to {path}: {error.strerror}", "choose another") from None
    with owner:
        yield


def open_checkpoint(path: str | Path, key: str | None = None) -> Checkpoint:
    """A file of weights; one in a run must be the file that the run wrote.

    Args:
        path: The file, or a folder of transformers.
        key: See ``read_checkpoint``.

    Raises:
        FldiagError: It cannot be read, or was changed.
    """
    file = Path(os.path.realpath(path))
    folder = file.parent.parent
    if file.parent.name != "rounds" or not (folder / ABOUT).is_file():
        return read_checkpoint(path, key)
    run = Run.open(folder)
    return read_checkpoint(run.verified(f"rounds/{file.name}"), key, run=run)


def _checkpoints(path: Path) -> set[str]:
    stored = (path / "rounds").glob("*.safetensors")
    return {f"rounds/{file.name}" for file in stored if file.stem.isdecimal()}
