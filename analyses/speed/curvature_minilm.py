"""MiniLM in curvature.py: the three largest eigenvalues of a sentence classifier on SST-2, fldiag beside its peers.

22.6 million weights, so every answer is found in a process of its own, from a file with the model and one batch of sentences.
It is judged by the residual ||Hx - ax|| / |a| of its eigenpairs (a, x), taken for all with one textbook product, and by the
process's peak of resident memory beside that of one gradient of the batch (``TERMS``). The vectors that fldiag's Lanczos
iteration keeps are counted apart: they grow with the weights, not with the network's activations.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from curvature_cases import double_backward
from curvature_memory import resident
from curvature_peers import EIGENTHINGS, PYHESSIAN, _counted, _eigenthings, _engine
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fldiag import data, minilm, models
from fldiag.curvature.basis import Basis
from fldiag.data.text import Reading
from fldiag.errors import FldiagError
from fldiag.problem.eigenpairs import eigenpairs
from fldiag.problem.problem import Problem
from fldiag.seeding import torch_rng

#: Tokens of a sentence, eigenvalues, their tolerance, and steps of the classifier's training, of as many sentences each.
LENGTH, K, TOL, STEPS = 64, 3, 1e-3, 32
#: Largest peak of resident memory, in gradients; and Lanczos steps of hessian-eigenthings, which keeps them all.
MOST, TWENTY = 2.5, 20

COLUMNS = (
    "tool",
    "s",
    "products",
    "λ1, λ2, λ3",
    "largest residual",
    "target",
    "peak resident, MiB",
    "its Lanczos basis, MiB",
    "peak without basis / that of one gradient",
    "target",
    "added to the process without basis / by one gradient",
)
TERMS = (
    "Both terms of the peaks' ratio, which the target is about, are whole processes: Python, the imported libraries, the "
    "model and its batch, and what the answer or the one gradient takes; fldiag's largest Lanczos basis is taken off the peak "
    "since it began, and what came before it counts in full. The last column takes off both terms what the process held before "
    "it began; it has no target."
)

#: Seconds that fldiag's checks of the model took in this process.
CHECKS: list[float] = []

Pairs = tuple[Tensor, list[Tensor], int]  # values [k], vectors [P] each, Hessian-vector products


def classifier(sentences: int) -> tuple[nn.Module, Tensor, Tensor]:
    """MiniLM with a classifier, trained for a moment, and the first sentences that it was trained on."""
    found = data.load(
        "sst2", reading=Reading(tokenizer="minilm", length=LENGTH, examples=STEPS * sentences)
    )
    x, y = found.normalise(found.train_x), found.train_y
    torch.manual_seed(0)
    module = models.build("minilm", (LENGTH,), 2).train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=5e-5)
    for batch in torch.randperm(len(y), generator=torch_rng(0, "benchmark order")).split(sentences):
        optimizer.zero_grad()
        cross_entropy(module(x[batch]), y[batch]).backward()
        optimizer.step()
    module.zero_grad(set_to_none=True)
    return module.eval(), x[:sentences], y[:sentences]


def _fldiag(module: nn.Module, x: Tensor, y: Tensor) -> Pairs:
    problem, began = Problem(module, cross_entropy, (x, y)), time.perf_counter()
    problem.probe()
    CHECKS.append(time.perf_counter() - began)
    found = eigenpairs(problem, K, tol=TOL, strict=True)
    return torch.as_tensor(found.values), list(found.vectors), found.products


def _pyhessian(module: nn.Module, x: Tensor, y: Tensor) -> Pairs:
    with _counted() as product:
        values, vectors = _engine(module, x, y).eigenvalues(maxIter=100, tol=TOL, top_n=K)
    return (
        torch.tensor(values),
        [torch.cat([part.reshape(-1) for part in v]) for v in vectors],
        product.call_count,
    )


def _hessian_eigenthings(module: nn.Module, x: Tensor, y: Tensor) -> Pairs:
    import hessian_eigenthings

    found = hessian_eigenthings.lanczos(
        _eigenthings(module, x, y), k=K, max_iter=TWENTY, tol=TOL, which="LA", seed=0
    )
    return found.eigenvalues, list(found.eigenvectors), found.iterations


ANSWERS: dict[str, Callable[[nn.Module, Tensor, Tensor], Pairs]] = {
    "fldiag": _fldiag,
    PYHESSIAN.name: _pyhessian,
    EIGENTHINGS.name: _hessian_eigenthings,
}
GRADIENT = "one gradient"


def measure(what: str, file: str) -> None:
    """Prints, as JSON, what an answer is and took, in a process that had everything imported and one sentence differentiated."""
    module, x, y = torch.load(file, weights_only=False)
    kept: weakref.WeakSet[Basis] = weakref.WeakSet()
    largest, append, without_basis = 0, Basis.append, 0.0

    def counted(basis: Basis, v: Tensor) -> float:
        nonlocal largest, without_basis
        if not largest:
            without_basis = start_peak()
        kept.add(basis)
        found = append(basis, v)
        largest = max(largest, sum(len(b) * b.size * b.dtype.itemsize for b in kept))
        return found

    cross_entropy(module(x[:1]), y[:1]).backward()
    module.zero_grad(set_to_none=True)
    start_peak()
    before, began = resident(), time.perf_counter()
    if what == GRADIENT:
        cross_entropy(module(x), y).backward()
        answer: dict[str, Any] = {}
    else:
        with mock.patch.object(Basis, "append", counted):
            values, vectors, products = ANSWERS[what](module, x, y)
        answer = {"products": products}
    peak, basis = resident(peak=True), largest / 2**20
    answer |= {
        "seconds": time.perf_counter() - began,
        "peak": max(peak, without_basis),
        "peak without basis": max(peak - basis, without_basis),
        "before": before,
        "basis": basis,
        "checks": sum(CHECKS),
    }
    if what != GRADIENT:
        order = values.double().argsort(descending=True).tolist()
        answer["values"] = [float(values[i]) for i in order]
        answer["residuals"] = [
            _residual(module, x, y, float(values[i]), vectors[i].float()) for i in order
        ]
    print(json.dumps(answer))


def start_peak() -> float:
    """MiB of the peak until now; from now on it is another one."""
    peak = resident(peak=True)
    Path("/proc/self/clear_refs").write_text("5", "utf-8")
    return peak


def _residual(module: nn.Module, x: Tensor, y: Tensor, value: float, vector: Tensor) -> float:
    unit = vector / vector.norm()
    return float((double_backward(module, x, y, unit) - value * unit).norm()) / abs(value)


def report(args: argparse.Namespace) -> None:
    """Every tool in turn, each turn in new processes; medians."""
    try:
        minilm.file(minilm.WEIGHTS)
        case = classifier(args.sentences)
    except FldiagError as error:
        print(f"\n## MiniLM: not measured: {error}")
        return
    module, x, _ = case
    size = sum(p.numel() for p in module.parameters())
    print(
        f"\n## MiniLM, a classifier of SST-2: {size:,} parameters, {len(x)} sentences of {x.shape[1]} tokens\n"
    )
    found: dict[str, list[dict[str, Any]]] = {
        GRADIENT: [],
        "fldiag": [],
        **{t.name: [] for t in (PYHESSIAN, EIGENTHINGS) if t.installed},
    }
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/case.pt"
        torch.save(case, file)
        for turn in range(args.runs):
            names = list(found)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                if name not in failed:
                    try:
                        found[name].append(_asked(name, file, args.limit))
                    except subprocess.TimeoutExpired:
                        failed[name] = f"stopped after {args.limit:.0f} s"
                    except subprocess.CalledProcessError as error:
                        failed[name] = (
                            f"fails: {(error.stderr or str(error)).strip().splitlines()[-1][:100]}"
                        )
    print(f"{TERMS}\n\n| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    for name, answers in found.items():
        print(
            _line(name, answers, found[GRADIENT])
            if answers
            else f"| {name} | {failed[name]} |" + " – |" * (len(COLUMNS) - 2),
            flush=True,
        )
    if found["fldiag"]:
        seconds = statistics.median(answer["checks"] for answer in found["fldiag"])
        print(
            f"\nOf fldiag's time its checks of model and loss, before the first product: {seconds:.1f} s."
        )


def _asked(name: str, file: str, limit: float) -> dict[str, Any]:
    out = subprocess.run(
        [sys.executable, __file__, name, file],
        capture_output=True,
        encoding="utf-8",
        check=True,
        timeout=limit,
        cwd=Path(__file__).parents[2],
    )
    return dict(json.loads(out.stdout.splitlines()[-1]))


def _line(name: str, answers: list[dict[str, Any]], gradients: list[dict[str, Any]]) -> str:
    def middle(
        of: Callable[[dict[str, Any]], float], some: list[dict[str, Any]] = answers
    ) -> float:
        return statistics.median(map(of, some))

    def apart(a: dict[str, Any]) -> float:
        return float(a["peak without basis"])

    def added(a: dict[str, Any]) -> float:
        return apart(a) - float(a["before"])

    ours = name == "fldiag"
    if name == GRADIENT:
        values = worst = spent = "–"
    else:
        residual = max(max(a["residuals"]) for a in answers)
        values, worst = ", ".join(f"{v:.5g}" for v in answers[0]["values"]), f"{residual:.1e}"
        spent = f"{middle(lambda a: a['products']):.0f}"
    ratio = middle(apart) / middle(apart, gradients) if gradients else float("nan")
    more = middle(added) / middle(added, gradients) if gradients else float("nan")
    exact = f"≤ {TOL:g}: {'met' if residual <= TOL else 'MISSED'}" if ours else "–"
    small = f"≤ {MOST:g}: {'met' if ratio <= MOST else 'MISSED'}" if ours else "–"
    return (
        f"| {name} | {middle(lambda a: a['seconds']):.1f} | {spent} | {values} | {worst} | {exact} | "
        f"{middle(lambda a: a['peak']):.0f} | {middle(lambda a: a['basis']):.0f} | {ratio:.2f} | {small} | {more:.2f} |"
    )


if __name__ == "__main__":
    measure(*sys.argv[1:])
