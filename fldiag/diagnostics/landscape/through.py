"""Other weights that a landscape is about: of further checkpoints, of a run's rounds, or of clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fldiag.errors import FldiagError
from fldiag.params import Layout
from fldiag.problem.problem import Problem
from fldiag.runs.checkpoint import Checkpoint

#: A trajectory shows at most so many checkpoints of a run, evenly chosen.
LONGEST = 50


def plane(problems: Sequence[Problem]) -> list[dict[str, Any]]:
    """The weights of the second and the third problem. Raises FldiagError for another number of them."""
    if len(problems) != 3:
        raise FldiagError(
            f"a plane goes through three checkpoints, {len(problems)} given",
            "give three",
            usage=True,
        )
    return [{**p.layout.views(p.w), **p.frozen, **p.buffers} for p in problems[1:]]


def trajectory(problems: Sequence[Problem]) -> tuple[Problem, list[tuple[int | None, Any]]]:
    """The last problem of a trajectory, and the rounds (None: not known) and weights before it."""
    checkpoints = checkpoints_of(problems)
    *before, last = checkpoints
    end = next((p for p in problems if p.checkpoint is last), problems[0])
    return end, [(c.round, c.state) for c in before]


def checkpoints_of(problems: Sequence[Problem]) -> list[Checkpoint]:
    """The checkpoints of the run that a problem was opened from (evenly thinned to ``LONGEST``), or those of several problems in
    the order of their rounds.

    Raises FldiagError for fewer than three, which have no plane of their own.
    """
    if len(problems) == 1 and problems[0].run is not None:
        run = problems[0].run
        rounds, count = run.rounds, min(len(run.rounds), LONGEST)
        places = {round(i * (len(rounds) - 1) / max(count - 1, 1)) for i in range(count)}
        checkpoints = [run.checkpoint(rounds[i]) for i in sorted(places)]
    else:
        checkpoints = [p.checkpoint for p in problems if p.checkpoint is not None]
        numbers = {c.round for c in checkpoints}
        if None not in numbers and len(numbers) == len(checkpoints):
            checkpoints.sort(key=lambda c: c.round or 0)
    if len(checkpoints) < 3:
        raise FldiagError(
            f"a trajectory needs at least three checkpoints, {len(checkpoints)} given",
            "give a run folder with more rounds (checkpoint.every), or more files",
            usage=True,
        )
    return checkpoints


def client_models(problem: Problem) -> dict[int, Any]:
    """The trained models of the clients that a problem's checkpoint holds: client -> named weights and buffers.

    Raises FldiagError where it holds none, or they do not fit the model.
    """
    checkpoint = problem.checkpoint
    if checkpoint is None or checkpoint.clients is None or not checkpoint.client_ids:
        source = problem.name if checkpoint is None else checkpoint.path
        raise FldiagError(
            f"{source} holds no trained weights of clients",
            "train with checkpoint.clients = 'sampled'",
            usage=True,
        )
    layout = Layout.of(problem.module)
    if checkpoint.clients.shape[1:] != (layout.size,):
        raise FldiagError(
            f"{checkpoint.path}: client weights of shape {list(checkpoint.clients.shape)} do not fit the model",
            "the file was edited; use the original",
        )
    return {
        client: {
            **layout.views(checkpoint.clients[row]),
            **{n: b[row] for n, b in checkpoint.buffers.items()},
        }
        for row, client in enumerate(checkpoint.client_ids)
    }
