"""One's own training loop as a run of fldiag: three lines in the script, and every diagnostic of runs works on it."""

from __future__ import annotations

import atexit
import contextlib
import copy
import io
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fldiag import models
from fldiag.data import Dataset, partition
from fldiag.errors import FldiagError, counted
from fldiag.integrations.evaluation import Evaluation
from fldiag.integrations.recorder_inputs import (
    Clients,
    confirm_numbers,
    examples_of,
    natural,
    normalisation_of,
    partition_of,
    read_clients,
    rows_of,
    weights_by_name,
)
from fldiag.models import lora, state_dict
from fldiag.models.state_dict import State
from fldiag.problem.weights import unwrap_model
from fldiag.results.provenance import digest
from fldiag.results.table import Row
from fldiag.runs.in_memory import UNTESTED, classes_last
from fldiag.runs.recording import Recording, confirm_same, mean, unassigned
from fldiag.runs.run import Run, lock

#: What holds a model's weights: a state_dict, the module itself, a flat vector, or arrays in the order of its state_dict.
Weights = Any
#: The highest number of a round.
ROUNDS = 10**6
#: The recorders of this process that are not closed, by their folder: ``resume`` takes the place of one that was forgotten.
_OPEN: dict[str, Recorder] = {}


class Recorder:
    """A run folder that your own training loop writes, round by round.

    Weights are given as state_dicts, modules, flat vectors of the parameters, or lists of arrays in the order of the state_dict
    (or of the parameters). They are copied, and the model is not changed. A round is on the disk, and can be diagnosed, when
    ``round`` returns. A round that is refused leaves nothing behind, also not the clients that were recorded for it.
    A test of the global model that fails is a note in the run and a warning, never an error in the loop.

    Args:
        out: the run's folder, which this process owns until ``close``, the end of a ``with`` block, or its own end.
        model: the network, or its registered name or ``pkg.mod:factory``: it names the tensors.
        data: the federation's data: (x, y) of the training examples, x a tensor, or tensors in a dict or tuple; a dict with
            ``labels``; a ``Dataset`` or ``DataLoader``; a ``fldiag.data.Dataset`` or a data set's name. The global model is
            evaluated after every round; arrays of up to 256 MB are kept with the run.
        clients: which examples belong to which client: for each client the indices into ``data``, or a ``Subset`` of it (in a
            list, a dict or a partition's file), or without ``data`` the examples themselves, in any of these forms. Clients have
            numbers from 0 or names (of sites); names are numbered in their order, which the run notes.
        test: the test examples, in the forms of ``data``, or a dict with those of each client; without them accuracy and loss
            are those of the training examples, and are called so.
        method: what tables call the training.
        seed: seed of the training, which tables show.
        evaluate: evaluate the global model after every round.
        resume: continue the run in ``out`` after its last stored round; model, data, partition and options must be the same. An
            earlier recorder of this process that still has the folder is closed.
        origin: plain values that describe where the run comes from.
        trainable: store only the parameters with ``requires_grad`` in the rounds, such as adapters of peft; the others are stored
            once, and weights in which they differ are refused.

    Raises:
        FldiagError: the folder is taken, or what is given does not fit together, or not what the run was recorded with so far.

    >>> import tempfile, fldiag, torch
    >>> net, x, y = torch.nn.Linear(2, 2), torch.randn(8, 2), torch.arange(8) % 2
    >>> with fldiag.Recorder(tempfile.mkdtemp() + "/run", net, data=(x, y), clients=[range(4), range(4, 8)]) as rec:
    ...     rec.round(received=net, clients={0: net, 1: net}, aggregated=net, metrics={"lr": 0.1})
    >>> rec.run.rounds
    [0, 1]
    """

    def __init__(
        self,
        out: str | Path,
        model: nn.Module | str,
        data: Any = None,
        clients: Any = None,
        *,
        test: Any = None,
        method: str = "own",
        seed: int = 0,
        evaluate: bool = True,
        resume: bool = False,
        origin: Mapping[str, Any] | None = None,
        trainable: bool = False,
    ):
        path, remarks = Path(out), list[str]()
        if data is None and clients is not None and not isinstance(clients, (str, Path)):
            data, clients, remarks = read_clients(clients, model)
        tests: Mapping[Any, np.ndarray] | None = None
        if _is_by_client(test, clients):
            test, tests, more_remarks = read_clients(test, model)
            remarks += more_remarks
        self.dataset, keep = examples_of(data, test, model)
        module = _module_of(model, self.dataset, trainable)
        self.dataset = _usable(self.dataset, module)
        keep = keep if self.dataset is not None else None
        indices = None if clients is None else partition_of(clients, self.dataset, data)
        self.clients = Clients(() if indices is None else indices)
        self.parts = (
            None
            if indices is None
            else {self.clients.number_of(name): index for name, index in indices.items()}
        )
        self.module = module
        self._done, self._begun, self._shift = 0, False, 0
        self._staged: dict[int, State] = {}
        self._received: State | None = None
        self._starts: dict[int, State] = {}
        self._rows: list[Row] = []
        self._examples: dict[int, int] = {}
        tensors = dict([*module.named_parameters(), *module.named_buffers()])
        self._kinds, self._shapes = (
            {n: t.dtype for n, t in tensors.items()},
            {n: t.shape for n, t in tensors.items()},
        )
        self._last: State | None = None
        self._evaluation: Evaluation | None = None
        self._failed = self._closed = False
        self._stack = contextlib.ExitStack()
        self._process, self._folder = os.getpid(), os.path.realpath(path)
        continued = (path / "run.json").is_file()
        if continued and not resume:
            raise FldiagError(
                f"{path} already holds a run",
                "choose another folder, or go on with it: resume=True",
                usage=True,
            )
        about = {"kind": "recorder", "method": method, "seed": seed, **(origin or {})}
        if continued:  # also before an earlier recorder of the folder is closed for it
            confirm_same(Run.open(path), about, module, self.dataset, self.parts)
        earlier = _OPEN.get(self._folder)
        if earlier is not None:
            earlier._release()
        self._stack.enter_context(lock(path))
        atexit.register(self._release)
        try:
            self.recording = Recording(
                path,
                module,
                model=model if isinstance(model, str) else None,
                data=_name(data, keep),
                dataset=self.dataset,
                origin=about,
                parts=self.parts,
                method=method,
                seed=seed,
                normalise=normalisation_of(self.dataset) if keep and self.dataset else None,
                resume=resume,
            )
            self._counts()
            if self._done:
                self._continue(indices or ())
            if tests is not None and "test_partition.npz" not in self.run.files:
                self._keep_tests(tests)
            if keep is not None and "data.npz" not in self.run.files:
                self.run.put("data.npz", lambda f: np.savez(f, **keep))  # type: ignore[arg-type]
                self.run.begin()
        except BaseException:
            self._release()
            raise
        _OPEN[self._folder] = self
        if self.dataset is not None and not self.dataset.tested:
            self.note(UNTESTED)
        for text in [*remarks, *(() if self.dataset is None else self.dataset.remarks)]:
            self.note(text)
        if data is not None and self.dataset is None:
            self.note(
                "not every example has one label: the run holds weights alone, and its data are given with a question"
            )
        if evaluate and self.dataset is not None:
            self._evaluation = Evaluation(module, self.dataset, self.note, self._warn)

    def __repr__(self) -> str:
        return (
            f"Recorder({str(self.recording.run.path)!r}, {counted(self._done, 'round')}, "
            f"{self.recording.layout.size:,} parameters{', closed' if self._closed else ''})"
        )

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if error is None:
                self.close()
        finally:
            self._release()

    @property
    def run(self) -> Run:
        """The run as it is now."""
        return self.recording.run

    # -- what a loop says

    def client(
        self,
        number: int | str,
        weights: Weights,
        *,
        received: Weights | None = None,
        metrics: Mapping[str, Any] | None = None,
        examples: int | None = None,
    ) -> None:
        """Record a client's trained weights for the current round.

        Args:
            number: the client's, or its name.
            weights: after its training.
            received: what it started from, where that is not what all clients received.
            metrics: numbers of its training, by name.
            examples: how many it trained on, where the data do not say.

        Raises:
            FldiagError: the weights do not fit the model.
        """
        k = self.clients.number_of(number)
        state = self.state(weights, f"client {number}")
        start = None if received is None else self.state(received, f"what client {number} received")
        rows = rows_of(
            metrics,
            self.clients.number_of,
            moment="trained",
            scope="client",
            client=k,
            source="the loop",
        )
        if examples is not None:
            self._examples[k] = natural(examples, f"client {k}: examples =")
        self._staged[k] = state
        if start is not None:
            self._starts[k] = start
        self._rows = [row for row in self._rows if row.get("client") != k] + rows

    def received(self, weights: Weights) -> None:
        """Record the weights from which the clients of the current round start.

        Args:
            weights: of the global model.

        Raises:
            FldiagError: the weights do not fit the model.
        """
        self._received = self.state(weights, "the received model")

    def round(
        self,
        *,
        aggregated: Weights,
        received: Weights | None = None,
        clients: Mapping[Any, Weights] | None = None,
        metrics: Mapping[str, Any] | None = None,
        number: int | None = None,
    ) -> None:
        """Write a round.

        Args:
            aggregated: the global model after it.
            received: what its clients started from; by default what ``received`` recorded, else the previous global model, where
                that is of the round before. Where they started from different weights (personal layers, batch-norm of their
                own, asynchronous rounds), a dict: client -> weights.
            clients: client -> its trained weights, in addition to those that ``client`` recorded.
            metrics: numbers of the round by name; a dict under a name holds a number for each client.
            number: the round's, above all before it; by default the next. A loop that counts from 0 is understood: its rounds are
                stored under the next number. Round 0 without clients is the model before training.

        Raises:
            FldiagError: weights or number do not fit, or the disk refuses the round. Nothing of the round is kept then.
        """
        try:
            for k, weights in (clients or {}).items():
                self.client(k, weights)
            if isinstance(received, Mapping) and self._is_by_client(received):
                for k, weights in received.items():
                    label = f"what client {k} received"
                    self._starts[self.clients.number_of(k)] = self.state(weights, label)
            elif received is not None:
                self.received(received)
            t, shift = (self._done + 1, self._shift) if number is None else self._numbered(number)
            rows = [
                *self._rows,
                *rows_of(
                    metrics,
                    self.clients.number_of,
                    moment="aggregated",
                    scope="global",
                    source="the loop",
                ),
            ]
            before = (
                self._last if t == self._done + 1 else None
            )  # over a gap nobody knows what the clients started from
            self.store(
                t,
                aggregated,
                self._staged,
                before if self._received is None else self._received,
                rows,
                shift=shift,
                starts=self._starts,
            )
        finally:
            self._clear()

    def _clear(self) -> None:
        """Nothing is known of the next round."""
        self._staged, self._received, self._rows, self._examples = {}, None, [], {}
        self._starts = {}

    def _is_by_client(self, weights: Mapping[Any, Any]) -> bool:
        """Whether it is a dict of clients, not of the model's tensors."""
        return not any(
            isinstance(value, Tensor | np.ndarray)
            and not isinstance(key, int)
            and key not in self.clients.numbers
            for key, value in weights.items()
        )

    def _continue(self, names: Iterable[str]) -> None:
        """Know again what the run's rounds say; ``names``: of the clients in the partition."""
        run = self.run
        self.clients = Clients(names, {name: k for k, name in run.origin["names"].items()})
        self.clients.next = max(self.clients.next, run.about["config"]["clients"]["total"])
        self._last = self.state(run.checkpoint().state)

    def _keep_tests(self, tests: Mapping[Any, np.ndarray]) -> None:
        """Store whose test examples are whose."""
        by_number = {self.clients.number_of(name): index for name, index in tests.items()}
        count = 1 + max([*by_number, *(self.parts or ())])
        listed = [by_number.get(k, np.empty(0, dtype=np.int64)) for k in range(count)]
        buffer = io.BytesIO()
        partition.save(buffer, listed)
        self.run.put("test_partition.npz", lambda f: f.write(buffer.getvalue()))
        self.run.begin()

    def _numbered(self, number: Any) -> tuple[int, int]:
        """The number under which a round is stored, and how much higher that is than the loop's own."""
        n = natural(number, "round number", ROUNDS)
        from_zero = n == 0 and not self._begun and bool(self._staged or self._received is not None)
        shift = 1 if from_zero else self._shift
        return n + shift, shift

    def close(self) -> Run:
        """End the recording and release the folder.

        Returns:
            The run.
        """
        if not self._closed:
            if self._done:
                with self._writing():
                    self.recording.finish()
            self._release()
        return self.recording.run

    # -- what recorders of other programs use

    def store(
        self,
        t: int,
        aggregated: Weights,
        clients: Mapping[int, State],
        received: State | None,
        rows: Sequence[Row],
        *,
        shift: int = 0,
        starts: Mapping[int, State] | None = None,
    ) -> None:
        """Write round t with the global model's scores.

        Args:
            t: the round's number, above all before it; 0 for the model before training.
            aggregated: the global model after it.
            clients: what they made of it, as ``state`` gives it.
            received: what they started from, None where that is not known.
            rows: numbers of the round.
            shift: how much higher t is than the loop's own number.
            starts: what each client started from, where that differs.

        Raises:
            FldiagError: weights or numbers do not fit, or the disk refuses the round.
        """
        if self._begun and t <= self._done:
            last = self._done - shift
            raise FldiagError(
                f"round {t - shift} is not after round {last}, the last that was recorded",
                f"give a number above {last}, or leave it out: the next is taken",
                usage=True,
            )
        if self.parts is not None and not self.clients.are_named:
            confirm_numbers(clients, self.parts)
        received, starts, notes = self._received_by(clients, received, starts or {})
        state = self.state(aggregated, "the aggregated model")
        outside = sorted(clients.keys() - self.parts.keys()) if self.parts is not None else []
        names = {k: name for name, k in self.clients.numbers.items()}
        if unknown := sorted({*outside} - {*self.run.origin.get("outside", [])}):
            in_partition = [names.get(k, str(k)) for k in sorted(self.parts or ())]
            warnings.warn(
                f"fldiag: {unassigned([names.get(k, str(k)) for k in unknown])}; it has {', '.join(in_partition[:6])}"
                f"{' ...' if len(in_partition) > 6 else ''}",
                stacklevel=3,
            )
        scores = self._evaluation.rows(state) if self._evaluation is not None else []
        with self._writing():
            for text in notes:
                self.recording.note(text)
            if t == 0:
                self.recording.initial(state)
                self.recording.add_rows(0, [*rows, *scores])
            else:
                if received is not None and not self.recording.run.rounds:
                    self.recording.initial(received)
                self.recording.know(
                    examples=self._examples,
                    shift=shift,
                    outside=outside,
                    names=names,
                )
                if names:
                    self.recording.note(_numbering(names))
                self.recording.add(
                    t,
                    state,
                    clients,
                    received,
                    [*rows, *scores],
                    starts=starts or None,
                )
        self._last, self._begun, self._done, self._shift = state, True, t, shift

    def _received_by(
        self, clients: Mapping[int, State], received: State | None, starts: Mapping[int, State]
    ) -> tuple[State | None, dict[int, State], list[str]]:
        """What all clients received, and what each did where that differs; and what had to be supposed."""
        if not starts:
            return received, {}, []
        if received is not None and starts.keys() < clients.keys():
            starts = {k: starts.get(k, received) for k in clients}
        lacking = sorted(clients.keys() - starts.keys())
        if lacking:
            raise FldiagError(
                f"what client {lacking[0]} received is missing",
                "give it for every client of the round, or for none",
                usage=True,
            )
        starts = {k: starts[k] for k in clients}
        common = {digest(start) for start in starts.values()}
        if len(common) == 1 and (received is None or digest(received) in common):
            return next(iter(starts.values())), {}, []
        if received is not None:
            return received, starts, []
        text = "the global model before the first round is taken to be the mean of what its clients received"
        return mean(list(starts.values()), [1.0] * len(starts)), starts, [text]

    def begin(self, state: State) -> None:
        """Write the model before training.

        Args:
            state: as ``state`` gives it.

        Raises:
            FldiagError: the recorder is closed.
        """
        with self._writing():
            self.recording.initial(state)

    def note(self, text: str) -> None:
        """Remember what was missing or had to be supposed; every table of the run will say so.

        Args:
            text: in words.
        """
        with self._writing():
            self.recording.note(text)

    def state(self, weights: Weights, label: str = "the model") -> State:
        """Weights in any form as a copy of the model's state_dict.

        Args:
            weights: see the class.
            label: what an error calls them.

        Returns:
            Name -> tensor on the CPU, in the model's types.

        Raises:
            FldiagError: they do not fit the model, or differ from the frozen weights, which are not stored with a round.
        """
        tensors = weights_by_name(weights, self.module, self.recording.layout)
        if base := lora.frozen_weights(self.module):
            tensors = state_dict.without_prefix(tensors, self.module)[0]
            moved = next(
                (n for n, t in base.items() if n in tensors and not _equal(tensors[n], t)), None
            )
            if moved is not None:
                raise FldiagError(
                    f"frozen weights of {label} differ from those of the recorder's model: {moved}",
                    "keep them as they are in training; or store all weights: record into another folder with "
                    "trainable=False",
                    usage=True,
                )
            tensors = {n: t for n, t in tensors.items() if n not in base}
        if {
            n: v.shape for n, v in tensors.items()
        } == self._shapes:  # as a rule; walking the module takes as long as the disk
            state = {n: tensors[n] for n in self._kinds}
        else:
            state, _ = state_dict.fit(
                state_dict.with_first_names(tensors, self.module), self.module
            )
        # loops and servers make float64 of float32, and fractions of counters; a model loads both as it has them
        return {
            n: (v if self._kinds[n].is_floating_point else v.round()).to(
                "cpu", self._kinds[n], copy=True
            )
            for n, v in state.items()
        }

    def _warn(self, text: str) -> None:
        self.note(text)
        if not self._failed:
            warnings.warn(
                f"fldiag: {text}; weights are recorded all the same (evaluate=False: no evaluation)",
                stacklevel=2,
            )
        self._failed = True

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Refuse to write for a closed recorder and into a folder that is gone.

        After an error, or Ctrl-C, the recorder goes back to what is on the disk: the round that was not written is the next one.
        """
        if self._closed:
            raise FldiagError(
                f"the recorder of {self.recording.run.path} is closed",
                "continue the run with a new one: fldiag.Recorder(..., resume=True)",
                usage=True,
            )
        try:
            yield
        except BaseException:
            with contextlib.suppress(FldiagError):
                self.recording.reload()
            self._counts()
            raise

    def _counts(self) -> None:
        run = self.recording.run
        self._done, self._begun, self._shift = run.done, bool(run.rounds), self.recording.shift

    def _release(self) -> None:
        if os.getpid() != self._process:  # a copy of the process: the folder is not its own
            return
        atexit.unregister(self._release)
        if _OPEN.get(self._folder) is self:
            del _OPEN[self._folder]
        self._closed = True
        self._stack.close()


def _module_of(model: nn.Module | str, dataset: Dataset | None, trainable: bool) -> nn.Module:
    """The network; with ``trainable`` a copy in which the other parameters are frozen."""
    if isinstance(model, str):
        shape, classes = (None, 0) if dataset is None else (dataset.shape, dataset.classes)
        module = models.build(model, shape, classes, allow_code={model})
    else:
        module = unwrap_model(model)[0]
    if trainable:
        module = copy.deepcopy(module)
        lora.freeze(module, [n for n, p in module.named_parameters() if not p.requires_grad])
    return module


def _usable(dataset: Dataset | None, module: nn.Module) -> Dataset | None:
    """The data set; None where its examples have labels of positions and the model has no outputs for these."""
    if dataset is None or not dataset.dense:
        return dataset
    try:
        classes_last(module, dataset)
    except Exception:  # the user's model may raise anything
        return None
    return dataset


def _is_by_client(test: Any, clients: Any) -> bool:
    """Whether test examples are given for each client, by the names that the clients have."""
    if not isinstance(test, Mapping) or clients is None or isinstance(clients, (str, Path)):
        return False
    names = clients if isinstance(clients, Mapping) else range(len(clients))
    return bool(test) and {str(k) for k in test} <= {str(k) for k in names}


def _numbering(names: Mapping[int, str]) -> str:
    listing = ", ".join(f"{k} = {names[k]}" for k in sorted(names)[:20])
    return f"clients are numbered {listing}{' ...' if len(names) > 20 else ''}"


def _equal(tensor: Tensor, base: Tensor) -> bool:
    """Whether frozen weights are the same but for rounding: averages and copies in another precision keep half the digits."""
    if tensor.shape != base.shape:
        return False
    a, b = tensor.detach().to(base.device), base.detach()
    if a.dtype == b.dtype and torch.equal(a, b):
        return True
    digits = max((torch.finfo(t.dtype).eps for t in (a, b) if t.is_floating_point()), default=0.0)
    a, b = a.double(), b.double()
    return bool(
        torch.allclose(
            a,
            b,
            rtol=0,
            atol=digits**0.5 * float(b.abs().max()) if b.numel() else 0,
            equal_nan=True,
        )
    )


def _name(data: Any, keep: Mapping[str, np.ndarray] | None) -> str | None:
    """What the run's files say of the data; the path of those in the run is from its folder, which may move."""
    if keep is not None:
        return "npz:data.npz"
    return data if isinstance(data, str) else None
