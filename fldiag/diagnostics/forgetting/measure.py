"""The numbers of one round, and over the rounds, for ``forgetting``."""

from __future__ import annotations

import math

import numpy as np

from fldiag.errors import counted
from fldiag.results.means import sample_mean, share, standard_error
from fldiag.results.standing import guess_accuracy
from fldiag.results.table import Row
from fldiag.runs.history import History
from fldiag.runs.pool import CohortScores
from fldiag.runs.round_weights import Stored

#: Metrics of the clients of which a mean over them is taken.
MEANS = (
    "accuracy",
    "loss",
    "drop",
    "forgotten",
    "learned",
    "forgetting",
    "accuracy_seen",
    "accuracy_unseen",
)


def round_rows(
    history: History, cohort: Stored, min_count: int, confidence: float, on_clients: bool
) -> list[Row]:
    """The numbers of one round; of the aggregated model alone where it has no client weights.

    ``on_clients``: also on the clients' training data."""
    ids = list(cohort.ids) if cohort.complete else []
    models = [cohort.client(j) for j in range(len(ids))] + [(cohort.aggregated, cohort.buffers)]
    has_starts = bool(ids) and cohort.starts is not None
    starts = [cohort.start_of(j) for j in range(len(ids))] if has_starts else []
    models = [cohort.start, *starts, *models] if ids else models
    scores = history.evaluate(models, test=not on_clients)
    measure = RoundMeasure(history, ids, scores, min_count, confidence, has_starts)
    for (moment, k), is_valid in zip(measure.models, scores.valid, strict=True):
        if not is_valid:
            owner = "" if k is None else f" of client {k}"
            history.note(cohort.round, f"the {moment} weights{owner} give no numbers", k)
    rows = measure.slice_rows(on_clients)
    if measure.classes:
        rows += measure.class_accuracy_rows()
        rows += measure.change_rows() if ids else []
    rows += measure.mean_rows(rows) if ids else []
    return [{"masked": row["value"] is None, **row} for row in rows]


class RoundMeasure:
    """What the models of one round get right: the received one, those of the clients ``ids``, and the aggregated one; the last
    alone where there are no clients. ``has_starts``: also what each client received, where that differs."""

    def __init__(
        self,
        history: History,
        ids: list[int],
        scores: CohortScores,
        min_count: int,
        confidence: float,
        has_starts: bool = False,
    ):
        self.history, self.pool, self.ids, self.scores = history, history.pool, ids, scores
        self.min_count, self.confidence = min_count, confidence
        self.models: list[tuple[str, int | None]] = [("aggregated", None)]
        if ids:
            starts = [("received", k) for k in ids] if has_starts else []
            trained = [("trained", k) for k in ids]
            self.models = [("received", None), *starts, *trained, *self.models]
        #: Where the model stands that a client received, and where the trained ones begin.
        self.start_of = {k: 1 + j if has_starts else 0 for j, k in enumerate(ids)}
        self.first = 1 + len(ids) * has_starts
        self.classes = 0 if history.dataset.regression else history.dataset.classes
        if self.classes:
            assert scores.right is not None
            labels = self.pool.y[self.pool.test].cpu().numpy()
            self.right = scores.right[:, self.pool.test]
            self.onehot = np.eye(self.classes)[labels]
            self.per_class = self.onehot.sum(0)
            #: Right test examples of every model and class.
            self.counts = self.right @ self.onehot

    def slice_rows(self, on_clients: bool) -> list[Row]:
        """Accuracy and loss of every model on test and, ``on_clients``, on the clients' own and all others' data."""
        rows: list[Row] = []
        for i, (moment, k) in enumerate(self.models):
            base = {"moment": moment, "scope": "global" if k is None else "client", "client": k}
            on_test = self._on(i, self.pool.split, [self.pool.test])
            if k is None:
                inputs = self.history.dataset.scaling
                on_test = [
                    {**row, "inputs": inputs, "guess": self._guess(row["metric"])}
                    for row in on_test
                ]
            rows += [{**base, **row} for row in on_test]
            for client in (self.ids if k is None else [k]) if on_clients else ():
                rows += [{**base, **row} for row in self._on_client(i, client)]
        return rows

    def _guess(self, metric: str) -> float | None:
        """What a guess gives on the split by which models are judged."""
        if not self.classes:
            return None
        shares = self.per_class / self.per_class.sum()
        return (
            math.log(self.classes)
            if metric == "loss"
            else guess_accuracy(shares.tolist(), self.pool.split)
        )

    def _on_client(self, i: int, client: int) -> list[Row]:
        """Accuracy and loss of model i on a client's training data and on that of all others."""
        train, everyone = self.pool.train_slice(client), self.pool.clients
        rest = [
            slice(everyone.start, min(train.start, everyone.stop)),
            slice(train.stop, everyone.stop),
        ]
        return [
            *self._on(i, f"client:{client}/train", [train]),
            *self._on(i, f"client:{client}/others", rest),
        ]

    def _on(self, i: int, name: str, slices: list[slice]) -> list[Row]:
        scores = self.scores
        losses = np.concatenate([scores.loss[i, s] for s in slices])
        rows: list[Row] = []
        if scores.right is not None:
            right = sum(int(scores.right[i, s].sum()) for s in slices)
            cell = self._share(right, len(losses), scores.valid[i])
            rows.append({"slice": name, "metric": "accuracy", **cell})
        is_shown = scores.valid[i] and len(losses) >= self.min_count
        stderr = standard_error(losses) if is_shown else None
        return [
            *rows,
            {
                "slice": name,
                "metric": "loss",
                "value": float(losses.mean()) if is_shown else None,
                "stderr": stderr,
                "n_examples": len(losses),
                "masked": not is_shown,
            },
        ]

    def _share(self, right: float, n: float, is_valid: bool = True) -> Row:
        """A share with its interval, or a masked cell."""
        if n < self.min_count or not is_valid:
            return {"value": None, "n_examples": int(n), "masked": True}
        return {**share(right, n, self.confidence), "n_examples": int(n), "masked": False}

    def class_accuracy_rows(self) -> list[Row]:
        """The accuracy of every model on every class."""
        rows: list[Row] = []
        for i, (moment, k) in enumerate(self.models):
            base: Row = {
                "moment": moment,
                "scope": "global" if k is None else "client",
                "client": k,
                "slice": self.pool.split,
                "metric": "class_accuracy",
            }
            rows += [
                {
                    **base,
                    "index": c,
                    **self._share(self.counts[i, c], self.per_class[c], self.scores.valid[i]),
                }
                for c in range(self.classes)
            ]
        return rows

    def change_rows(self) -> list[Row]:
        """What each client's training changed against the received model."""
        return [
            row
            for j, k in enumerate(self.ids, start=self.first)
            for row in self._client_change_rows(j, k)
        ]

    def _client_change_rows(self, j: int, k: int) -> list[Row]:
        """The change from the received model to client k's (j); the aggregated model is the last."""
        valid, last, first = self.scores.valid, len(self.models) - 1, self.start_of[k]
        start, trained, end = self.right[first], self.right[j], self.right[-1]
        n, is_valid = self.pool.test.stop, bool(valid[first] and valid[j])
        base: Row = {"moment": "trained", "scope": "client", "client": k, "slice": self.pool.split}
        lost, won = start & ~trained, trained & ~start
        drop = self._difference(lost, won, np.ones(n, dtype=bool), is_valid)
        restored = self._share((lost & end).sum(), lost.sum(), is_valid and bool(valid[-1]))
        rows: list[Row] = [
            {**base, "metric": "drop", **drop},
            {**base, "metric": "forgotten", **self._share(lost.sum(), n, is_valid)},
            {**base, "metric": "learned", **self._share(won.sum(), n, is_valid)},
            {**base, "metric": "restored", **restored},
        ]
        members = self.onehot.astype(bool)
        cells = [self._difference(lost, won, members[:, c], is_valid) for c in range(self.classes)]
        rows += [
            {**base, "metric": "class_forgetting", "index": c, **cell}
            for c, cell in enumerate(cells)
        ]
        drops = [cell["value"] for cell in cells if cell["value"] is not None]
        worst = max(drops, default=None)
        rows.append(
            {**base, "metric": "forgetting", "n_examples": n, "masked": not drops, "value": worst}
        )
        class_counts = _class_counts(self.history, k)
        is_seen = class_counts > 0
        rows.append(
            {
                **base,
                "metric": "unseen_classes",
                "value": float((~is_seen).sum()),
                "n_examples": int(class_counts.sum()),
            }
        )
        for i, moment in ((first, "received"), (j, "trained"), (last, "aggregated")):
            for word, classes in (("seen", is_seen), ("unseen", ~is_seen)):
                right, count = self.counts[i, classes].sum(), self.per_class[classes].sum()
                cell = self._share(right, count, valid[i])
                rows.append({**base, "moment": moment, "metric": f"accuracy_{word}", **cell})
        return rows

    def _difference(
        self, lost: np.ndarray, won: np.ndarray, mask: np.ndarray, is_valid: bool
    ) -> Row:
        """Accuracy before minus after on some test examples, with the standard error of the paired difference."""
        n = int(mask.sum())
        if n < self.min_count or not is_valid:
            return {"value": None, "n_examples": n, "masked": True}
        change = lost[mask].astype(float) - won[mask]
        return {
            **sample_mean(change),
            "n_examples": n,
            "masked": False,
        }

    def mean_rows(self, rows: list[Row]) -> list[Row]:
        """Mean and spread over the clients of what their rows say about the test split; ``restored`` is pooled."""
        means: list[Row] = []
        groups: dict[tuple[str, str], list[float]] = {}
        for row in rows:
            is_judged = row["scope"] == "client" and row["slice"] == self.pool.split
            if is_judged and row["metric"] in MEANS and row["value"] is not None:
                groups.setdefault((row["moment"], row["metric"]), []).append(row["value"])
        for (moment, metric), values in groups.items():
            base: Row = {
                "moment": moment,
                "scope": "global",
                "slice": self.pool.split,
                "n_examples": self.pool.test.stop,
                "n_clients": len(values),
            }
            means.append({**base, "metric": metric, **sample_mean(values)})
            if metric in ("accuracy", "loss", "drop"):
                means.append({**base, "metric": f"{metric}_std", "value": float(np.std(values))})
        restored = [row for row in rows if row["metric"] == "restored"]
        pooled = [row for row in restored if row["value"] is not None]
        if restored:
            total = sum(row["n_examples"] for row in pooled)
            right = sum(row["value"] * row["n_examples"] for row in pooled)
            means.append(
                {
                    "moment": "trained",
                    "scope": "global",
                    "slice": self.pool.split,
                    "metric": "restored",
                    **self._share(right, total),
                    "n_clients": len(pooled),
                }
            )
        return means


def rows_over_rounds(rounds: list[int], rows: list[Row]) -> list[Row]:
    """Backward transfer and fluctuation of the aggregated model's classes, from the ``class_accuracy`` of all ``rounds``.

    Left out are rounds that cannot be read or whose model gives no numbers; classes with few examples have no value.
    """
    cells: dict[int, list[Row]] = {}
    valid: set[int] = set()
    for row in rows:
        if row["moment"] == "aggregated" and row["scope"] == "global":
            if row["metric"] == "class_accuracy":
                cells.setdefault(row["round"], []).append(row)
            elif row["metric"] == "accuracy" and row["value"] is not None:
                valid.add(row["round"])
    changes: list[Row] = []
    best: np.ndarray | None = None
    before: np.ndarray | None = None  # in the round before: over a gap there is no fluctuation
    for r in rounds:
        if r not in valid:
            before = None
            continue
        accuracy = np.array([cell["value"] for cell in cells[r]], dtype=float)
        if best is not None:
            changes += _class_rows("backward_transfer", accuracy - best, cells[r])
        if before is not None:
            changes += _class_rows("class_fluctuation", np.abs(accuracy - before), cells[r])
        best = accuracy if best is None else np.fmax(best, accuracy)
        before = accuracy
    return changes


def _class_rows(metric: str, values: np.ndarray, cells: list[Row]) -> list[Row]:
    """A value of every class and their mean; ``cells`` say of which round and examples."""
    is_judged = ~np.isnan(values)
    base = {name: cells[0][name] for name in ("round", "moment", "scope", "slice")}
    rows: list[Row] = [
        {
            **base,
            "metric": metric,
            "index": cell["index"],
            "value": float(v) if is_class_judged else None,
            "n_examples": cell["n_examples"],
        }
        for v, is_class_judged, cell in zip(values, is_judged, cells, strict=True)
    ]
    if is_judged.any():
        n_examples = sum(row["n_examples"] for row in rows if row["value"] is not None)
        mean = float(values[is_judged].mean())
        rows.append({**base, "metric": metric, "value": mean, "n_examples": n_examples})
    return [{**row, "masked": row["value"] is None} for row in rows]


def average_forgetting_rows(rows: list[Row]) -> list[Row]:
    """``average_forgetting`` after the last round T (Chaudhry et al., ECCV 2018): max over t < T of a[t, c], minus a[T, c], with
    a[t, c] the aggregated model's accuracy on class c after round t; t = 0 is the initial model. Of every class (index), and the
    mean over the classes that have one.

    Column ``since`` has the round of the maximum, and ``compared`` how many rounds it is over (the mean's ``note`` names those
    without numbers); ``stderr`` takes the two accuracies as independent. Definition after the paper, whose tasks are trained one
    after the other; read in abstract and opening.
    """
    accuracy: dict[int, dict[int, Row]] = {}
    for row in rows:
        if row["metric"] == "class_accuracy" and row["scope"] == "global":
            is_start = row["moment"] == "received" and row["round"] == 1
            if is_start or row["moment"] == "aggregated":
                t = 0 if is_start else row["round"]
                accuracy.setdefault(t, {}).setdefault(row["index"], row)
    if not accuracy or not max(accuracy):
        return []
    last = max(accuracy)
    cells = [_average_forgetting(c, accuracy, last) for c in sorted(accuracy[last])]
    values = [cell for cell in cells if cell["value"] is not None]
    mean: Row = {"value": None, "note": cells[0].get("note"), "n_examples": 0}
    if values:
        errors = [cell["stderr"] for cell in values]
        mean = {
            "value": float(np.mean([cell["value"] for cell in values])),
            "stderr": float(np.sqrt(np.square(errors).sum()) / len(values)),
            "n_examples": sum(cell["n_examples"] for cell in values),
            "n_classes": len(values),
            **compared_rounds(accuracy, last),
        }
    base = {name: accuracy[last][cells[0]["index"]][name] for name in ("scope", "slice")}
    base |= {"metric": "average_forgetting", "round": last, "moment": "aggregated"}
    return [{**base, "masked": row["value"] is None, **row} for row in (*cells, mean)]


def compared_rounds(accuracy: dict[int, dict[int, Row]], last: int) -> Row:
    """How many rounds before the last, 0 among them, have numbers, and which have none: a class may have been best in these."""
    missing = [t for t in range(last) if t not in accuracy]
    row: Row = {"compared": last - len(missing)}
    if missing:
        row["note"] = (
            f"the best of {row['compared']} of {last} rounds before the last, as {counted(len(missing), 'round')} "
            f"({', '.join(map(str, missing[:3]))}{', …' * (len(missing) > 3)}) gave no numbers"
        )
    return row


def _average_forgetting(c: int, accuracy: dict[int, dict[int, Row]], last: int) -> Row:
    """Of one class, or why it has none."""
    row: Row = {"index": c, "value": None, "n_examples": accuracy[last][c]["n_examples"]}

    def at(t: int) -> float | None:
        cell = accuracy.get(t, {}).get(c)
        return None if cell is None else cell["value"]

    if at(last) is None:
        return {**row, "note": f"too few examples of the class, or round {last} gives no numbers"}
    past = [t for t in accuracy if t < last and at(t) is not None]
    if not past:
        return {**row, "note": "no model before the last round is stored"}
    best = max(past, key=lambda t: (at(t), t))
    before, after = accuracy[best][c], accuracy[last][c]
    return {
        **row,
        "value": before["value"] - after["value"],
        "stderr": math.hypot(before["stderr"], after["stderr"]),
        "since": best,
        "compared": len(past),
    }


def class_examples(history: History, clients: set[int]) -> list[Row]:
    """How many training examples of every class these clients have."""
    if history.dataset.regression:
        return []
    return [
        {
            "scope": "client",
            "client": k,
            "slice": f"client:{k}/train",
            "metric": "class_examples",
            "index": c,
            "masked": False,
            "value": float(v),
            "n_examples": len(history.parts[k]),
        }
        for k in sorted(clients)
        for c, v in enumerate(_class_counts(history, k))
    ]


def _class_counts(history: History, client: int) -> np.ndarray:
    """Training examples of every class that a client has: not the pool's, which may lack a class with few samples."""
    labels = history.dataset.train_y[history.parts[client]]
    return np.bincount(labels.cpu().numpy(), minlength=history.dataset.classes)
