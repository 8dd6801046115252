"""Batch-norm's running statistics at weights that were never trained, such as those between two models."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from fldiag.problem.batch_size import DEPENDENT
from fldiag.problem.problem import Problem


class Statistics:
    """The problem's buffers with running statistics found anew: the mean over batches of the statistics of each (Izmailov et
    al., "Averaging Weights Leads to Wider Optima", UAI 2018, section 3.2).

    The batches are of the problem's own slice and of one fixed size, so that memory does not enter; only the inputs are looked
    at. Everything but batch-norm stays in eval mode.
    """

    def __init__(self, problem: Problem):
        self.problem = problem
        self.module = copy.deepcopy(problem.module)
        layers = {
            n: m
            for n, m in self.module.named_modules()
            if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None
        }
        for m in layers.values():
            m.train()
            m.momentum = None  # the mean over all batches
        self.names = {
            f"{n}.{b}" if n else b for n, m in layers.items() for b, _ in m.named_buffers()
        }
        many = -(-problem.n // DEPENDENT)
        self._bounds = [(i * problem.n // many, (i + 1) * problem.n // many) for i in range(many)]

    def __call__(self, w: Tensor) -> dict[str, Tensor]:
        """At weights [P]."""
        p = self.problem
        views = p.layout.views(w.to(p.dtype))
        held = {
            n: torch.zeros_like(b) if n in self.names else b.clone() for n, b in p.buffers.items()
        }
        for start, stop in self._bounds:
            x, _ = p.read(start, stop)
            with p.guarded(), torch.no_grad():
                p.call(views, x, held, self.module)
        return held


def running(problem: Problem) -> bool:
    """Whether the model has statistics that could be found anew."""
    return any(
        isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None
        for m in problem.module.modules()
    )
