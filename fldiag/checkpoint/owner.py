"""One process owns a run folder at a time: ``owner.json`` in it says which, and is gone when nobody trains.

It holds host, process and since when, and the owner touches it every few seconds. Whether the owner of a file that was left
behind is alive is asked of the operating system where it is this very machine. Elsewhere, on a file system that several machines
share, it is alive as long as the file is touched: its age is the file's against that of a file that is made for the purpose, so
only the clock of the file server counts, and not those of the machines.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fldiag.errors import FldiagError, check_name, short_path
from fldiag.results.files import link_error

NAME = "owner.json"
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
#: Seconds between two touches, and after how many without one an owner on another machine is dead.
BEAT, DEAD = 5.0, 90.0


class Owner:
    """This process as the owner of a folder."""

    def __init__(self, file: Path, token: str):
        self.file, self.token = file, token
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="fldiag-owner")
        self._thread.start()

    def _beat(self) -> None:
        while not self._stop.wait(BEAT):
            with contextlib.suppress(OSError):
                os.utime(self.file)

    def confirm(self) -> None:
        """Raises FldiagError when the folder was removed, or another process took it over: this one slept for long, or was cut
        off."""
        if not self.file.exists():
            raise FldiagError(
                f"{self.file.parent} was removed or moved while it was written to ({NAME} is not in it)",
                "put the folder back and resume, or write to a new folder",
            )
        if _read(self.file).get("token") != self.token:
            raise FldiagError(
                f"{self.file.parent} was taken over by another process while this one did not answer",
                "let the other process continue; everything stored so far is intact",
            )

    def release(self) -> None:
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            if _read(self.file).get("token") == self.token:
                self.file.unlink()


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[Owner]:
    """Own a folder, which is made where it is not there yet, for as long as the block runs.

    Raises FldiagError when another process owns it, it cannot be written, it holds symbolic links, or its name is no text.
    """
    check_name(folder)
    refuse_links(folder)  # before anything is written: every writer of a run comes through here
    made = not os.path.exists(folder)  # Path's own raises where a name is too long
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FldiagError(
            f"cannot create {short_path(folder)}: {error.strerror}",
            "choose another folder with --out",
        ) from None
    try:
        owner = _take(folder)
    except OSError as error:
        raise FldiagError(
            f"cannot write to {folder}: {error.strerror}", "choose another folder with --out"
        ) from None
    try:
        yield owner
    finally:
        owner.release()
        if made:
            with contextlib.suppress(OSError):
                folder.rmdir()  # only where nothing was written


def refuse_links(folder: Path) -> None:
    """Raises FldiagError for a symbolic link in the place of a file or folder that fldiag writes into a run, or in such a folder.
    The run folder itself may be reached through links, and other files in it are no business of fldiag's."""
    entries = [
        entry
        for entry in _scan(folder)
        if entry.name in FOLDERS or entry.name.lstrip(".").startswith((*FILES, NAME))
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


def _take(folder: Path) -> Owner:
    file, token = folder / NAME, secrets.token_hex(8)
    about = {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "started": started(os.getpid()),
        "token": token,
    }
    for _ in range(5):
        try:
            _create(file, json.dumps(about).encode())
        except FileExistsError:
            _remove_dead(file)
            continue
        return Owner(file, token)
    raise _taken(file, _read(file))


def _create(file: Path, content: bytes) -> None:
    """Make a file that is whole from the first moment on. Raises FileExistsError when there is one."""
    whole = _aside(file)
    try:
        with open(whole, "wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        try:
            os.link(whole, file)
        except FileExistsError:
            raise
        except OSError:  # a file system without links: whoever reads the file before it is written waits as for a stranger
            with open(file, "xb") as f:
                f.write(content)
    finally:
        whole.unlink(missing_ok=True)


def _aside(file: Path) -> Path:
    return file.with_name(f".{file.name}.{secrets.token_hex(4)}.tmp")


def _remove_dead(file: Path) -> None:
    """Remove the file of an owner that is dead. Raises FldiagError for one that is alive."""
    there = _read(file)
    if alive(file, there):
        raise _taken(file, there)
    # Two processes may find this at once. Renaming is what only one of them can do; the other may then hold the file of the
    # first, and puts it back.
    aside = _aside(file)
    with contextlib.suppress(FileNotFoundError):
        file.rename(aside)
        if _read(aside).get("token") != there.get("token"):
            with contextlib.suppress(FileExistsError):
                os.link(aside, file)
        aside.unlink()


def alive(file: Path, about: dict[str, Any]) -> bool:
    """Whether the owner that a file names still works."""
    process = about.get("process")
    if isinstance(process, int) and about.get("machine") == machine() and os.name == "posix":
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return False
        except (OSError, OverflowError):
            return True
        return about.get("started") in (None, started(process))
    return age(file) < DEAD


def age(file: Path) -> float:
    """Seconds since a file was touched, by the clock of its file system; 0 for one that is gone by now."""
    probe = _aside(file)
    try:
        probe.touch()
        return probe.stat().st_mtime - file.stat().st_mtime
    except FileNotFoundError:
        return 0.0
    finally:
        probe.unlink(missing_ok=True)


def machine() -> str:
    """What tells machines apart of which one may see another's processes: the start of the system and its process numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def started(process: int) -> str | None:
    """When a process started, in the system's own words: numbers of processes are used again. None where nobody says, and for
    one that ended and was not waited for."""
    try:
        state, *more = Path(f"/proc/{process}/stat").read_text("utf-8").rpartition(")")[2].split()
        return None if state in "ZX" else more[18]
    except (OSError, ValueError, IndexError):
        return None


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # just made, and not written yet
    return found if isinstance(found, dict) else {}


def _taken(file: Path, about: dict[str, Any]) -> FldiagError:
    return FldiagError(
        f"{file.parent} is being trained by process {about.get('process', '(unknown)')} on "
        f"{about.get('host', '(unknown)')} since {about.get('since', '(unknown)')}",
        f"wait for it, or stop it; if it was killed on another machine, the folder is released after {DEAD:g} s",
        usage=True,
    )
