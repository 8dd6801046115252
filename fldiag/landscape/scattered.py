"""A smooth surface through scattered points, what each point tells about its error, and where it can hide most."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Exponents of the distance that are tried: the smoother surface first.
POWERS = (5, 3)
#: The local roughness is that of so many nearest points, and at least this share of the whole surface's.
NEAR, SHARE = 6, 0.1


@dataclass(frozen=True)
class Guess:
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
) -> tuple[Guess, float]:
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
    return Guess(basis @ coefficients, local * reach, coefficients, basis, inverse), _rms(
        coefficients[:count] / diagonal
    )


def best(points: np.ndarray, places: np.ndarray, heights: np.ndarray) -> Guess:
    """The surface whose leave-one-out errors are smallest: smooth surfaces and kinked ones want different powers."""
    return min(
        (interpolate(points, places, heights, power) for power in POWERS),
        key=lambda guess_and_error: guess_and_error[1],
    )[0]


def gaps(points: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The distance of each of ``points`` to the nearest of ``places``."""
    return np.asarray(_distances(points, places).min(axis=1))


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
