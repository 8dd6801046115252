"""Files of results, each written whole or not at all: tables with their provenance, texts, pictures."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pandas as pd

from fldiag.errors import FldiagError

#: Picture formats and the metadata that would make two files of one figure differ.
PICTURES: dict[str, dict[str, Any]] = {"pdf": {"CreationDate": None}, "png": {"Software": None}}


def write_atomic(path: Path, writer: Callable[[IO[bytes]], Any]) -> str:
    """Write to a temporary name, flush to disk, rename: a reader finds the old file or the whole new one.

    Args:
        path: The file; its folder is made.
        writer: Called with the open binary file.

    Returns:
        The sha256 of what was written.

    Raises:
        FldiagError: The folder or the disk refuses; what was there before is intact.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as f:
            writer(f)
            f.flush()
            os.fsync(f.fileno())
        digest = sha256(temporary)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        raise FldiagError(f"cannot write {path}: {error}", "free some disk space or choose another folder with --out; "
                          "what was written before is intact") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return digest


def write_bytes(path: str | Path, content: bytes) -> Path:
    """Write bytes atomically, and return the path. Raises FldiagError as ``write_atomic``."""
    path = Path(path)
    write_atomic(path, lambda f: f.write(content))
    return path


def write_text(path: str | Path, text: str) -> Path:
    """Write a text (UTF-8) atomically, and return the path. Raises FldiagError as ``write_atomic``."""
    return write_bytes(path, text.encode())


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


def beside(path: Path, ending: str) -> Path:
    """The same name with an ending appended; dots in the name stay.

    >>> beside(Path("lr-0.1"), ".csv").name
    'lr-0.1.csv'
    """
    return path.with_name(path.name + ending)


def csv_text(frame: pd.DataFrame) -> str:
    """A table as the csv text that every writer of the project uses: no index, nine significant digits.

    >>> csv_text(pd.DataFrame({"metric": ["loss"], "value": [1 / 3]}))
    'metric,value\\nloss,0.333333333\\n'
    """
    return frame.to_csv(index=False, float_format="%.9g", lineterminator="\n")


def json_text(about: Mapping[str, Any]) -> str:
    """Provenance as json text; what json does not know is written as text."""
    return json.dumps(about, indent=1, default=str)


def write_table(frame: pd.DataFrame, path: Path, about: Mapping[str, Any]) -> list[Path]:
    """Write a table as PATH.csv and what it is as PATH.json.

    The json holds ``about`` and, under ``table``, the name and the sha256 of the csv: ``altered`` tells by it whether the
    csv is still the one that was written. The csv is written first, so a json never vouches for a csv that is not there yet.

    Args:
        frame: The table.
        path: The path without ending.
        about: The provenance: versions, checkpoints, options.

    Returns:
        The two files: json, csv.

    Raises:
        FldiagError: The folder or the disk refuses.
    """
    content = csv_text(frame).encode()
    csv = write_bytes(beside(path, ".csv"), content)
    note = {**about, "table": {"file": csv.name, "sha256": sha256_of(content)}}
    return [write_text(beside(path, ".json"), json_text(note)), csv]


def altered(content: bytes, about: Mapping[str, Any]) -> bool:
    """Whether a csv is not the one its provenance was written with.

    Args:
        content: The bytes of the csv.
        about: The json beside it. One without a checksum (written by an earlier version) vouches for nothing and refuses nothing.

    Returns:
        True when there is a checksum and the content has another one.
    """
    table = about.get("table")
    known = table.get("sha256") if isinstance(table, Mapping) else None
    return known is not None and known != sha256_of(content)


def write_pictures(fig: Any, path: Path, formats: Sequence[str], dpi: float) -> list[Path]:
    """Write a matplotlib figure as PATH.FORMAT for each of ``formats`` (pdf, png). One figure gives the same bytes each time.

    Args:
        fig: The figure.
        path: The path without ending.
        formats: Of ``PICTURES``.
        dpi: Resolution of pixels.

    Returns:
        The files, in the order of ``formats``.

    Raises:
        FldiagError: Another format, or a folder that cannot be written.
    """
    odd = [f for f in formats if f not in PICTURES]
    if odd:
        raise FldiagError(f"cannot write a figure as {odd[0]!r}", f"use one of {', '.join(PICTURES)}", usage=True)
    return [write_bytes(beside(path, f".{kind}"), _drawn(fig, kind, dpi)) for kind in formats]


def _drawn(fig: Any, kind: str, dpi: float) -> bytes:
    buffer = io.BytesIO()
    fig.savefig(buffer, format=kind, dpi=dpi, metadata=PICTURES[kind])
    return buffer.getvalue()
