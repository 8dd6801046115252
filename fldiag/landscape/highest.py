"""The highest point of a smooth function on an interval, from a grid that is refined where the function may be higher still."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def highest(
    f: Callable[[float], float], places: np.ndarray, values: np.ndarray, most: int, rtol: float
) -> tuple[np.ndarray, np.ndarray, float]:
    """Ask ``f`` at up to ``most`` further places, each in the middle of the interval that may hide most.

    Between two neighbours a function lies above both by at most h^2 / 8 times its second derivative, which is taken from the
    second differences at the two. Ends when nothing higher than the highest value is expected by more than ``rtol`` of the range.

    Returns places, values, and by how much the function may exceed the highest of them: an estimate, as the second derivative
    between the points is one. Values that are no numbers end it, with an error of NaN.

    >>> x, y, error = highest(lambda t: -(t - 0.3) ** 2, np.linspace(0, 1, 5), -(np.linspace(0, 1, 5) - 0.3) ** 2, 20, 1e-4)
    >>> round(float(x[y.argmax()]), 2), bool(-y.max() <= error <= 1e-4)
    (0.3, True)
    """
    for count in range(most + 1):
        if not np.isfinite(values).all():
            return places, values, float("nan")
        above = _above(places, values)
        error = float(above.max() - values.max())
        if count == most or error <= rtol * float(np.ptp(values)):
            return places, values, max(error, 0.0)
        at = int(above.argmax())
        new = float((places[at] + places[at + 1]) / 2)
        places, values = np.insert(places, at + 1, new), np.insert(values, at + 1, f(new))
    raise AssertionError


def _above(places: np.ndarray, values: np.ndarray) -> np.ndarray:
    """How high the function may be in each interval."""
    steps = np.diff(places)
    slopes = np.diff(values) / steps
    bend = np.abs(np.diff(slopes) / ((steps[1:] + steps[:-1]) / 2))
    bend = np.concatenate([bend[:1], bend, bend[-1:]])
    return np.maximum(values[:-1], values[1:]) + steps**2 / 8 * np.maximum(bend[:-1], bend[1:])
