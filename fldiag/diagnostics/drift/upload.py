"""What an upload would lose: how far clipping, noise, top-k and 8 bits change the clients' updates, and the loss of their mean.

Clipping and Gaussian noise as in differentially private averaging (McMahan et al., ICLR 2018), of each client's update as a
whole; top-k by absolute value over the whole update; 8 bits stochastic, without bias, on a grid between plus and minus the
largest entry of each tensor (the idea of QSGD, Alistarh et al., NeurIPS 2017, whose grid is scaled by the norm instead).
Definitions after these papers; read in abstract only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fldiag.params import Layout
from fldiag.results.means import sample_mean
from fldiag.results.table import Row
from fldiag.runs.history import History
from fldiag.runs.round_weights import Stored
from fldiag.seeding import torch_rng

#: Steps of the grid of 8 bits on either side of 0.
LEVELS = 127


@dataclass(frozen=True)
class Upload:
    """``clip``: the norm C that no update exceeds (None: the median of the round's norms); ``noise``: z, of deviation z C;
    ``keep``: the share of the entries that top-k sends."""

    clip: float | None
    noise: float
    keep: float


def clipped(update: Tensor, limit: float) -> Tensor:
    """The update, scaled down to the norm ``limit`` where it is longer."""
    size = float(torch.linalg.vector_norm(update))
    return update * min(1.0, limit / size) if size else update


def largest(update: Tensor, keep: float) -> Tensor:
    """The share ``keep`` of the entries that are largest in absolute value (at least one); the others are 0."""
    k = max(1, round(keep * len(update)))
    sparse = torch.zeros_like(update)
    at = update.abs().topk(k).indices
    sparse[at] = update[at]
    return sparse


def in_8_bits(update: Tensor, layout: Layout, rng: torch.Generator) -> Tensor:
    """Each entry at one of the two nearest points of its tensor's grid, by chance so that the mean is the entry."""
    rounded = torch.empty_like(update)
    draws = torch.rand(len(update), generator=rng, dtype=torch.float64)
    for place in layout.slices().values():
        step = update[place].abs().max() / LEVELS
        grid = torch.floor(update[place] / step + draws[place]) * step
        rounded[place] = grid if step > 0 else 0.0
    return rounded


def altered_updates(
    update: Tensor, limit: float, upload: Upload, layout: Layout, seed: int
) -> dict[str, Tensor]:
    """What would arrive of an update [P] in float64, by what is done to it."""
    rng, within = torch_rng(0, "upload", seed), clipped(update, limit)
    noise = torch.randn(len(update), generator=rng, dtype=torch.float64)
    return {
        "clip": within,
        "clip+noise": within + upload.noise * limit * noise,
        "top-k": largest(update, upload.keep),
        "8 bits": in_8_bits(update, layout, rng),
    }


def rows_of(history: History, cohort: Stored, upload: Upload) -> list[Row]:
    """``upload_error`` ||Q(d_k) - d_k|| / ||d_k|| by client and layer, and their means; ``upload_loss`` F(w') - F(w) for
    w = received + sum p_k d_k and w' the same with Q(d_k), in the column ``upload`` what Q is."""
    layout, p = history.layout, torch.as_tensor(history.weights(cohort.ids))
    moved = cohort.moved.double().cpu()
    norms = torch.linalg.vector_norm(moved, dim=1)
    limit = float(norms.quantile(0.5)) if upload.clip is None else upload.clip
    change: dict[str, Tensor] = {}
    rows: list[Row] = []
    for j, k in enumerate(cohort.ids):
        seed = cohort.round * 1_000_003 + k
        for name, arrived in altered_updates(moved[j], limit, upload, layout, seed).items():
            lost = arrived - moved[j]
            change[name] = change.get(name, torch.zeros_like(lost)) + p[j] * lost
            rows += [
                {"scope": "client", "client": k, "upload": name, **row}
                for row in _errors(moved[j], lost, layout)
            ]
    for (name, layer), errors in _groups(rows).items():
        row: Row = {"scope": "global", "upload": name, "layer": layer, "n_clients": len(errors)}
        note = None if errors else "no client moved"
        row |= {"metric": "upload_error", **sample_mean(errors), "note": note}
        rows.append(row)
    rows = [{"moment": "trained", "clip": limit, **row} for row in rows]
    return rows if history.alone else rows + _losses(history, cohort, p @ moved, change)


def _errors(update: Tensor, lost: Tensor, layout: Layout) -> list[Row]:
    slices = layout.slices()
    parts: dict[str | None, list[slice]] = {None: [slice(None)]}
    for name, names in layout.layers.items():
        parts[name or names[0]] = [slices[n] for n in names]
    rows: list[Row] = []
    for layer, places in parts.items():
        size, error = (
            sum(float(v[place].square().sum()) for place in places) ** 0.5 for v in (update, lost)
        )
        reason: Row = (
            {"value": error / size} if size else {"value": None, "note": "it did not move"}
        )
        rows.append({"metric": "upload_error", "layer": layer, **reason})
    return rows


def _groups(rows: list[Row]) -> dict[tuple[str, str | None], list[float]]:
    groups: dict[tuple[str, str | None], list[float]] = {}
    for row in rows:
        errors = groups.setdefault((row["upload"], row["layer"]), [])
        if row["value"] is not None:
            errors.append(row["value"])
    return groups


def _losses(
    history: History, cohort: Stored, update: Tensor, change: dict[str, Tensor]
) -> list[Row]:
    """What the altered means add to the loss of all clients' training data, with the standard error over its examples."""
    received = cohort.start[0]
    means = [update, *(update + lost for lost in change.values())]
    models = [(received + d.to(received), cohort.buffers) for d in means]
    loss = history.evaluate(models).loss[:, history.pool.clients]
    rows: list[Row] = []
    for name, after in zip(change, loss[1:], strict=True):
        difference = after - loss[0]
        is_finite = bool(np.isfinite(difference.mean()))
        rows.append(
            {
                "moment": "aggregated",
                "scope": "global",
                "metric": "upload_loss",
                "upload": name,
                "slice": "train",
                "n_examples": len(difference),
                **sample_mean(difference if is_finite else []),
                "note": None if is_finite else "the altered model gives no numbers",
            }
        )
    return rows
