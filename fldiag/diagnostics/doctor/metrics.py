"""Numbers that a run reports: of which weights and data they are, and what they are means of."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np
import pandas as pd

from fldiag.diagnostics.doctor.case import Case, CohortWeights
from fldiag.diagnostics.doctor.findings import (
    FAULT,
    INFORMATION,
    WARNING,
    Check,
    Clear,
    Finding,
    Outcome,
    Skip,
)
from fldiag.diagnostics.doctor.named_rules import PERSONAL, plain_name
from fldiag.diagnostics.doctor.own_data import LEAST
from fldiag.errors import counted
from fldiag.results.select import SPLITS, only

ACCURACY = re.compile(r"(?:^|[_./ -])acc(?:uracy)?(?:[_./ -]|$)", re.IGNORECASE)
#: Metrics of all examples that are no mean of the clients'.
WHOLE = re.compile(
    r"f1|auc|auroc|auprc|precision|recall|balanced|kappa|mcc|perplexity|ppl|rmse|r2|ece",
    re.IGNORECASE,
)
#: Accuracies that differ by less are the same.
SAME = 2e-3
#: What reported numbers may be instead.
BEST = ("the best so far", "that of the best round in place of the last")
TRAINED = (
    "the accuracy on the training data",
    "the plain mean of the clients' training accuracies",
)
#: Names that say that a number is the best so far, or not of the test set and the global model.
BEST_NAME = re.compile(r"best|max|peak", re.IGNORECASE)
OTHER_NAME = re.compile(r"train|val|client|local|personal|mean|avg|average", re.IGNORECASE)
#: From this round on no start is to blame.
LATE = 30


def reported(frame: pd.DataFrame, name: re.Pattern[str], scope: str = "global") -> pd.DataFrame:
    """Rows that the training program itself told, of metrics of this name."""
    rows = only(frame, scope=scope)
    rows = (
        rows[rows["source"].notna()]
        if "source" in rows.columns
        else rows.iloc[:0].assign(source=None)
    )
    return rows[np.array([bool(name.search(str(metric))) for metric in rows["metric"]], dtype=bool)]


class Reported(Check):
    """Accuracies that are not those of the stored weights: the best round's in place of the last, or those on other data.

    Rule: the accuracy of the stored weights on the test set is computed again in up to 12 rounds. It must be the run's own
    number (within 0.2 points where all test examples are taken). Each accuracy that a foreign program reports is compared with
    it: where it differs in some round by more than its error (that of the examples, and half a unit of its last digit), this is
    a warning, and what it equals instead in all rounds is said: the best so far, the accuracy on training data, that of the
    round before, or the plain mean of the clients' accuracies. A number that its name says is of training, validation or
    clients' data, or the best, is information. Also: the last round's weights equal those of an earlier round to the bit, with
    others between.
    """

    name, title = "reported", "Reported numbers match the weights"

    def __init__(self, case: Case):
        super().__init__(case)
        self.prints: dict[int, str] = {}

    def see(self, cohort: CohortWeights) -> None:
        self.prints[cohort.round] = cohort.digest

    def end(self) -> Iterator[Outcome]:
        yield from self._find_repeats()
        history = self.case.opened(classes=True)
        models, test, split = self.case.models, history.pool.test, history.pool.split
        now = {
            r: float(s.right[test].mean())
            for r, s in models.scores.items()
            if s.right is not None and np.isfinite(s.loss).all()
        }
        metrics = self.case.metrics
        if metrics is None or not now:
            yield Skip("the run has no metrics" if metrics is None else "no round can be evaluated")
            return
        n, size = test.stop, len(history.dataset.evaluation[2])
        slack = SAME if n == size else 5 * math.sqrt(0.25 / n)
        recorded = _series(_measured(metrics, split))
        odd = {r: recorded[r] for r in now if r in recorded and abs(recorded[r] - now[r]) > slack}
        if odd:
            r = max(odd, key=lambda r: abs(odd[r] - now[r]))
            yield Finding(
                FAULT,
                "the recorded accuracy is not that of the stored weights",
                f"in round {r} it says {odd[r]:.2%}, and the weights have {now[r]:.2%} on {n} {SPLITS[split]} examples",
                "the run's curves belong to other weights or other data",
                "compute the curves again (fldiag forgetting)",
                tuple(odd),
                value=odd[r] - now[r],
            )
        yield from self._foreign(metrics, {**now, **recorded} if not odd else now, slack)
        has_reports = bool(recorded) or len(reported(metrics, ACCURACY))
        if not has_reports:
            yield Skip("the run reports no accuracy")
        yield Clear(
            f"the accuracies of {counted(len(now), 'round')}, computed again, are those recorded"
        )

    def _find_repeats(self) -> Iterator[Finding]:
        rounds = sorted(r for r in self.prints if r)
        if len(rounds) < 3:
            return
        last = self.prints[rounds[-1]]
        same = [r for r in rounds[:-1] if self.prints[r] == last]
        if same and any(self.prints[r] != last for r in rounds if r > same[0]):
            yield Finding(
                WARNING,
                f"the last round's weights are those of round {same[0]}",
                "bitwise equal, although rounds between them differ",
                "the numbers reported for the last round belong to another round, perhaps the best one",
                "report the last round, or choose the round on data apart from the test set",
                (rounds[-1],),
            )

    def _foreign(
        self, metrics: pd.DataFrame, now: Mapping[int, float], slack: float
    ) -> Iterator[Finding]:
        rows, split = reported(metrics, ACCURACY), SPLITS[self.case.opened().pool.split]
        rows = rows[rows["moment"] == "aggregated"]
        for (name, source), part in rows.groupby(["metric", "source"]):
            claims = _series(part)
            unit = 100 if max(claims.values(), default=0) > 1.5 else 1
            error = slack + rounding(list(claims.values())) / unit
            claims = {r: v / unit for r, v in claims.items()}
            both = [r for r in claims if r in now]
            off = [r for r in both if abs(claims[r] - now[r]) > error]
            if not off:
                continue
            kind = self._kind(claims, now, both, off, error)
            if (kind in BEST and BEST_NAME.search(str(name))) or (
                kind in TRAINED and OTHER_NAME.search(str(name))
            ):
                continue  # it is what it is called
            is_test = not (
                OTHER_NAME.search(str(name))
                or BEST_NAME.search(str(name))
                or source == "clients' evaluation"
                or plain_name(self.case.method) in PERSONAL
            )
            r = both[-1] if both[-1] in off else off[-1]
            yield Finding(
                WARNING if kind or is_test else INFORMATION,
                f"the reported {name} is {kind or 'not that of the stored weights'}",
                f"{source}: in round {r} it says {claims[r]:.2%}, and the stored weights have {now[r]:.2%} on the "
                f"{split} set, with an error of {error:.2%}",
                "it claims more than the model achieves"
                if kind
                else "it belongs to other data or other weights",
                "report the test accuracy of the last round's weights",
                tuple(off),
                value=claims[r] - now[r],
            )

    def _kind(
        self,
        claims: Mapping[int, float],
        now: Mapping[int, float],
        both: list[int],
        off: list[int],
        error: float,
    ) -> str:
        """What the claims are instead of the accuracy of each round's weights, "" where nothing fits."""
        for kind, (series, own_error) in self._alternatives(now).items():
            rounds = [r for r in both if r in series]
            if (
                len(rounds) >= min(2, len(both))
                and set(off) & set(rounds)
                and all(abs(claims[r] - series[r]) <= error + own_error for r in rounds)
            ):
                return kind
        if both[-1] in off and abs(claims[both[-1]] - max(now.values())) <= error:
            return BEST[1]
        return ""

    def _alternatives(self, now: Mapping[int, float]) -> dict[str, tuple[dict[int, float], float]]:
        """What a reported number may be instead of the accuracy of this round's weights: by round, and its error."""
        history, alternatives = self.case.history, dict[str, tuple[dict[int, float], float]]()
        assert history is not None
        rounds = sorted(now)
        complete = rounds == list(range(rounds[0], rounds[-1] + 1))
        if complete:
            best = np.maximum.accumulate([now[r] for r in rounds])
            alternatives[BEST[0]] = dict(zip(rounds, best.tolist(), strict=True)), 0.0
            alternatives["that of the round before"] = {r: now[r - 1] for r in rounds[1:]}, 0.0
        stretches = [
            (k, history.pool.train_slice(k))
            for k in range(len(history.parts))
            if len(history.parts[k])
        ]
        train: dict[int, float] = {}
        mean: dict[int, float] = {}
        for r, s in self.case.models.scores.items():
            if s.right is not None and stretches:
                train[r] = float(s.right[history.pool.clients].mean())
                mean[r] = float(np.mean([s.right[stretch].mean() for _, stretch in stretches]))
        n, total = history.pool.n - history.pool.test.stop, sum(map(len, history.parts))
        left_out = max(1 - n / max(total, 1), 0.0)  # nothing is left to chance where all are taken
        sampling = 3 * math.sqrt(0.25 / max(n, 1) * left_out)
        return {**alternatives, TRAINED[0]: (train, sampling), TRAINED[1]: (mean, sampling)}


def rounding(values: list[float]) -> float:
    """Half a unit of the last digit that numbers are given with, 0 for more than 4 digits.

    >>> rounding([0.91, 0.9, 0.875])
    0.0005
    """
    for digits in range(5):
        if all(abs(v * 10**digits - round(v * 10**digits)) < 1e-6 for v in values):
            is_share = not digits and max(values, default=0.0) <= 1  # all right or all wrong
            return 0.0 if is_share else 0.5 * 10.0**-digits
    return 0.0


def _measured(metrics: pd.DataFrame, split: str) -> pd.DataFrame:
    """Rows of the accuracy on a split that fldiag computed while the run was trained or recorded."""
    rows = only(metrics, metric="accuracy", scope="global", moment="aggregated", slice=split)
    return rows[rows["source"].isna()] if "source" in rows.columns else rows


def _series(rows: pd.DataFrame) -> dict[int, float]:
    rows = rows.dropna(subset=["round", "value"])
    return {int(r): float(v) for r, v in zip(rows["round"], rows["value"], strict=True)}


class Means(Check):
    """Metrics that are means over clients and not those of all examples (the trap that Federated Learning Aggregated Metrics,
    FLAM, names).

    Rule: in every round in which a number is reported of all and of the single clients. It equals the plain mean of the clients'
    (to 1e-6) while the mean by examples differs by more than 0.1 %; or it is F1, AUC, precision, recall, perplexity or the like,
    which no mean over clients gives, and equals one of the two means.
    """

    name, title = "means", "Metrics cover all examples"

    def end(self) -> Iterator[Outcome]:
        metrics = self.case.metrics
        if metrics is None or "source" not in metrics.columns:
            yield Skip("the run reports no numbers of its own beside fldiag's")
            return
        alls, each = reported(metrics, re.compile("")), reported(metrics, re.compile(""), "client")
        bad = defaultdict[tuple[str, str], list[tuple[int, float, float]]](list)
        looked = 0
        for (name, r), part in each.groupby(["metric", "round"]):
            v = part["value"].astype(float).to_numpy()
            n = np.array(
                [
                    self.case.sizes.get(int(k), 0) if pd.isna(m) else m
                    for k, m in zip(part["client"], part["n_examples"], strict=True)
                ],
                dtype=float,
            )
            for _, row in only(alls, round=int(r)).iterrows():
                if len(v) < 2 or not _alike(str(row["metric"]), str(name)):
                    continue
                looked += 1
                g, plain = float(row["value"]), float(v.mean())
                by_n = float(v @ n / n.sum()) if n.sum() else plain
                is_mean = _near(g, plain) or _near(g, by_n)
                if _near(g, plain) and abs(plain - by_n) > 1e-3 * max(abs(plain), abs(by_n)):
                    how = "the plain mean over the clients"
                elif WHOLE.search(str(name)) and is_mean and np.ptp(v) > 1e-6:
                    how = "a mean over the clients, which is not the one of all examples"
                else:
                    continue
                bad[str(row["metric"]), how].append((int(r), g, by_n))
        if not looked:
            yield Skip("no number is reported both for all examples and for each client")
        for (name, how), cases in bad.items():
            r, g, by_n = cases[-1]
            other = (
                f"by examples it is {by_n:.4g}"
                if "plain" in how
                else "it cannot be found from the clients' values"
            )
            yield Finding(
                WARNING,
                f"the reported {name} is {how}",
                f"in {counted(len(cases), 'round')}; in round {r} it is {g:.4g}, {other}",
                "it depends on how examples are dealt to clients, and is not comparable with centralised numbers",
                "sum counts (right, wrong, of each class) over the clients, and compute the metric once",
                tuple(r for r, _, _ in cases),
                value=g,
            )
        yield Clear(f"{looked} numbers are not plain means")


def _alike(a: str, b: str) -> bool:
    """Whether two names are of one metric, such as mean_accuracy and accuracy."""
    a, b = a.lower(), b.lower()
    return a in b or b in a or bool(ACCURACY.search(a) and ACCURACY.search(b))


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-6 * max(abs(a), abs(b), 1e-12)


class Chance(Check):
    """The global model is no better than chance.

    Rule: of the n test examples the last global model gets x right; always answering the most frequent class gets a share q. At
    chance where the binomial tail P(X >= x) with n and q is above 1 %. A warning where clients do not learn either (the loss on
    their own examples falls by less than 0.01 nats in the median), or the run has at least 30 rounds; else information: after
    few rounds on skewed clients this is usual.
    """

    name, title = "chance", "Better than chance"

    def end(self) -> Iterator[Outcome]:
        history = self.case.opened(classes=True)
        from scipy.stats import binom

        models, pool = self.case.models, history.pool
        if not models.scores:
            yield Skip("no round can be evaluated")
            return
        r, scored = list(models.scores.items())[-1]
        assert scored.right is not None
        y = models.labels[pool.test]
        q, x, n = float(np.bincount(y).max()) / len(y), int(scored.right[pool.test].sum()), len(y)
        p = float(binom.sf(x - 1, n, q))
        if p > 0.01:
            gain = models.gain
            severe = gain is not None and (gain < LEAST or r >= LATE)
            loss = float(np.mean(scored.loss[pool.test]))
            yield Finding(
                WARNING if severe else INFORMATION,
                "the last global model is no better than chance",
                f"{x} of {n} right ({x / n:.1%}), and the most frequent class has {q:.1%}; loss {loss:.3g} (equal "
                f"odds: {math.log(history.dataset.classes):.3g}); "
                + (
                    "the clients' models are not stored"
                    if gain is None
                    else f"training {'lowers' if gain >= 0 else 'raises'} the clients' own loss by {abs(gain):.2g} nats in the "
                    "median"
                ),
                "nothing can be concluded from this run",
                "train longer; look at labels, learning rate and aggregation",
                (r,),
                value=x / n,
            )
        yield Clear(f"{x} of {n} right ({x / n:.1%}), and the most frequent class has {q:.1%}")
