"""The numbers of one round, for ``drift``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fldiag.choices import Rule, Strength
from fldiag.diagnostics.drift import divergence
from fldiag.execution import workspace
from fldiag.losses import mean_strengths, noise_floor, proximal_name, strengths
from fldiag.params import cosine
from fldiag.results.means import sample_mean
from fldiag.results.table import Row
from fldiag.runs import proximal
from fldiag.runs.history import History
from fldiag.runs.pool import BATCH, Weights
from fldiag.runs.proximal import Losses
from fldiag.runs.round_weights import Stored

#: Of what training records of every local step when asked to (``Run.steps``): what is also measured here.
STEP_METRICS = ("cos_gu_gp", "proximal_loss", "lambda_mean")


@dataclass(frozen=True)
class DriftSettings:
    """What is measured of every round; ``loss``: kind and temperature of the proximal loss."""

    gradients: bool
    representation: bool
    rho: tuple[float, ...]
    strength: Strength
    per: Rule
    part: str
    batch: int | None
    loss: dict[str, Any]


def round_rows(history: History, cohort: Stored, settings: DriftSettings) -> list[Row]:
    """The numbers of one round; none where no client's weights are finite."""
    cohort = history.finite(cohort)
    if not cohort.ids:
        return []
    rows = divergence.rows_of(cohort, history.layout, history.weights(cohort.ids))
    if history.alone:
        return rows
    rows += _gradients(history, cohort) if settings.gradients else []
    for j, k in enumerate(cohort.ids):
        workspace().show(j, len(cohort.ids), f"client {k}")
        if history.pool.train_slice(k).stop > history.pool.train_slice(k).start:
            rows += _proximal(history, cohort, j, settings)
    rows += _representation(history, cohort) if settings.representation else []
    return rows + _means(rows, history.pool.n - history.pool.test.stop)


def _gradients(history: History, cohort: Stored) -> list[Row]:
    """Cosines of the stored clients' gradients with that of everybody's data, at the received weights."""
    (w, buffers), pool = cohort.start, history.pool
    everything = pool.clients
    total, gradients = torch.zeros_like(w, dtype=torch.float64), {}
    for k in range(len(history.parts)):
        examples = pool.train_slice(k)
        if examples.stop <= examples.start:
            continue
        losses = Losses(
            history.network,
            pool,
            buffers,
            cohort.start,
            proximal.batches(examples, None)[0],
            kind="l2",
        )
        g = proximal.gradient(losses.local(), w)[1].double()
        total.add_(g, alpha=(examples.stop - examples.start) / (everything.stop - everything.start))
        if k in cohort.ids:
            gradients[k] = g
    base: Row = {
        "moment": "received",
        "slice": "train",
        "n_examples": everything.stop - everything.start,
    }
    rows: list[Row] = [
        {
            **base,
            "metric": "gradient_norm",
            "scope": "global",
            "value": float(torch.linalg.vector_norm(total)),
        }
    ]
    for k, g in gradients.items():
        examples = pool.train_slice(k)
        about = {
            **base,
            "scope": "client",
            "client": k,
            "slice": f"client:{k}/train",
            "n_examples": examples.stop - examples.start,
        }
        rows += [
            {**about, "metric": "gradient_cosine", "value": _number(cosine(g, total))},
            {**about, "metric": "gradient_norm", "value": float(torch.linalg.vector_norm(g))},
        ]
    return rows


def _proximal(history: History, cohort: Stored, j: int, settings: DriftSettings) -> list[Row]:
    """Proximal loss, cosines of g_u and g_p for every radius, and Lambda, at client j's trained weights."""
    (w, buffers), k, layout, per = cohort.client(j), cohort.ids[j], history.layout, settings.per
    start, examples = cohort.start_of(j), history.pool.train_slice(k)
    base: Row = {
        "moment": "trained",
        "scope": "client",
        "client": k,
        "slice": f"client:{k}/train",
        "n_examples": examples.stop - examples.start,
    }
    cut = layout.size - layout.head_size if layout.has_head else None
    cosines: dict[tuple[float, str | None], list[float]] = {
        (rho, layer): []
        for rho in settings.rho
        for layer in ([None, "part:head"] if cut is not None else [None])
    }
    prox, parts = 0.0, proximal.batches(examples, settings.batch)
    for batch in parts:
        losses = Losses(history.network, history.pool, buffers, start, batch, **settings.loss)
        mean, g_p = proximal.gradient(losses.proximal(), w)
        prox += mean * batch.n / (examples.stop - examples.start)
        for rho in settings.rho:
            e = proximal.perturbation(
                g_p,
                w - start[0],
                rho,
                layout,
                strength=settings.strength,
                part=settings.part,
                per=per,
            )
            if e is None:
                continue
            g_u = proximal.gradient(losses.local(), w + e)[1]
            for layer, entries in ((None, slice(None)), ("part:head", slice(cut, None))):
                value = (
                    _number(cosine(g_u[entries], g_p[entries], noise_floor(g_p.dtype)))
                    if (rho, layer) in cosines
                    else None
                )
                if value is not None:
                    cosines[rho, layer].append(value)
    name = proximal_name(settings.loss["kind"], settings.loss["tau"])
    rows = [{**base, "metric": "proximal_loss", "value": prox, "proximal": name}]
    rows += [
        {
            **base,
            "metric": "cos_gu_gp",
            "rho": rho,
            "layer": layer,
            "value": float(np.mean(values)) if values else None,
            "proximal": name,
        }
        for (rho, layer), values in cosines.items()
    ]
    for layer, (strong, n) in mean_strengths(
        strengths(w - start[0], layout, per), layout, per
    ).items():
        scaled = {} if per == "dim0" else {"scaled": float(strong) * n**0.5}
        rows.append(
            {**base, "metric": "lambda_mean", "layer": layer, "value": float(strong), **scaled}
        )
    return rows


def _number(value: Tensor) -> float | None:
    """None for NaN."""
    return None if bool(value.isnan()) else float(value)


def _representation(history: History, cohort: Stored) -> list[Row]:
    test, (w, buffers) = history.pool.test, cohort.start
    received = features(history, (w, buffers), test)
    return [
        {
            "metric": "cka",
            "moment": "trained",
            "scope": "client",
            "client": k,
            "slice": history.pool.split,
            "n_examples": test.stop,
            "value": cka(features(history, cohort.client(j), test), received),
        }
        for j, k in enumerate(cohort.ids)
    ]


def _means(rows: list[Row], trained: int) -> list[Row]:
    """The mean over clients of what is measured client by client (divergence.py makes its own). ``trained``: examples that all
    clients have together."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["scope"] == "client" and row["metric"] in (*STEP_METRICS, "cka", "gradient_cosine"):
            groups.setdefault(
                (row["metric"], row["moment"], row.get("layer"), row.get("rho")), []
            ).append(row)
    means = []
    for (metric, moment, layer, rho), members in groups.items():
        values = [row["value"] for row in members if row["value"] is not None]
        place = (
            (members[0]["slice"], members[0]["n_examples"])
            if metric == "cka"
            else ("train", trained)
        )
        scaled = [row["scaled"] for row in members if "scaled" in row]
        means.append(
            {
                "metric": metric,
                "moment": moment,
                "scope": "global",
                "layer": layer,
                "rho": rho,
                "slice": place[0],
                "n_examples": place[1],
                "proximal": members[0].get("proximal"),
                "n_clients": len(values),
                **sample_mean(values),
                **({"scaled": float(np.mean(scaled))} if scaled else {}),
            }
        )
    return means


def recorded(history: History) -> list[Row]:
    """Means over the local steps that training recorded, of the rounds that were read: every client's, and theirs."""
    rows: list[Row] = []
    for r in history.read:
        steps = history.steps(r)
        if steps is None or steps.empty:
            continue
        steps = steps[steps["metric"].isin(STEP_METRICS)].dropna(subset=["index", "client"])
        steps = steps.reindex(columns=["metric", "layer", "proximal", "client", "value", "scaled"])
        for (metric, layer, kind), part in steps.groupby(
            ["metric", "layer", "proximal"], dropna=False, sort=False
        ):
            about: Row = {
                "round": r,
                "metric": metric,
                "layer": None if pd.isna(layer) else layer,
                "moment": "trained",
                "proximal": None if pd.isna(kind) else kind,
                "estimator": "steps",
            }
            per = part[["value", "scaled"]].astype(float).groupby(part["client"])
            means, counts = per.mean(), per["value"].count()
            for k, value, scaled in means.itertuples():
                rows.append(
                    {
                        **about,
                        "scope": "client",
                        "client": int(k),
                        "slice": f"client:{int(k)}/train",
                        "value": value,
                        "scaled": scaled,
                        "n_steps": int(counts[k]),
                    }
                )
            finite = means["value"].dropna()
            rows.append(
                {
                    **about,
                    "scope": "global",
                    "slice": "train",
                    "n_clients": len(finite),
                    "n_steps": int(counts.sum()),
                    **sample_mean(finite.to_numpy()),
                    "scaled": means["scaled"].mean(),
                }
            )
    return [
        {**row, "value": v if is_finite else None, "masked": not is_finite}
        for row in rows
        for v in [row["value"]]
        for is_finite in [v is not None and bool(np.isfinite(v))]
    ]


# -- how alike two models see the same examples


def cka(a: Tensor, b: Tensor) -> float | None:
    """Linear centred kernel alignment (Kornblith et al., ICML 2019) of two representations [n, d] and [n, e] of the same
    examples, in [0, 1].

    Unchanged by a rotation, a shift and an overall scale of either. None when one is the same for all examples.
    """
    a, b = (v.double() - v.double().mean(0) for v in (a, b))
    n = len(a)
    if n <= max(a.shape[1], b.shape[1]):  # the smaller of the two equal forms
        k, l = a @ a.T, b @ b.T
        cross, sizes = (k * l).sum(), (torch.linalg.matrix_norm(k), torch.linalg.matrix_norm(l))
    else:
        cross = torch.linalg.matrix_norm(a.T @ b).square()
        sizes = torch.linalg.matrix_norm(a.T @ a), torch.linalg.matrix_norm(b.T @ b)
    if min(float(s) for s in sizes) == 0.0:
        return None
    return float(cross / (sizes[0] * sizes[1]))


def features(history: History, weights: Weights, stretch: slice) -> Tensor:
    """What the head sees (without a head: the outputs) on a stretch of the pool, [n, d]."""
    w, buffers = weights
    network, outputs = history.network, []
    bound = network.bind(w.unsqueeze(0), {n: b.unsqueeze(0).clone() for n, b in buffers.items()})
    with torch.no_grad():
        for piece in history.pool.batches(stretch, BATCH):
            x = history.pool.read(piece.start, piece.stop)[0].unsqueeze(0)
            outputs.append((bound.features(x) if network.has_split else bound(x))[0].flatten(1))
    return torch.cat(outputs)
