"""Code of a user, named as ``pkg.mod:name``: when it may be imported, and its import.

A file is data. Code that a run or a checkpoint names is imported only after the user named it too (``--model``, ``--data``) or
consented to that very name (``--allow-code``). ``load_user`` is the only import of such names in fldiag. It is told which names
are allowed and refuses all others, so a caller that forgets to ask cannot run anything.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from fldiag.errors import FldiagError, error_text, nearest
from fldiag.sections import FILES

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
    parts = dict(enumerate(tree)) if isinstance(tree, (list, tuple)) else tree
    parts = parts if isinstance(parts, Mapping) else {}
    return {
        k: n for i, part in parts.items() for k, n in names(part, f"{key}.{i}".lstrip(".")).items()
    }


def consent(allow_code: str | Iterable[str]) -> frozenset[str]:
    """The names of ``allow_code``, one or several. Raises FldiagError for what is not ``pkg.mod:name``."""
    allowed = frozenset([allow_code] if isinstance(allow_code, str) else allow_code)
    for name in allowed:
        if not is_code(name):
            raise FldiagError(f"allow_code = {name!r} is not pkg.mod:name", usage=True)
    return allowed


def check(tree: Mapping[str, Any], allowed: Collection[str], source: object) -> None:
    """Raises FldiagError for a config that names code without consent. ``source``: which file or config says so."""
    for key, name in names(tree).items():
        _check(name, allowed, f"{source} names {key} = {name!r}, which")


def _check(name: str, allowed: Collection[str], subject: str) -> None:
    if name not in allowed:
        raise FldiagError(
            f"{subject} is user code; fldiag does not import it because a file says so",
            f"if you trust it, add --allow-code {name} (in Python: allow_code={name!r})",
        )


def load_user(name: str, allowed: Collection[str], kind: str = "function") -> Any:
    """The function or class that ``pkg.mod:name`` refers to; from then on the current folder is searched last.

    A console script does not search the folder it is run from, where a user's code usually lies. Before code is named nothing is
    imported from there: beside a run that was sent may lie modules with the names of optional ones of any library.

    Args:
        name: the reference.
        allowed: the names that the user typed or consented to.
        kind: what it is for, as messages call it.

    Raises:
        FldiagError: a name that is not allowed (nothing is imported then), or one that cannot be imported.
    """
    _check(name, allowed, f"the {kind} {name!r}")
    module_name, _, attribute = name.partition(":")
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the module does when it is imported
        raise FldiagError(
            f"{kind} {name!r}: cannot import {module_name} ({error_text(error)})",
            "run from its folder, or install it",
            usage=True,
        ) from error
    target = getattr(module, attribute, None)
    if not callable(target):
        raise FldiagError(
            f"{kind} {name!r}: module {module_name} has no function {attribute!r}",
            nearest(attribute, [key for key, value in vars(module).items() if callable(value)]),
            usage=True,
        )
    return target
