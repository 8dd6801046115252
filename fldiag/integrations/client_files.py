"""Folders of per-client files as other programs leave them: which file is whose, and which examples."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fldiag.errors import FldiagError, first_line

#: Files that hold one vector, or one matrix with a row for every client.
ARRAYS = (".npy", ".npz")
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", *ARRAYS)
#: Words that say what the number after them is; the first of them that a name holds decides.
ROUNDS = ("round", "rounds", "rnd", "comm", "iteration", "iter", "it", "epoch", "step", "r", "t")
CLIENTS = (
    *("client", "clients", "cid", "site", "party", "worker", "node", "user", "silo", "hospital"),
    *("device", "participant", "member", "k", "c"),
)
#: A file with such a word is of a global model, where several could be.
#: Models that were sent out, not made of the clients'.
SENT = re.compile(r"init|start|received|before|sent", re.IGNORECASE)
SERVER = re.compile(r"global|server|aggregat", re.IGNORECASE)
#: Programs -> how they name the files of clients and of global models, whose patterns need not be given.
#:
#: PFLlib (github.com/TsingZ0/PFLlib, server at 0b10759, clients at 004a405): ``save_item(item, name)`` of a client and of the
#: server write ``client_ID_NAME.pt`` and ``server_NAME.pt`` into one folder. The name says the round, from 0, or does not.
KNOWN = {
    "PFLlib": (
        ("client_{client}_model_{round}.pt", "server_model_{round}.pt"),
        ("client_{client}_model.pt", "server_model.pt"),
    ),
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


class Place(NamedTuple):
    """A file, and where in its array the weights are (None: they are all of it)."""

    path: Path
    at: tuple[int, ...] | None = None


@dataclass
class FolderLayout:
    """Where the weights are: of clients by foreign round number and name, and of global models by round."""

    root: Path
    clients: dict[int, dict[str, Place]] = field(default_factory=dict)
    globals: dict[int, Place] = field(default_factory=dict)

    @property
    def rounds(self) -> list[int]:
        return sorted(self.clients or self.globals)

    @property
    def names(self) -> list[str]:
        """Clients' names, numbers in their order."""
        return sorted(
            {name for round_files in self.clients.values() for name in round_files}, key=_natural
        )

    @property
    def is_complete(self) -> bool:
        """Whether every client has a file in every one of several rounds."""
        names = set(self.names)
        return len(self.clients) > 1 and all(
            files.keys() == names for files in self.clients.values()
        )


def scan(root: Path, clients: str | None, globals_: str | None = None) -> FolderLayout:
    """The files under ``root`` that the patterns name. A pattern without {round} is of one round, 1; one of the clients without
    {client} is of arrays with a row for every client; without one there are global models alone.

    Raises FldiagError for patterns that say something else than the words in them, one that nothing matches, and two files for
    one thing.
    """
    if clients is not None and "{client}" not in clients and not clients.endswith(ARRAYS):
        raise FldiagError(
            f"pattern {clients!r} does not say where the client stands",
            "write for example 'round_{round}/client_{client}.pt'; or of global models alone give --global-pattern alone",
            usage=True,
        )
    if globals_ is not None and "{client}" in globals_:
        raise FldiagError(
            f"global pattern {globals_!r} names a client", "use {round} only", usage=True
        )
    _refuse_swapped(clients or "")
    names = files(root)
    of_all, of_one = (pattern(text) if text else None for text in (globals_, clients))
    layout = FolderLayout(root)
    for name in names:
        path = root / name
        if of_all is not None and (match := of_all.fullmatch(name)):
            r = int(match.groupdict().get("round") or 1)
            _add(layout.globals, r, Place(path), root, "global model")
        elif of_one is not None and (match := of_one.fullmatch(name)):
            r = int(match.groupdict().get("round") or 1)
            client = match.groupdict().get("client")
            round_files = layout.clients.setdefault(r, {})
            if client is not None:
                _add(round_files, client, Place(path), root, f"client {client}")
            else:
                for k in range(_shape(path, 2)[0]):
                    _add(round_files, str(k), Place(path, (k,)), root, f"client {k}")
    if clients is not None and not layout.clients:
        raise FldiagError(f"no file in {root} matches {clients!r}", advice(names), usage=True)
    if of_all is not None and not layout.globals:
        raise FldiagError(
            f"no file in {root} matches the global pattern {globals_!r}",
            advice(names, globals_),
            usage=True,
        )
    return layout


def scan_array(path: Path) -> FolderLayout:
    """The weights in one file with an array [clients, parameters], or [rounds, clients, parameters].

    Raises FldiagError for another array.
    """
    shape = _shape(path, 2, 3)
    rounds = range(shape[0]) if len(shape) == 3 else None
    return FolderLayout(
        path.parent,
        {
            1 if r is None else r + 1: {
                str(k): Place(path, (k,) if r is None else (r, k)) for k in range(shape[-2])
            }
            for r in (rounds if rounds is not None else [None])
        },
    )


def array_of(path: Path) -> np.ndarray:
    """The one array of a file; of an npy no more of it is read than is used. Raises FldiagError where there is not one."""
    try:
        content = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(content, np.ndarray):
            (name,) = content.files
            content = np.asarray(content[name])
        if content.dtype.kind not in "fiu" or not content.size:
            raise ValueError(f"its array is {content.dtype} {list(content.shape)}")
        return (
            content if content.dtype.isnative else content.astype(content.dtype.newbyteorder("="))
        )
    except OSError as error:
        raise FldiagError(
            f"{path} cannot be read: {error.strerror or first_line(error)}", "copy it again"
        ) from None
    except Exception as error:  # a damaged file can make the reader raise anything
        raise FldiagError(
            f"{path} does not hold one array of numbers: {first_line(error)}",
            "save the clients' weights as one array [clients, parameters]: np.save(path, rows)",
        ) from None


def _shape(path: Path, *dimensions: int) -> tuple[int, ...]:
    shape = array_of(path).shape
    if len(shape) not in dimensions:
        raise FldiagError(
            f"the array in {path} is {list(shape)}, not [clients, parameters]"
            + (" or [rounds, clients, parameters]" if 3 in dimensions else ""),
            "save a row of all parameters for every client; the weights of one model are given to the verbs as they are",
            usage=True,
        )
    return tuple(shape)


def known_program(names: Sequence[str]) -> tuple[str, str, str | None] | None:
    """The program that names files so, and the patterns of clients and, where there are such, of global models."""
    for program, layouts in KNOWN.items():
        for patterns in layouts:
            clients, globals_ = (any(map(pattern(text).fullmatch, names)) for text in patterns)
            if clients:
                return program, patterns[0], patterns[1] if globals_ else None
    return None


def patterns_by_words(names: Sequence[str]) -> tuple[str | None, str | None] | None:
    """The patterns of clients and of global models that the words before the numbers in the names say; None where they leave
    open which is which."""
    templates = {_by_words(name) for name in names if name.endswith(SUFFIXES)}
    clients = [text for text in templates if "{client}" in text]
    rest = [text for text in templates if "{client}" not in text]
    globals_ = [text for text in rest if "{round}" in text] or [
        text for text in rest if SERVER.search(text) and clients
    ]
    if clients and any(SENT.search(text) for text in globals_):
        return None
    if len(globals_) > 1:
        globals_ = [text for text in globals_ if SERVER.search(text)]
    if len(clients) > 1 or len(globals_) > 1 or not (clients or globals_):
        return None
    return next(iter(clients), None), next(iter(globals_), None)


def _by_words(name: str) -> str:
    """The name with {round} and {client} for the numbers before which a word says so."""
    numbers = list(re.finditer(r"\d+", name))
    words = [_word_before(name, number.start()) for number in numbers]
    keys = {}
    for key, vocabulary in (("{round}", ROUNDS), ("{client}", CLIENTS)):
        word = next((word for word in vocabulary if word in words), None)
        places = [i for i, other in enumerate(words) if other == word and word is not None]
        for i in places:
            # a folder may say the same as the file in it
            keys[i] = key if i == places[-1] else "*"
    for i in reversed(sorted(keys)):
        name = name[: numbers[i].start()] + keys[i] + name[numbers[i].end() :]
    return name


def _word_before(text: str, at: int) -> str:
    """The word before a number, over what is no letter: ``client`` in client_3, clients/3 and client-03."""
    match = re.search(r"([A-Za-z]+)[^A-Za-z0-9]*$", text[:at])
    return match[1].lower() if match else ""


def _refuse_swapped(text: str) -> None:
    """Raises FldiagError for ``client_{round}_round_{client}``."""
    name = text.replace("{round}", "0").replace("{client}", "1")
    words = [_word_before(name, name.find(digit)) for digit in "01"]
    if words[0] in CLIENTS and words[1] in ROUNDS:
        swapped = (
            text.replace("{round}", "{}").replace("{client}", "{round}").replace("{}", "{client}")
        )
        raise FldiagError(
            f"pattern {text!r} takes the number after {words[0]!r} for the round, and that after {words[1]!r} for the client",
            f"swap them: --pattern '{swapped}'",
            usage=True,
        )


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
    templates = [_by_words(name) for name in usable]
    best = max(templates, key=lambda text: ("{client}" in text) + ("{round}" in text))
    if "{client}" in best:
        return f"it holds {examples}; perhaps --pattern '{best}'"
    if "{round}" in best:
        return f"it holds {examples}; perhaps, of global models alone, --global-pattern '{best}'"
    name = max(usable, key=lambda text: min(len(re.findall(r"\d+", text)), 2))
    numbers = list(re.finditer(r"\d+", name))[:2]
    if not numbers:
        return f"it holds {examples}"

    def with_keys(*keys: str) -> str:
        text = name
        for match, key in list(zip(numbers, keys, strict=True))[::-1]:
            text = text[: match.start()] + key + text[match.end() :]
        return f"'{text}'"

    if len(numbers) == 1:
        return (
            f"it holds {examples}; which is {numbers[0][0]}? Of a client: --pattern {with_keys('{client}')}; of a round: "
            f"--global-pattern {with_keys('{round}')}"
        )
    return (
        f"it holds {examples}; which of {numbers[0][0]} and {numbers[1][0]} in {name} is the round? The first: --pattern "
        f"{with_keys('{round}', '{client}')}; the second: --pattern {with_keys('{client}', '{round}')}"
    )


def _add(sources: dict[Any, Place], key: Any, source: Place, root: Path, label: str) -> None:
    if key in sources:
        names = (other.path.relative_to(root) for other in (sources[key], source))
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
