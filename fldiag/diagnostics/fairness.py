"""How evenly one model serves the clients, and whether its confidence can be trusted.

Spread of accuracy over clients as in Li et al., "Fair Resource Allocation in Federated Learning" (ICLR 2020); expected
calibration error of Guo et al., "On Calibration of Modern Neural Networks" (ICML 2017), equation 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from pydantic import Field
from scipy import sparse, special

from fldiag.data.dataset import own_classes, personal_test
from fldiag.errors import FldiagError
from fldiag.plotting import style
from fldiag.plotting.style import floats
from fldiag.registry import diagnostic
from fldiag.results import statistics
from fldiag.results.numbers import Number
from fldiag.results.statistics import gini, share, worst_decile
from fldiag.results.table import (
    Options,
    Row,
    Sentence,
    SmallTable,
    Summary,
    last_round,
    number,
    only,
)
from fldiag.runs.history import History, Stored
from fldiag.sections import BINS, FEWEST, ClientSlice, EveryRound

#: Numbers over the clients -> what they are, and which way is better.
SPREADS: dict[str, tuple[str, Literal["higher", "lower"]]] = {
    "mean_accuracy": ("accuracy on clients' class mixtures, mean over clients", "higher"),
    "worst_decile": ("mean accuracy of the worst tenth of clients", "higher"),
    "accuracy_variance": ("variance of accuracy over clients", "lower"),
    "accuracy_gini": ("Gini coefficient of accuracy over clients", "lower"),
    "ece": ("expected calibration error on all clients' examples", "lower"),
}
NUMBERS = tuple(
    Number(
        name,
        text,
        better,
        {"metric": name, "scope": "global", "estimator": "bayesian bootstrap"},
        share=name in ("mean_accuracy", "worst_decile", "ece"),
        needs=("partition",),
    )
    for name, (text, better) in SPREADS.items()
)
#: Whose intervals are taken on the scale of log odds, which no end leaves.
ACCURACIES = ("mean_accuracy", "worst_decile", "accuracy")


class Answers(NamedTuple):
    """Whether a model is right, its loss, its confidence and the bin of that, on n examples: each [n]."""

    right: np.ndarray
    loss: np.ndarray
    confidence: np.ndarray
    bin: np.ndarray


def answers(logits: np.ndarray, y: np.ndarray, bins: int) -> Answers:
    """From outputs [n, C] and labels [n]. An edge of the equal bins of [0, 1] belongs to the bin below it, as in scikit-learn's
    calibration_curve."""
    logs = special.log_softmax(logits.astype(float), axis=1)
    confidence = np.exp(logs.max(1))
    bin = np.searchsorted(np.linspace(0, 1, bins + 1)[1:-1], confidence)
    right = (logits.argmax(1) == y).astype(float)
    return Answers(right, -logs[np.arange(len(y)), y], confidence, bin)


def examples_of(history: History, on: ClientSlice) -> dict[int, np.ndarray]:
    """Positions [n_k] of every client's examples within the pool's test or training examples; clients may share test examples."""
    if history.dataset.regression:
        raise FldiagError("the data have no classes", "fairness is of classifiers", usage=True)
    pool, clients = history.pool, range(len(history.parts))
    if on == "train":
        return {k: np.r_[pool.train_slice(k)] - pool.clients.start for k in clients}
    if on == "test" and history.test_parts is not None:
        return {k: pool.places(history.test_parts[k]) for k in clients}
    labels = pool.y[pool.test].cpu().numpy()
    choose = personal_test if on == "test" else own_classes
    own = [history.dataset.train_y[part].cpu().numpy() for part in history.parts]
    return {k: choose(own[k], labels, k) if len(own[k]) else own[k] for k in clients}


def matrix_of(examples: Mapping[int, np.ndarray], n: int) -> Any:
    """[K, n], 1 where a client has the example."""
    places = np.concatenate([*examples.values()])
    ends = np.cumsum([0, *map(len, examples.values())])
    return sparse.csr_array((np.ones(len(places)), places, ends), shape=(len(examples), n))


def spreads(model: Answers, matrix: Any, weights: np.ndarray) -> dict[str, np.ndarray]:
    """The numbers of SPREADS and the accuracy [draws] with the examples weighted [draws, n]."""
    each = (matrix @ (weights * model.right).T).T / (matrix @ weights.T).T
    times = weights * matrix.sum(0)
    gap = times * (model.right - model.confidence)
    gaps = [np.abs(gap[:, model.bin == b].sum(1)) for b in np.unique(model.bin)]
    return {
        "mean_accuracy": each.mean(1),
        "worst_decile": worst_decile(each),
        "accuracy_variance": each.var(1),
        "accuracy_gini": gini(each),
        "ece": np.sum(gaps, 0) / times.sum(1),
        "accuracy": times @ model.right / times.sum(1),
    }


def spread_rows(model: Answers, matrix: Any) -> list[Row]:
    """With basic bootstrap intervals over the examples; without, where every resample gives the same value."""
    n = matrix.shape[1]
    draws = [spreads(model, matrix, weights) for weights in statistics.weights(n)]
    rows: list[Row] = []
    for name, values in spreads(model, matrix, np.ones((1, n))).items():
        value, sample = float(values[0]), np.concatenate([block[name] for block in draws])
        row: Row = {"metric": name, "estimator": "bayesian bootstrap", "value": value}
        is_odds = name in ACCURACIES and 0 < value < 1  # else every draw gives the same
        scale: Any = special.logit if is_odds else np.asarray
        interval = statistics.basic(scale(value), scale(sample))
        if interval.low is not None:
            ends = np.array([interval.low, interval.high])
            ends = special.expit(ends) if is_odds else np.maximum(ends, 0.0)
            row |= {"low": ends[0], "high": ends[1], "stderr": float(sample.std())}
        rows.append(row)
    return rows


def floor(model: Answers, times: np.ndarray) -> float:
    """What a calibrated model would show as calibration error on examples that count ``times`` [n]: the mean of
    sum_b |N(0, variance of bin b)|. An example of several clients is one draw that counts several times."""
    variances = (times / times.sum()) ** 2 * model.confidence * (1 - model.confidence)
    return float(np.sqrt(2 / np.pi * np.bincount(model.bin, weights=variances)).sum())


def round_rows(
    history: History, stored: Stored, examples: dict[int, np.ndarray], on: ClientSlice, bins: int
) -> list[Row]:
    """How a round's aggregated model serves every client, how that is spread, and all clients together."""
    split = history.pool.clients if on == "train" else history.pool.test
    try:
        problem = history.problem(stored.end, split, on)
        logits, y = (v.cpu().numpy() for v in problem.outputs())
    except FldiagError as error:  # such as weights that are not numbers
        history.note(stored.round, error.what)
        return []
    model, matrix = answers(logits, y, bins), matrix_of(examples, len(y))
    rows: list[Row] = []
    for k, at in examples.items():
        base: Row = {"scope": "client", "client": k, "slice": f"client:{k}/{on}"}
        base |= {"n_examples": len(at), "size": len(history.parts[k])}
        rows.append({**base, "metric": "accuracy", **share(model.right[at].sum(), len(at))})
    times = matrix.sum(0)
    base = {"scope": "global", "slice": f"clients/{on}", "n_examples": matrix.nnz}
    base |= {"n_clients": len(examples), "n_different": int((times > 0).sum())}
    totals: list[Row] = [
        *spread_rows(model, matrix),
        {"metric": "loss", "value": times @ model.loss / times.sum()},
        {"metric": "ece_floor", "estimator": "normal approximation", "value": floor(model, times)},
    ]
    return [*rows, *({**base, **row} for row in totals)]


# Picture and summary


def draw(table: pd.DataFrame) -> style.Figure:
    """The clients of the last round from worst to best with Wilson's intervals."""
    rows = only(table, round=last_round(table, "mean_accuracy"))
    clients = only(rows, scope="client", metric="accuracy").dropna(subset=["value"])
    clients, totals = clients.sort_values(["value", "client"]), only(rows, scope="global")
    y, low, high = (floats(clients[column]) for column in ("value", "low", "high"))
    mean, worst = (number(totals, name) for name in ("mean_accuracy", "worst_decile"))
    with style.paper():
        fig, (ax,) = style.panels(1, 2.7, width=style.ONE_COLUMN)
        error = y - low, high - y
        ax.errorbar(range(len(y)), y, error, elinewidth=0.7, capsize=0, **style.look(2).point)
        ax.axhline(mean or 0.0, color="#666666", linestyle=":")
        ax.set(xlabel="clients, worst first", ylabel="accuracy", xticks=[], ylim=(-0.03, 1.03))
        style.percents(ax.yaxis)
        ax.grid(True)
        ax.axvspan(-0.5, -(-len(y) // 10) - 0.5, color=style.look(1).color, alpha=0.2, linewidth=0)
        about = f"round {int(rows['round'].iloc[0])}; bars: 95 % intervals; dotted: mean {mean:.1%}"
        fig.suptitle(f"{about}\nshaded: worst tenth, mean {worst:.1%}", fontsize=7)
    return fig


def summary(table: pd.DataFrame, options: Options) -> Summary:
    """The spread over the clients in the last round, with its intervals."""
    last = only(table, scope="global", round=last_round(table, "mean_accuracy"))
    rows = only(last, metric=[*SPREADS, "ece_floor", "accuracy"])
    columns = {"metric": "last round", "value": "value", "low": "95 % from", "high": "to"}
    yield SmallTable.of(rows[list(columns)], columns)
    n, different = (number(rows, column=c) for c in ("n_examples", "n_different"))
    yield Sentence(f"the clients have {n:g} examples, of which {different:g} are different")


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
            description="A client's examples: test (in its class mixture), own (classes), train."
        ),
    ] = "test",
    bins: Annotated[
        int, Field(ge=2, le=1000, description="Number of confidence bins, of equal width.")
    ] = BINS,
    min_count: Annotated[
        int, Field(ge=1, description="Leave out clients with fewer examples.")
    ] = FEWEST,
    every_round: EveryRound = None,
) -> pd.DataFrame:
    """Measure how evenly the global model serves the clients, and how well its confidence is calibrated.

    The aggregated model on the examples of every client of the partition, sampled or not (``on``; clients may share test
    examples; in a recorded run without test examples always on its training examples).

    - scope client: ``accuracy`` with Wilson's interval; in column ``size`` how many training examples it has.
    - scope global, over clients, all counted alike: ``mean_accuracy``, ``worst_decile`` (mean of the worst tenth, rounded
      up), ``accuracy_variance``, ``accuracy_gini``.
    - scope global, of all clients' examples together: ``loss``, ``accuracy``, ``ece`` (expected calibration
      error), ``ece_floor``. ``n_different`` of the ``n_examples`` are different ones,
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
    on = on if history.dataset.tested else "train"
    examples = examples_of(history, on)
    clients = {k: at for k, at in examples.items() if len(at) >= min_count}
    if not clients:
        raise FldiagError(
            f"no client has {min_count} examples ({max(map(len, examples.values()))} at most)",
            "ask for fewer (--min-count), or give the run a partition (fldiag convert --partition)",
            usage=True,
        )
    rows = history.map_rounds(
        round_rows, every_round=every_round, clients=False, examples=clients, on=on, bins=bins
    )
    for k in examples.keys() - clients.keys():
        few = {"metric": "accuracy", "value": None, "note": "too few examples"}
        rows.append({**few, "scope": "client", "client": k, "slice": f"client:{k}/{on}"})
    rows = [{"moment": "aggregated", **row} for row in rows]
    return history.table(rows, estimator="exact")
