"""What every page that stands alone, the landscape's and the report's, tells the browser."""

from __future__ import annotations

import base64
import gzip
import hashlib
from functools import cache


def policy(*scripts: str) -> str:
    """A content security policy: only these scripts run, no event handler does, and nothing is fetched.

    Images stand in the page itself.
    """
    digests = (base64.b64encode(hashlib.sha256(s.encode("utf-8")).digest()).decode() for s in scripts)
    allowed = " ".join(f"'sha256-{d}'" for d in digests)
    return (f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
            "img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'")


def pack(content: str | bytes) -> str:
    """gzip in base64, which cannot end the element that it stands in; the same content gives the same text."""
    raw = content.encode("utf-8") if isinstance(content, str) else content
    return base64.b64encode(gzip.compress(raw, 9, mtime=0)).decode()


@cache
def packed_plotly() -> str:
    from plotly.offline import get_plotlyjs

    return pack(get_plotlyjs())
