"""Folders of another program's clients' files as runs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from fldiag.integrations.folder_to_run import Event, folder_to_run
from fldiag.runs.checkpoint import trust_files
from fldiag.runs.run import Run

Moment = Literal["aggregated", "received"]


def convert(
    source: str | Path,
    out: str | Path,
    *,
    pattern: str | None = None,
    global_pattern: str | None = None,
    global_is: Moment = "aggregated",
    initial: str | Path | None = None,
    partition: str | Path | None = None,
    model: str | None = None,
    data: str | None = None,
    method: str = "foreign",
    seed: int = 0,
    evaluate: bool = True,
    key: str | None = None,
    root: str | None = None,
    download: bool = False,
    trust_file: bool = False,
    on_event: Event | None = None,
) -> Run:
    """Another program's folder of clients' files as a run.

    Args:
        source: the folder.
        out: the run's folder, which goes on where it was stopped.
        pattern: where the clients' files lie: ``"round_{round}/client_{client}.pt"``; ``*`` stands for any text.
        global_pattern: where the global models lie; without it they are taken to be the mean of the clients' weights, without a
            pattern of clients' files the run is of global models alone.
        global_is: what the global file of a round is: aggregated (after it) or received (before it).
        initial: file of the model that the first round's clients received.
        partition: whose examples are whose: npz or JSON, client -> indices.
        model: the files' model: a registered name or ``pkg.mod:factory``.
        data: the federation's data: a name, ``npz:PATH`` or ``pkg.mod:loader``.
        method: what tables call the method.
        seed: of that training, for the tables.
        evaluate: test the global model of every round, when data are given.
        key: which set of weights to read of files that hold several; by default the plain one.
        root: folder that holds the data.
        download: fetch a missing public data set.
        trust_file: the files are your own: as for ``load``.
        on_event: gets a dict for every remark (``note``) and every round.

    Returns:
        The run.

    Raises:
        FldiagError: a pattern that nothing matches, files that cannot be read, or that do not fit the model.

    >>> import tempfile, torch, fldiag
    >>> from fldiag import models
    >>> at = tempfile.mkdtemp()
    >>> for k in (0, 1):
    ...     torch.save(models.build("mlp", (1, 8, 8), 10).state_dict(), f"{at}/client_{k}.pt")
    >>> run = fldiag.convert(at, at + "/run", pattern="client_{client}.pt", model="mlp", data="digits")
    >>> run.checkpoint(1).client_ids
    [0, 1]
    """
    source, out = Path(source), Path(out)
    if trust_file:
        trust_files()
    return folder_to_run(
        source,
        out,
        on_event or (lambda event: None),
        clients=pattern,
        globals_=global_pattern,
        moment=global_is,
        initial=None if initial is None else Path(initial),
        partition=None if partition is None else Path(partition),
        model=model,
        data=data,
        data_root=root,
        download=download,
        method=method,
        seed=seed,
        scores=evaluate,
        key=key,
    )
