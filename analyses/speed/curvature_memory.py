"""Memory of curvature.py: each job in a process of its own, beside one textbook product."""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from curvature_cases import Case, double_backward
from torch import Tensor
from torch.nn.functional import cross_entropy

from fldiag.problem.diagonal import diagonal_of
from fldiag.problem.eigenpairs import eigenpairs
from fldiag.problem.problem import Problem


def resident(peak: bool = False) -> float:
    """MiB of this process now, or at most since the last reset (Linux)."""
    text = Path("/proc/self/status").read_text("utf-8")
    return int(text.split("VmHWM:" if peak else "VmRSS:")[1].split()[0]) / 1024


def measure(what: str, file: str) -> None:
    """Prints what a job added to the memory of a process that had used everything once on few examples."""
    module, x, y = torch.load(file, weights_only=False)
    v = torch.randn(sum(p.numel() for p in module.parameters()))

    def products(n: int) -> tuple[float, float]:
        h = Problem(module, cross_entropy, (x, y)).hessian()
        h(v)
        before = resident()
        for _ in range(n):
            h(v)
        return before, resident()

    def run(x: Tensor, y: Tensor) -> None:
        if what == "double backward":
            double_backward(module, x, y, v)
        elif what == "top-5":
            eigenpairs(Problem(module, cross_entropy, (x, y)), 5)
        else:
            diagonal_of(Problem(module, cross_entropy, (x, y)))

    if what == "100 products":
        products(3)
        gc.collect()
        before, after = products(100)
        print(json.dumps({"growth": after - before}))
        return
    run(x[:8], y[:8])
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", "utf-8")  # the peak starts here
    before = resident()
    run(x, y)
    print(json.dumps({"peak": resident(peak=True) - before}))


def memory(case: Case, args: argparse.Namespace) -> None:
    if not Path("/proc/self/clear_refs").exists():
        print("| memory | – | – | – | – | – | – | – | – | not measured: needs /proc of Linux |")
        return
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/case.pt"
        torch.save((case.module, case.x, case.y), file)

        def ask(what: str) -> float:
            out = subprocess.run(
                [sys.executable, __file__, what, file],
                capture_output=True,
                encoding="utf-8",
                check=True,
                timeout=args.limit,
                cwd=Path(__file__).parents[2],
            )
            return float(next(iter(json.loads(out.stdout.splitlines()[-1]).values())))

        try:
            one = ask("double backward")
            for what in ("top-5", "trace and diagonal") if case.exact else ("top-5",):
                found = ask(what)
                print(
                    f"| peak memory of {what}, MiB | one textbook product | {one:.0f} | {found:.0f} | {one / found:.2f} | "
                    f"≥ 0.5: {'met' if found <= 2 * one else 'MISSED'} | – | – | – | |",
                    flush=True,
                )
            growth = ask("100 products")
            print(
                f"| growth over 100 products, MiB | – | – | {growth:.1f} | – | none | – | – | – | |",
                flush=True,
            )
        except subprocess.TimeoutExpired:
            print(
                f"| memory | – | – | – | – | – | – | – | – | stopped after {args.limit:.0f} s |",
                flush=True,
            )
        except subprocess.CalledProcessError as error:
            detail = (error.stderr or str(error)).strip().splitlines()[-1]
            print(
                f"| memory | – | – | – | – | – | – | – | – | not measured: {detail[:100]} |",
                flush=True,
            )


if __name__ == "__main__":
    measure(*sys.argv[1:])
