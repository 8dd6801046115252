"""How far a partition is from dealing every client alike: the label distributions and the sizes of its clients.

The distance is that of ``scipy.spatial.distance.jensenshannon``, for all clients at once. Jensen-Shannon: Lin, IEEE Trans. Inf.
Theory 37 (1991), whose divergence has its root taken, a metric (Endres and Schindelin, IEEE Trans. Inf. Theory 49, 2003).
Effective classes: the exponential of Shannon's entropy (Hill, Ecology 54, 1973, order 1). The definitions are standard; of these
papers none was read anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from fldiag.results.means import gini, sample_mean
from fldiag.results.select import number, only, spread
from fldiag.results.table import Row, columns

#: Of more clients than this, so many evenly spread ones are compared in pairs.
PAIRED = 100


def _jensen_shannon(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The root of (KL(p || m) + KL(q || m)) / 2 in bits, m = (p + q) / 2: in [0, 1]."""
    middle = (p + q) / 2

    def information(a: np.ndarray) -> np.ndarray:
        ratio = np.divide(a, middle, out=np.ones_like(middle), where=(a > 0) & (middle > 0))
        return (a * np.log2(ratio)).sum(-1)

    return np.sqrt(np.clip((information(p) + information(q)) / 2, 0, 1))


UNITS = {
    "size": "examples",
    "repeated": "examples",
    "shared": "examples",
    "classes": "classes",
    "effective_classes": "classes",
}


def measure(counts: pd.DataFrame, parts: Sequence[np.ndarray]) -> pd.DataFrame:
    """Measure how the clients' label distributions and sizes differ.

    - scope client: ``size``, ``repeated`` (examples that it has more than once), ``shared`` (that other clients have too),
      ``classes``, ``effective_classes`` exp(entropy), and its distance ``jensen_shannon`` from the distribution q of all
      clients' examples.
    - scope pair: ``pair_jensen_shannon`` between two clients.
    - scope global: means over ``n_clients`` clients or over their pairs; ``size_gini``; ``effective_classes_of_all``.

    What has no value is ``masked``, with its reason in the column ``note``.

    Args:
        counts: one row a client and class, as ``fldiag.diagnosis.dealt_partition.count`` makes it.
        parts: the training indices of every client.
    """
    cells = counts.pivot(index="client", columns="class", values="count").to_numpy(dtype=float)
    size, total = cells.sum(1), cells.sum(0)
    holders = np.flatnonzero(size)
    p, q = cells[holders] / size[holders, None], total / max(total.sum(), 1)
    reason = None
    if len(holders) < 2:
        reason = "fewer than two clients have examples"
    elif np.count_nonzero(total) < 2:
        reason = "all examples are of one class"
    values = pd.DataFrame({"client": np.arange(len(size)), "size": size})
    values["repeated"], values["shared"] = _multiple(parts)
    values.loc[holders, "classes"] = np.count_nonzero(p, axis=1)
    values.loc[holders, "effective_classes"] = effective_classes(p)
    values.loc[holders, "jensen_shannon"] = np.nan if reason else _jensen_shannon(p, q)
    of_clients = values.melt("client", var_name="metric")
    at = of_clients["client"].to_numpy()
    of_clients = of_clients.assign(
        scope="client",
        slice=[f"client:{k}/train" for k in at],
        n_examples=size[at].astype(int),
        note=[reason if size[k] else "the client has no examples" for k in at],
    )
    pairs, rows = _of_pairs(p, holders, reason)
    for name in ("jensen_shannon", "effective_classes"):
        rows.append(_mean(name, values.loc[holders, name].to_numpy(), reason))
    rows += [
        {
            "metric": "effective_classes_of_all",
            "value": float(effective_classes(q)) if len(holders) else None,
        },
        {
            "metric": "size_gini",
            "value": float(gini(size)) if len(holders) > 1 else None,
            "n_clients": len(size),
        },
    ]
    about = {"scope": "global", "slice": "train", "n_examples": int(size.sum()), "note": reason}
    of_all = pd.DataFrame([{**about, **row} for row in rows])
    frame = columns(pd.concat([of_clients, pd.DataFrame(pairs), of_all]), estimator="exact")
    frame["unit"] = frame["metric"].map(UNITS).astype("string")
    frame["masked"] = frame["value"].isna()
    return frame.assign(note=frame["note"].where(frame["masked"])).reset_index(drop=True)


def effective_classes(p: np.ndarray) -> np.ndarray:
    """exp of the entropy of distributions [..., C]: C where all classes are alike, 1 where there is one."""
    logarithms = np.log(p, out=np.zeros_like(p), where=p > 0)
    return np.exp(-(p * logarithms).sum(-1))


def _multiple(parts: Sequence[np.ndarray]) -> tuple[list[int], list[int]]:
    """How many examples every client has more than once, and how many other clients have too."""
    unique = [np.unique(part, return_counts=True) for part in parts]
    examples, owners = np.unique(np.concatenate([e for e, _ in unique]), return_counts=True)
    several = examples[owners > 1]
    repeated = [int((times > 1).sum()) for _, times in unique]
    return repeated, [int(np.isin(e, several, assume_unique=True).sum()) for e, _ in unique]


def _of_pairs(
    p: np.ndarray, holders: np.ndarray, reason: str | None
) -> tuple[list[Row], list[Row]]:
    """The distances between clients, and their mean; of more than ``PAIRED`` clients between so many evenly spread ones."""
    metric = "pair_jensen_shannon"
    if reason:
        return [], [{"metric": metric, "value": None}]
    at = np.array(spread(range(len(holders)), PAIRED), dtype=int)
    first, second = np.triu_indices(len(at), 1)
    apart = _jensen_shannon(p[at][first], p[at][second])
    ends = holders[at][first].tolist(), holders[at][second].tolist()
    pairs: list[Row] = [
        {"metric": metric, "scope": "pair", "client": a, "client_b": b, "value": v}
        for a, b, v in zip(*ends, apart.tolist(), strict=True)
    ]
    return pairs, [{"metric": metric, "value": float(apart.mean()), "n_clients": len(at)}]


def _mean(metric: str, values: np.ndarray, reason: str | None) -> Row:
    """The mean over clients with its standard error; no value where there is a reason for none."""
    n = len(values)
    if (reason and metric != "effective_classes") or not n:
        return {"metric": metric, "value": None}
    return {"metric": metric, **sample_mean(values), "n_clients": n}


#: The columns of ``in_short``.
HEADINGS = {
    "effective_classes": "effective classes",
    "jensen_shannon": "JS distance from all",
    "pair_jensen_shannon": "JS distance of two",
    "size_gini": "Gini of sizes",
}


def in_short(table: pd.DataFrame) -> Row:
    """The numbers that a person reads first: means over clients, and over their pairs."""
    return {name: number(table, name, scope="global") for name in HEADINGS}


def remarks(table: pd.DataFrame) -> list[str]:
    """Why numbers are masked, and which clients the pairs are of."""
    masked = only(table, masked=True)
    texts = [
        f"{len(rows)} numbers are masked: {reason}"
        for reason, rows in masked.groupby("note", sort=False)
    ]
    paired = number(table, "pair_jensen_shannon", column="n_clients", scope="global")
    holders = number(table, "effective_classes", column="n_clients", scope="global")
    if paired and holders and paired < holders:
        texts.append(f"pairs are those of {paired:.0f} of {holders:.0f} clients, evenly spread")
    return texts
