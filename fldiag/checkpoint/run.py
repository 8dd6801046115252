"""A run on disk: ``run.json`` is the one authority; what it does not list does not count.

::

    RUN/run.json          config, status, rounds done, every file with its sha256, and a digest of all that
    RUN/journal.jsonl     while it is trained: what changed in run.json since it was written, and the metrics (journal.py)
    RUN/owner.json        while it is trained: by which process; owner.lock is locked by it (owner.py)
    RUN/rounds/0030.pt    checkpoint of a round
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
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fldiag.checkpoint import schema
from fldiag.checkpoint.index import CONTINUED, WHOLE, read_index, write_index
from fldiag.checkpoint.journal import NAME, Journal, snapshot
from fldiag.checkpoint.stored_run import StoredRun
from fldiag.config import Config
from fldiag.errors import FldiagError
from fldiag.results import files
from fldiag.results.table import Row

if TYPE_CHECKING:
    from torch import Tensor

#: What training itself writes into these folders (with the temporary names of a write that was cut off): nothing else is
#: ever removed from them.
_TABLE = r"\.?\d+(-\d+)?\.parquet.*"
OWN = {
    "state": r"\.?(server-\d+\.pt|clients-\d+\.safetensors).*",
    "metrics": _TABLE,
    "steps": _TABLE,
    "rounds": r"\.?\d+\.pt(\.\d+\.tmp)?",
    "": r"\.(run\.json|journal\.jsonl|partition\.npz|owner\.json)\.\w+\.tmp",
}
#: Bytes of the journal after which run.json is written whole, unless the run's index and table are larger still: so the cost of
#: a round does not grow with their number.
LONG = 2**20


class Run(StoredRun):
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
    >>> start = Config.load("digits", rounds=2, model__name="mlp", clients__per_round=2, train__epochs=1)
    >>> run = fldiag.train(start, out=tempfile.mkdtemp() + "/run")
    >>> run.rounds, run.checkpoint().round, sorted(run.metrics["round"].unique().tolist())
    ([1, 2], 2, [1, 2])
    """

    def __init__(self, path: Path, index: dict[str, Any], rows: Sequence[Row] = ()):
        super().__init__(path, index, rows)
        self._new: list[Row] = []  # those of the rows that the journal does not have yet
        self._journal: Journal | None = None
        self._written = snapshot(index) if "state" in index else {}
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

    def put(self, name: str, writer: Any) -> None:
        """Write a file of the run and list it; ``writer`` gets the open file."""
        folder = (self.path / name).parent
        self._unsettled |= {folder} if folder.is_dir() else {folder, self.path}
        self.index["files"][name] = files.write_atomic(self.path / name, writer, settle=False)

    def put_tensors(self, name: str, content: dict[str, Any]) -> None:
        """Write a file of tensors and list it."""
        import torch  # only here: who reads tables has no need of it

        self.put(name, lambda f: torch.save(content, f))

    def put_checkpoint(
        self, round: int, manifest: dict[str, Any], state: dict[str, Tensor], **tensors: Any
    ) -> None:
        """Write the checkpoint of a round and list it."""
        self.put_tensors(f"rounds/{round:04d}.pt", schema.content(manifest, state, **tensors))

    def forget(self, rounds: Iterable[int]) -> None:
        """The checkpoints of these rounds go, once the next ``append`` or ``commit`` has said so."""
        for r in rounds:
            self.index["files"].pop(f"rounds/{r:04d}.pt", None)

    def add_metrics(self, rows: Sequence[Row]) -> None:
        """More metrics, written by the next ``append`` or ``commit``. They say nothing of run, method and seed."""
        self.rows += rows
        self._new += rows

    def drop_metrics(self, drop: Callable[[Row], bool]) -> bool:
        """Leave metrics out of the table. Whether it had such."""
        rows = [*self.stored_rows(), *self.rows]
        kept = [row for row in rows if not drop(row)]
        if len(kept) < len(rows):
            self.put_metrics(self._as_table(kept))
            self.rows.clear()
            self._new.clear()
        return len(kept) < len(rows)

    def append(self) -> None:
        """Write down what changed since the last time, in the journal, and remove the files that are listed no more."""
        if self._journal is None or self._journal.size > max(LONG, self._size()):
            self.commit(journal=True)
            return
        self._settle()
        self._journal.append(self._written, self.index, self._new)
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
        for name in self._written.get("files", {}).keys() - self.index["files"].keys():
            (self.path / name).unlink(missing_ok=True)
        self._written = snapshot(self.index)
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
        found = re.fullmatch(re.escape(name) + r"(?:-(\d+))?\.parquet", str(before))
        self.index["files"].pop(before, None)
        self.index["metrics"] = (
            f"{name}.parquet" if found is None else f"{name}-{int(found[1] or 0) + 1}.parquet"
        )
        self.put(self.index["metrics"], lambda f: f.write(buffer.getvalue()))

    def put_steps(self, round: int, frame: pd.DataFrame) -> None:
        """Write the table of a round's local steps and list it."""
        buffer = io.BytesIO()
        frame.to_parquet(buffer, index=False)
        self.put(f"steps/{round:04d}.parquet", lambda f: f.write(buffer.getvalue()))

    # -- state for resuming: one file for the server, segments for the clients (client_states.py)

    def put_clients(self, held: int = 0) -> None:
        """Take the clients' new states to the disk where they are more than ``held`` bytes; ``put_state`` lists them."""
        if self.states.waiting > held:
            self.states.flush(self.put, self._drop)

    def put_state(self, round: int, server: dict[str, Any]) -> None:
        """Store the training state after ``round`` rounds: the server's, and the clients' as they are in ``states``."""
        self.put_clients()
        name = f"state/server-{round:04d}.pt"
        self.put_tensors(name, server)
        before, self.index["state"] = self.index["state"], {"server": name, **self.states.listed}
        for f in {*before.values()} - {*self.index["state"].values()}:
            self.index["files"].pop(f, None)

    def _drop(self, name: str) -> None:
        """A file is listed no more. It goes once the next ``append`` or ``commit`` has said so; at once, if it was never said
        to be there."""
        self.index["files"].pop(name, None)
        if name not in self._written["files"]:
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
