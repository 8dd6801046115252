"""One's own training loop as a run: three lines in the script, and every diagnostic of runs works on it."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fldiag import data as datasets
from fldiag import models
from fldiag.data import Dataset, packed, partition
from fldiag.data.dataset import ARRAYS
from fldiag.errors import FldiagError, counted, error_text
from fldiag.models import lora, state_dict
from fldiag.params import Layout
from fldiag.problem.loss import is_probabilities
from fldiag.problem.weights import copy_module, unwrap_model
from fldiag.results.provenance import digest, provenance
from fldiag.results.table import Row
from fldiag.runs import base, given
from fldiag.runs.checkpoint import State
from fldiag.runs.open_problem import logits_of, merges, with_packed_inputs
from fldiag.runs.run import ABOUT, LOCK, Run, lock
from fldiag.training.evaluate import score_rows, scores_of

#: Bytes of examples up to which a run keeps its own copy of them.
KEPT = 256 * 2**20
NOTHING = np.empty(0, dtype=np.int64)
#: The recorders of this process by their folders: ``resume`` takes the place of one that an interrupted cell left.
_OPEN: weakref.WeakValueDictionary[str, Recorder] = weakref.WeakValueDictionary()


class Recorder:
    """A run folder that your own training loop writes, round by round.

    Weights are a module, a state_dict, a flat vector [P] of the parameters, or a list of arrays in the state_dict's order. They
    are copied, and the model is not changed. A round is on the disk, and can be diagnosed, when ``round`` returns. A round that
    is refused leaves nothing behind. A test of the global model that fails is a note in the run and a warning, never an error.
    One thread of one process records: the one that made the recorder.

    Args:
        out: The run's folder.
        model: The network (its weights are not read, but with ``trainable``), or the name of one: ``mlp``, ``pkg.mod:factory``.
        data: Training examples: ``(x, y)``, a dict with ``labels``, a torch ``Dataset`` or ``DataLoader``, ``(x, y, test_x,
            test_y)``, or a data set's name; None: the run holds weights alone. x is a tensor, or a dict or tuple of tensors.
        clients: Client -> the indices of its examples in ``data`` (in a list, a dict or a file), or without ``data`` the
            examples themselves. Clients are numbered from 0.
        test: Test examples, in the forms of ``data``; without them the global model is tested on the training examples.
        test_clients: Client -> the indices of its own test examples in ``test``.
        method: What tables call the training.
        seed: Of the training; tables show it.
        trainable: Store only the parameters with ``requires_grad`` in the rounds, such as adapters. The others are stored once,
            and weights in which they differ are refused.
        resume: Go on with the run in ``out`` after its last round.

    Raises:
        FldiagError: The folder is taken, what is given does not fit together, or it is not what was recorded so far.

    >>> import tempfile, fldiag, torch
    >>> net, x, y = torch.nn.Linear(2, 2), torch.randn(8, 2), torch.arange(8) % 2
    >>> with fldiag.Recorder(tempfile.mkdtemp() + "/run", net, data=(x, y), clients=[range(4), range(4, 8)]) as rec:
    ...     rec.round(received=net, clients={0: net, 1: net}, aggregated=net, metrics={"lr": 0.1})
    >>> rec.run.rounds
    [0, 1]
    """

    #: Where the rounds come from.
    origin: ClassVar[str] = "recorder"

    def __init__(
        self,
        out: str | Path,
        model: nn.Module | str,
        data: Any = None,
        clients: Any = None,
        *,
        test: Any = None,
        test_clients: Any = None,
        method: str = "own",
        seed: int = 0,
        trainable: bool = False,
        resume: bool = False,
    ):
        name = data if isinstance(data, str) else None
        self.parts: given.Parts | None = None
        if data is None and given.are_examples(clients):
            data, self.parts = given.examples_of(clients)
        self.dataset = _dataset_of(data, test)
        n, n_test = 0, 0
        if self.dataset is not None:
            n, n_test = len(self.dataset.train_y), len(self.dataset.test_y)
        if clients is not None and self.parts is None:
            self.parts = given.partition_of(clients, data, n or None)
        partitions = {} if self.parts is None else {"partition.npz": self.parts}
        if test_clients is not None:
            partitions["test_partition.npz"] = given.partition_of(test_clients, test, n_test)
        self.module = _module_of(model, self.dataset, trainable)
        self.layout = Layout.of(self.module)
        self._tensors = dict([*self.module.named_parameters(), *self.module.named_buffers()])
        self._base = lora.frozen_weights(self.module)
        self._merges = merges(self.module)
        self._evaluator: nn.Module | None = None
        if self.dataset is not None:
            self._evaluator = with_packed_inputs(copy_module(self.module).cpu(), self.dataset)
        self._trained: dict[int, State] = {}
        self._rows: list[Row] = []
        self._notes: list[str] = []
        self._owner = os.getpid(), threading.get_ident()
        self._is_closed = False
        total = max(map(max, partitions.values()), default=-1) + 1
        lists = {n: [p.get(k, NOTHING) for k in range(total)] for n, p in partitions.items()}
        path = Path(out)
        self._config: dict[str, Any] = {
            "name": path.resolve().name,
            "seed": seed,
            "data": {} if name is None else {"name": name},
            "partition": {"kind": "unknown" if self.parts is None else "given"},
            "clients": {"total": total},
            "model": {"name": model} if isinstance(model, str) else {},
            "method": {"name": method},
        }
        self._recipe = {
            "kind": self.origin,
            "method": method,
            "seed": seed,
            "partition": digest(lists) if lists else None,
        }
        about = provenance(
            seed=seed,
            data=None if self.dataset is None else self.dataset.fingerprint(),
            architecture=digest([[n, list(t.shape)] for n, t in self._tensors.items()])[:16],
            module=f"{type(self.module).__module__}.{type(self.module).__qualname__}",
            **base.provenance(self.module),
        )
        folder = os.path.realpath(out)
        if resume and folder in _OPEN:
            _OPEN[folder]._release()
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(lock(path))
        try:
            is_new = not (path / ABOUT).is_file()
            self.run = self._created(path, about, lists) if is_new else Run.open(path)
            if not is_new:
                self._go_on(about, resume)
        except BaseException:
            self._stack.close()
            raise
        _OPEN[folder] = self
        self._last = self.state(self.run.checkpoint().state) if self.run.records else None
        for text in () if self.dataset is None else self.dataset.remarks:
            self.note(text)
        if self.dataset is not None and not self.dataset.tested:
            self.note(given.UNTESTED)
        if self._merges:
            self.note(
                "the model's eval() rewrites its weights: state_dicts are taken to be those of train mode"
            )

    def _created(self, path: Path, about: Any, lists: Mapping[str, Sequence[np.ndarray]]) -> Run:
        if any(entry.name != LOCK for entry in path.iterdir()):
            raise FldiagError(f"{path} holds other files", "choose an empty folder", usage=True)
        dataset = self.dataset
        is_kept = dataset is not None and not self._config["data"]
        if dataset is not None and is_kept:
            is_kept = sum(getattr(dataset, name).nbytes for name in ARRAYS) <= KEPT
        if dataset is not None and is_kept:
            moments = [",".join(map(repr, part)) for part in (dataset.mean, dataset.std)]
            how = "/".join(moments) if dataset.mean else None
            self._config["data"] = {"name": "npz:data.npz", "normalise": how}
        names = digest(self._config, self._recipe)[:16]
        run = Run.create(path, self._config, about, hash=names, origin=self._about()["origin"])
        try:
            for name, parts in lists.items():
                run.put(name, lambda f, parts=parts: partition.save(f, parts))  # type: ignore[misc]
            if dataset is not None and is_kept:
                run.put("data.npz", lambda f: packed.save(f, dataset))
            base.keep(run, self.module)
            run.begin()
        except BaseException:  # of a full disk nothing stays that would be in the way later
            run.discard()
            raise
        return run

    def _go_on(self, about: Mapping[str, Any], resume: bool) -> None:
        """Raises FldiagError unless the run may go on, and was recorded so far with this model, data and partition."""
        run = self.run
        if not resume:
            raise FldiagError(
                f"{run.path} already holds a run",
                "choose another folder, or go on with it: resume=True",
                usage=True,
            )
        before = {**run.origin.get("recipe", {}), **run.about["provenance"]}
        now = {**self._recipe, **about}
        for key in (*self._recipe, "data", "architecture", "base"):
            if before.get(key) != now.get(key):
                raise FldiagError(
                    f"the {key} is not that with which {run.path} was recorded so far",
                    "give the same, or record into another folder",
                    usage=True,
                )
        run.resume()
        self._config, self._notes = run.about["config"], run.origin["notes"]

    def __repr__(self) -> str:
        state = ", closed" if self._is_closed else ""
        rounds = counted(self.run.done, "round")
        return f"Recorder({str(self.run.path)!r}, {rounds}, {self.layout.size:,} parameters{state})"

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: Any, error: object, trace: object) -> None:
        if kind is None:
            self.close()
        self._release()

    # What a loop says

    def client(
        self, client: int, weights: Any, *, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Record a client's trained weights for the current round, as soon as they are there.

        Args:
            client: Its number.
            weights: After its training.
            metrics: Numbers of its training.

        Raises:
            FldiagError: The weights do not fit the model, or the client is not in the partition.
        """
        self._confirm_owner()
        k = given.number_of(client)
        if self.parts is not None and k not in self.parts:
            raise FldiagError(
                f"client {k} is not in the partition of clients {min(self.parts)} to {max(self.parts)}",
                "number the clients as the partition does",
                usage=True,
            )
        rows = _rows(metrics, moment="trained", scope="client", client=k)
        self._trained[k] = self.state(weights, f"client {k}")
        self._rows = [*(row for row in self._rows if row["client"] != k), *rows]

    def round(
        self,
        *,
        aggregated: Any,
        clients: Mapping[int, Any] | None = None,
        received: Any = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Write a round.

        Args:
            aggregated: The global model after the round.
            clients: Client -> its trained weights, besides those given with ``client``.
            received: What the clients started from, or a dict client -> what it started from; by default the global model
                after the round before.
            metrics: Numbers of the global model.

        Raises:
            FldiagError: What is given does not fit, or the disk refuses. Nothing of the round is kept then.
        """
        self._confirm_owner()
        try:
            for client, weights in (clients or {}).items():
                self.client(client, weights)
            start, starts = self._received(received)
            state = self.state(aggregated, "the aggregated model")
            count = {"moment": "trained", "scope": "global", "metric": "clients"}
            rows = [{**count, "value": float(len(self._trained))}, *self._rows]
            rows += _rows(metrics, moment="aggregated", scope="global")
            rows += self._scores(state)
            self._write(state, start, starts, rows)
            self._last = state
        finally:
            self._trained, self._rows = {}, []

    def note(self, text: str) -> None:
        """Remember what was missing or had to be supposed; every table of the run says so.

        Args:
            text: In words.
        """
        self._confirm_owner()
        if text not in self._notes:
            self._notes = [*self._notes, text]

    def close(self) -> Run:
        """Say that no round is missing any more, and release the folder.

        Returns:
            The run.
        """
        if not self._is_closed:
            self._confirm_owner()
            self._config = {**self._config, "rounds": self.run.done}
            self._append(self.run.done, [], status="finished")
            self._release()
        return self.run

    def state(self, weights: Any, label: str = "the model") -> State:
        """Weights in any form as a copy of the model's state_dict.

        Args:
            weights: See the class.
            label: What an error calls them.

        Returns:
            Name -> tensor on the CPU, in the model's types.

        Raises:
            FldiagError: They do not fit the model, are no plain numbers, or differ from the frozen weights.
        """
        tensors = {n: _plain(v, f"{n} of {label}") for n, v in self._named(weights).items()}
        if self._base:
            tensors, _ = state_dict.without_prefix(tensors, self.module)
        for name, frozen in self._base.items():
            if name in tensors and _is_moved(tensors.pop(name), frozen):
                raise FldiagError(
                    f"the frozen weights {name} of {label} differ from those of the recorder's model",
                    "leave them as they are in training; or store all weights: trainable=False",
                    usage=True,
                )
        state, _ = state_dict.fit(state_dict.with_first_names(tensors, self.module), self.module)
        # loops make float64 of float32 and fractions of counters; a model loads both as it has them
        for name, t in state.items():
            kind = self._tensors[name].dtype
            is_whole = t.is_floating_point() and not kind.is_floating_point
            state[name] = (t.round() if is_whole else t).to("cpu", kind, copy=True)
        return state

    def _named(self, weights: Any) -> dict[str, Any]:
        """Weights by name. Raises FldiagError for what holds none, or another number of them than the model has."""
        if isinstance(weights, nn.Module):
            module = unwrap_model(weights)
            if self._merges and not module.training:
                module = copy_module(module).train()
            return dict(module.state_dict())
        if isinstance(weights, Mapping):
            return {str(n): v for n, v in weights.items()}
        own = self.module.state_dict()
        if isinstance(weights, (Tensor, np.ndarray)) and weights.shape == (self.layout.size,):
            return {**own, **self.layout.views(torch.as_tensor(weights))}
        arrays = list(weights) if isinstance(weights, Iterable) else []
        if len(arrays) != len(own):
            raise FldiagError(
                f"a {type(weights).__name__} with {len(arrays)} entries is no model of {self.layout.size:,} parameters",
                f"give a module, a state_dict, a vector of the parameters, or {len(own)} arrays",
                usage=True,
            )
        return dict(zip(own, arrays, strict=True))

    def forget(self) -> None:
        """What the clients of the coming round received is not known, unless ``round`` is told."""
        self._last = None

    def _received(self, received: Any) -> tuple[State | None, dict[int, State]]:
        """What all clients started from; and what each did, where that differs."""
        if received is None:
            return self._last, {}
        if not (isinstance(received, Mapping) and not any(isinstance(k, str) for k in received)):
            return self.state(received, "the received model"), {}
        if lacking := self._trained.keys() - received.keys():
            raise FldiagError(f"what client {min(lacking)} received is missing", usage=True)
        starts = {
            k: self.state(received[k], f"what client {k} received") for k in sorted(self._trained)
        }
        if self._last is None:
            self.note(
                "the global model before the first round is the mean of what clients received"
            )
        return self._last or mean(list(starts.values())), starts

    def _scores(self, state: State) -> list[Row]:
        """Loss and accuracy of the global model; where it cannot be tested, a note and a warning, once."""
        model, dataset = self._evaluator, self.dataset
        if model is None or dataset is None:
            return []
        try:
            return _evaluated(model, state, dataset)
        except Exception as error:  # of the user's model, for which training must not end
            why = error.what if isinstance(error, FldiagError) else error_text(error)
            text = f"the global model could not be evaluated: {why}"
            self.note(text)
            warnings.warn(f"fldiag: {text}; weights are recorded all the same", stacklevel=3)
            self._evaluator = None
            return []

    # What is written

    def _write(
        self, state: State, start: State | None, starts: Mapping[int, State], rows: list[Row]
    ) -> None:
        ids, t = sorted(self._trained), self.run.done + 1
        tensors: dict[str, Any] = {}
        if ids:
            tensors["clients"], tensors["buffers"] = self._stacked([self._trained[k] for k in ids])
            tensors["received"] = None if start is None else self.layout.row(start)
            total = max(self._config["clients"]["total"], ids[-1] + 1)
            self._config = {**self._config, "clients": {"total": total}}
        if starts:
            tensors["starts"], tensors["start_buffers"] = self._stacked(list(starts.values()))
        try:
            if not self.run.records and start is not None:
                self._put(0, start, [])
                self._append(0, [])
            self._put(t, state, ids, **tensors)
            self._append(t, [{"round": t, **row} for row in rows])
        except BaseException:  # go on from what is on the disk, also after Ctrl-C
            with contextlib.suppress(FldiagError):
                self.run = Run.open(self.run.path)
                self.run.resume()
            raise

    def _stacked(self, states: Sequence[State]) -> tuple[Tensor, State]:
        """Rows of the parameters [K, P], and the buffers [K, ...]."""
        names = self._tensors.keys() - set(self.layout.names)
        buffers = [n for n in self._tensors if n in names and all(n in s for s in states)]
        rows = torch.stack([self.layout.row(s) for s in states])
        return rows, {n: torch.stack([s[n] for s in states]) for n in buffers}

    def _put(self, t: int, state: State, ids: Sequence[int], **tensors: Any) -> None:
        dataset = self.dataset
        manifest = {
            "round": t,
            "seed": self._config["seed"],
            "config": self._config,
            "shape": [] if dataset is None else list(dataset.shape),
            "classes": 0 if dataset is None else dataset.classes,
            "clients": list(ids),
            "provenance": self.run.about["provenance"],
            "run": self.run.path.name,
            "origin": self._recipe,
        }
        self.run.put_checkpoint(t, manifest, state, **tensors)

    def _append(self, t: int, rows: Sequence[Row], **facts: Any) -> None:
        """A line, with what changed of what the run says of itself."""
        about = self._about()
        if any(self.run.about[key] != value for key, value in about.items()):
            facts["about"] = about
        self.run.append(t, rows, **facts)

    def _about(self) -> dict[str, Any]:
        return {
            "config": self._config,
            "origin": {"recipe": self._recipe, "notes": self._notes},
        }

    def _confirm_owner(self) -> None:
        if self._is_closed:
            raise FldiagError(
                f"{self!r} is closed", "go on with a new one: resume=True", usage=True
            )
        if self._owner != (os.getpid(), threading.get_ident()):
            raise FldiagError(
                f"{self!r} is used by another thread or process than the one that made it",
                "record in that one: hand the clients' weights over to it",
                usage=True,
            )

    def _release(self) -> None:
        if os.getpid() == self._owner[0]:  # a forked copy does not own the folder
            self._is_closed = True
            self._stack.close()


def _evaluated(model: nn.Module, state: State, dataset: Dataset) -> list[Row]:
    """Loss and accuracy of the user's own module in its own eval mode, with these weights."""
    model.train()
    model.load_state_dict(state, strict=False)
    model.eval()
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)

    def outputs(x: Tensor) -> Tensor:
        z = logits_of(model(x)).float()
        z = z[:, None] if z.ndim == 1 else z
        if not dataset.regression and _is_probability(z):
            raise FldiagError("the model returns probabilities, and the loss is of logits")
        return z

    with torch.random.fork_rng(devices=[]):
        scores = scores_of(outputs, dataset, torch.device("cpu"), dtype)
    return score_rows(scores, dataset.evaluation[0])


def _is_probability(z: Tensor) -> bool:
    return is_probabilities(z) or (z.shape[1:] == (1,) and bool(((z >= 0) & (z <= 1)).all()))


def _dataset_of(data: Any, test: Any) -> Dataset | None:
    if isinstance(data, str):
        return datasets.load(data, allow_code={data})
    return data if data is None or isinstance(data, Dataset) else given.dataset_of(data, test)


def _module_of(model: nn.Module | str, dataset: Dataset | None, trainable: bool) -> nn.Module:
    """The network; with ``trainable`` a copy in which the other parameters are frozen."""
    if isinstance(model, str):
        shape, classes = (None, 0) if dataset is None else (dataset.shape, dataset.classes)
        module = models.build(model, shape, classes, allow_code={model})
    else:
        module = unwrap_model(model)
    if trainable:
        module = copy.deepcopy(module)
        lora.freeze(module, [n for n, p in module.named_parameters() if not p.requires_grad])
    return module


def _plain(value: Any, label: str) -> Tensor:
    """A dense tensor of real numbers. Raises FldiagError for anything else."""
    try:
        t = value.detach() if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
        if t.layout == torch.strided and not (t.is_meta or t.is_complex() or t.is_quantized):
            return t
        kind = f"{t.layout} tensor of {t.dtype} on {t.device}"
    except (TypeError, ValueError, RuntimeError):
        kind = type(value).__name__
    raise FldiagError(f"{label} is a {kind}", "give dense tensors of real numbers", usage=True)


def _is_moved(tensor: Tensor, frozen: Tensor) -> bool:
    """Whether frozen weights differ by more than averages and copies in another precision explain: half of the digits."""
    eps = max(torch.finfo(t.dtype).eps for t in (tensor, frozen))
    a, b = tensor.cpu().double(), frozen.cpu().double()
    atol = eps**0.5 * float(b.abs().max())
    return a.shape != b.shape or not torch.allclose(a, b, rtol=0, atol=atol, equal_nan=True)


def _rows(metrics: Mapping[str, float] | None, **about: Any) -> list[Row]:
    """A row for every number. Raises FldiagError for what is none."""
    rows = []
    for name, value in (metrics or {}).items():
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            raise FldiagError(f"the metric {name!r} is not a number", usage=True) from None
        rows.append({**about, "source": "the loop", "metric": str(name), "value": number})
    return rows


def mean(states: Sequence[State], shares: Sequence[float] = ()) -> State:
    """The mean of state_dicts, weighted by ``shares`` where any is not 0, taken in float64; counters take the largest."""
    p = torch.tensor(shares if any(shares) else [1.0] * len(states), dtype=torch.float64)
    averages = {}
    for name in (n for n in states[0] if all(n in s for s in states)):
        rows = torch.stack([s[name] for s in states])
        averages[name] = rows.amax(0)
        if rows.is_floating_point():
            averages[name] = torch.tensordot(p / p.sum(), rows.double(), 1).to(rows.dtype)
    return averages
