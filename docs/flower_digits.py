"""Ten clients train on the digits with Flower, and fldiag records it: one file, complete.

With Flower's simulation (``pip install 'fldiag[flower]'``), from this folder:

    python flower_digits.py
    fldiag forgetting runs/flower --model flower_digits:net

The run remembers the name of the network's factory; since a file never decides which code runs, the verbs ask you to say it
once more with ``--model``.
"""

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

from fldiag import data
from fldiag.integrations import flower

CLIENTS, ROUNDS, OUT = 10, 3, "runs/flower"
digits = data.load("digits")
#: Whose examples are whose: sorted by label, so that every client knows few digits.
parts = np.array_split(torch.argsort(digits.train_y, stable=True).numpy(), CLIENTS)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    me = int(context.node_config["partition-id"])
    model = net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    mine = torch.from_numpy(parts[me])
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        for batch in mine[torch.randperm(len(mine))].split(20):
            optimiser.zero_grad()
            nn.functional.cross_entropy(
                model(digits.batch(batch)), digits.train_y[batch]
            ).backward()
            optimiser.step()
    # "partition-id" tells fldiag who replied
    metrics = MetricRecord({"num-examples": len(mine), "partition-id": me})
    return Message(
        RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}),
        reply_to=message,
    )


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    serve(grid)


def serve(grid: Grid) -> None:
    strategy = FedAvg(fraction_evaluate=0.0)
    strategy = flower.record(strategy, OUT, "flower_digits:net", data="digits", clients=parts)
    strategy.start(grid=grid, initial_arrays=ArrayRecord(net().state_dict()), num_rounds=ROUNDS)


if __name__ == "__main__":
    from flwr.simulation import run_simulation

    run_simulation(server_app=server_app, client_app=client_app, num_supernodes=CLIENTS)
