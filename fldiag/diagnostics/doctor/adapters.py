"""Low-rank adapters whose factors are averaged one by one."""

from __future__ import annotations

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

#: How the two factors of an adapter are called: (A, [r, in]), (B, [out, r]).
PAIRS = (("lora_A", "lora_B"), ("lora_a", "lora_b"), ("lora_down", "lora_up"), ("A", "B"))
#: The relative error of the product from which on averaging factors is told, and from which on any other aggregate.
TOLD, ERROR = 1e-4, 0.01


def pairs(shapes: dict[str, tuple[int, ...]]) -> list[tuple[str, str]]:
    """Names (A, B) of the matrices of one adapter: [r, in] and [out, r], or transposed, [in, r] and [r, out].

    >>> pairs({"fc.lora_A.weight": (2, 8), "fc.lora_B.weight": (4, 2), "A": (3, 3)})
    [('fc.lora_A.weight', 'fc.lora_B.weight')]
    >>> pairs({"fc.lora_A": (8, 2), "fc.lora_B": (2, 4)})
    [('fc.lora_A', 'fc.lora_B')]
    """
    matrices = []
    for name, shape in shapes.items():
        for a, b in PAIRS:
            words = name.split(".")
            if a not in words or len(shape) != 2:
                continue
            other = ".".join(b if word == a else word for word in words)
            end = shapes.get(other, ())
            if len(end) == 2 and (end[1] == shape[0] or end[0] == shape[1]):
                matrices.append((name, other))
    return matrices


class Factors(Check):
    """Low-rank adapters (LoRA): whether the aggregate's product is the mean of the clients' products.

    Rule, for each pair A [r, in], B [out, r] (or transposed): the error ||sum_k p_k B_k A_k - B A||_F / ||sum_k p_k B_k A_k||_F
    of the aggregate, however it was made. Up to 0.01 % is right (FedEx-LoRA, FlexLoRA, frozen A). Where both aggregates are the
    mean of the clients' factors (within their range), more is information: that is what averaging factors one by one gives
    (Singhal et al., FedEx-LoRA, 2024). Where they are not, it is a warning from twice that error and 1 % on, or information where
    the server's method may take a step of its own. Rounds in which all products are 0 are left out.
    """

    name, title = "adapters", "Adapters: mean of products"

    def __init__(self, case: Case):
        super().__init__(case)
        self.rounds: dict[int, tuple[float, float, bool, str]] = {}
        self.has_adapters = False

    def see(self, cohort: CohortWeights) -> None:
        adapters = pairs({n: tuple(t.shape) for n, t in cohort.weights.items()})
        self.has_adapters |= bool(adapters)
        if not adapters or not cohort.usable or len(cohort.ids) < 2 or cohort.clients is None:
            return
        n = np.array([self.case.sizes.get(k, 0) for k in cohort.ids], dtype=float)
        p = n / n.sum() if n.all() and self.case.shares == "n" else np.full(len(n), 1 / len(n))
        for names in adapters:
            (new_a, each_a), (new_b, each_b) = (
                (
                    cohort.weights[m].double().numpy(),
                    cohort.clients[:, cohort.slices[m]]
                    .double()
                    .numpy()
                    .reshape(-1, *cohort.weights[m].shape),
                )
                for m in names
            )
            if (
                new_b.shape[1] != new_a.shape[0]
            ):  # transposed: B A is (A^T, B^T) the other way round
                new_a, new_b, each_a, each_b = new_b, new_a, each_b, each_a
            product = sum(w * b @ a for w, b, a in zip(p, each_b, each_a, strict=True))
            size = float(np.linalg.norm(product))
            if size == 0:
                continue
            error = float(np.linalg.norm(product - new_b @ new_a)) / size
            one_by_one = np.tensordot(p, each_b, 1) @ np.tensordot(p, each_a, 1)
            usual = float(np.linalg.norm(product - one_by_one)) / size
            is_mean = _is_mean(new_a, each_a) and _is_mean(new_b, each_b)
            if error > self.rounds.get(cohort.round, (-1.0,))[0]:
                name = names[0].rsplit(".", 1)[0] if "." in names[0] else names[0]
                self.rounds[cohort.round] = error, usual, is_mean, name

    def end(self) -> Iterator[Outcome]:
        if not self.has_adapters:
            yield Skip("the model has no low-rank adapters")
        elif not self.rounds:
            yield Skip(self.case.lacks("no round has two clients, or the adapters are all 0"))
        else:
            yield from self._one_by_one()
            yield from self._otherwise()
            worst = max(self.rounds.values())
            yield Clear(
                f"the aggregate's product is at most {worst[0]:.1e} off the mean of the clients' products"
            )

    def _one_by_one(self) -> Iterator[Finding]:
        bad = {r: row for r, row in self.rounds.items() if row[2] and row[0] > TOLD}
        if bad:
            worst = max(bad.values())
            yield Finding(
                INFORMATION,
                "the factors A and B of adapters are averaged one by one",
                f"their product is {worst[0]:.1%} off the mean of the clients' products",
                "the global model is not the mean of what the clients learnt; the error grows with their spread",
                "average the products (and refactor them), freeze A (FFA-LoRA), or add the residual to the "
                "weights (FedEx-LoRA)",
                tuple(bad),
                layer=worst[3],
                value=worst[0],
            )

    def _otherwise(self) -> Iterator[Finding]:
        bad = {
            r: row
            for r, row in self.rounds.items()
            if not row[2] and row[0] > max(2 * row[1], ERROR)
        }
        if bad:
            worst = max(bad.values())
            steps = self.case.slots & {"server", "refine"}
            yield Finding(
                INFORMATION if steps or not self.case.plain else WARNING,
                "the adapters' product is not the mean of the clients' products",
                f"it is {worst[0]:.1%} off; the means of the factors would be {worst[1]:.1%} off",
                "the global model is not what its clients learnt",
                "compare the server's code with its method; sum the products, and refactor the sum",
                tuple(bad),
                layer=worst[3],
                value=worst[0],
            )


def _is_mean(mean: np.ndarray, each: np.ndarray) -> bool:
    """Whether a factor is some mean of the clients': within their range nearly everywhere."""
    slack = 1e-5 * np.abs(each).max(0)
    return bool(((mean >= each.min(0) - slack) & (mean <= each.max(0) + slack)).mean() > 0.99)
