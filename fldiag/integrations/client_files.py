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

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
#: Programs -> how they name the files of clients and of global models, whose patterns need not be given.
#:
#: PFLlib (github.com/TsingZ0/PFLlib, server at 0b10759, clients at 004a405): ``save_item(item, name)`` of a client and of the
#: server write ``client_ID_NAME.pt`` and ``server_NAME.pt`` into one folder. The name says the round, from 0, or does not.
KNOWN = {
    "PFLlib": (
        ("client_{client}_model_{round}.pt", "server_model_{round}.pt"),
        ("client_{client}_model.pt", "server_model.pt"),
    )
}
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
    """Files of a folder by foreign round number and client name, and of the global models by round."""

    root: Path
    clients: dict[int, dict[str, Path]]
    globals: dict[int, Path] = field(default_factory=dict)

    @property
    def rounds(self) -> list[int]:
        return sorted(self.clients)

    @property
    def names(self) -> list[str]:
        """Clients' names, numbers in their order."""
        return sorted(
            {name for round_files in self.clients.values() for name in round_files}, key=_natural
        )


def scan(root: Path, clients: str, globals_: str | None = None) -> FolderLayout:
    """The files under ``root`` that the patterns name. A pattern without {round} is of one round, 1.

    Raises FldiagError for a pattern without {client}, one that nothing matches, and two files for one thing.
    """
    if "{client}" not in clients:
        raise FldiagError(
            f"pattern {clients!r} does not say where the client stands",
            "write for example 'round_{round}/client_{client}.pt'",
            usage=True,
        )
    if globals_ is not None and "{client}" in globals_:
        raise FldiagError(
            f"global pattern {globals_!r} names a client", "use {round} only", usage=True
        )
    names = files(root)
    of_all, of_one = (pattern(globals_) if globals_ else None), pattern(clients)
    layout = FolderLayout(root, {})
    for name in names:
        path = root / name
        if of_all is not None and (match := of_all.fullmatch(name)):
            _add_path(
                layout.globals, int(match.groupdict().get("round") or 1), path, root, "global model"
            )
        elif match := of_one.fullmatch(name):
            round_files = layout.clients.setdefault(int(match.groupdict().get("round") or 1), {})
            _add_path(round_files, match["client"], path, root, f"client {match['client']}")
    if not layout.clients:
        raise FldiagError(f"no file in {root} matches {clients!r}", advice(names), usage=True)
    if of_all is not None and not layout.globals:
        raise FldiagError(
            f"no file in {root} matches the global pattern {globals_!r}",
            advice(names, globals_),
            usage=True,
        )
    return layout


def known_program(names: Sequence[str]) -> tuple[str, str, str | None] | None:
    """The program that names files so, and the patterns of clients and, where there are such, of global models."""
    for program, layouts in KNOWN.items():
        for clients, globals_ in layouts:
            if any(pattern(clients).fullmatch(name) for name in names):
                return (
                    program,
                    clients,
                    globals_ if any(pattern(globals_).fullmatch(name) for name in names) else None,
                )
    return None


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


def advice(names: Sequence[str], global_pattern: str | None = None) -> str:
    """What to write instead, from the names that were found."""
    usable = [n for n in names if n.endswith(SUFFIXES)] or list(names)
    if not usable:
        return "the folder is empty"
    examples = ", ".join(usable[:3]) + (f" and {len(usable) - 3} more" if len(usable) > 3 else "")
    if global_pattern is not None:
        return f"it holds {examples}"
    numbered = [(n, list(re.finditer(r"\d+", n))) for n in usable]
    name, numbers = max(numbered, key=lambda pair: min(len(pair[1]), 2))
    for match, key in list(
        zip(
            numbers[:2],
            ("{round}", "{client}") if len(numbers) > 1 else ("{client}",),
            strict=False,
        )
    )[::-1]:
        name = name[: match.start()] + key + name[match.end() :]
    return f"it holds {examples}" + (f"; perhaps --pattern '{name}'" if numbers else "")


def _add_path(paths: dict[Any, Path], key: Any, path: Path, root: Path, label: str) -> None:
    if key in paths:
        raise FldiagError(
            f"{paths[key].relative_to(root)} and {path.relative_to(root)} are both {label} of one round",
            "make the pattern narrower",
            usage=True,
        )
    paths[key] = path


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
