"""How evenly one model serves the clients, and whether its confidence can be trusted.

Spread of accuracy over clients as in Li et al., "Fair Resource Allocation in Federated Learning" (ICLR 2020); expected
calibration error of Guo et al., "On Calibration of Modern Neural Networks" (ICML 2017), equation 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic import Field
from scipy import sparse, special

from fldiag.choices import BINS, FEWEST, ClientSlice
from fldiag.data.slices import own_classes, personal_test
from fldiag.errors import FldiagError
from fldiag.plotting import style
from fldiag.plotting.shapes import MANY, floats, select
from fldiag.registry import diagnostic
from fldiag.results import uncertainty
from fldiag.results.means import gini, share, worst_decile
from fldiag.results.numbers import Number
from fldiag.results.select import last_round, number, only
from fldiag.results.standing import guess_accuracy
from fldiag.results.summary import Item, Note, Say, Small, missing_notes, of_rounds
from fldiag.results.table import Row, table
from fldiag.runs.history import History, Stored
from fldiag.runs.pool import Weights

#: Multiply-adds of a bootstrap that are worth its digits, and the draws that it takes at least.
WORK, DRAWS = 5e8, 400
#: What is said of the spread over clients -> what it is called; none of it can be below 0.
SPREADS = {
    "mean_accuracy": "accuracy, mean over clients",
    "worst_decile": "accuracy, worst tenth of clients",
    "accuracy_variance": "variance over clients",
    "accuracy_gini": "Gini coefficient over clients",
    "ece": "calibration error (ECE)",
    "accuracy": "accuracy, all examples",
}
#: Those between 0 and 1 at both ends.
ACCURACIES = ("mean_accuracy", "worst_decile", "accuracy")
WORST, REST = style.look(1).color, style.look(2).color


def number_of(
    name: str, text: str, better: Literal["higher", "lower"], share: bool = True
) -> Number:
    return Number(
        name,
        text,
        better,
        {"metric": name, "scope": "global", "estimator": "bayesian bootstrap"},
        share=share,
        needs=("partition",),
        over="examples of clients",
    )


NUMBERS = (
    number_of("mean_accuracy", "accuracy on clients' class mixtures, mean over clients", "higher"),
    number_of("worst_decile", "mean accuracy of the worst tenth of clients", "higher"),
    number_of("accuracy_variance", "variance of accuracy over clients", "lower", share=False),
    number_of("accuracy_gini", "Gini coefficient of accuracy over clients", "lower", share=False),
    number_of("ece", "expected calibration error on all clients' examples", "lower"),
)


# What a model answers


def bin_of(confidence: np.ndarray, bins: int) -> np.ndarray:
    """Which of ``bins`` equal parts of [0, 1]; an edge belongs to the part below it, as in scikit-learn's calibration_curve."""
    return np.searchsorted(np.linspace(0, 1, bins + 1)[1:-1], confidence)


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


def groups_of(history: History, on: ClientSlice, min_count: int) -> Groups:
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


def calibration(right: np.ndarray, confidence: np.ndarray, bins: int) -> tuple[float, float, float]:
    """The expected calibration error of some examples, its standard error to first order (of a mean of right - confidence with
    the sign of its bin), and the error that a calibrated model with these confidences would show on so few examples.

    >>> error, _, _ = calibration(np.array([1, 1, 1, 0]), np.full(4, 0.9), bins=15)
    >>> round(error, 3)
    0.15
    """
    n, gap, bin = len(right), right - confidence, bin_of(confidence, bins)
    error = float(np.abs(np.bincount(bin, gap)).sum()) / n
    stderr = math.sqrt(max(float((gap**2).mean()) - error**2, 0.0) / n)
    return error, stderr, floor(np.bincount(bin, confidence * (1 - confidence)), n)


def floor(variances: np.ndarray, n: float) -> float:
    """Mean of sum_b |N(0, variances_b)| / n: what chance alone adds to a calibration error."""
    return float(np.sqrt(2 / np.pi * variances).sum() / n)


# The rows of a table


def round_rows(
    history: History, stored: Stored, groups: Groups, on: ClientSlice, bins: int
) -> list[Row]:
    """How a round's aggregated model serves every client, how that is spread, and all clients together."""
    model = answers(history, (stored.aggregated, stored.buffers), on)
    if model is None:
        history.note(stored.round, "the aggregated weights give no numbers")
        return []
    rows: list[Row] = []
    for k in (*groups.at, *groups.small):
        base: Row = {"scope": "client", "client": k, "slice": f"client:{k}/{on}"}
        base["size"] = len(history.parts[k])
        if k in groups.small:
            base |= {"metric": "accuracy", "estimator": "exact", "value": None}
            rows.append({**base, "note": "too few examples"})
            continue
        right, confidence = model.right[groups.at[k]], model.confidence[groups.at[k]]
        base["n_examples"] = len(right)
        error, stderr, chance = calibration(right, confidence, bins)
        accuracy = share(int(right.sum()), len(right))
        rows += [
            {**base, "metric": "accuracy", "estimator": "exact", **accuracy},
            {**base, "metric": "ece", "estimator": "counts", "value": error, "stderr": stderr},
            {
                **base,
                "metric": "ece_floor",
                "estimator": "normal approximation",
                "value": chance,
            },
        ]
    times = groups.matrix.sum(0)
    whole: Row = {"scope": "global", "slice": f"clients/{on}", "n_clients": len(groups.at)}
    whole |= {"n_examples": int(times.sum()), "n_different": int((times > 0).sum())}
    totals = [*spread_rows(model, groups, bins), *whole_rows(model, times, bins)]
    counts = np.bincount(model.y, weights=times, minlength=model.logits.shape[1])
    shares = counts / times.sum()
    guesses = {"accuracy": guess_accuracy(shares.tolist(), "test"), "loss": math.log(len(shares))}
    for row in totals:
        if row["metric"] in guesses:
            row |= {"inputs": history.dataset.scaling, "guess": guesses[row["metric"]]}
    return rows + [{**whole, **row} for row in totals]


def spread_rows(model: Answers, groups: Groups, bins: int) -> list[Row]:
    """With basic bootstrap intervals over the examples, of accuracies on the scale of their log odds, on which no end leaves
    0 to 1."""
    values = spreads(model, groups, bins, np.ones((1, groups.n)))
    (resamples,) = resampled([model], groups, bins)
    rows: list[Row] = []
    for name in SPREADS:
        if name in ("accuracy_variance", "accuracy_gini") and len(groups.at) < 2:
            note: Row = {"value": None, "note": "one client has no spread"}
            rows.append({"metric": name, "estimator": "exact", **note})
            continue
        value = float(values[name][0])
        row: Row = {"metric": name, "estimator": "bayesian bootstrap", "value": value}
        is_odds = name in ACCURACIES and 0 < value < 1  # else every resample gives the same
        sample = (value, resamples[name])
        interval = uncertainty.basic(*(map(special.logit, sample) if is_odds else sample))
        if interval.low is None or interval.high is None:  # as where all answers are wrong
            row["note"] = "no interval: every resample of the examples gives the same value"
        else:
            ends = interval.low, interval.high
            low, high = special.expit(ends) if is_odds else np.maximum(ends, 0.0)
            row |= {"low": float(low), "high": float(high)}
            row["stderr"] = float(resamples[name].std())
        rows.append(row)
    return rows


def whole_rows(model: Answers, times: np.ndarray, bins: int) -> list[Row]:
    """Loss, floor of the calibration error and reliability diagram of all clients' examples, each of which counts ``times`` [n].

    An example on which several clients are tested is one draw that counts several times: chance is that of fewer examples."""
    losses = -special.log_softmax(model.logits, axis=1)[np.arange(len(model.y)), model.y]
    right, confidence = model.right, model.confidence
    at, n = bin_of(confidence, bins), times.sum()

    def sums(values: np.ndarray) -> np.ndarray:
        return np.bincount(at, weights=values, minlength=bins)

    chance = floor(sums(times**2 * confidence * (1 - confidence)), n)
    rows: list[Row] = [
        {"metric": "loss", "estimator": "exact", "value": float(times @ losses / n)},
        {"metric": "ece_floor", "estimator": "normal approximation", "value": chance},
    ]
    columns = sums(times), sums(times * right), sums(times * confidence), sums(times**2)
    for b, (n, r, c, squares) in enumerate(zip(*columns, strict=True), start=1):
        if n:
            base: Row = {"index": b, "estimator": "merged counts", "n_examples": int(n)}
            accuracy = share(r * n / squares, n * n / squares)
            rows += [
                {**base, "metric": "bin_confidence", "value": c / n},
                {**base, "metric": "bin_accuracy", **accuracy},
            ]
    return rows


# Picture and summary


def draw(table: pd.DataFrame) -> Figure:
    """Of the last round the clients from worst to best with Wilson's intervals (of many the share with at most an accuracy),
    and accuracy against confidence. Raises FldiagError for another table."""
    select(table, "mean_accuracy", "picture of fairness")
    rows = only(table, round=last_round(table, "mean_accuracy"))
    clients = only(rows, scope="client", metric="accuracy").dropna(subset=["value"])
    totals = only(rows, scope="global")
    with style.paper():
        fig, (order, reliable) = style.panels(2, 2.7)
        draw_order(order, clients.sort_values(["value", "client"]), totals)
        draw_reliability(reliable, totals)
        fig.suptitle(f"round {int(rows['round'].iloc[0])}; bars: 95 % intervals", fontsize=8)
    return fig


def draw_order(ax: Axes, clients: pd.DataFrame, totals: pd.DataFrame) -> None:
    """The worst tenth has a colour of its own; the mean is dotted."""
    values, low, high = (floats(clients[column]) for column in ("value", "low", "high"))
    worst = -(-len(values) // 10)
    if len(values) > MANY:
        shares = np.arange(1, len(values) + 1) / len(values)
        ax.step(values, shares, where="post", color=REST)
        ax.step(values[:worst], shares[:worst], where="post", color=WORST)
        ax.set(xlabel="accuracy", ylabel="clients with at most this")
        style.percents(ax.xaxis, ax.yaxis)
    else:
        for part, color in ((slice(0, worst), WORST), (slice(worst, None), REST)):
            ends = (values - low)[part], (high - values)[part]
            places = np.arange(len(values))[part]
            ax.errorbar(places, values[part], ends, fmt="o", color=color, elinewidth=0.7)
        ax.axhline(number(totals, "mean_accuracy") or 0.0, color="#666666", linestyle=":")
        ax.set(xlabel="clients, worst first (dotted: their mean)", ylabel="accuracy")
        ax.set(xticks=[], ylim=(-0.03, 1.03))
        style.percents(ax.yaxis)
    tenth, spread = number(totals, "worst_decile") or 0.0, number(totals, "accuracy_gini")
    ax.set_title(f"worst tenth {100 * tenth:.3g} %, Gini {style.number(spread, 2)}")
    ax.grid(True)


def draw_reliability(ax: Axes, totals: pd.DataFrame) -> None:
    """Accuracy of the bins of the confidence; on the dotted line the model is calibrated."""
    right = only(totals, metric="bin_accuracy").set_index("index").sort_index()
    sure = only(totals, metric="bin_confidence").set_index("index").reindex(right.index)
    x, y, n, low, high = (
        floats(column)
        for column in (sure["value"], *(right[c] for c in ("value", "n_examples", "low", "high")))
    )
    ax.plot([0, 1], [0, 1], color="#666666", linestyle=":")
    ax.errorbar(x, y, (y - low, high - y), fmt="none", color=REST, elinewidth=0.7)
    ax.scatter(x, y, s=6 + 60 * n / n.sum(), color=REST, linewidth=0)
    ax.set(xlabel="confidence (dotted: calibrated)", ylabel="accuracy (area: examples)")
    style.percents(ax.xaxis, ax.yaxis)
    error = number(totals, "ece", estimator="bayesian bootstrap")
    chance = style.number(number(totals, "ece_floor"), 2)
    ax.set_title(f"ECE {style.number(error, 2)} (by chance {chance})")
    ax.grid(True)


def summary(table: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[Item]:
    """The spread over the clients in some rounds, and its intervals in the last."""
    rows, r = only(table, scope="global", index=None), last_round(table, "mean_accuracy")
    last = only(rows, round=r)
    if table["round"].nunique() > 1:
        yield of_rounds(rows, {text: {"metric": name} for name, text in SPREADS.items()})
    columns = {"metric": f"round {r}", "value": "value", "low": "95 % from", "high": "to"}
    each = only(last, metric=list(SPREADS)).replace({"metric": SPREADS})[list(columns)]
    yield Small(each.astype(object).where(each.notna(), None).to_dict("records"), columns)
    if (chance := number(last, "ece_floor")) is not None:
        yield Say(f"a calibrated model would show an ECE of about {chance:.2g} on these examples")
        n, different = (number(last, column=c) for c in ("n_examples", "n_different"))
        yield Say(f"the clients have {n:g} examples, of which {different:g} are different")
    small = only(table, scope="client", metric="accuracy", round=r, value=None)["client"]
    if len(small):
        names = ", ".join(str(int(k)) for k in small[:12]) + "…" * (len(small) > 12)
        yield Note(f"left out, with too few examples (--min-count): clients {names}")
    yield from missing_notes(table)


# The diagnostic


@diagnostic(
    "fairness",
    on="run",
    draw=draw,
    summary=summary,
    numbers=NUMBERS,
    example="checkpoints/digits-fedavg-s0-1a2b3c4d",
)
def fairness(
    history: History,
    *,
    on: Annotated[
        ClientSlice,
        Field(
            description="Examples of a client: test (test examples in its class mixture), own "
            "(all test examples of its classes) or train (its training "
            "examples)."
        ),
    ] = "test",
    bins: Annotated[
        int, Field(ge=2, le=1000, description="Number of confidence bins, of equal width.")
    ] = BINS,
    min_count: Annotated[
        int, Field(ge=1, description="Leave out clients with fewer examples.")
    ] = FEWEST,
    every_round: Annotated[
        bool | None,
        Field(
            description="Use all rounds instead of only the last (default if --rounds is given)."
        ),
    ] = None,
) -> pd.DataFrame:
    """Measure how evenly the global model serves the clients, and how well its confidence is calibrated.

    The aggregated model on the examples of every client of the partition, sampled or not (``on``; clients may share test
    examples; in a recorded run without test examples always on its training examples).

    - scope client: ``accuracy`` with Wilson's interval, ``ece`` (expected calibration error), ``ece_floor``; in column ``size``
      how many training examples it has.
    - scope global, over clients, all counted alike: ``mean_accuracy``, ``worst_decile`` (mean of the worst tenth, rounded
      up), ``accuracy_variance``, ``accuracy_gini``.
    - scope global, of all clients' examples together: ``loss``, ``accuracy``, ``ece``, ``ece_floor``; ``bin_accuracy`` and
      ``bin_confidence`` (index: the bin) are the reliability diagram. ``n_different`` of the ``n_examples`` are different ones,
      where clients share them.

    Intervals are basic bootstraps over the examples, clients fixed; those of accuracies on the scale of log odds, which
    keeps them between 0 and 1. They carry the chance of the test examples, not that of training again. Few examples make a
    worst decile too low, and a variance, a Gini coefficient and a calibration error too high; the interval takes an estimate of
    that out. The estimate is too small where clients are in truth alike or a model is calibrated: the interval of a Gini
    coefficient or a calibration error may miss the true 0. ``ece_floor`` is the calibration error that a perfectly calibrated
    model would show on so few examples.
    Cost: one evaluation of the model a round.

    Raises FldiagError for data without classes, and where nobody says which examples are whose.
    """
    if not history.dataset.tested:
        on = "train"
    rows = history.map_rounds(
        round_rows,
        every_round=every_round,
        clients=False,
        groups=groups_of(history, on, min_count),
        on=on,
        bins=bins,
    )
    rows = [{"moment": "aggregated", "masked": row["value"] is None, **row} for row in rows]
    notes = [{"estimator": "exact", **note} for note in history.notes]
    return table([*rows, *notes], **history.common)
