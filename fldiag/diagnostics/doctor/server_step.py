"""Server steps that need more than one round, or more than inner products, to be recognised."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from fldiag.diagnostics.doctor.case import CohortWeights

RESIDUAL = 1e-3
#: Coordinates that are looked at one by one.
SOME = 20_000
#: Factors of the mean's momentum that are tried.
BETAS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99)
Explanation = tuple[str, float, str]


class Memory:
    """What the server did before: its last steps, and averages of the clients' mean updates at some coordinates."""

    def __init__(self) -> None:
        self.round: int | None = None
        self.earlier: list[
            Tensor
        ] = []  # of the last round: the server's step, and what of it was not the mean's
        self.mean: Tensor | None = None  # of the last round's clients
        self.averages: list[Tensor] = []  # of the mean update at some coordinates, by BETAS

    def explains(self, cohort: CohortWeights, p: np.ndarray) -> Explanation | None:
        """late, rounded, momentum, adaptive or median; ``p``: weights [K] of the mean that the run names."""
        return (
            self._late(cohort)
            or _rounded(cohort, p)
            or self._momentum(cohort)
            or self._adaptive(cohort, p)
            or self._median(cohort)
        )

    def keep(self, cohort: CohortWeights, p: np.ndarray) -> None:
        """Remember this round."""
        import torch

        assert cohort.clients is not None and cohort.received is not None
        mean = torch.tensordot(
            torch.from_numpy(p), cohort.clients.double() - cohort.received.double(), 1
        )
        u = cohort.aggregated.double() - cohort.received.double()
        self.averages = self._averages(cohort, mean[_sample(len(u))])
        self.earlier, self.round, self.mean = (
            [u, u - mean],
            cohort.round,
            cohort.received.double() + mean,
        )

    def _late(self, cohort: CohortWeights) -> Explanation | None:
        """The mean of the last round's clients."""
        if self.round != cohort.round - 1 or self.mean is None or cohort.received is None:
            return None
        new = cohort.aggregated.double()
        left = float(
            (new - self.mean).norm() / (new - cohort.received.double()).norm().clamp(min=1e-300)
        )
        description = f"in round {cohort.round} it is the mean of round {self.round}'s clients"
        return ("late", left, description) if left <= RESIDUAL else None

    def _averages(self, cohort: CohortWeights, mean: Tensor) -> list[Tensor]:
        if self.round != cohort.round - 1 or not self.averages:
            return [(1 - b) * mean for b in BETAS]
        return [b * m + (1 - b) * mean for b, m in zip(BETAS, self.averages, strict=True)]

    def _momentum(self, cohort: CohortWeights) -> Explanation | None:
        """Least squares on the clients' updates and the server's last step, and what of it was not the mean's."""
        if self.round != cohort.round - 1:
            return None
        k = len(cohort.ids)
        g = np.sum(list(cohort.products(self.earlier).values()), axis=0)
        keep = [*range(k), k + 2, k + 3]
        c = np.linalg.lstsq(g[np.ix_(keep, keep)], g[keep, k], rcond=1e-10)[0]
        x = np.zeros(k + 4)
        x[keep], x[k] = c, -1.0
        left = float(np.sqrt(max(x @ g @ x, 0.0) / max(g[k, k], 1e-300)))
        return (
            (
                "momentum",
                left,
                f"least squares with the last round's step (coefficients {c[-2]:.3g} and {c[-1]:.3g})",
            )
            if left <= RESIDUAL
            else None
        )

    def _adaptive(self, cohort: CohortWeights, p: np.ndarray) -> Explanation | None:
        """Every coordinate goes where an average of the mean updates points."""
        import torch

        assert cohort.clients is not None and cohort.received is not None
        sample = _sample(cohort.aggregated.numel())
        w = cohort.received[sample].double()
        mean = torch.tensordot(torch.from_numpy(p), cohort.clients[:, sample].double() - w, 1)
        u = cohort.aggregated[sample].double() - w
        best, factor = 0.0, 0.0
        for beta, m in zip(BETAS, self._averages(cohort, mean), strict=True):
            large = m.abs() > m.abs().median() / 10
            agree = float((u.sign() == m.sign())[large].double().mean()) if large.any() else 0.0
            if agree > best:
                best, factor = agree, beta
        description = f"{best:.1%} of the coordinates go where the mean update points, averaged with beta = {factor:g}"
        return ("adaptive", 1 - best, description) if best >= 0.995 else None

    @staticmethod
    def _median(cohort: CohortWeights) -> Explanation | None:
        assert cohort.clients is not None and cohort.received is not None
        sample = _sample(cohort.aggregated.numel())
        rows, w = cohort.clients[:, sample].double(), cohort.aggregated[sample].double()
        middle = rows.quantile(0.5, dim=0)
        size = (w - cohort.received[sample].double()).norm()
        left = float((w - middle).norm() / size.clamp(min=1e-300))
        return (
            ("median", left, "every coordinate is the clients' median")
            if len(rows) > 2 and left <= RESIDUAL
            else None
        )


def _rounded(cohort: CohortWeights, p: np.ndarray) -> Explanation | None:
    """The mean to half precision: numbers that a coarser type holds to the bit, as far from the mean as its rounding allows."""
    import torch

    assert cohort.clients is not None and cohort.received is not None
    new, sample = cohort.aggregated, _sample(cohort.aggregated.numel())
    if new.dtype not in (torch.float32, torch.float64):
        return None
    rows, w = cohort.clients[:, sample].double(), new[sample].double()
    off = w - torch.tensordot(torch.from_numpy(p), rows, 1)
    for coarse in (torch.float16, torch.bfloat16):
        slack = len(rows) * (
            torch.finfo(coarse).eps * rows.abs().amax(0) + torch.finfo(coarse).smallest_normal
        )
        if torch.equal(new.to(coarse).to(new.dtype), new) and bool((off.abs() <= slack).all()):
            u = (w - cohort.received[sample].double()).norm().clamp(min=1e-300)
            return (
                "rounded",
                float(off.norm() / u),
                f"every number fits {str(coarse).removeprefix('torch.')}",
            )
    return None


def _sample(size: int) -> slice:
    return slice(None, None, max(1, size // SOME))
