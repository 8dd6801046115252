"""Where clients start: at the model that they received, or at another one that the run holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from fldiag.diagnostics.doctor.case import UNSAMPLED, Case, CohortWeights
from fldiag.diagnostics.doctor.findings import (
    INFORMATION,
    WARNING,
    Check,
    Clear,
    Finding,
    Outcome,
    Skip,
)
from fldiag.errors import counted

if TYPE_CHECKING:
    from torch import Tensor

#: Numbers of all models that are remembered, and coordinates of a model that are looked at, at most and at least.
MEMORY, MOST, LEAST = 10_000_000, 20_000, 500
#: Older aggregates that are remembered; from more on, every second one goes.
AGGREGATES = 100
#: By how many rounds older than the last aggregate a client's start may always be.
LAGS = 5
#: A layer is judged from so many coordinates on.
LAYER = 16
#: Names of methods whose clients keep weights of their own, or work on older models, on purpose.
PERSONAL = ("per", "rep", "bn", "lg", "babu", "ditto", "local", "apfl", "amp", "rod", "ala", "silo")
#: Of fewer coordinates no direction is unlikely.
SMALLEST = 100
ASYNCHRONOUS = ("async", "buff", "stale")
REMEDY = "load the received model, all of it, before a client trains"


class Starts(Check):
    """Clients that do not start from the model that they received, but from an older one, from their own last weights (all, or a
    layer that is not loaded), or from each other.

    Rule: let m be a possible start other than the received w. a = <w_k - m, w - m> / ||w - m||^2 says how much of the way from
    m to w lies behind a client: about 1 or more where it started at w, 1 less where it started at m.
    (1) One client, an older aggregate: in 80 % of at least three rounds, and in 40 % of all of its rounds, its a is at most
    1.05, below all others', and 0.6 below their median, which is at least 0.9.
    (2) All clients, one or two rounds late: over every second (third) round, at least three, the median a of that aggregate is
    at most 0.15, or at most 0.4 and in each of them 0.3 below all other rounds.
    (3) A round resumed from an older aggregate: the median a is at most 0.3, and all clients lie nearer to m than to w, in at
    most a third of the rounds.
    (4) All clients, always the initial model: all aggregates lie as far from it as the first (to 7 %), and 0.75 times that
    apart at most. Information, where updates have become shorter than 0.65 times the first: training may converge in a round.
    (5) Own last weights, by layer. All clients: 80 % of the coordinates lie nearer to them than to w, and 60 % of all a are
    negative. One client: 78 %, a within 0.15 of 0, ||w_k - m|| / ||w_k - w|| at most 0.38 times the others', and ||w_k - w||
    at least 1.3 times theirs.
    (6) One after the other: the differences of updates that follow each other, by length or in the order of the clients, without
    their common direction, have a median cosine above -0.375 (independent updates: -0.5; of 4 or 5 clients: above -0.3) and
    are shorter than the updates, and the longest update is 1.5 times the shortest.
    Movements near rounding are left out, and aggregates whose cohort shares more clients with a round's than the last one does.
    Where the method means it (personal layers, asynchronous rounds), all this is information.
    """

    name, title = "starts", "Clients start from what they received"

    def __init__(self, case: Case):
        super().__init__(case)
        self.obstacle = "the clients hardly move"
        self.at = np.arange(0)  # the coordinates that are remembered
        self.layers: dict[str, int] = {}  # layer -> where it begins among these
        self.aggregates: dict[int, np.ndarray] = {}
        self.last: dict[int, np.ndarray] = {}  # client -> its last trained weights
        self.cohorts: dict[int, list[int]] = {}
        self.older: dict[int, tuple[list[int], np.ndarray, np.ndarray, np.ndarray]] = {}
        self.distances: dict[str, list[tuple[int, list[int], np.ndarray]]] = defaultdict(list)
        self.chains: dict[int, tuple[float, float, float]] = {}
        self.lengths = defaultdict[int, list[float]](list)

    def see(self, cohort: CohortWeights) -> None:
        if not len(self.at):
            self._choose(cohort)
        new = self._take(cohort.aggregated)
        if len(self.at) < SMALLEST:
            self.obstacle = f"of fewer than {SMALLEST} weights no direction is unlikely"
        elif cohort.starts is not None:
            self.obstacle = "the run says what each client received"
        elif not cohort.sampled:
            self.obstacle = UNSAMPLED
        elif cohort.usable and cohort.clients is not None:
            assert cohort.received is not None
            w, rows = self._take(cohort.received), self._take(cohort.clients)
            self.aggregates.setdefault(cohort.round - 1, w)
            tiny = 30 * cohort.eps * float(np.linalg.norm(w))
            moving = np.linalg.norm(rows - w, axis=1) > tiny
            if moving.any():
                ids = [i for i, is_moving in zip(cohort.ids, moving, strict=True) if is_moving]
                self._compare(cohort.round, ids, rows[moving], w, tiny)
        if np.isfinite(new).all():
            self.aggregates[cohort.round] = new
            if len(self.aggregates) > AGGREGATES:
                recent = sorted(self.aggregates)[1:-6]
                for r in recent[::2]:
                    del self.aggregates[r]

    def _choose(self, cohort: CohortWeights) -> None:
        """The coordinates to remember: evenly, of every tensor, layer by layer."""
        models = max(self.case.total, 1) + min(len(self.case.run.rounds), AGGREGATES)
        most = int(np.clip(MEMORY // models, LEAST, MOST))
        stride, start = max(1, -(-cohort.aggregated.numel() // most)), 0
        index = defaultdict[str, list[np.ndarray]](list)
        for name, tensor in cohort.weights.items():
            n = tensor.numel()
            step = min(stride, max(1, n // LAYER))
            index[name.rpartition(".")[0] or name].append(np.arange(start, start + n, step))
            start += n
        sizes = {name: sum(map(len, parts)) for name, parts in index.items()}
        starts = np.cumsum([0, *sizes.values()])
        self.layers = {n: int(i) for n, i in zip(sizes, starts, strict=False) if sizes[n]}
        self.at = np.concatenate([part for parts in index.values() for part in parts])

    def _take(self, w: Tensor) -> np.ndarray:
        return np.asarray(w[..., self.at].double())

    def _compare(
        self, r: int, ids: list[int], rows: np.ndarray, w: np.ndarray, tiny: float
    ) -> None:
        first = min(self.aggregates)
        d = rows - w
        length = np.linalg.norm(d, axis=1)
        for i, size in zip(ids, length, strict=True):
            self.lengths[i].append(float(size))
        # where what was sent is itself no last aggregate, continuity says so
        last = self.aggregates.get(r - 1, w)
        older = [s for s in self.aggregates if s < r - 1 and np.linalg.norm(w - last) <= tiny]
        v = w - np.stack([self.aggregates[s] for s in older]) if older else np.zeros((0, len(w)))
        way = (v**2).sum(1)
        apart = way > tiny**2
        if apart.any():
            older, v, way = (
                [s for s, far in zip(older, apart, strict=True) if far],
                v[apart],
                way[apart],
            )
            inner = d @ v.T
            share = 1 + inner / way
            ratio = np.sqrt(np.maximum(1 + (2 * inner + way) / (length**2)[:, None], 0))
            self.older[r] = older, share, ratio, np.sqrt(way) / np.median(length)
        if first < r - 1:
            self.distances["initial"].append(
                (r, ids, self._by_layer(rows, w, self.aggregates[first][None], tiny))
            )
        present = [j for j, i in enumerate(ids) if i in self.last]
        if present and r > first + 2:
            last = np.stack([self.last[ids[j]] for j in present])
            values = self._by_layer(rows[present], w, last, tiny)
            self.distances["own"].append((r, [ids[j] for j in present], values))
        if len(ids) > 3:
            self.chains[r] = chain(d)
        for i, row in zip(ids, rows, strict=True):
            self.last[i] = row
        self.cohorts[r] = ids

    def _by_layer(self, rows: np.ndarray, w: np.ndarray, m: np.ndarray, tiny: float) -> np.ndarray:
        """[K, layers + 1, 4]: a, ||w_k - m|| / ||w_k - w||, share of the coordinates nearer to m, ||w_k - w||; at last, of all
        layers together."""
        x, v, d = rows - m, np.broadcast_to(w - m, rows.shape), rows - w
        changes = (v != 0) & ((x != 0) | (d != 0))
        starts = list(self.layers.values())
        sums = np.stack(
            [
                np.add.reduceat(y, starts, axis=1)
                for y in (x * v, v**2, x**2, d**2, (np.abs(x) < np.abs(d)) & changes, changes)
            ],
            axis=-1,
        ).astype(float)
        xv, vv, xx, dd, nearer, of = np.moveaxis(
            np.concatenate([sums, sums.sum(1, keepdims=True)], 1), -1, 0
        )
        share = tiny / np.linalg.norm(w) if np.any(w) else 0.0
        size = np.sqrt(np.add.reduceat(w**2, starts)) * share
        floor = np.append(size, tiny) ** 2
        odd = (vv <= floor) | (dd <= floor) | (of < LAYER)
        with np.errstate(divide="ignore", invalid="ignore"):
            values = np.stack([xv / vv, np.sqrt(xx / dd), nearer / of, np.sqrt(dd)], -1)
        values[odd] = np.nan
        return values

    def end(self) -> Iterator[Outcome]:
        if not self.cohorts:
            yield Skip(self.case.lacks(self.obstacle))
            return
        findings = list(self._own_last_weights())
        if not findings:
            all_clients = (
                self._late(1),
                self._late(2),
                self._initial(),
                self._sequential(),
                self._resumed(),
            )
            findings = [one for one in all_clients if one is not None][:1]
        if all(one.client is not None for one in findings):
            accused = {one.client for one in findings}
            findings += [
                one
                for one in self._older()
                if one.client is not None
                and one.client not in accused
                and not self.case.goes_another_way(one.client)
            ]
            self.case.misplaced |= {one.client for one in findings if one.client is not None}
        yield from findings
        yield Clear(
            f"{counted(len(self.last), 'client')} in {counted(len(self.cohorts), 'round')}: no other stored model "
            "explains where they are"
        )

    # -- all clients

    def _shared(self, r: int, s: int) -> bool:
        """Whether the cohort of round r shares more clients with that which made aggregate s than with the last one."""
        now, last, old = (set(self.cohorts.get(t, ())) for t in (r, r - 1, s))
        return len(now & old) > len(now & last)

    def _late(self, lag: int) -> Finding | None:
        medians = {
            r: float(np.median(share[:, older.index(r - 1 - lag)]))
            for r, (older, share, *_) in self.older.items()
            if r - 1 - lag in older and len(share) > 3 and not self._shared(r, r - 1 - lag)
        }
        classes = [[a for r, a in medians.items() if r % (lag + 1) == c] for c in range(lag + 1)]
        if min(map(len, classes)) < 3 or not self._moves():
            return None
        classes.sort(key=np.median)
        lowest = float(np.median(classes[0]))
        is_apart = max(classes[0]) < min(map(min, classes[1:])) - 0.3
        if lowest > (0.4 if is_apart else 0.15):
            return None
        behind = "one round" if lag == 1 else f"{lag} rounds"
        return self._finding(
            f"clients start from aggregates that are {behind} old",
            f"a = {lowest:.2f} in the median of every {'second' if lag == 1 else 'third'} round; training from "
            "the received model gives 1 or more",
            tuple(medians),
            words=ASYNCHRONOUS,
            value=lowest,
        )

    def _moves(self) -> bool:
        """Whether aggregates go on moving away from the first ones."""
        rounds = sorted(self.aggregates)
        first, w = self.aggregates[rounds[0]], self.aggregates
        step = np.linalg.norm(w[rounds[1]] - first)
        return bool(np.linalg.norm(w[rounds[-1]] - w[rounds[1]]) > 0.3 * step)

    def _initial(self) -> Finding | None:
        rounds = sorted(self.aggregates)
        if len(rounds) < 5 or rounds[1] != rounds[0] + 1:
            return None
        later = np.stack([self.aggregates[r] for r in rounds[1:]])
        away = np.linalg.norm(later - self.aggregates[rounds[0]], axis=1)
        apart = [
            *np.linalg.norm(np.diff(later, axis=0), axis=1),
            np.linalg.norm(later[-1] - later[0]),
        ]
        lengths = [v[-1] / v[0] for v in self.lengths.values() if len(v) > 1]
        if away[0] == 0 or not lengths:
            return None
        off, spread = float(np.abs(away / away[0] - 1).max()), float(np.median(apart) / away[0])
        shrink = float(np.median(lengths))
        if off > 0.07 or not 0 < spread <= 0.75 or shrink < 0.35:
            return None
        return self._finding(
            "clients start from the initial model in every round",
            f"after each round the aggregate is as far from it as after the first (to {off:.1%}), and the aggregates lie "
            f"{spread:.0%} of that apart"
            + ("" if shrink >= 0.65 else "; or training converges in every round"),
            rounds[1:],
            value=spread,
            is_certain=shrink >= 0.65,
        )

    def _sequential(self) -> Finding | None:
        rounds = self.chains
        if len(rounds) < 2:
            return None
        cosine, near, longest = (float(np.median(v)) for v in zip(*rounds.values(), strict=True))
        is_small_cohort = np.median([len(self.cohorts[r]) for r in rounds]) < 6
        if cosine < (-0.3 if is_small_cohort else -0.375) or near > 0.95 or longest < 1.5:
            return None
        return self._finding(
            "clients train one after the other: each starts from the weights of another client of its round",
            f"successive updates continue each other (median cosine of their differences {cosine:.2f}; of independent "
            f"updates -0.5), and the longest is {longest:.1f} times the shortest",
            tuple(rounds),
            value=cosine,
            is_certain=not self._lengths_follow_sizes(),
        )

    def _lengths_follow_sizes(self) -> bool:
        """Whether clients with more examples have longer updates: then no position in a row is needed to explain the lengths."""
        pairs = [
            (self.case.sizes[i], np.median(lengths))
            for i, lengths in self.lengths.items()
            if self.case.sizes.get(i)
        ]
        sizes, lengths = np.array(pairs).reshape(-1, 2).T
        if len(sizes) < 4 or np.ptp(sizes) == 0:
            return False
        return bool(stats.spearmanr(sizes, lengths).statistic > 0.7)

    def _resumed(self) -> Finding | None:
        odd: dict[int, tuple[int, float]] = {}
        for r, (older, share, ratio, _) in self.older.items():
            a, near = np.median(share, 0), np.median(ratio, 0)
            low = [
                (float(near[c]), older[c], float(a[c]))
                for c in np.flatnonzero((a <= 0.3) & (ratio < 1).all(0))
                if len(share) > 3 and not self._shared(r, older[c])
            ]
            if low:
                odd[r] = min(low)[1:]
        # after such a round the run repeats itself, so the next rounds lie near old aggregates, too
        odd = {r: one for r, one in odd.items() if r - 1 not in odd}
        if not odd or 3 * len(odd) > len(self.older) or not self._moves():
            return None
        r, (s, a_of_round) = next(iter(odd.items()))
        return self._finding(
            f"the clients of round {r} start from an older model, near the aggregate of round {s}, not from that of "
            f"round {r - 1}",
            f"all of them lie nearer to it, a = {a_of_round:.2f} in the median; training from the received model gives 1 or more"
            + (f"; so do those of {counted(len(odd) - 1, 'other round')}" if len(odd) > 1 else ""),
            tuple(odd),
            value=a_of_round,
        )

    # -- one client, or one layer

    def _older(self) -> Iterator[Finding]:
        """Clients whose start is an older aggregate, always as many rounds old, or always the same."""
        places = defaultdict[tuple[int, str, int], list[tuple[int, float]]](list)
        for r, (older, _, ratio, _) in self.older.items():
            for j, c in zip(*np.nonzero(self._behind(r)), strict=True):
                place = r, float(ratio[j, c])
                client, s = self.cohorts[r][j], older[c]
                places[client, "round", s].append(place)
                if r - 1 - s <= LAGS:
                    places[client, "lag", r - 1 - s].append(place)
        nearest: dict[int, tuple[float, str, int, list[int]]] = {}
        for (client, kind, n), rows in places.items():
            least_rounds = max(
                3.0, 0.4 * len(self.lengths[client]), 0.8 * self._looked_at(client, kind, n)
            )
            if len(rows) < least_rounds:
                continue
            near = float(np.median([ratio for _, ratio in rows]))
            if client not in nearest or near < nearest[client][0]:
                nearest[client] = near, kind, n, [r for r, _ in rows]
        first = min(self.aggregates)
        for i, (near, kind, n, rounds) in sorted(nearest.items()):
            yield self._finding(
                f"{self.case.client(i)} starts from "
                + (
                    "the initial model"
                    if kind == "round" and n <= first + 1
                    else f"an old model, near the aggregate of round {n}"
                    if kind == "round"
                    else f"aggregates that are older than what it received, by {counted(n, 'round')} or so"
                ),
                f"in {counted(len(rounds), 'round')} it lacks 0.6 or more of the way from there to what it received, and the "
                f"others do not; ||w_k - m|| / ||w_k - w|| = {near:.2f}",
                rounds,
                client=i,
                words=ASYNCHRONOUS,
                value=near,
            )

    def _behind(self, r: int) -> np.ndarray:
        """[K, older aggregates]: whether a client of the round lacks the way from the aggregate to what it received."""
        _, share, _, way = self.older[r]
        if len(share) < 4:
            return np.zeros_like(share, dtype=bool)
        order = np.sort(share, axis=0)
        k = len(share)
        lowest = np.where(share == order[0], order[1], order[0])  # of the others
        middle = np.where(share <= order[(k - 1) // 2], order[k // 2], order[(k - 1) // 2])
        is_behind = (share <= np.minimum(1.05, middle - 0.6)) & (share < lowest) & (middle >= 0.9)
        return np.asarray(is_behind & (way > 0.1))

    def _looked_at(self, client: int, kind: str, n: int) -> int:
        """In how many rounds a client could be behind an aggregate."""
        return sum(
            len(share) >= 4 and s in older and way[older.index(s)] > 0.1
            for r, (older, share, _, way) in self.older.items()
            for s in [r - 1 - n if kind == "lag" else n]
            if client in self.cohorts[r]
        )

    def _own_last_weights(self) -> Iterator[Finding]:
        """Layers that start from the clients' own last weights."""
        rows = self.distances["own"]
        if len(rows) < 2:
            return
        rounds = np.concatenate([[r] * len(ids) for r, ids, _ in rows])
        clients = np.concatenate([ids for _, ids, _ in rows])
        values = np.concatenate([v for *_, v in rows])
        is_late = rounds >= np.median(rounds)
        rounds, clients, values = rounds[is_late], clients[is_late], values[is_late]
        everyone = self._kept_by_all(values)
        if len(everyone):
            vote, ratio = np.nanmedian(values[:, everyone, 2]), np.nanmedian(values[:, everyone, 1])
            yield self._finding(
                f"clients do not load {self._describe_layers(everyone)}: each starts from its own last weights",
                f"{vote:.0%} of the coordinates lie nearer to them than to what was received, ||w_k - own|| / ||w_k - w|| = "
                f"{ratio:.2f}, in the median of {counted(len(set(clients)), 'client')} and their last rounds",
                sorted(set(rounds.tolist())),
                layer=self._describe_layers(everyone, bare=True),
                words=PERSONAL,
                value=float(ratio),
            )
            return
        for i, layers, ratio, vote in self._kept_by_one(clients, values):
            if self._stays(i):
                continue
            yield self._finding(
                f"{self.case.client(i)} does not load {self._describe_layers(layers)}: it starts from its own last weights",
                f"{vote:.0%} of the coordinates lie nearer to them than to what it received; ||w_k - own|| / ||w_k - w|| is "
                f"{ratio:.2f}, far less than the others'",
                rounds[clients == i].tolist(),
                client=i,
                layer=self._describe_layers(layers, bare=True),
                words=PERSONAL,
                value=ratio,
                # a client of few classes makes much the same last layer in every round
                is_certain=layers.tolist() != [len(self.layers) - 1],
            )

    def _kept_by_all(self, values: np.ndarray) -> np.ndarray:
        layers = []
        for g in range(len(self.layers)):
            v = values[~np.isnan(values[:, g]).any(1), g]
            if len(v) >= 6 and np.median(v[:, 2]) >= 0.8 and (v[:, 0] < 0).mean() >= 0.6:
                layers.append(g)
        return np.array(layers, dtype=int)

    def _kept_by_one(
        self, clients: np.ndarray, values: np.ndarray
    ) -> Iterator[tuple[int, np.ndarray, float, float]]:
        """(client, layers, ratio, vote)."""
        ids = sorted(set(clients.tolist()))
        middle = np.full((len(ids), len(self.layers), 4), np.nan)
        for j, i in enumerate(ids):
            for g in range(len(self.layers)):
                v = values[clients == i, g]
                v = v[~np.isnan(v).any(1)]
                if len(v) >= 2:
                    middle[j, g] = np.median(v, 0)
        if len(ids) < 4:
            return
        for j, i in enumerate(ids):
            other_clients = np.delete(middle, j, 0)
            has_three = (~np.isnan(other_clients[..., 1])).sum(0) >= 3
            usual = np.nanmedian(np.where(has_three[:, None], other_clients, np.inf), axis=0)
            client = middle[j]
            layers = np.flatnonzero(
                has_three
                & (client[:, 1] <= 0.38 * usual[:, 1])
                & (client[:, 2] >= 0.78)
                & (np.abs(client[:, 0]) <= 0.15)
                & (client[:, 3] >= 1.3 * usual[:, 3])
            )
            if len(layers):
                yield (
                    i,
                    layers,
                    float(np.median(client[layers, 1])),
                    float(np.median(client[layers, 2])),
                )

    def _stays(self, client: int) -> bool:
        """Whether a client's results stay at one distance from the initial model: it starts from one place again and again."""

        def late_lengths(kind: str) -> list[float]:
            rows = [v[ids.index(client), -1] for _, ids, v in self.distances[kind] if client in ids]
            return [row[1] * row[3] for row in rows[len(rows) // 2 :]]

        far, steps = late_lengths("initial"), late_lengths("own")
        return len(far) > 2 and abs(far[-1] - far[0]) < 0.5 * float(np.median(steps))

    def _describe_layers(self, layers: np.ndarray, *, bare: bool = False) -> str:
        names = [list(self.layers)[g] for g in layers]
        text = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        if bare:
            return text
        return (
            "the model"
            if len(names) == len(self.layers)
            else f"layer{'s' * (len(names) > 1)} {text}"
        )

    def _finding(
        self,
        title: str,
        evidence: str,
        rounds: Sequence[int],
        *,
        client: int | None = None,
        layer: str | None = None,
        words: tuple[str, ...] = (),
        value: float | None = None,
        is_certain: bool = True,
    ) -> Finding:
        method = self.case.method.lower()
        is_intended = (
            self.case.slots & {"isolated", "send"}
            if self.case.is_native
            else any(word in method for word in words)
        )
        return Finding(
            WARNING if is_certain and not is_intended else INFORMATION,
            title,
            evidence,
            "updates are applied to another model than the one they were made for",
            REMEDY,
            tuple(rounds),
            client=client,
            layer=layer,
            value=value,
        )


def chain(d: np.ndarray) -> tuple[float, float, float]:
    """Of updates [K, P], by length or in the order of the clients, whichever continues better: the median cosine of successive
    differences, their median length as a share of the update's, and how many times as long as the shortest the longest is."""
    length = np.linalg.norm(d, axis=1)
    orders = (np.argsort(length), np.arange(len(d)))
    cosine, near = max(_continue(d[order], length[order]) for order in orders)
    return cosine, near, float(length.max() / length.min())


def _continue(d: np.ndarray, length: np.ndarray) -> tuple[float, float]:
    e = np.diff(d, axis=0, prepend=0)
    size = np.linalg.norm(e, axis=1)
    line = d[-1] / length[-1]
    e = e - np.outer(e @ line, line)
    left = np.maximum(np.linalg.norm(e, axis=1), 1e-300)
    cosine = (e[1:] * e[:-1]).sum(1) / left[1:] / left[:-1]
    return float(np.median(cosine)), float(np.median(size[1:] / length[1:]))
