"""Records a Flower training as a run of fldiag while it trains.

::

    from fldiag.integrations import flower

    strategy = FedAvg(fraction_train=0.5)
    strategy = flower.record(strategy, "runs/flower", net, data="digits", partition=parts)
    strategy.start(grid=grid, initial_arrays=ArrayRecord(net.state_dict()), num_rounds=10)

Then ``fldiag forgetting runs/flower`` and every other verb. Works with the strategies of ``flwr.serverapp``.
"""

from __future__ import annotations

import datetime
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fldiag.data import Dataset
from fldiag.errors import FldiagError
from fldiag.integrations.recorder import Recorder
from fldiag.integrations.recorder_inputs import rows_of
from fldiag.models.state_dict import State

Parts = Sequence[Any] | Mapping[Any, Any] | str | Path


def record(
    strategy: Any,
    out: str | Path,
    model: nn.Module | str,
    *,
    data: Dataset | str | None = None,
    partition: Parts | None = None,
    client: str = "partition-id",
    seed: int = 0,
    evaluate: bool = True,
) -> Any:
    """The strategy itself, whose rounds are now also written to the run folder ``out``.

    Of every round: the weights that were sent to the clients, those that each client returned, those that the strategy
    made of them, and all numbers of the clients' replies, of the strategy's averages and of a central ``evaluate_fn``.

    ``model``: the network (or its name) that gives the tensors their names. ``data``: name of the data, or a Dataset, by
    which the global model is tested after every round (unless ``evaluate`` is off); may also be given to the verbs later.
    ``partition``: the examples of each client: a list of index arrays, a dict, or a file; what is asked of the clients'
    own data needs it. ``client``: the entry of the clients' train metrics that says who replied
    (``metrics["partition-id"] = context.node_config["partition-id"]``); without it nodes are numbered as they appear.

    Raises FldiagError when the folder is taken, what is given does not fit together, or in the first round replies do
    not fit the model. What fails later is left out with a warning, and training goes on.
    """
    if not hasattr(strategy, "configure_train"):
        raise FldiagError(
            f"a {type(strategy).__name__} is not a Flower strategy: it has no configure_train",
            "give one such as flwr.serverapp.strategy.FedAvg()",
            usage=True,
        )
    kind, now = type(strategy).__name__, datetime.datetime.now().astimezone().isoformat()
    recorder = Recorder(
        out,
        model,
        data,
        partition,
        method=kind.lower(),
        seed=seed,
        evaluate=evaluate,
        origin={"kind": "flower", "strategy": kind, "began": now},
    )
    rounds = _Rounds(strategy, recorder, client)
    wrapped = {
        "configure_train": rounds.configure,
        "aggregate_train": rounds.aggregate,
        "aggregate_evaluate": rounds.aggregate_evaluate,
        "start": rounds.start,
    }
    for method, wrapper in wrapped.items():
        setattr(strategy, method, _around(getattr(strategy, method), wrapper))
    return strategy


def mod(message: Any, context: Any, call_next: Callable[[Any, Any], Any]) -> Any:
    """A client mod of Flower, ``ClientApp(mods=[flower.mod])``: every reply to a training says which client it is of.

    It adds ``partition-id`` of the node's config to the reply's metrics, so that the client's code need not.
    """
    reply = call_next(message, context)
    mine = context.node_config.get("partition-id")
    if mine is not None and not reply.has_error():
        for record in reply.content.metric_records.values():
            record.setdefault("partition-id", int(mine))
    return reply


def _around(inner: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(inner)

    def call(*args: Any, **options: Any) -> Any:
        bound = signature.bind(*args, **options)
        return wrapper(inner, bound)

    return call


class _Rounds:
    """What is known of the round that is under way."""

    def __init__(self, strategy: Any, recorder: Recorder, key: str):
        self.strategy, self.recorder, self.key = strategy, recorder, key
        self.recording = recorder.recording
        self.nodes: dict[str, int] = {}
        self.current: State = {}
        self.received: State | None = None

    # -- what the strategy does

    def configure(self, inner: Callable[..., Any], bound: inspect.BoundArguments) -> Any:
        t = int(bound.arguments["server_round"])
        sent = list(inner(*bound.args, **bound.kwargs) or [])
        self.received = None
        with _Guard(self, t):
            self.current = self.state(bound.arguments["arrays"])
            if t == 1:
                self.recorder.begin(self.current)
            outgoing = [self._weights(message.content) for message in sent]
            same = all(o is outgoing[0] or _equal(o, outgoing[0]) for o in outgoing[1:])
            self.received = self.state(outgoing[0]) if outgoing and same else None
            if not same:
                self.recording.note(
                    f"round {t}: the strategy sent clients different weights, so no received model is recorded"
                )
        return sent

    def aggregate(self, inner: Callable[..., Any], bound: inspect.BoundArguments) -> Any:
        replies = bound.arguments["replies"] = list(bound.arguments["replies"])
        result, t = inner(*bound.args, **bound.kwargs), int(bound.arguments["server_round"])
        with _Guard(self, t):
            key = getattr(self.strategy, "weighted_by_key", "num-examples")
            entries = []
            for reply in replies:
                node = str(reply.metadata.src_node_id)
                if reply.has_error():
                    self.recording.note(f"round {t}: node {node} failed: {reply.error.reason}")
                    continue
                numbers = _metrics(reply)
                entries.append((node, self._weights(reply.content), numbers, numbers.get(key)))
            self._round(t, entries, *result)
        return result

    def aggregate_evaluate(self, inner: Callable[..., Any], bound: inspect.BoundArguments) -> Any:
        replies = bound.arguments["replies"] = list(bound.arguments["replies"])
        metrics, t = inner(*bound.args, **bound.kwargs), int(bound.arguments["server_round"])
        with _Guard(self, t):
            rows = rows_of(
                metrics, moment="aggregated", scope="global", source="clients' evaluation"
            )
            key = getattr(self.strategy, "weighted_by_key", "num-examples")
            for reply in (r for r in replies if not r.has_error()):
                numbers = _metrics(reply)
                node = str(reply.metadata.src_node_id)
                if self.key not in numbers and node not in self.nodes:
                    self.recording.note(
                        f"round {t}: node {node} evaluated, and nothing says which client it is: left out"
                    )
                    continue
                rows += rows_of(
                    numbers,
                    moment="aggregated",
                    scope="client",
                    source="clients' evaluation",
                    client=self._client(node, numbers, t),
                    n_examples=int(numbers[key]) if key in numbers else None,
                )
            self.recording.add_rows(t, rows)
        return metrics

    def start(self, inner: Callable[..., Any], bound: inspect.BoundArguments) -> Any:
        score = bound.arguments.get("evaluate_fn")
        if score is not None:
            bound.arguments["evaluate_fn"] = lambda t, arrays: self._scored(t, score(t, arrays))
        with self.recorder:
            return inner(*bound.args, **bound.kwargs)

    def _scored(self, t: int, numbers: Mapping[str, Any] | None) -> Any:
        with _Guard(self, t):
            self.recording.add_rows(
                t, rows_of(numbers, moment="aggregated", scope="global", source="evaluate_fn")
            )
        return numbers

    # -- what is written

    def _round(
        self,
        t: int,
        replies: Sequence[tuple[str, Any, Mapping[str, Any], Any]],
        arrays: Any,
        metrics: Any,
    ) -> None:
        clients: dict[int, State] = {}
        rows = rows_of(metrics, moment="trained", scope="global", source="clients' training")
        for node, weights, numbers, n in replies:
            k = self._client(node, numbers, t)
            if k in clients:
                self.recording.note(
                    f"round {t}: client {k} replied twice; the first reply is recorded"
                )
                continue
            try:
                clients[k] = self.state(weights)
            except FldiagError as error:
                if t == 1:
                    raise
                self.recording.note(f"round {t}: the reply of client {k} is left out: {error.what}")
                continue
            rows += rows_of(
                numbers, moment="trained", scope="client", client=k, source="clients' training"
            )
            if n is not None:
                self.recording.know(examples={k: int(n)})
        if arrays is None:
            self.recording.note(
                f"round {t}: the strategy made no new model of {len(replies)} replies, so the old one stays"
            )
        self.recorder.store(
            t,
            self.state(arrays) if arrays is not None else self.current,
            clients,
            self.received,
            rows,
        )

    def _client(self, node: str, numbers: Mapping[str, Any], t: int) -> int:
        if self.key in numbers:
            self.nodes[node] = int(numbers[self.key])
        elif node not in self.nodes and self.recorder.parts is None:
            self.nodes[node] = max(self.nodes.values(), default=-1) + 1
        if node not in self.nodes:
            listing = ", ".join(map(str, numbers)) or "no metrics"
            raise FldiagError(
                f"round {t}: the reply of node {node} does not say which client of the partition it is ({listing})",
                f'put it into the reply\'s metrics: metrics[{self.key!r}] = context.node_config["partition-id"]',
            )
        self.recording.know(names={self.nodes[node]: f"node {node}"})
        return self.nodes[node]

    def _weights(self, content: Any) -> Any:
        """The model among the arrays of a message."""
        records = content.array_records
        if not records:
            raise FldiagError(
                "a message holds no arrays", "put the model's weights into an ArrayRecord"
            )
        key = getattr(self.strategy, "arrayrecord_key", "arrays")
        return records[key] if key in records else next(iter(records.values()))

    def state(self, arrays: Any) -> State:
        """Arrays as a state_dict of the model. Raises FldiagError when they do not fit it."""
        named_arrays = {str(k): np.array(v.numpy()) for k, v in arrays.items()}
        names = set(self.recording.layout.names)
        listed = all(k.isdigit() for k in named_arrays) and not names <= named_arrays.keys()
        return self.recorder.state(list(named_arrays.values()) if listed else named_arrays)


class _Guard:
    """In the first round what is wrong stops training; later it costs a warning and the round's record."""

    def __init__(self, recorder: _Rounds, t: int):
        self.recorder, self.t = recorder, t

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Exception) or self.t <= 1:
            return False
        text = f"round {self.t} is not recorded: {error.what if isinstance(error, FldiagError) else repr(error)}"
        self.recorder.recording.note(text)
        warnings.warn(f"fldiag: {text}", stacklevel=4)
        return True


def _metrics(reply: Any) -> dict[str, Any]:
    return {k: v for metrics in reply.content.metric_records.values() for k, v in metrics.items()}


def _equal(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[k].numpy(), b[k].numpy()) for k in a)
