"""Which way clients go: updates of the wrong sign, of noise, or in a coarse code."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from fldiag.diagnostics.doctor.case import Case, CohortWeights
from fldiag.diagnostics.doctor.findings import (
    INFORMATION,
    WARNING,
    Check,
    Clear,
    Finding,
    Outcome,
    Skip,
)
from fldiag.diagnostics.doctor.starts import ASYNCHRONOUS
from fldiag.diagnostics.doctor.statistics import coordinates
from fldiag.errors import FldiagError, counted

#: Coordinates that are looked at one by one, and numbers of all clients' updates that are remembered.
MOST, LEAST, MEMORY = 20_000, 500, 10_000_000
#: Share of the coordinates that others move least: there noise shows.
QUIET = 0.1
#: Up to how many times the others' median length an update is of usual length.
USUAL = 1.6
#: Mean cosine of the others from which on a round tells directions.
AGREEING = 0.1


class UpdateDirections(Check):
    """Clients whose updates have the wrong sign, are random, or carry noise.

    Rule, in rounds of at least 4 clients.
    Wrong sign: let s be the mean cosine of a client's update with the others', S the median of these means among the others.
    In the rounds with S of at least 0.1, at least three, s is below -0.7 S in 80 %, and at most -0.1 in the median.
    Noise: on the tenth of the coordinates that the others move least, its update is at least 1.5 times as long as theirs
    (relative to the whole), and its correlation with its own update before is at most 2 standard errors 1 / sqrt(n) (or it is
    twice as long, and the correlation a quarter of theirs), in the median of three or more pairs; the others' correlation is
    at least 0.3 and 6 standard errors. Random: the length there is 0.8 times what white noise has, too.
    A client that starts elsewhere is no case of the first, and one that goes another way with updates of up to 1.6 times the
    others' length starts where it should.
    To disagree alone is no fault: clients with other classes go other ways.
    """

    name, title = "directions", "Updates go where the others' go"

    def __init__(self, case: Case):
        super().__init__(case)
        case.goes_another_way = self.accuses
        self.cosines = defaultdict[int, list[tuple[int, float, float]]](list)
        self.lengths = defaultdict[int, list[float]](list)  # as multiples of the others' median
        self.noises = defaultdict[int, list[tuple[int, np.ndarray]]](list)
        self.before: dict[int, np.ndarray] = {}
        self.rounds = 0

    def see(self, cohort: CohortWeights) -> None:
        if not cohort.usable:
            return
        moving = [
            j
            for j, v in enumerate(cohort.norms)
            if v > 30 * cohort.eps * np.sqrt(cohort.gram[-1, -1])
        ]
        if len(moving) < 4:
            return
        self.rounds += 1
        ids = [cohort.ids[j] for j in moving]
        norms = cohort.norms[moving]
        cosine = cohort.gram[np.ix_(moving, moving)] / np.outer(norms, norms)
        k = len(ids)
        sums = cosine.sum(1) - 1
        for j, i in enumerate(ids):
            other_cosines = np.delete((sums - cosine[:, j]) / (k - 2), j)
            self.lengths[i].append(float(norms[j] / np.median(np.delete(norms, j))))
            self.cosines[i].append(
                (cohort.round, sums[j] / (k - 1), float(np.median(other_cosines)))
            )
        most = int(np.clip(MEMORY // max(self.case.total, 1), LEAST, MOST))
        sample = coordinates(cohort.aggregated.numel(), most)
        d = cohort.updates(sample)[moving].numpy()
        self._quiet(cohort.round, ids, d / norms[:, None])
        for i, row in zip(ids, d, strict=True):
            self.before[i] = row

    def _quiet(self, r: int, ids: list[int], d: np.ndarray) -> None:
        """What clients do where the others hardly go: length, and correlation with their last update."""
        size, order = np.abs(d), np.sort(np.abs(d), axis=0)
        k = len(ids)
        white = np.sqrt((d**2).mean(1))
        rows = np.full((k, 3), np.nan)
        for j, i in enumerate(ids):
            # the median of the others, of all clients' sorted values without its own
            low, high = order[(k - 1) // 2 - (k % 2 == 1)], order[k // 2]
            middle = np.where(size[j] <= low, high, low)
            alive = middle > 0
            if alive.sum() < LEAST // 5:
                continue
            part = alive & (middle <= np.quantile(middle[alive], QUIET))
            length = np.sqrt((d[:, part] ** 2).mean(1)) / white
            rows[j, 0] = length[j] / max(float(np.median(np.delete(length, j))), 1e-12)
            rows[j, 2] = length[j]
            if i in self.before:
                x, y = d[j, part], self.before[i][part]
                rows[j, 1] = x @ y / max(np.linalg.norm(x) * np.linalg.norm(y), 1e-300)
                self.noises[i].append((r, np.array([*rows[j], part.sum(), 0.0])))
        usual = [rows[j, 1] for j in range(k) if not np.isnan(rows[j, 1])]
        for i in ids:
            if self.noises[i] and self.noises[i][-1][0] == r:
                self.noises[i][-1][1][4] = np.median(usual)

    def end(self) -> Iterator[Outcome]:
        if not self.rounds:
            yield Skip(self.case.lacks("no round has 4 clients whose weights move"))
            return
        for i in self.cosines:
            if i not in self.case.misplaced:
                yield from self._wrong_sign(i)
        for i, pairs in self.noises.items():
            yield from self._noise(i, pairs)
        yield Clear(f"{counted(len(self.cosines), 'client')} in {counted(self.rounds, 'round')}")

    def accuses(self, client: int) -> bool:
        """Whether a client's updates, of usual length, have the wrong sign, or carry noise: no other start explains that."""
        if next(self._noise(client, self.noises[client]), None) is not None:
            return True
        is_usual = bool(np.median(self.lengths[client] or [0.0]) <= USUAL)
        finding = next(self._wrong_sign(client), None)
        return is_usual and finding is not None and finding.severity == WARNING

    def _wrong_sign(self, i: int) -> Iterator[Finding]:
        telling = [row for row in self.cosines[i] if row[2] >= AGREEING]
        wrong = [r for r, s, usual in telling if s < -0.7 * usual]
        if len(telling) < 3 or len(wrong) < 0.8 * len(telling):
            return
        s, usual = (float(np.median([row[c] for row in telling])) for c in (1, 2))
        # an update of an old model may look like that, and one for classes that the others lack
        is_sound = any(word in self.case.method.lower() for word in ASYNCHRONOUS) or self._learns(i)
        if s <= -AGREEING:
            yield Finding(
                INFORMATION if is_sound else WARNING,
                f"the updates of {self.case.client(i)} have the wrong sign",
                f"their mean cosine with the others' is {s:.2f}, and that of the others {usual:.2f}, in {len(wrong)} of "
                f"{counted(len(telling), 'round')} in which clients agree",
                "it undoes what the others learn",
                "look for a sign in its loss, its optimiser or its upload, for other labels, or an attack",
                tuple(wrong),
                client=i,
                value=s,
            )

    def _learns(self, i: int) -> bool:
        """Whether training lowers the client's own loss, which a wrong sign would raise."""
        try:
            gains = self.case.models.gains.get(i, {})
        except FldiagError:  # model or data are not known
            return False
        return bool(gains) and float(np.median(list(gains.values()))) > 0

    def _noise(self, i: int, pairs: list[tuple[int, np.ndarray]]) -> Iterator[Finding]:
        if len(pairs) < 3:
            return
        longer, correlation, length, n, usual = np.median(
            np.stack([row for _, row in pairs]), axis=0
        )
        error = 1 / np.sqrt(n)
        is_noise = abs(correlation) <= 2 * error or (longer >= 2 and abs(correlation) <= usual / 4)
        if longer < 1.5 or not is_noise or usual < max(0.3, 6 * error):
            return
        is_random = length >= 0.8
        yield Finding(
            WARNING,
            f"the updates of {self.case.client(i)} are random"
            if is_random
            else f"the updates of {self.case.client(i)} carry noise",
            f"where the others hardly go, they are {longer:.1f} times as long as theirs, and have a correlation of "
            f"{correlation:.2f} with its own of the round before (others: {usual:.2f}; chance: {error:.2f})",
            "the mean gets its noise, and nothing else from it"
            if is_random
            else "the mean gets its noise",
            "look at what it sends; noise for privacy should be the same at all clients",
            tuple(r for r, _ in pairs),
            client=i,
            value=float(correlation),
        )


class Uploads(Check):
    """Uploads in a coarse code: half precision, a grid of few values, the largest entries only, clipped lengths.

    Rule, of all clients of a round (of every fifth that has at least two, the first one included): their weights, or their
    updates as far as the rounding of the weights shows them, are numbers that fp16 or bf16 holds; the updates of a tensor of at
    least 500 entries take at most 256 values (3: signs); at least half of the entries that some client changes are exactly 0; a
    third of the clients, at least 3, have updates of one length (to 1e-5), and none is longer. All of it is information.
    """

    name, title = "uploads", "Uploads are full numbers"

    def __init__(self, case: Case):
        super().__init__(case)
        self.codes = defaultdict[str, list[int]](list)
        self.rounds: list[int] = []
        self.eligible = 0

    def see(self, cohort: CohortWeights) -> None:
        if not cohort.usable or len(cohort.ids) < 2 or not cohort.norms.all():
            return
        self.eligible += 1
        if self.eligible % 5 != 1:
            return
        self.rounds.append(cohort.round)
        for code in codes(cohort):
            self.codes[code].append(cohort.round)

    def end(self) -> Iterator[Outcome]:
        if not self.rounds:
            yield Skip(self.case.lacks("in no round two clients, and all, change their weights"))
            return
        for code, rounds in self.codes.items():
            yield Finding(
                INFORMATION,
                f"uploads are {code}",
                f"of all clients, in {len(rounds)} of {counted(len(self.rounds), 'round')}",
                "what the server gets is not all that clients learnt",
                "nothing to do if this is intended",
                tuple(rounds),
            )
        yield Clear(f"no coarse code in {counted(len(self.rounds), 'round')}")


def codes(cohort: CohortWeights) -> Iterator[str]:
    """In which codes all clients of a round answer."""
    import torch

    assert cohort.clients is not None and cohort.received is not None
    values = grid(cohort)
    norms = np.sort(cohort.norms)
    same = int((norms >= norms[-1] * (1 - 1e-5)).sum())
    longest = np.argsort(cohort.norms)[-2:]
    is_copy = cohort.gram[tuple(longest)] > (1 - 1e-9) * norms[-1] * norms[-2]
    if same >= max(3, len(norms) / 3) and not is_copy and not 0 < values <= 3:
        yield "clipped to one length"
    sample = coordinates(cohort.aggregated.numel(), MOST)
    rows, w = cohort.clients[:, sample], cohort.origins[:, sample]
    if rows.dtype not in (torch.float32, torch.float64):
        return
    d = rows.double() - w.double()
    slack = 4 * torch.finfo(torch.float32).eps * torch.maximum(rows.abs(), w.abs()).double()
    for coarse, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        if torch.equal(rows.to(coarse).to(rows.dtype), rows):
            yield f"in half precision ({name})"
            break
        off = (d.to(coarse).double() - d).abs()
        step = torch.finfo(coarse).eps * d.abs()  # what rounding d would show
        if bool((off <= slack).all()) and float((step > 8 * slack).double().mean()) > 0.3:
            yield f"updates in half precision ({name})"
            break
    moved = (d != 0).any(0)
    if bool(((d[:, moved] == 0).double().mean(1) >= 0.5).all()):
        yield "sparse: most entries of an update are 0"
    elif values:
        yield "signs" if values <= 3 else "on a grid of at most 256 values a tensor"


def grid(cohort: CohortWeights) -> int:
    """How many values the updates of the large tensors take at most; 0: too many for a grid."""
    import torch

    assert cohort.clients is not None and cohort.received is not None
    most = 0
    for name, part in cohort.slices.items():
        n = cohort.weights[name].numel()
        if n < 500:
            continue
        for row, w in zip(cohort.clients[:4, part], cohort.origins[:4, part], strict=True):
            d = (row.double() - w.double()).sort().values
            gap = (
                16 * torch.finfo(torch.float32).eps * float(torch.maximum(row.abs(), w.abs()).max())
            )
            values = 1 + int((d.diff() > gap).sum())
            if values > 256 or values > n / 3 or float(d[-1] - d[0]) < 1000 * gap:
                return 0
            most = max(most, values)
    return most
