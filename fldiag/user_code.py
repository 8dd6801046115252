"""Code of a user, named as ``pkg.mod:name``: when it may be imported, and its import.

A file is data. Code that a run or a checkpoint names is imported only after the user named it too (``--model``, ``--data``,
``--set``) or consented to that very name (``--allow-code``). Whatever takes what the user says passes it to ``allow``.
``load_user`` is the only import of such names in fldiag and refuses all others, so a caller that forgets to ask cannot run
anything.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from fldiag.errors import FldiagError, error_text, nearest
from fldiag.sections import FILES

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
#: The code that the user named, until this process ends; its workers get the same.
ALLOWED: set[str] = set()


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


def names(tree: Any) -> set[str]:
    """All code that a config names, whatever the key: a key that is added later cannot be forgotten.

    >>> sorted(names({"model": {"name": "mine:net", "width": 3}, "data": {"name": "digits", "public": "mine:texts"}}))
    ['mine:net', 'mine:texts']
    """
    if is_code(tree):
        return {tree}
    parts = tree.values() if isinstance(tree, Mapping) else tree
    is_tree = isinstance(tree, (Mapping, list, tuple, set, frozenset))
    return set().union(*map(names, parts)) if is_tree else set()


def allow(*named: Any) -> None:
    """The user named these values: what is code in them may be imported from now on."""
    ALLOWED.update(names(named))


def load_user(name: str, kind: str = "function") -> Any:
    """The function or class that ``pkg.mod:name`` refers to; from then on the current folder is searched last.

    A console script does not search the folder it is run from, where a user's code usually lies. Before code is named nothing is
    imported from there: beside a run that was sent may lie modules with the names of optional ones of any library.

    Args:
        name: the reference.
        kind: what it is for, as messages call it.

    Raises:
        FldiagError: a name that is not allowed (nothing is imported then), or one that cannot be imported.
    """
    if name not in ALLOWED:
        raise FldiagError(
            f"the {kind} {name!r} is user code; fldiag does not import it because a file says so",
            f"if you trust it, add --allow-code {name} (in Python: allow_code={name!r})",
        )
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
