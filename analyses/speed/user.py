"""What a user waits for: the start, an answer, the same answer again; landscapes and eigenvalues beside other tools.

    python analyses/speed/user.py [--before CHECKOUT] [--only commands landscape spectrum] [--model cifar] [--images 1000]

``--before`` is a checkout of another version: its commands run in turns with this one's. loss-landscapes and PyHessian run in
this process, in turns with fldiag. Landscapes have their error against float64. Eigenvalues are computed with several
tolerances, each with its error against scipy's eigsh, and compared at the loosest ones that reach ``ERROR``.
"""

import argparse
import copy
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch
from curvature_cases import CASES, ROOT, double_backward
from curvature_peers import FLDIAG, PYHESSIAN, Answer, lanczos, power
from curvature_turns import Timed, turns
from scipy.interpolate import RectBivariateSpline
from scipy.sparse.linalg import LinearOperator, eigsh
from torch.nn.functional import cross_entropy
from torch.nn.utils import vector_to_parameters

from fldiag import Problem
from fldiag.diagnostics.landscape import POINTS, landscape, surfaces
from fldiag.landscape.directions import random_direction
from fldiag.results.machine import machine

#: Seconds of an answer, and after which there is no further turn.
LIMIT = 600
CHECKPOINT = str(ROOT / "checkpoints" / "example" / "fedavg-digits.pt")
#: Seconds that a repeated question may take beyond importing torch.
AIM = 1.0
#: Largest relative error of eigenvalues at which the tools are compared, and the tolerances that are tried.
ERROR = 1e-3
POWER = partial(power, most=1000)
TOLERANCES = (
    *((FLDIAG, lanczos, tol) for tol in (1e-2, 1e-3)),
    *((PYHESSIAN, POWER, tol) for tol in (1e-3, 1e-4, 1e-5)),
)
#: Of loss-landscapes, which evaluates all points, so many an axis are timed.
STEPS = 4


def run(checkout, *words):
    path = os.pathsep.join((str(checkout), str(checkout / "analyses")))
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, *words]
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8")
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return Answer(None)


def commands(checkouts, args):
    """Each a process of its own. Results go to a new folder every time, or (``again``) to the same one."""
    fldiag, rows = ("-m", "fldiag.cli"), {}
    with tempfile.TemporaryDirectory() as folder:
        for name, checkout in checkouts.items():
            history = f"{folder}/history-{name}"
            rounds = ("--set", f"rounds={args.rounds}", "--set", "model.name=mlp")
            run(checkout, *fldiag, "train", "digits", *rounds, "--out", history)
            for title, words, out in (
                ("import torch", ("-c", "import torch"), None),
                ("import fldiag", ("-c", "import fldiag"), None),
                ("fldiag --help", (*fldiag, "--help"), None),
                ("fldiag landscape CKPT", (*fldiag, "landscape", CHECKPOINT), "new"),
                ("again: fldiag landscape CKPT", (*fldiag, "landscape", CHECKPOINT), "one"),
                ("again: fldiag landscape RUN", (*fldiag, "landscape", history), "other"),
            ):

                def prepare(seed, checkout=checkout, words=words, out=out, name=name):
                    new = tempfile.mkdtemp(dir=folder)
                    place = ("--out", new if out == "new" else f"{folder}/{out}-{name}")
                    return partial(run, checkout, *words, *(place if out else ()))

                prepare(0)()  # compiles a fresh checkout, and is the first answer
                rows.setdefault(title, []).append(Timed(f"{title}, {name}", prepare, None))
        sides = [side for row in rows.values() for side in row]
        turns(sides, args.runs, LIMIT, LIMIT)
    print("\n| command | s | beyond `import torch` | before | before / now |\n|" + "---|" * 5)
    torch_seconds = statistics.median(rows["import torch"][0].seconds)
    for title, row in rows.items():
        if failures := [side.failed for side in row if side.failed]:
            print(f"| {title} | {'; '.join(failures)} | – | – | – |")
            continue
        now, before = row[0].seconds, row[-1].seconds
        ratio = statistics.median(b / a for a, b in zip(now, before, strict=True))
        beyond = statistics.median(now) - torch_seconds
        cells = f"{statistics.median(now):.2f} | {beyond:.2f}"
        if "again" in title:
            cells += f" (≤ {AIM:g}: {'met' if beyond <= AIM else 'MISSED'})"
        print(f"| {title} | {cells} | {statistics.median(before):.2f} | {ratio:.2f} |")


def compare(title, sides, args):
    """The sides in turns, and a line for each; ratios turn by turn to the first."""
    turns(sides, args.runs, LIMIT, LIMIT)
    print(f"\n| {title} | s | ratio (min–max) | largest error | products | notes |\n|" + "---|" * 6)
    for side in sides:
        ratios = [a / b for a, b in zip(side.seconds, sides[0].seconds, strict=False)]
        cells = "– | –"
        if ratios:
            cells = f"{statistics.median(side.seconds):.3g} | {statistics.median(ratios):.2f} "
            cells += f"({min(ratios):.2f}–{max(ratios):.2f})"
        notes = " ".join([*side.notes, side.failed])
        print(f"| {side.name} | {cells} | {side.error} | {side.spent} | {notes} |", flush=True)


def landscapes(case, args):
    """The same square of a plane of filter-normalised random directions; errors are shares of the range of losses."""
    problem, w = Problem(case.module, cross_entropy, (case.x, case.y)), case.double.w
    d1, d2 = (random_direction(problem, 0, i) for i in range(2))
    grid = np.linspace(-1, 1, STEPS + 1)

    def place(a, b):
        return w + a * d1 + b * d2

    true = np.array([[case.double.loss(place(a, b))[0] for b in grid] for a in grid])

    def ours():
        fresh = Problem(case.module, cross_entropy, (case.x, case.y))
        table = landscape(fresh, directions="random", span=1.0, seed=0)
        (surface,) = surfaces(table)
        spline = RectBivariateSpline(surface.axis, surface.axis, surface.losses)
        return Answer(
            spline(grid, grid).T, None, f"{(table.metric == 'loss').sum()} points evaluated"
        )

    def theirs():
        from loss_landscapes import metrics, planar_interpolation

        corners = [copy.deepcopy(case.module) for _ in range(3)]
        for corner, (a, b) in zip(corners, ((-1, -1), (1, -1), (-1, 1)), strict=True):
            vector_to_parameters(place(a, b).to(problem.w), corner.parameters())
        loss = metrics.Loss(cross_entropy, case.x, case.y)
        with torch.no_grad():
            return Answer(planar_interpolation(*corners, loss, steps=STEPS))

    def error(answer):
        expected = true
        if answer.value.shape != true.shape:
            # even rows of loss-landscapes begin at the second column, odd ones at the first
            expected = [row[1:] if i % 2 == 0 else row[:-1] for i, row in enumerate(true[:-1])]
        return float(np.abs(answer.value - expected).max() / np.ptp(true))

    name, factor = f"loss-landscapes, {STEPS**2} points timed", POINTS**2 / STEPS**2
    peer = Timed(name, lambda seed: theirs, error, factor)
    title = f"landscape of {POINTS}x{POINTS} points"
    compare(title, [Timed("fldiag", lambda seed: ours, error), peer], args)


def spectrum(case, args):
    """The k largest eigenvalues, by each tool with each of its tolerances."""

    def product(v):
        v, total = torch.from_numpy(v.astype(np.float32).reshape(-1)), 0.0
        for x, y in zip(case.x.split(100), case.y.split(100), strict=True):
            total += double_backward(case.module, x, y, v).double() * (len(y) / len(case.y))
        return total.numpy()

    start = np.random.default_rng(0).standard_normal(case.size)
    operator = LinearOperator((case.size, case.size), product, dtype=np.float64)
    values = eigsh(operator, max(args.k), tol=1e-4, v0=start, return_eigenvectors=False)
    true = np.sort(values)[::-1]
    print(f"\nby scipy's eigsh: {', '.join(f'{value:.6g}' for value in true)}")
    for k in args.k:
        sides = {FLDIAG.name: [], PYHESSIAN.name: []}
        for tool, solver, tol in TOLERANCES:
            job = f"top{k} to {tol:g}"
            tool.jobs[job] = solver(k, tol)
            prepare = partial(tool.prepare, job, case.module, case.x, case.y)
            error = lambda answer, k=k: float(np.abs(answer.value / true[:k] - 1).max())  # noqa: E731
            sides[tool.name].append(Timed(f"{tool.name}, {job}", prepare, error))
        compare(f"the {k} largest eigenvalues", [s for row in sides.values() for s in row], args)
        accurate = [
            [s for s in row if s.errors and max(s.errors) <= ERROR] for row in sides.values()
        ]
        for ours, theirs in zip(*accurate, strict=False):
            ratio = statistics.median(theirs.seconds) / statistics.median(ours.seconds)
            print(f"\nAt errors of at most {ERROR:g}: {theirs.name} / {ours.name}: {ratio:.2f}")
            break  # the loosest of each


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    jobs = {"landscape": landscapes, "spectrum": spectrum}
    parts = ("commands", *jobs)
    parser.add_argument(
        "--before", type=Path, default=ROOT, help="checkout (else ratios are noise)"
    )
    parser.add_argument("--only", choices=parts, nargs="+", default=parts)
    parser.add_argument("--model", choices=("cifar", "resnet"), default="cifar")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--k", type=int, nargs="+", default=[5, 1], help="eigenvalues")
    parser.add_argument("--rounds", type=int, default=30, help="of the run that is asked about")
    parser.add_argument("--runs", type=int, default=5, help="turns")
    args = parser.parse_args()
    threads = torch.get_num_threads()
    print(f"{machine()}; {threads} threads; torch {torch.__version__}; {args.runs} turns, medians")
    if "commands" in args.only:
        commands({"now": ROOT, "before": args.before.resolve()}, args)
    if set(args.only) & {*jobs}:
        case = CASES[args.model](args.images)
        print(f"\n## {case.title}: {case.size:,} parameters, {len(case.y):,} examples")
        for part in sorted(set(args.only) & {*jobs}):
            jobs[part](case, args)


if __name__ == "__main__":
    main()
