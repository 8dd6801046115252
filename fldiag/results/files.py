"""Files of results, each written whole or not at all: tables with their provenance, texts, and the store of finished tables;
and where a number came from: versions, machine, and digests of what it was computed from."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from fldiag.errors import FldiagError, __version__, printable

if TYPE_CHECKING:
    import pandas as pd
    import torch

#: The package's folder.
ROOT = Path(__file__).parents[1]
#: How text begins that a spreadsheet computes as a formula, and such text with apostrophes before it.
FORMULA = re.compile(r"'*[=+\-@\t\r]")
#: Key of a json file's digest.
DIGEST = "digest"


def write_atomic(path: Path, writer: Callable[[IO[bytes]], Any]) -> str:
    """Write to a temporary name, flush to disk, rename, flush the folder: a reader finds the old file or the whole new one, also
    after a power cut.

    Args:
        path: The file; its folder is made.
        writer: Called with the open binary file.

    Returns:
        The sha256 of what was written.

    Raises:
        FldiagError: The folder or the disk refuses, or a symbolic link in a run leads to the folder; what was there before is
            intact.
    """
    refuse_links_above(path.parent)
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"  # "." and "..": the rename refuses
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as f:
            writer(f)
            f.flush()
            os.fsync(f.fileno())
        digest = sha256(temporary)
        os.replace(temporary, path)
        flush_folder(path.parent)
    except OSError as error:
        raise _refused(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return digest


def refuse_links_above(folder: Path) -> None:
    """Raises FldiagError for a folder of a run that is reached through a symbolic link inside the run: who made the run could
    have anything overwritten by it. The run folder itself may be reached through links."""
    for at in (folder, *folder.parents):
        if os.path.islink(at) and any(
            os.path.lexists(parent / "run.json") for parent in at.parents
        ):
            raise link_error(at)


def link_error(link: Path) -> FldiagError:
    """The refusal to write or delete through a symbolic link inside a run."""
    return FldiagError(
        f"{link} is a symbolic link inside a run, and nothing is written or deleted through one",
        "copy the run with its links resolved (cp -rL RUN COPY) and use the copy",
    )


def _refused(path: Path, error: OSError) -> FldiagError:
    return FldiagError(
        f"cannot write {path}: {error}",
        "free some disk space or choose another folder with --out; what was written before is intact",
    )


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder to disk: a file that was renamed there keeps its name through a power cut."""
    if os.name != "posix":
        return  # other systems do not open folders
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def append(path: Path, content: bytes, at: int) -> None:
    """Write bytes at the end of a file, which is at ``at``, and flush them to disk.

    Raises:
        FldiagError: The disk refuses; the file then ends where it did, as far as the disk allows.
    """
    try:
        handle = os.open(path, os.O_WRONLY)
        try:
            os.lseek(handle, at, os.SEEK_SET)
            while content:
                content = content[os.write(handle, content) :]
            os.fsync(handle)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(handle, at)
            raise
        finally:
            os.close(handle)
    except OSError as error:
        raise _refused(path, error) from error


def write_bytes(path: str | Path, content: bytes) -> Path:
    """Write bytes atomically, and return the path. Raises FldiagError as ``write_atomic``."""
    path = Path(path)
    write_atomic(path, lambda f: f.write(content))
    return path


def write_text(path: str | Path, text: str) -> Path:
    """Write a text (UTF-8) atomically, and return the path. Raises FldiagError as ``write_atomic``."""
    return write_bytes(path, text.encode())


# Digests


def sha256(path: Path) -> str:
    """The sha256 of a file's content, in hexadecimal. Raises OSError when it cannot be read."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def sha256_of(content: bytes) -> str:
    """The same of bytes in memory.

    >>> sha256_of(b"")[:8]
    'e3b0c442'
    """
    return hashlib.sha256(content).hexdigest()


def json_digest(content: Any) -> str:
    """The sha256 of what a json says; the order of its keys and the spaces between them do not count.

    >>> json_digest({"a": 1, "b": 2}) == json_digest({"b": 2, "a": 1})
    True
    """
    return sha256_of(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def digest(*things: Any) -> str:
    """64 hexadecimal digits that change with any bit of the tensors, arrays, text, lists or dicts given.

    Dicts are digested in the order of their keys, so insertion order does not matter.
    Raises FldiagError for anything whose bits are not defined (such as an open file).
    """
    state = hashlib.blake2b(digest_size=32)
    _feed(state, list(things))
    return state.hexdigest()


def _feed(state: Any, thing: Any) -> None:
    torch = sys.modules.get("torch")  # without it nothing is a tensor
    if torch is not None and isinstance(thing, torch.Tensor):
        thing = thing.detach().cpu()
        if thing.dtype == torch.bfloat16:  # numpy has no bfloat16; its bits are what counts
            state.update(b"bfloat16")
            thing = thing.view(torch.int16)
        thing = thing.numpy()
    if isinstance(thing, np.ndarray):
        state.update(f"array {thing.dtype.str} {thing.shape}".encode())
        state.update(np.ascontiguousarray(thing).data.cast("B") if thing.size else b"")
    elif isinstance(thing, bytes):
        state.update(b"bytes %d " % len(thing) + thing)
    elif isinstance(thing, Mapping):
        state.update(b"map %d" % len(thing))
        for key in sorted(thing, key=str):
            _feed(state, str(key))
            _feed(state, thing[key])
    elif isinstance(thing, (list, tuple)):
        state.update(b"list %d" % len(thing))
        for part in thing:
            _feed(state, part)
    elif thing is None or isinstance(thing, (str, bool, int, float)):
        text = json.dumps(thing)
        state.update(f"{type(thing).__name__} {len(text)} {text}".encode())
    else:
        raise FldiagError(
            f"cannot digest a {type(thing).__name__}",
            "give tensors, arrays, numbers, text, or lists and dicts of these",
        )


# Texts and tables


def beside(path: Path, ending: str) -> Path:
    """The same name with an ending appended; dots in the name stay.

    >>> beside(Path("lr-0.1"), ".csv").name
    'lr-0.1.csv'
    """
    return path.with_name(path.name + ending)


def csv_text(frame: pd.DataFrame, digits: int = 9) -> str:
    """A table as the csv text that every writer of the project uses: no index, nine significant digits unless said otherwise.
    Text that a spreadsheet would compute as a formula has an apostrophe before it.

    >>> import pandas as pd
    >>> csv_text(pd.DataFrame({"metric": ["loss"], "value": [1 / 3]}))
    'metric,value\\nloss,0.333333333\\n'
    """
    marked = frame.map(lambda v: f"'{v}" if isinstance(v, str) and FORMULA.match(v) else v)
    return printable(marked.to_csv(index=False, float_format=f"%.{digits}g", lineterminator="\n"))


def read_csv(content: bytes, **options: Any) -> pd.DataFrame:
    """The table of a csv that ``csv_text`` wrote; ``options`` are those of ``pandas.read_csv``."""
    import pandas as pd  # who writes texts alone has no need of it

    frame = pd.read_csv(io.BytesIO(content), **options)
    return frame.map(
        lambda v: v[1:] if isinstance(v, str) and FORMULA.match(v[1:]) and v[0] == "'" else v
    )


def with_digest(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a json file with its digest (``json_digest`` of all the rest), which ``read_json`` verifies; what json does
    not know becomes text."""
    plain = json.loads(json.dumps({k: v for k, v in content.items() if k != DIGEST}, default=str))
    return {**plain, DIGEST: json_digest(plain)}


def read_json(path: Path) -> dict[str, Any]:
    """What a json file says, without its digest, which is verified.

    Raises:
        FldiagError: It is no json, or its digest is not that of the content, or is not there.
        OSError: The file cannot be read.
    """
    return intact(path.read_bytes(), path)


def intact(text: bytes, source: object) -> dict[str, Any]:
    """The same of a json text in memory; ``source`` is what an error calls it.

    >>> intact(json.dumps(with_digest({"a": 1})).encode(), "a line")
    {'a': 1}
    """
    try:
        content: dict[str, Any] = json.loads(text)
        if content.pop(DIGEST) == json_digest(content):
            return content
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise FldiagError(
        f"{source} is not what fldiag wrote: its digest does not fit its content",
        "restore it from a copy, or make it again",
    )


def write_table(frame: pd.DataFrame, path: Path, about: Mapping[str, Any]) -> list[Path]:
    """Write a table as PATH.csv and what it is as PATH.json.

    The json holds ``about``, under ``table`` the name and the sha256 of the csv, by which ``read_csv_bytes`` refuses a csv that
    was changed, and a digest of itself, which ``read_json`` verifies. The csv is written first, so a json never vouches for a csv
    that is not there yet.

    Args:
        frame: The table.
        path: The path without ending.
        about: What it was made from: checkpoints, options; versions and commit are added.

    Returns:
        The two files: json, csv.

    Raises:
        FldiagError: The folder or the disk refuses.
    """
    content = csv_text(frame).encode()
    csv = write_bytes(beside(path, ".csv"), content)
    about = {**provenance(), **about, "table": {"file": csv.name, "sha256": sha256_of(content)}}
    return [write_text(beside(path, ".json"), json.dumps(with_digest(about), indent=1) + "\n"), csv]


def read_csv_bytes(csv: Path, about: Mapping[str, Any]) -> bytes:
    """The content of a csv that ``write_table`` wrote.

    Args:
        csv: The file.
        about: What its json says.

    Returns:
        The bytes.

    Raises:
        FldiagError: The csv is not the one its json was written with.
        OSError: It cannot be read.
    """
    content = csv.read_bytes()
    if sha256_of(content) != about["table"]["sha256"]:
        raise FldiagError(
            f"{csv.name} is not the table that was written (its sha256 differs from the json beside it)",
            "make it again, or restore it",
        )
    return content


# The store: finished tables under a digest of all that decides them, verified whenever they are read


def get_table(folder: Path, key: str) -> pd.DataFrame | None:
    """The table under a key.

    Args:
        folder: where tables are kept.
        key: the digest of all that the table depends on.

    Returns:
        The table as it was put. None where there is none, or where its bytes are not those that its description vouches for: it
        is then computed again.
    """
    import pandas as pd

    try:
        note = json.loads((folder / f"{key}.json").read_text("utf-8"))
        content = (folder / f"{key}.parquet").read_bytes()
        if (note["key"], note["sha256"]) != (key, sha256_of(content)):
            return None
        return pd.read_parquet(io.BytesIO(content))
    except Exception:  # a damaged file can make a reader raise anything
        return None


def put_table(folder: Path, key: str, table: pd.DataFrame, about: Mapping[str, Any]) -> None:
    """Keep a table. Its description is written last, so that an interrupted call leaves nothing that is used.

    Args:
        folder: made where it is not there.
        key: the digest of all that the table depends on.
        table: its index and ``attrs`` are not kept.
        about: what a person wants to know who reads the description.

    Raises:
        FldiagError: the folder or the disk refuses.

    >>> import tempfile, pandas as pd
    >>> folder = Path(tempfile.mkdtemp())
    >>> put_table(folder, "a1b2", pd.DataFrame({"metric": ["trace"], "value": [2.5]}), {"seed": 0})
    >>> get_table(folder, "a1b2")["value"].tolist(), get_table(folder, "b2c3")
    ([2.5], None)
    """
    plain = table.copy(deep=False)
    plain.attrs = {}
    content = plain.to_parquet(index=False)
    write_bytes(folder / f"{key}.parquet", content)
    note = {**about, "key": key, "sha256": sha256_of(content)}
    write_text(folder / f"{key}.json", json.dumps(note, indent=1, default=str))


# The machine and the code: what decides the last bits of a number, in words that say nothing of whose


def provenance(
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    seed: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    """What a reader needs to get the same number again, as a dict that JSON can hold.

    Keys: fldiag, commit, torch, capability, dtype, device, device_name, threads, seed, and ``more``.
    """
    import torch  # only here: digests of texts and arrays need none

    place = torch.device(device or "cpu")
    device_name = torch.cuda.get_device_name(place) if place.type == "cuda" else place.type
    return {
        "fldiag": __version__,
        "commit": commit(),
        "torch": torch.__version__,
        # kernels of other instruction sets round differently
        "capability": torch.backends.cpu.get_cpu_capability(),
        "dtype": dtype and str(dtype).removeprefix("torch."),
        "device": str(place),
        "device_name": device_name,
        "threads": torch.get_num_threads(),
        "seed": seed,
        **more,
    }


@cache
def machine() -> str:
    """Processor and number of cores, such as ``Intel Xeon Processor, 2 cores``."""
    info = Path("/proc/cpuinfo")
    text = info.read_text("utf-8", errors="replace") if info.is_file() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    name = model[1] if model else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


@cache
def sources() -> str:
    """The digest of fldiag's source files: it differs where the code does, also between two commits."""
    return digest({str(p.relative_to(ROOT)): p.read_bytes() for p in ROOT.rglob("*.py")})


@cache
def commit() -> str | None:
    """The project's commit that is running, ``-dirty`` where the code differs from it; None where nobody knows.

    Of a source tree git says it; of an installed package the record that pip keeps of where it came from."""
    try:
        if not (ROOT.parent / ".git").exists():
            record = json.loads(distribution("fldiag").read_text("direct_url.json") or "{}")
            return str(record["vcs_info"]["commit_id"])
        command = [
            "git",
            "--no-optional-locks",
            "describe",
            "--always",
            "--abbrev=40",
            "--exclude=*",
            "--dirty",
        ]
        answer = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=10)
        return answer.stdout.decode("ascii").strip() or None
    except Exception:
        return None  # no git is no reason to fail
