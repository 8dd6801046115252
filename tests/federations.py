"""Small federations trained in a plain loop and recorded, into which one fault at a time can be planted."""

import copy

import numpy as np
import torch
from torch import nn

import fldiag
from fldiag.data import Dataset

SIZES = (40, 30, 24, 36, 28, 44, 32, 26)


def blobs(sizes=SIZES, classes=4, features=6, test=80, seed=0):
    """Classes as Gaussian clouds, each client with two or three of them in the main: (dataset, parts)."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(classes, features)) * 2
    labels = [
        rng.choice(classes, size=n, p=np.roll([0.45, 0.35, 0.1, 0.1], k))
        for k, n in enumerate(sizes)
    ]
    y = np.concatenate([*labels, rng.integers(classes, size=test)])
    x = torch.from_numpy(centres[y] + rng.normal(size=(len(y), features))).float()
    y, ends = torch.from_numpy(y), np.cumsum(sizes)
    parts = [np.arange(e - n, e) for n, e in zip(sizes, ends, strict=True)]
    return Dataset("blobs", x[:-test], y[:-test], x[-test:], y[-test:], classes), parts


def network(norm=True, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 16), *([nn.BatchNorm1d(16)] if norm else []), nn.ReLU(), nn.Linear(16, 4)
    )


def trained(net, x, y, lr=0.2, steps=6):
    """A copy after some steps of SGD."""
    net = copy.deepcopy(net).train()
    optimiser = torch.optim.SGD(net.parameters(), lr)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimiser.step()
    return net


def mean(states, weights):
    """The weighted mean of state_dicts; counters take the first's."""
    p = np.asarray(weights, dtype=float) / np.sum(weights)
    return {
        n: sum(float(w) * s[n].double() for w, s in zip(p, states, strict=True)).to(v.dtype)
        if v.is_floating_point()
        else v
        for n, v in states[0].items()
    }


def by_size(t, received, states, sizes):
    """The server of federated averaging."""
    return mean(states, sizes)


def record(
    path,
    *,
    rounds=6,
    per_round=4,
    world=None,
    net=None,
    server=by_size,
    client=None,
    sampled=None,
    start=None,
    metrics=None,
    seed=0,
    steps=6,
    **options,
):
    """A run of a plain loop, recorded.

    ``server`` (t, received, states, sizes) -> state; ``client`` (t, k, received, state) -> state that it returns;
    ``sampled`` (t, rng) -> ids; ``start`` (t, states so far) -> the state that round's clients receive; ``metrics`` (t, state,
    dataset) -> numbers; ``steps`` of each client before ``client`` has its state.
    """
    data, parts = world or blobs()
    net, rng, past = net or network(seed=seed), np.random.default_rng(seed), []
    state = copy.deepcopy(net.state_dict())
    four = data.train_x, data.train_y, data.test_x, data.test_y
    with fldiag.Recorder(path, net, data=four, clients=parts, seed=seed, **options) as rec:
        for t in range(1, rounds + 1):
            past.append(state)
            received = copy.deepcopy(start(t, past) if start else state)
            ids = sorted(
                sampled(t, rng)
                if sampled
                else rng.choice(len(parts), per_round, replace=False).tolist()
            )
            replies = {}
            for k in ids:
                net.load_state_dict(received)
                made = trained(
                    net, data.train_x[parts[k]], data.train_y[parts[k]], steps=steps
                ).state_dict()
                replies[k] = client(t, k, received, made) if client else made
            state = server(t, received, list(replies.values()), [len(parts[k]) for k in ids])
            rec.round(
                received=received,
                clients=replies,
                aggregated=state,
                metrics=metrics(t, state, data) if metrics else None,
            )
    return rec.run
