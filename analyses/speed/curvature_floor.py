"""What a product costs beside a gradient, in time and in multiply-adds, and how much of it the library's kernels take."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from curvature_cases import Case
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from fldiag.problem.problem import Problem
from fldiag.seeding import torch_rng

#: Kernels of PyTorch and oneDNN that do the multiply-adds.
KERNELS = ("convolution", "mm", "addmm", "bmm")


def floor(case: Case, args: argparse.Namespace) -> None:
    """Prints a line; the sides take turns."""
    module, x, y = case.module, case.x, case.y
    params = [p for p in module.parameters() if p.requires_grad]
    v = torch.randn(case.size, generator=torch_rng(0, "benchmark floor"))
    pieces = [
        piece.view(p.shape)
        for piece, p in zip(v.split([p.numel() for p in params]), params, strict=True)
    ]
    graph = torch.autograd.grad(cross_entropy(module(x), y), params, create_graph=True)
    hessian = Problem(module, cross_entropy, (x, y)).hessian()

    def gradient() -> None:
        torch.autograd.grad(cross_entropy(module(x), y), params)

    def kept() -> None:
        torch.autograd.grad(graph, params, pieces, retain_graph=True)

    def product() -> Tensor:
        return hessian(v)

    sides: dict[str, Callable[[], object]] = {
        "gradient": gradient,
        "kept": kept,
        "product": product,
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(args.runs + 1):
        for name, side in sides.items():
            began = time.perf_counter()
            side()
            if turn:  # the first is for caches
                seconds[name].append(time.perf_counter() - began)
    each = {name: statistics.median(found) for name, found in seconds.items()}
    flops = {name: _flops(side) for name, side in sides.items()}
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        product()
    events = [(e.key, e.self_cpu_time_total) for e in seen.key_averages()]
    inside = sum(t for key, t in events if any(k in key.rpartition("::")[2] for k in KERNELS))
    cost = {
        name: f"{each[name] / each['gradient']:.2f} gradients ({flops[name] / flops['gradient']:.2f} in multiply-adds)"
        for name in sides
    }
    share = inside / sum(t for _, t in events)
    print(
        f"| floor of a product | gradient {each['gradient']:.3g} s | – | {each['product']:.3g} | product {cost['product']}; "
        f"double backward on a kept graph {cost['kept']} | – | – | – | – | {share:.0%} of a product inside the library's "
        f"kernels ({hessian.form}) |",
        flush=True,
    )


def _flops(side: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        side()
    return counter.get_total_flops()
