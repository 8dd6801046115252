"""What is recorded of the local steps with ``metrics.steps`` (``fldiag.sections.MetricsSection`` says which)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fldiag import losses
from fldiag.data import Dataset
from fldiag.errors import FldiagError
from fldiag.local import Notes, Published
from fldiag.params import cosine
from fldiag.results.table import columns
from fldiag.sections import MetricsSection
from fldiag.step import Output, Step


class StepRecorder(Notes):
    """The notes of one cohort. It sees steps and changes nothing of them: an extra pass comes last, and has copies
    of the batch-norm statistics and random numbers of its own."""

    def __init__(self, metrics: MetricsSection):
        super().__init__()
        self.kind, self.tau = metrics.proximal, metrics.tau
        self.sizes: list[np.ndarray] = []  # examples in the minibatch of every client, step by step

    def before_update(self, step: Step, loss: Tensor, g_l: Tensor) -> None:
        """Before the base optimiser: ``loss`` [k] and its gradient ``g_l`` [k, P] as they were before corrections."""
        self.add("loss", loss)
        self.add("grad_norm", length(g_l))
        proximal = self.proximal(step)
        if proximal is None:
            return
        if proximal.value is not None:
            self.add("proximal_loss", proximal.value, proximal=proximal.kind)
        g_u = g_l if proximal.g_u is None else proximal.g_u
        if proximal.start == 0:
            self.cosine(g_u, proximal.g, None, proximal.kind)
        layout = step.local.network.layout
        if layout.has_head and proximal.start <= layout.size - layout.head_size:
            head = slice(-layout.head_size, None)
            self.cosine(g_u[:, head], proximal.g[:, head], "part:head", proximal.kind)

    def after_update(self, step: Step) -> None:
        """After the base optimiser."""
        self.add("update_norm", length(step.w - step.local.w_g))
        self.sizes.append(
            np.full(step.k, step.x.shape[1])
            if step.weight is None
            else (step.weight > 0).sum(1).cpu().numpy()
        )
        self.steps.append({})

    def proximal(self, step: Step) -> Published | None:
        """The loss that ``metrics.proximal`` names: as the method published it where it is the same, else computed now."""
        published = step.published
        if self.kind == "own":
            return published
        kind = losses.proximal_name(self.kind, self.tau)
        if published is not None and published.kind == kind and published.start == 0:
            return published
        g_u = published.g_u if published else None
        if kind == "l2":
            d = step.w - step.local.w_g
            return Published(kind, d, losses.l2(d), 0, g_u)

        def divergence(step: Step, out: Output) -> Tensor:
            return step.mean(losses.kl(step.received_logits(), out.logits, self.tau))

        device = step.w.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            # Not the first pass of the step: the statistics of batch-norm stay.
            value, g = step.gradient(divergence)
        return Published(kind, g, value, 0, g_u)

    def cosine(self, g_u: Tensor, g_p: Tensor, layer: str | None, kind: str) -> None:
        value = cosine(g_u, g_p, losses.noise_floor(g_p.dtype))
        self.add("cos_gu_gp", value, layer=layer, proximal=kind, mask=~value.isnan())

    def rows(self, ids: list[int]) -> pd.DataFrame:
        """client, index, metric, layer, proximal, value, scaled, n_examples; by client (in the order of ``ids``) and step."""
        keys: list[Any] = list(dict.fromkeys(key for step in self.steps for key in step))
        pieces = []
        for j, key in enumerate(keys):
            for s, step in enumerate(self.steps):
                if key not in step:
                    continue
                values, mask = step[key]
                clients = np.arange(len(values))
                if mask is not None:
                    clients = np.flatnonzero(mask.cpu().numpy())
                shape, value = clients.shape, values.cpu().numpy()[clients]
                size = self.sizes[s][clients]
                pieces.append((clients, np.full(shape, s), np.full(shape, j), value, size))
        if not pieces:
            return pd.DataFrame()
        client, index, kind, value, size = map(np.concatenate, zip(*pieces, strict=True))
        order = np.lexsort((kind, index, client))
        client, index, kind, value, size = (
            column[order] for column in (client, index, kind, value, size)
        )
        names = [np.array([key[i] for key in keys], dtype=object)[kind] for i in range(3)]
        scale = np.array([self.scales.get(key, np.nan) for key in keys])[kind]
        return pd.DataFrame(
            {
                "client": np.asarray(ids)[client],
                "index": index + 1,
                "metric": names[0],
                "layer": names[1],
                "proximal": names[2],
                "value": value.astype(float),
                "scaled": value * scale,
                "n_examples": size,
            }
        )


def step_rows(t: int, notes: pd.DataFrame, **common: Any) -> pd.DataFrame:
    """The recorded steps of round t (``StepRecorder.rows``) as a result table."""
    if notes.empty:
        return columns({"round": np.empty(0)}, **common)
    slices = ("client:" + notes["client"].astype(str) + "/train").to_numpy()
    return columns(
        {**{name: notes[name].to_numpy() for name in notes}, "slice": slices},
        round=t,
        moment="trained",
        scope="client",
        estimator="minibatch",
        **common,
    )


def length(rows: Tensor) -> Tensor:
    """Euclidean norms [k] of rows [k, n], accumulated in float64."""
    return torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)


def check(metrics: MetricsSection, dataset: Dataset) -> None:
    if metrics.proximal == "kl" and dataset.regression:
        raise FldiagError(
            "metrics.proximal = 'kl' compares class probabilities, the data set has real targets",
            "set metrics.proximal = 'l2'",
            usage=True,
        )
