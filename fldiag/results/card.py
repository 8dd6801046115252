"""How a thing shows itself in a notebook: its name, and what is known of it in two columns."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape


def card(title: str, facts: Mapping[str, object]) -> str:
    """HTML without style or script; names and values are escaped, None is left out.

    >>> card("Run", {"rounds": 3, "method": "<fedavg>", "seed": None})
    '<table><caption>Run</caption><tr><th>rounds</th><td>3</td></tr><tr><th>method</th><td>&lt;fedavg&gt;</td></tr></table>'
    """
    rows = "".join(
        f"<tr><th>{escape(str(k))}</th><td>{escape(str(v))}</td></tr>"
        for k, v in facts.items()
        if v is not None
    )
    return f"<table><caption>{escape(title)}</caption>{rows}</table>"
