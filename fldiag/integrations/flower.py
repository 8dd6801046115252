"""Flower: record a federated training as a run of fldiag while it trains.

::

    from fldiag.integrations import flower

    strategy = FedAvg(fraction_train=0.5)
    strategy = flower.record(strategy, "runs/flower", net, data="digits", clients=parts)
    strategy.start(grid=grid, initial_arrays=ArrayRecord(net.state_dict()), num_rounds=10)

Then ``fldiag forgetting runs/flower`` and every other verb. Works with the strategies of ``flwr.serverapp``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fldiag.errors import FldiagError
from fldiag.integrations.recorder import Recorder
from fldiag.models import State


def record(
    strategy: Any,
    out: str | Path,
    model: nn.Module | str,
    *,
    data: Any = None,
    clients: Any = None,
    client: str = "partition-id",
    seed: int = 0,
) -> Any:
    """The strategy itself, whose rounds are now also written to a run.

    Of every round: the weights that were sent to the clients, those that each client returned, those that the strategy made of
    them, and the numbers of the clients' replies and of the strategy's averages.

    Args:
        strategy: Such as ``flwr.serverapp.strategy.FedAvg()``.
        out: The run's folder.
        model: The network (or its name) that gives the tensors their names.
        data: As for a ``Recorder``.
        clients: Client -> the indices of its examples.
        client: The entry of the clients' train metrics that says who replied
            (``metrics["partition-id"] = context.node_config["partition-id"]``).
        seed: Of the training.

    Returns:
        The strategy.

    Raises:
        FldiagError: The folder is taken, or what is given does not fit together; in training, weights that do not fit the
            model, and replies that do not say whose they are.
    """
    configure, aggregate = strategy.configure_train, strategy.aggregate_train
    start_training, method = strategy.start, type(strategy).__name__.lower()
    recorder = Recorder(out, model, data, clients, method=method, seed=seed)

    def state(arrays: Any) -> State:
        named = {str(name): np.array(array.numpy()) for name, array in arrays.items()}
        is_list = all(name.isdigit() for name in named)
        return recorder.state([*named.values()] if is_list else named, "the message's model")

    def model_in(content: Any) -> State:
        records = content.array_records
        name = getattr(strategy, "arrayrecord_key", "arrays")
        return state(records.get(name, next(iter(records.values()))))

    def start(*args: Any, **options: Any) -> Any:
        with recorder:
            return start_training(*args, **options)

    def configure_train(server_round: int, arrays: Any, *args: Any, **options: Any) -> list[Any]:
        sent = list(configure(server_round, arrays, *args, **options) or [])
        recorder.received = model_in(sent[0].content) if sent else state(arrays)
        return sent

    def aggregate_train(server_round: int, replies: Any) -> Any:
        replies = list(replies)
        arrays, metrics = aggregate(server_round, replies)
        for reply in (reply for reply in replies if not reply.has_error()):
            numbers = _numbers(*reply.content.metric_records.values())
            if client not in numbers:
                raise FldiagError(
                    f"the reply of node {reply.metadata.src_node_id} does not say which client it is of",
                    f'put it into the reply\'s metrics: metrics[{client!r}] = context.node_config["partition-id"]',
                )
            recorder.client(int(numbers[client]), model_in(reply.content), metrics=numbers)
        # a strategy that makes no new model keeps the old one
        aggregated = recorder.received if arrays is None else state(arrays)
        recorder.round(aggregated=aggregated, metrics=_numbers(metrics))
        return arrays, metrics

    strategy.start, strategy.configure_train = start, configure_train
    strategy.aggregate_train = aggregate_train
    return strategy


def _numbers(*records: Any) -> dict[str, float]:
    pairs = [pair for record in records if record for pair in record.items()]
    return {str(name): value for name, value in pairs if isinstance(value, (int, float))}
