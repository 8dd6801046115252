"""Which fldiag this is."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """The installed version; ``0+source`` in a source tree that was never installed."""
    try:
        return metadata.version("fldiag")
    except metadata.PackageNotFoundError:
        return "0+source"
