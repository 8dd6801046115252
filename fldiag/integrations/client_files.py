"""Folders of per-client files as other programs leave them: which file is whose, and which examples."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fldiag.errors import FldiagError

#: Client numbers are kept as they are up to here; larger ones (node ids) and names are numbered 0, 1, 2, ...
LARGEST = 10_000


def pattern(text: str) -> re.Pattern[str]:
    """``round_{round}/client_{client}.pt`` as a regular expression; ``*`` stands for any text within a folder or name.

    Raises FldiagError for unknown or repeated placeholders.
    """
    parts, placeholders = [], set()
    for piece in re.split(r"(\{[^{}]*\}|\*)", text):
        if piece == "*":
            parts.append("[^/]*")
        elif piece.startswith("{"):
            name = piece[1:-1]
            if name not in ("round", "client") or name in placeholders:
                raise FldiagError(
                    f"pattern {text!r}: {piece} {'occurs twice' if name in placeholders else 'is not known'}",
                    "use {round} and {client}, each once, and * for any text",
                    usage=True,
                )
            placeholders.add(name)
            parts.append(r"(?P<round>\d+)" if name == "round" else r"(?P<client>[^/]+?)")
        else:
            parts.append(re.escape(piece))
    return re.compile("".join(parts))


@dataclass
class FolderLayout:
    """Where the weights are: of clients by foreign round number and name, and of global models by round."""

    root: Path
    clients: dict[int, dict[str, Path]] = field(default_factory=dict)
    globals: dict[int, Path] = field(default_factory=dict)

    @property
    def rounds(self) -> list[int]:
        return sorted(self.clients or self.globals)

    @property
    def names(self) -> list[str]:
        """Clients' names, numbers in their order."""
        return sorted(
            {name for round_files in self.clients.values() for name in round_files}, key=_natural
        )


def scan(root: Path, clients: str | None, globals_: str | None = None) -> FolderLayout:
    """The files under ``root`` that the patterns name; without one of the clients there are global models alone.

    Raises FldiagError for a pattern of clients without {client}, one that nothing matches, and two files for one thing.
    """
    if clients is not None and "{client}" not in clients:
        raise FldiagError(
            f"pattern {clients!r} does not say where the client stands",
            "write for example 'round_{round}/client_{client}.pt'; or of global models alone give --global-pattern alone",
            usage=True,
        )
    if globals_ is not None and "{client}" in globals_:
        raise FldiagError(
            f"global pattern {globals_!r} names a client", "use {round} only", usage=True
        )
    names = files(root)
    of_all, of_one = (pattern(text) if text else None for text in (globals_, clients))
    layout = FolderLayout(root)
    for name in names:
        path = root / name
        if of_all is not None and (match := of_all.fullmatch(name)):
            r = int(match.groupdict().get("round") or 1)
            _add(layout.globals, r, path, root, "global model")
        elif of_one is not None and (match := of_one.fullmatch(name)):
            r = int(match.groupdict().get("round") or 1)
            client = match["client"]
            _add(layout.clients.setdefault(r, {}), client, path, root, f"client {client}")
    if clients is not None and not layout.clients:
        raise FldiagError(f"no file in {root} matches {clients!r}", _listing(names), usage=True)
    if of_all is not None and not layout.globals:
        raise FldiagError(
            f"no file in {root} matches the global pattern {globals_!r}",
            _listing(names),
            usage=True,
        )
    return layout


def files(root: Path) -> list[str]:
    """Relative names of all files under a folder, in natural order; links to folders are not followed."""
    if not os.path.isdir(root):
        raise FldiagError(
            f"there is no folder {root}",
            "give the folder that holds the clients' files",
            usage=True,
        )
    paths = [
        (Path(at) / name).relative_to(root).as_posix()
        for at, _, names in os.walk(root)
        for name in names
    ]
    return sorted(paths, key=_natural)


def _listing(names: Sequence[str]) -> str:
    """What a folder holds, in a remedy."""
    if not names:
        return "the folder is empty"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"it holds {', '.join(names[:3])}{more}"


def _add(sources: dict[Any, Path], key: Any, source: Path, root: Path, label: str) -> None:
    if key in sources:
        names = (other.relative_to(root) for other in (sources[key], source))
        raise FldiagError(
            f"{' and '.join(map(str, names))} are both {label} of one round",
            "make the pattern narrower",
            usage=True,
        )
    sources[key] = source


def _natural(text: str) -> list[tuple[int, int, str]]:
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in re.split(r"(\d+)", text) if p]


def numbers(names: Sequence[str]) -> dict[str, int]:
    """Client names -> the numbers they get: their own where all are small numbers, else 0, 1, 2, ... in natural order."""
    values = [int(n) for n in names if n.isdigit()]
    if len(values) == len(names) == len(set(values)) and max(values, default=0) < LARGEST:
        return dict(zip(names, values, strict=True))
    return {name: i for i, name in enumerate(sorted(names, key=_natural))}


def match(
    partition: Mapping[str, np.ndarray], names: Sequence[str]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """The partition under the names that the files give the clients ("client_3" is 3), and the clients it lacks.

    Clients without files keep their own. Raises FldiagError when no name fits or two are one.
    """
    by_number = {_number(n): n for n in names}
    plain = all(n.isdigit() for n in names)
    parts: dict[str, np.ndarray] = {}
    for key, index in partition.items():
        name = key
        if key not in names:
            unique = len(by_number) == len(names)
            name = (
                by_number[_number(key)]
                if unique and _number(key) in by_number
                else _number(key)
                if plain
                else key
            )
        if name in parts:
            raise FldiagError(f"the partition names client {name} twice", "give each client once")
        parts[name] = index
    lacking = [n for n in names if n not in parts]
    if len(lacking) == len(names):
        raise FldiagError(
            f"the partition is of clients {', '.join(list(partition)[:4])}, and the files of "
            f"{', '.join(list(names)[:4])}",
            "name the clients in the partition as in the files",
            usage=True,
        )
    return parts, lacking


def _number(name: str) -> str:
    """The number a name ends with, as plain digits; the name itself without one."""
    digits = re.search(r"\d+$", name)
    return str(int(digits[0])) if digits else name


def check(parts: Mapping[str, np.ndarray], total: int, dataset: str) -> None:
    """Raises FldiagError when a client has examples that the data set does not have."""
    for name, index in parts.items():
        if len(index) and index[-1] >= total:
            raise FldiagError(
                f"client {name} has example {index[-1]}, and data set {dataset!r} has {total} training examples",
                "give the data and the partition of the same federation",
                usage=True,
            )
