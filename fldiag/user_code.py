"""Code of a user, named as ``pkg.mod:name``: when it may be imported, and its import.

A file is data. Code that a run, a record or a checkpoint names is imported only after the user named it too (``--model``,
``--data``) or consented to that very name (``--allow-code``). ``load`` is the only import of such names in fldiag. It is told
which names are allowed and refuses all others, so a caller that forgets to ask cannot run anything.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from fldiag.errors import FldiagError, error_text, nearest
from fldiag.sections import FILES

#: Folders that were the current one when code was loaded, the ``importable`` blocks that run, and what these added to sys.path.
_folders: set[str] = set()
_blocks = 0
_added: list[str] = []
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def is_code(value: Any) -> bool:
    """Whether a value of a config names code, and not a registered thing or a file.

    >>> is_code("mypkg.nets:build"), is_code("digits"), is_code("npz:mine.npz"), is_code("holdout:200")
    (True, False, False, False)
    """
    return (
        isinstance(value, str)
        and not value.startswith(FILES)
        and _NAME.fullmatch(value) is not None
    )


def names(tree: Any, key: str = "") -> dict[str, str]:
    """All code that a config names, whatever the key: a key that is added later cannot be forgotten.

    Args:
        tree: a config as nested mappings and sequences.
        key: where the tree stands in a larger one.

    Returns:
        Dotted key -> ``pkg.mod:name``.

    >>> names({"model": {"name": "mine:net", "width": 3}, "data": {"name": "digits", "public": "mine:texts"}})
    {'model.name': 'mine:net', 'data.public': 'mine:texts'}
    """
    if is_code(tree):
        return {key: tree}
    if isinstance(tree, Mapping):
        parts: Iterable[tuple[Any, Any]] = tree.items()
    else:
        parts = enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    return {
        at: name
        for k, value in parts
        for at, name in names(value, f"{key}.{k}" if key else str(k)).items()
    }


def consent(allow_code: str | Iterable[str] | None) -> frozenset[str]:
    """The names of ``allow_code``, one or several. Raises FldiagError for what is not ``pkg.mod:name``."""
    allowed = frozenset([allow_code] if isinstance(allow_code, str) else allow_code or ())
    for name in allowed:
        if not is_code(name):
            raise FldiagError(
                f"allow_code = {name!r} is not pkg.mod:name",
                "write the name as the file has it, such as --allow-code mypkg.nets:build",
                usage=True,
            )
    return allowed


def check(tree: Mapping[str, Any], allowed: Collection[str], source: object) -> None:
    """Raises FldiagError for a config that names code without consent. ``source``: which file or config says so."""
    refused = {key: name for key, name in names(tree).items() if name not in allowed}
    if refused:
        listed = " and ".join(f"{key} = {name!r}" for key, name in refused.items())
        raise _refusal(f"{source} names {listed}, which is user code", refused.values())


def _refusal(subject: str, refused: Iterable[str]) -> FldiagError:
    unique = list(dict.fromkeys(refused))
    flags = " ".join(f"--allow-code {name}" for name in unique)
    return FldiagError(
        f"{subject}; fldiag does not import it because a file says so",
        f"if you trust it, add {flags} (in Python: allow_code={unique})",
    )


def load(name: str, kind: str, allowed: Collection[str]) -> Any:
    """The function or class that ``pkg.mod:name`` refers to; the current folder is searched last.

    Args:
        name: the reference.
        kind: what it is for, as messages call it.
        allowed: the names that the user typed or consented to.

    Raises:
        FldiagError: a name that is not allowed (nothing is imported then), or one that cannot be imported.
    """
    module_name, _, attribute = name.partition(":")
    if _NAME.fullmatch(name) is None:
        raise FldiagError(
            f"{kind} {name!r} is not pkg.mod:factory",
            "write an importable module, a colon and the name of a function in it",
            usage=True,
        )
    if name not in allowed:
        raise _refusal(f"the {kind} {name!r} is user code", [name])
    _folders.add(os.getcwd())
    with importable():
        try:
            module = importlib.import_module(module_name)
        except Exception as error:  # whatever the module does when it is imported
            missing = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(
                f"{error.name}."
            )
            raise FldiagError(
                f"{kind} {name!r}: cannot import {module_name} ({error_text(error)})",
                "run from its folder or install it"
                if missing
                else "the module fails when imported; fix it",
                usage=missing,
            ) from error
    target = getattr(module, attribute, None)
    if not callable(target):
        public = [
            key
            for key, value in vars(module).items()
            if callable(value)
            and key[0] != "_"
            and getattr(value, "__module__", "") == module.__name__
        ]
        fault = "has no function" if target is None else "has something that cannot be called"
        raise FldiagError(
            f"{kind} {name!r}: module {module_name} {fault} {attribute!r}",
            nearest(attribute, public) if public else "define it there",
            usage=True,
        )
    return target


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """The current folder is importable for as long as the block runs, as with ``python -m``, once code that the user named was
    loaded in it: a console script does not search the folder it is run from, where a user's code usually lies. Before that
    nothing is imported from there: beside a run that was sent may lie modules with the names of optional ones of any library."""
    global _blocks
    _blocks += 1
    folder = os.getcwd() if _folders else ""
    if folder in _folders and not {"", folder} & set(
        sys.path
    ):  # else it keeps its place: workers search in the same order
        sys.path.append(folder)  # last, so that nothing installed is shadowed
        _added.append(folder)
    try:
        yield
    finally:
        _blocks -= 1
        while (
            not _blocks and _added
        ):  # the outermost: what an inner one loaded may import more later
            with contextlib.suppress(ValueError):
                sys.path.remove(_added.pop())
