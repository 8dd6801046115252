"""Server steps that need more than one round, or more than inner products, to be recognised."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from fldiag.diagnostics.doctor.statistics import coordinates

if TYPE_CHECKING:
    from torch import Tensor

    from fldiag.diagnostics.doctor.case import CohortWeights

RESIDUAL = 1e-3
#: Coordinates that are looked at one by one.
SOME = 20_000
#: Coordinates on which the state of an adaptive server is followed.
FOLLOWED = 4_000
#: Factors of the mean's momentum that are tried, and those of its squares' averages, and where these may begin.
BETAS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99)
SQUARES = (0.9, 0.99, 0.999)
BEGINNINGS = (0.0, 1e-6, 1e-4, 1e-2)
#: What the fit m / (sqrt(v) + tau) may leave of the update, and what share of that which a multiple of m leaves.
ADAPTED, BETTER = 0.02, 0.2
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
        self.squares: dict[tuple[str, float, float], Tensor] = {}  # and of its squares
        self.is_whole = False  # whether these began with the run

    def explains(self, cohort: CohortWeights, p: np.ndarray) -> Explanation | None:
        """late, rounded, compressed, momentum or adaptive; ``p``: weights [K] of the mean that the run names."""
        return (
            self._late(cohort)
            or _rounded(cohort, p)
            or _compressed(cohort, p)
            or self._momentum(cohort)
            or self._adaptive(cohort, p)
        )

    def keep(self, cohort: CohortWeights, p: np.ndarray) -> None:
        """Remember this round."""
        import torch

        w, rows, new = cohort.part()
        mean = torch.tensordot(torch.from_numpy(p), rows - w, 1)
        part = mean[coordinates(len(w), FOLLOWED)]
        self.is_whole = cohort.round == 1 or (self.is_whole and self.round == cohort.round - 1)
        self.averages, self.squares = self._averages(cohort, part), self._squares(cohort, part)
        self.earlier, self.round, self.mean = [new - w, new - w - mean], cohort.round, w + mean

    def _late(self, cohort: CohortWeights) -> Explanation | None:
        """The mean of the last round's clients."""
        if self.round != cohort.round - 1 or self.mean is None:
            return None
        w, _, new = cohort.part()
        left = float((new - self.mean).norm() / (new - w).norm().clamp(min=1e-300))
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
        c, left = cohort.least_squares(self.earlier)
        text = (
            f"least squares with the last round's step (coefficients {c[-2]:.3g} and {c[-1]:.3g})"
        )
        return ("momentum", left, text) if left <= RESIDUAL else None

    def _squares(
        self, cohort: CohortWeights, mean: Tensor
    ) -> dict[tuple[str, float, float], Tensor]:
        """v of FedAdam, FedYogi and FedAdagrad, by factor and beginning."""
        import torch

        is_next = self.round == cohort.round - 1 and self.squares
        new, d = {}, mean**2
        for start in BEGINNINGS:
            for kind, beta in (
                *((k, b) for b in SQUARES for k in ("FedAdam", "FedYogi")),
                ("FedAdagrad", 1.0),
            ):
                v = self.squares[kind, beta, start] if is_next else torch.full_like(d, start)
                if kind == "FedAdam":
                    v = beta * v + (1 - beta) * d
                elif kind == "FedYogi":
                    v = v - (1 - beta) * d * (v - d).sign()
                else:
                    v = v + d
                new[kind, beta, start] = v
        return new

    def _adaptive(self, cohort: CohortWeights, p: np.ndarray) -> Explanation | None:
        """The update is m / (sqrt(v) + tau), up to a factor; or, where the state before is not known, flatter than an average m
        of the mean updates and of its signs."""
        import torch

        w, rows, new = cohort.part(coordinates(cohort.aggregated.numel(), FOLLOWED))
        mean, u = torch.tensordot(torch.from_numpy(p), rows - w, 1), new - w
        averages = self._averages(cohort, mean)
        if cohort.round == 1 or (self.is_whole and self.round == cohort.round - 1):
            fits = [
                (*_fit(u, m, v.clamp(min=0).sqrt()), kind, b, beta)
                for (kind, beta, _), v in self._squares(cohort, mean).items()
                for b, m in zip(BETAS, averages, strict=True)
            ]
            left, plain, kind, b, beta = min(fits, key=lambda fit: fit[0])
            if left <= ADAPTED and left <= BETTER * plain:
                text = f"{kind}: m / (sqrt(v) + tau), beta1 = {b:g}, beta2 = {beta:g}"
                return "adaptive", left, text
        for b, m in zip(BETAS, averages, strict=True):
            large = m.abs() > m.abs().median() / 10
            agree = float((u.sign() == m.sign())[large].double().mean()) if large.any() else 0.0
            flat, usual = (float(x.std() / x.mean().clamp(min=1e-300)) for x in (u.abs(), m.abs()))
            if agree >= 0.995 and flat < 0.7 * usual:
                factor = float(u @ m / (m @ m))
                left = float((u - factor * m).norm() / u.norm())
                return (
                    "adaptive",
                    left,
                    f"{agree:.1%} of the coordinates go where the mean update points, averaged with beta = {b:g}, and their "
                    f"sizes differ less ({flat:.2g} for {usual:.2g}); a multiple of it leaves {left:.0%}",
                )
        return None


def _rounded(cohort: CohortWeights, p: np.ndarray) -> Explanation | None:
    """The mean to half precision: numbers that a coarser type holds to the bit, as far from the mean as its rounding allows."""
    import torch

    if cohort.aggregated.dtype not in (torch.float32, torch.float64):
        return None
    start, rows, w = cohort.part(coordinates(cohort.aggregated.numel(), SOME))
    off = w - torch.tensordot(torch.from_numpy(p), rows, 1)
    for coarse in (torch.float16, torch.bfloat16):
        slack = len(rows) * (
            torch.finfo(coarse).eps * rows.abs().amax(0) + torch.finfo(coarse).smallest_normal
        )
        new = cohort.aggregated
        if torch.equal(new.to(coarse).to(new.dtype), new) and bool((off.abs() <= slack).all()):
            left = float(off.norm() / (w - start).norm().clamp(min=1e-300))
            return "rounded", left, f"every number fits {str(coarse).removeprefix('torch.')}"
    return None


def _fit(u: Tensor, m: Tensor, root: Tensor) -> tuple[float, float]:
    """What the best m / (a sqrt(v) + b) leaves of the update, and what the best multiple of m leaves."""
    import torch

    size = u.norm().clamp(min=1e-300)
    columns = torch.stack([root * u, u], 1)
    scale = columns.norm(dim=0).clamp(min=1e-300)
    a, b = (torch.linalg.lstsq(columns / scale, m[:, None]).solution[:, 0] / scale).tolist()
    divisor = a * root + b
    plain = float((u - (u @ m / (m @ m).clamp(min=1e-300)) * m).norm() / size)
    if not bool((divisor > 0).all()):
        return np.inf, plain
    return float((u - m / divisor).norm() / size), plain


def _codes() -> dict[str, Callable[[Tensor], Tensor]]:
    """How clients' numbers may be rounded, tensor by tensor [K, n]."""
    import torch

    def symmetric(x: Tensor) -> Tensor:
        step = (x.abs().amax(1, keepdim=True) / 127).clamp(min=1e-300)
        return (x / step).round() * step

    def affine(x: Tensor) -> Tensor:
        low = x.amin(1, keepdim=True)
        step = ((x.amax(1, keepdim=True) - low) / 255).clamp(min=1e-300)
        return ((x - low) / step).round() * step + low

    return {
        "fp16": lambda x: x.to(torch.float16).double(),
        "bf16": lambda x: x.to(torch.bfloat16).double(),
        "8 bits, symmetric": symmetric,
        "8 bits, from least to largest": affine,
    }


def _compressed(cohort: CohortWeights, p: np.ndarray) -> Explanation | None:
    """The mean of the clients' weights, or updates, each rounded before."""
    import torch

    weights, codes = torch.from_numpy(p), _codes()
    left = dict.fromkeys([(code, form) for code in codes for form in ("weights", "updates")], 0.0)
    size = largest = 0.0
    for w, rows, new in map(cohort.part, cohort.slices.values()):
        u = new - w
        size, largest = size + float(u @ u), largest + float((rows**2).sum(1).max())
        for name, code in codes.items():
            mean = torch.tensordot(weights, code(rows), 1)
            left[name, "weights"] += float(((new - mean) ** 2).sum())
            mean = torch.tensordot(weights, code(rows - w), 1)
            left[name, "updates"] += float(((u - mean) ** 2).sum())
    (name, form), least = min(left.items(), key=lambda one: one[1])
    floor = 4 * cohort.eps * np.sqrt(largest)
    if np.sqrt(least) > max(RESIDUAL * np.sqrt(size), floor):
        return None
    return (
        "compressed",
        float(np.sqrt(least / max(size, 1e-300))),
        f"the mean of the clients' {form} in {name}",
    )


def find_noise(cohort: CohortWeights, p: np.ndarray) -> Explanation | None:
    """The mean and noise shorter than it: of one variance in a tensor, without tails, and nothing to do with the mean."""
    import torch

    weights, rows = torch.from_numpy(p), list[tuple[int, float]]()
    noise = size = 0.0
    for w, clients, new in map(cohort.part, cohort.slices.values()):
        mean = torch.tensordot(weights, clients - w, 1)
        e, n = new - w - mean, len(w)
        noise, size = noise + float(e @ e), size + float(mean @ mean)
        if n < 200 or not bool(e.any()):
            continue
        tails = float((e**4).mean() / (e**2).mean() ** 2)
        cosine = float(e @ mean / (e.norm() * mean.norm()).clamp(min=1e-300))
        halves = [float((half**2).mean()) for half in (e[mean.abs() > mean.abs().median()], e)]
        slack = 5 * np.sqrt(24 / n)
        if tails > 3 + max(0.5, slack) or abs(cosine) > 5 / np.sqrt(n):
            return None
        if not 1 / (1 + slack) < halves[0] / halves[1] < 1 + slack:
            return None
        rows.append((n, float(e.std())))
    if not rows or noise > size:
        return None
    sizes = [v for _, v in rows]
    is_even = max(sizes) <= min(sizes) * (1 + 5 / np.sqrt(min(n for n, _ in rows)))
    how = (
        f"of standard deviation {sizes[0]:.2g} everywhere, as for differential privacy"
        if is_even
        else f"of standard deviation {min(sizes):.2g} to {max(sizes):.2g}, tensor by tensor"
    )
    return "noised", float(np.sqrt(noise / size)), f"the mean and noise {how}"
