"""Decision regions on Iris in the plane: the example of FedProj (Chunduru et al., figure 1).

Iris, reduced to two principal components, is dealt to three clients, one class each. FedAvg, FedDF and FedProj train an MLP
(2-64-64-3) on it. The regions show what clients forget in local training. The paper gives 20 rounds of 5 local epochs, SGD with
lr 0.001 and momentum 0.9. Scaling, split, minibatches and public data it does not give: they are chosen here, and so is the
default lr of 0.01.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from scipy.ndimage import gaussian_filter, zoom
from sklearn.datasets import load_iris
from sklearn.decomposition import PCA
from sklearn.preprocessing import scale
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import fldiag
from fldiag import registry
from fldiag.plotting import style

Row = dict[str, Any]
METHODS = ("fedavg", "feddf", "fedproj")
SPECIES = ("setosa", "versicolor", "virginica")
#: Points a side of the grid; how far it reaches beyond the flowers, as a share of their width.
GRID, MARGIN = 200, 0.05
#: The models of a round, in this order everywhere.
MODELS: list[Row] = [
    {"moment": "received", "scope": "global"},
    *({"moment": "trained", "scope": "client", "client": k} for k in range(3)),
    {"moment": "aggregated", "scope": "global"},
]


def flowers() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The 150 flowers on the first two principal components of their standardised features [150, 2]; their classes; lower left
    and upper right of the plane that is shown [2, 2]."""
    x, y = load_iris(return_X_y=True)
    z = PCA(2, svd_solver="full").fit_transform(scale(x)).astype(np.float32)
    room = MARGIN * (z.max(0) - z.min(0))
    return z, y, np.stack([z.min(0) - room, z.max(0) + room])


def train(method: str, lr: float, rounds: int, seed: int) -> list[Tensor]:
    """The models [5, P] of every round. Methods that distil do so for 5 epochs of SGD with the clients' lr, on 300 points without
    labels, uniform in the box of the flowers. FedProj has no penalty on weights, so it is FedDF with projection.

    Raises FldiagError for a training that diverges.
    """
    z, y, _ = flowers()
    public = np.random.default_rng(seed).uniform(z.min(0), z.max(0), (300, 2))
    distil = {"epochs": 5, "tau": 3.0, "optimizer": "sgd", "lr": lr}
    options = {"fedavg": {}, "feddf": distil, "fedproj": {**distil, "gamma_wd": 0.0}}
    with TemporaryDirectory() as folder:
        for name, first, second in (("iris", z, z), ("public", public[:150], public[150:])):
            arrays: dict[str, Any] = {"train_images": first, "test_images": second}
            np.savez(f"{folder}/{name}.npz", train_labels=y, test_labels=y, **arrays)
        clients = Path(folder, "clients.json")
        clients.write_text(json.dumps([np.flatnonzero(y == k).tolist() for k in range(3)]), "utf-8")
        config = fldiag.Config(
            seed=seed,
            rounds=rounds,
            method={"name": method, **options[method]},
            model={"name": "mlp_iris"},
            data={"name": f"npz:{folder}/iris.npz", "public": f"npz:{folder}/public.npz"},
            partition={"kind": "file", "path": str(clients)},
            clients={"total": 3, "per_round": 3},
            train={"epochs": 5, "batch_size": 5, "lr": lr, "lr_decay": 1.0, "weight_decay": 0.0},
        )
        count = torch.get_num_threads()
        torch.set_num_threads(1)  # steps this small only wait for each other on several
        run = fldiag.train(config, out=Path(folder, "run"), device="cpu")
        torch.set_num_threads(count)
        if run.status == "diverged":
            what = f"{method} diverged with lr = {lr:g} (seed {seed})"
            raise fldiag.FldiagError(what, usage=True)
        checkpoints: list[Any] = [run.checkpoint(t) for t in range(1, rounds + 1)]
    return [
        torch.stack([c.received, *c.clients, parameters_to_vector(c.state.values())])
        for c in checkpoints
    ]


@torch.no_grad()
def predict(models: Tensor, x: np.ndarray) -> np.ndarray:
    """The classes [5, n] that the models [5, P] give the points x [n, 2]."""
    with torch.random.fork_rng(devices=[]):
        net = registry.model.get("mlp_iris").build((2,), 3)
    classes = []
    for w in models:
        vector_to_parameters(w, net.parameters())
        classes.append(net(torch.from_numpy(x).float()).argmax(1))
    return torch.stack(classes).numpy()


def run(
    lr: float = 0.01,
    rounds: int = 20,
    seeds: Sequence[int] = range(5),
    track: Callable[[list[Any]], Iterable[Any]] = list,
) -> pd.DataFrame:
    """The toy as a table: every seed and method; accuracies are shares of the 150 flowers.

    Rows of every round: ``accuracy`` and ``class_accuracy`` (index = class) of the model received, of each client's after
    training, of the aggregated one; of each client ``drop`` = accuracy of the received minus the trained model, ``forgetting`` =
    the same of the class that loses most; the clients' means (moment trained, scope global). Of the last round ``disagreement``:
    the share of a 200 x 200 grid in which a client's model and the global one (``reference``: received or aggregated) differ, and
    the clients' mean. For the first seed these grids, ``region``: their ``classes`` (see ``encode``), and as value the share of
    them in which the model differs from the aggregated one.

    Raises FldiagError for a training that diverges.
    """
    z, y, box = flowers()
    points = np.stack(np.meshgrid(*np.linspace(box[0], box[1], GRID).T), -1).reshape(-1, 2)
    tables = []
    for seed, method in track(list(itertools.product(seeds, METHODS))):
        rows: list[Row] = []
        for t, models in enumerate(train(method, lr, rounds, seed), 1):
            rows += [{"round": t, **row} for row in _scores(predict(models, z), y)]
        maps = predict(models, points).reshape(-1, GRID, GRID)
        for reference, other in (("received", maps[0]), ("aggregated", maps[-1])):
            rows += _clients("disagreement", (maps != other).mean((1, 2)), reference=reference)
        if seed == seeds[0]:
            for model, grid in zip(MODELS[1:], maps[1:], strict=True):
                share = (grid != maps[-1]).mean()
                rows.append({**model, "metric": "region", "value": share, "classes": encode(grid)})
        table = pd.DataFrame(rows).assign(method=method, seed=seed, estimator="exact")
        tables.append(table.fillna({"round": rounds}))
    return pd.concat(tables, ignore_index=True).convert_dtypes()


def _scores(classes: np.ndarray, y: np.ndarray) -> Iterator[Row]:
    right = classes == y
    shares = np.stack([right[:, y == c].mean(1) for c in range(3)], 1)
    for model, share in zip(MODELS, shares, strict=True):
        for c in range(3):
            yield {**model, "metric": "class_accuracy", "index": c, "value": share[c]}
    accuracy = right.mean(1)
    for model, value in zip(MODELS[::4], accuracy[::4], strict=True):
        yield {**model, "metric": "accuracy", "value": value}
    yield from _clients("accuracy", accuracy)
    yield from _clients("drop", accuracy[0] - accuracy)
    yield from _clients("forgetting", (shares[0] - shares).max(1))


def _clients(metric: str, values: np.ndarray, **labels: str) -> Iterator[Row]:
    """Of the models' values [5] those of the clients, and their mean."""
    mean = {"moment": "trained", "scope": "global"}
    for model, value in zip([*MODELS[1:4], mean], [*values[1:4], values[1:4].mean()], strict=True):
        yield {**model, "metric": metric, "value": value, **labels}


def encode(grid: np.ndarray) -> str:
    """The classes of a grid, line after line, by run length: 57a143c are 57 points of class 0, then 143 of class 2."""
    return "".join(f"{len(list(run))}{'abc'[c]}" for c, run in itertools.groupby(grid.flat))


def decode(text: str) -> np.ndarray:
    """
    >>> np.array_equal(decode(encode(np.eye(GRID, dtype=int))), np.eye(GRID))
    True
    """
    counts, classes = zip(*re.findall(r"(\d+)(\w)", text), strict=True)
    return np.repeat(["abc".index(c) for c in classes], [*map(int, counts)]).reshape(GRID, GRID)


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Means over the seeds after the last round: accuracies of the global models, and means of the clients."""
    rows = table.query("scope == 'global' and metric != 'region' and metric != 'class_accuracy'")
    rows = rows[rows["round"] == rows["round"].max()].fillna({"reference": ""})
    keys = ["moment", "metric", "reference"]
    return rows.pivot_table(index=keys, columns="method", values="value").reset_index()


# ---- the picture
#: Of the classes: pale, middle and dark in greyscale too, and apart for colour-blind readers.
FILLS, INKS = ("#FBEBC4", "#9CC8E6", "#B983A6"), ("#A86A00", "#003F66", "#3F0F33")
MARKERS = ("o", "s", "^")


def draw(table: pd.DataFrame) -> Figure:
    """The regions of the first seed after the last round: a row a method, a column a client and one for the global model.

    Borders are those of the grid's classes, blurred over 1.5 of its 200 steps. A client's own flowers are filled.
    """
    z, y, box = flowers()
    extent: Any = box.T.ravel()
    first = table[table["metric"] == "region"].iloc[0]
    table = table[(table["seed"] == first["seed"]) & (table["round"] == first["round"])]
    heads = [*(f"client {k}: {name}\n" for k, name in enumerate(SPECIES)), "global model\n"]
    panels = itertools.product(METHODS, MODELS[1:])
    with style.paper():
        fig, axes = style.panels(12, 1.75, 0.2, across=4, least=1, sharex=True, sharey=True)
        for ax, (method, model), head in zip(axes, panels, heads + 8 * [""], strict=True):
            is_method = table["method"] == method
            of_model = pd.Series(model)
            part = table[is_method & (table[[*model]] == of_model).fillna(False).all(axis=1)]
            fine = np.stack([zoom(mask, 3, order=1) for mask in _blurred(part)]).argmax(0)
            colors = ListedColormap(FILLS)
            ax.imshow(
                fine,
                colors,
                origin="lower",
                aspect="auto",
                interpolation="nearest",
                extent=extent,
                vmin=0,
                vmax=2,
            )
            share = part.set_index("metric")["value"]
            text = f"{100 * share['accuracy']:.1f} % right"
            if "client" in model:
                text += f", {100 * share['region']:.0f} % differ"
                shared = _blurred(table[is_method & (table["moment"] == "aggregated")])
                for c in range(3):
                    lead = shared[c] - np.delete(shared, c, 0).max(0)
                    ax.contour(lead, [0], extent=extent, colors="k", linewidths=0.8)
            for c, (ink, marker) in enumerate(zip(INKS, MARKERS, strict=True)):
                face = ink if model.get("client", c) == c else "white"
                px, py = z[y == c].T
                ax.scatter(px, py, s=5, c=face, marker=marker, edgecolor=ink, linewidth=0.4)
            ax.set_title(head + text, fontsize=7)
            ax.set(xticks=[], yticks=[], xlabel="first component")
            ax.set_ylabel(f"{style.display_name(method)}\nsecond component")
            ax.label_outer()
            ax.spines[:].set_visible(True)
        handles: list[Any] = [
            (Patch(color=fill), Line2D([], [], color=ink, marker=marker, linestyle="none"))
            for fill, ink, marker in zip(FILLS, INKS, MARKERS, strict=True)
        ]
        hollow: dict[str, Any] = {"marker": "o", "markerfacecolor": "white", "linestyle": "none"}
        handles += [Line2D([], [], color="k", **hollow), Line2D([], [], color="k")]
        texts = [*SPECIES, "of another client", "border of the global model"]
        style.legend(fig, handles, texts)
    return fig


def _blurred(rows: pd.DataFrame) -> np.ndarray:
    """By how much each class has the points of a model's grid, [3, 200, 200]."""
    grid = decode(rows.loc[rows["metric"] == "region", "classes"].item())
    return np.stack([gaussian_filter(np.where(grid == c, 1.0, 0.0), 1.5) for c in range(3)])
