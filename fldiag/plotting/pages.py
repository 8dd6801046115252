"""What every page that stands alone, the landscape's and the report's, tells the browser."""

from __future__ import annotations

import base64
import hashlib


def policy(*scripts: str) -> str:
    """A content security policy: only these scripts run, no event handler does, and nothing is fetched.

    Images stand in the page itself. plotly compiles its surface code at run time, hence ``unsafe-eval``.
    """
    digests = (base64.b64encode(hashlib.sha256(s.encode("utf-8")).digest()).decode() for s in scripts)
    allowed = " ".join(f"'sha256-{d}'" for d in digests)
    return (f"default-src 'none'; script-src {allowed} 'unsafe-eval'; style-src 'unsafe-inline'; "
            "img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'")
