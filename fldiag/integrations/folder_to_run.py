"""Another program's folder of clients' files as a run, round by round."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fldiag import data as datasets
from fldiag import models
from fldiag.config_files import read_partition
from fldiag.data import Dataset
from fldiag.errors import FldiagError
from fldiag.integrations import client_files
from fldiag.integrations.evaluation import Evaluation
from fldiag.integrations.recorder_inputs import confirm_numbers
from fldiag.models import state_dict
from fldiag.models.state_dict import State
from fldiag.registry import model as registered
from fldiag.results.provenance import digest
from fldiag.results.table import Row
from fldiag.runs.checkpoint import describe_choice, read_checkpoint
from fldiag.runs.recording import Recording, mean, unassigned
from fldiag.runs.round_weights import ranges
from fldiag.runs.run import Run, lock, verify
from fldiag.sections import DataSection

Event = Callable[[dict[str, Any]], None]
#: A model's test scores, as rows of a run's metrics.
Score = Callable[[State], list[Row]]


@dataclass
class _Globals:
    """The global model after every round (0: before the first), read when it is asked for."""

    sources: Mapping[int, Path]
    read: Any
    current: tuple[int, State | None] = (-1, None)

    def __call__(self, t: int) -> State | None:
        if t != self.current[0]:
            self.current = (
                t,
                self.read(self.sources[t], "global model") if t in self.sources else None,
            )
        return self.current[1]


def folder_to_run(
    root: Path,
    out: Path,
    tell: Event,
    *,
    clients: str | None,
    globals_: str | None,
    moment: str,
    initial: Path | None,
    partition: Path | None,
    model: str | None,
    data: str | None,
    data_root: str | None,
    download: bool,
    method: str,
    seed: int,
    scores: bool,
    key: str | None = None,
) -> Run:
    """Every round as it is read: what is missing or damaged is said and left out."""
    if not os.path.isdir(root):  # False, too, for what no path can be
        raise FldiagError(
            f"there is no folder {root}",
            "give the folder that holds the clients' files",
            usage=True,
        )
    if (root / "run.json").is_file():
        raise FldiagError(
            f"{root} is a run of fldiag already", "give it to the other verbs as it is", usage=True
        )
    if os.path.realpath(root) == os.path.abspath(os.sep):
        raise FldiagError(
            f"{root} holds all files of this machine",
            "give the folder that holds the clients' files",
            usage=True,
        )
    if clients is None and globals_ is None:
        raise FldiagError(
            f"{root} is a folder, and which of its files are whose is not known",
            "say it: --pattern 'round_{round}/client_{client}.pt', or of global models alone --global-pattern 'round_{round}.pt'",
            usage=True,
        )
    layout = client_files.scan(root, clients, globals_)
    if moment not in ("aggregated", "received"):
        raise FldiagError(
            f"--global-is {moment!r} is not one of aggregated, received",
            "aggregated: saved after the round; received: before it, as the clients got it",
            usage=True,
        )
    numbers, parts = _people(layout.names, partition)
    refused: FldiagError | None = None
    if parts is not None:
        try:
            confirm_numbers([numbers[name] for name in layout.names], parts)
        except FldiagError as error:  # the weights are sound: they are recorded before it is raised
            refused, parts = error, None
    dataset, module = _problem(model, data, data_root, download)
    if parts is not None and dataset is not None:
        client_files.check(
            {str(k): v for k, v in parts.items()}, len(dataset.train_y), dataset.name
        )
    start = min(layout.rounds)
    # fldiag counts rounds from 1; of global models alone, that of round 0 is the one before training
    shift = 1 if start == 0 and layout.clients else 0
    after = {r + shift - (moment == "received"): source for r, source in layout.globals.items()}
    if initial is not None:
        after[start + shift - 1] = initial
    recipe = {
        "kind": "folder",
        "clients": clients,
        "globals": globals_,
        "global_is": moment,
        "model": model,
        "data": data,
        "partition": digest({str(k): v for k, v in parts.items()}) if parts is not None else None,
        "initial": initial.name if initial else None,
        "method": method,
        "seed": seed,
        "scores": scores,
        **({"key": key} if key else {}),
    }
    with lock(out):
        recording = Recording(
            out,
            module,
            origin=recipe,
            model=model,
            data=data,
            root=data_root,
            dataset=dataset,
            parts=parts,
            method=method,
            seed=seed,
        )
        work = _Work(tell, layout, module, recording, numbers, parts, shift, key)
        if any(not name.isdigit() or int(name) != k for name, k in numbers.items()):
            recording.know(names={k: name for name, k in numbers.items()})
            work.say(
                "clients are numbered "
                + ", ".join(f"{k} = {name}" for name, k in list(numbers.items())[:6])
                + (" ..." if len(numbers) > 6 else ""),
                keep=False,
            )
        if shift:
            work.say("rounds start at 0 there and at 1 here", keep=False)
        work.gaps()
        if refused is not None:
            work.say(f"the partition is left out: {refused.what}")
        score = (
            Evaluation(module, dataset, work.say, work.say).rows
            if scores and dataset is not None
            else None
        )
        try:
            run = work.run(after, bool(globals_), score)
        except FldiagError:
            recording.discard()
            raise
    if refused is not None:
        raise FldiagError(
            f"{out} is made without the partition: {refused.what}",
            f"{refused.remedy}; then convert into another folder",
            usage=True,
        )
    return run


def _people(
    names: list[str], partition: Path | None
) -> tuple[dict[str, int], dict[int, Any] | None]:
    """Numbers of the clients by name, and their examples by number."""
    if partition is None:
        return client_files.numbers(names), None
    parts, _ = client_files.match(read_partition(partition), names)
    numbers = client_files.numbers(sorted({*names, *parts}))
    return numbers, {numbers[name]: index for name, index in parts.items()}


def _problem(
    model: str | None, data: str | None, root: str | None, download: bool
) -> tuple[Dataset | None, nn.Module]:
    if model is None:
        raise FldiagError(
            "which model the files belong to is not known",
            "give it: --model NAME (fldiag list models) or --model pkg.mod:factory",
            usage=True,
        )
    allowed = {name for name in (model, data) if name is not None}  # typed by the user
    section = None if data is None else DataSection(name=data, root=root)
    dataset = (
        None if section is None else datasets.load(section, download=download, allow_code=allowed)
    )
    if dataset is not None:
        return dataset, models.build(model, dataset.shape, dataset.classes, allow_code=allowed)
    if ":" not in model and model in registered:
        raise FldiagError(
            f"model {model!r} has the sizes of its data, and no data are given",
            "give them: --data NAME",
            usage=True,
        )
    return None, models.build(model, (), 0, allow_code=allowed)


class _Work:
    """The conversion at work: reads, says what is missing, writes."""

    def __init__(
        self,
        tell: Event,
        layout: client_files.FolderLayout,
        module: nn.Module,
        recording: Recording,
        numbers: Mapping[str, int],
        parts: Mapping[int, Any] | None,
        shift: int,
        key: str | None = None,
    ):
        self.tell, self.layout, self.module, self.recording = tell, layout, module, recording
        self.numbers, self.parts, self.shift, self.key = numbers, parts, shift, key
        self.prefixes: set[str] = set()
        self.sets: set[tuple[str, ...]] = set()
        self.remedy = "copy them again"  # of the last file that could not be read

    def say(self, text: str, keep: bool = True) -> None:
        self.tell({"event": "note", "text": text})
        if keep:
            self.recording.note(text)

    def gaps(self) -> None:
        """Rounds and clients that one would expect."""
        if not self.layout.clients:
            self.say(
                "no client's files: a run of global models alone, for curves over the rounds, spectra and landscapes"
            )
            return
        rounds = [r + self.shift for r in self.layout.rounds]
        lost = sorted(set(range(rounds[0], rounds[-1] + 1)) - set(rounds))
        if lost:
            self.say(f"no client files of round {ranges(lost)}")
        names = self.layout.names
        short = {
            r + self.shift: [n for n in names if n not in round_files]
            for r, round_files in sorted(self.layout.clients.items())
            if len(round_files) < len(names)
        }
        if 2 * len(short) < len(rounds):  # else clients are sampled, and their absence says nothing
            for r, absent in list(short.items())[:8]:
                self.say(
                    f"round {r} has no file of client {', '.join(absent[:6])}{' ...' if len(absent) > 6 else ''}"
                )
        if self.parts is not None:
            without = [n for n in names if self.numbers[n] not in self.parts]
            self.recording.know(outside=[self.numbers[n] for n in without])
            if without:
                self.say(unassigned(without), keep=False)

    def read(self, path: Path, label: str) -> State | None:
        """The weights in a file, None when it is damaged. Raises FldiagError for another architecture."""
        name = path.relative_to(self.layout.root) if path.is_relative_to(self.layout.root) else path
        try:
            verify(path)
            checkpoint = read_checkpoint(path, self.key)
            state = checkpoint.state
        except FldiagError as error:
            self.say(f"{label}: {error.what}: left out")
            self.remedy = error.remedy
            return None
        try:
            state, prefix = state_dict.fit(state, self.module)
        except FldiagError as error:
            raise FldiagError(
                f"{label} ({name}) does not fit the model: {error.what}",
                "a run has one architecture: give the --model of these files, or a --pattern that leaves others out; then "
                "the same command goes on",
            ) from None
        if checkpoint.alternatives and (checkpoint.key, *checkpoint.alternatives) not in self.sets:
            self.sets.add((checkpoint.key, *checkpoint.alternatives))
            self.say(f"{name}: {describe_choice(checkpoint.key, checkpoint.alternatives)}")
        if prefix and prefix not in self.prefixes:
            self.prefixes.add(prefix)
            self.say(f"the names fit the model without {prefix!r} before them ({name})", keep=False)
        return state

    def run(self, after: dict[int, Path], has_globals: bool, score: Score | None) -> Run:
        recording, has_clients = self.recording, bool(self.layout.clients)
        rounds = self.layout.rounds if has_clients else [t for t in sorted(after) if t > 0]
        if not rounds:
            raise FldiagError(
                f"{self.layout.root} holds the model before training alone",
                "give it to the verbs as it is",
            )
        globals_, done = _Globals(after, self.read), set(recording.run.rounds)
        first = rounds[0] + self.shift
        before: State | None = globals_(first - 1)
        if before is not None and 0 not in done and first == 1:
            recording.initial(before)
        if before is None and has_clients:
            self.say(
                f"what the clients received in round {first} is not there, so local training cannot be compared with it"
                + ("" if has_globals else " (--global-pattern or --initial would say it)")
            )
        if not has_globals:
            self.say(
                "no global models are given: they are taken to be the mean of the clients' weights"
                + (
                    ""
                    if self.parts is not None
                    else ", each counted alike as no partition is given"
                )
            )
        for i, r in enumerate(rounds):
            t = r + self.shift
            received = globals_(t - 1) or (
                before if not has_globals and i and rounds[i - 1] == r - 1 else None
            )
            if t in done:
                before = recording.run.checkpoint(t).state
                continue
            clients = self._clients(r) if has_clients else None
            row, before = self._round(t, clients, globals_, received, has_globals, score, bool(i))
            if row:
                self.tell({"event": "round", "done": i + 1, "total": len(rounds), **row})
        if not recording.run.rounds:
            raise FldiagError(f"none of the files in {self.layout.root} can be read", self.remedy)
        return recording.finish()

    def _clients(self, r: int) -> dict[int, State]:
        """The weights in the clients' files of a round."""
        clients: dict[int, State] = {}
        sources = self.layout.clients[r]
        for name in sorted(sources, key=lambda n: self.numbers[n]):
            state = self.read(sources[name], f"round {r + self.shift}, client {name}")
            if state is not None:
                clients[self.numbers[name]] = state
        return clients

    def _round(
        self,
        t: int,
        clients: dict[int, State] | None,
        globals_: _Globals,
        received: State | None,
        has_globals: bool,
        score: Score | None,
        later: bool,
    ) -> tuple[dict[str, Any] | None, State | None]:
        """Write round t; ``clients`` None: of a run of global models alone."""
        if received is None and later and clients is not None:
            self.say(
                f"round {t}: what the clients received, the global model of round {t - 1}, is not there"
            )
        aggregated, whence = globals_(t), "stored"
        if aggregated is None:
            if not clients:
                self.say(f"round {t} is left out: none of its files can be read")
                return None, None
            if has_globals:
                self.say(
                    f"round {t}: its global model is not there and taken to be the mean of the clients' weights"
                )
            sizes = [len(self.parts.get(k, ())) if self.parts is not None else 1 for k in clients]
            aggregated, whence = mean(list(clients.values()), [float(n) for n in sizes]), "mean"
        rows = score(aggregated) if score is not None else []
        self.recording.add(t, aggregated, clients or {}, received if clients else None, rows=rows)
        return {
            "round": t,
            "clients": len(clients or {}),
            "received": received is not None,
            "global": whence,
            **{row["metric"]: row["value"] for row in rows},
        }, aggregated
