"""What other packages bring, by their entry points: listed without an import, and imported one by one."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from typing import Any

from fldiag.errors import FldiagError, error_text

#: The packages from which something was loaded.
loaded: set[str] = set()


def entry_points(group: str) -> list[EntryPoint]:
    """The entry points of a group, by name.

    Packages that merely lie in the current folder have none (unless PYTHONPATH names it): whoever unpacks an archive there
    has installed nothing.
    """
    searched = os.environ.get("PYTHONPATH", "")
    return list(_entry_points(group, _folders(os.getcwd(), searched, tuple(sys.path))))


@cache
def _folders(directory: str, searched: str, path: tuple[str, ...]) -> tuple[str, ...]:
    """Where packages may be installed. Cached, because each config's hash asks."""
    current = Path(directory).resolve()
    if current in (Path(folder).resolve() for folder in searched.split(os.pathsep) if folder):
        return path
    return tuple(folder for folder in path if Path(folder).resolve() != current)


@cache
def _entry_points(group: str, folders: tuple[str, ...]) -> list[EntryPoint]:
    """Cached, because it reads every installed package."""
    points: dict[str, list[EntryPoint]] = {}
    for distribution in distributions(path=list(folders)):
        if selected := distribution.entry_points.select(group=group):
            points.setdefault(
                distribution.name, list(selected)
            )  # the first of a name shadows others
    return sorted((p for selected in points.values() for p in selected), key=lambda p: p.name)


def package(point: EntryPoint) -> str:
    """The name of the package that brings it."""
    return point.dist.name if point.dist else point.value


def load(point: EntryPoint, kind: str) -> Any:
    """What an entry point names. Raises FldiagError, whatever its import raised."""
    loaded.add(point.module.partition(".")[0])
    try:
        return point.load()
    except (Exception, SystemExit) as cause:  # somebody else's module can raise anything
        raise unusable(point, kind, cause) from cause


def unusable(point: EntryPoint, kind: str, cause: BaseException) -> FldiagError:
    """The message about what another package brings and cannot be used."""
    why = str(cause) if isinstance(cause, FldiagError) else error_text(cause)
    return FldiagError(
        f"the {kind} {point.name!r} of the package {package(point)} cannot be used ({why})",
        "fix or remove that package",
    )
