"""The one store: finished tables on disk under a digest of all that decides them, verified whenever they are read."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from fldiag.results.files import sha256_of, write_bytes, write_text


def get_table(folder: Path, key: str) -> pd.DataFrame | None:
    """The table under a key.

    Args:
        folder: where tables are kept.
        key: the digest of all that the table depends on.

    Returns:
        The table as it was put. None where there is none, or where its bytes are not those that its description vouches for: it
        is then computed again.
    """
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

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> put_table(folder, "a1b2", pd.DataFrame({"metric": ["trace"], "value": [2.5]}), {"seed": 0})
    >>> get_table(folder, "a1b2")["value"].tolist(), get_table(folder, "b2c3")
    ([2.5], None)
    """
    plain = table.copy(deep=False)
    plain.attrs = {}
    buffer = io.BytesIO()
    plain.to_parquet(buffer, index=False)
    content = buffer.getvalue()
    write_bytes(folder / f"{key}.parquet", content)
    note = {**about, "key": key, "sha256": sha256_of(content)}
    write_text(folder / f"{key}.json", json.dumps(note, indent=1, default=str))
