"""What single clients do: whose updates are missing, copied or outlying, and whose inputs are on another scale."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from fldiag.diagnostics.doctor.case import NO_CLIENTS, Case, CohortWeights
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
from fldiag.diagnostics.doctor.statistics import CLIENTS, spread
from fldiag.errors import FldiagError, counted
from fldiag.results.provenance import digest

if TYPE_CHECKING:
    from torch import Tensor

    from fldiag.runs.pool import Weights

#: Part of the gradient at its start up to which a client has none where it ended.
CONVERGED = 1e-3


class Silent(Check):
    """Clients whose update is exactly zero, and layers that nobody trains.

    Rule: the trained weights equal the received ones to the bit, although the client has examples (for a run of fldiag: fills a
    minibatch) and others of the round moved; a fault where nobody moved in a round. A layer that no client changed in any round,
    while other layers moved, is information, with whether the loss has a gradient there: it may be frozen on purpose. Layers that
    clients keep to themselves, or that the given model does not train (requires_grad), are left out.
    """

    name, title = "zero_updates", "Every client's weights change"

    def __init__(self, case: Case):
        super().__init__(case)
        self.rounds, self.zero, self.all = 0, defaultdict[int, list[int]](list), list[int]()
        self.frozen: set[str] | None = None

    def see(self, cohort: CohortWeights) -> None:
        if not cohort.complete or cohort.clients is None:
            return
        self.rounds += 1
        is_still = (cohort.clients == cohort.origins).all(1).tolist()
        still = [i for i, still in zip(cohort.ids, is_still, strict=True) if still]
        if len(still) == len(cohort.ids):
            self.all.append(cohort.round)
            return
        for i in still:
            self.zero[i].append(cohort.round)
        if cohort.usable and self.frozen != set():
            k = len(cohort.ids)
            fixed = {name for name, g in cohort.grams.items() if not np.diag(g)[:k].any()}
            self.frozen = fixed if self.frozen is None else self.frozen & fixed

    def end(self) -> Iterator[Outcome]:
        if not self.rounds:
            yield Skip(self.case.lacks(NO_CLIENTS))
            return
        if self.all:
            yield Finding(
                FAULT,
                "no client changed the weights it received",
                f"in {len(self.all)} of {counted(self.rounds, 'round')}",
                "nothing is learnt",
                "look at the learning rate, at frozen parameters, and at which model is returned",
                tuple(self.all),
            )
        train = self.case.section("train")
        for i, rounds in self.zero.items():
            n = self.case.sizes.get(i)
            idle = n == 0 or (
                n is not None
                and bool(train.get("drop_last"))
                and n < int(train.get("batch_size", 1))
            )
            yield Finding(
                INFORMATION if idle else WARNING,
                f"the update of {self.case.client(i)} is exactly zero",
                f"in {counted(len(rounds), 'round')}"
                + (f"; it has {counted(n, 'example')}" if n is not None else ""),
                "it contributes nothing, but its weight reduces the effect of the others",
                "nothing to do: its examples fill no minibatch"
                if idle
                else "look at its training, and at which model it returns",
                tuple(rounds),
                client=i,
                value=0.0,
            )
        if frozen := sorted((self.frozen or set()) - self._frozen_on_purpose()):
            names = ", ".join(frozen[:3]) + (
                f" and {len(frozen) - 3} more" if len(frozen) > 3 else ""
            )
            yield Finding(
                INFORMATION,
                "some layers are never trained",
                f"no client changed {names} in {counted(self.rounds, 'round')}{self._role(frozen)}",
                "they stay as they were initialised",
                "nothing to do if they are frozen on purpose; else give them to the clients' optimiser",
                layer=names,
            )
        yield Clear(f"no update is zero in {counted(self.rounds, 'round')}")

    def _frozen_on_purpose(self) -> set[str]:
        """Tensors that the model, as it was given, does not train."""
        from torch import nn

        module = self.case.run.model
        parameters = module.named_parameters() if isinstance(module, nn.Module) else ()
        return {n for n, p in parameters if not p.requires_grad}

    def _role(self, names: list[str]) -> str:
        """Whether the loss depends on tensors, in words, as far as that can be said."""
        history = self.case.history
        if history is None or history.alone or not any(map(len, history.parts)):
            return ""
        try:
            last = history.stored(history.rounds[-1])
            problem = history.problem((last.aggregated, last.buffers), history.pool.clients, "all")
            gradient = history.layout.views(problem.gradient())
        except FldiagError:  # the model gives no numbers
            return ""
        moving = [n for n in names if n in gradient and bool((gradient[n] != 0).any())]
        if not moving:
            return ", and the loss does not depend on it"
        return f", although the loss has a gradient there ({', '.join(moving[:3])})"


class Copies(Check):
    """Clients that return each other's weights, or their own of an earlier round.

    Rule: the trained weights of two clients of a round are equal to the bit, or their updates have a cosine above 1 - 1e-9 (with
    at least 100 weights); clients that such pairs link are one finding. Also: a client's trained weights equal those it
    returned in an earlier round to the bit, although it received others. Training to convergence does that too: it is
    information where the loss on the client's examples has no gradient there (at most 0.1 % of that at its start, weight decay
    aside), or, where model or examples are not known, where more than half of the clients do it; a warning where fewer do.
    Zero updates are left to their own check.
    """

    name, title = "copies", "Every update is the client's own"

    def __init__(self, case: Case):
        super().__init__(case)
        self.rounds, self.twins = 0, defaultdict[tuple[int, int], list[int]](list)
        self.before: dict[tuple[int, str], tuple[int, str]] = {}  # weights: round, and their start
        self.counts = Counter[int]()
        self.repeats: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.scales: dict[tuple[int, int], float] = {}

    def see(self, cohort: CohortWeights) -> None:
        if not cohort.usable or cohort.clients is None:
            return
        self.rounds += 1
        norms, k = cohort.norms, len(cohort.ids)
        origins = [digest(cohort.received)] * k
        if cohort.starts is not None:
            origins = [digest(row) for row in cohort.starts]
        for j in np.flatnonzero(norms):
            i, now = cohort.ids[j], (cohort.round, origins[j])
            self.counts[i] += 1
            before = self.before.setdefault((i, digest(cohort.clients[j])), now)
            if before != now and before[1] != origins[j]:
                self.repeats[i].append((cohort.round, before[0]))
        size = np.outer(norms, norms)
        cosine = np.divide(cohort.gram[:k, :k], size, out=np.zeros((k, k)), where=size > 0)
        limit = 1 - 1e-9 if cohort.aggregated.numel() >= 100 else 2.0
        for a, b in zip(*np.nonzero(np.triu(cosine > limit - 1e-12, 1)), strict=True):
            self._twin(cohort, int(a), int(b), norms)
        if limit > 1:
            for a in range(k):
                for b in range(a + 1, k):
                    if norms[a] > 0 and bool((cohort.clients[a] == cohort.clients[b]).all()):
                        self._twin(cohort, a, b, norms)

    def _twin(self, cohort: CohortWeights, a: int, b: int, norms: np.ndarray) -> None:
        pair = cohort.ids[a], cohort.ids[b]
        self.twins[pair].append(cohort.round)
        self.scales[pair] = float(norms[b] / norms[a])

    def end(self) -> Iterator[Outcome]:
        if not self.rounds:
            yield Skip(self.case.lacks(NO_CLIENTS))
            return
        for clients in self._groups():
            yield self._alike(clients)
        several = sum(n > 1 for n in self.counts.values())
        for i, repeats in self.repeats.items():
            converged = self._is_converged(i, repeats[-1][0])
            is_common = converged is None and 2 * len(self.repeats) > several
            severity = INFORMATION if converged or is_common else FAULT
            yield Finding(
                WARNING if severity == FAULT and converged is None else severity,
                f"{self.case.client(i)} returned weights that it had returned before",
                f"in round {repeats[0][0]} those of round {repeats[0][1]}"
                + (f", and {len(repeats) - 1} times more" if len(repeats) > 1 else "")
                + ("; its loss has no gradient there" if converged else "")
                + (f"; so do {len(self.repeats)} of {several} clients" if is_common else ""),
                "it trains to convergence, whatever it starts from"
                if converged
                else "an old update is applied again"
                + (", unless clients train to convergence" if is_common else ""),
                "nothing to do" if converged else "clear replies between rounds",
                tuple(r for r, _ in repeats),
                client=i,
            )
        yield Clear(f"no two updates are equal in {counted(self.rounds, 'round')}")

    def _is_converged(self, i: int, r: int) -> bool | None:
        """Whether training has nothing left to lower at a client's weights; None where that cannot be computed."""
        import torch

        from fldiag import losses
        from fldiag.problem.problem import Problem

        history = self.case.history
        if history is None or history.alone or i >= len(history.parts) or not len(history.parts[i]):
            return None
        dataset, index = history.dataset, torch.as_tensor(history.parts[i], dtype=torch.long)
        examples = dataset.batch(index), dataset.train_y.index_select(0, index)
        criterion = losses.criterion(dataset.regression, dataset.dense)

        def gradient(weights: Weights) -> Tensor:
            problem = Problem(
                history.network.module,
                criterion,
                examples,
                *weights,
                device=history.device,
                dtype=history.dtype,
            )
            return problem.gradient().double()

        try:
            cohort = history.stored(r)
            j = cohort.ids.index(i)
            at_start, at_end = gradient(cohort.start_of(j)), gradient(cohort.client(j))
        except (FldiagError, AssertionError, ValueError):  # its buffers or examples are not known
            return None
        w = cohort.client(j)[0].double()
        rest = at_end - (at_end @ w) / (w @ w).clamp(min=1e-300) * w  # weight decay pulls along w
        return bool(rest.norm() <= CONVERGED * at_start.norm())

    def _groups(self) -> list[list[int]]:
        """Clients that pairs of equal updates link."""
        groups: list[set[int]] = []
        for pair in self.twins:
            linked = [g for g in groups if not g.isdisjoint(pair)]
            groups = [g for g in groups if g.isdisjoint(pair)] + [set(pair).union(*linked)]
        return [sorted(g) for g in groups]

    def _alike(self, clients: list[int]) -> Finding:
        pairs = [pair for pair in self.twins if pair[0] in clients]
        rounds = sorted({r for pair in pairs for r in self.twins[pair]})
        scale, one = self.scales[pairs[0]], len(pairs) == 1
        if one:
            how = "is that of" if abs(scale - 1) < 1e-6 else f"is {scale:.3g} times that of"
            first, second = map(self.case.client, clients)
            fault = f"the update of {second} {how} {first}"
        else:
            fault = f"{self.case.client(*clients, most=12)} return each other's updates"
        return Finding(
            FAULT,
            fault,
            f"in {counted(len(rounds), 'round')}"
            + ("" if one else f", {counted(len(pairs), 'pair')}"),
            "one client's data count several times, and another's not at all",
            "look for a model that is shared between clients, or a client that copies",
            tuple(rounds),
            client=clients[0] if one else None,
            client_b=clients[1] if one else None,
            value=scale if one else None,
        )


class Norms(Check):
    """Clients whose updates have outlying lengths.

    Rule: the logarithms of ||d_k|| less their round's median, and less a line in log n_k (Theil and Sen's slope) where sizes are
    known. A client's median over its rounds, and every single value, is outlying where it lies further out than a factor 2.5
    (of two rounds: 5; a single value: 8) and than 8 times the scale 1.48 MAD of all values. Short updates are information,
    unless the client has something to learn: its own loss at the received weights is above the median of the clients'. It
    takes at least 4 clients a round.
    """

    name, title = "norms", "Updates have similar lengths"
    FACTORS, SCALE = (2.5, 5.0, 8.0), 8.0

    def __init__(self, case: Case):
        super().__init__(case)
        self.rows: list[tuple[int, int, float]] = []

    def see(self, cohort: CohortWeights) -> None:
        if cohort.usable and sum(cohort.norms > 0) >= 4:
            middle = float(np.median(np.log(cohort.norms[cohort.norms > 0])))
            self.rows += [
                (cohort.round, i, math.log(v) - middle)
                for i, v in zip(cohort.ids, cohort.norms, strict=True)
                if v > 0
            ]

    def left(self) -> np.ndarray:
        """What size and round leave of the logarithms."""
        values = np.array([v for _, _, v in self.rows])
        n = np.array([self.case.sizes.get(i, 0) for _, i, _ in self.rows], dtype=float)
        if not n.all() or len(set(n)) < 3:
            return values
        from scipy.stats import theilslopes

        sample = slice(None, None, max(1, len(values) // 500))
        slope, start, *_ = theilslopes(values[sample], np.log(n)[sample])
        return values - start - slope * np.log(n)

    def end(self) -> Iterator[Outcome]:
        if not self.rows:
            yield Skip(self.case.lacks("no round has the updates of at least 4 clients"))
            return
        left = self.left()
        scale = spread(left)
        always, often, once = (max(math.log(f), self.SCALE * scale) for f in self.FACTORS)
        of = defaultdict[int, list[tuple[int, float]]](list)
        for (r, i, _), v in zip(self.rows, left, strict=True):
            of[i].append((r, float(v)))
        for i, deviations in of.items():
            middle = float(np.median([v for _, v in deviations]))
            single = [(r, v) for r, v in deviations if abs(v) > once]
            if len(deviations) > 1 and abs(middle) > (always if len(deviations) > 2 else often):
                yield self._finding(
                    i,
                    middle,
                    tuple(r for r, _ in deviations),
                    scale,
                    "in the median of its rounds",
                )
            elif single:
                r, v = max(single, key=lambda one: abs(one[1]))
                yield self._finding(i, v, tuple(r for r, _ in single), scale, f"in round {r}")
        yield Clear(
            f"{counted(len(of), 'client')}; lengths spread by a factor of {math.exp(scale):.2f} once size and round are "
            f"taken out, at most {math.exp(float(np.abs(left).max())):.1f}"
        )

    def _finding(
        self, i: int, v: float, rounds: tuple[int, ...], scale: float, when: str
    ) -> Finding:
        how = f"{math.exp(v):.3g} times" if v > 0 else f"1/{math.exp(-v):.3g} of"
        return Finding(
            WARNING if v > 0 or self._hungry(i) else INFORMATION,
            f"the updates of {self.case.client(i)} are {'unusually long' if v > 0 else 'unusually short'}",
            f"{how} what its size and the round suggest, {when}; the usual spread is a factor of "
            f"{math.exp(scale):.2f}",
            "it alone decides where the mean goes" if v > 0 else "it hardly affects the mean",
            "look at its learning rate, its number of steps and the scale of its data; clip updates",
            rounds,
            client=i,
            value=math.exp(v),
        )

    def _hungry(self, i: int) -> bool:
        """Whether a client has more to learn than most."""
        losses = self.case.models.losses if self.case.history is not None else {}
        return i in losses and losses[i] > float(np.median(list(losses.values())))


#: Rounds of a client from which on its inputs are compared.
PAIRS = 2
#: By which factor, and how many times the scale 1.48 MAD, a client must differ.
FACTOR, SCALES = 3.0, 6.0


class Inputs(Check):
    """A client whose inputs are on another scale than the other clients'.

    Rule: the gradient of the first layer's weight is the gradient of its bias times the input, so that the ratio of the lengths
    of their updates, ||dW|| / ||db||, measures how large inputs are. Where a client's, in the median of at least 2 rounds,
    differs from the round's median by more than a factor 3, and by 6 times the scale 1.48 MAD of the logarithms, its inputs are
    on another scale. It takes a first layer with a bias and at least 4 clients a round. Long local training hides it: a bias
    stands still once the shares of the classes are learnt, whatever the inputs.
    """

    name, title = "inputs", "Inputs are on one scale"

    def __init__(self, case: Case):
        super().__init__(case)
        self.ratios: dict[int, dict[int, float]] = {}
        self.layer = ""

    def see(self, cohort: CohortWeights) -> None:
        names = _first_layer(cohort)
        if not cohort.usable or names is None:
            return
        k = len(cohort.ids)
        squares = [np.diag(cohort.grams[name])[:k] for name in names]
        moving = np.flatnonzero((squares[0] > 0) & (squares[1] > 0))
        if len(moving) < CLIENTS:
            return
        self.layer = names[0]
        logs = 0.5 * (np.log(squares[0][moving]) - np.log(squares[1][moving]))
        for j, value in zip(moving, logs - np.median(logs), strict=True):
            self.ratios.setdefault(cohort.ids[j], {})[cohort.round] = float(value)

    def end(self) -> Iterator[Outcome]:
        if not self.ratios:
            lacking = f"no round has a first layer with a bias and {CLIENTS} clients that move both"
            yield Skip(self.case.lacks(lacking))
            return
        ratios = [v for by_round in self.ratios.values() for v in by_round.values()]
        limit = max(math.log(FACTOR), SCALES * spread(ratios, 0.0))
        for i, by_round in self.ratios.items():
            middle = float(np.median(list(by_round.values())))
            if len(by_round) >= PAIRS and abs(middle) > limit:
                size = (
                    f"{math.exp(middle):.3g} times" if middle > 0 else f"1/{math.exp(-middle):.3g}"
                )
                yield Finding(
                    WARNING,
                    f"the inputs of {self.case.client(i)} seem to be {size} as large as those of the others",
                    f"so the update of {self.layer} compares with that of its bias, in the median of "
                    f"{counted(len(by_round), 'round')}",
                    "its features are not those of the other clients, and the global model is not for its inputs",
                    "normalise all clients' inputs alike (divided by 255, mean and deviation)",
                    tuple(by_round),
                    client=i,
                    layer=self.layer,
                    value=math.exp(middle),
                )
        worst = max(abs(float(np.median(list(v.values())))) for v in self.ratios.values())
        yield Clear(
            f"the first layer's updates differ by a factor of {math.exp(worst):.2f} at most over "
            f"{counted(len(self.ratios), 'client')}"
        )


def _first_layer(cohort: CohortWeights) -> tuple[str, str] | None:
    """The names of weight and bias of the first layer, if it has both."""
    name = next((n for n, t in cohort.weights.items() if t.ndim > 1), None)
    if name is None or not name.endswith("weight"):
        return None
    bias = name[: -len("weight")] + "bias"
    fits = bias in cohort.weights and cohort.weights[bias].numel() == cohort.weights[name].shape[0]
    return (name, bias) if fits else None
