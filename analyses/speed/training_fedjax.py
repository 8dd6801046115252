"""FedJAX's rounds for ``training.py``: started by it, in an environment that has FedJAX; answers each line with seconds."""

import sys
import time

import fedjax
import haiku as hk
import jax
import numpy as np
from fedjax.algorithms import fed_avg

model, file, batch_size, lr, momentum = sys.argv[1:]


def mlp(batch):
    return hk.nets.MLP([64, 64, 10])(hk.Flatten()(batch["x"]))


def small_cnn(batch):
    h = batch["x"]
    for width in (32, 64):
        h = hk.MaxPool(2, 2, "VALID")(jax.nn.relu(hk.Conv2D(width, 3)(h)))
    return hk.Linear(10)(jax.nn.relu(hk.Linear(104)(hk.Flatten()(h))))


data = np.load(file)
clients = [
    fedjax.ClientDataset({"x": data["x"][p], "y": data["y"][p]})
    for p in np.split(data["parts"], data["cuts"])
]
net = fedjax.create_model_from_haiku(
    hk.transform(mlp if model == "mlp" else small_cnn),
    {"x": data["x"][:1], "y": data["y"][:1]},
    train_loss=lambda batch, z: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], z),
)
algorithm = fed_avg.federated_averaging(
    fedjax.model_grad(net),
    fedjax.optimizers.sgd(float(lr), float(momentum) or None),
    fedjax.optimizers.sgd(1.0),
    fedjax.ShuffleRepeatBatchHParams(
        batch_size=int(batch_size), num_epochs=1, drop_remainder=False
    ),
)
state, t = algorithm.init(net.init(jax.random.PRNGKey(0))), 0


def train(ids):
    global state
    began = time.perf_counter()
    state, _ = algorithm.apply(
        state, [(str(i).encode(), clients[i], jax.random.PRNGKey(i)) for i in ids]
    )
    jax.block_until_ready(state.params)
    return time.perf_counter() - began


for line in sys.stdin:
    if line.strip() == "warm":  # every size of a last minibatch compiles once
        train(range(len(clients)))
        print(train(range(len(clients))), flush=True)
    else:
        print(train(data["sampled"][t]), flush=True)
        t += 1
