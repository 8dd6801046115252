"""What is recorded of the local steps with ``metrics.steps`` (``fldiag.config.Metrics`` says which)."""

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
from fldiag.sections import Metrics
from fldiag.step import Output, Step


class Recorder(Notes):
    """The notes of one cohort. It sees steps and changes nothing of them: an extra pass comes last, and has copies
    of the batch-norm statistics and random numbers of its own."""

    def __init__(self, metrics: Metrics):
        super().__init__()
        self.wanted, self.tau = metrics.proximal, metrics.tau
        self.sizes: list[np.ndarray] = []  # examples in the minibatch of every client, step by step

    def step(self, step: Step, loss: Tensor, g_u: Tensor) -> None:
        """Before the base optimiser: ``loss`` [k] and its gradient ``g_u`` [k, P] as they were before corrections."""
        self.add("loss", loss)
        self.add("grad_norm", length(g_u))
        found = self.proximal(step)
        if found is not None:
            if found.value is not None:
                self.add("proximal_loss", found.value, proximal=found.kind)
            layout, g_u = step.local.network.layout, g_u if found.g_u is None else found.g_u
            if found.start == 0:
                self.cosine(g_u, found.g, None, found.kind)
            if layout.has_head and found.start <= layout.size - layout.head_size:
                self.cosine(
                    g_u[:, -layout.head_size :],
                    found.g[:, -layout.head_size :],
                    "part:head",
                    found.kind,
                )

    def moved(self, step: Step) -> None:
        """After the base optimiser."""
        self.add("update_norm", length(step.w - step.local.w_g))
        self.sizes.append(
            np.full(step.k, step.x.shape[1])
            if step.weight is None
            else (step.weight > 0).sum(1).cpu().numpy()
        )
        self.steps.append({})

    def proximal(self, step: Step) -> Published | None:
        """The loss asked for: as the method published it where it is the same, else computed here."""
        kind = None if self.wanted == "own" else losses.proximal_name(self.wanted, self.tau)
        there = step.published
        g_u = there.g_u if there else None
        if kind is None or (there is not None and there.kind == kind and there.start == 0):
            return there
        if kind == "l2":
            d = step.w - step.local.w_g
            return Published(kind, d, losses.l2(d), 0, g_u)

        def divergence(step: Step, out: Output) -> Tensor:
            return step.mean(losses.kl(step.received_logits(), out.logits, self.tau))

        device = step.w.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            value, g = step.gradient(
                divergence
            )  # not the first pass of the step: statistics of batch-norm stay
        return Published(kind, g, value, 0, g_u)

    def cosine(self, g_u: Tensor, g_p: Tensor, layer: str | None, kind: str) -> None:
        value = cosine(g_u, g_p, losses.noise_floor(g_p.dtype))
        self.add("cos_gu_gp", value, layer=layer, proximal=kind, mask=~value.isnan())

    def rows(self, ids: list[int]) -> pd.DataFrame:
        """client, index, metric, layer, proximal, value, scaled, n_examples; by client (in the order of ``ids``) and step."""
        order: dict[Any, int] = {
            key: j
            for j, key in enumerate(dict.fromkeys(key for step in self.steps for key in step))
        }
        pieces = []
        for key, j in order.items():
            for s, step in enumerate(self.steps):
                if key not in step:
                    continue
                values, mask = step[key]
                at = np.arange(len(values)) if mask is None else np.flatnonzero(mask.cpu().numpy())
                pieces.append(
                    (
                        at,
                        np.full(len(at), s),
                        np.full(len(at), j),
                        values.cpu().numpy()[at],
                        self.sizes[s][at],
                    )
                )
        if not pieces:
            return pd.DataFrame()
        client, index, kind, value, size = (
            np.concatenate(column) for column in zip(*pieces, strict=True)
        )
        by = np.lexsort((kind, index, client))
        client, index, kind, value, size = client[by], index[by], kind[by], value[by], size[by]
        names = [np.array([key[i] for key in order], dtype=object)[kind] for i in range(3)]
        scale = np.array([self.scales.get(key, np.nan) for key in order])[kind]
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


def length(rows: Tensor) -> Tensor:
    """Euclidean norms [k] of rows [k, n], accumulated in float64."""
    return torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)


def check(metrics: Metrics, dataset: Dataset) -> None:
    if metrics.proximal == "kl" and dataset.regression:
        raise FldiagError(
            "metrics.proximal = 'kl' compares class probabilities, the data set has real targets",
            "set metrics.proximal = 'l2'",
            usage=True,
        )
