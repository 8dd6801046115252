"""Convert run folders that fldiag wrote before its third house, in place.

    python analyses/convert_runs.py FOLDER ...          every run in and below these folders

- A journal (of a run that was stopped) in which each checksum covered the one before gets checksums of each line by itself.
- One file a client in ``state`` becomes a segment (``fldiag.runs.client_states``).
- A run.json without a digest gets one.

Each step verifies what it reads. A run is read and resumed afterwards as if it had been written so. A run that a process may
be training at this moment is left alone, which an error says.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from fldiag.errors import FldiagError
from fldiag.results import files
from fldiag.runs import journal, owner
from fldiag.runs.client_states import ClientStates
from fldiag.runs.index import CHAINED, CONTINUED, write_index
from fldiag.runs.run import Run
from fldiag.runs.tensor_files import read_tensors


def convert_run(folder: Path) -> list[str]:
    """Convert one run; returns what was done, in words.

    Raises FldiagError when a process may be training it, a file is damaged, or the disk refuses.
    """
    content = json.loads((folder / "run.json").read_text("utf-8"))
    client_states = any(key.isdecimal() for key in content.get("state", {}))
    if content.get("schema") != CHAINED and not client_states and files.DIGEST in content:
        return []
    refuse_earlier_owner(folder)
    with owner.hold(folder):
        return _convert(folder)


def refuse_earlier_owner(folder: Path) -> None:
    """Raises FldiagError where a process of the earlier fldiag may be training the run: it holds no lock, and its owner.json,
    which names the machine, is all that says so."""
    about = owner._read_owner(folder)
    if "machine" not in about:
        return
    if about["machine"] == _machine():
        try:
            os.kill(about["process"], 0)
        except ProcessLookupError:
            return
    raise FldiagError(
        f"{folder} is perhaps being trained by process {about['process']} on {about['host']} since {about['since']}",
        f"stop that process; if it ended already, remove {folder / owner.NAME}",
    )


def _machine() -> str:
    """As the earlier fldiag named a machine: the start of the system and its process numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _convert(folder: Path) -> list[str]:
    file = folder / "run.json"
    index, steps = files.read_json(file), []
    if index["schema"] == CHAINED:
        _convert_journal(folder / journal.NAME)
        index["schema"] = CONTINUED
        steps.append("checksums of the journal")
    client_files = {k: name for k, name in index["state"].items() if k.isdecimal()}
    if client_files:
        _convert_states(folder, index, client_files)
        steps.append(f"states of {len(client_files)} clients")
    if files.DIGEST not in json.loads(file.read_text("utf-8")):
        steps.append("digest of run.json")
    if steps:
        write_index(folder, index)
        for name in client_files.values():
            (folder / name).unlink(missing_ok=True)
    return steps


def _convert_journal(path: Path) -> None:
    """Write the journal with checksums of each line. From the first damaged line on, it stays as it is, which is damaged still.

    So does a journal that was converted before this script was stopped.
    """
    if not path.is_file() or next(iter(journal._entries(path.read_bytes())), None) is not None:
        return
    lines = path.read_bytes().splitlines(keepends=True)
    checksum = b""
    for i, line in enumerate(lines):
        before = checksum
        checksum, _, text = line.removesuffix(b"\n").partition(b" ")
        if checksum != hashlib.sha256(before + text).hexdigest()[:32].encode():
            break
        lines[i] = journal.encode_line(i + 1, json.loads(text))
    files.write_bytes(path, b"".join(lines))


def _convert_states(folder: Path, index: dict[str, Any], client_files: dict[str, str]) -> None:
    run = Run(folder, index)
    states = ClientStates(folder, {}, run.verified)
    states.update({int(k): read_tensors(run.verified(name)) for k, name in client_files.items()})
    states.flush(run.put, lambda name: None)
    for key, name in client_files.items():
        del index["state"][key], index["files"][name]
    index["state"] |= states.listed


if __name__ == "__main__":
    failed = False
    for argument in sys.argv[1:]:
        for run_file in sorted(Path(argument).rglob("run.json")):
            try:
                if done := convert_run(run_file.parent):
                    print(f"{run_file.parent}: {', '.join(done)}")
            except FldiagError as error:
                failed = True
                print(f"error: {error.what}\n  → {error.remedy}", file=sys.stderr)
    sys.exit(failed)
