"""Rounds that another program trained, written as a run: every diagnostic of runs works on it, training does not."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fldiag.data import Dataset, partition
from fldiag.errors import FldiagError
from fldiag.models.state_dict import State
from fldiag.params import Layout
from fldiag.results.provenance import digest, provenance
from fldiag.results.table import Row
from fldiag.runs import base
from fldiag.runs.run import ABOUT, LINES, LOCK, Run
from fldiag.sections import LARGEST


class Recording:
    """A run folder that grows round by round from state_dicts named as the module names its tensors.

    ``model``, ``data``: what the run's files say of them (names; a reader never runs code that a file names);
    without them they must be given with every question. ``normalise``: how the data of that name are seen. ``parts``: client ->
    indices of its training examples. ``method``, ``seed``: how tables call the run. ``origin``: plain values on where it comes
    from, kept in run.json; a run with the same origin that was not finished goes on, and with ``resume`` a finished one.

    Raises FldiagError when the folder holds another run, or one of another model, data or partition, or cannot be written.
    """

    def __init__(
        self,
        path: Path,
        module: nn.Module,
        *,
        origin: Mapping[str, Any],
        model: str | None = None,
        data: str | None = None,
        root: str | None = None,
        dataset: Dataset | None = None,
        parts: Mapping[int, np.ndarray] | None = None,
        method: str = "foreign",
        seed: int = 0,
        normalise: str | None = None,
        resume: bool = False,
    ):
        if not 0 <= seed < LARGEST:
            raise FldiagError(f"seed = {seed}", f"give one from 0 to {LARGEST - 1}", usage=True)
        self.layout, self.method, self.seed = Layout.of(module), method, seed
        self.dataset = dataset
        self.waiting: list[Row] = []
        self._written = ""
        # ``normalise`` is always said: without the key it would be read as what runs meant before it existed
        data_section = {"name": data, "root": root, "normalise": normalise} if data else {}
        config = {
            "name": path.resolve().name,
            "seed": seed,
            "rounds": 0,
            "data": data_section,
            "partition": {"kind": "unknown" if parts is None else "given"},
            "clients": {"total": 0, "per_round": 0},
            "model": {"name": model} if model else {},
            "method": {"name": method},
            "train": {},
            "checkpoint": {"every": 1, "clients": "sampled"},
        }
        origin = json.loads(json.dumps(dict(origin)))
        if (path / ABOUT).is_file():
            self.run = Run.open(path)
            if not resume and (
                self.run.origin.get("recipe") != origin or self.run.status == "finished"
            ):
                raise FldiagError(
                    f"{path} already holds a run",
                    "choose another folder, or remove it first",
                    usage=True,
                )
            confirm_same(self.run, origin, module, dataset, parts)
            self.run.resume()
            return
        if path.exists() and (not path.is_dir() or any(_in_the_way(f) for f in path.iterdir())):
            raise FldiagError(
                f"{path} holds other files",
                "choose a folder that is empty or not there yet",
                usage=True,
            )
        text = json.dumps([config, origin], sort_keys=True)
        self.run = Run.create(
            path,
            config,
            provenance(
                seed=seed,
                data=dataset.fingerprint() if dataset is not None else None,
                architecture=_architecture(module),
                module=f"{type(module).__module__}.{type(module).__qualname__}",
                **base.provenance(module),
            ),
            hash=hashlib.sha256(text.encode()).hexdigest()[:16],
            origin={"recipe": origin, "notes": [], "names": {}, "examples": {}},
        )
        try:
            if parts is not None:
                listed = _listed(parts)
                buffer = io.BytesIO()
                partition.save(buffer, listed)
                self.run.put("partition.npz", lambda f: f.write(buffer.getvalue()))
                config["clients"]["total"] = len(listed)  # type: ignore[index]
            base.keep(self.run, module)
            self.run.begin()
        except BaseException:
            self._undo()
            raise

    def discard(self) -> None:
        """Remove a run without a round of training: it would be in the way of the next attempt."""
        if not any(self.run.rounds):
            (self.run.path / ABOUT).unlink()
            self._undo()

    def _undo(self) -> None:
        """Remove the files of a folder that did not become a run: they would be in the way of the next attempt."""
        path = self.run.path
        if not (path / ABOUT).exists():
            with contextlib.suppress(OSError):
                for name in (LINES, *self.run.files, "partition.npz", base.FILE):
                    (path / name).unlink(missing_ok=True)
                (path / "rounds").rmdir()

    def reload(self) -> None:
        """Go back to what is on the disk, after it refused a write; notes stay.

        Raises FldiagError when the run cannot be read any more.
        """
        notes, self.waiting = self.origin["notes"], []
        self.run = Run.open(self.run.path)
        for text in notes:
            self.note(text)
        with contextlib.suppress(OSError):
            self.run.resume()

    @property
    def origin(self) -> dict[str, Any]:
        """Where the run comes from, as its next line will say."""
        return self.run.about["origin"]  # type: ignore[no-any-return]

    def _append(self, t: int, rows: Sequence[Row], **facts: Any) -> None:
        """A line, with what changed in the run's config and origin since the last one."""
        now = {key: self.run.about[key] for key in ("config", "origin")}
        text = json.dumps(now)
        if text != self._written:
            facts["about"] = now
        self.run.append(t, rows, **facts)
        self._written = text

    def note(self, text: str) -> None:
        """Remember what was missing or had to be supposed; every table of the run will say so."""
        if text not in self.origin["notes"]:
            self.origin["notes"].append(text)

    def know(
        self,
        *,
        names: Mapping[int, str] | None = None,
        examples: Mapping[int, int] | None = None,
        shift: int = 0,
        outside: Sequence[int] = (),
    ) -> None:
        """What the clients are called elsewhere, how many examples they train on, how much higher than there rounds are numbered,
        and which clients the partition lacks."""
        origin = self.origin
        origin["names"] |= {str(k): v for k, v in (names or {}).items()}
        origin["examples"] |= {str(k): int(v) for k, v in (examples or {}).items()}
        if fresh := sorted({*outside} - {*origin.get("outside", [])}):
            origin["outside"] = sorted([*origin.get("outside", []), *fresh])
            self.note(unassigned([origin["names"].get(str(k), str(k)) for k in fresh]))
        if shift:
            origin["shift"] = shift
            self.note("the loop counts its rounds from 0: its round 0 is round 1 here, and so on")

    @property
    def shift(self) -> int:
        """How much higher rounds are numbered than where they come from: 1 where that counts from 0."""
        return int(self.origin.get("shift", 0))

    def initial(self, state: State) -> None:
        """The model before the first round."""
        self._write(0, state, {})
        self._append(0, [])

    def add(
        self,
        t: int,
        aggregated: State,
        clients: Mapping[int, State],
        received: State | None = None,
        rows: Sequence[Row] = (),
        *,
        starts: Mapping[int, State] | None = None,
    ) -> None:
        """Round t (from 1): the global model after it, what the clients received (None: not known) and made of it.

        ``starts``: what each of them received, where that differs."""
        extra: dict[str, Any] = {}
        if clients:
            ids = sorted(clients)
            common = [
                n
                for n in aggregated
                if n not in self.layout.names
                and all(n in clients[k] and (starts is None or n in starts[k]) for k in ids)
            ]
            extra |= {
                "clients": torch.stack([self.vector(clients[k]) for k in ids]),
                "buffers": {n: torch.stack([clients[k][n] for k in ids]) for n in common},
                "received": None if received is None else self.vector(received),
            }
            if starts is not None:
                extra["starts"] = torch.stack([self.vector(starts[k]) for k in ids])
                extra["start_buffers"] = {
                    n: torch.stack([starts[k][n] for k in ids]) for n in common
                }
        config = self.run.about["config"]
        config["clients"]["total"] = max(config["clients"]["total"], *(k + 1 for k in clients), 0)
        config["clients"]["per_round"] = max(config["clients"]["per_round"], len(clients))
        config["rounds"] = max(config["rounds"], t)
        self._write(t, aggregated, extra, sorted(clients))
        count = {
            "moment": "trained",
            "scope": "global",
            "metric": "clients",
            "value": float(len(clients)),
        }
        self._append(t, [*self.waiting, *({"round": t, **row} for row in (count, *rows))])
        self.waiting = []

    def add_rows(self, t: int, rows: Sequence[Row]) -> None:
        """More numbers of round t for the run's table; those of rounds that are not stored yet wait for them."""
        self.waiting += [{"round": t, **row} for row in rows]
        if t <= self.run.done and self.run.done:
            self._append(self.run.done, self.waiting)
            self.waiting = []

    def finish(self) -> Run:
        """Say that no round is missing any more."""
        if self.waiting:
            self._append(self.run.done, self.waiting)
        self._append(self.run.done, [], status="finished")
        return self.run

    def vector(self, state: State) -> Tensor:
        """The weights [P] in the module's order."""
        return torch.cat([state[n].detach().cpu().reshape(-1) for n in self.layout.names])

    def _write(
        self,
        t: int,
        state: State,
        extra: dict[str, Any],
        clients: Sequence[int] = (),
    ) -> None:
        spec = self.run.about["config"]
        manifest = {
            "round": t,
            "seed": self.seed,
            "config": spec,
            "shape": list(self.dataset.shape) if self.dataset is not None else [],
            "classes": self.dataset.classes if self.dataset is not None else 0,
            "clients": list(clients),
            "provenance": self.run.about["provenance"],
            "run": self.run.path.name,
            "origin": self.origin["recipe"],
        }
        self.run.put_checkpoint(t, manifest, state, **extra)


def unassigned(names: Sequence[str]) -> str:
    """What is said of clients that the partition lacks."""
    return f"the partition does not say which examples client {', '.join(names[:6])}{' ...' if len(names) > 6 else ''} has"


def _listed(parts: Mapping[int, np.ndarray]) -> list[np.ndarray]:
    """The partition of clients 0, 1, 2, ... up to the last: those without an entry have no examples."""
    return [parts.get(k, np.empty(0, dtype=np.int64)) for k in range(max(parts, default=-1) + 1)]


def _architecture(module: nn.Module) -> str:
    """Tells models apart: by what they print, without addresses in memory, and by the names and shapes of their tensors."""
    shapes = [(n, tuple(t.shape)) for n, t in [*module.named_parameters(), *module.named_buffers()]]
    return digest(re.sub(r"0x[0-9a-fA-F]+", "", repr(module)), shapes)[:16]


def confirm_same(
    run: Run,
    origin: Mapping[str, Any],
    module: nn.Module,
    dataset: Dataset | None,
    parts: Mapping[int, np.ndarray] | None,
) -> None:
    """Raises FldiagError unless the run was recorded so far with this origin, model, data and partition."""
    recipe, before, remedy = (
        run.origin.get("recipe"),
        run.about["provenance"],
        "or record into another folder",
    )
    origin = json.loads(json.dumps(dict(origin)))
    if recipe is None:
        raise FldiagError(
            f"{run.path} holds a run that fldiag trained",
            "continue it with fldiag train --resume, " + remedy,
            usage=True,
        )
    if recipe != origin:
        differing = [
            f"{key}: {recipe.get(key)!r} there, {origin.get(key)!r} now"
            for key in sorted(recipe.keys() | origin.keys())
            if recipe.get(key) != origin.get(key)
        ]
        raise FldiagError(
            f"{run.path} was recorded with other options",
            f"{'; '.join(differing[:3])}; give the same, {remedy}",
            usage=True,
        )
    data = None if dataset is None else dataset.fingerprint()
    if before.get("data") != data:
        detail = (
            " (it has data, and none are given)"
            if data is None
            else " (it has none)"
            if before.get("data") is None
            else ""
        )
        raise FldiagError(
            f"the data are not those {run.path} was recorded with so far{detail}",
            f"give the original data, {remedy}",
            usage=True,
        )
    if before.get("architecture", architecture := _architecture(module)) != architecture:
        raise FldiagError(
            f"the model is not the one {run.path} was recorded with so far",
            f"give the original model, {remedy}",
            usage=True,
        )
    if before.get("base") != base.provenance(module).get("base"):
        raise FldiagError(
            f"the frozen weights are not those beneath the adapters of {run.path}",
            f"give the original weights, {remedy}",
            usage=True,
        )
    recorded = (
        partition.load_parts(run.verified("partition.npz"))
        if "partition.npz" in run.files
        else None
    )
    listed = None if parts is None else _listed(parts)
    same = (
        recorded is listed
        if recorded is None or listed is None
        else partition.same(recorded, listed)
    )
    if not same:
        raise FldiagError(
            f"the partition is not the one {run.path} was recorded with so far",
            f"use the same partition, {remedy}",
            usage=True,
        )


def _in_the_way(file: Path) -> bool:
    return file.name != LOCK and (file.name != "rounds" or any(file.glob("*")))


def mean(states: Sequence[State], shares: Sequence[float]) -> State:
    """The weighted mean of state_dicts, taken in float64; counters take the largest."""
    p = torch.tensor(shares, dtype=torch.float64)
    p = p / p.sum() if float(p.sum()) else torch.full_like(p, 1 / len(p))
    averages = {}
    for name in (n for n in states[0] if all(n in s for s in states)):
        rows = torch.stack([s[name].detach().cpu() for s in states])
        if rows.is_floating_point():
            averages[name] = torch.tensordot(p, rows.double(), 1).to(rows.dtype)
        else:
            averages[name] = rows.amax(0)
    return averages
