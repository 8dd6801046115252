"""The numbers of one round after the other, for ``forgetting``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from fldiag.errors import FldiagError
from fldiag.results.shares import share
from fldiag.results.standing import guess_accuracy
from fldiag.results.table import Row
from fldiag.runs.history import History
from fldiag.runs.pool import CohortScores
from fldiag.runs.round_weights import Stored


def evaluated(history: History, round: int, own: bool = True) -> CohortScores | None:
    """Of a round's received, trained and aggregated models, or of the aggregated one alone; None where it cannot be read."""
    try:
        cohort = history.stored(round)
        models = (
            [cohort.start, *(cohort.client(j) for j in range(len(cohort.ids)))]
            if cohort.complete
            else []
        )
        return history.evaluate([*models, (cohort.aggregated, cohort.buffers)], test=not own)
    except FldiagError:  # the main process reads it too, and says why
        return None


class Measure:
    """The rows of one round after the other; keeps what the next rounds are compared with. ``own``: also on training data."""

    def __init__(self, history: History, min_count: int, confidence: float, own: bool = True):
        self.history, self.pool, self.min_count, self.confidence = (
            history,
            history.pool,
            min_count,
            confidence,
        )
        self.own = own
        y, classes = self.pool.y, history.dataset.classes
        self.classes = 0 if history.dataset.regression else classes
        if self.classes:
            self.onehot = np.eye(classes)[y[self.pool.test].cpu().numpy()]
            self.per_class = self.onehot.sum(0)
        self.best: np.ndarray | None = None
        self.before: tuple[int, np.ndarray] | None = None
        self.last: tuple[Any, CohortScores] | None = None
        self.ahead: Iterator[tuple[int, CohortScores | None]] | None = (
            None  # what workers found, in the order of the rounds
        )
        self.seen_clients: set[int] = set()

    def state(self) -> dict[str, np.ndarray]:
        """What the next rounds are compared with, as arrays."""
        arrays: dict[str, Any] = {"best": self.best}
        if self.before is not None:
            arrays |= {"before_round": np.array(self.before[0]), "before": self.before[1]}
        if self.last is not None:
            arrays |= {f"last_{name}": value for name, value in vars(self.last[1]).items()}
        return {name: value for name, value in arrays.items() if value is not None}

    def resume(self, cohort: Stored, state: dict[str, np.ndarray]) -> None:
        """Take up the state after the round ``cohort``."""
        self.best = state.get("best")
        self.before = (int(state["before_round"]), state["before"]) if "before" in state else None
        scores = CohortScores(state["last_loss"], state.get("last_right"), state["last_valid"])
        self.last = (cohort.aggregated, cohort.buffers), scores

    # -- one round

    def round(self, cohort: Stored) -> list[Row]:
        ids = list(cohort.ids) if cohort.complete else []
        self.seen_clients |= set(ids)
        scores = self._scores(cohort, len(ids))
        moments = [("received", None), *(("trained", k) for k in ids)] if ids else []
        models = [*moments, ("aggregated", None)]
        for (moment, k), good in zip(models, scores.valid, strict=True):
            if not good:
                owner = "" if k is None else f" of client {k}"
                self.history.note(cohort.round, f"the {moment} weights{owner} give no numbers", k)
        rows: list[Row] = []
        for i, (moment, k) in enumerate(models):
            base = {"moment": moment, "scope": "global" if k is None else "client", "client": k}
            rows += [{**base, **row} for row in self._slices(scores, i, ids if k is None else [k])]
        rows = [
            {**row, "inputs": self.history.dataset.scaling, "guess": self._guess(row["metric"])}
            if row["scope"] == "global" and row["slice"] == self.pool.split
            else row
            for row in rows
        ]
        if self.classes:
            if ids:
                rows += self._changes(scores, ids)
            rows += self._over_time(
                cohort.round, self._class_right(scores)[-1], bool(scores.valid[-1])
            )
        if ids:
            rows += self._means(rows, ids)
        return [{"round": cohort.round, "masked": row["value"] is None, **row} for row in rows]

    def _scores(self, cohort: Stored, clients: int) -> CohortScores:
        """Of received, trained and aggregated models; the received one is usually the last aggregated."""
        models = [cohort.client(j) for j in range(clients)] + [(cohort.aggregated, cohort.buffers)]
        received = None
        new = (
            None
            if self.ahead is None
            else next((s for r, s in self.ahead if r == cohort.round), None)
        )
        if new is None:
            received = self._received_scores(cohort) if clients else None
            new = self.history.evaluate(
                models if received or not clients else [cohort.start, *models], test=not self.own
            )
        if received:
            right = (
                None
                if new.right is None or received.right is None
                else np.concatenate([received.right, new.right])
            )
            new = CohortScores(
                np.concatenate([received.loss, new.loss]),
                right,
                np.concatenate([received.valid, new.valid]),
            )
        last = CohortScores(
            new.loss[-1:], None if new.right is None else new.right[-1:], new.valid[-1:]
        )
        self.last = (cohort.aggregated, cohort.buffers), last
        return new

    def _received_scores(self, cohort: Stored) -> CohortScores | None:
        if self.last is None:
            return None
        (w, buffers), scores = self.last
        start, received = cohort.start
        same = w.equal(start) and all(buffers[n].equal(b) for n, b in received.items())
        return scores if same else None

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

    def _slices(self, scores: CohortScores, i: int, clients: list[int]) -> list[Row]:
        """Accuracy and loss of model i on test and, with ``own``, on the own and other data of these clients."""
        pool = self.pool
        everyone = pool.clients
        rows = self._on(scores, i, pool.split, [pool.test])
        for k in clients if self.own else ():
            examples = pool.train_slice(k)
            rows += self._on(scores, i, f"client:{k}/train", [examples])
            rows += self._on(
                scores,
                i,
                f"client:{k}/others",
                [
                    slice(everyone.start, min(examples.start, everyone.stop)),
                    slice(examples.stop, everyone.stop),
                ],
            )
        return rows

    def _on(self, scores: CohortScores, i: int, name: str, slices: list[slice]) -> list[Row]:
        losses = np.concatenate([scores.loss[i, s] for s in slices])
        rows = []
        if scores.right is not None:
            right = sum(int(scores.right[i, s].sum()) for s in slices)
            rows.append(
                {
                    "slice": name,
                    "metric": "accuracy",
                    **self._share(right, len(losses), scores.valid[i]),
                }
            )
        is_shown = scores.valid[i] and len(losses) >= self.min_count
        stderr = (
            float(losses.std(ddof=1) / np.sqrt(len(losses)))
            if is_shown and len(losses) > 1
            else None
        )
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

    def _share(self, right: float, n: float, valid: bool = True) -> Row:
        """A share with its interval, or a masked cell."""
        if n < self.min_count or not valid:
            return {"value": None, "n_examples": int(n), "masked": True}
        return {**share(right, n, self.confidence), "n_examples": int(n), "masked": False}

    def _class_right(self, scores: CohortScores) -> np.ndarray:
        """Right test examples of every class [R, C]."""
        assert scores.right is not None
        return scores.right[:, self.pool.test] @ self.onehot

    def _changes(self, scores: CohortScores, ids: list[int]) -> list[Row]:
        """What each client's training changed against the received model; received is row 0, aggregated the last."""
        assert scores.right is not None
        right, counts = scores.right[:, self.pool.test], self._class_right(scores)
        n, per_class, start, end = self.pool.test.stop, self.per_class, right[0], right[-1]
        models = [("received", None), *(("trained", k) for k in ids), ("aggregated", None)]
        rows: list[Row] = []
        for i, (moment, k) in enumerate(models):
            base: Row = {
                "moment": moment,
                "scope": "global" if k is None else "client",
                "client": k,
                "slice": self.pool.split,
            }
            rows += [
                {
                    **base,
                    "metric": "class_accuracy",
                    "index": c,
                    **self._share(counts[i, c], per_class[c], scores.valid[i]),
                }
                for c in range(self.classes)
            ]
        for j, k in enumerate(ids, start=1):
            base = {"moment": "trained", "scope": "client", "client": k, "slice": self.pool.split}
            good = bool(scores.valid[0] and scores.valid[j])
            lost, won = start & ~right[j], right[j] & ~start
            rows += [
                {
                    **base,
                    "metric": "drop",
                    **self._difference(lost, won, np.ones(n, dtype=bool), good),
                },
                {**base, "metric": "forgotten", **self._share(lost.sum(), n, good)},
                {**base, "metric": "learned", **self._share(won.sum(), n, good)},
                {
                    **base,
                    "metric": "restored",
                    **self._share((lost & end).sum(), lost.sum(), good and bool(scores.valid[-1])),
                },
            ]
            members = self.onehot.astype(bool)
            cells = [self._difference(lost, won, members[:, c], good) for c in range(self.classes)]
            rows += [
                {**base, "metric": "class_forgetting", "index": c, **cell}
                for c, cell in enumerate(cells)
            ]
            worst = max(
                (cell for cell in cells if cell["value"] is not None),
                key=lambda cell: cell["value"],
                default=None,
            )
            rows.append(
                {
                    **base,
                    "metric": "forgetting",
                    "n_examples": n,
                    "masked": worst is None,
                    "value": None if worst is None else worst["value"],
                }
            )
            lost = (
                None
                if worst is None
                else sum(max(0.0, cell["value"]) for cell in cells if cell["value"] is not None)
            )
            rows.append(
                {
                    **base,
                    "metric": "granular_forgetting",
                    "n_examples": n,
                    "masked": lost is None,
                    "value": lost,
                }
            )
            class_counts = self.class_counts(k)
            has = class_counts > 0
            rows.append(
                {
                    **base,
                    "metric": "unseen_classes",
                    "value": float((~has).sum()),
                    "n_examples": int(class_counts.sum()),
                }
            )
            for i, moment in ((0, "received"), (j, "trained"), (len(ids) + 1, "aggregated")):
                rows += [
                    {
                        **base,
                        "moment": moment,
                        "metric": f"accuracy_{word}",
                        **self._share(
                            counts[i, which].sum(), per_class[which].sum(), scores.valid[i]
                        ),
                    }
                    for word, which in (("seen", has), ("unseen", ~has))
                ]
        return [*rows, self._averaged_away(counts, scores.valid)]

    def _averaged_away(self, counts: np.ndarray, valid: np.ndarray) -> Row:
        """What aggregation forgets: over the classes, the clients' mean accuracy minus the aggregated model's, where above 0."""
        good, is_judged = valid[1:-1], self.per_class >= self.min_count
        row: Row = {
            "moment": "aggregated",
            "scope": "global",
            "slice": self.pool.split,
            "metric": "granular_forgetting",
            "n_examples": int(self.per_class[is_judged].sum()),
            "n_clients": int(good.sum()),
        }
        if not (good.any() and valid[-1] and is_judged.any()):
            return {**row, "value": None, "masked": True}
        drop = (counts[1:-1][good].mean(0) - counts[-1])[is_judged] / self.per_class[is_judged]
        return {**row, "value": float(np.maximum(drop, 0).sum()), "masked": False}

    def _difference(self, lost: np.ndarray, won: np.ndarray, mask: np.ndarray, valid: bool) -> Row:
        """Accuracy before minus after on some test examples, with the standard error of the paired difference."""
        n = int(mask.sum())
        if n < self.min_count or not valid:
            return {"value": None, "n_examples": n, "masked": True}
        change = lost[mask].astype(float) - won[mask]
        return {
            "value": float(change.mean()),
            "stderr": float(change.std(ddof=1) / np.sqrt(n)) if n > 1 else None,
            "n_examples": n,
            "masked": False,
        }

    # -- over clients and rounds

    def _means(self, rows: list[Row], ids: list[int]) -> list[Row]:
        """Mean and spread over the clients of what their rows say about the test split; ``restored`` is pooled."""
        means: list[Row] = []
        metrics = (
            "accuracy",
            "loss",
            "drop",
            "forgotten",
            "learned",
            "forgetting",
            "granular_forgetting",
            "accuracy_seen",
            "accuracy_unseen",
        )
        groups: dict[tuple[str, str], list[float]] = {}
        for row in rows:
            judged = row["scope"] == "client" and row["slice"] == self.pool.split
            if judged and row["metric"] in metrics and row["value"] is not None:
                groups.setdefault((row["moment"], row["metric"]), []).append(row["value"])
        for (moment, metric), values in groups.items():
            base: Row = {
                "moment": moment,
                "scope": "global",
                "slice": self.pool.split,
                "n_examples": self.pool.test.stop,
                "n_clients": len(values),
            }
            stderr = (
                float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None
            )
            means.append(
                {**base, "metric": metric, "value": float(np.mean(values)), "stderr": stderr}
            )
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

    def _over_time(self, r: int, right: np.ndarray, valid: bool) -> list[Row]:
        """Backward transfer and fluctuation of the aggregated model's classes; those with few examples left out."""
        if not valid:
            return []
        is_judged = self.per_class >= self.min_count
        accuracy = np.where(is_judged, right / np.maximum(self.per_class, 1), np.nan)
        base: Row = {"moment": "aggregated", "scope": "global", "slice": self.pool.split}
        rows: list[Row] = []

        def each(metric: str, values: np.ndarray) -> list[Row]:
            cells = [
                {
                    **base,
                    "metric": metric,
                    "index": c,
                    "value": float(v) if is_judged[c] else None,
                    "masked": not is_judged[c],
                    "n_examples": int(self.per_class[c]),
                }
                for c, v in enumerate(values)
            ]
            return (
                [
                    *cells,
                    {
                        **base,
                        "metric": metric,
                        "value": float(values[is_judged].mean()),
                        "n_examples": int(self.per_class[is_judged].sum()),
                    },
                ]
                if is_judged.any()
                else cells
            )

        if self.best is not None:
            rows += each("backward_transfer", accuracy - self.best)
        if self.before is not None and self._neighbours(self.before[0], r):
            rows += each("class_fluctuation", np.abs(accuracy - self.before[1]))
        self.best = accuracy if self.best is None else np.fmax(self.best, accuracy)
        self.before = r, accuracy
        return rows

    def _neighbours(self, a: int, b: int) -> bool:
        """Whether no stored round lies between: over a gap there is no change from one round to the next."""
        rounds = self.history.rounds
        return a in rounds and b in rounds and rounds.index(b) - rounds.index(a) == 1

    def class_examples(self) -> list[Row]:
        if not self.classes:
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
                "n_examples": len(self.history.parts[k]),
            }
            for k in sorted(self.seen_clients)
            for c, v in enumerate(self.class_counts(k))
        ]

    def class_counts(self, client: int) -> np.ndarray:
        """Training examples of every class that a client has: not the pool's, which may lack a class with few samples."""
        labels = self.history.dataset.train_y[self.history.parts[client]]
        return np.bincount(labels.cpu().numpy(), minlength=self.classes)
