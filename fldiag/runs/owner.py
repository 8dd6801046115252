"""One process owns a run folder at a time: it holds a lock of the operating system, which a killed process cannot leave behind.

``owner.lock`` is the locked file. ``owner.json`` says which process holds it, for the error that others get. The owner removes
both when it ends; files that a killed one left do not matter.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fldiag.errors import FldiagError, check_name, short_path
from fldiag.results.files import link_error, write_text

NAME, LOCK = "owner.json", "owner.lock"
#: All that fldiag writes into a run folder.
FILES = (
    "run.json",
    "journal.jsonl",
    "partition.npz",
    "data.npz",
    "clock.json",
    "base.safetensors",
    "tokenizer.json",
)
FOLDERS = ("rounds", "state", "metrics", "steps", "diagnostics", "lost")


class Owner:
    """This process as the owner of a folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._about = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
            "token": secrets.token_hex(8),
        }
        write_text(folder / NAME, json.dumps(self._about))

    def is_in_place(self) -> bool:
        """Whether the folder is the one that this process locked."""
        return _read_owner(self.folder) == self._about

    def confirm(self) -> None:
        """Raises FldiagError when the folder was removed, moved or replaced by another one."""
        if not self.is_in_place():
            raise FldiagError(
                f"{self.folder} was removed or moved while it was written to (its {NAME} is not in it)",
                "put the folder back and resume, or write to a new folder",
            )


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[Owner]:
    """Own a folder, which is created if it does not exist, for as long as the block runs.

    Raises FldiagError when another process owns it, it cannot be written, it holds symbolic links, or its name is no text.
    """
    check_name(folder)
    refuse_links(folder)  # before anything is written: every writer of a run comes through here
    is_new = not os.path.exists(folder)  # Path's own raises where a name is too long
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FldiagError(
            f"cannot create {short_path(folder)}: {error.strerror}",
            "choose another folder with --out",
        ) from None
    lock = FileLock(folder / LOCK, thread_local=False)  # a recorder may be closed by another thread
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise _owned_error(folder) from None
    except OSError as error:
        raise FldiagError(
            f"cannot write to {folder}: {error.strerror}", "choose another folder with --out"
        ) from None
    owner = None
    try:
        owner = Owner(folder)
        yield owner
    finally:
        with contextlib.suppress(OSError):
            if owner is None or owner.is_in_place():
                (folder / NAME).unlink(missing_ok=True)
                (folder / LOCK).unlink(
                    missing_ok=True
                )  # before the release: the next owner locks a new file
        lock.release()
        if is_new:
            with contextlib.suppress(OSError):
                folder.rmdir()  # only where nothing was written


def refuse_links(folder: Path) -> None:
    """Raises FldiagError for a symbolic link in the place of a file or folder that fldiag writes into a run, or in such a folder.
    The run folder itself may be reached through links, and other files in it are no business of fldiag's."""
    entries = [
        entry
        for entry in _scan(folder)
        if entry.name in FOLDERS or entry.name.lstrip(".").startswith((*FILES, NAME, LOCK))
    ]
    while entries:
        entry = entries.pop()
        if entry.is_symlink():
            raise link_error(Path(entry.path))
        if entry.is_dir():
            entries += _scan(entry.path)


def _scan(folder: str | Path) -> list[os.DirEntry[str]]:
    """The entries of a folder; none where there is no folder that can be read."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _read_owner(folder: Path) -> dict[str, Any]:
    """What owner.json says; empty where it is missing or not written yet."""
    try:
        about = json.loads((folder / NAME).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return about if isinstance(about, dict) else {}


def _owned_error(folder: Path) -> FldiagError:
    about = _read_owner(folder)
    return FldiagError(
        f"{folder} is being trained by process {about.get('process', '(unknown)')} on "
        f"{about.get('host', '(unknown)')} since {about.get('since', '(unknown)')}",
        "wait for it, or stop it",
        usage=True,
    )
