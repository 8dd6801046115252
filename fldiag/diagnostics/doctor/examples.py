"""Checks that look at models and examples: who holds what, who trained on what, and whether reported numbers are the weights'."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import cast

import numpy as np
import pandas as pd
from scipy.stats import binom, t

from fldiag.diagnostics.doctor.facts import About, Finding, Models, Severity, joined
from fldiag.diagnostics.doctor.weights import CLIENTS, LEVEL, ROUNDS, outliers
from fldiag.errors import FldiagError
from fldiag.results.table import only

ACCURACY = re.compile(r"(?:^|[_./ -])acc(?:uracy)?(?:[_./ -]|$)", re.IGNORECASE)
#: Numbers of other examples or models than the global one's on the test examples.
OTHER = re.compile(r"train|val|client|local|personal|mean|avg|average|best|max", re.IGNORECASE)


def data(models: Models, about: About) -> Iterator[Finding]:
    """Test examples that are training examples (a fault); examples that a client holds twice, or two clients hold."""
    dataset = models.history.dataset
    parts = {k: np.asarray(p) for k, p in enumerate(models.history.parts) if len(p)}
    if not parts:
        return
    rows, remedy = _rows(dataset.train_x), "deal every example once"
    number: dict[bytes, int] = {}
    contents = {
        k: np.array([number.setdefault(rows[i], len(number)) for i in p]) for k, p in parts.items()
    }
    if dataset.tested:
        test, seen = _rows(dataset.test_x), sum(map(len, parts.values()))
        count, usual = sum(row in number for row in test), max(1 - len(number) / seen, 1e-3)
        if binom.sf(count - 1, len(test), usual) < 1e-6:
            evidence = f"{count} of {len(test)} test examples are training examples, byte by byte"
            what = "the test set overlaps the training set"
            yield Finding("fault", what, evidence, "hold out examples")
    usual = max(np.median([1 - len(np.unique(c)) / len(c) for c in contents.values()]), 1e-3)
    for k, c in contents.items():
        count = len(c) - len(np.unique(c))
        if count >= 5 and binom.sf(count - 1, len(c), usual) < 1e-6:
            evidence = f"{count} of {len(c)}, byte by byte"
            yield Finding("hint", f"client {k} holds examples twice", evidence, remedy, (), k)
    owners = defaultdict(set)
    for k, c in contents.items():
        for value in np.unique(c).tolist():
            owners[value].add(k)
    shared = Counter(tuple(sorted(who)) for who in owners.values() if len(who) == 2)
    for (a, b), n in shared.items():
        if n >= 5 and 2 * n > min(len(contents[a]), len(contents[b])):
            what = f"clients {a} and {b} hold equal examples"
            yield Finding("hint", what, f"{n}, byte by byte", remedy, (), a)


def _rows(x: object) -> list[bytes]:
    """The bytes of every example."""
    rows = x.cpu().numpy()  # type: ignore[attr-defined]
    return [row.tobytes() for row in rows]


def own_data(models: Models, about: About) -> Iterator[Finding]:
    """Clients that train on other data or labels than the recorded ones: training raises their own loss in the median round; or
    it lowers the loss of one other client's data more than of their own, by half, in 80 % of at least three rounds. One client is
    told where its loss rises in 80 % of its rounds, and it is one of the ``outliers``; not where the model has batch-norm: a last
    minibatch of two examples may do the same."""
    own, better = defaultdict(list), defaultdict(list)
    for ids, gain in models.gains.values():
        advantage = gain - np.median(gain, axis=0)
        for j, i in enumerate(ids):
            if np.isfinite(gain[j, i]) and len(ids) >= CLIENTS:
                own[i].append(-gain[j, i])
                row = np.nan_to_num(advantage[j], nan=-np.inf)
                best = int(row.argmax())
                is_better = row[best] > max(advantage[j, i], 0) + 0.5 * np.abs(row[best])
                better[i].append(best if is_better and gain[j, best] > 0 else i)
    moved = {i: max(set(v), key=v.count) for i, v in better.items() if len(v) >= ROUNDS}
    moved = {
        i: k for i, k in moved.items() if k != i and better[i].count(k) >= 0.8 * len(better[i])
    }
    moved = {i: k for i, k in moved.items() if k in moved or 2 * len(moved) >= len(own)}
    if len(moved) > 1:
        evidence = joined([f"client {i} that of client {k}" for i, k in moved.items()], 3)
        what = "clients fit the data of another client"
        yield Finding("hint", what, evidence, "correct the partition, or its order")
        return
    rising = [i for i, v in own.items() if np.median(v) > 0]
    if 2 * len(rising) > len(own) and len(own) >= CLIENTS:
        what = "training raises the loss of most clients on their recorded data"
        evidence = f"of {len(rising)} of {len(own)} clients: other labels or another partition, or too long steps"
        yield Finding("hint", what, evidence, "look at the labels, and at the partition")
        return
    for i, rise in outliers(own, 0.0).items() if not about.is_batch_normed else ():
        what = f"the training of client {i} does not fit its own data"
        evidence = f"it raises their loss by {rise:.3g} nats"
        remedy = "look at its labels and inputs, and at the sign of its loss"
        yield Finding("hint", what, evidence, remedy, (), i)


def test_data(models: Models, about: About) -> Iterator[Finding]:
    """Clients that train on test examples: their models fit these better than their own of the same classes, compared with the
    other clients', or the last global model does so: Welch's t-test, 5 % shared by the clients, in the median of three rounds."""
    pool, chances = models.history.pool, defaultdict(list)
    if pool.split != "test" or models.history.dataset.regression or not models.loss:
        return
    if pool.test.stop < 100:
        raise FldiagError("there are fewer than 100 test examples")
    remedy = "look which examples the clients' loaders read"
    p = _chance(-models.loss[max(models.loss)], models.labels, pool.test, pool.clients)
    if p < LEVEL:
        what = "clients seem to train on the test examples"
        evidence = f"the last global model fits them better than its training examples, p = {p:.2g}"
        yield Finding("hint", what, evidence, remedy)
        return
    for ids, _, after in models.clients.values():
        for j, i in enumerate(ids if len(ids) >= CLIENTS else ()):
            advantage, part = np.median(after, axis=0) - after[j], models.of_client(i)
            chances[i].append(_chance(advantage, models.labels, pool.test, part))
    for i, values in chances.items():
        p = np.median(values) * len(chances)
        if len(values) >= ROUNDS and p < LEVEL:
            what = f"client {i} seems to train on test examples"
            evidence = f"it fits them better than its own, compared with the others; p = {p:.2g}"
            yield Finding("hint", what, evidence, remedy, (), i)


def _chance(values: np.ndarray, labels: np.ndarray, test: slice, part: slice) -> float:
    """p of the mean of ``values`` on test examples above that on a part's, with the classes' shares of the part; 1 if unknown."""
    difference = variance = freedom = 0.0
    for label in np.unique(labels[part]):
        a, b = (values[where][labels[where] == label] for where in (test, part))
        if len(a) > 1 and len(b) > 1:
            share = len(b) / (part.stop - part.start)
            difference += share * (a.mean() - b.mean())
            for x in (a, b):
                v = share**2 * x.var(ddof=1) / len(x)
                variance, freedom = variance + v, freedom + v**2 / (len(x) - 1)
    return t.sf(difference / math.sqrt(variance), variance**2 / freedom) if freedom else 1.0


def reported(models: Models, about: About) -> Iterator[Finding]:
    """Reported accuracies that are not those of the stored weights: further off than rounding; and what they are instead."""
    if models.metrics is None or not models.right:
        return
    pool = models.history.pool
    now = {r: right[pool.test].mean() for r, right in models.right.items()}
    train = {r: right[pool.clients].mean() for r, right in models.right.items()}
    is_whole = pool.test.stop == len(models.history.dataset.evaluation[2])
    slack = 2e-3 if is_whole else 5 * math.sqrt(0.25 / pool.test.stop)
    rows = only(models.metrics, scope="global", moment="aggregated").dropna(
        subset=["round", "value"]
    )
    names = [str(m) for m in rows["metric"]]
    rows = rows[[bool(ACCURACY.search(m)) and not OTHER.search(m) for m in names]]
    source = rows.get("source", pd.Series(None, index=rows.index, dtype=object))
    rows = rows[source.notna() | (rows["slice"] == pool.split)]
    n = pool.clients.stop - pool.clients.start
    for (name, _), part in rows.groupby(["metric", source[rows.index].fillna("fldiag")]):
        claims = {int(r): float(v) for r, v in zip(part["round"], part["value"], strict=True)}
        unit = 100 if max(claims.values()) > 1.5 else 1
        is_round = [all(abs(round(v, d) - v) < 1e-6 for v in claims.values()) for d in range(5)]
        error = slack + (0.5 * 10.0 ** -is_round.index(True) / unit if True in is_round else 0.0)
        claims = {r: v / unit for r, v in claims.items() if r in now}
        off = [r for r in claims if abs(claims[r] - now[r]) > error]
        if not off:
            continue
        kind = "not that of the stored weights"
        if all(abs(v - max(now[s] for s in now if s <= r)) <= error for r, v in claims.items()):
            kind = "the best so far"
        elif all(abs(v - train[r]) <= error + math.sqrt(1 / n) for r, v in claims.items()):
            kind = "like the accuracy on the training data"
        r, severity = off[-1], cast(Severity, "fault" if is_whole else "hint")
        evidence = f"in round {r} it says {claims[r]:.2%}, the weights have {now[r]:.2%}"
        remedy = "report the last round's test accuracy"
        yield Finding(severity, f"the reported {name} is {kind}", evidence, remedy, off)


def learning(models: Models, about: About) -> Iterator[Finding]:
    """After 30 rounds, or where training raises the clients' own loss, the global model does no better than always answering the
    most frequent class (binomial, 1 %)."""
    pool = models.history.pool
    if not models.right or models.history.dataset.regression:
        return
    r = max(models.right)
    y, right = models.labels[pool.test], models.right[r][pool.test]
    share = np.bincount(y).max() / len(y)
    gains = [gain[j, i] for ids, gain in models.gains.values() for j, i in enumerate(ids)]
    is_late = r >= 30 or np.nanmedian(gains or [-1.0]) < 0
    if is_late and binom.sf(right.sum() - 1, len(y), share) > 0.01:
        evidence = f"{right.mean():.1%} right in round {r}; the most frequent class has {share:.1%}"
        what = "the last global model is no better than chance"
        yield Finding("hint", what, evidence, "look at labels, inputs and learning rate")


EXAMPLE_CHECKS = (data, own_data, test_data, reported, learning)
