"""How uncertain a share of examples is: its standard error and its interval."""

from __future__ import annotations

import math
from statistics import NormalDist


def share(right: float, n: float, confidence: float = 0.95) -> dict[str, float]:
    """``value``: right / n, n > 0, with its binomial ``stderr`` and the ends ``low`` and ``high`` of Wilson's interval."""
    p = right / n
    low, high = wilson(right, n, confidence)
    return {"value": p, "stderr": math.sqrt(p * (1 - p) / n), "low": low, "high": high}


def wilson(right: float, n: float, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's interval of the share right / n, n > 0 (E. B. Wilson, J. Am. Stat. Assoc. 22, 1927)."""
    # scipy.stats.binomtest gives the same interval, but tests a hypothesis first, which takes a hundred times as long:
    # `forgetting` has 100,000 shares.
    z, p = NormalDist().inv_cdf(0.5 + confidence / 2), right / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    reach = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (0.0 if right == 0 else middle - reach), (1.0 if right == n else middle + reach)
