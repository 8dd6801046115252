"""Whether all clients see their inputs on one scale, from the weights alone."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from fldiag.diagnostics.doctor.case import Case, CohortWeights
from fldiag.diagnostics.doctor.findings import WARNING, Check, Clear, Finding, Outcome, Skip
from fldiag.errors import counted

#: Clients in a round, and rounds of a client, from which on it is compared.
CLIENTS, ROUNDS = 4, 2
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
        limit = max(math.log(FACTOR), SCALES * 1.4826 * float(np.median(np.abs(ratios))))
        for i, by_round in self.ratios.items():
            middle = float(np.median(list(by_round.values())))
            if len(by_round) >= ROUNDS and abs(middle) > limit:
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
