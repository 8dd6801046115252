"""Of what the server made the new model: the mean by examples, another mean, a server step, or something broken."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fldiag.diagnostics.doctor.case import UNSAMPLED, Case, CohortWeights
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
from fldiag.diagnostics.doctor.named_rules import (
    ADAPTIVE,
    PERSONAL,
    PLAIN_MEANS,
    RESIDUAL,
    Mixture,
    Verdict,
    coordinate_rules,
    find_rule,
    geometric_iterate,
    is_known,
    neighbours_of_krum,
    plain_name,
    selection,
)
from fldiag.diagnostics.doctor.server_step import Memory, find_noise
from fldiag.errors import counted

if TYPE_CHECKING:
    from torch import Tensor

#: Global models of earlier rounds that are kept where a rule may need them.
PAST = 10
#: A rule that chance fulfils in all rounds with at most this probability is recognised without its name.
CHANCE = 1e-3
#: Up to how many times as many examples clients have whose plain mean is as good as that by examples.
ALIKE = 1.1

BROKEN = "the global model is not what its clients learnt"
SHRINKS = "the model shrinks or grows by that factor in every round, whatever the clients learn"
#: Kind of rule -> (what, consequence, remedy). Those of ``STEPS`` are server steps, which a method may mean to take.
KINDS = {
    "uniform": (
        "the aggregate is the plain mean of the clients, which differ in size",
        "clients with few examples count as much as those with many: training minimises another global loss",
        "weigh clients by their examples, or state that the plain mean is intended",
    ),
    "n": (
        "the aggregate weighs clients by their examples, where the run says another rule",
        "the run is not what its description says",
        "correct the rule, or the description",
    ),
    "batches": (
        "the aggregate weighs clients by their full minibatches, where the run says another rule",
        "clients that fill no minibatch do not count",
        "correct the rule, or the description",
    ),
    "unchanged": (
        "the global model did not change, although its clients did",
        "the round's training is lost",
        "assign the aggregate to the global model before the next round",
    ),
    "single": (
        "the aggregate is the model of one client",
        "the other clients' training is lost",
        "average over all clients of the round; a loop variable that survives the loop is the usual cause",
    ),
    "left out": (
        "clients are left out of the mean",
        "their training is lost, and the others count more",
        "let the sum run over all clients of the round",
    ),
    "permuted": (
        "clients are weighted by each other's sizes",
        "large clients may count as little as small ones",
        "keep models and sizes in one order (sort both by client)",
    ),
    "sum": (
        "the aggregate adds the clients' updates, and does not average them",
        "the step is as many times too long as there are clients, and training may diverge",
        "divide by the sum of the weights",
    ),
    "of all": (
        "the updates are divided by all clients, not by those of the round",
        "the step is too short by the share of clients that were sampled",
        "divide by the sum of the round's weights",
    ),
    "sign": (
        "the server moves against its clients",
        "the loss rises",
        "add the mean update, do not subtract it",
    ),
    "total": (
        "the clients' weights in the aggregate do not sum to 1",
        SHRINKS,
        "divide by the sum of the weights",
    ),
    "layers": (
        "some layers are not the mean of the clients",
        "these layers do not learn from all clients",
        "average every tensor of the state_dict, unless a layer is meant to stay with the clients",
    ),
    "own weights": (
        "the aggregate is a mean of the clients with weights that are neither equal nor by examples",
        "it is not known which loss is minimised",
        "check the weights, and that the given "
        "partition is the one that was trained on; or state which rule is intended",
    ),
    "scaled": (
        "the server goes further or less far than the mean of the clients",
        "a step of its own length is a server learning rate",
        "nothing to do if a server learning rate is intended; otherwise correct the divisor",
    ),
    "momentum": (
        "the server's step depends on earlier rounds, as with momentum",
        "results are those of a server optimiser",
        "nothing to do if this is intended; otherwise leave out the server's state",
    ),
    "adaptive": (
        "the server scales every coordinate of the mean update, as FedAdam does",
        "results are those of a server optimiser",
        "nothing to do if this is intended",
    ),
    "median": (
        "the aggregate is the coordinate-wise median of the clients",
        "it is not the mean: skewed clients are ignored",
        "nothing to do if a robust rule is intended",
    ),
    "trimmed": (
        "the aggregate is a coordinate-wise trimmed mean of the clients",
        "it is not the mean: skewed clients are ignored",
        "nothing to do if a robust rule is intended",
    ),
    "geometric": (
        "the aggregate is the geometric median of the clients",
        "it is not the mean: clients that differ count less",
        "nothing to do if a robust rule is intended",
    ),
    "krum": (
        "the aggregate is the mean of the clients that Krum selects",
        "it is not the mean: skewed clients are ignored",
        "nothing to do if a robust rule is intended",
    ),
    "late": (
        "the aggregate is the mean of the clients of the round before",
        "every round's training arrives a round late, or files are numbered so",
        "aggregate the round's own clients; if the global files hold what clients received: "
        "number the files of global models one lower",
    ),
    "rounded": (
        "the aggregate is the clients' mean, rounded to half precision",
        "small updates are lost in the rounding",
        "average in single precision, and round only what is sent",
    ),
    "compressed": (
        "the aggregate is the mean of the clients' uploads, which were rounded",
        "what clients learn below the rounding is lost",
        "nothing to do if uploads are compressed on purpose",
    ),
    "noised": (
        "the aggregate is the clients' mean with noise",
        "the noise of all rounds adds up",
        "nothing to do if it is added for privacy",
    ),
    "unknown": (
        "the aggregate is neither a mean of the clients nor a known server step",
        BROKEN,
        "compare the server's code with its method, or say in the run's method which one it is",
    ),
}
STEPS = ("scaled", "momentum", "adaptive", "median", "trimmed", "geometric", "krum")
#: Kinds that average what clients sent in another form.
CODED = ("compressed", "noised")
#: Kinds that are plain averages.
AVERAGES = ("mean", "uniform", "n", "batches")


@dataclass(frozen=True)
class Rule:
    """How one round was aggregated; ``residual``: the share of the update's length that it leaves over."""

    kind: str
    residual: float
    description: str = ""
    layer: str | None = None
    clients: tuple[int, ...] = ()
    scale: float = 1.0


class Aggregate(Check):
    """The aggregate is not the weighted mean of the clients, or not what the run names; which rule it follows instead.

    Rule: with the clients' updates d_k = w_k - w and the server's u = w' - w, every rule is a vector c of coefficients, and its
    residual ||u - sum_k c_k d_k|| must be at most 0.1 % of ||u||, or rounding. Tried in this order: the rule that the run names
    (by examples n_k; clients without examples have weight 0), the plain mean, by minibatches; nothing, one client, a sum, a
    division by all clients; a multiple of the mean (server learning rate, fitted); least squares (then weights that do not sum
    to 1, that belong to other clients, or leave some out); Krum, trimmed mean, geometric median; the mean of the round before,
    or of this one in half precision; the same with the server's last steps (momentum, dual variables); the sign and size of
    every coordinate (FedAdam, FedYogi), the median; and the layers one by one.
    A server step is information where the method may take one, a fault where fldiag's own method takes the plain mean.
    A run of another program that names Krum, Multi-Krum, trimmed mean, median, geometric median, FedNova (sum_k p_k^2 / c_k =
    1), q-FFL or FedBuff is checked as that rule, for every value of what the name leaves open (faulty clients, cut, steps), and
    a miss is a fault; one that names FedAdam, FedYogi or FedAdagrad and takes the mean is a fault; a name that is not known
    makes every finding here information. ``origin`` may state the server's learning rate and whether weights are by examples or
    uniform: another is a fault. Without a name, a rule that would be recognised by chance with at most 0.1 % is information.
    """

    name, title = "aggregate", "Aggregate is the clients' mean"

    def __init__(self, case: Case):
        super().__init__(case)
        self.rules: dict[int, Rule] = {}
        self.verdicts: dict[int, Verdict] = {}
        self.choices: dict[int, tuple[int, set[int]]] = {}
        self.memory, self.past = Memory(), deque["Tensor"](maxlen=PAST)
        method = "" if case.is_native else case.method
        is_class = case.recipe.get("kind") == "flower"  # a strategy's class is no name of a rule
        self.named_rule = find_rule(method)
        self.unknown = not (case.is_native or is_class or is_known(method))
        self.is_buffered = plain_name(method) == "fedbuff"

    def see(self, cohort: CohortWeights) -> None:
        if cohort.usable and cohort.sampled:
            rule, fit = self._fit(cohort)
            self.rules[cohort.round] = rule
            self.memory.keep(fit.cohort, fit.main)
            if self.named_rule is not None:
                self.verdicts[cohort.round] = self.named_rule.check(fit)
            elif rule.kind in ("single", "left out") and fit.k > 2:
                rows = selection(fit)
                counts = neighbours_of_krum(fit, rows) if rows else set[int]()
                self.choices[cohort.round] = math.comb(fit.k, len(rows or ())), counts
        if self.is_buffered:
            self.past.append(cohort.aggregated)

    def end(self) -> Iterator[Outcome]:
        if self.case.aggregates_are_made:
            yield Skip("no global models were given: the mean of the clients stands for them")
            return
        if not self.rules:
            yield Skip(self.case.lacks(UNSAMPLED))
            return
        for key, value in self.case.unread.items():
            yield Finding(
                INFORMATION,
                f"the run states {key} = {value!r}, which is not understood",
                "it is left out of account, and the aggregate is judged as that of a run that does not say it",
                "a server that departs from it is not noticed",
                'say "by examples" or "uniform" for weights, and a number above 0 for a server\'s learning rate',
            )
        if self.named_rule is not None and (outcome := self._judge_named()) is not None:
            yield outcome
            return
        self._recognise_krum()
        by_kind: dict[tuple[str, str | None], dict[int, Rule]] = defaultdict(dict)
        for r, rule in self.rules.items():
            by_kind[rule.kind, rule.layer][r] = rule
        yield from self._judge_optimiser(by_kind)
        rate = self.case.stated_rate
        if rate is not None and abs(rate - 1) > 1e-6 and ("mean", None) in by_kind:
            by_kind["scaled", None] |= {
                r: replace(rule, kind="scaled", scale=1.0)
                for r, rule in by_kind.pop(("mean", None)).items()
            }
        steps = sum(len(rules) for (kind, _), rules in by_kind.items() if kind in STEPS)
        fine = by_kind.pop(("mean", None), {})
        for (kind, layer), rules in by_kind.items():
            if kind == "scaled" and rate is not None:
                if finding := self._judge_rate(rate, rules):
                    yield finding
                else:
                    fine = {**fine, **rules}
            else:
                yield self._finding(kind, layer, rules, server=2 * steps >= len(self.rules))
        first = next(iter(fine.values()), None)
        if first is not None:
            worst = max(rule.residual for rule in fine.values())
            yield Clear(
                f"{first.description} in {counted(len(fine), 'round')}; it leaves at most {worst:.1e} of the update"
            )

    # -- what the run says of its rule

    def _judge_named(self) -> Outcome | None:
        """What is said of a run that names its rule; None where its rounds say nothing of it."""
        assert self.named_rule is not None
        verdicts, title = self.verdicts, self.named_rule.title
        misses = {r: v for r, v in verdicts.items() if v.holds is False}
        if misses:
            r, worst = max(misses.items(), key=lambda item: item[1].residual)
            rule = self.rules[r]
            return Finding(
                FAULT,
                f"the run names {title}, and the aggregate is another",
                f"{worst.description}; instead: {self._nearest(rule)}; {len(misses)} of {counted(len(verdicts), 'round')}",
                "the run is not what it says",
                "correct the server's code, or the name",
                tuple(misses),
                value=worst.residual,
            )
        unclear = {r: v for r, v in verdicts.items() if v.holds is None and v.residual == 0}
        if len(unclear) == len(verdicts):
            kinds = {rule.kind for rule in self.rules.values()}
            if kinds <= {*AVERAGES} and title == "FedNova":
                return Finding(
                    WARNING,
                    f"the run names {title}, and the aggregate is the mean of the clients",
                    next(iter(unclear.values())).description,
                    "it may be federated averaging under another name",
                    "divide every update by its number of local steps",
                    tuple(unclear),
                )
            return None
        far = {r: v for r, v in verdicts.items() if v.holds is None and v.residual > 0}
        if far:
            r, worst = max(far.items(), key=lambda item: item[1].residual)
            return Finding(
                INFORMATION,
                f"the aggregate was not recognised as {title}",
                f"{worst.description} leave {worst.residual:.1%} of it in round {r}; instead: {self._nearest(self.rules[r])}",
                "the rule that the run names cannot be confirmed",
                "store every round, and what each client started from",
                tuple(far),
                value=worst.residual,
            )
        holding = [v for v in verdicts.values() if v.holds]
        return Clear(f"{title} in {counted(len(holding), 'round')}: {holding[0].description}")

    @staticmethod
    def _nearest(rule: Rule) -> str:
        return rule.description or KINDS.get(rule.kind, (rule.kind,))[0]

    def _judge_optimiser(
        self, by_kind: dict[tuple[str, str | None], dict[int, Rule]]
    ) -> Iterator[Finding]:
        """A server that names an optimiser and takes the mean in every round."""
        if self.case.is_native:
            return
        name, kinds = plain_name(self.case.method), {kind for kind, _ in by_kind}
        is_adaptive = name in ADAPTIVE
        if not kinds <= {*AVERAGES} or not (is_adaptive or "fedavgm" in name):
            return
        by_kind.clear()
        yield Finding(
            FAULT if is_adaptive else WARNING,
            f"the run names {self.case.method}, and the server takes the mean of the clients",
            f"{next(iter(self.rules.values())).description}, in {counted(len(self.rules), 'round')}",
            "its results are those of federated averaging",
            "hand the mean update to the server's optimiser, and store what that makes"
            if is_adaptive
            else "give the server a momentum above 0",
            tuple(self.rules),
        )

    def _judge_rate(self, rate: float, rules: dict[int, Rule]) -> Finding | None:
        """A multiple of the mean that is not the server learning rate that the run states."""
        odd = {r: rule for r, rule in rules.items() if abs(rule.scale / rate - 1) > 1e-2}
        if not odd:
            return None
        r, rule = next(iter(odd.items()))
        is_twice = all(abs(rule.scale / rate**2 - 1) <= 1e-2 for rule in odd.values())
        return Finding(
            FAULT,
            "the server's learning rate acts twice"
            if is_twice
            else "the server's learning rate is not the one that the run states",
            f"{rule.description} in round {r}, and the run states {rate:g}"
            + (f", whose square is {rate**2:.4g}" if is_twice else ""),
            "the run is not what it says",
            "apply it once: to the mean update",
            tuple(odd),
            value=rule.scale,
        )

    def _recognise_krum(self) -> None:
        """Rounds whose aggregate is a selection, as Krum's if one number of neighbours explains all of them beyond chance."""
        if not self.choices:
            return
        counts = set.intersection(*(counts for _, counts in self.choices.values()))
        chance = math.prod(1 / ways for ways, _ in self.choices.values())
        widest = max(len(counts) for _, counts in self.choices.values())
        if counts and chance * max(widest, 1) <= CHANCE:
            for r in self.choices:
                rule = self.rules[r]
                text = f"{rule.description}; Krum with {min(counts)} neighbours selects so"
                self.rules[r] = replace(rule, kind="krum", description=text, clients=())

    def _finding(
        self, kind: str, layer: str | None, by_round: dict[int, Rule], server: bool
    ) -> Finding:
        fault, consequence, remedy = KINDS[kind]
        rules = list(by_round.values())
        worst = max(rules, key=lambda rule: rule.residual)
        clients = sorted({k for rule in rules for k in rule.clients})
        names = f" ({self.case.client(*clients)})" if clients else ""
        evidence = (
            f"{rules[0].description}; {len(by_round)} of {counted(len(self.rules), 'round')}, "
            f"residual up to {worst.residual:.1e} of the server's update"
        )
        return Finding(
            self._severity(kind, server),
            (f"the method {self.case.method} is not known: " if self.unknown else "")
            + fault
            + names,
            evidence,
            consequence,
            remedy,
            tuple(by_round),
            client=clients[0] if len(clients) == 1 else None,
            layer=layer,
            value=worst.residual,
        )

    def _severity(self, kind: str, server: bool) -> str:
        stepping = (
            self.case.slots & {"server", "refine"} if self.case.is_native else not self.case.plain
        )
        if self.unknown or ("isolated" in self.case.slots and kind == "unchanged"):
            return INFORMATION
        if kind == "layers" and plain_name(self.case.method) in PERSONAL:
            return INFORMATION
        if (
            self.case.is_native and stepping
        ):  # what its method computes there, nobody but the method knows
            return INFORMATION
        if kind in CODED and not self.case.is_native:
            return INFORMATION
        if kind in AVERAGES and self.case.stated_shares:
            return FAULT
        if kind == "uniform" and not self.case.is_native and self._means_to_count_alike():
            return INFORMATION
        if kind in STEPS or (
            server and kind in ("own weights", "unknown", "of all")
        ):  # a first step may look like that
            return INFORMATION if stepping else FAULT if self.case.is_native else WARNING
        if self.case.is_native or kind in (
            "unchanged",
            "single",
            "left out",
            "permuted",
            "sum",
            "sign",
            "total",
            "late",
        ):
            return FAULT
        return FAULT if kind == "of all" and self._varied() else WARNING

    def _means_to_count_alike(self) -> bool:
        """Whether the method's server takes the plain mean, or clients' sizes are alike."""
        sizes = [n for n in self.case.sizes.values() if n]
        return plain_name(self.case.method) in PLAIN_MEANS or max(sizes, default=0) < ALIKE * min(
            sizes, default=1
        )

    def _varied(self) -> bool:
        """Whether the share of the sampled clients differs from round to round, so that no fixed server learning rate is it."""
        descriptions = [rule.description for rule in self.rules.values() if rule.kind == "of all"]
        return len(set(descriptions)) > 1

    # -- one round

    def _fit(self, cohort: CohortWeights) -> tuple[Rule, Fit]:
        """The rule of a round, of the clients' weights or, where they received different ones and that explains more, of their
        updates."""
        means, past = self._means(cohort), list(self.past)
        fit = Fit(replace(cohort, starts=None), means, self.case, past)
        rule = self._rule(fit)
        if cohort.starts is None or rule.kind in AVERAGES:
            return rule, fit
        other = Fit(cohort.from_one_start, means, self.case, past)
        rule_of_updates = self._rule(other)
        if rule_of_updates.kind not in AVERAGES and rule_of_updates.residual >= rule.residual:
            return rule, fit
        text = f"{rule_of_updates.description}, of the updates from what each client received"
        return replace(rule_of_updates, description=text), other

    def _rule(self, fit: Fit) -> Rule:
        rule = (
            fit.match_mean()
            or fit.plainly()
            or fit.some_layers()
            or fit.least_squares()
            or fit.coordinates("trimmed")
            or self.memory.explains(fit.cohort, fit.main)
            or fit.coordinates("median")
            or find_noise(fit.cohort, fit.main)
            or fit.layers()
        )
        if rule is None:
            return Rule("unknown", fit.least, fit.nearest())
        return rule if isinstance(rule, Rule) else Rule(*rule)

    def _means(self, cohort: CohortWeights) -> dict[str, np.ndarray]:
        """Name of a mean -> its weights [K]; the first is the one that the run names."""
        outside = set(self.case.run.origin.get("outside", ())) - set(
            self.case.run.origin.get("examples", ())
        )
        sizes = {k: n for k, n in self.case.sizes.items() if k not in outside}
        n = np.array([sizes.get(k, 0) for k in cohort.ids], dtype=float)
        means = {"uniform": np.full(len(n), 1 / len(n))}
        if n.sum() and (self.case.is_native or all(k in sizes for k in cohort.ids)):
            means = {"n": n / n.sum(), **means}
            batches = n // int(self.case.section("train").get("batch_size", 1) or 1)
            if batches.sum():
                means["batches"] = batches / batches.sum()
        shares = self.case.stated_shares or self.case.shares
        first = shares if shares in means else next(iter(means))
        return {first: means[first], **means}


class Fit(Mixture):
    """Rules tried on one round."""

    least = 1.0

    def nearest(self) -> str:
        """Which rule misses the update least, and by how much."""
        misses = {
            "the mean by examples" if name == "n" else "the plain mean": self.residual(p)
            for name, p in self.means.items()
            if name != "batches"
        }
        if self.k > 2:
            misses |= {text: left for _, text, left in coordinate_rules(self)}
        words, left = min(misses.items(), key=lambda item: item[1])
        return (
            f"the nearest rule ({words}) misses {left:.1%} of the update; any weights of the clients leave "
            f"{self.least:.1%}"
        )

    def coordinates(self, kind: str) -> Rule | None:
        """A trimmed mean, or the median."""
        rules = [r for r in coordinate_rules(self) if r[0] == kind] if self.k > 2 else []
        if kind == "median":  # the lower and the upper one only where the run names them
            rules = rules[:1]
        _, text, left = min(rules, key=lambda r: r[2], default=("", "", 1.0))
        return Rule(kind, left, text) if left <= RESIDUAL else None

    def match_mean(self) -> Rule | None:
        """One of the means."""
        words = {
            "n": "the mean by examples",
            "uniform": "the plain mean",
            "batches": "the mean by minibatches",
        }
        for i, (name, p) in enumerate(self.means.items()):
            left = self.residual(p)
            if left <= RESIDUAL:
                return Rule("mean" if i == 0 else name, left, words[name])
        return None

    def plainly(self) -> Rule | None:
        """A fixed rule that is a mistake, or a multiple of a mean."""
        zero, ids = np.zeros(self.k), self.cohort.ids
        if self.residual(zero) <= RESIDUAL or self.u == 0:
            return Rule(
                "unchanged",
                0.0,
                f"the clients' mean update has length {np.sqrt(self._square(self.main)):.2g}, the "
                "server's 0",
            )
        for j in range(self.k):
            if self.k > 1 and (left := self.residual(np.eye(self.k)[j])) <= RESIDUAL:
                return Rule(
                    "single",
                    left,
                    f"it equals the weights of {self.case.client(ids[j])}",
                    clients=(ids[j],),
                )
        for name, p in self.means.items():
            square = self._square(p)
            s = float(p @ self.gram[: self.k, self.k]) / square if square > 0 else 0.0
            if (left := self.residual(s * p)) <= RESIDUAL:
                return self._multiple(name, s, left)
        return None

    def _multiple(self, name: str, s: float, left: float) -> Rule:
        description = f"{s:.4g} times {'the mean by examples' if name == 'n' else 'the plain mean'} of the updates"
        share = self.k / max(self.case.total, 1)
        if name == "n":
            share = sum(self.case.sizes.get(i, 0) for i in self.cohort.ids) / max(
                sum(self.case.sizes.values()), 1
            )
        if s < 0:
            return Rule("sign", left, description)
        if name == "uniform" and self.k > 1 and abs(s / self.k - 1) < 1e-2:
            return Rule("sum", left, description)
        if share < 0.99 and abs(s / share - 1) < 1e-2:
            return Rule("of all", left, description)
        return Rule("scaled", left, description, scale=s)

    def least_squares(self) -> Rule | None:
        """Any coefficients of the clients and of the received weights."""
        k, g, c = self.k, self.gram, self.coefficients
        self.least = self.residual(c)
        if self.least <= RESIDUAL:
            return self._weights(c)
        keep = [*range(k), k + 1]
        scale = np.sqrt(
            np.maximum(np.diag(g)[keep], 1e-300)
        )  # updates are far shorter than weights
        x = (
            np.linalg.lstsq(
                g[np.ix_(keep, keep)] / np.outer(scale, scale), g[keep, k] / scale, rcond=1e-12
            )[0]
            / scale
        )
        left = self.residual(x[:-1], float(x[-1]))
        if left > RESIDUAL:
            return None
        return Rule(
            "total", left, f"they sum to {1 + x[-1]:.4g}: {_listed(self.cohort.ids, x[:-1])}"
        )

    def _weights(self, c: np.ndarray) -> Rule:
        description = f"coefficients {_listed(self.cohort.ids, c)}, sum {c.sum():.4g}"
        out = np.abs(c) < 1e-2 * np.abs(c).max()
        for p in self.means.values():
            rest = np.where(out, 0, p)
            if out.any() and rest.sum() and np.abs(c - rest / rest.sum()).max() < 1e-2 * c.max():
                absent = tuple(i for i, o in zip(self.cohort.ids, out, strict=True) if o)
                return Rule("left out", self.least, description, clients=absent)
            if np.allclose(np.sort(c), np.sort(p), rtol=1e-2, atol=1e-4):
                return Rule("permuted", self.least, description)
        if self.k > 2 and (step := geometric_iterate(self)) is not None:
            return Rule("geometric", self.least, f"{description}; {step} of Weiszfeld's steps")
        return Rule("own weights", self.least, description)

    def some_layers(self) -> Rule | None:
        """The named mean in most of the layers, and not in some."""
        odd = self._odd()
        if odd and 2 * len(odd) <= len(self.cohort.weights):
            return self._of_layers(odd)
        return None

    def layers(self) -> Rule | None:
        """The named mean in at least one of the layers that change."""
        odd = self._odd()
        moving = [n for n, g in self.cohort.grams.items() if np.diag(g)[: self.k].any()]
        return self._of_layers(odd) if 0 < len(odd) < len(moving) else None

    def _odd(self) -> dict[str, float]:
        lefts = {n: self.residual(self.main, gram=g) for n, g in self.cohort.grams.items()}
        return {n: left for n, left in lefts.items() if left > RESIDUAL}

    def _of_layers(self, odd: dict[str, float]) -> Rule:
        how = []
        for name in odd:
            g = self.cohort.grams[name]
            one = [
                i
                for j, i in enumerate(self.cohort.ids)
                if self.residual(np.eye(self.k)[j], gram=g) <= RESIDUAL
            ]
            still = self.residual(np.zeros(self.k), gram=g) <= RESIDUAL or g[self.k, self.k] == 0
            how.append(
                f"{name} {'does not change' if still else f'is that of {self.case.client(one[0])}' if one else 'is neither'}"
            )
        tail = f" and {len(how) - 3} more" if len(how) > 3 else ""
        return Rule(
            "layers",
            min(max(odd.values()), 1e3),
            "; ".join(how[:3]) + tail,
            layer=", ".join(odd) if len(odd) < 5 else f"{next(iter(odd))} and {len(odd) - 1} more",
        )

    def _square(self, p: np.ndarray) -> float:
        return float(p @ self.gram[: self.k, : self.k] @ p)


def _listed(ids: list[int], c: np.ndarray, most: int = 5) -> str:
    text = ", ".join(f"{i}: {v:.3g}" for i, v in list(zip(ids, c, strict=True))[:most])
    return text + (", …" if len(ids) > most else "")
