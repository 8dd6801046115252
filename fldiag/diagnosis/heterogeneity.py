"""How far a partition is from dealing every client alike: the label distributions and the sizes of its clients.

The distances are those of scipy (``scipy.spatial.distance.jensenshannon``, ``scipy.stats.wasserstein_distance``), for all clients
at once. Jensen-Shannon: Lin, IEEE Trans. Inf. Theory 37 (1991), whose divergence has its root taken, which is a metric
(Endres and Schindelin, IEEE Trans. Inf. Theory 49, 2003). Effective classes: the exponential of Shannon's entropy (Hill,
Ecology 54, 1973, order 1). The definitions are standard; of these papers none was read anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from fldiag.results.binned import gini
from fldiag.results.means import sample_mean
from fldiag.results.select import number, only, spread
from fldiag.results.table import Row, columns
from fldiag.seeding import numpy_rng

#: Of more clients than this, so many evenly spread ones are compared in pairs.
PAIRED = 100
#: Clients whose examples are drawn at random from all, for each size of a client.
DRAWS = 100


def _jensen_shannon(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The root of (KL(p || m) + KL(q || m)) / 2 in bits, m = (p + q) / 2: in [0, 1]."""
    middle = (p + q) / 2

    def information(a: np.ndarray) -> np.ndarray:
        ratio = np.divide(a, middle, out=np.ones_like(middle), where=(a > 0) & (middle > 0))
        return (a * np.log2(ratio)).sum(-1)

    return np.sqrt(np.clip((information(p) + information(q)) / 2, 0, 1))


def _hellinger(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The root of half of sum (sqrt p_c - sqrt q_c)^2: in [0, 1]."""
    return np.sqrt(np.square(np.sqrt(p) - np.sqrt(q)).sum(-1) / 2)


def _total_variation(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Half of sum |p_c - q_c|: in [0, 1], the share of examples that would have to be of another class."""
    return np.abs(p - q).sum(-1) / 2


def _earth_mover(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Sum over c of |P(class <= c) - Q(class <= c)|: by how many classes examples would have to move, in the mean."""
    return np.abs(np.cumsum(p - q, axis=-1)).sum(-1)


Distance = Callable[[np.ndarray, np.ndarray], np.ndarray]
DISTANCES: dict[str, Distance] = {
    "jensen_shannon": _jensen_shannon,
    "hellinger": _hellinger,
    "total_variation": _total_variation,
}
UNITS = {
    "size": "examples",
    "repeated": "examples",
    "shared": "examples",
    "classes": "classes",
    "effective_classes": "classes",
    "earth_mover": "classes",
    "pair_earth_mover": "classes",
}


def measure(
    counts: pd.DataFrame, parts: Sequence[np.ndarray], *, is_ordered: bool = False
) -> pd.DataFrame:
    """Measure how the clients' label distributions and sizes differ.

    - scope client: ``size``, ``repeated`` (examples that it has more than once), ``shared`` (that other clients have too),
      ``classes``, ``effective_classes`` exp(entropy), and its distances from the distribution q of all clients' examples:
      ``jensen_shannon``, ``hellinger``, ``total_variation`` and, where classes are ordered, ``earth_mover``. Column ``floor``:
      the same distance of as many examples drawn at random from all (mean of ``DRAWS`` draws).
    - scope pair: ``pair_jensen_shannon``, ... between two clients.
    - scope global: means over ``n_clients`` clients or over their pairs; ``size_gini``; ``effective_classes_of_all``.

    What has no value is ``masked``, with its reason in the column ``note``.

    Args:
        counts: one row a client and class, as ``fldiag.data.partition.summary`` makes it.
        parts: the training indices of every client.
        is_ordered: whether classes are ordered, as grades are.
    """
    cells = counts.pivot(index="client", columns="class", values="count").to_numpy(dtype=float)
    distances = DISTANCES | ({"earth_mover": _earth_mover} if is_ordered else {})
    size, total = cells.sum(1), cells.sum(0)
    holders = np.flatnonzero(size)
    p, q = cells[holders] / size[holders, None], total / max(total.sum(), 1)
    reason = None
    if len(holders) < 2:
        reason = "fewer than two clients have examples"
    elif np.count_nonzero(total) < 2:
        reason = "all examples are of one class"
    floors = None if reason else _floors(size[holders], total, distances)
    values = pd.DataFrame({"client": np.arange(len(size)), "size": size})
    values["repeated"], values["shared"] = _multiple(parts)
    values.loc[holders, "classes"] = np.count_nonzero(p, axis=1)
    values.loc[holders, "effective_classes"] = effective_classes(p)
    for name, distance in distances.items():
        values.loc[holders, name] = np.nan if reason else distance(p, q)
    of_clients = values.melt("client", var_name="metric")
    if floors is not None:
        floors["client"] = holders
        of_clients = of_clients.merge(
            floors.melt("client", var_name="metric", value_name="floor"), "left"
        )
    at = of_clients["client"].to_numpy()
    of_clients = of_clients.assign(
        scope="client",
        slice=[f"client:{k}/train" for k in at],
        n_examples=size[at].astype(int),
        note=[reason if size[k] else "the client has no examples" for k in at],
    )
    pairs, rows = _of_pairs(p, holders, distances, reason)
    for name in (*distances, "effective_classes"):
        row = _mean(name, values.loc[holders, name].to_numpy(), reason)
        if floors is not None and name in floors:
            row["floor"] = float(floors[name].mean())
        rows.append(row)
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


def _floors(
    sizes: np.ndarray, total: np.ndarray, distances: Mapping[str, Distance]
) -> pd.DataFrame:
    """The mean distances of ``sizes`` examples drawn without replacement from all: a row a client, a column a distance."""
    rng, q, means = numpy_rng(0, "floor of heterogeneity"), total / total.sum(), {}
    for n in np.unique(sizes).astype(int):
        draws = rng.multivariate_hypergeometric(
            total.astype(int), n, size=DRAWS, method="marginals"
        )
        means[n] = {name: float(d(draws / n, q).mean()) for name, d in distances.items()}
    return pd.DataFrame([means[int(n)] for n in sizes])


def _of_pairs(
    p: np.ndarray, holders: np.ndarray, distances: Mapping[str, Distance], reason: str | None
) -> tuple[list[Row], list[Row]]:
    """The distances between clients, and their means; of more than ``PAIRED`` clients between so many evenly spread ones."""
    at = np.array(spread(range(len(holders)), PAIRED), dtype=int)
    first, second = np.triu_indices(len(at), 1)
    ids = holders[at]
    pairs: list[Row] = []
    means: list[Row] = []
    for name, distance in distances.items():
        metric = f"pair_{name}"
        if reason:
            means.append({"metric": metric, "value": None})
            continue
        apart = distance(p[at][first], p[at][second])
        pairs += [
            {"metric": metric, "scope": "pair", "client": a, "client_b": b, "value": v}
            for a, b, v in zip(
                ids[first].tolist(), ids[second].tolist(), apart.tolist(), strict=True
            )
        ]
        means.append({"metric": metric, "value": float(apart.mean()), "n_clients": len(at)})
    return pairs, means


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
    "floor": "if dealt at random",
    "pair_jensen_shannon": "JS distance of two",
    "size_gini": "Gini of sizes",
}


def in_short(table: pd.DataFrame) -> Row:
    """The numbers that a person reads first: means over clients, and over their pairs."""
    row = {name: number(table, name, scope="global") for name in HEADINGS if name != "floor"}
    return row | {"floor": number(table, "jensen_shannon", column="floor", scope="global")}


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
