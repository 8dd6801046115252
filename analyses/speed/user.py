"""What a user waits for: the start, an answer, the same answer again; landscapes beside loss-landscapes.

    python analyses/speed/user.py [--only commands landscape] [--model cifar] [--images 1000]

loss-landscapes runs in this process, in turns with fldiag, each landscape with its error against float64.
"""

import argparse
import copy
import os
import subprocess
import sys
import tempfile
from functools import partial

import numpy as np
import torch
from curvature_cases import CASES, ROOT
from curvature_peers import Answer
from curvature_turns import HEAD, Timed, compare
from scipy.interpolate import RectBivariateSpline
from torch.nn.functional import cross_entropy
from torch.nn.utils import vector_to_parameters

from fldiag import Problem
from fldiag.diagnostics.landscape import POINTS, landscape, surfaces
from fldiag.landscape.directions import random_direction
from fldiag.results.files import machine

#: Seconds of an answer, and after which there is no further turn.
LIMIT = 600
CHECKPOINT = str(ROOT / "checkpoints" / "example" / "fedavg-digits.pt")
#: Of loss-landscapes, which evaluates all points, so many an axis are timed.
STEPS = 4


def run(*words):
    path = os.pathsep.join((str(ROOT), str(ROOT / "analyses")))
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, *words]
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8")
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return Answer(None)


def commands(args):
    """Each a process of its own; ratios to importing torch. Results go to a new folder every time, or (``again``) to the same."""
    fldiag, sides = ("-m", "fldiag.cli"), []
    with tempfile.TemporaryDirectory() as folder:
        for title, words, out in (
            ("import torch", ("-c", "import torch"), None),
            ("import fldiag", ("-c", "import fldiag"), None),
            ("fldiag --help", (*fldiag, "--help"), None),
            ("fldiag landscape CKPT", (*fldiag, "landscape", CHECKPOINT), "new"),
            ("again: fldiag landscape CKPT", (*fldiag, "landscape", CHECKPOINT), "one"),
        ):

            def prepare(seed, words=words, out=out):
                new = tempfile.mkdtemp(dir=folder)
                place = ("--out", new if out == "new" else f"{folder}/{out}")
                return partial(run, *words, *(place if out else ()))

            prepare(0)()  # the first answer
            sides.append(Timed(title, prepare, None))
        print(f"\n{HEAD}")
        compare("command", sides, args)


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
    print(f"\n{HEAD}")
    compare(title, [Timed("fldiag", lambda seed: ours, error), peer], args)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parts = ("commands", "landscape")
    parser.add_argument("--only", choices=parts, nargs="+", default=parts)
    parser.add_argument("--model", choices=("cifar", "resnet"), default="cifar")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=5, help="turns")
    args = parser.parse_args()
    args.limit = args.patience = LIMIT
    threads = torch.get_num_threads()
    print(f"{machine()}; {threads} threads; torch {torch.__version__}; {args.runs} turns, medians")
    if "commands" in args.only:
        commands(args)
    if "landscape" in args.only:
        case = CASES[args.model](args.images)
        print(f"\n## {case.title}: {case.size:,} parameters, {len(case.y):,} examples")
        landscapes(case, args)


if __name__ == "__main__":
    main()
