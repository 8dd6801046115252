"""How far clients move from the received weights and from each other, in weight space.

Global-local and local-local divergence as in Lee et al., "FedSOL" (CVPR 2024), figure 6; the squared distance to the new
global model is what the FL-Simulator code of Sun et al. calls divergence.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from fldiag.params import Layout
from fldiag.results.table import Row
from fldiag.runs.round_weights import Stored

#: Columns in one step of a product of long rows: bounds the float64 copies.
STRIP = 2**20


def squares(moved: Tensor, layout: Layout) -> dict[str | None, tuple[Tensor, Tensor]]:
    """Of the whole (None), every layer (module), ``part:body`` and ``part:head``: squared norms [K] of the rows [K, P]
    and squared distances [K, K] between them, by differences (inner products cancel for close rows)."""
    k, slices = len(moved), layout.slices()
    cut = layout.size - layout.head_size if layout.has_head else None
    sums: dict[str | None, tuple[Tensor, Tensor]] = {}

    def add(name: str | None, norms: Tensor, apart: Tensor) -> None:
        old = sums.get(
            name, (torch.zeros(k, dtype=torch.float64), torch.zeros(k, k, dtype=torch.float64))
        )
        sums[name] = old[0] + norms, old[1] + apart

    for layer, names in layout.layers.items():
        for name in names:
            part = moved[:, slices[name]].double().cpu()
            apart = torch.zeros(k, k, dtype=torch.float64)
            for i, j in combinations(range(k), 2):
                apart[i, j] = apart[j, i] = (part[i] - part[j]).square().sum()
            owners = [None, layer or name]
            if cut is not None:
                owners.append("part:head" if slices[name].start >= cut else "part:body")
            for owner in owners:
                add(owner, part.square().sum(1), apart)
    return sums


def mean_of_pairs(matrix: Tensor) -> float | None:
    """The mean over unordered pairs of different rows; None for a single row."""
    k = len(matrix)
    return float(matrix.sum() / (k * (k - 1))) if k > 1 else None


def cosines(rows: Tensor) -> Tensor:
    """Cosines [K, K] between rows [K, P] in float64; NaN for a zero row."""
    inner = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for strip in rows.split(STRIP, dim=1):
        inner += (strip.double() @ strip.double().T).cpu()
    size = inner.diagonal().sqrt()
    return (inner / torch.outer(size, size)).clamp(-1, 1)


def rows_of(cohort: Stored, layout: Layout, p: np.ndarray) -> list[Row]:
    """The rows of one round: see ``drift``. ``p``: aggregation weights of the clients."""
    assert cohort.clients is not None and cohort.received is not None
    ids, moved = cohort.ids, cohort.moved
    rows: list[Row] = []
    sums = squares(moved, layout)
    for layer, (norms, distances) in sums.items():
        sizes, apart = norms.sqrt(), distances.sqrt()
        rows += [
            {
                "metric": "global_local_divergence",
                "scope": "client",
                "client": k,
                "layer": layer,
                "value": float(v),
            }
            for k, v in zip(ids, sizes, strict=True)
        ]
        rows += [
            {
                "metric": "global_local_divergence",
                "scope": "global",
                "layer": layer,
                "value": float(sizes.mean()),
            },
            {
                "metric": "local_local_divergence",
                "scope": "global",
                "layer": layer,
                "value": mean_of_pairs(apart),
            },
        ]
        if layer is None:
            rows += _pairs("local_local_divergence", ids, apart)
            rows += [
                {"metric": "update_norm", "scope": "client", "client": k, "value": float(v)}
                for k, v in zip(ids, sizes, strict=True)
            ]
    squared = torch.linalg.vector_norm(
        (cohort.clients - cohort.aggregated).double(), dim=1
    ).square()
    rows += [
        {"metric": "squared_divergence", "scope": "client", "client": k, "value": float(v)}
        for k, v in zip(ids, squared, strict=True)
    ]
    rows.append({"metric": "squared_divergence", "scope": "global", "value": float(squared.mean())})
    angle = cosines(torch.cat([moved, (cohort.aggregated - cohort.received)[None]]))
    between, to_server = angle[:-1, :-1], angle[:-1, -1]
    rows += _pairs("update_cosine", ids, between)
    upper = between[tuple(torch.triu_indices(len(ids), len(ids), 1))]
    rows.append({"metric": "update_cosine", "scope": "global", "value": _mean(upper)})
    rows += [
        {"metric": "server_cosine", "scope": "client", "client": k, "value": float(v)}
        for k, v in zip(ids, to_server, strict=True)
    ]
    rows.append({"metric": "server_cosine", "scope": "global", "value": _mean(to_server)})
    rows = [
        {"moment": "trained", "n_clients": len(ids) if row["scope"] == "global" else None, **row}
        for row in rows
    ]
    size = float(torch.linalg.vector_norm((cohort.aggregated - cohort.received).double()))
    return [
        *rows,
        *_consensus(sums, p),
        {"moment": "aggregated", "scope": "global", "metric": "update_norm", "value": size},
    ]


def _consensus(squares: Mapping[str | None, tuple[Tensor, Tensor]], p: np.ndarray) -> list[Row]:
    """The length of the mean update over the mean length, of the network (layer None) and its parts."""
    rows: list[Row] = []
    for layer, (lengths, distances) in squares.items():
        norms, apart = lengths.numpy(), distances.numpy()
        total = float(p @ np.sqrt(norms))
        length = max(float(p @ norms) - float(p @ apart @ p) / 2, 0.0) ** 0.5
        value = {"value": min(length / total, 1.0)} if total else {"note": "no client moved"}
        rows.append(
            {
                "moment": "trained",
                "scope": "global",
                "layer": layer,
                "n_clients": int((p > 0).sum()),
                "metric": "update_consensus",
                "value": None,
                **value,
            }
        )
    return rows


def _mean(values: Tensor) -> float | None:
    defined = values[~values.isnan()]
    return float(defined.mean()) if len(defined) else None


def _pairs(metric: str, ids: tuple[int, ...], matrix: Tensor) -> list[Row]:
    return [
        {
            "metric": metric,
            "scope": "pair",
            "client": ids[i],
            "client_b": ids[j],
            "value": float(matrix[i, j]),
        }
        for i, j in combinations(range(len(ids)), 2)
    ]
