"""What local training forgets, and how classes fare over the rounds.

Accuracy before and after local training as in Lee et al., "FedSOL" (CVPR 2024), figure 7; per-class forgetting as in
FedProj (Chunduru et al.); backward transfer as in Lee et al., "Preservation of the global knowledge by not-true
distillation in federated learning" (NeurIPS 2022).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import numpy as np
import pandas as pd
from pydantic import Field

from fldiag.plotting import style
from fldiag.plotting.style import MANY, cells, compares_runs, lines
from fldiag.registry import diagnostic
from fldiag.results.numbers import Number
from fldiag.results.statistics import sample_mean, share
from fldiag.results.table import (
    SPLITS,
    WHOLE,
    Options,
    Row,
    Sentence,
    Summary,
    guess_accuracy,
    last_round,
    number,
    of_rounds,
    only,
    plus_minus,
    split_of,
    thin,
)
from fldiag.runs.history import ExamplePool, History, Stored, Weights

MOMENTS = {
    "received": "received by the clients",
    "trained": "after local training",
    "aggregated": "after averaging",
}
#: Metrics of the clients of which a mean over them is taken, and those of which the spread is, too.
MEANS = ("accuracy", "loss", "drop", "forgetting", "accuracy_seen", "accuracy_unseen")
SPREADS = ("accuracy", "loss", "drop")

LAST = {"moment": "trained", "slice": "test", "layer": None, "index": None}
ASKED: dict[str, Any] = {"share": True, "needs": ("partition",), "options": {"rounds": "last"}}
NUMBERS = (
    Number(
        "drop",
        "accuracy lost in local training, mean over clients",
        "lower",
        {"metric": "drop", **LAST},
        spread="drop_std",
        column="Drop: accuracy lost in local training (± std over clients)",
        **ASKED,
    ),
    Number(
        "forgetting",
        "largest loss of accuracy on a class in local training, mean over clients",
        "lower",
        {"metric": "forgetting", **LAST},
        **ASKED,
    ),
)


# One round


def round_rows(history: History, stored: Stored, min_count: int, own: bool) -> list[Row]:
    """The numbers of one round; of the aggregated model alone where it has no client weights."""
    ids, pool, rows = stored.ids, history.pool, list[Row]()
    models: dict[tuple[str, int | None], Weights]
    models = {("received", None): stored.start} if ids else {}
    if stored.starts is not None:
        models |= {("received", k): stored.start_of(j) for j, k in enumerate(ids)}
    models |= {("trained", k): stored.client(j) for j, k in enumerate(ids)}
    models["aggregated", None] = stored.end
    scores = history.evaluate(list(models.values()), test=not own)

    def add(metric: str, about: Row, sample: np.ndarray) -> None:
        row: Row = {"value": None, "stderr": None}
        if len(sample) >= min_count and not np.isnan(sample).any():
            is_share = "accuracy" in metric
            row = share(int(sample.sum()), len(sample)) if is_share else sample_mean(sample)
        row |= {"metric": metric, "n_examples": len(sample)}
        rows.append({"slice": pool.split, **about, **row})

    classes, labels = 0, pool.y[pool.test].cpu().numpy()
    guesses: dict[str, float | None] = {"loss": None}
    if scores.right is not None:
        answered = np.where(scores.valid[:, None], scores.right, np.nan)
        right = dict(zip(models, answered, strict=True))
        classes = history.dataset.classes
        shares = np.bincount(labels, minlength=classes) / len(labels)
        guesses["loss"] = math.log(classes)
        guesses["accuracy"] = guess_accuracy(shares.tolist(), pool.split)
    members = [labels == c for c in range(classes)]
    for (moment, k), loss, is_valid in zip(models, scores.loss, scores.valid, strict=True):
        base: Row = {"moment": moment, "scope": "global" if k is None else "client", "client": k}
        if not is_valid:
            owner = "" if k is None else f" of client {k}"
            history.note(stored.round, f"the {moment} weights{owner} give no numbers", k)
        for name, examples in slices(pool, ids if k is None else (k,), own).items():
            if classes:
                add("accuracy", {**base, "slice": name}, right[moment, k][examples])
            add("loss", {**base, "slice": name}, loss[examples])
        for c, member in enumerate(members):
            add("class_accuracy", {**base, "index": c}, right[moment, k][pool.test][member])
    for row in rows:
        is_whole = row["scope"] == "global" and row["slice"] == pool.split
        if is_whole and row["metric"] in guesses:
            row |= {"inputs": history.dataset.scaling, "guess": guesses[row["metric"]]}
    for k in ids if classes else ():
        answers = {m: right[m, k if (m, k) in right else None][pool.test] for m in MOMENTS}
        base = {"moment": "trained", "scope": "client", "client": k}
        drop = answers["received"] - answers["trained"]
        add("drop", base, drop)
        for c, member in enumerate(members):
            add("class_forgetting", {**base, "index": c}, drop[member])
        drops = [row["value"] for row in rows[-classes:] if row["value"] is not None]
        largest = {"metric": "forgetting", "value": max(drops, default=None)}
        rows.append({**base, **largest, "slice": pool.split, "n_examples": len(drop)})
        is_seen = (class_counts(history, k) > 0)[labels]
        for moment, values in answers.items():
            add("accuracy_seen", {**base, "moment": moment}, values[is_seen])
            add("accuracy_unseen", {**base, "moment": moment}, values[~is_seen])
    return rows + mean_rows(rows, pool)


def slices(pool: ExamplePool, clients: Sequence[int], own: bool) -> dict[str, np.ndarray]:
    """Name -> positions in the pool of the examples on which models of these clients are judged."""
    places = {pool.split: np.r_[pool.test]}
    for k in clients if own else ():
        train = np.r_[pool.train_slice(k)]
        places[f"client:{k}/train"] = train
        places[f"client:{k}/others"] = np.setdiff1d(np.r_[pool.clients], train)
    return places


def mean_rows(rows: list[Row], pool: ExamplePool) -> list[Row]:
    """Mean and spread over the clients of what their rows say about the test split."""
    frame = only(pd.DataFrame(rows), scope="client", slice=pool.split, metric=MEANS)
    frame = frame.dropna(subset=["value"])
    # The received global model has rows of its own, also where each client received another.
    frame = frame[(frame["moment"] != "received") | ~frame["metric"].isin(["accuracy", "loss"])]
    means: list[Row] = []
    for (moment, metric), values in frame.groupby(["moment", "metric"], sort=False)["value"]:
        base: Row = {
            "moment": moment,
            "scope": "global",
            "slice": pool.split,
            "n_examples": pool.test.stop,
            "n_clients": len(values),
        }
        means.append({**base, "metric": metric, **sample_mean(values)})
        if metric in SPREADS:
            means.append({**base, "metric": f"{metric}_std", "value": values.std(ddof=0)})
    return means


def class_counts(history: History, client: int) -> np.ndarray:
    """Training examples of every class that a client has: not the pool's, which may lack a class with few samples."""
    labels = history.dataset.train_y[history.parts[client]]
    return np.bincount(labels.cpu().numpy(), minlength=history.dataset.classes)


def class_examples(history: History, clients: set[int]) -> Iterator[Row]:
    """How many training examples of every class these clients have."""
    for k in sorted(clients) if not history.dataset.regression else ():
        for c, count in enumerate(class_counts(history, k)):
            yield {
                "metric": "class_examples",
                "scope": "client",
                "client": k,
                "slice": f"client:{k}/train",
                "index": c,
                "value": count,
                "n_examples": len(history.parts[k]),
            }


# Over the rounds


def over_rounds(rows: list[Row]) -> list[Row]:
    """``backward_transfer`` and ``average_forgetting``; round 0 is the initial model."""
    frame = only(pd.DataFrame(rows), metric="class_accuracy", scope="global")
    start = only(frame, moment="received", round=1).assign(round=0)
    frame = pd.concat([start, only(frame, moment="aggregated")])
    if frame["round"].nunique() < 2:
        return []
    base: Row = {"moment": "aggregated", "scope": "global", "slice": frame["slice"].iloc[0]}
    columns = ["round", "index", "value", "stderr", "n_examples"]
    wide = frame[columns].astype(float).pivot(index="round", columns="index")
    accuracy, stderr, n = wide["value"], wide["stderr"], wide["n_examples"].iloc[-1]
    later = accuracy.loc[1:].dropna(how="all")
    changes: list[Row] = []
    for t, values in (later - later.cummax().shift()).iloc[1:].iterrows():
        about = {**base, "metric": "backward_transfer", "round": int(t)}
        changes += class_rows(about, values.to_frame("value"), n)
    past, last = accuracy.iloc[:-1], accuracy.index[-1]
    since = past.fillna(-1).iloc[::-1].idxmax()  # the latest of equal maxima
    best = [stderr.at[t, c] for c, t in since.items()]
    forgotten = pd.DataFrame({"value": past.max() - accuracy.loc[last], "since": since})
    forgotten["stderr"] = np.hypot(best, stderr.loc[last])
    forgotten["compared"] = past.notna().sum()
    about = {**base, "metric": "average_forgetting", "round": int(last)}
    return changes + class_rows(about, forgotten, n)


def class_rows(about: Row, cells: pd.DataFrame, n: pd.Series) -> list[Row]:
    """A row a class, and one of their mean over those that have a value; errors are taken as independent."""
    cells = cells.assign(n_examples=n.astype(int))
    known = cells.dropna(subset=["value"])
    mean: Row = {"value": known["value"].mean(), "n_examples": int(known["n_examples"].sum())}
    if "stderr" in known and len(known):
        error = float(np.sqrt(np.square(known["stderr"]).sum())) / len(known)
        mean |= {"stderr": error, "n_classes": len(known), "compared": known["compared"].max()}
    each = cells.rename_axis("index").reset_index().to_dict("records")
    return [{**about, **row} for row in (*each, mean)]


# Picture and summary


@compares_runs
def draw(table: pd.DataFrame) -> style.Figure:
    """Accuracy (of regression: loss) by moment over the rounds with standard errors, and what each client forgot of each class
    in the last round; of several runs a panel a moment with a line a run, and a heatmap a run.

    Of many clients the heatmap has some, evenly spread; grey cells rest on too few examples."""
    metric = "accuracy" if (table["metric"] == "accuracy").any() else "loss"
    rows = only(table, metric=metric, slice=split_of(table), **WHOLE)
    curves = pd.concat([only(rows, moment=m).assign(moment=text) for m, text in MOMENTS.items()])
    runs = dict(list(table.groupby("run", sort=False)))
    looks = style.looks(runs) if len(runs) > 1 else None
    panel, hue = ("moment", "run") if looks else ("run", "moment")
    panels = list(curves.groupby(panel, sort=False))
    wide = {
        run: values
        for run, part in runs.items()
        if (values := class_cells(part, "class_forgetting")).notna().any(axis=None)
    }
    reach = max((float(values.abs().max(axis=None)) for values in wide.values()), default=0.0)
    with style.paper():
        fig, axes = style.panels(len(panels) + len(wide), 2.6)
        for ax, (name, rows) in zip(axes, panels, strict=False):
            lines(ax, dict(list(rows.groupby(hue, sort=False))), looks)
            ax.set(title=name if looks else "", ylabel=f"{SPLITS[split_of(table)]} {metric}")
            if ax is not axes[0]:
                ax.sharey(axes[0])
        if metric == "accuracy":
            style.percents(*(ax.yaxis for ax in axes[: len(panels)]))
            style.chance(axes[0], number(curves, column="guess") or 0.0)
        for ax, (run, values) in zip(axes[len(panels) :], wide.items(), strict=True):
            draw_classes(ax, values, class_cells(runs[run], "class_examples"), reach or 1.0)
            about = f"forgetting by class, round {last_round(runs[run], 'class_forgetting')}"
            ax.set_title(f"{style.plain(style.shorten(run, 30))}\n{about}" if looks else about)
        fig.suptitle("bands: ± standard error", fontsize=7)
        if looks:
            style.legend_of_runs(fig, looks)
    return fig


def class_cells(table: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Clients by classes in the last round."""
    rows = only(table, metric=metric)
    rows = only(rows, round=[None, rows["round"].max()])
    rows = rows.astype({"client": int, "index": int, "value": float})
    wide = rows.pivot(index="client", columns="index", values="value")
    return wide.loc[thin(wide.index, MANY)]


def draw_classes(ax: style.Axes, wide: pd.DataFrame, examples: pd.DataFrame, reach: float) -> None:
    """A heatmap with a dot where the client has no example of the class."""
    absent = np.argwhere(examples.reindex_like(wide).to_numpy() == 0)
    notes = ["grey: too few examples"] * bool(wide.isna().any(axis=None))
    if len(absent):
        ax.plot(*absent[:, ::-1].T + 0.5, ".", color="#222222", markersize=3)
        notes.insert(0, "dot: client has none")
    ax.set_facecolor("#bbbbbb")
    colors = {"vmin": -reach, "vmax": reach, "cmap": style.DIVERGING}
    cells(ax, wide, **colors, cbar_kws={"label": "received − trained"})
    ax.set(xlabel="class" + f" ({'; '.join(notes)})" * bool(notes), ylabel="client")


def summary(table: pd.DataFrame, options: Options) -> Summary:
    """Accuracies (of regression: losses) of some rounds, and the average forgetting after the last."""
    metric = "accuracy" if (table["metric"] == "accuracy").any() else "loss"
    trained = {"moment": "trained"}
    columns = {
        **{moment: {"metric": metric, "moment": moment} for moment in MOMENTS},
        "± (clients)": {"metric": f"{metric}_std", **trained},
        "drop": {"metric": "drop", **trained},
        "max over classes": {"metric": "forgetting", **trained},
    }
    yield of_rounds(only(table, slice=split_of(table)), columns)
    mean = only(table, metric="average_forgetting", **WHOLE)
    if len(mean):
        value = plus_minus(number(mean), number(mean, column="stderr"), share=True)
        last = int(mean["round"].iloc[0])
        yield Sentence(f"average forgetting (Chaudhry et al.) after round {last}: {value}")


# The diagnostic


@diagnostic(
    "forgetting",
    meta={"read": "Chaudhry et al.: abstract and opening"},
    on="run",
    draw=draw,
    summary=summary,
    numbers=NUMBERS,
    example="checkpoints/digits-fedavg-s0-1a2b3c4d",
)
def forgetting(
    history: History,
    *,
    min_count: Annotated[
        int, Field(ge=1, description="Leave out numbers that rest on fewer examples.")
    ] = 5,
    own: Annotated[
        bool,
        Field(description="Also on each client's own training data and that of all others."),
    ] = True,
) -> pd.DataFrame:
    """Measure what local training forgets: accuracy before and after, by class, client and round.

    Every stored round, moments received, trained and aggregated, on slices ``test``, ``client:k/train`` (the client's
    own data) and ``client:k/others`` (all other clients' data); with ``own=False`` on ``test`` alone. A recorded run without test
    examples has slice ``train``, all training examples, in place of ``test`` in all that follows. Accuracies are
    shares in [0, 1] with Wilson's 95 % interval in columns ``low``, ``high``. Rows of scope client (those of scope global
    are means over the clients stored, ``n_clients`` of them, with ``_std`` their spread):

    - ``accuracy``, ``loss``; ``class_accuracy`` (index = class) on test; ``accuracy_seen``, ``accuracy_unseen``: on the
      test examples of classes that the client has, and has not, in its training data.
    - ``drop``: accuracy of the received minus the trained model on test; ``class_forgetting``: the same of one class;
      ``forgetting``: its largest value over the classes (a maximum of noisy numbers, so it is above 0 by chance alone
      when classes are small). Standard errors are paired, example by example.
    - Over the rounds, of the aggregated model: ``backward_transfer``: accuracy of a class now minus its best so far,
      and the mean over classes (below 0: forgotten).
    - After the last round T, with a[t, c] the aggregated model's accuracy on class c after round t, of every class and in the
      mean: ``average_forgetting``, max over t < T of a[t, c] - a[T, c] (Chaudhry et al., ECCV 2018; t = 0 is the initial
      model). Column ``since``: that t. ``backward_transfer`` above, of every round, is that of Lee et al.
    - ``class_examples``: how many training examples of a class (index) a client has. ``missing``: what could not be
      read, in column ``note``.

    A number on fewer than ``min_count`` examples is not shown but ``masked``. Regression data have losses only.
    Cost: one evaluation of every stored model on test and, with ``own``, all training data a round.

    Raises FldiagError when no round has client weights.
    """
    next(history.each(every_round=False))  # a run without client weights is refused
    rows = history.map_rounds(round_rows, clients=False, min_count=min_count, own=own)
    clients = {row["client"] for row in rows if row["scope"] == "client"}
    rows += [*over_rounds(rows), *class_examples(history, clients)]
    return history.table(rows, estimator="exact")
