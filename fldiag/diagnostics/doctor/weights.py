"""Checks of weights alone: each takes the facts of all rounds and yields what it finds, by one statistic and one limit."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.stats import t

from fldiag.diagnostics.doctor.facts import SAMPLED, About, Finding, RoundFacts, Severity, joined
from fldiag.errors import FldiagError

#: Share of the server's step that rounding may leave unexplained, and that noise or compression may.
RESIDUAL, NOISE = 1e-3, 0.05
#: Rounds in which a client must be odd, and clients in a round from which on they are compared.
ROUNDS, CLIENTS = 3, 4
#: Probability of a false hint of a check, all clients together.
LEVEL = 0.05
WORDS = {
    "n": "the mean by examples",
    "batches": "the mean by minibatches",
    "uniform": "the plain mean",
}


def finite(rounds: Sequence[RoundFacts], about: About) -> Iterator[Finding]:
    """Weights that are not numbers, where they began, and files that cannot be read."""
    first = next((facts for facts in rounds if facts.infinite), None)
    if first is not None:
        clients = [i for i in first.infinite if i is not None]
        who = "the aggregate, not those of its clients, is not finite"
        if clients:
            who = f"the trained weights of client {joined(clients)} are not finite"
        evidence = f"first in round {first.round}, {next(iter(first.infinite.values()))}"
        remedy = "lower the learning rate, clip gradients, look at the data and the server's step"
        yield Finding("fault", who, evidence, remedy, [first.round])
    elif about.is_diverged:
        remedy = "lower the learning rate, or clip gradients"
        yield Finding("fault", "the run diverged", "its status says so", remedy)
    for r, why in about.unreadable.items():
        yield Finding("fault", f"round {r} cannot be read", why, "restore the file", [r])


def aggregate(rounds: Sequence[RoundFacts], about: About) -> Iterator[Finding]:
    """The aggregate is not the mean of the clients that the run states: ||u - sum_k p_k d_k|| / ||u|| is above 0.1 % (u: the
    server's step, d_k: the clients' updates); and what it is instead, by least squares. A run that states nothing gets a hint."""
    if about.rule == "other":
        raise FldiagError(f"the server of {about.method} is not known to take a mean")
    if not about.is_cohort:
        raise FldiagError("the stored clients are not those of the aggregate")
    groups: dict[tuple[Severity, str], dict[int, str]] = defaultdict(dict)
    rounds = [*_usable(rounds)]
    for facts in rounds:
        severity, what, evidence = _judge(facts, about)
        if what:
            groups[severity, what][facts.round] = evidence
    for (severity, what), places in groups.items():
        evidence = f"{next(iter(places.values()))}; {len(places)} of {len(rounds)} rounds"
        remedy = "divide by the sum of the weights of the round's clients, or state the method"
        yield Finding(severity, what, evidence, remedy, [*places])


def _judge(facts: RoundFacts, about: About) -> tuple[Severity, str, str]:
    """Severity, what is wrong ("" for nothing) and the evidence."""
    k, gram = len(facts.ids), facts.gram
    length = np.sqrt(gram[k, k])
    limit = max(RESIDUAL, facts.rounding / max(length, 1e-300))
    means = about.means(facts.ids)
    stated = about.by if about.by in means else "uniform"
    severity: Severity = "fault" if about.rule == "mean" else "hint"
    left = _left(facts, about)
    if left[stated] <= limit:
        return "healthy", "", ""
    for name in ("n", "uniform"):
        if left.get(name, np.inf) <= limit:
            what = f"the aggregate is {WORDS[name]}, not {WORDS[stated]}"
            return severity, "" if about.rule == "none" else what, "equal up to rounding"
    if length <= facts.rounding:
        return severity, "the global model did not change, and its clients did", "its step is 0"
    name = min(left, key=lambda n: left[n]) if about.rule == "none" else stated
    p, mean = means[name], WORDS[name]
    c = _fit(gram, [*range(k)])
    scale = c @ p / (p @ p)
    if _residual(gram, c) <= limit:
        slack = np.minimum(1e-2 * np.abs(c).max(), 0.1 * np.abs(scale * p))
        if (np.abs(c - scale * p) <= slack).all():
            share = k / (about.total or k)
            wrong = [v for v in (k, share, 1 / k) if abs(v - 1) > 1e-2]
            is_slip = scale < 0 or any(abs(scale / v - 1) < 1e-2 for v in wrong)
            what = f"the server's step is a multiple of {mean} of the clients"
            evidence = (
                f"{scale:.4g} times; {k} of {about.total} clients; or a server's learning rate"
            )
            return severity if is_slip else "hint", what, evidence
        absent = [i for i, v, q in zip(facts.ids, c, p, strict=True) if abs(v) < 0.02 * q]
        what = "clients have other weights in the aggregate than their examples say"
        if absent:
            what = f"client {joined(absent)} is left out of the mean"
        weights = [f"{i}: {round(v, 3):g}" for i, v in zip(facts.ids, c, strict=True)]
        return severity, what, f"coefficients {joined(weights)}, sum {c.sum():.4g}"
    odd = [n for n, g in facts.grams.items() if _rest(g, p) > NOISE * np.sqrt(g[k, k])]
    others = [g for n, g in facts.grams.items() if n not in odd]
    if odd and others and _rest(np.sum(others, axis=0), p) <= limit * length:
        what = "" if about.is_personal else f"some tensors are not {mean} of the clients"
        return severity, what, joined(odd)
    if left[name] <= NOISE:
        what = f"the aggregate is nearly {mean}" if about.rule == "mean" else ""
        return "hint", what, f"{left[name]:.1%} of the step is a rest: noise, rounding, compression"
    c = _fit(gram, [*range(k), k + 1])
    x = np.append(c[:k], [-1.0, c[k]])
    if np.sqrt(max(x @ gram @ x, 0.0)) <= limit * length:
        what = "the clients' weights in the aggregate do not sum to 1"
        return severity, what, f"they sum to {1 + c[k]:.4g}"
    evidence = f"{_residual(gram, _fit(gram, [*range(k)])):.1%} of the step is no weighted mean"
    return (
        severity,
        "the aggregate is no weighted mean of the clients",
        f"{evidence}; or another rule",
    )


def _left(facts: RoundFacts, about: About) -> dict[str, float]:
    """What each kind of mean leaves over."""
    return {by: _residual(facts.gram, p) for by, p in about.means(facts.ids).items()}


def _residual(gram: np.ndarray, weights: np.ndarray) -> float:
    """The share of the server's step that these weights of the clients' updates leave over."""
    rest, length = _rest(gram, weights), np.sqrt(gram[-2, -2])
    return rest / length if length else np.inf if rest else 0.0


def _rest(gram: np.ndarray, weights: np.ndarray) -> float:
    """The length of what these weights leave over."""
    x = np.append(weights, [-1.0, 0.0])
    return np.sqrt(max(x @ gram @ x, 0.0))


def _fit(gram: np.ndarray, rows: list[int]) -> np.ndarray:
    """Least squares of the server's step by these rows, which differ in length by far."""
    scale = np.sqrt(np.maximum(np.diag(gram)[rows], 1e-300))
    system = gram[np.ix_(rows, rows)] / np.outer(scale, scale)
    return np.linalg.lstsq(system, gram[rows, -2] / scale, rcond=1e-12)[0] / scale


def starts(rounds: Sequence[RoundFacts], about: About) -> Iterator[Finding]:  # noqa: C901
    """Clients that do not start from the last aggregate.

    What was received is another model. In the first round, half of the received weights are gone from a client's, in the
    median of large tensors: -<d_k, w> / ||w||^2 > 0.5. Then, of the way from an older model m to the received one w, a share
    a = <w_k - m, w - m> / ||w - m||^2 lies behind a client: 1 or more from w, about 0 from m. All start from m where a <= 0.5
    in the median of the lower half of the rounds, and never above 1.1 (they would go beyond w); one of the ``outliers`` where it
    lacks 0.6 of what the others have in 80 % of its rounds. With m its own last weights, layer by layer: 80 % of the coordinates
    lie nearer to m, and a < 0 (all); or 82 %, more among more than ten clients, 24 points more than in the median client, and
    |a| <= 0.15 (one).
    """
    if about.is_personal:
        raise FldiagError(f"clients of {about.method} may start from other models")
    remedy = "load the received model, all of it, before a client trains"
    rounds = [facts for facts in _usable(rounds) if facts.is_one_start]
    wrong = [
        facts.round
        for before, facts in pairwise(rounds)
        if facts.round == before.round + 1
        and np.linalg.norm(facts.received - before.aggregated)
        > max(facts.rounding, 1e-5 * float(np.linalg.norm(facts.received)))
    ]
    if wrong and about.rule != "other":
        severity: Severity = "fault" if about.rule == "mean" else "hint"
        what = "clients received another model than the last aggregate"
        evidence = f"in {len(wrong)} rounds; or the server sends a model of its own"
        yield Finding(severity, what, evidence, "send the new aggregate", wrong)
    if wrong:
        return
    if away := _elsewhere(rounds[0]) if rounds else []:
        what = f"client {joined(away, 12)} starts elsewhere in round {rounds[0].round}"
        evidence = (
            "most of the received weights are gone after training; or its training is very long"
        )
        yield Finding("hint", what, evidence, remedy, [rounds[0].round])
    if any(min(_left(facts, about).values()) > NOISE for facts in rounds):
        return  # where the server goes elsewhere, the way behind a client says nothing
    everyone: dict[str, list[float]] = defaultdict(list)
    lacks: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    own: dict[str, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    last: dict[int, np.ndarray] = {}
    for position, facts in enumerate(rounds):
        moved = np.median(np.linalg.norm(facts.clients - facts.received, axis=1))
        for name, m in _older(rounds[:position]):
            is_far = np.linalg.norm(facts.received - m) > 0.1 * moved
            if len(facts.ids) >= CLIENTS and is_far:
                a = _share_behind(facts.clients, m, facts.received)
                everyone[name].append(np.median(a))
                for j, i in enumerate(facts.ids):
                    usual = np.median(np.delete(a, j))
                    lacks[name][i].append(min(usual, 1.4) - a[j] if usual >= 0.9 else 0.0)
        for j, i in enumerate(facts.ids):
            for layer, part in facts.layers.items() if i in last else ():
                row, m, w = facts.clients[j, part], last[i][part], facts.received[part]
                if not np.array_equal(m, w) and not np.array_equal(row, w):
                    vote = (np.abs(row - m) < np.abs(row - w)).mean()
                    own[layer][i].append((vote, _share_behind(row[None], m, w)[0]))
            last[i] = facts.clients[j]
    for name, values in everyone.items():
        half = sorted(values)[: (len(values) + 1) // 2]
        is_late = np.median(half) <= 0.5 and max(values) < 1.1
        if len(half) >= ROUNDS and is_late and name != "the initial model":
            evidence = f"a = {np.median(half):.2f}, and 1 or more from the received model"
            what = f"clients start from an old model: {name}"
            yield Finding("hint", what, evidence, remedy)
            return
    groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for layer, clients in own.items():
        medians = {i: np.median(v, axis=0) for i, v in clients.items() if len(v) >= ROUNDS}
        if len(medians) >= CLIENTS:
            vote, way = np.median(list(medians.values()), axis=0)
            least = max(1 - 0.18 * math.sqrt(min(1, 10 / len(medians))), vote + 0.24)
            alone = [i for i, (v, a) in medians.items() if v >= least and abs(a) <= 0.15]
            groups[tuple(medians if vote >= 0.8 and way < 0 else alone)].append(layer)
    for who, layers in groups.items():
        if who:
            what = f"client {joined(who)} starts with its own last {joined(layers, 3)}"
            evidence = "most coordinates lie nearer to them than to what was received; or its labels or steps are others"
            client = who[0] if len(who) == 1 else None
            yield Finding("hint", what, evidence, remedy, (), client, joined(layers, 3))
    if any(len(who) > 1 for who in groups):
        return
    for i in sorted({i for ways in lacks.values() for i in outliers(ways, 0.6)}):
        if (i,) not in groups:
            evidence = (
                "it lacks 0.6 of the way that the others have; or its labels or steps are others"
            )
            yield Finding("hint", f"client {i} starts from an old model", evidence, remedy, (), i)


def _elsewhere(facts: RoundFacts) -> list[int]:
    """Clients that hold little of what they received."""
    large = [n for n, part in facts.parts.items() if part.stop - part.start >= SAMPLED]
    ways = [facts.grams[n][:-2, -1] / max(facts.grams[n][-1, -1], 1e-300) for n in large]
    left = np.median(ways, axis=0) if ways else np.zeros(len(facts.ids))
    return [i for i, a in zip(facts.ids, left, strict=True) if a < -0.5]


def _share_behind(rows: np.ndarray, m: np.ndarray, w: np.ndarray) -> np.ndarray:
    """How much of the way from m to w lies behind each row [K, n]."""
    return (rows - m) @ (w - m) / ((w - m) @ (w - m))


def _older(earlier: Sequence[RoundFacts]) -> Iterator[tuple[str, np.ndarray]]:
    """Older models from which clients might start."""
    if earlier:
        yield "the initial model", earlier[0].received
    for lag in (2, 3):
        if len(earlier) >= lag:
            yield f"the aggregate {lag - 1} rounds before the last", earlier[-lag].aggregated


def updates(rounds: Sequence[RoundFacts], about: About) -> Iterator[Finding]:
    """Uploads that are equal to the bit: of two clients (a fault), or of one in two rounds; updates that are exactly zero;
    longer than the others' by 40 %, beyond the client's size; or opposed to them (mean cosine below -0.7 times theirs): the
    ``outliers``. Not told where batch-norm, with a last minibatch of two, makes them long, or another start opposed."""
    zero = defaultdict(list)
    repeats = defaultdict(list)
    lengths = defaultdict(list)
    opposed = defaultdict(list)
    copies = defaultdict(list)
    sent: dict[tuple[int, str], int] = {}
    for facts in _usable(rounds):
        is_moving = facts.norms > 0
        clients = list(zip(facts.ids, facts.digests, is_moving, strict=True))
        for i, d, moves in clients:
            if not moves and about.sizes.get(i, 1):
                zero[i].append(facts.round)
            if moves and sent.setdefault((i, d), facts.round) != facts.round:
                repeats[i].append(facts.round)
        for text in {d for _, d, moves in clients if moves and facts.digests.count(d) > 1}:
            copies[tuple(i for i, d, _ in clients if d == text)].append(facts.round)
        rows = np.flatnonzero(is_moving)
        if len(rows) < CLIENTS:
            continue
        norms, ids = facts.norms[rows], [facts.ids[j] for j in rows]
        cosines = facts.gram[np.ix_(rows, rows)] / np.outer(norms, norms)
        mean = (cosines.sum(1) - 1) / (len(ids) - 1)
        size = np.array([about.sizes.get(i, 1) for i in ids], dtype=float)
        for j, i in enumerate(ids):
            larger = max(1.0, size[j] / max(np.median(np.delete(size, j)), 1.0))
            lengths[i].append(math.log(norms[j] / np.median(np.delete(norms, j)) / larger))
            usual = np.median(np.delete(mean, j))
            if usual > 0.1:
                opposed[i].append(-mean[j] / usual)
    members = sorted({i for group in copies for i in group})
    if copies:
        what = f"clients {joined(members, 12)} return each other's updates"
        when = sorted({r for places in copies.values() for r in places})
        evidence = f"equal to the bit in {len(when)} rounds"
        yield Finding("fault", what, evidence, "copy the model for every client", when)
    for i, when in zero.items():
        what, evidence = f"the update of client {i} is exactly zero", f"in {len(when)} rounds"
        remedy = "look which model it returns, or whether it has a whole minibatch"
        yield Finding("hint", what, evidence, remedy, when, i)
    for i, when in repeats.items():
        if i not in members:
            what = f"client {i} returned weights that it had returned before"
            remedy = "clear replies between rounds; or its training ends at one point"
            yield Finding("hint", what, f"in {len(when)} rounds", remedy, when, i)
    long = outliers(lengths, 0.35) if not about.is_batch_normed else {}
    for i, length in long.items():
        what, evidence = (
            f"the updates of client {i} are unusually long",
            f"{math.exp(length):.3g} times",
        )
        remedy = "look at its loss, learning rate, labels and inputs"
        yield Finding("hint", what, evidence, remedy, (), i)
    for i, ratio in outliers(opposed, 0.7).items() if not about.is_personal else ():
        what = f"the updates of client {i} have the wrong sign"
        evidence = f"their mean cosine with the others is {-ratio:.2f} times the others'"
        remedy = "look for a sign in its loss, optimiser or upload, and at its labels"
        yield Finding("hint", what, evidence, remedy, (), i)


def buffers(rounds: Sequence[RoundFacts], about: About) -> Iterator[Finding]:
    """Batch-norm statistics that are no mean of the clients': unchanged, one client's, outside their range, below 0."""
    if about.is_personal or not about.is_cohort:
        raise FldiagError("the clients' buffers are not those of the aggregate")
    places: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for facts in rounds:
        for name, text in facts.buffers.items():
            places[text][facts.round].append(name)
    severity: Severity = "fault" if about.rule == "mean" else "hint"
    for text, where in places.items():
        if len(where) >= min(2, len(rounds)):
            names = joined(next(iter(where.values())), 3)
            evidence = f"{names}, in {len(where)} rounds"
            yield Finding(
                severity, f"buffers are {text}", evidence, "average buffers as weights", [*where]
            )


def sampling(rounds: Sequence[RoundFacts], about: About) -> Iterator[Finding]:
    """Clients that are never drawn: less likely than 0.1 %, if every one is as likely."""
    drawn = [facts.ids for facts in rounds if facts.ids]
    size = np.mean([*map(len, drawn)]) if drawn else 0.0
    for i in sorted(set(range(about.total)) - {i for ids in drawn for i in ids}):
        p = (1 - size / about.total) ** len(drawn) * about.total
        if p < 1e-3 and about.sizes.get(i, 1):
            evidence = f"in {len(drawn)} rounds; p = {p:.1g} if all are as likely"
            remedy = "look at the range of the draw"
            yield Finding("hint", f"client {i} is never drawn", evidence, remedy, (), i)


def outliers(values: Mapping[int, Sequence[float]], least: float) -> dict[int, Any]:
    """Clients whose median value is larger than chance explains, and that value: beyond Student's t of 5 % shared by all clients
    (Bonferroni), in units of the clients' median absolute deviation; and above ``least`` in 80 % of its rounds."""
    medians = {i: np.median(v) for i, v in values.items() if len(v) >= ROUNDS}
    if len(medians) < CLIENTS:
        return {}
    middle = np.median([*medians.values()])
    deviation = 1.4826 * np.median([abs(x - middle) for x in medians.values()])
    limit = middle + t.isf(LEVEL / len(medians), len(medians) - 1) * deviation
    far = {i: x for i, x in medians.items() if x > limit}
    return {i: x for i, x in far.items() if np.mean(np.array(values[i]) > least) >= 0.8}


def _usable(rounds: Sequence[RoundFacts]) -> Iterator[RoundFacts]:
    """The rounds whose sums mean something."""
    yield from (facts for facts in rounds if facts.is_usable)


WEIGHT_CHECKS = (finite, aggregate, starts, updates, buffers, sampling)
