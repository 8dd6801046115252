"""Which models are connected: the checkpoints given, or the clients' models of the one that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fldiag.errors import FldiagError
from fldiag.problem.problem import Problem
from fldiag.registry import Choice
from fldiag.runs.open_problem import open_problem
from fldiag.runs.run import Run
from fldiag.runs.schema import Checkpoint


def choose(
    targets: Sequence[Run | Checkpoint | Problem],
    options: Mapping[str, Any],
    subject_options: Mapping[str, Any],
) -> Choice:
    """Of one target the clients that it holds; of several, each.

    Raises FldiagError for one target that holds no two trained models.
    """
    if len(targets) > 1:
        return Choice([(t, {}) for t in targets])
    target = targets[0]
    if isinstance(target, Problem):
        raise FldiagError("connectivity needs at least two models", "give two or more", usage=True)
    checkpoint = target.checkpoint() if isinstance(target, Run) else target
    if subject_options.get("client") is not None:
        raise FldiagError(
            "connectivity needs at least two models, and --client chooses one",
            "leave out --client, or give several checkpoints",
            usage=True,
        )
    ids = checkpoint.client_ids if checkpoint.clients is not None else ()
    if len(ids) < 2:
        weights = (
            f"the trained weights of one client ({ids[0]})"
            if ids
            else "no trained weights of clients"
        )
        raise FldiagError(
            f"{checkpoint.path} holds {weights}, and connectivity needs at least two models",
            "give several checkpoints, or train with checkpoint.clients = 'sampled'",
            usage=True,
        )
    name = subject_options.get("name") or checkpoint.label
    first = open_problem(
        checkpoint, **{**subject_options, "client": ids[0], "name": f"{name} client {ids[0]}"}
    )
    assert checkpoint.clients is not None
    following = [
        first.at(
            checkpoint.clients[row],
            {n: b[row] for n, b in checkpoint.buffers.items()} or None,
            name=f"{name} client {k}",
            labels={**first.labels, "client": k},
        )
        for row, k in enumerate(ids)
        if row
    ]
    return Choice([(p, {}) for p in (first, *following)], named=[checkpoint])
