"""Another program's folder of files of weights as a run, through the recorder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import nn

from fldiag.data import given
from fldiag.errors import FldiagError
from fldiag.execution import workspace
from fldiag.integrations.recorder import Recorder, mean
from fldiag.models import State
from fldiag.runs.run import Run, open_checkpoint

#: What stands for what in a pattern. A number is taken whole.
PLACES = {"{round}": r"(?P<round>\d++)", "{client}": r"(?P<client>\d++)"}
#: (round, client) -> file; the client of a global model is None.
Files = dict[tuple[int, int | None], Path]


def convert(
    folder: str | Path,
    out: str | Path,
    *,
    pattern: str | None = None,
    model: nn.Module | str,
    global_pattern: str | None = None,
    data: Any = None,
    partition: Any = None,
    method: str = "foreign",
    seed: int = 0,
    key: str | None = None,
) -> Run:
    """Turn a folder of client checkpoints, or of global models, into a run. Rounds are numbered 1, 2, ... in their order.

    Args:
        folder: Where the files lie.
        out: The run folder to make.
        pattern: Paths of the clients' files, such as ``round_{round}/client_{client}.pt``; ``*`` stands for any text without a
            slash. Files without ``{round}`` are of one round.
        model: A module, a registered name or ``pkg.mod:factory``.
        global_pattern: Paths of the global models after each round, such as ``round_{round}/global.pt``. One of a round before
            those of the clients is what the first clients received. Without global models these are the means of the clients'
            weights, by their examples where the partition says these.
        data: As for a ``Recorder``; so are the rest.
        partition: Client -> the indices of its examples.
        method: What tables call the training.
        seed: Of the training.
        key: Which of several sets of weights in a file, such as ``model_ema``.

    Returns:
        The run.

    Raises:
        FldiagError: No file is named so, one cannot be read or does not fit the model, or the partition lacks a client.
    """
    folder = Path(folder)
    files = find(folder, pattern) if pattern else {}
    globals_ = find(folder, global_pattern) if global_pattern else {}
    rounds = sorted({r for r, _ in files} or {r for r, _ in globals_ if r > 0})
    if not rounds:
        raise FldiagError(
            f"{folder} is a folder, and which of its files are whose after which round is not known",
            "say it: --pattern 'round_{round}/client_{client}.pt', --global-pattern 'round_{round}.pt'",
            usage=True,
        )
    parts = {} if partition is None else given.partition_of(partition, data, None)
    lacking = {int(k or 0) for _, k in files} - parts.keys() if parts else set()
    clients = None if lacking else partition
    with Recorder(out, model, data, clients, method=method, seed=seed) as recorder:

        def read(path: Path) -> State:
            return recorder.state(open_checkpoint(path, key).state, str(path))

        sizes = {k: len(part) for k, part in (recorder.parts or {}).items()}
        if not globals_:
            recorder.note("no global models are given: they are the means of the clients' weights")
        for number, r in enumerate(rounds, 1):
            states = {int(k or 0): read(path) for (s, k), path in files.items() if s == r}
            if (r, None) in globals_:
                state = read(globals_[r, None])
            elif globals_:
                raise FldiagError(f"{folder} has no global model of round {r}", usage=True)
            else:
                state = mean([*states.values()], [sizes.get(k, 1) for k in states])
            if (r - 1, None) in globals_:
                recorder.received = read(globals_[r - 1, None])
            elif r - 1 not in rounds:
                recorder.received = None
            recorder.round(aggregated=state, clients=states)
            workspace().show(number, len(rounds), f"round {number}")
    if lacking:
        raise FldiagError(
            f"{out} is made without the partition, which lacks client {min(lacking)}",
            "number the partition's clients as the files do, and convert into another folder",
            usage=True,
        )
    return recorder.run


def find(folder: Path, pattern: str) -> Files:
    """The files that a pattern names. Raises FldiagError where there are none, or two of the same client and round."""
    files: Files = {}
    regex = compiled(pattern)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if not (match := regex.fullmatch(path.relative_to(folder).as_posix())):
            continue
        names = match.groupdict()
        client = names.get("client")
        place = int(names.get("round") or 1), None if client is None else int(client)
        if place in files:
            raise FldiagError(
                f"{path} and {files[place]} are of the same round and client", usage=True
            )
        files[place] = path
    if not files:
        raise FldiagError(
            f"no file in {folder} is named {pattern!r}", "use {round}, {client} and *", usage=True
        )
    return files


def compiled(pattern: str) -> re.Pattern[str]:
    """A pattern as a regular expression that never goes back over a ``*``: the first place where what follows it fits is taken,
    and the last part is sought at the end of the name.

    >>> compiled("*_{client}.pt").fullmatch("a_b_7.pt")["client"]
    '7'
    """
    pieces = [
        "".join(PLACES.get(part, re.escape(part)) for part in re.split(r"(\{\w+\})", piece))
        for piece in pattern.split("*")
    ]
    pieces[-1] += "$"
    try:
        return re.compile(pieces[0] + "".join(f"(?>[^/]*?{piece})" for piece in pieces[1:]))
    except re.error:
        raise FldiagError(f"{pattern!r} names {{round}} or {{client}} twice", usage=True) from None
