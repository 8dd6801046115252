"""Small federations given as weights, without training: what diagnostics of a run see."""

import itertools
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fldiag.data import Dataset, partition
from fldiag.models.network import Network
from fldiag.params import flatten
from fldiag.results.table import only
from fldiag.runs.history import History, Stored
from fldiag.runs.run import Run

FOLDER, NUMBER = tempfile.TemporaryDirectory(), itertools.count()


def separable(classes=4, per_class=30, test_per_class=(25,) * 4, seed=0):
    """Inputs near the unit vector of their class: ``identity`` is always right."""
    rng = np.random.default_rng(seed)

    def some(counts):
        y = np.repeat(np.arange(classes), counts)
        return torch.from_numpy(
            np.eye(classes)[y] + 0.05 * rng.normal(size=(len(y), classes))
        ).float(), torch.from_numpy(y)

    (x, y), (tx, ty) = some([per_class] * classes), some(list(test_per_class))
    return Dataset("separable", x, y, tx, ty, classes)


def linear(classes=4):
    return nn.Sequential(nn.Linear(classes, classes))


def identity(classes=4):
    return torch.cat([5 * torch.eye(classes).flatten(), torch.zeros(classes)])


def always(c, classes=4):
    """Weights of ``linear`` that answer class c to everything."""
    w = torch.zeros(classes * classes + classes)
    w[classes * classes + c] = 20.0
    return w


def tanh_net(inputs=6, classes=3, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, classes))


def stored(received, clients, aggregated=None, *, round=1, ids=None):
    clients = torch.stack(list(clients))
    ids = tuple(range(len(clients))) if ids is None else tuple(ids)
    return Stored(
        round,
        clients.mean(0) if aggregated is None else aggregated,
        ids,
        clients,
        received,
    )


def history(module, dataset, parts, *rounds, **options):
    """``rounds``: Stored; they lie in a run of their own."""
    config = {"method": {"name": "none"}, "seed": 0, "rounds": len(rounds), "data": {}}
    run = Run.create(Path(FOLDER.name) / str(next(NUMBER)) / "made", config, {}, hash="")
    run.put("partition.npz", lambda f: partition.save(f, [np.asarray(p) for p in parts]))
    run.begin()
    layout = Network(module).layout
    for item in rounds:
        manifest = {"round": item.round, "seed": 0, "config": config, "clients": item.ids}
        run.put_checkpoint(
            item.round,
            {**manifest, "shape": [], "classes": 0},
            {**dict(module.named_buffers()), **layout.views(item.aggregated), **item.buffers},
            clients=item.clients,
            received=item.received,
            buffers=item.client_buffers,
            starts=item.starts,
            start_buffers=item.start_buffers,
        )
        run.append(item.round, [])
    run.model, run.data = module, dataset
    return History(run, **{"device": "cpu", **options})


def moved(module, clients=3, scale=0.3, seed=1):
    """The module's weights, and so many others around them."""
    w = flatten(module).double()
    g = torch.Generator().manual_seed(seed)
    return w, [
        w + scale * torch.randn(len(w), generator=g, dtype=torch.float64) for _ in range(clients)
    ]


def one(frame, metric, **where):
    """The single row of this metric; a value None asks for a missing entry."""
    rows = only(frame, metric=metric, **where)
    assert len(rows) == 1, rows
    return rows.iloc[0]
