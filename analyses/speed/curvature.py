"""Time and accuracy of curvature: fldiag against PyHessian, curvlinops with scipy's eigsh, and hessian-eigenthings.

Every tool gets the same model, data and tolerance (1e-3) in this process, in turns; printed are medians, the median
of the ratios turn by turn, and the largest true error over the turns (of eigenvalues, of the trace: relative; of the
diagonal: relative in norm). A tool that is not installed is skipped and said
so (``pip install 'fldiag[peers]'``); one that fails or exceeds the time limit too.

    python analyses/speed/curvature.py [--runs 5] [--only digits] [--jobs top5 trace] [--limit 300]
"""

from __future__ import annotations

import argparse
import contextlib
import warnings
from collections.abc import Callable
from importlib import metadata

import numpy as np
import torch
from curvature_cases import CASES, Case
from curvature_peers import FLDIAG, PEERS, Answer, Tool
from curvature_turns import HEAD, Timed, compare, limited

JOBS = {
    "products": "10 Hessian-vector products",
    "top5": "top-5 to 1e-3",
    "top1": "top-1 to 1e-3",
    "density": "density, 30 steps",
    "trace": "trace",
    "diagonal": "diagonal",
}


def truth_of(job: str, case: Case, tool: Tool) -> Callable[[Answer], float] | None:
    if job in ("top5", "top1"):
        true = (case.magnitude if tool.magnitude else case.largest)[: 5 if job == "top5" else 1]
        if tool.magnitude and job == "top1":
            true = np.array([max(case.magnitude, key=abs)])
        return lambda a: float(np.max(np.abs(np.asarray(a.value) - true) / np.abs(true)))
    if job == "products":
        return case.product_error
    if job == "density":
        return lambda a: abs(a.value - case.largest[0]) / case.largest[0]
    if not case.exact:
        return None
    if job == "trace":
        return lambda a: abs(a.value / float(case.diagonal.sum()) - 1)
    return lambda a: float((a.value.double() - case.diagonal).norm() / case.diagonal.norm())


def side(tool: Tool, job: str, case: Case) -> Timed:
    return Timed(
        tool.name,
        lambda seed: tool.prepare(job, case.module, case.x, case.y, seed),
        truth_of(job, case, tool),
    )


def warm(case: Case) -> None:
    """Every tool once on few examples: first calls import and compile."""
    for tool in (FLDIAG, *PEERS):
        if tool.installed:
            # one that fails will fail again where it counts
            with contextlib.suppress(Exception), limited(60), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for job in {"products", "diagonal"} & set(tool.jobs):
                    tool.prepare(job, case.module, case.x[:16], case.y[:16], 0)()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--only", choices=tuple(CASES), nargs="+", default=list(CASES), help="models"
    )
    parser.add_argument("--jobs", choices=tuple(JOBS), nargs="+", default=list(JOBS))
    parser.add_argument(
        "--limit",
        type=float,
        default=300,
        help="seconds after which one answer of one tool is stopped",
    )
    parser.add_argument(
        "--patience", type=float, default=900, help="seconds after which a job has no further turn"
    )
    args = parser.parse_args()
    versions = [
        f"{t.name} {metadata.version(dict(metadata.packages_distributions())[t.package][0])}"
        if t.installed
        else f"{t.name}: not installed, skipped"
        for t in PEERS
    ]
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.runs} alternating turns; {'; '.join(versions)}."
    )
    print(
        f"An answer that takes more than {args.limit:.0f} s is stopped and that tool sits out the job; a job that has taken "
        f"more than {args.patience:.0f} s gets no further turn."
    )
    for name in args.only:
        case = CASES[name]()
        case.announce()
        warm(case)
        print(HEAD)
        for job in args.jobs:
            if case.exact or job not in ("trace", "diagonal"):
                peers = [t for t in PEERS if t.installed and job in t.jobs]
                compare(JOBS[job], [side(t, job, case) for t in (FLDIAG, *peers)], args)


if __name__ == "__main__":
    main()
