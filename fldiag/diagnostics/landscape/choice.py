"""Which checkpoints a landscape is drawn around, and through which others its plane goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fldiag.errors import FldiagError
from fldiag.params import Layout
from fldiag.problem.problem import Problem
from fldiag.registry import Choice
from fldiag.runs.open_problem import open_problem
from fldiag.runs.run import Run
from fldiag.runs.schema import Checkpoint

#: A trajectory shows at most so many checkpoints of a run, evenly chosen.
LONGEST = 50
Target = Run | Checkpoint | Problem


def choose(
    targets: Sequence[Target], options: Mapping[str, Any], subject_options: Mapping[str, Any]
) -> Choice:
    """Every target alone, unless the directions join several. The lines to clients' models are another diagnostic's."""
    directions = options["directions"]
    if directions == "clients":
        return _clients(targets, options, subject_options)
    if directions == "plane" and options["through"] is None:
        return _plane(targets, subject_options)
    if directions == "pca" and options["through"] is None:
        return _trajectory(targets, subject_options)
    return Choice([(t, {}) for t in targets])


def _weights(problem: Problem) -> dict[str, Any]:
    return {**problem.layout.views(problem.w), **problem.frozen, **problem.buffers}


def _last(target: Target) -> Checkpoint | Problem:
    return target.checkpoint() if isinstance(target, Run) else target


def _plane(targets: Sequence[Target], subject_options: Mapping[str, Any]) -> Choice:
    if len(targets) != 3:
        raise FldiagError(
            f"a plane goes through three checkpoints, {len(targets)} given",
            "give three",
            usage=True,
        )
    sources = [_last(t) for t in targets]
    problems = [
        t if isinstance(t, Problem) else open_problem(t, **subject_options) for t in sources
    ]
    through = [_weights(p) for p in problems[1:]]
    note = "the surface has the buffers of the first checkpoint everywhere; the losses of the points are with their own"
    return Choice(
        [(sources[0], {"through": through})],
        named=[t for t in sources if isinstance(t, Checkpoint)],
        notes=[note] if problems[0].buffers else [],
    )


def _trajectory(targets: Sequence[Target], subject_options: Mapping[str, Any]) -> Choice:
    *checkpoints, last = trajectory(targets)
    rounds, states = [c.round for c in checkpoints], [c.state for c in checkpoints]
    has_rounds = None not in rounds and len(set(rounds)) == len(rounds)
    through: Any = dict(zip(rounds, states, strict=True)) if has_rounds else states
    buffers = open_problem(last, **subject_options).buffers
    return Choice(
        [(last, {"through": through})],
        named=[*checkpoints, last],
        notes=[
            f"trajectory of {len(checkpoints) + 1} checkpoints, {checkpoints[0].label} to {last.label}"
            + (", all with the buffers of the last" if buffers else "")
        ],
    )


def trajectory(targets: Sequence[Target]) -> list[Checkpoint]:
    """The checkpoints of a run (evenly thinned to ``LONGEST``), or those given, in the order of their rounds.

    Raises FldiagError for fewer than three, which have no plane of their own.
    """
    if len(targets) == 1 and isinstance(run := targets[0], Run):
        rounds, count = run.rounds, min(len(run.rounds), LONGEST)
        places = {round(i * (len(rounds) - 1) / max(count - 1, 1)) for i in range(count)}
        checkpoints = [run.checkpoint(rounds[i]) for i in sorted(places)]
    else:
        checkpoints = [c for t in targets if not isinstance(c := _last(t), Problem)]
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


def _clients(
    targets: Sequence[Target], options: Mapping[str, Any], subject_options: Mapping[str, Any]
) -> Choice:
    """Profiles from the global model to each stored client's."""
    if options["height"] == "log" or options["clip"] is not None:
        raise FldiagError(
            "height and clip are for surfaces", "leave them out of a picture of lines", usage=True
        )
    if subject_options.get("client") is not None or options["span"] is not None:
        raise FldiagError(
            "the ways to the clients' models start at the global model and end at theirs",
            "leave out --client and --span",
            usage=True,
        )
    points = {} if options["points"] is None else {"points": options["points"]}
    checkpoints = [_last(t) for t in targets]
    return Choice(
        [(t, {"through": ends(t, subject_options)}) for t in checkpoints],
        instead="profile",
        stem="interpolation",
        options={"directions": "through", "seed": options["seed"], **points},
    )


def ends(target: Checkpoint | Problem, subject_options: Mapping[str, Any]) -> dict[int, Any]:
    """The trained models of the clients a checkpoint holds: client -> named weights and buffers.

    Raises FldiagError when it holds none, or they do not fit the model.
    """
    if isinstance(target, Problem) or target.clients is None or not target.client_ids:
        source = target.name if isinstance(target, Problem) else target.path
        raise FldiagError(
            f"{source} holds no trained weights of clients",
            "train with checkpoint.clients = 'sampled'",
            usage=True,
        )
    problem = open_problem(target, **subject_options)
    layout = Layout.of(problem.module)
    if target.clients.shape[1:] != (layout.size,):
        raise FldiagError(
            f"{target.path}: client weights of shape {list(target.clients.shape)} do not fit the model",
            "the file was edited; use the original",
        )
    return {
        client: {
            **layout.views(target.clients[row]),
            **{n: b[row] for n, b in target.buffers.items()},
        }
        for row, client in enumerate(target.client_ids)
    }
