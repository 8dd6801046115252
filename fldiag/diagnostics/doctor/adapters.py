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
#: The relative error of the product from which on averaging factors is told, and worth a warning.
TOLD, ERROR = 1e-4, 0.01


def pairs(shapes: dict[str, tuple[int, ...]]) -> list[tuple[str, str]]:
    """Names (A, B) of matrices [r, in] and [out, r] of one adapter.

    >>> pairs({"fc.lora_A.weight": (2, 8), "fc.lora_B.weight": (4, 2), "A": (3, 3)})
    [('fc.lora_A.weight', 'fc.lora_B.weight')]
    """
    matrices = []
    for name, shape in shapes.items():
        for a, b in PAIRS:
            words = name.split(".")
            if a not in words or len(shape) != 2:
                continue
            other = ".".join(b if word == a else word for word in words)
            if len(shapes.get(other, ())) == 2 and shapes[other][1] == shape[0]:
                matrices.append((name, other))
    return matrices


class Factors(Check):
    """The factors of low-rank adapters (LoRA) are averaged one by one, which is not the average of their products.

    Rule, for each pair A [r, in], B [out, r]: where both aggregates are the mean of the clients' factors (to 0.1 % of their
    spread), the error ||sum_k p_k B_k A_k - B A||_F / ||sum_k p_k B_k A_k||_F (Singhal et al., FedEx-LoRA, 2024) is more than
    1 % (information from 0.01 % on). Rounds in which all B are 0 are left out. Frozen A (FFA-LoRA) has no error.
    """

    name, title = "adapters", "Adapters: mean of products"

    def __init__(self, case: Case):
        super().__init__(case)
        self.rounds: dict[int, tuple[float, str]] = {}
        self.has_adapters = False

    def see(self, cohort: CohortWeights) -> None:
        adapters = pairs({n: tuple(t.shape) for n, t in cohort.weights.items()})
        self.has_adapters |= bool(adapters)
        if not adapters or not cohort.usable or len(cohort.ids) < 2 or cohort.clients is None:
            return
        n = np.array([self.case.sizes.get(k, 0) for k in cohort.ids], dtype=float)
        p = n / n.sum() if n.all() and self.case.shares == "n" else np.full(len(n), 1 / len(n))
        slices, at = {}, 0
        for name, t in cohort.weights.items():
            slices[name] = slice(at, at := at + t.numel())
        for a, b in adapters:
            both = [
                (
                    cohort.weights[m].double().numpy(),
                    cohort.clients[:, slices[m]]
                    .double()
                    .numpy()
                    .reshape(-1, *cohort.weights[m].shape),
                )
                for m in (a, b)
            ]
            (mean_a, each_a), (mean_b, each_b) = both
            if not all(_is_mean(mean, each) for mean, each in both):
                continue
            product = np.einsum("k,kor,kri->oi", p, each_b, each_a)
            if (size := float(np.linalg.norm(product))) > 0:
                error = float(np.linalg.norm(product - mean_b @ mean_a)) / size
                if error > self.rounds.get(cohort.round, (-1.0, ""))[0]:
                    self.rounds[cohort.round] = error, a.rsplit(".", 1)[0] if "." in a else a

    def end(self) -> Iterator[Outcome]:
        if not self.has_adapters:
            yield Skip("the model has no low-rank adapters")
        elif not self.rounds:
            yield Skip("the clients' adapters are not stored, or their B are 0")
        else:
            worst = max(self.rounds.values())
            bad = tuple(r for r, (error, _) in self.rounds.items() if error > TOLD)
            if bad:
                yield Finding(
                    WARNING if worst[0] > ERROR else INFORMATION,
                    "the factors A and B of adapters are averaged one by one",
                    f"their product is {worst[0]:.1%} off the mean of the clients' products",
                    "the global model is not the mean of what the clients learnt; the error grows with their spread",
                    "average the products (and refactor them), freeze A (FFA-LoRA), or add the residual to the "
                    "weights (FedEx-LoRA)",
                    bad,
                    layer=worst[1],
                    value=worst[0],
                )
            yield Clear(
                f"the product of the means is at most {worst[0]:.1e} off the mean of the products"
            )


def _is_mean(mean: np.ndarray, each: np.ndarray) -> bool:
    """Whether a factor is some mean of the clients': within their range nearly everywhere."""
    slack = 1e-5 * np.abs(each).max(0)
    return bool(((mean >= each.min(0) - slack) & (mean <= each.max(0) + slack)).mean() > 0.99)
