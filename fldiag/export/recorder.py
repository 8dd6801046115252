"""One's own training loop as a run of fldiag: three lines in the script, and every diagnostic of runs works on it."""

from __future__ import annotations

import atexit
import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fldiag import models
from fldiag.checkpoint import foreign, owner
from fldiag.checkpoint.foreign import State
from fldiag.checkpoint.recording import Recording
from fldiag.checkpoint.run import Run
from fldiag.errors import FldiagError, counted
from fldiag.execution.background import Background
from fldiag.export.given import examples_of, number_of, partition_of, read_clients, rows_of, seen_as
from fldiag.export.weights import named
from fldiag.models import frozen
from fldiag.models.network import Network
from fldiag.problem.in_memory import UNTESTED, reading
from fldiag.problem.ingredients import unwrapped
from fldiag.results.table import Row
from fldiag.training.evaluate import tested

#: What holds a model's weights: a state_dict, the module itself, a flat vector, or arrays in the order of its state_dict.
Weights = Any


class Recorder:
    """A run folder that your own training loop writes, round by round.

    Weights are given as state_dicts, modules, flat vectors of the parameters, or lists of arrays in the order of the state_dict
    (or of the parameters). They are copied before a call returns, and the model is not changed. A thread writes the rounds in
    order while the loop continues, at most two behind; the next call raises an error of the disk. A script that ends or fails
    leaves all its rounds, and a killed one all but the last one or two. What is on the disk can be diagnosed at any moment;
    ``flush`` waits for the rest.

    Args:
        out: the run's folder, which this process owns until ``close``, the end of a ``with`` block, or its own end.
        model: the network, or its registered name or ``pkg.mod:factory``: it names the tensors.
        data: the federation's data: (x, y) of the training examples, x a tensor, or tensors in a dict or tuple; a dict with
            ``labels``; a ``Dataset`` or ``DataLoader``; a ``fldiag.data.Dataset`` or a data set's name. The global model is
            tested after every round; arrays of up to 256 MB are kept with the run.
        clients: which examples belong to which client: for each client the indices into ``data``, or a ``Subset`` of it (in a
            list, a dict or a partition's file), or without ``data`` the examples themselves, in any of these forms.
        test: the test examples; without them the training examples are used instead, and every table says so.
        method: what tables call the training.
        seed: seed of the training, which tables show.
        evaluate: test the global model after every round.
        resume: continue the run in ``out`` after its last stored round.
        origin: plain values that describe where the run comes from.
        trainable: store only the parameters with ``requires_grad`` in the rounds, such as adapters of peft; the others, which
            must not change, are stored once.

    Raises:
        FldiagError: the folder is taken, or what is given does not fit together.

    >>> import tempfile, fldiag, torch
    >>> net, x, y = torch.nn.Linear(2, 2), torch.randn(8, 2), torch.arange(8) % 2
    >>> with fldiag.Recorder(tempfile.mkdtemp() + "/run", net, data=(x, y), clients=[range(4), range(4, 8)]) as rec:
    ...     rec.round(received=net, clients={0: net, 1: net}, aggregated=net, metrics={"lr": 0.1})
    >>> rec.run.rounds
    [1]
    """

    def __init__(self, out: str | Path, model: nn.Module | str, data: Any = None, clients: Any = None, *, test: Any = None,
                 method: str = "own", seed: int = 0, evaluate: bool = True, resume: bool = False,
                 origin: Mapping[str, Any] | None = None, trainable: bool = False):
        path = Path(out)
        if data is None and clients is not None and not isinstance(clients, (str, Path)):
            data, clients = read_clients(clients, model)
        self.dataset, keep = examples_of(data, test, model)
        if isinstance(model, str):
            shape = None if self.dataset is None else self.dataset.shape
            module, name = models.build(model, shape, 0 if self.dataset is None else self.dataset.classes, code=True), model
        else:
            module, name = unwrapped(model)[0], None
        if trainable:
            module = copy.deepcopy(module)
            frozen.freeze(module, [n for n, p in module.named_parameters() if not p.requires_grad])
        self._frozen = frozen.weights(module).keys()
        self.parts = None if clients is None else partition_of(clients, self.dataset, data)
        self.module = module
        own = dict([*module.named_parameters(), *module.named_buffers()])
        self._kinds, self._shapes = {n: t.dtype for n, t in own.items()}, {n: t.shape for n, t in own.items()}
        self._network = Network(reading(module, self.dataset)) if evaluate and self.dataset is not None else None
        self._staged: dict[int, State] = {}
        self._received: State | None = None
        self._last: State | None = None
        self._rows: list[Row] = []
        self._examples: dict[int, int] = {}
        self._writing = Background()
        self._stack = contextlib.ExitStack()
        if (path / "run.json").is_file() and not resume:
            raise FldiagError(f"{path} already holds a run", "choose another folder, or go on with it: resume=True", usage=True)
        self._stack.enter_context(owner.hold(path))
        atexit.register(self._release)
        try:
            self.recording = Recording(path, module, model=name, data=_name(data, keep), dataset=self.dataset,
                                       parts=self.parts, method=method, seed=seed, normalise=seen_as(keep),
                                       origin={"kind": "recorder", "method": method, "seed": seed, **(origin or {})})
            self._done, self._begun = self.run.done, bool(self.run.rounds)
            if self._done:
                self._last = self.run.checkpoint().state
            if keep is not None and "data.npz" not in self.run.index["files"]:
                self.run.put("data.npz", lambda f: np.savez(f, **keep))  # type: ignore[arg-type]
                self.run.commit()
        except BaseException:
            self._release()
            raise
        if self.dataset is not None and self.dataset is not data and self.dataset.test_x is self.dataset.train_x:
            self.note(UNTESTED)
        for text in () if self.dataset is None else self.dataset.remarks:
            self.note(text)
        if data is not None and self.dataset is None:
            self.note("not every example has one label: the run holds weights alone, and its data are given with a question")

    def __repr__(self) -> str:
        return f"Recorder({str(self.recording.run.path)!r}, {counted(self._done, 'round')}, " \
               f"{self.recording.layout.size:,} parameters)"

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.close()
        else:
            self._release()

    @property
    def run(self) -> Run:
        """The run as it is now, with all rounds on the disk. Raises FldiagError when the disk refused one."""
        self.flush()
        return self.recording.run

    # -- what a loop says

    def client(self, number: int, weights: Weights, *, metrics: Mapping[str, Any] | None = None,
               examples: int | None = None) -> None:
        """Record a client's trained weights for the current round.

        Args:
            number: the client's.
            weights: after its training.
            metrics: numbers of its training, by name.
            examples: how many it trained on, where the data do not say.

        Raises:
            FldiagError: the weights do not fit the model.
        """
        self._staged[number_of(number)] = self.state(weights)
        self._rows += rows_of(metrics, moment="trained", scope="client", client=int(number), source="the loop")
        if examples is not None:
            self._examples[int(number)] = int(examples)

    def received(self, weights: Weights) -> None:
        """Record the weights from which the clients of the current round start.

        Args:
            weights: of the global model.

        Raises:
            FldiagError: the weights do not fit the model.
        """
        self._received = self.state(weights)
        if not self._begun:
            self._put(self.recording.initial, self._received)
            self._begun = True

    def round(self, *, aggregated: Weights, received: Weights | None = None, clients: Mapping[int, Weights] | None = None,
              metrics: Mapping[str, Any] | None = None, number: int | None = None) -> None:
        """Write a round.

        Args:
            aggregated: the global model after it.
            received: what its clients started from; by default what ``received`` recorded, else the previous global model.
            clients: client -> its trained weights, in addition to those that ``client`` recorded.
            metrics: numbers of the round by name; a dict under a name holds a number for each client.
            number: the round's; by default the next.

        Raises:
            FldiagError: weights do not fit the model, or the disk refused an earlier round.
        """
        t = self._done + 1 if number is None else int(number)
        if received is not None:
            self.received(received)
        for k, weights in (clients or {}).items():
            self.client(k, weights)
        rows = [*self._rows, *rows_of(metrics, moment="aggregated", scope="global", source="the loop")]
        self.store(t, aggregated, self._staged, self._last if self._received is None else self._received, rows)
        self._staged, self._received, self._rows = {}, None, []

    def flush(self) -> None:
        """Wait until every round is on the disk.

        Raises:
            FldiagError: the disk refused one; it and those after it are not recorded.
        """
        with self._told():
            self._writing.flush()

    def close(self) -> Run:
        """End the recording and release the folder.

        Returns:
            The run.
        """
        run = self.run
        if run.done:
            self.recording.finish()
        self._release()
        return run

    # -- what recorders of other programs use

    def store(self, t: int, aggregated: Weights, clients: Mapping[int, State], received: State | None,
              rows: Sequence[Row]) -> None:
        """Write round t with the global model's scores on the test examples; ``flush`` waits for the disk.

        Args:
            t: the round's number, from 1.
            aggregated: the global model after it.
            clients: what they made of it, as ``state`` gives it.
            received: what they started from, None where that is not known.
            rows: numbers of the round.

        Raises:
            FldiagError: weights do not fit, or the disk refused an earlier round.
        """
        state = self.state(aggregated)
        self._put(self._write, t, state, clients, received, [*rows, *self._scores(state)], self._examples)
        self._last, self._examples, self._begun, self._done = state, {}, True, max(self._done, t)

    def note(self, text: str) -> None:
        """Remember what was missing or had to be supposed; every table of the run will say so.

        Args:
            text: in words.
        """
        self._put(self.recording.note, text)

    def state(self, weights: Weights) -> State:
        """Weights in any form as a copy of the model's state_dict.

        Args:
            weights: see the class.

        Returns:
            Name -> tensor on the CPU, in the model's types.

        Raises:
            FldiagError: they do not fit the model.
        """
        held = {n: t for n, t in named(weights, self.module, self.recording.layout).items() if n not in self._frozen}
        if {n: v.shape for n, v in held.items()} == self._shapes:  # as a rule; walking the module takes as long as the disk
            state = {n: held[n] for n in self._kinds}
        else:
            state, _ = foreign.fit(foreign.with_first_names(held, self.module), self.module)
        # loops and servers make float64 of float32, and fractions of counters; a model loads both as it has them
        return {n: (v if self._kinds[n].is_floating_point else v.round()).to("cpu", self._kinds[n], copy=True)
                for n, v in state.items()}

    def _scores(self, state: State) -> list[Row]:
        if self._network is None or self.dataset is None:
            return []
        return tested(self._network, state, self.dataset)

    def _write(self, t: int, state: State, clients: Mapping[int, State], received: State | None, rows: Sequence[Row],
               examples: Mapping[int, int]) -> None:
        self.recording.know(examples=examples)
        self.recording.add(t, state, clients, received, rows)

    def _put(self, job: Callable[..., Any], *args: Any) -> None:
        with self._told():
            self._writing.put(job, *args)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """After an error the next round is the one that was not written."""
        try:
            yield
        except BaseException:
            self._done, self._begun = self.recording.run.done, bool(self.recording.run.rounds)
            raise

    def _release(self) -> None:
        atexit.unregister(self._release)
        try:
            self._writing.close()
        finally:
            self._stack.close()


def _name(data: Any, keep: Mapping[str, np.ndarray] | None) -> str | None:
    """What the run's files say of the data; the path of those in the run is from its folder, which may move."""
    if keep is not None:
        return "npz:data.npz"
    return data if isinstance(data, str) else None
