"""How one model fares with every client: what it answers, and how the clients' accuracies are spread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse, special

from fldiag.choices import ClientSlice
from fldiag.data.slices import own_classes, personal_test
from fldiag.errors import FldiagError
from fldiag.results import uncertainty
from fldiag.results.binned import Binned, bin_of, floor, gini, worst_decile
from fldiag.results.means import share
from fldiag.results.standing import guess_accuracy
from fldiag.results.table import Row
from fldiag.runs.history import History
from fldiag.runs.pool import Weights
from fldiag.runs.round_weights import Stored

#: Multiply-adds of a bootstrap that are worth its digits, and the draws that it takes at least.
WORK, DRAWS = 5e8, 400
#: What is said of the spread over clients; none of it can be below 0.
SPREADS = (
    "mean_accuracy",
    "worst_decile",
    "accuracy_variance",
    "accuracy_gini",
    "ece",
    "accuracy",
)
#: Those between 0 and 1 at both ends.
ACCURACIES = ("mean_accuracy", "worst_decile", "accuracy")


@dataclass(frozen=True)
class Groups:
    """Which of n examples every client is tested on: ``at[k]`` [n_k]. Clients may share test examples."""

    n: int
    at: Mapping[int, np.ndarray]
    small: tuple[int, ...] = ()

    @property
    def matrix(self) -> Any:
        """[K, n], 1 where a client has the example."""
        rows = np.repeat(np.arange(len(self.at)), [len(v) for v in self.at.values()])
        places = np.concatenate([*self.at.values(), np.empty(0, dtype=np.int64)])
        return sparse.csr_array((np.ones(len(rows)), (rows, places)), shape=(len(self.at), self.n))


@dataclass(frozen=True)
class Answers:
    """A model's outputs [n, C] on the examples, and their labels [n]."""

    logits: np.ndarray
    y: np.ndarray

    @property
    def right(self) -> np.ndarray:
        return np.asarray(self.logits.argmax(1) == self.y)

    @property
    def confidence(self) -> np.ndarray:
        z = self.logits - self.logits.max(1, keepdims=True)
        return np.asarray(1 / np.exp(z).sum(1))


def groups(history: History, on: ClientSlice, min_count: int) -> Groups:
    """The examples of every client that has at least ``min_count`` of them; ``small``: the other clients."""
    if history.dataset.regression:
        raise FldiagError(
            f"data set {history.dataset.name!r} has no classes (one label an example), so no client has an accuracy",
            "fairness and calibration are of classifiers",
            usage=True,
        )
    pool = history.pool
    stretch = pool.clients if on == "train" else pool.test
    labels = pool.y[pool.test].cpu().numpy()
    examples = {}
    for k, part in enumerate(history.parts):
        if not len(part) and (on != "test" or history.test_parts is None):
            examples[k] = np.empty(0, dtype=np.int64)
        elif on == "train":
            train = pool.train_slice(k)
            examples[k] = np.arange(train.start, train.stop) - stretch.start
        elif on == "test" and history.test_parts is not None:
            examples[k] = pool.places(history.test_parts[k])
        else:
            client_labels = history.dataset.train_y[part].cpu().numpy()
            choose = personal_test if on == "test" else own_classes
            examples[k] = choose(client_labels, labels, k)
    if not any(map(len, examples.values())):
        raise FldiagError(
            f"{history.name}: the run does not say which examples belong to which client",
            "give them when the run is made: fldiag convert … --partition FILE",
        )
    large = {k: at for k, at in examples.items() if len(at) >= min_count}
    if not large:
        raise FldiagError(
            f"no client has {min_count} examples ({max(map(len, examples.values()))} at most)",
            "ask for fewer: --min-count",
            usage=True,
        )
    return Groups(stretch.stop - stretch.start, large, tuple(k for k in examples if k not in large))


def answers(history: History, weights: Weights, on: ClientSlice) -> Answers | None:
    """What the model says to all clients' examples; None where that is not a number."""
    stretch = history.pool.clients if on == "train" else history.pool.test
    try:
        logits, y = history.problem(weights, stretch, on).outputs()
    except FldiagError:  # weights that are not a number
        if bool(weights[0].isfinite().all()):
            raise
        return None
    logits = logits.double().cpu().numpy()
    return Answers(logits, y.cpu().numpy()) if np.isfinite(logits).all() else None


def spreads(
    model: Answers, groups: Groups, bins: int, weights: np.ndarray
) -> dict[str, np.ndarray]:
    """The numbers of SPREADS [draws] with the examples weighted [draws, n]."""
    matrix, right, confidence = groups.matrix, model.right.astype(float), model.confidence
    each = (matrix @ (weights * right).T).T / (matrix @ weights.T).T
    counted = weights * matrix.sum(0)
    total = counted.sum(1)
    gap = counted * (right - confidence)
    bin = bin_of(confidence, bins)
    gaps = sum((np.abs(gap[:, bin == b].sum(1)) for b in np.unique(bin)), np.zeros(len(weights)))
    return {
        "mean_accuracy": each.mean(1),
        "worst_decile": worst_decile(each),
        "accuracy_variance": each.var(1),
        "accuracy_gini": gini(each),
        "ece": gaps / total,
        "accuracy": counted @ right / total,
    }


def resampled(models: Sequence[Answers], groups: Groups, bins: int) -> list[dict[str, np.ndarray]]:
    """``spreads`` of every model over the draws of one bootstrap of the examples, the same draws for all."""
    draws = min(uncertainty.DRAWS, max(DRAWS, int(WORK / (1 + sum(map(len, groups.at.values()))))))
    blocks = [
        [spreads(m, groups, bins, w) for m in models]
        for w in uncertainty.weights(groups.n, draws=draws)
    ]
    return [
        {name: np.concatenate([block[i][name] for block in blocks]) for name in SPREADS}
        for i in range(len(models))
    ]


# -- the rows of a table


def round_rows(
    history: History, cohort: Stored, groups: Groups, on: ClientSlice, bins: int
) -> list[Row]:
    """How a round's aggregated model serves every client, how that is spread, and all clients together."""
    model = answers(history, (cohort.aggregated, cohort.buffers), on)
    if model is None:
        history.note(cohort.round, "the aggregated weights give no numbers")
        return []
    right, confidence = model.right, model.confidence
    states = {k: Binned.of(right[at], confidence[at], bins) for k, at in groups.at.items()}
    rows = [
        row for k, state in states.items() for row in _client(k, state, on, len(history.parts[k]))
    ]
    rows += [
        {
            "scope": "client",
            "client": k,
            "slice": f"client:{k}/{on}",
            "metric": "accuracy",
            "value": None,
            "estimator": "exact",
            "size": len(history.parts[k]),
            "note": "too few examples",
        }
        for k in groups.small
    ]
    total = next(iter(states.values()))
    for state in list(states.values())[1:]:
        total = total + state
    base: Row = {
        "scope": "global",
        "slice": f"clients/{on}",
        "n_examples": total.n,
        "n_clients": len(states),
    }
    spread = _standing(model, groups, history.dataset.scaling, _spread(model, groups, bins))
    return rows + [
        {**base, **row}
        for row in [
            *spread,
            *_calibration(model, groups, total),
        ]
    ]


def _client(k: int, state: Binned, on: ClientSlice, size: int) -> list[Row]:
    error, stderr = state.ece()
    base: Row = {
        "scope": "client",
        "client": k,
        "slice": f"client:{k}/{on}",
        "n_examples": state.n,
        "size": size,
    }
    return [
        {**base, **row}
        for row in (
            {"metric": "accuracy", "estimator": "exact", **share(state.right, state.n)},
            {"metric": "ece", "estimator": "counts", "value": error, "stderr": stderr},
            {
                "metric": "ece_floor",
                "estimator": "normal approximation",
                "value": state.ece_floor(),
            },
        )
    ]


def _spread(model: Answers, groups: Groups, bins: int) -> list[Row]:
    """With basic bootstrap intervals over the examples, of accuracies on the scale of their log odds, on which no end leaves
    0 to 1."""
    values = spreads(model, groups, bins, np.ones((1, groups.n)))
    (resamples,) = resampled([model], groups, bins)
    rows: list[Row] = []
    for name in SPREADS:
        if name in ("accuracy_variance", "accuracy_gini") and len(groups.at) < 2:
            rows.append(
                {
                    "metric": name,
                    "estimator": "exact",
                    "value": None,
                    "note": "one client has no spread",
                }
            )
            continue
        value = float(values[name][0])
        row: Row = {"metric": name, "estimator": "bayesian bootstrap", "value": value}
        is_odds = name in ACCURACIES and 0 < value < 1  # else every resample gives the same
        sample = (value, resamples[name])
        interval = uncertainty.basic(*(map(special.logit, sample) if is_odds else sample))
        if interval.low is None or interval.high is None:  # as where all answers are wrong
            row["note"] = "no interval: every resample of the examples gives the same value"
        else:
            low, high = interval.low, interval.high
            row |= {
                "low": float(special.expit(low)) if is_odds else max(low, 0.0),
                "high": float(special.expit(high)) if is_odds else max(high, 0.0),
                "stderr": float(resamples[name].std()),
            }
        rows.append(row)
    return rows


def _standing(model: Answers, groups: Groups, inputs: str, spread: Sequence[Row]) -> list[Row]:
    """The loss of all clients' examples before the rows of the spread, in which the accuracy says what a guess gives."""
    counts = groups.matrix.sum(0) / groups.matrix.sum()
    shares = np.bincount(model.y, weights=counts, minlength=model.logits.shape[1])
    losses = (
        special.logsumexp(model.logits, axis=1) - model.logits[np.arange(len(model.y)), model.y]
    )
    marks = {"inputs": inputs, "guess": guess_accuracy(shares.tolist(), "test")}
    return [
        {
            "metric": "loss",
            "estimator": "exact",
            "value": float(counts @ losses),
            **marks,
            "guess": math.log(len(shares)),
        },
        *({**row, **marks} if row["metric"] == "accuracy" else row for row in spread),
    ]


def _calibration(model: Answers, groups: Groups, total: Binned) -> list[Row]:
    """The floor of the calibration error, and the reliability diagram: confidence and accuracy of the bins that have examples.

    An example on which several clients are tested is one draw that counts several times: chance is that of fewer examples."""
    times, bins = groups.matrix.sum(0), total.sums.shape[1]
    at = bin_of(model.confidence, bins)
    squares = np.bincount(at, weights=times**2, minlength=bins)
    variances = np.bincount(
        at, weights=times**2 * model.confidence * (1 - model.confidence), minlength=bins
    )
    rows: list[Row] = [
        {
            "metric": "ece_floor",
            "estimator": "normal approximation",
            "value": floor(variances, total.n),
        }
    ]
    for b, (n, r, c, *_) in enumerate(total.sums.T):
        if n:
            base: Row = {"index": b + 1, "estimator": "merged counts", "n_examples": int(n)}
            rows += [
                {**base, "metric": "bin_confidence", "value": c / n},
                {**base, "metric": "bin_accuracy", **share(r * n / squares[b], n * n / squares[b])},
            ]
    return rows
