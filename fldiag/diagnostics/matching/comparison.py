"""Clients' Hessians against each other: differences of their norms, cosines of their directions, angles of eigenspaces."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fldiag.curvature.lanczos import EigenPairs
from fldiag.diagnostics.drift.divergence import cosines
from fldiag.problem.diagonal import norm
from fldiag.results.table import Row

MODES = ("diag", "tensor_trace")


@dataclass(frozen=True)
class Space:
    """The top eigenvectors [k, P], on the CPU; whether they ``converged``, and whether all belong to eigenvalues that are not
    zero: the others span any space (``is_defined``)."""

    vectors: Tensor
    converged: bool
    is_defined: bool

    @staticmethod
    def of(pairs: EigenPairs, dtype: torch.dtype, noise: float) -> Space:
        """``noise``: eigenvalues below this share of the largest are zero. ``dtype``: the vectors are kept so."""
        sizes = np.abs(pairs.values)
        return Space(
            pairs.vectors.to("cpu", dtype),
            bool(pairs.converged.all()),
            bool(sizes.min() > noise * sizes.max()),
        )


@dataclass
class HessianSummary:
    """What is kept of one client's Hessian, on the CPU: ``vectors`` and their standard errors (None: exact) by diag mode, the top
    eigenspace (None: not asked for)."""

    client: int
    n: int
    vectors: dict[str, tuple[Tensor, Tensor | None]]
    estimator: str
    converged: dict[str, bool]
    space: Space | None

    @staticmethod
    def of(values: dict[str, Any]) -> HessianSummary:
        """From its fields as plain values."""
        space = None if values["space"] is None else Space(**values["space"])
        return HessianSummary(**{**values, "space": space})


def _sizes(vectors: Tensor, errors: Tensor) -> Tensor:
    """The norms [K] of the rows, without the part that their noise adds."""
    return torch.tensor(
        [norm(v.double(), e.double())[0] for v, e in zip(vectors, errors, strict=True)],
        dtype=torch.float64,
    )


def norms_and_directions(vectors: Tensor, errors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """H_N [K, K] and H_D [K, K] (NaN with a zero vector) of the rows D_k of ``vectors`` [K, M].

    With standard ``errors`` of the entries the norms are those without noise (H_D is NaN for a vector that is noise
    alone): noise makes vectors longer, but of two clients only what theirs have in common adds to the inner product.
    """
    raw = torch.stack([torch.linalg.vector_norm(v.double()) for v in vectors]).cpu()
    sizes = raw if errors is None else _sizes(vectors, errors)
    longer = raw / sizes
    longer[~longer.isfinite()] = torch.nan
    h_d = (cosines(vectors) * longer[:, None] * longer[None]).clamp(-1, 1)
    return (sizes[:, None] - sizes[None]).square(), h_d


def _errors(values: Tensor, errors: Tensor, h_d: Tensor) -> tuple[Tensor, Tensor]:
    """Standard errors [K, K] of H_N and H_D from those of the entries [K, M], taken as independent."""
    v, e = values.double().cpu(), errors.double().cpu()
    sizes = _sizes(v, e)
    unit = v / sizes[:, None]
    along = (unit * e).square().sum(1)  # variance of each norm
    both = along[:, None] + along[None]
    apart = (sizes[:, None] - sizes[None]).square()
    n = (4 * apart * both + 2 * both.square()).sqrt()
    d = torch.zeros_like(h_d)
    for i in range(len(v)):
        # how H_D moves with the entries of D_i
        slope = (unit - h_d[:, i, None] * unit[i]) / sizes[i]
        d[i] = (slope * e[i]).square().sum(1)
    return n, (d + d.T).sqrt()


def matching_rows(summaries: list[HessianSummary], data: str, slice_name: str) -> list[Row]:
    """H_N and H_D of every pair and their means, for both diag modes."""
    rows: list[Row] = []
    count, sizes = len(summaries), [s.n for s in summaries]
    for mode in MODES if summaries else ():
        vectors = torch.stack([s.vectors[mode][0] for s in summaries])
        noise = None
        if any(s.vectors[mode][1] is not None for s in summaries):
            noise = torch.stack(
                [
                    torch.zeros_like(v) if e is None else e
                    for v, e in (s.vectors[mode] for s in summaries)
                ]
            )
        matrices = norms_and_directions(vectors, noise)
        errors = (None, None) if noise is None else _errors(vectors, noise, matrices[1])
        # what a client and itself add to the mean
        for metric, matrix, error, self_value in zip(
            ("H_N", "H_D"), matrices, errors, (0.0, 1.0), strict=True
        ):
            common: Row = {
                "metric": metric,
                "diag_mode": mode,
                "data": data,
                "moment": "trained",
                "slice": slice_name,
                "estimator": " and ".join(sorted({s.estimator for s in summaries})),
                "converged": all(s.converged[mode] for s in summaries),
            }
            values = []
            for i, j in combinations(range(count), 2):
                value = float(matrix[i, j])
                values += [] if np.isnan(value) else [value]
                has_error = error is not None and bool(error[i, j].isfinite())
                rows.append(
                    {
                        **common,
                        "scope": "pair",
                        "client": summaries[i].client,
                        "client_b": summaries[j].client,
                        "converged": summaries[i].converged[mode] and summaries[j].converged[mode],
                        "n_examples": sizes[0] if data == "global" else sizes[i] + sizes[j],
                        "value": None if np.isnan(value) else value,
                        "stderr": float(error[i, j]) if has_error else None,  # type: ignore[index]
                    }
                )
            common |= {
                "scope": "global",
                "n_clients": count,
                "n_examples": sizes[0] if data == "global" else sum(sizes),
            }
            mean = float(np.mean(values)) if values else None
            rows.append({**common, "self_pairs": False, "value": mean})
            # a client without curvature has no direction, not even with itself
            selves = count if metric == "H_N" else int((~matrix.diagonal().isnan()).sum())
            total = 2 * sum(values) + selves * self_value
            mean = total / (2 * len(values) + selves) if selves else None
            rows.append({**common, "self_pairs": True, "value": mean})
    return rows


def overlap(a: Tensor, b: Tensor) -> float:
    """The mean squared cosine of the principal angles between the spaces of orthonormal rows a [k, P] and b [k, P]."""
    inner = (a.double() @ b.double().T).cpu().numpy()
    return float(np.mean(np.clip(np.linalg.svd(inner, compute_uv=False), 0, 1) ** 2))


def overlap_rows(spaces: dict[int, Space], top: Space | None, slice_name: str) -> list[Row]:
    """Overlap of the clients' eigenspaces with each other and with that of the aggregated model (None: not known); none
    where a space is not known."""
    pair_rows: list[Row] = []
    for a, b in combinations(spaces, 2):
        common: Row = {"scope": "pair", "client": a, "client_b": b}
        pair_rows.append({**common, **_overlap("eigenspace_overlap", spaces[a], spaces[b])})
    client_rows: list[Row] = []
    for client, space in spaces.items() if top is not None else ():
        assert top is not None
        common = {"scope": "client", "client": client}
        client_rows.append({**common, **_overlap("global_overlap", space, top)})
    means: list[Row] = []
    for metric, rows in (("eigenspace_overlap", pair_rows), ("global_overlap", client_rows)):
        if metric == "global_overlap" and top is None:
            continue
        overlaps = [r for r in rows if r["value"] is not None]
        means.append(
            {
                "metric": metric,
                "scope": "global",
                "n_clients": len(spaces),
                "converged": all(row["converged"] for row in overlaps),
                "value": float(np.mean([row["value"] for row in overlaps])) if overlaps else None,
            }
        )
    common = {"slice": slice_name, "moment": "trained", "estimator": "lanczos"}
    return [{**common, **row} for row in [*pair_rows, *client_rows, *means]]


def _overlap(metric: str, a: Space, b: Space) -> Row:
    """The overlap of two spaces; none where one of them is arbitrary."""
    value = overlap(a.vectors, b.vectors) if a.is_defined and b.is_defined else None
    return {"metric": metric, "converged": a.converged and b.converged, "value": value}
