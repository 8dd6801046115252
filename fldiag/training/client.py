"""THE local loop: K clients as rows, one for one client or a stack."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fldiag.data import Dataset
from fldiag.data.arrays import ready
from fldiag.local import Local
from fldiag.method import Method
from fldiag.step import Output, Step
from fldiag.training.optim import OPTIMIZERS
from fldiag.training.record import StepRecorder

Batches = list[np.ndarray]  # positions within the client's examples, one array a local step
MOMENTUM = "optimizer.momentum"  # the clients' state of that name, with train.keep_momentum


@dataclass(kw_only=True)
class CohortResult:
    """What clients bring back from their local training; rows in the order of ``ids``."""

    ids: list[int]
    rows: Tensor  # [K, P]
    buffers: dict[str, Tensor]  # name -> [K, ...]
    n: Tensor
    steps: Tensor
    effective: Tensor  # [K, 1] steps as the base optimiser weighs them
    loss: Tensor  # [K] mean minibatch loss
    state: dict[str, Tensor]
    uploads: dict[str, Tensor]  # name -> [K, ...]
    notes: pd.DataFrame | None = None  # numbers of the local steps, when they are recorded


def train(
    local: Local, method: Method, minibatches: Minibatches, recorder: StepRecorder | None = None
) -> CohortResult:
    """Local training of a cohort. ``local`` (its ``w``, state and buffers) is changed in place."""

    def losses(step: Step, out: Output) -> Tensor:
        total = step.mean(step.label_loss(out.logits))
        for part in method:
            term = part.loss(step, out)
            if term is not None:
                total = total + term
        return total

    loss_sum = torch.zeros(len(local.ids), dtype=torch.float64, device=local.w.device)
    local.notes = recorder
    for part in method:
        part.begin(local)
    entries = slice(*(local.trained or (None,)))  # of the vector: those that train, by default all
    momentum = local.state[MOMENTUM][:, entries] if MOMENTUM in local.state else None
    settings = local.train
    optimizer = OPTIMIZERS[settings.optimizer](settings, local.w[:, entries], momentum)
    maps = any(part.maps for part in method)
    for s, (x, y, weight, index) in enumerate(minibatches.steps()):
        step = Step(local, losses, x, y, weight, index, maps)
        for part in method:
            part.batch(step)
        e = None  # the perturbation [k, P]: the gradient is taken at w + e
        for part in method:
            e = part.perturb(step) if e is None else e
        loss, g = step.local_gradient(e)
        g_l = g.clone() if recorder else g  # corrections may overwrite it
        for part in method:
            g = part.correct(step, g)
        if recorder:
            recorder.before_update(step, loss, g_l)
        optimizer.step(step.w[:, entries], g[:, entries], step.decay, lr=local.lr_at(s, step.k))
        if recorder:
            recorder.after_update(step)
        loss_sum[: step.k] += loss
    uploads: dict[str, Tensor] = {}
    for part in method:
        uploads.update(part.finish(local))
    return CohortResult(
        ids=local.ids,
        rows=local.w,
        buffers=local.buffers,
        n=local.n,
        steps=local.steps,
        effective=local.effective_steps(),
        loss=loss_sum / local.steps.clamp(min=1),
        state=local.state,
        uploads=uploads,
        notes=recorder.rows(local.ids) if recorder else None,
    )


class Minibatches:
    """Minibatches of a cohort: at step s those of the clients that still train, side by side.

    Clients are ordered by falling number of steps, so they are a prefix of the rows. Where their batches
    differ in size, short ones are padded and their examples weighted, so each client's mean is its own.
    """

    def __init__(
        self,
        dataset: Dataset,
        examples: list[np.ndarray],
        batches: list[Batches],
        w: Tensor,
        augment: list[torch.Generator] | None,
    ):
        """``examples``: indices of each client's; ``w``: weights, for their device and dtype."""
        self.dataset, self.examples, self.batches = dataset, examples, batches
        self.device, self.dtype, self.augment = w.device, w.dtype, augment
        sizes = [len(indices) for indices in examples]
        self.offset = torch.tensor(np.cumsum([0, *sizes[:-1]]), device=w.device)
        index = torch.as_tensor(np.concatenate(examples), device=dataset.train_y.device)
        self.y = ready(dataset.train_y[index], w.device, w.dtype)
        self.x = None if augment else ready(dataset.batch(index, None), w.device, w.dtype)
        # gathered batches then have the layout on which convolutions are fast
        self._channels_last = (
            self.x.permute(0, 2, 3, 1).contiguous()
            if self.x is not None and self.x.dim() == 4
            else None
        )

    def steps(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor]]:
        """(x [k, B, ...], y [k, B], weight [k, B] or None, positions within the client [k, B]) of each step."""
        steps = [*zip_longest(*self.batches, fillvalue=np.empty(0, dtype=np.int64))]
        if not steps:
            return
        sizes = np.array([[len(batch) for batch in step] for step in steps])  # [steps, clients]
        is_example = np.arange(sizes.max()) < sizes[..., None]
        padded = np.zeros(is_example.shape, dtype=np.int64)
        padded[is_example] = np.concatenate([batch for step in steps for batch in step])
        positions = torch.from_numpy(padded).to(self.device)
        index = self.offset[:, None] + positions  # among all examples of the cohort
        labels = self.y[index]
        weights = torch.from_numpy(is_example / np.maximum(sizes, 1)[..., None]).to(
            self.device, self.dtype
        )
        widths = sizes.max(1)
        uneven = ((sizes != widths[:, None]) & (sizes > 0)).any(1)
        for s, (k, width, is_uneven) in enumerate(
            zip(np.count_nonzero(sizes, 1).tolist(), widths.tolist(), uneven, strict=True)
        ):
            step = s, slice(k), slice(width)
            yield (
                self._inputs(s, index[step]),
                labels[step],
                weights[step] if is_uneven else None,
                positions[step],
            )

    def _inputs(self, s: int, index: Tensor) -> Tensor:
        """x [k, B, ...] of step s, ``index`` [k, B] among all examples of the cohort."""
        if self._channels_last is not None:
            return self._channels_last[index].permute(0, 1, 4, 2, 3)
        if self.x is not None:
            return self.x[index]
        clients = zip(self.examples[: len(index)], self.batches, self.augment or [], strict=False)
        rows = (
            self.dataset.batch(torch.as_tensor(indices[batches[s]]), generator)
            for indices, batches, generator in clients
        )
        return pad_sequence([ready(x, self.device, self.dtype) for x in rows], batch_first=True)
