"""How far the clients' updates agree: their signal-to-noise ratio and their consensus, for the whole network and by layer.

The ratio is that of McCandlish et al., "An Empirical Model of Large-Batch Training" (arXiv 1812.06162), section 2: its inverse is
their simple noise scale tr(Sigma) / |G|^2, with a client's update in the place of an example's gradient. Definition after the
paper; read in abstract and excerpts only.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from fldiag.results.table import Row
from fldiag.results.uncertainty import Interval, jackknife


def signal_to_noise(p: np.ndarray, norms: np.ndarray, apart: np.ndarray) -> float | None:
    """(||dbar||^2 - q tr(Sigma)) / tr(Sigma), whose numerator and denominator are without bias for independent d_k = mu + noise
    of covariance Sigma: q = sum p_k^2, tr(Sigma) = sum p_k ||d_k - dbar||^2 / (1 - q). None for one client or without spread.

    Args:
        p: weights of the clients [K], which sum to 1.
        norms: ||d_k||^2 [K].
        apart: ||d_k - d_j||^2 [K, K].
    """
    q, spread = float(p @ p), float(p @ apart @ p) / 2
    if len(p) < 2 or spread <= 0:
        return None
    return max(float(p @ norms) - spread, 0.0) * (1 - q) / spread - q


def interval(p: np.ndarray, norms: np.ndarray, apart: np.ndarray) -> Interval | None:
    """The ratio with its jackknife interval over the clients that have a weight."""
    counts = p > 0
    p, norms, apart = p[counts], norms[counts], apart[np.ix_(counts, counts)]
    value = signal_to_noise(p, norms, apart)
    if value is None:
        return None
    values = []
    for k in range(len(p)):
        rest = np.arange(len(p)) != k
        share = p[rest].sum()
        values.append(signal_to_noise(p[rest] / share, norms[rest], apart[np.ix_(rest, rest)]))
    return jackknife(value, [v for v in values if v is not None] if None not in values else [])


def rows_of(squares: Mapping[str | None, tuple[Tensor, Tensor]], p: np.ndarray) -> list[Row]:
    """``update_snr`` (with ``low``, ``high``) and ``update_consensus`` of the network (layer None) and its parts.

    Args:
        squares: as ``divergence.squares`` returns them.
        p: aggregation weights of the clients.
    """
    rows: list[Row] = []
    n = int((p > 0).sum())
    for layer, (lengths, distances) in squares.items():
        norms, apart = lengths.numpy(), distances.numpy()
        about: Row = {
            "moment": "trained",
            "scope": "global",
            "layer": layer,
            "n_clients": n,
            "value": None,
        }
        ratio = interval(p, norms, apart)
        if ratio is None:
            reason = "one client has no spread" if n < 2 else "all updates are the same"
            rows.append({**about, "metric": "update_snr", "note": reason})
        else:
            ends = {"value": ratio.value, "low": ratio.low, "high": ratio.high}
            rows.append({**about, "metric": "update_snr", **ends})
        total = float(p @ np.sqrt(norms))
        length = max(float(p @ norms) - float(p @ apart @ p) / 2, 0.0) ** 0.5
        consensus: Row = (
            {"value": min(length / total, 1.0)} if total else {"note": "no client moved"}
        )
        rows.append({**about, "metric": "update_consensus", **consensus})
    return rows
