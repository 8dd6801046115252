"""What clients train on: whether their training fits the data that the run says are theirs, and whose it fits instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from fldiag.diagnostics.doctor.case import Case, CohortWeights
from fldiag.diagnostics.doctor.findings import (
    INFORMATION,
    LEVEL,
    WARNING,
    Check,
    Clear,
    Finding,
    Outcome,
    Skip,
)
from fldiag.diagnostics.doctor.labels import LabelMap, agree, find_label_map, ties_of
from fldiag.diagnostics.doctor.statistics import CLIENTS, ROUNDS, excess, spread
from fldiag.diagnostics.doctor.trained_on_test import test_evidence
from fldiag.errors import FldiagError, counted
from fldiag.results.select import spread as spread_rounds

if TYPE_CHECKING:
    from fldiag.diagnostics.doctor.models import RoundFit

#: How far below the median of all gains those of a client must lie, in units of 1.48 MAD, in every round that is looked at; and
#: by which multiple of the median its loss must rise there.
SCALES, EVERY = 3.0, 0.25
#: The same for the mean advantage of a client on its own data.
WIDE = 5.0
#: Nats that are too few to be told from nothing.
LEAST = 0.01
#: Further rounds in which a client is looked at that seems odd.
FURTHER = 4
#: z of the recorded assignment: above FITS it fits a round; below MISSES, in their mean, it does not fit these rounds.
FITS, MISSES = 3.0, 1.0
#: Part of the usual advantage on one's data by which that on another's must be larger, and rounds of such a client.
MARGIN, SEEN = 0.4, 4
#: Clients for which a relabelling is sought, and whose labels are permuted.
MAPS, TIES = 20, 100
#: z above which training ties labels to inputs.
TIED = 2.0


class OwnData(Check):
    """Clients whose training does not fit the data that the run says are theirs: other data, labels or inputs, an update of the
    wrong sign, noise.

    Rule: in up to 6 rounds every client's trained model is evaluated on every client's recorded training examples. Its advantage
    on some data is by how much it lowers their mean loss, less the median of the round's clients. In a sound run clients have
    one on their own data: sound runs of one step, of huge steps, of one class a client and of independent and identical data
    have z = 2 to 8 a round among random assignments of data to clients.
    Other data: the assignment of data to clients with the largest sum of advantages is made from each half of the rounds. Where
    both move the same clients, in a circle or half of all, and these have, on the data that they are moved to, an advantage that
    is larger by 0.4 of the usual one and a loss that falls, they fit each other's data (sound runs: no client is moved, or by
    0.26 of it).
    All clients: where z is above 3 in one round alone and below 1 in the mean of at
    least 3 others, the partition is another in every round. Where the loss of most clients rises (binomial, 1 %), or training
    does not tie the labels to the inputs (see below), a relabelling is sought, which must be right for half of the held-out
    examples at least and beat the recorded labels there at 1 %.
    One client: odd where its loss rises in every round, by at least a quarter of what it falls by in the median of all clients
    and rounds, and lies 3 times the scale 1.48 MAD of all changes beyond that median, which is at least 0.01 nats (looked at in
    up to 4 further rounds); or where its advantage on its own data is below 0 in the mean of at least 3 rounds and 5 times the
    scale 1.48 MAD below the other clients', and the binomial probability of so many rounds without one, at the others' rate, is
    below what Holm's procedure allows. Then whose data it fits instead, a relabelling, and labels out of step with
    the inputs (permutation of the labels, at 1 %) are tried. Or where its training unties its labels from its inputs: the sum
    of the changes of their log-probabilities is low among all permutations of its labels (exact moments, p by the normal
    distribution), while z is above 2 in the median client and below 0 for at most a tenth of the clients.
    Information if a client took part in a single round, and for methods of fldiag that correct the local gradient (control
    variates, dual variables), which may raise a client's own loss on purpose. Information, too, where most clients' loss rises
    and nothing explains it: steps are too long, or uploads noisy; and where the mean z is below 1 and nothing else is found.
    """

    name, title = "own_data", "Clients fit their own data"

    def __init__(self, case: Case):
        super().__init__(case)
        self.rounds: dict[int, list[int]] = {}

    def see(self, cohort: CohortWeights) -> None:
        for i in cohort.ids if cohort.usable else ():
            self.rounds.setdefault(i, []).append(cohort.round)

    def end(self) -> Iterator[Outcome]:
        self.case.opened(parts=True)
        models, middle = self.case.models, self.case.models.gain
        if middle is None:
            yield Skip(self.case.lacks("no round can be evaluated"))
            return
        self.fits = models.fits
        findings = list(self._all_clients(middle))
        yield from findings
        if not findings:
            findings = list(self._rising(middle))
            findings += self._without_advantage({f.client for f in findings})
            yield from findings
            yield from self._out_of_step({f.client for f in findings})
            if len(self.fits) > ROUNDS and self._mean_excess() < MISSES:
                yield Finding(
                    INFORMATION,
                    "no client's training fits its recorded data better than the others' does",
                    f"z of the recorded data is {self._mean_excess():.2g} a round, over {len(self.fits)} rounds; in sound "
                    "runs it is 2 to 8",
                    "whose data a client trains on cannot be confirmed",
                    "look at the partition and its order; noise on the updates hides it, too",
                    value=self._mean_excess(),
                )
        yield Clear(
            f"the own loss of {counted(len(models.gains), 'client')} falls by {middle:.3g} nats in the median"
            + (
                f"; z of the recorded data is {self._mean_excess():.2g} a round"
                if self.fits
                else ""
            )
        )

    # -- all clients

    @cached_property
    def excesses(self) -> dict[int, float]:
        """Round -> z of the recorded assignment."""
        return {r: excess(f.advantage, f.ids, seed=r) for r, f in self.fits.items()}

    def _mean_excess(self) -> float:
        return float(np.mean(list(self.excesses.values()))) if self.fits else 0.0

    @cached_property
    def relabelled(self) -> list[int]:
        """The clients for which a relabelling is sought: some of those whose loss rises."""
        gains = self.case.models.gains
        return [i for i, g in gains.items() if np.median(list(g.values())) < 0][:MAPS]

    @cached_property
    def ties(self) -> dict[int, tuple[float, float]]:
        """Client -> z and p of how its training ties its labels to its inputs."""
        return ties_of(self.case.models, list(self.case.models.gains)[:TIES])

    @cached_property
    def label_maps(self) -> dict[int, LabelMap]:
        """Client -> the relabelling that it has learnt."""
        maps = {i: find_label_map(self.case.models, i) for i in self.relabelled}
        return {i: label_map for i, label_map in maps.items() if label_map is not None}

    def _all_clients(self, middle: float) -> Iterator[Finding]:
        finding = self._redrawn()
        if finding is None:
            evidence = test_evidence(self.case.models)
            if evidence is not None and evidence.is_convincing:  # test_data says so
                return
            maps = [label_map.labels for label_map in self.label_maps.values()]
            is_relabelled = 2 * len(maps) > len(self.relabelled) and agree(maps)
            finding = None if is_relabelled else self._of_others()
        if finding is not None:
            yield finding
        else:
            yield from self._labels_of_all(middle)

    def _of_others(self) -> Finding | None:
        """Clients that fit each other's data better than their own, in both halves of the rounds."""
        fits = list(self.fits.values())
        if len(fits) < 2:
            return None
        first = find_assignment(fits)
        second = find_assignment(fits[1:] + fits[:1])
        rounds_of = {i: sum(i in f.ids for f in fits) for i in first}
        moved = {
            i: j
            for i, j in first.items()
            if i != j and second.get(i) == j and rounds_of[i] >= min(SEEN, len(fits))
        }
        is_closed = set(moved) == set(moved.values()) or 2 * len(moved) >= len(first)
        if len(moved) < 2 or not is_closed:
            return None
        members = list(first)
        advantage = mean_advantage(fits, members)
        usual = float(np.median([advantage[k, first[i]] for k, i in enumerate(members)]))
        margins = [
            advantage[k, moved[i]] - np.nan_to_num(advantage[k, i])
            for k, i in enumerate(members)
            if i in moved
        ]
        pairs = [(f.ids.index(i), i, f) for f in fits for i in f.ids if i in moved]
        there_gain = float(np.median([f.gain[k, moved[i]] for k, i, f in pairs]))
        own_gain = float(np.nanmedian([f.gain[k, i] for k, i, f in pairs]))
        if np.mean(margins) < MARGIN * usual or there_gain < max(LEAST, own_gain + LEAST):
            return None
        offsets = [j - i for i, j in moved.items()]
        offset = max(set(offsets), key=offsets.count)
        is_shift = offsets.count(offset) >= max(2, 0.8 * (len(offsets) - abs(offset)))
        examples = ", ".join(
            f"{self.case.client(i)} that of {self.case.client(j)}"
            for i, j in list(moved.items())[:4]
        )
        ending = f" and {len(moved) - 4} more" if len(moved) > 4 else ""
        return Finding(
            WARNING,
            f"clients fit the data of another client: client k fits the data of client k {'+' if offset > 0 else '-'} "
            f"{abs(offset)}"
            if is_shift and not self.case.names
            else f"clients fit the data of another client: {examples}{ending}",
            f"training lowers the loss there by {there_gain:.3g} nats in the median, and by {own_gain:.3g} on their recorded "
            f"data ({examples}{ending}); both halves of {len(fits)} rounds say so",
            "every number of such a client is one of another's data",
            "number clients and partition alike (one may count from 1, the other from 0)"
            if is_shift and abs(offset) == 1
            else "give the partition that was trained on, in the order of the clients",
            tuple(self.fits),
            value=there_gain - own_gain,
        )

    def _redrawn(self) -> Finding | None:
        """One round fits the recorded partition, and the others do not."""
        fitting = [r for r, z in self.excesses.items() if z >= FITS]
        rest = [z for r, z in self.excesses.items() if r not in fitting]
        if len(fitting) != 1 or len(rest) < ROUNDS or np.mean(rest) >= MISSES or max(rest) >= 2.5:
            return None
        return Finding(
            WARNING,
            "the clients train on another partition in every round",
            f"the recorded one fits round {fitting[0]} (z = {self.excesses[fitting[0]]:.1f}), and no other of "
            f"{len(self.fits)} (z = {np.mean(rest):.1f} in the mean)",
            "clients have no data of their own: all numbers by client mean nothing",
            "deal the examples once, with a seed of its own, before the first round",
            tuple(r for r in self.excesses if r not in fitting),
            value=float(np.mean(rest)),
        )

    def _labels_of_all(self, middle: float) -> Iterator[Finding]:
        from scipy.stats import binom

        models = self.case.models
        gains = [float(np.median(list(g.values()))) for g in models.gains.values()]
        rising = sum(g < 0 for g in gains)
        is_rising = len(gains) >= CLIENTS and binom.sf(rising - 1, len(gains), 0.5) <= LEVEL
        ties = [] if is_rising else [z for z, _ in self.ties.values()]
        is_untied = middle >= LEAST and len(ties) >= ROUNDS and float(np.median(ties)) < TIED
        if not is_rising and not is_untied:
            return
        maps = self.label_maps
        how = (
            f"the loss of {rising} of {counted(len(gains), 'client')} on their own data rises"
            if is_rising
            else f"training does not tie the labels to the inputs: z = {float(np.median(ties)):.1f} in the median client"
        )
        if 2 * len(maps) > len(self.relabelled):
            i, label_map = next(iter(maps.items()))
            yield Finding(
                WARNING,
                "the labels that clients train on are not the recorded ones",
                f"{how}; {self.case.client(i)} {label_map.describe()}; {len(maps)} of {len(self.relabelled)} clients",
                "losses and accuracies are those of other labels",
                "give all clients one map from classes to numbers, and the run its data with it",
                value=float(rising) if is_rising else float(np.median(ties)),
            )
        elif is_untied:
            yield Finding(
                INFORMATION if "correct" in self.case.slots else WARNING,
                "the clients' labels are out of step with their inputs",
                f"{how}, although it lowers the loss by {middle:.3g} nats",
                "the model learns which classes are frequent, and nothing of the inputs",
                "look for labels that are shuffled apart from their inputs, in the loader or on the way",
                value=float(np.median(ties)),
            )
        else:
            yield Finding(
                INFORMATION,
                "training raises the loss of most clients on their own data",
                f"{how}; no client's data and no relabelling explain it",
                "the updates make the model worse for those who send them",
                "look at the learning rate and at noise on the updates; or the recorded data are not what was trained on",
                value=float(np.median(gains)),
            )

    # -- one client

    def _rising(self, middle: float) -> Iterator[Finding]:
        gains = self.case.models.gains
        scale = spread((v for drops in gains.values() for v in drops.values()), middle)
        limit = max(EVERY * middle, SCALES * scale - middle)
        for i, losses in self.case.models.own_losses.items():
            if middle < LEAST or max(self._telling(i, losses).values()) >= -limit:
                continue
            extra_rounds = spread_rounds(
                [r for r in self.rounds.get(i, []) if r not in losses], FURTHER
            )
            extra_losses = {r: self.case.models.own_losses_of(i, r) for r in extra_rounds}
            losses = {
                **losses,
                **{r: both for r, both in extra_losses.items() if np.isfinite(both).all()},
            }
            drops, all_drops = self._telling(i, losses), _gains(losses)
            if max(drops.values()) >= -limit:
                continue
            always = max(all_drops.values()) < -limit
            drops = all_drops if always else drops
            rise = -sum(drops.values()) / len(drops)
            reason, is_tested = self._explain(i)
            certain = len(drops) > 1 and "correct" not in self.case.slots and (always or is_tested)
            yield Finding(
                WARNING if certain else INFORMATION,
                f"training raises the loss of {self.case.client(i)} on its own data",
                f"by {rise:.3g} nats in {len(drops)} of its rounds; over all clients it falls by {middle:.3g} in "
                f"the median{reason}",
                "it learns something other than its recorded data, and this enters the mean",
                "compare its data and labels with the partition; look for a wrong sign, noise, or an attack",
                tuple(sorted(drops)),
                client=i,
                value=rise,
            )

    def _telling(self, i: int, losses: Mapping[int, tuple[float, float]]) -> dict[int, float]:
        """By how much a client's training lowers its loss, in the rounds whose received model knows more than the shares of
        its classes; in all, where fewer than two are such."""
        entropy = self.case.models.entropy(i)
        informative = {r: both for r, both in losses.items() if both[0] < entropy}
        return _gains(informative if len(informative) > 1 else losses)

    def _without_advantage(self, skip: set[int | None]) -> Iterator[Finding]:
        """Clients that fit their own data no better than the others do."""
        advantages: dict[int, list[float]] = {}
        for fit in self.fits.values():
            for i, value in fit.on_own_data.items():
                advantages.setdefault(i, []).append(value)
        advantages = {i: values for i, values in advantages.items() if len(values) >= ROUNDS}
        self.tests += len(advantages)
        if len(advantages) < CLIENTS:
            return
        from scipy.stats import binom

        means = {i: float(np.mean(values)) for i, values in advantages.items()}
        centre = float(np.median(list(means.values())))
        for i, values in advantages.items():
            rest = [v for k, vs in advantages.items() if k != i for v in vs]
            share = (sum(v <= 0 for v in rest) + 1) / (len(rest) + 2)
            missing = sum(v <= 0 for v in values)
            p = float(binom.sf(missing - 1, len(values), share)) if missing else 1.0
            is_low = means[i] < min(0.0, centre - WIDE * spread(means.values()))
            if i in skip or not is_low or p > LEVEL or centre <= 0:
                continue
            reason, _ = self._explain(i)
            yield Finding(
                INFORMATION if "correct" in self.case.slots else WARNING,
                f"the training of {self.case.client(i)} does not fit its own data",
                f"in {missing} of {counted(len(values), 'round')} it lowers their loss no more than other clients' training "
                f"does, by {-means[i]:.3g} nats less in the mean; other clients have an advantage of {centre:.3g} on theirs"
                f"{reason}",
                "it learns something other than its recorded data, and this enters the mean",
                "compare its data, labels and inputs with the partition and with the other clients'",
                tuple(r for r, f in self.fits.items() if i in f.on_own_data),
                client=i,
                value=means[i],
                p=p,
            )

    def _out_of_step(self, skip: set[int | None]) -> Iterator[Finding]:
        """Clients whose training unties their labels from their inputs, where that of the others ties them."""
        ties = self.ties
        self.tests += len(ties)
        untied = sum(z < 0 for z, _ in ties.values())
        if len(ties) < CLIENTS or float(np.median([z for z, _ in ties.values()])) < TIED:
            return
        if untied > max(1, len(ties) // 10):  # training that swings unties labels at many clients
            return
        for i, (z, p) in ties.items():
            if i not in skip and p <= LEVEL:
                yield Finding(
                    INFORMATION if "correct" in self.case.slots else WARNING,
                    f"the labels of {self.case.client(i)} are out of step with its inputs",
                    f"its training unties them, z = {z:.1f} among permutations of its labels; in the median client z = "
                    f"{float(np.median([z for z, _ in ties.values()])):.1f}",
                    "it learns which of its classes are frequent, and its inputs' labels are unlearnt",
                    "look for labels that are shuffled apart from their inputs, or wrong",
                    client=i,
                    value=z,
                    p=p,
                )

    def _explain(self, i: int) -> tuple[str, bool]:
        """What a client seems to train on instead, in words; and whether the labels were shown to be out of step by a test."""
        models = self.case.models
        fits = [f for f in self.fits.values() if i in f.ids]
        if fits and len(fits[0].ids) >= CLIENTS:
            usual = float(
                np.median([v for f in self.fits.values() for v in f.on_own_data.values()])
            )
            row = np.nan_to_num(mean_advantage(fits, [i])[0], nan=-np.inf)
            row[i] = -np.inf
            j = int(row.argmax())
            lowers = float(np.mean([f.gain[f.ids.index(i), j] for f in fits]))
            if row[j] >= max(usual / 2, LEAST / 10) and row[j] > 0 and lowers > 0:
                return f"; it fits the data of {self.case.client(j)} as others fit their own", False
        try:
            if label_map := find_label_map(models, i):
                return f"; {self.case.client(i)} {label_map.describe()}", False
            z, p = ties_of(models, [i]).get(i, (0.0, 1.0))
        except FldiagError:
            return "", False
        if p > LEVEL:
            return "", False
        return f"; its labels are out of step with its inputs (permutation test, z = {z:.1f})", True


def _gains(losses: Mapping[int, tuple[float, float]]) -> dict[int, float]:
    return {r: before - after for r, (before, after) in losses.items()}


def mean_advantage(fits: Sequence[RoundFit], ids: Sequence[int]) -> np.ndarray:
    """[clients, N], over the rounds in which each took part."""
    rows = [[f.advantage[f.ids.index(i)] for f in fits if i in f.ids] for i in ids]
    return np.array([np.mean(advantages, axis=0) for advantages in rows])


def find_assignment(fits: Sequence[RoundFit]) -> dict[int, int]:
    """Client -> whose data it fits best if each fits another's, from every second round."""
    from scipy.optimize import linear_sum_assignment

    half = fits[::2]
    ids = sorted({i for f in half for i in f.ids})
    matrix = mean_advantage(half, ids)
    usable = np.flatnonzero(np.isfinite(matrix).all(0))
    rows, columns = linear_sum_assignment(-matrix[:, usable])
    return {ids[k]: int(usable[j]) for k, j in zip(rows, columns, strict=True)}
