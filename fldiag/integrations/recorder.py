"""One's own training loop as a run: three lines in the script, and every diagnostic of runs works on it."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fldiag import data as datasets
from fldiag import losses, models
from fldiag.data import Dataset, packed, partition
from fldiag.data.dataset import rows as examples
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
from fldiag.training.evaluate import BATCH, score_rows

#: Bytes of examples up to which a run keeps its own copy of them.
KEPT = 256 * 2**20
#: The recorders of this process that have a folder: ``resume`` takes the place of one that was forgotten.
_OPEN: dict[str, Recorder] = {}


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

    #: Where the rounds come from; readers of the run are told.
    origin: ClassVar[Mapping[str, Any]] = {"kind": "recorder"}

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
        self.parts: given.Parts | None = None
        name = data if isinstance(data, str) else None
        if data is None and given.are_examples(clients):
            data, self.parts = given.examples_of(clients)
        self.dataset = _dataset_of(data, test)
        n = None if self.dataset is None else len(self.dataset.train_y)
        if clients is not None and self.parts is None:
            self.parts = given.partition_of(clients, data, n)
        tests: given.Parts | None = None
        if test_clients is not None:
            total = 0 if self.dataset is None else len(self.dataset.test_y)
            tests = given.partition_of(test_clients, test, total)
        self.module = _module_of(model, self.dataset, trainable)
        self.layout = Layout.of(self.module)
        self._tensors = dict([*self.module.named_parameters(), *self.module.named_buffers()])
        self._shapes = {n: t.shape for n, t in self._tensors.items()}
        self._base = lora.frozen_weights(self.module)
        self._merges = merges(self.module)
        self._trained: dict[int, State] = {}
        self._rows: list[Row] = []
        self._notes: list[str] = []
        self._owner = os.getpid(), threading.get_ident()
        self._stack = contextlib.ExitStack()
        self._is_closed = False
        self._folder = os.path.realpath(out)
        path, listed = Path(out), None if self.parts is None else _listed(self.parts)
        self._config: dict[str, Any] = {
            "name": path.resolve().name,
            "seed": seed,
            "data": {} if name is None else {"name": name},
            "partition": {"kind": "unknown" if listed is None else "given"},
            "clients": {"total": len(listed or ())},
            "model": {"name": model} if isinstance(model, str) else {},
            "method": {"name": method},
        }
        recipe = {**self.origin, "method": method, "seed": seed}
        self._recipe = {**recipe, "partition": None if listed is None else digest(listed)}
        about = provenance(
            seed=seed,
            data=None if self.dataset is None else self.dataset.fingerprint(),
            architecture=_architecture(self.module),
            module=f"{type(self.module).__module__}.{type(self.module).__qualname__}",
            **base.provenance(self.module),
        )
        exists = (path / ABOUT).is_file()
        if exists and not resume:
            raise FldiagError(
                f"{path} already holds a run",
                "choose another folder, or go on with it: resume=True",
                usage=True,
            )
        if exists:
            self._confirm_same(Run.open(path), about)
            if self._folder in _OPEN:
                _OPEN[self._folder]._release()
        self._stack.enter_context(lock(path))
        try:
            self.run = self._resumed(path) if exists else self._created(path, about, listed, tests)
        except BaseException:
            self._release()
            raise
        _OPEN[self._folder] = self
        self._said = self._about()
        self._last = self.state(self.run.checkpoint().state) if self.run.records else None
        self._test: _Test | None = None
        if self.dataset is not None:
            self._test = _Test(self.module, self.dataset)
            for text in (*self.dataset.remarks, *([] if self.dataset.tested else [given.UNTESTED])):
                self.note(text)
        if self._merges:
            self.note(f"the model's eval() rewrites its weights: {MERGING}")

    def _created(
        self, path: Path, about: Any, listed: Sequence[np.ndarray] | None, tests: Any
    ) -> Run:
        if any(entry.name != LOCK for entry in path.iterdir()):
            raise FldiagError(f"{path} holds other files", "choose an empty folder", usage=True)
        dataset = self.dataset
        if dataset is not None and "name" not in self._config["data"] and _size(dataset) <= KEPT:
            self._config["data"] = {"name": "npz:data.npz", "normalise": _normalisation(dataset)}
        names = digest(self._config, self._recipe)[:16]
        run = Run.create(path, self._config, about, hash=names, origin=self._about()["origin"])
        try:
            if listed is not None:
                run.put("partition.npz", lambda f: partition.save(f, listed))
            if tests is not None:
                of_all = [
                    tests.get(k, NOTHING) for k in range(max(len(listed or ()), max(tests) + 1))
                ]
                run.put("test_partition.npz", lambda f: partition.save(f, of_all))
            if dataset is not None and self._config["data"].get("name") == "npz:data.npz":
                run.put("data.npz", lambda f: packed.save(f, dataset))
            base.keep(run, self.module)
            run.begin()
        except BaseException:  # of a full disk nothing stays that would be in the way later
            for file in ("partition.npz", "test_partition.npz", "data.npz", base.FILE):
                (path / file).unlink(missing_ok=True)
            raise
        return run

    def _resumed(self, path: Path) -> Run:
        run = Run.open(path)
        run.resume()
        self._config, self._notes = run.about["config"], run.about["origin"]["notes"]
        return run

    def _confirm_same(self, run: Run, about: Mapping[str, Any]) -> None:
        """Raises FldiagError unless the run was recorded so far with this model, data, partition, method and seed."""
        before = {**run.origin.get("recipe", {}), **run.about["provenance"]}
        now = {**self._recipe, **about}
        for key in ("kind", "method", "seed", "data", "architecture", "base", "partition"):
            if before.get(key) != now.get(key):
                raise FldiagError(
                    f"the {key} is not that with which {run.path} was recorded so far",
                    "give the same, or record into another folder",
                    usage=True,
                )

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
        k, rows = self._number(client), _rows(metrics, "trained", "client")
        self._trained[k] = self.state(weights, f"client {k}")
        others = [row for row in self._rows if row["client"] != k]
        self._rows = [*others, *({**row, "client": k} for row in rows)]

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
            rows = [*self._rows, *_rows(metrics, "aggregated", "global")]
            count = {"moment": "trained", "scope": "global", "metric": "clients"}
            rows.insert(0, {**count, "value": float(len(self._trained))})
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
            tensors = state_dict.without_prefix(tensors, self.module)[0]
            for name, frozen in self._base.items():
                if name in tensors and _is_moved(tensors.pop(name), frozen):
                    raise FldiagError(
                        f"the frozen weights {name} of {label} differ from those of the recorder's model",
                        "leave them as they are in training; or store all weights: trainable=False",
                        usage=True,
                    )
        if {n: v.shape for n, v in tensors.items()} == self._shapes:  # walking the module is slow
            state = {n: tensors[n] for n in self._tensors}
        else:
            state, _ = state_dict.fit(
                state_dict.with_first_names(tensors, self.module), self.module
            )
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
        if isinstance(weights, (Tensor, np.ndarray)) and weights.ndim == 1:
            if len(weights) != self.layout.size:
                raise FldiagError(
                    f"a vector of {len(weights):,} numbers, and the model has {self.layout.size:,} parameters"
                )
            return {**own, **self.layout.views(torch.as_tensor(weights))}
        if not isinstance(weights, Iterable) or isinstance(weights, (str, bytes)):
            raise FldiagError(f"a {type(weights).__name__} holds no weights", usage=True)
        if len(arrays := list(weights)) != len(own):
            raise FldiagError(f"{len(arrays)} arrays, and the model's state_dict has {len(own)}")
        return dict(zip(own, arrays, strict=True))

    def forget(self) -> None:
        """What the clients of the coming round received is not known, unless ``round`` is told."""
        self._last = None

    def shares(self, clients: Sequence[int]) -> list[float]:
        """How much clients count: by their examples, alike where the partition does not say.

        Args:
            clients: Their numbers.

        Returns:
            Numbers of any sum.
        """
        counts = [float(len((self.parts or {}).get(k, ()))) for k in clients]
        return counts if any(counts) else [1.0] * len(counts)

    def _number(self, client: Any) -> int:
        number = given.number_of(client)
        if self.parts is not None and number not in self.parts:
            raise FldiagError(
                f"client {number} is not in the partition of clients {min(self.parts)} to {max(self.parts)}",
                "number the clients as the partition does",
                usage=True,
            )
        return number

    def _received(self, received: Any) -> tuple[State | None, dict[int, State]]:
        """What all clients started from; and what each did, where that differs."""
        if received is None:
            return self._last, {}
        is_by_client = isinstance(received, Mapping) and not any(
            isinstance(key, str) and not key.isdecimal() for key in received
        )
        if not is_by_client:
            return self.state(received, "the received model"), {}
        starts = {
            (k := given.number_of(client)): self.state(weights, f"what client {k} received")
            for client, weights in received.items()
        }
        if lacking := self._trained.keys() - starts.keys():
            raise FldiagError(f"what client {min(lacking)} received is missing", usage=True)
        starts = {k: starts[k] for k in sorted(self._trained)}
        if self._last is None:
            self.note(
                "the global model before the first round is the mean of what clients received"
            )
        return self._last or mean(list(starts.values()), [1.0] * len(starts)), starts

    def _scores(self, state: State) -> list[Row]:
        """Loss and accuracy of the global model; where it cannot be tested, a note and a warning."""
        if self._test is None:
            return []
        try:
            return self._test.rows(state)
        except (
            Exception
        ) as error:  # the user's model may raise anything, and training must not end for it
            why = error.what if isinstance(error, FldiagError) else error_text(error)
            self.note(f"the global model could not be evaluated: {why}")
            warnings.warn(
                f"fldiag: {self._notes[-1]}; weights are recorded all the same", stacklevel=3
            )
            self._test = None
            return []

    # What is written

    def _write(
        self, state: State, start: State | None, starts: Mapping[int, State], rows: list[Row]
    ) -> None:
        ids, t = sorted(self._trained), self.run.done + 1
        tensors: dict[str, Any] = {}
        if ids:
            tensors = self._stacked([self._trained[k] for k in ids], "clients", "buffers")
            tensors["received"] = None if start is None else self.layout.row(start)
            if starts:
                tensors |= self._stacked([starts[k] for k in ids], "starts", "start_buffers")
            total = max(self._config["clients"]["total"], ids[-1] + 1)
            self._config = {**self._config, "clients": {"total": total}}
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

    def _stacked(self, states: Sequence[State], rows: str, buffers: str) -> dict[str, Any]:
        names = [
            n for n in self._tensors if n not in self.layout.names and all(n in s for s in states)
        ]
        return {
            rows: torch.stack([self.layout.row(s) for s in states]),
            buffers: {n: torch.stack([s[n] for s in states]) for n in names},
        }

    def _put(self, t: int, state: State, ids: Sequence[int], **tensors: Any) -> None:
        manifest = {
            "round": t,
            "seed": self._config["seed"],
            "config": self._config,
            "shape": [] if self.dataset is None else list(self.dataset.shape),
            "classes": 0 if self.dataset is None else self.dataset.classes,
            "clients": list(ids),
            "provenance": self.run.about["provenance"],
            "run": self.run.path.name,
            "origin": self._recipe,
        }
        self.run.put_checkpoint(t, manifest, state, **tensors)

    def _append(self, t: int, rows: Sequence[Row], **facts: Any) -> None:
        """A line, with what changed of what the run says of itself."""
        about = self._about()
        if about != self._said:
            facts["about"] = about
        self.run.append(t, rows, **facts)
        self._said = about

    def _about(self) -> dict[str, Any]:
        origin = {"recipe": self._recipe, "notes": self._notes, "names": {}, "examples": {}}
        return {"config": self._config, "origin": origin}

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
            _OPEN.pop(self._folder, None)
            self._is_closed = True
            self._stack.close()


#: Said of modules such as adapters that merge into the weights beneath them.
MERGING = "state_dicts are taken to be those of train mode"
NOTHING = np.empty(0, dtype=np.int64)


class _Test:
    """The user's own module in its own eval mode, on a copy."""

    def __init__(self, module: nn.Module, dataset: Dataset):
        self.dataset = dataset
        self.module = copy_module(module).cpu()
        self.model = with_packed_inputs(self.module, dataset)
        kinds = (p.dtype for p in self.module.parameters() if p.is_floating_point())
        self.dtype = next(kinds, torch.float32)

    def rows(self, state: State) -> list[Row]:
        """Loss and accuracy of the model with these weights, on the split by which it is judged."""
        split, inputs, targets = self.dataset.evaluation
        self.model.train()
        self.model.load_state_dict(state, strict=False)
        self.model.eval()
        loss, right, n = 0.0, 0, len(targets)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for i in range(0, n, BATCH):
                part = slice(i, i + BATCH)
                x, y = self.dataset.normalise(examples(inputs, part)), targets[part]
                z = logits_of(self.model(x.to(self.dtype) if x.is_floating_point() else x)).float()
                z = z[:, None] if z.ndim == 1 else z
                if not self.dataset.regression and _is_probability(z):
                    raise FldiagError("the model returns probabilities, and the loss is of logits")
                loss += float(losses.per_example(z, y).double().sum())
                right += 0 if self.dataset.regression else int((losses.predicted(z) == y).sum())
        scores = {} if self.dataset.regression else {"accuracy": right / n}
        return score_rows({**scores, "loss": loss / n, "n": n}, split)


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


def _architecture(module: nn.Module) -> str:
    """Tells models apart: by what they print, without addresses in memory, and by the names and shapes of their tensors."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    text = re.sub(r"0x[0-9a-fA-F]+", "", repr(module))
    return digest(text, [(n, list(t.shape)) for n, t in tensors])[:16]


def _plain(value: Any, label: str) -> Tensor:
    try:
        t = value.detach() if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError, RuntimeError):
        raise FldiagError(
            f"{label} is a {type(value).__name__}, not an array", usage=True
        ) from None
    if t.layout != torch.strided or t.is_meta or t.is_complex() or t.is_quantized:
        raise FldiagError(
            f"{label} is a {t.layout} tensor of {t.dtype} on {t.device}",
            "give dense tensors of real numbers",
            usage=True,
        )
    return t


def _is_moved(tensor: Tensor, frozen: Tensor) -> bool:
    """Whether frozen weights differ by more than averages and copies in another precision explain: half of the digits."""
    a, b = tensor.cpu(), frozen.cpu()
    if torch.equal(a, b):
        return False
    eps = max((torch.finfo(t.dtype).eps for t in (a, b) if t.is_floating_point()), default=0.0)
    a, b = a.double(), b.double()
    atol = eps**0.5 * float(b.abs().max())
    return a.shape != b.shape or not torch.allclose(a, b, rtol=0, atol=atol, equal_nan=True)


def _rows(metrics: Mapping[str, float] | None, moment: str, scope: str) -> list[Row]:
    """A row for every number. Raises FldiagError for what is none."""
    about = {"moment": moment, "scope": scope, "source": "the loop"}
    rows = []
    for name, value in (metrics or {}).items():
        try:
            rows.append({**about, "metric": str(name), "value": float(value)})
        except (TypeError, ValueError, OverflowError, RuntimeError):
            raise FldiagError(f"the metric {name!r} is not a number", usage=True) from None
    return rows


def mean(states: Sequence[State], shares: Sequence[float]) -> State:
    """The weighted mean of state_dicts, taken in float64; counters take the largest."""
    p = torch.tensor(shares, dtype=torch.float64)
    p = p / p.sum()
    averages = {}
    for name in (n for n in states[0] if all(n in s for s in states)):
        rows = torch.stack([s[name] for s in states])
        is_float = rows.is_floating_point()
        averages[name] = (
            torch.tensordot(p, rows.double(), 1).to(rows.dtype) if is_float else rows.amax(0)
        )
    return averages


def _listed(parts: given.Parts) -> list[np.ndarray]:
    """The partition of clients 0, 1, 2, ... up to the last: those without an entry have no examples."""
    return [parts.get(k, NOTHING) for k in range(max(parts) + 1)]


def _size(dataset: Dataset) -> int:
    return sum(t.nbytes for t in (dataset.train_x, dataset.train_y, dataset.test_x, dataset.test_y))


def _normalisation(dataset: Dataset) -> str | None:
    """How a model sees the data, as ``data.normalise`` says it."""
    if dataset.mean:
        return "/".join(",".join(map(repr, values)) for values in (dataset.mean, dataset.std))
    return None
