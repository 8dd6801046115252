"""Checkpoint files in the other format, and folders of another program's clients' files as runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save

from fldiag.errors import FldiagError, short_path
from fldiag.integrations import client_files
from fldiag.integrations.folder_to_run import Event, folder_to_run
from fldiag.models.state_dict import describe_choice
from fldiag.results import files
from fldiag.runs import foreign, schema
from fldiag.runs.run import Run, verify
from fldiag.runs.tensor_files import flatten, read_tensors
from fldiag.runs.trust import trust

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
) -> Run | Path:
    """A checkpoint file in the other format, or another program's folder of clients' files as a run.

    Args:
        source: a ``.pt`` or ``.safetensors`` file, the folder, or an ``.npy`` or ``.npz`` with all clients' weights:
            [clients, parameters], or [rounds, clients, parameters].
        out: the file in the other format, or the run's folder, which goes on where it was stopped.
        pattern: where the clients' files lie: ``"round_{round}/client_{client}.pt"``; not needed where the words before the
            numbers say it. This and what follows is for folders.
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
        The run, or the path of the file.

    Raises:
        FldiagError: names that say no conversion, files that cannot be read, or that do not fit the model.

    >>> import tempfile, torch, fldiag
    >>> at = tempfile.mkdtemp()
    >>> torch.save(torch.nn.Linear(2, 3).state_dict(), at + "/net.pt")
    >>> fldiag.convert(at + "/net.pt", at + "/net.safetensors").name
    'net.safetensors'
    """
    source, out, tell = Path(source), Path(out), on_event or (lambda event: None)
    for path in (source, initial) if trust_file else ():
        if path is not None:
            trust(path)
    if os.path.isdir(source) or (os.path.isfile(source) and source.suffix in client_files.ARRAYS):
        return folder_to_run(
            source,
            out,
            tell,
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
    folder_options = [
        name
        for name, value in (
            ("pattern", pattern),
            ("global-pattern", global_pattern),
            ("partition", partition),
            ("initial", initial),
            ("model", model),
            ("data", data),
        )
        if value is not None
    ]
    if folder_options and os.path.isfile(source):
        raise FldiagError(
            f"--{folder_options[0]} is for a folder, and {source} is a file",
            "leave it out, or give the folder",
            usage=True,
        )
    for text in convert_file(source, out, key):
        tell({"event": "note", "text": text})
    return out


def convert_file(source: Path, out: Path, key: str | None = None) -> list[str]:
    """``.pt`` as ``.safetensors`` or back: a checkpoint of fldiag with all it holds, else the state_dict, tensor by tensor.

    Returns what is to be said of the entries of a training program's container that were left out. Raises FldiagError
    when the names do not say two formats, ``out`` is there already, or ``source`` cannot be read.
    """
    kinds = [
        ".safetensors"
        if p.suffix == ".safetensors"
        else ".pt"
        if p.suffix in client_files.SUFFIXES
        else None
        for p in (source, out)
    ]
    if not os.path.exists(source):
        raise FldiagError(
            f"{short_path(source)} is not there",
            "give a file of weights, or a folder of clients' files with --pattern",
            usage=True,
        )
    if None in kinds or kinds[0] == kinds[1]:
        raise FldiagError(
            f"{short_path(source)} to {short_path(out)} is not a conversion that fldiag knows",
            "convert .pt to .safetensors or back; or a folder, with --pattern",
            usage=True,
        )
    if os.path.exists(out):
        raise FldiagError(
            f"{out} is already there", "choose another name, or remove it first", usage=True
        )
    verify(source)
    content, notes = read_tensors(source), list[str]()
    if isinstance(content, dict) and isinstance(content.get("manifest"), str):
        schema.read(source, key)  # refuses what no reader would take
    else:
        weights = foreign.unwrap(source, content, key)
        content = weights.state
        if weights.alternatives:
            notes.append(f"{source.name}: {describe_choice(weights.key, weights.alternatives)}")
        if weights.left:
            ellipsis = " ..." if len(weights.left) > 8 else ""
            notes.append(
                f"left out, because they are not weights: {', '.join(weights.left[:8])}{ellipsis}"
            )
    if kinds[1] == ".pt":
        files.write_atomic(out, lambda f: torch.save(content, f))
        return notes
    tensors, metadata = flatten(content)
    data = save(tensors, metadata)
    files.write_atomic(out, lambda f: f.write(data))
    return notes
