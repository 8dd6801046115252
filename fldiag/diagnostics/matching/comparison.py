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
    """The top eigenvectors [k, P]; whether they ``converged``, and whether all belong to eigenvalues that are not zero: the
    others span any space (``known``)."""

    vectors: Tensor
    converged: bool
    known: bool

    @staticmethod
    def of(pairs: EigenPairs, dtype: torch.dtype, noise: float) -> Space:
        """``noise``: eigenvalues below this share of the largest are zero. ``dtype``: the vectors are kept so."""
        sizes = np.abs(pairs.values)
        return Space(
            pairs.vectors.to(dtype),
            bool(pairs.converged.all()),
            bool(sizes.min() > noise * sizes.max()),
        )


@dataclass
class HessianSummary:
    """What is kept of one client's Hessian: ``vectors`` and their standard errors (None: exact) by diag mode, the top
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
        side = (unit - h_d[:, i, None] * unit[i]) / sizes[
            i
        ]  # how H_D moves with the entries of D_i
        d[i] = (side * e[i]).square().sum(1)
    return n, (d + d.T).sqrt()


def matching_rows(summaries: list[HessianSummary], data: str, where: Row) -> list[Row]:
    """H_N and H_D of every pair and their means, for both diag modes."""
    if not summaries:
        return []
    rows: list[Row] = []
    count, sizes = len(summaries), [s.n for s in summaries]
    for mode in MODES:
        pairs = [s.vectors[mode] for s in summaries]
        values = torch.stack([v for v, _ in pairs])
        noisy = any(e is not None for _, e in pairs)
        noise = (
            torch.stack([torch.zeros_like(v) if e is None else e for v, e in pairs])
            if noisy
            else None
        )
        measured = norms_and_directions(values, noise)
        errors = (None, None) if noise is None else _errors(values, noise, measured[1])
        for metric, matrix, error, alone in zip(
            ("H_N", "H_D"), measured, errors, (0.0, 1.0), strict=True
        ):
            common: Row = {
                "metric": metric,
                "diag_mode": mode,
                "data": data,
                "moment": "trained",
                **where,
                "estimator": " and ".join(sorted({s.estimator for s in summaries})),
                "converged": all(s.converged[mode] for s in summaries),
            }
            good = []
            for i, j in combinations(range(count), 2):
                value = float(matrix[i, j])
                good += [] if np.isnan(value) else [value]
                rows.append(
                    {
                        **common,
                        "scope": "pair",
                        "client": summaries[i].client,
                        "client_b": summaries[j].client,
                        "converged": summaries[i].converged[mode] and summaries[j].converged[mode],
                        "n_examples": sizes[0] if data == "global" else sizes[i] + sizes[j],
                        "value": None if np.isnan(value) else value,
                        "stderr": None
                        if error is None or not error[i, j].isfinite()
                        else float(error[i, j]),
                    }
                )
            common |= {
                "scope": "global",
                "n_clients": count,
                "n_examples": sizes[0] if data == "global" else sum(sizes),
            }
            # a client without curvature has no direction, not even its own
            own = count if metric == "H_N" else int((~matrix.diagonal().isnan()).sum())
            mean = float(np.mean(good)) if good else None
            rows.append({**common, "self_pairs": False, "value": mean})
            total = 2 * sum(good) + own * alone
            rows.append(
                {
                    **common,
                    "self_pairs": True,
                    "value": total / (2 * len(good) + own) if own else None,
                }
            )
    return rows


def principal_angles(a: Tensor, b: Tensor) -> np.ndarray:
    """Principal angles in degrees, smallest first, between the spaces of orthonormal rows a [k, P] and b [k, P]."""
    inner = (a.double() @ b.double().T).cpu().numpy()
    return np.degrees(np.arccos(np.clip(np.linalg.svd(inner, compute_uv=False), 0, 1)))


def overlap_rows(spaces: dict[int, Space], top: Space | None, where: Row) -> list[Row]:
    """Overlap of the clients' eigenspaces with each other and with that of the aggregated model (None: not known); none
    where a space is not known."""

    def of(metric: str, a: Space, b: Space, about: Row) -> list[Row]:
        common = {
            **where,
            "moment": "trained",
            "estimator": "lanczos",
            "converged": a.converged and b.converged,
            **about,
        }
        if not (a.known and b.known):
            return [{**common, "metric": metric, "value": None}]
        angles = principal_angles(a.vectors, b.vectors)
        overlap = float(np.mean(np.cos(np.radians(angles)) ** 2))
        return [
            {**common, "metric": metric, "value": overlap},
            *(
                {
                    **common,
                    "metric": "principal_angle"
                    if metric == "eigenspace_overlap"
                    else "global_angle",
                    "index": i,
                    "value": float(v),
                    "unit": "degree",
                }
                for i, v in enumerate(angles, start=1)
            ),
        ]

    rows: list[Row] = []
    for a, b in combinations(spaces, 2):
        rows += of(
            "eigenspace_overlap",
            spaces[a],
            spaces[b],
            {"scope": "pair", "client": a, "client_b": b},
        )
    own = (
        []
        if top is None
        else [
            row
            for client, v in spaces.items()
            for row in of("global_overlap", v, top, {"scope": "client", "client": client})
        ]
    )
    for metric, some in (("eigenspace_overlap", rows), ("global_overlap", list(own)))[
        : 1 if top is None else 2
    ]:
        good = [row for row in some if row["metric"] == metric and row["value"] is not None]
        own.append(
            {
                **where,
                "metric": metric,
                "moment": "trained",
                "scope": "global",
                "estimator": "lanczos",
                "n_clients": len(spaces),
                "converged": all(row["converged"] for row in good),
                "value": float(np.mean([row["value"] for row in good])) if good else None,
            }
        )
    return rows + own
