"""A surface on a fine grid from few evaluations: a smooth surface through scattered points, its error estimated.

Loss surfaces around a trained model are smooth at the scale of a plotting grid, so most of its points can be
interpolated. Points are added where the surface could hide most: where it is rough, as its points tell when each is left
out in turn, and far from any point. Every new point first checks what the others said of it, then joins them. The
error reported at the end is an estimate, not a bound: the largest expected anywhere times a margin.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fldiag.errors import FldiagError
from fldiag.seeding import numpy_rng

#: Reported error / largest error expected: set on surfaces of trained networks and synthetic ones, known at every point.
MARGIN = 3.4
#: No surface is believed to be smooth on fewer points, and a grid that needs more than this share is evaluated whole.
LEAST, MOST = 81, 0.5
#: New points a step, as a share of those so far.
GROWTH = 0.2
#: Points are added down to this share of the largest error allowed.
WORTH = 0.3
#: Grids up to this size are evaluated whole: there is nothing to save.
WHOLE = 9
#: A point is next to an overflow when one of so many nearest evaluated points is infinite.
BESIDE = 5
#: Exponents of the distance that are tried: the smoother surface first.
POWERS = (5, 3)
#: The local roughness is that of so many nearest points, and at least this share of the whole surface's.
NEAR, SHARE = 6, 0.1

#: (row, column) of points [m, 2] -> (loss, standard error) of each [m, 2].
Evaluate = Callable[[np.ndarray], np.ndarray]


def axis(points: int, span: float) -> np.ndarray:
    """``points`` coefficients from -span to span, symmetric to the bit, with exactly 0 in the middle.

    Raises FldiagError for an even number of points, which has no middle.
    """
    if points % 2 == 0 or points < 3:
        raise FldiagError(
            f"points = {points} puts no grid point at the weights themselves",
            "use an odd number of at least 3",
            usage=True,
        )
    half = span * (np.arange(1, points // 2 + 1) / (points // 2))
    return np.concatenate([-half[::-1], [0.0], half])


@dataclass(frozen=True)
class FilledGrid:
    """The whole grid: what was evaluated, and what the spline says elsewhere.

    ``error``: an estimate from above of the largest error, as a share of the loss range (None when every point was
    evaluated); ``residual`` the same in units of the loss, at every interpolated point. ``checks``: the points that were
    predicted before they were evaluated.
    """

    evaluated: np.ndarray
    value: np.ndarray
    stderr: np.ndarray
    residual: np.ndarray
    error: float | None
    checks: int


def nested(points: int) -> list[int]:
    """The coarsest knots: the ends, the middle and the points half-way, symmetric."""
    half = points // 2
    step = (half + 1) // 2
    return [0, half - step, half, half + step, points - 1]


@dataclass(frozen=True)
class Heights:
    """How losses become the heights that the spline goes through.

    Surfaces whose corners explode (beyond the outer fence: third quartile + 3 interquartile ranges; J. Tukey,
    "Exploratory Data Analysis", 1977) are interpolated on a scale that is linear below and logarithmic above,
    so that the corners cannot ring into the valley. ``size`` is the loss range up to the fence.
    """

    low: float
    size: float
    wild: bool

    @staticmethod
    def of(losses: np.ndarray) -> Heights:
        finite = losses[np.isfinite(losses)]
        low, high = float(finite.min()), float(finite.max())
        first, third = np.quantile(finite, [0.25, 0.75])
        fence = float(third + 3 * (third - first))
        wild = len(finite) < losses.size or (high > fence > low)
        return Heights(low, (min(high, fence) if fence > low else high) - low or 1e-300, wild)

    def up(self, losses: np.ndarray) -> np.ndarray:
        if not self.wild:
            return losses
        with np.errstate(over="ignore", invalid="ignore"):
            heights = self.size * np.arcsinh((losses - self.low) / self.size)
        return np.where(np.isfinite(heights), heights, heights[np.isfinite(heights)].max())

    def down(self, heights: np.ndarray) -> np.ndarray:
        if not self.wild:
            return heights
        return self.low + self.size * np.sinh(np.minimum(heights / self.size, 700.0))

    def share(self, error: np.ndarray, losses: np.ndarray) -> np.ndarray:
        """Errors as shares of the range; above the fence, of the loss itself."""
        with np.errstate(invalid="ignore"):
            return np.abs(error) / np.maximum(self.size, losses - self.low)


class Refinement:
    """The steps from the coarsest points to a grid whose error is below ``rtol``; every decision follows from the
    losses so far, so an interrupted evaluation that is repeated takes the same steps."""

    def __init__(self, points: int, evaluate: Evaluate, rtol: float, seed: int):
        self.points, self._evaluate, self.rtol = points, evaluate, rtol
        self.evaluated = np.zeros((points, points), dtype=bool)
        self.loss, self.stderr = np.full((2, points, points), np.nan)
        steps = np.linspace(-1.0, 1.0, self.points)
        self.places = np.stack(np.meshgrid(steps, steps), axis=-1).reshape(-1, 2)
        # which comes first of equal points
        self.order = numpy_rng(seed, "landscape points").permutation(len(self.places))
        self.surpluses: list[tuple[int, float]] = []
        self.checks = 0

    def evaluate(self, mask: np.ndarray) -> None:
        """The points of the mask that are not evaluated yet."""
        new = np.argwhere(mask & ~self.evaluated)
        if len(new):
            self.loss[tuple(new.T)], self.stderr[tuple(new.T)] = self._evaluate(new).T
            self.evaluated |= mask

    def evaluate_all(self) -> FilledGrid:
        self.evaluate(np.ones_like(self.evaluated))
        residual = np.full(self.evaluated.shape, np.nan)
        return FilledGrid(self.evaluated, self.loss, self.stderr, residual, None, 0)

    def start(self) -> np.ndarray:
        """The coarsest points and the middles between them."""
        mask, knots = np.zeros_like(self.evaluated), nested(self.points)
        mask[np.ix_(knots, knots)] = True
        middles = [(a + b) // 2 for a, b in itertools.pairwise(knots)]
        mask[np.ix_(middles, middles)] = True
        return mask

    def run(self) -> FilledGrid:
        if self.points <= WHOLE:
            return self.evaluate_all()
        self.evaluate(self.start())
        guess: np.ndarray | None = None
        while self.evaluated.sum() <= MOST * self.evaluated.size:
            finite = np.isfinite(self.loss) & self.evaluated
            if finite.sum() < LEAST // 4:
                break
            # the quartiles of the surface, not of its points, which crowd where it is rough
            heights = Heights.of(self.loss[self.evaluated] if guess is None else guess)
            up = heights.up(self.loss[finite])
            # from the first point's height, so that a flat surface stays flat to the bit
            spline = best_spline(self.places, self.places[finite.ravel()], up - up[0])
            height, expected = (
                a.reshape(self.evaluated.shape)
                for a in (up[0] + spline.height, MARGIN * spline.expected)
            )
            guess = np.where(self.evaluated, self.loss, heights.down(height))
            share = self._share(heights, height, expected)
            wild = self._beside_overflow()
            worst = float(share[~wild].max(initial=0.0))
            if worst <= self.rtol and self.evaluated.sum() >= LEAST:
                if not wild.any():
                    return self._filled(guess, heights, worst, spline, finite)
                self.evaluate(wild)
                continue
            if self._hopeless(share):
                break
            if not self._add(share, ~self.evaluated & ~wild, height, heights):
                self.evaluate(wild)
        return self.evaluate_all()

    def _share(self, heights: Heights, height: np.ndarray, expected: np.ndarray) -> np.ndarray:
        """The error expected as a share of the range, 0 where evaluated."""
        value = heights.down(height)
        with np.errstate(invalid="ignore", over="ignore"):
            share = (
                heights.share(heights.down(height + expected) - value, value)
                if heights.wild
                else expected / heights.size
            )
        share = np.where(np.isfinite(share), share, 1e6)  # beyond any share that could be allowed
        return np.where(self.evaluated, 0.0, share)

    def _beside_overflow(self) -> np.ndarray:
        """Points not evaluated, one of whose nearest evaluated points is infinite or not a number."""
        lost = (self.evaluated & ~np.isfinite(self.loss)).ravel()
        if not lost.any():
            return np.zeros_like(self.evaluated)
        evaluated = np.flatnonzero(self.evaluated)
        gaps = self.places[:, None] - self.places[None, evaluated]
        nearest = np.argpartition((gaps**2).sum(-1), BESIDE, axis=1)[:, :BESIDE]
        return lost[evaluated[nearest]].any(axis=1).reshape(self.evaluated.shape) & ~self.evaluated

    def _hopeless(self, share: np.ndarray) -> bool:
        """Whether most of what is left is in doubt, and three times the points have not halved what new points bring."""
        doubtful = (share > self.rtol).sum() > (~self.evaluated).sum() / 2
        before = [
            surplus
            for count, surplus in self.surpluses
            if 3 * count <= self.evaluated.sum() and count >= LEAST
        ]
        return bool(doubtful and before and self.surpluses[-1][1] > before[-1] / 2)

    def _add(
        self, share: np.ndarray, free: np.ndarray, height: np.ndarray, heights: Heights
    ) -> int:
        """New points where most is hidden, none nearer to another new one than to the points before; how many."""
        count = max(16, round(GROWTH * self.evaluated.sum()))
        gap = _distances(self.places, self.places[self.evaluated.ravel()]).min(axis=1)
        flat = np.where(free, share, -1.0).ravel()
        ranks = np.lexsort((self.order, -np.round(flat / max(float(flat.max()), 1e-300), 6)))
        new: list[int] = []
        for place in ranks[: int(free.sum())]:
            if len(new) == count or (len(new) >= 16 and flat[place] < WORTH * self.rtol):
                break
            if np.all(np.hypot(*(self.places[new] - self.places[place]).T) >= gap[place]):
                new.append(int(place))
        if not new:
            return 0
        mask = np.zeros_like(self.evaluated)
        mask.flat[new] = True
        self.evaluate(mask)
        self.checks += len(new)
        surplus = (
            heights.up(self.loss[mask]) - height[mask]
            if np.isfinite(self.loss[mask]).any()
            else np.inf
        )
        self.surpluses.append((int(self.evaluated.sum()), float(np.sqrt(np.mean(surplus**2)))))
        return len(new)

    def _filled(
        self,
        value: np.ndarray,
        heights: Heights,
        worst: float,
        spline: Spline,
        finite: np.ndarray,
    ) -> FilledGrid:
        evaluated = self.evaluated
        stderr = np.full(evaluated.shape, np.nan)
        if np.isfinite(self.stderr[finite]).all():
            stderr = np.maximum(spline.through(self.stderr[finite]).reshape(evaluated.shape), 0.0)
        residual = worst * np.maximum(heights.size, value - heights.low)
        return FilledGrid(
            evaluated,
            value,
            np.where(evaluated, self.stderr, stderr),
            np.where(evaluated, np.nan, residual),
            worst,
            self.checks,
        )


def fill(points: int, evaluate: Evaluate, rtol: float, seed: int) -> FilledGrid:
    """A grid of ``points`` x ``points`` (rows are y) with an error below ``rtol`` of the loss range; 0 evaluates all."""
    refinement = Refinement(points, evaluate, rtol, seed)
    return refinement.evaluate_all() if rtol <= 0 else refinement.run()


# -- a smooth surface through scattered points, what each point tells about its error, and where it can hide most


@dataclass(frozen=True)
class Spline:
    """Heights at all places, and the error expected there (0 at the points themselves), in heights."""

    height: np.ndarray
    expected: np.ndarray
    coefficients: np.ndarray
    basis: np.ndarray
    inverse: np.ndarray

    def through(self, values: np.ndarray) -> np.ndarray:
        """Other values at the same points, interpolated in the same way."""
        return np.asarray(self.basis @ (self.inverse[:, : len(values)] @ values))


def interpolate(
    points: np.ndarray, places: np.ndarray, heights: np.ndarray, power: int
) -> tuple[Spline, float]:
    """The polyharmonic spline |r|^power through ``heights`` at ``places`` [m, 2], at all of ``points`` [n, 2]; polynomials
    up to the degree (power + 1) / 2 are exact. Also the root mean square of its leave-one-out errors.

    The error of leaving a point out follows from the inverse matrix (Rippa, "An algorithm for selecting a good value for
    the parameter c in radial basis function interpolation", 1999). Divided by the power function there, which depends on
    the places alone, it is the surface's roughness near that point; times the power function elsewhere, it is the error
    expected there (Wendland, "Scattered Data Approximation", 2005, section 11.1).
    """
    count, terms = len(places), _polynomials(places, (power + 1) // 2)
    matrix = np.zeros((count + terms.shape[1],) * 2)
    matrix[:count, :count] = _distances(places, places) ** power
    matrix[:count, count:], matrix[count:, :count] = terms, terms.T
    inverse = np.linalg.inv(matrix)
    coefficients = inverse[:, :count] @ heights
    diagonal = np.maximum(np.abs(np.diag(inverse)[:count]), 1e-300)
    roughness = np.abs(coefficients[:count]) / np.sqrt(diagonal)
    distances = _distances(points, places)
    basis = np.concatenate([distances**power, _polynomials(points, (power + 1) // 2)], axis=1)
    reach = np.sqrt(np.abs(np.einsum("ij,ij->i", basis @ inverse, basis)))
    nearest = np.argpartition(distances, NEAR, axis=1)[:, :NEAR]
    local = np.sqrt((roughness[nearest] ** 2).mean(1) + (SHARE * _rms(roughness)) ** 2)
    return Spline(basis @ coefficients, local * reach, coefficients, basis, inverse), _rms(
        coefficients[:count] / diagonal
    )


def best_spline(points: np.ndarray, places: np.ndarray, heights: np.ndarray) -> Spline:
    """The surface whose leave-one-out errors are smallest: smooth surfaces and kinked ones want different powers."""
    return min(
        (interpolate(points, places, heights, power) for power in POWERS),
        key=lambda spline_and_error: spline_and_error[1],
    )[0]


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt((values**2).mean()))


def _distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.asarray(
        np.sqrt((a[:, None, 0] - b[None, :, 0]) ** 2 + (a[:, None, 1] - b[None, :, 1]) ** 2)
    )


def _polynomials(a: np.ndarray, degree: int) -> np.ndarray:
    return np.stack(
        [a[:, 0] ** i * a[:, 1] ** j for i in range(degree + 1) for j in range(degree + 1 - i)],
        axis=1,
    )
