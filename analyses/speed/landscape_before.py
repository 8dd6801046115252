"""The rule before this one, kept as what landscape_error.py compares with: a tensor-product spline, refined axis by axis."""

from __future__ import annotations

import itertools

import numpy as np
from scipy.interpolate import RectBivariateSpline

from fldiag.landscape import grid
from fldiag.landscape.grid import Evaluate, FilledGrid, Heights, nested
from fldiag.seeding import numpy_rng

#: Check points a level: this many where the error is expected, and as many at random.
CHECKS = 16
#: An axis whose share of the doubt at a point is smaller than this has no part in its error.
BLAME = 0.1
#: Grids up to this size are evaluated whole.
WHOLE = 5


def halved(knots: list[int], gaps: set[int]) -> list[int]:
    """The knots with a new one in the middle of each of these gaps (gap i lies between knots i and i + 1)."""
    new = {(knots[i] + knots[i + 1]) // 2 for i in gaps}
    return sorted(set(knots) | new)


def _spline(
    axis: np.ndarray, rows: list[int], columns: list[int], heights: np.ndarray
) -> np.ndarray:
    """Values on the whole grid of the spline through the knots; cubic, or of what degree the knots allow."""
    degrees = min(3, len(rows) - 1), min(3, len(columns) - 1)
    found = RectBivariateSpline(
        axis[rows], axis[columns], heights, kx=degrees[0], ky=degrees[1], s=0
    )
    return found(axis, axis)


def _sound(points: int, rows: list[int], columns: list[int], finite: np.ndarray) -> np.ndarray:
    """Points all of whose knots are finite, in their own cell and the cells around it."""
    bad = ~finite
    mask = np.ones((points, points), dtype=bool)
    for i, j in np.argwhere(bad):
        top, bottom = rows[max(i - 2, 0)], rows[min(i + 2, len(rows) - 1)]
        left, right = columns[max(j - 2, 0)], columns[min(j + 2, len(columns) - 1)]
        mask[top : bottom + 1, left : right + 1] = False
    return mask


class Refinement(grid.Refinement):
    """The steps from the coarsest knots to a grid whose error is below ``rtol``; every decision follows from
    the losses so far, so an interrupted evaluation that is repeated takes the same steps."""

    def __init__(self, axis: np.ndarray, evaluate: Evaluate, rtol: float, seed: int):
        super().__init__(len(axis), evaluate, rtol, seed)
        self.axis, self.seed = axis, seed
        self.rows = self.columns = nested(len(axis))

    def knots(self) -> np.ndarray:
        mask = np.zeros_like(self.evaluated)
        mask[np.ix_(self.rows, self.columns)] = True
        return mask

    def run(self) -> FilledGrid:
        if len(self.axis) <= WHOLE:
            return self.evaluate_all()
        for level in itertools.count():
            self.evaluate(self.knots())
            losses = self.loss[np.ix_(self.rows, self.columns)]
            if not np.isfinite(losses).any() or self.evaluated.all():
                break
            heights = Heights.of(losses)
            up = heights.up(losses)
            height = _spline(self.axis, self.rows, self.columns, up)
            sound = _sound(len(self.axis), self.rows, self.columns, np.isfinite(losses))
            doubts = [np.abs(height - self._coarser(up, axis)) for axis in (0, 1)]
            self.evaluate(self._choose(doubts[0] + doubts[1], sound, level))
            value = heights.down(height)
            checked = self.evaluated & ~self.knots() & sound
            with np.errstate(invalid="ignore"):
                error = value - self.loss
            share = np.where(checked, heights.share(error, self.loss), 0.0)
            share[~np.isfinite(share)] = np.inf
            worst = float(share.max()) * _beyond(int((~self.evaluated).sum()), int(checked.sum()))
            wild = ~sound & ~self.evaluated
            blame = [doubt >= BLAME * (doubts[0] + doubts[1]) for doubt in doubts]
            finer = [
                self._finer(np.where(blame[axis], share, 0.0), knots, axis)
                for axis, knots in enumerate((self.rows, self.columns))
            ]
            if worst <= self.rtol:
                finer = [
                    halved(knots, set(range(len(knots) - 1))) for knots in (self.rows, self.columns)
                ]
                if wild.sum() <= max(len(finer[0]) * len(finer[1]) - losses.size, len(self.axis)):
                    self.evaluate(wild)
                    return self._former(value, heights, worst, int(checked.sum()))
            if finer == [self.rows, self.columns]:  # only the extrapolation is too large
                finer = [
                    halved(knots, set(range(len(knots) - 1))) for knots in (self.rows, self.columns)
                ]
            self.rows, self.columns = finer
        return self.evaluate_all()

    def _coarser(self, heights: np.ndarray, axis: int) -> np.ndarray:
        """The spline through every second knot of one axis: where it differs from that through all, errors are
        likely, and from that axis."""
        kept = [self.rows, self.columns]
        half = sorted({*range(0, len(kept[axis]), 2), len(kept[axis]) - 1})
        kept[axis] = [kept[axis][i] for i in half]
        return _spline(self.axis, kept[0], kept[1], heights.take(half, axis))

    def _choose(self, doubt: np.ndarray, sound: np.ndarray, level: int) -> np.ndarray:
        """New check points: the most doubtful ones of the cells with the most doubt, and some at random."""
        free = sound & ~self.evaluated
        chosen = np.zeros_like(free)
        places = []
        for top, bottom in zip(self.rows, self.rows[1:], strict=False):
            for left, right in zip(self.columns, self.columns[1:], strict=False):
                cell = np.where(free, doubt, -1.0)[top : bottom + 1, left : right + 1]
                down, across = divmod(int(cell.argmax()), cell.shape[1])
                if cell[down, across] >= 0:
                    places.append((-float(cell[down, across]), top + down, left + across))
        for _, row, column in sorted(places)[:CHECKS]:
            chosen[row, column] = True
        rest = np.argwhere(free & ~chosen)
        rng = numpy_rng(self.seed, "landscape check points", level)
        for row, column in rng.permutation(rest)[:CHECKS]:
            chosen[row, column] = True
        return chosen

    def _finer(self, share: np.ndarray, knots: list[int], axis: int) -> list[int]:
        """The knots with those gaps halved in which a check point is off by a quarter of what is allowed."""
        worst = share.max(axis=1 - axis)
        gaps = {
            i
            for i in range(len(knots) - 1)
            if knots[i + 1] - knots[i] > 1
            and worst[knots[i] + 1 : knots[i + 1]].max() > self.rtol / 4
        }
        return halved(knots, gaps)

    def _former(self, value: np.ndarray, heights: Heights, worst: float, checks: int) -> FilledGrid:
        evaluated = self.evaluated
        spread = self.stderr[np.ix_(self.rows, self.columns)]
        stderr = np.full(evaluated.shape, np.nan)
        if np.isfinite(spread).all():
            stderr = np.maximum(_spline(self.axis, self.rows, self.columns, spread), 0.0)
        residual = worst * np.maximum(heights.size, value - heights.low)
        return FilledGrid(
            evaluated,
            np.where(evaluated, self.loss, value),
            np.where(evaluated, self.stderr, stderr),
            np.where(evaluated, np.nan, residual),
            worst,
            checks,
        )


def _beyond(unseen: int, seen: int) -> float:
    """The largest of so many unseen errors over the largest of the seen, as expected of exponential tails
    (the largest of n exponential variables is on average their mean times the n-th harmonic number)."""

    def harmonic(n: int) -> float:
        return float((1 / np.arange(1, n + 1)).sum())

    return max(1.0, harmonic(unseen) / harmonic(max(seen, 1)))


def fill(
    axis: np.ndarray,
    evaluate: Evaluate,
    rtol: float,
    seed: int,
    first: np.ndarray | None = None,
) -> FilledGrid:
    """The grid ``axis`` x ``axis`` (rows are y) with an error below ``rtol`` of the loss range; 0 evaluates all.

    The points of the mask ``first`` are evaluated in any case.
    """
    refinement = Refinement(axis, evaluate, rtol, seed)
    if first is not None:
        refinement.evaluate(first)
    return refinement.evaluate_all() if rtol <= 0 else refinement.run()
