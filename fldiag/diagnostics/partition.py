"""``partition``: how many examples of every class the clients have, and how far the clients are from alike.

The Jensen-Shannon distance is the root of the divergence in bits (Lin, IEEE Trans. Inf. Theory 37, 1991; a metric: Endres and
Schindelin, IEEE Trans. Inf. Theory 49, 2003), from 0 (alike) to 1 (no class in common). Effective classes are the exponential of
Shannon's entropy (Hill, Ecology 54, 1973, order 1). The definitions are standard; of these papers none was read anew. The bubbles
are the picture of Lee et al., "FedSOL" (CVPR 2024), figure 2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pandas as pd
from scipy.special import entr, rel_entr
from torch import Tensor

from fldiag import config as configs
from fldiag import data
from fldiag.data.partition import deal
from fldiag.errors import FldiagError
from fldiag.plotting import style
from fldiag.registry import diagnostic
from fldiag.results.statistics import gini, sample_mean
from fldiag.results.table import Note, Options, Row, SmallTable, Summary, number, only, table, thin
from fldiag.runs.open_problem import load_dataset, load_parts
from fldiag.runs.run import Run
from fldiag.sections import Download, Root

#: Of more clients than these, so many evenly spread ones are compared in pairs, and drawn.
MANY = 100


def draw(table: pd.DataFrame) -> style.Figure:
    """Bubbles over clients (x) and classes (y): their area is proportional to the number of examples, in all panels alike."""
    counts = only(table, metric="count")
    counts = only(counts, client=thin(sorted(set(counts["client"])), MANY))
    clients, classes = counts["client"].nunique(), counts["index"].nunique()
    runs = list(counts.groupby("run", sort=False))
    across = 1 if clients > 15 else min(len(runs), 3)
    cell = style.wide() * 0.85 / across / clients  # inches a client
    height = np.clip(classes * cell, 1.0, 5.0)
    diameter = 72 * max(
        min(cell, height / classes), 0.1
    )  # points of the largest; tiny ones could not be seen
    largest = counts["value"].max()
    with style.paper():
        fig, axes = style.panels(len(runs), height + 0.8, across=across, sharex=True, sharey=True)
        for ax, (run, rows) in zip(axes, runs, strict=True):
            area = (diameter**2 * rows["value"] / largest).astype(float)
            ax.scatter(rows["client"], rows["index"], s=area, linewidths=0, alpha=0.8)
            ax.set(xlabel="client", ylabel="class", ylim=(-0.7, classes - 0.3))
            ax.set_title(f"{style.plain(run)}\nlargest bubble: {largest:,.0f} examples")
            ax.locator_params(nbins=20, integer=True)
            ax.label_outer()
    return fig


#: Global numbers that a person reads first.
COLUMNS = {
    "classes": "classes a client",
    "effective_classes": "effective classes",
    "jensen_shannon": "JS distance from all",
    "pair_jensen_shannon": "JS distance of two",
    "size_gini": "Gini of sizes",
}


def summary(table: pd.DataFrame, options: Options) -> Summary:
    """Sizes and distances in one row; what belongs to several clients, or to none."""
    rows, notes = [], []
    for run, part in table.groupby("run", sort=False):
        sizes = only(part, metric="size", scope="client")["value"]
        row = {"run": run, "clients": len(sizes), "smallest": sizes.min(), "largest": sizes.max()}
        rows.append(row | {name: number(part, name, scope="global") for name in COLUMNS})
        for name, owner in {"shared": "several clients", "unused": "no client"}.items():
            if count := number(part, name):
                notes.append(Note(f"{run}: {count:,.0f} training examples belong to {owner}"))
    yield SmallTable(rows, {name: COLUMNS.get(name, name) for name in rows[0]})
    yield from notes


@diagnostic(
    "partition",
    on="runs",
    draw=draw,
    summary=summary,
    example="digits --set partition.alpha=0.5",
)
def partition(
    runs: Sequence[Run], *, root: Root = None, download: Download = False
) -> pd.DataFrame:
    """Count the examples of every class at every client, and measure how far the clients are from alike.

    Of a client: ``count`` of each class, ``size``, ``classes``, ``effective_classes`` (the exponential of the entropy), and
    ``jensen_shannon``, the distance of its label distribution from that of all clients' examples. Of a pair:
    ``pair_jensen_shannon``. Of all: the means, ``size_gini``, and how many training examples are ``shared`` by clients, or
    ``unused``. Of a client without examples the distributions are masked.
    """
    tables = []
    for run in runs:
        checkpoint = run.checkpoint()
        dataset = load_dataset(checkpoint, root, download)
        parts = load_parts(checkpoint, "partition.npz")
        if parts is None:
            what = f"{run.path} does not say which examples belong to which client"
            raise FldiagError(what, "record it with clients=, or convert it with --partition")
        tables.append(measure(parts, dataset.train_y, run.name))
    return pd.concat(tables, ignore_index=True)


def measure(parts: Sequence[np.ndarray], labels: Tensor, name: str) -> pd.DataFrame:
    """The table of one partition.

    Args:
        parts: the training indices of every client.
        labels: classes of all training examples [N].
        name: of the partition.

    Raises:
        FldiagError: the targets are no classes.

    >>> import torch
    >>> rows = measure([np.array([0, 1]), np.array([2, 3])], torch.tensor([0, 0, 1, 1]), "two")
    >>> number(rows, "pair_jensen_shannon", scope="global"), number(rows, "effective_classes", client=0)
    (1.0, 1.0)
    """
    if labels.ndim != 1 or labels.is_floating_point():
        raise FldiagError(f"the targets are no classes to count: {labels.dtype}", usage=True)
    classes = int(labels.max()) + 1
    counts = np.array([np.bincount(labels.numpy()[part], minlength=classes) for part in parts])
    return table(_rows(counts, parts, len(labels)), run=name, estimator="exact")


def _rows(counts: np.ndarray, parts: Sequence[np.ndarray], examples: int) -> Iterator[Row]:
    sizes, q = counts.sum(1), counts.sum(0) / max(counts.sum(), 1)
    holders = np.flatnonzero(sizes)
    with np.errstate(invalid="ignore"):
        p = counts / sizes[:, None]  # nan where a client has no examples
    of_clients = {
        "size": sizes,
        "classes": np.where(sizes, (counts > 0).sum(1), np.nan),
        "effective_classes": np.exp(entr(p).sum(1)),
        "jensen_shannon": jensen_shannon(p, q),
    }
    everywhere = {"scope": "global", "slice": "train", "n_examples": sizes.sum()}
    for k, size in enumerate(sizes):
        about = {"scope": "client", "client": k, "slice": f"client:{k}/train", "n_examples": size}
        for label, count in enumerate(counts[k]):
            yield {**about, "metric": "count", "index": label, "value": count, "unit": "examples"}
        for name, values in of_clients.items():
            yield {**about, "metric": name, **_masked(values[k], "the client has no examples")}
    for name, values in of_clients.items():
        yield {**everywhere, "metric": name, **sample_mean(values[holders])}
    compared = np.array(thin(holders.tolist(), MANY), dtype=int)
    first, second = (compared[i] for i in np.triu_indices(len(compared), 1))
    distances = jensen_shannon(p[first], p[second])
    name = "pair_jensen_shannon"
    for a, b, distance in zip(first, second, distances, strict=True):
        yield {"metric": name, "scope": "pair", "client": a, "client_b": b, "value": distance}
    mean = _masked(
        distances.mean() if len(distances) else np.nan, "fewer than two clients have examples"
    )
    yield {**everywhere, "metric": name, "n_clients": len(compared), **mean}
    owners = np.bincount(np.concatenate([np.unique(part) for part in parts]), minlength=examples)
    totals = {"size_gini": gini(sizes), "shared": (owners > 1).sum(), "unused": (owners == 0).sum()}
    for name, value in totals.items():
        yield {**everywhere, "metric": name, "value": value}


def _masked(value: float, reason: str) -> Row:
    is_missing = bool(np.isnan(value))
    return {"value": value, "masked": is_missing, "note": reason if is_missing else None}


def jensen_shannon(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The distance between distributions [..., C]: the root of (KL(p || m) + KL(q || m)) / 2 in bits, m = (p + q) / 2."""
    middle = (p + q) / 2
    bits = (rel_entr(p, middle) + rel_entr(q, middle)).sum(-1) / 2 / np.log(2)
    return np.sqrt(np.clip(bits, 0, 1))


def of_config(source: str, overrides: Iterable[str], download: bool) -> pd.DataFrame:
    """The table of the partition that a preset or a TOML file would deal. Raises FldiagError as dealing it does."""
    config = configs.Config.load(source, **dict(map(configs.parse_override, overrides)))
    dataset = data.load(config.data, download=download)
    parts = deal(dataset, config.partition, config.clients.total, config.data.public)
    options = [f"{k} = {v}" for k, v in config.partition.options.items() if k != "min_size"]
    name = [config.data.name, config.partition.kind, *options, f"{config.clients.total} clients"]
    return measure(parts, dataset.train_y, ", ".join(name))


def file_name(frame: pd.DataFrame) -> str:
    """How the files of such a table are called."""
    return re.sub(r"[^\w.]+", "-", f"partition {frame['run'].iloc[0]}")
