"""One's own training loop as a run: three lines in the script, and every diagnostic of runs works on it."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fldiag import data as datasets
from fldiag import models, registry
from fldiag.data import Dataset, given, partition
from fldiag.errors import FldiagError, error_text, first_line
from fldiag.losses import is_probabilities
from fldiag.models import State, lora
from fldiag.params import Layout, unwrap_model
from fldiag.problem.module import copy_module
from fldiag.results.files import digest, provenance
from fldiag.results.table import Row
from fldiag.runs.checkpoint import plain
from fldiag.runs.open_problem import (
    base_of,
    check_merging,
    keep_base,
    logits_of,
    with_packed_inputs,
)
from fldiag.runs.run import ABOUT, LOCK, Run, lock
from fldiag.training.record import evaluate, score_rows

#: The recorders of this process by their folders: ``resume`` takes the place of one that an interrupted cell left.
OPEN: weakref.WeakValueDictionary[str, Recorder] = weakref.WeakValueDictionary()


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

    Attributes:
        run: What is on the disk.
        received: What the clients of the coming round start from unless ``round`` is told; None: that is not known.

    Raises:
        FldiagError: The folder is taken, what is given does not fit together, or it is not what was recorded so far; the model's
            eval() rewrites its weights.

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
        test_clients: Any = None,
        method: str = "own",
        seed: int = 0,
        trainable: bool = False,
        resume: bool = False,
    ):
        self.parts: given.Parts | None = None
        if data is None and given.are_examples(clients):
            data, self.parts = given.examples_of(clients)
        registry.allow(data, model)
        dataset: Dataset | None = None
        if isinstance(data, str):
            dataset = datasets.load(data)
        elif data is not None:
            dataset = given.dataset_of(data, test)
        self.dataset = dataset
        shape, classes = (dataset.shape, dataset.classes) if dataset else ((), 0)
        if clients is not None and self.parts is None:
            n = len(dataset.train_y) if dataset else None
            self.parts = given.partition_of(clients, data, n)
        partitions = {} if self.parts is None else {"partition.npz": self.parts}
        if test_clients is not None:
            n = len(dataset.test_y) if dataset else 0
            partitions["test_partition.npz"] = given.partition_of(test_clients, test, n)
        total = max(map(max, partitions.values()), default=-1) + 1
        lists: dict[str, list[Any]] = {
            n: [p.get(k, []) for k in range(total)] for n, p in partitions.items()
        }

        names = {"model": model, "data": data}
        if isinstance(model, str):
            model = models.build(model, shape or None, classes)
        self.module = unwrap_model(model)
        if trainable:
            self.module = copy.deepcopy(self.module)
            frozen = [n for n, p in self.module.named_parameters() if not p.requires_grad]
            lora.freeze(self.module, frozen)
        check_merging(self.module)
        self.layout = Layout.of(self.module)
        stored = self.module.state_dict().keys()
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        self._tensors = {n: t.detach() for n, t in tensors if n in stored}
        self._evaluator: nn.Module | None = None
        if dataset:
            self._evaluator = with_packed_inputs(copy_module(self.module).cpu(), dataset)
            self._evaluator.register_forward_hook(logits_of)
        self._trained: dict[int, tuple[State, list[Row]]] = {}

        path = Path(out)
        recipe: dict[str, Any] = {
            "method": method,
            "seed": seed,
            "partition": digest(lists),
            "data": dataset.fingerprint() if dataset else None,
            **base_of(self.module),
        }
        self._manifest: dict[str, Any] = {
            "shape": list(shape),
            "classes": classes,
            "seed": seed,
            "provenance": provenance(**recipe),
        }
        self._about: dict[str, Any] = {
            "config": {
                "seed": seed,
                "partition": {"kind": "unknown" if self.parts is None else "given"},
                "clients": {"total": total},
                "method": {"name": method},
                **{k: {"name": v} if isinstance(v, str) else {} for k, v in names.items()},
            },
            "origin": {"notes": list(dataset.remarks if dataset else ())},
        }
        folder = os.path.realpath(path)
        if resume and folder in OPEN:
            OPEN[folder]._release()
        with contextlib.ExitStack() as stack:
            stack.enter_context(lock(path))
            if not (path / ABOUT).is_file():
                self.run = self._new(path, lists)
            elif not resume:
                raise FldiagError(
                    f"{path} already holds a run",
                    "choose another folder, or go on with it: resume=True",
                    usage=True,
                )
            else:
                self.run = Run.open(path)
                before = self.run.about["provenance"]
                if before | recipe != before:
                    raise FldiagError(
                        f"{path} was recorded with another model, data, partition, method or seed",
                        usage=True,
                    )
                self.run.resume()
                self._about = {key: self.run.about[key] for key in self._about}
            self.received = self.state(self.run.checkpoint().state) if self.run.records else None
            self._stack = stack.pop_all()
        self._owner: tuple[int, int] | None = (os.getpid(), threading.get_ident())
        OPEN[folder] = self

    def _new(self, path: Path, lists: Mapping[str, Sequence[Any]]) -> Run:
        if any(entry.name != LOCK for entry in path.iterdir()):
            raise FldiagError(f"{path} holds other files", "choose an empty folder", usage=True)
        config = self._about["config"]
        kept = None if config["data"] else self.dataset
        if kept:
            config["data"] = {"name": "npz:data.npz"}
        about = {"provenance": self._manifest["provenance"], **self._about}
        run = Run.create(path, hash=digest(about)[:16], **about)
        try:
            for name, parts in lists.items():
                run.put(name, lambda f, parts=parts: partition.save(f, parts))  # type: ignore[misc]
            if kept:
                run.put("data.npz", kept.save)
            keep_base(run, self.module)
            run.begin()
        except BaseException:  # of a full disk nothing stays that would be in the way later
            run.discard()
            raise
        return run

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
                f"client {k} is not in the partition",
                "number the clients as the partition does, from 0",
                usage=True,
            )
        rows = _rows(metrics, moment="trained", scope="client", client=k)
        self._trained[k] = self.state(weights, f"client {k}"), rows

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
            start, starts = self._starts(received)
            state, t, ids = (
                self.state(aggregated, "the aggregated model"),
                self.run.done + 1,
                sorted(self._trained),
            )
            rows = [row for _, rows in self._trained.values() for row in rows]
            rows += _rows(metrics, moment="aggregated", scope="global") + self._scores(state)
            tensors: dict[str, Any] = {}
            if ids:
                ends = [self._trained[k][0] for k in ids]
                tensors["clients"], tensors["buffers"] = self._stacked(ends)
                tensors["received"] = None if start is None else self.layout.row(start)
                total = self._about["config"]["clients"]
                total["total"] = max(total["total"], ids[-1] + 1)
            if starts:
                tensors["starts"], tensors["start_buffers"] = self._stacked(starts)
            if start is not None and not self.run.records:
                self._put(0, [], [], start)
            self._put(t, ids, [{"round": t, **row} for row in rows], state, **tensors)
            self.received = state
        except BaseException:  # go on from what is on the disk, also after Ctrl-C
            with contextlib.suppress(FldiagError):
                self.run = Run.open(self.run.path)
                self.run.resume()
            raise
        finally:
            self._trained = {}

    def note(self, text: str) -> None:
        """Remember what was missing or had to be supposed; every table of the run says so.

        Args:
            text: In words.
        """
        self._confirm_owner()
        notes = self._about["origin"]["notes"]
        if text not in notes:
            notes.append(text)

    def close(self) -> Run:
        """Say that no round is missing any more, and release the folder.

        Returns:
            The run.
        """
        if self._owner is not None:
            self._confirm_owner()
            self.run.append(self.run.done, [], status="finished", about=self._about)
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
        own = self.module.state_dict()
        if isinstance(weights, nn.Module):
            weights = unwrap_model(weights).state_dict()
        try:
            if hasattr(weights, "shape"):
                weights = own | self.layout.views(torch.as_tensor(weights))
            elif not isinstance(weights, Mapping):
                weights = dict(zip(own, weights, strict=True))
            tensors = {str(name): plain(value) for name, value in weights.items()}
        except (TypeError, ValueError, RuntimeError) as error:
            raise FldiagError(
                f"{label} is not {self.layout.size:,} parameters in {len(own)} tensors: {first_line(error)}",
                "give a module, a state_dict, a vector of the parameters, or a list of arrays",
            ) from None
        tensors = models.without_prefix(tensors, self.module)
        for name, frozen in lora.frozen_weights(self.module).items():
            if name in tensors and not torch.allclose(tensors.pop(name).to(frozen), frozen):
                raise FldiagError(
                    f"the frozen weights {name} of {label} differ from those of the recorder's model",
                    "leave them as they are in training; or store all weights: trainable=False",
                )
        state = models.fit_weights(tensors, self.module)
        # loops make float64 of float32; a counter of batches may lack
        return {
            name: state.get(name, t).to("cpu", t.dtype, copy=True)
            for name, t in self._tensors.items()
        }

    def _starts(self, received: Any) -> tuple[State | None, list[State]]:
        """What all clients started from; and what each did, where that differs."""
        if received is None:
            return self.received, []
        if not isinstance(received, Mapping) or any(isinstance(key, str) for key in received):
            return self.state(received, "the received model"), []
        starts = [
            self.state(received.get(k), f"what client {k} received") for k in sorted(self._trained)
        ]
        if self.received is None:
            self.note("the first global model is the mean of what the clients received")
        return self.received or mean(starts, [1] * len(starts)), starts

    def _scores(self, state: State) -> list[Row]:
        """Loss and accuracy of the user's own module in its own eval mode; where it has none, a note and a warning, once."""
        model, dataset = self._evaluator, self.dataset
        if model is None or dataset is None:
            return []

        def outputs(x: Tensor) -> Tensor:
            z = model(x[0]).float()
            if not dataset.regression and is_probabilities(z):
                raise FldiagError("the model returns probabilities, and the loss is of logits")
            return z.unsqueeze(0)

        try:
            with torch.random.fork_rng(devices=[]):
                model.train()
                model.load_state_dict(state, strict=False)
                model.eval()
                scores = evaluate(outputs, dataset, next(model.parameters()))
        except Exception as error:  # of the user's model, for which training must not end
            text = f"the global model could not be evaluated: {error_text(error)}"
            self.note(text)
            warnings.warn(f"fldiag: {text}; weights are recorded all the same", stacklevel=3)
            self._evaluator = None
            return []
        return score_rows(scores, dataset.evaluation[0])

    # What is written

    def _stacked(self, states: Sequence[State]) -> tuple[Tensor, State]:
        """Rows of the parameters [K, P], and the buffers [K, ...]."""
        rest = self._tensors.keys() - set(self.layout.names)
        rows = torch.stack([self.layout.row(s) for s in states])
        return rows, {n: torch.stack([s[n] for s in states]) for n in sorted(rest)}

    def _put(
        self, t: int, ids: Sequence[int], rows: Sequence[Row], state: State, **tensors: Any
    ) -> None:
        facts = {"round": t, "clients": ids, **self._about, **self._manifest}
        self.run.put_checkpoint(t, facts, state, **tensors)
        self.run.append(t, rows, about=self._about)

    def _confirm_owner(self) -> None:
        if self._owner != (os.getpid(), threading.get_ident()):
            raise FldiagError(
                "the recorder is closed, or used by another thread or process than the one that made it"
            )

    def _release(self) -> None:
        if self._owner is not None and self._owner[0] == os.getpid():  # not of a forked copy
            self._owner = None
            self._stack.close()


def _rows(metrics: Mapping[str, float] | None, **about: Any) -> list[Row]:
    """A row for every number. Raises FldiagError for what is none."""
    about["source"] = "the loop"
    try:
        return [{**about, "metric": n, "value": float(v)} for n, v in (metrics or {}).items()]
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise FldiagError(f"the metrics {metrics}: {first_line(error)}") from None


def mean(states: Sequence[State], shares: Sequence[float]) -> State:
    """The mean of state_dicts, weighted by ``shares``, taken in float64; counters take the largest."""
    p, average = torch.tensor(shares, dtype=torch.float64) / sum(shares), {}
    for name, t in states[0].items():
        rows = torch.stack([s[name] for s in states])
        is_counter = not t.is_floating_point()
        average[name] = rows.amax(0) if is_counter else torch.tensordot(p, rows.double(), 1).to(t)
    return average
