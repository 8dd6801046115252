"""What every page that stands alone, the landscape's and the report's, tells the browser."""

from __future__ import annotations

import base64
import codecs
import gzip
import hashlib
from functools import cache
from importlib import resources


def policy(*scripts: str) -> str:
    """A content security policy: only these scripts run, no event handler does, and nothing is fetched.

    Images stand in the page itself.
    """
    digests = (
        base64.b64encode(hashlib.sha256(s.encode("utf-8")).digest()).decode() for s in scripts
    )
    allowed = " ".join(f"'sha256-{d}'" for d in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'"
    )


#: The letters of base 85 that HTML gives a meaning, and what stands for them.
_LETTERS = bytes.maketrans(b"&<>", b"/,.")


def pack(content: str | bytes) -> str:
    """gzip in base 85 without letters that could end the element around it; the same content gives the same text."""
    raw = content.encode("utf-8") if isinstance(content, str) else content
    return base64.b85encode(gzip.compress(raw, 9, mtime=0)).translate(_LETTERS).decode()


def pack_table(raw: bytes) -> tuple[str, int]:
    """A csv table, packed column by column, which takes much less space, and its number of columns; 0 where it is packed as it
    is, because its lines have different numbers of commas."""
    rows = [line.split(b",") for line in raw.removesuffix(b"\n").split(b"\n")]
    columns = len(rows[0])
    if (
        not raw.endswith(b"\n")
        or raw.startswith(codecs.BOM_UTF8)
        or any(len(row) != columns for row in rows)
    ):
        return pack(raw), 0
    return pack(b"\n".join(cell for column in zip(*rows, strict=True) for cell in column)), columns


def unpacking() -> str:
    """The script that both need which read what is packed."""
    return (resources.files("fldiag.plotting") / "unpack.js").read_text("utf-8")


@cache
def packed_plotly() -> str:
    from plotly.offline import get_plotlyjs

    return pack(get_plotlyjs())
