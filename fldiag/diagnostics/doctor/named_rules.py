"""Rules of aggregation that a run can name, each checked as what it says it is.

Krum and Multi-Krum: Blanchard et al., NeurIPS 2017. Trimmed mean and median: Yin et al., ICML 2018. Geometric median: Pillutla
et al., IEEE TSP 2022 (RFA). FedNova: Wang et al., NeurIPS 2020. FedBuff: Nguyen et al., AISTATS 2022.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from fldiag import registry
from fldiag.diagnostics.doctor.case import MEANS, Case, CohortWeights
from fldiag.diagnostics.doctor.statistics import coordinates

if TYPE_CHECKING:
    from torch import Tensor

#: The part of a server's update that a rule may leave unexplained.
RESIDUAL = 1e-3


class Mixture:
    """The server's update u = w' - w of one round against its clients' d_k = w_k - w.

    ``means``: name -> weights [K], the first is the one that the run names; ``past``: global models of earlier rounds, where
    they are needed.
    """

    def __init__(
        self,
        cohort: CohortWeights,
        means: dict[str, np.ndarray],
        case: Case,
        past: Sequence[Tensor] = (),
    ):
        self.cohort, self.means, self.case, self.past = cohort, means, case, past
        self.k, self.gram = len(cohort.ids), cohort.gram
        self.u = float(np.sqrt(self.gram[self.k, self.k]))
        self.main = next(iter(means.values()))

    @cached_property
    def coefficients(self) -> np.ndarray:
        """Of the clients' updates [K], by least squares."""
        g, k = self.gram, self.k
        return np.linalg.lstsq(g[:k, :k], g[:k, k], rcond=1e-10)[0]

    def residual(self, c: np.ndarray, total: float = 0.0, gram: np.ndarray | None = None) -> float:
        """||u - sum c_k d_k - total w|| / ||u||, 0 where it is rounding."""
        g = self.gram if gram is None else gram
        x = np.concatenate([c, [-1.0, total]])
        left = float(np.sqrt(max(x @ g @ x, 0.0)))
        sizes = np.sqrt(np.diag(g))
        largest = sizes[-1] + sizes[:-1].max()  # no weights are longer
        return (
            0.0
            if left <= 4 * self.cohort.eps * largest
            else left / max(float(sizes[self.k]), 1e-300)
        )


#: By so much a sum over the clients may differ from the one that a rule demands.
SUM = 1e-2
#: Coordinates that are looked at one by one.
COORDINATES = 20_000
#: Names that say nothing of the server's rule.
UNNAMED = ("", "own", "foreign", "none", "unknown")
#: Names that say that layers stay with the clients.
PERSONAL = ("fedbn", "fedper", "fedrep", "fedbabu", "lgfedavg", "fedrod", "fedpac", "silobn")
#: Methods whose server takes the plain mean (SCAFFOLD: Karimireddy et al. 2020, algorithm 1).
PLAIN_MEANS = ("scaffold",)
#: Methods whose server takes the mean, or a step that depends on more than a round's weights.
OTHERS = ("ditto", "pfedme", "apfl", "feddecorr", "fedavgft", "scaffold", "fedopt", "fedasync")


@dataclass(frozen=True)
class Verdict:
    """Whether a round follows the rule that the run names (None: that cannot be said), the part of the update that the rule
    leaves over, and what was looked at."""

    holds: bool | None
    residual: float
    description: str


def plain_name(method: str) -> str:
    """A method's name in lower case, without what stands between its letters.

    >>> plain_name("Fed-Trimmed_Avg")
    'fedtrimmedavg'
    """
    return re.sub(r"[^a-z0-9]", "", method.lower())


@dataclass(frozen=True)
class NamedRule:
    """A rule and how one round is checked. ``title``: what people call it."""

    title: str
    check: Callable[[Mixture], Verdict]


def find_rule(method: str) -> NamedRule | None:
    """The rule that a method's name means: the longest that the name contains."""
    name = plain_name(method)
    keys = [key for key in RULES if key in name and (key not in EXACT or key == name)]
    return RULES[max(keys, key=len)] if keys else None


def is_known(method: str) -> bool:
    """Whether the name says what the server does, or says nothing at all."""
    name = re.sub("uniform|unweighted|weighted", "", plain_name(method))
    names = {plain_name(n) for n in (*MEANS, *registry.method.names())}
    return (
        name in {*UNNAMED, *PERSONAL, *OTHERS, *ADAPTIVE, *names}
        or "fedavgm" in name
        or find_rule(method) is not None
    )


# -- selections


def krum_choices(fit: Mixture, size: int) -> dict[int, list[tuple[int, ...]]]:
    """Number of neighbours that are counted -> the ``size`` clients of least score: by distance or by its square, with the
    buffers and without."""
    import torch

    k = fit.k
    inner = fit.gram[:k, :k]
    squares = [np.diag(inner)[:, None] + np.diag(inner)[None] - 2 * inner]
    buffers = [
        b.reshape(k, -1).double()
        for b in fit.cohort.client_states.values()
        if b.is_floating_point()
    ]
    if buffers:
        extra = torch.cdist(rows := torch.cat(buffers, 1), rows).square().numpy()
        squares.append(squares[0] + extra)
    choices: dict[int, list[tuple[int, ...]]] = {}
    for square in squares:
        for distance in (np.maximum(square, 0), np.sqrt(np.maximum(square, 0))):
            nearest = np.sort(distance, axis=1)[:, 1:]
            for count in range(1, k):
                scores = nearest[:, :count].sum(1)
                best = tuple(sorted(np.argsort(scores, kind="stable")[:size].tolist()))
                choices.setdefault(count, []).append(best)
    return choices


def selection(fit: Mixture) -> tuple[int, ...] | None:
    """The rows of which the aggregate is the mean, plain or by examples; None where it is no such mean."""
    c = fit.coefficients
    if fit.residual(c) > RESIDUAL:
        return None
    rows = tuple(np.flatnonzero(np.abs(c) > 1e-2 * np.abs(c).max()).tolist())
    for p in (np.ones(fit.k), *fit.means.values()):
        part = np.zeros(fit.k)
        part[list(rows)] = p[list(rows)]
        if part.sum() > 0 and np.abs(c - part / part.sum()).max() < SUM * c.max():
            return rows
    return None


def neighbours_of_krum(fit: Mixture, rows: Sequence[int]) -> set[int]:
    """The numbers of neighbours for which Krum selects these rows."""
    choices = krum_choices(fit, len(rows))
    return {count for count, bests in choices.items() if tuple(sorted(rows)) in bests}


def _krum(fit: Mixture) -> Verdict:
    if fit.k < 3:
        return Verdict(None, 0.0, "Krum takes at least 3 clients")
    rows = selection(fit)
    if rows is None:
        return Verdict(False, fit.residual(fit.coefficients), "it is no mean of a selection")
    ids = [fit.cohort.ids[j] for j in rows]
    text = f"the mean of {len(rows)} of {fit.k} clients ({', '.join(map(str, ids[:8]))})"
    if len(rows) == fit.k:
        return Verdict(False, 0.0, "it is the mean of all clients")
    counts = neighbours_of_krum(fit, rows)
    if counts:
        near = min(counts) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
        return Verdict(True, 0.0, f"{text}, which have the least scores with {near} neighbours")
    return Verdict(False, 0.0, f"{text}, which have not the least scores for any number of faulty")


# -- coordinate by coordinate


def _sampled(fit: Mixture) -> tuple[Tensor, Tensor, float]:
    """The clients' weights [K, n] and the aggregate's [n] at some coordinates, and the length of the server's step there."""
    size = fit.cohort.aggregated.numel()
    w, rows, new = fit.cohort.part(coordinates(size, COORDINATES))
    return rows, new, float((new - w).norm())


def _missed(fit: Mixture, new: Tensor, candidate: Tensor, length: float) -> float:
    """||new - candidate|| / ||step||, 0 where it is rounding."""
    left = float((new - candidate).norm())
    return 0.0 if left <= 4 * fit.cohort.eps * float(new.norm()) else left / max(length, 1e-300)


def coordinate_rules(fit: Mixture) -> list[tuple[str, str, float]]:
    """(kind, description, residual) of the median and of every trimmed mean."""
    rows, new, length = _sampled(fit)
    ordered, k = rows.sort(0).values, fit.k
    middles = {
        "median": (ordered[(k - 1) // 2] + ordered[k // 2]) / 2,
        "lower median": ordered[(k - 1) // 2],
        "upper median": ordered[k // 2],
    }
    rules = [
        ("median", f"every coordinate is the clients' {name}", _missed(fit, new, value, length))
        for name, value in middles.items()
    ]
    for cut in range(1, (k - 1) // 2 + 1):
        left = _missed(fit, new, ordered[cut : k - cut].mean(0), length)
        text = f"every coordinate is the mean without the {cut} least and the {cut} largest of {k}"
        rules.append(("trimmed", text, left))
    return rules


def _coordinate(kind: str) -> Callable[[Mixture], Verdict]:
    def check(fit: Mixture) -> Verdict:
        if fit.k < 3:
            return Verdict(None, 0.0, "it is the mean where there are fewer than 3 clients")
        one = min((rule for rule in coordinate_rules(fit) if rule[0] == kind), key=lambda r: r[2])
        return Verdict(one[2] <= RESIDUAL, one[2], one[1])

    return check


# -- weights that depend on the updates


def geometric_iterate(fit: Mixture, most: int = 200) -> int | None:
    """After how many of Weiszfeld's iterations, from the mean, the aggregate stands; None for none."""
    k, gram = fit.k, fit.gram
    inner, cross, square = gram[:k, :k], gram[:k, k], gram[k, k]
    distances = np.sqrt(np.maximum(np.diag(inner) - 2 * cross + square, 1e-300))
    for p in fit.means.values():  # a fixed point
        c = p / distances
        if np.all(distances > 0) and fit.residual(c / c.sum()) <= RESIDUAL:
            return most
    for p in fit.means.values():
        c = np.array(p)
        for step in range(1, most):
            reach = np.diag(inner) - 2 * inner @ c + c @ inner @ c
            c = p / np.sqrt(np.maximum(reach, 1e-12 * max(np.diag(inner).max(), 1e-300)))
            c = c / c.sum()
            if fit.residual(c) <= RESIDUAL:
                return step
    return None


def _geometric(fit: Mixture) -> Verdict:
    if fit.k < 3:
        return Verdict(None, 0.0, "a median takes at least 3 clients")
    step = geometric_iterate(fit)
    if step is None:
        return Verdict(False, fit.residual(fit.main), "no iterate of Weiszfeld's is the aggregate")
    return Verdict(True, 0.0, f"Weiszfeld's iteration stands there after {step} steps or fewer")


def _fednova(fit: Mixture) -> Verdict:
    """u = tau_eff sum p_k d_k / tau_k with tau_eff = sum p_k tau_k: the coefficients have sum p_k^2 / c_k = 1."""
    c = fit.coefficients
    left = fit.residual(c)
    if left > RESIDUAL or (c <= 0).any():
        return Verdict(False, left, "the clients' coefficients are not positive")
    sums = [float((p**2 / c).sum()) for p in fit.means.values()]
    best = min(sums, key=lambda s: abs(s - 1))
    if fit.residual(fit.main) <= RESIDUAL:
        n = np.array([fit.case.sizes.get(i, 0) for i in fit.cohort.ids])
        same = n.max() < 2 * max(n.min(), 1)
        text = "it is the mean, which FedNova's is only where all clients take equally many steps"
        return Verdict(True if same else None, 0.0, text)
    text = f"the coefficients c have sum p^2 / c = {best:.4g}, which is 1 for FedNova"
    return Verdict(abs(best - 1) <= SUM, left, text)


def _reweighed(fit: Mixture) -> Verdict:
    """Any weights of one sign."""
    left = fit.residual(fit.coefficients)
    holds = left <= RESIDUAL and bool((fit.coefficients >= -SUM * np.abs(fit.coefficients)).all())
    return Verdict(holds, left, "a combination of the clients' updates with weights above 0")


def _buffered(fit: Mixture) -> Verdict:
    """Least squares on the clients and on the global models that they may have started from."""
    received, _, _ = fit.cohort.part()
    past = [w.double() - received for w in fit.past]
    _, left = fit.cohort.least_squares(past)
    text = f"updates of the clients from the last {len(past)} global models"
    return Verdict(True if left <= RESIDUAL else None, left, text)


#: What a name contains -> its rule; those in ``EXACT`` are the whole name.
RULES = {
    "krum": NamedRule("Krum", _krum),
    "multikrum": NamedRule("Multi-Krum", _krum),
    "trimmedavg": NamedRule("the trimmed mean", _coordinate("trimmed")),
    "trimmedmean": NamedRule("the trimmed mean", _coordinate("trimmed")),
    "trimmean": NamedRule("the trimmed mean", _coordinate("trimmed")),
    "median": NamedRule("the coordinate-wise median", _coordinate("median")),
    "geometricmedian": NamedRule("the geometric median", _geometric),
    "geomedian": NamedRule("the geometric median", _geometric),
    "geomed": NamedRule("the geometric median", _geometric),
    "rfa": NamedRule("the geometric median", _geometric),
    "fednova": NamedRule("FedNova", _fednova),
    "qfedavg": NamedRule("q-FFL", _reweighed),
    "qffl": NamedRule("q-FFL", _reweighed),
    "afl": NamedRule("AFL", _reweighed),
    "fedbuff": NamedRule("FedBuff", _buffered),
}
EXACT = ("rfa", "afl", "qffl", "median")
RULES["fedmedian"] = RULES["coordinatemedian"] = RULES["coordinatewisemedian"] = RULES["median"]
#: Methods that scale every coordinate of the mean update.
ADAPTIVE = ("fedadam", "fedyogi", "fedadagrad", "fedlamb", "fedams")
