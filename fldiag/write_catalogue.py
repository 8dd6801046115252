"""Write the catalogue anew from the registry: ``python -m fldiag.write_catalogue``."""

from __future__ import annotations

import json
import sys
from importlib import resources

from fldiag import config, known, registry


def generate() -> dict[str, dict[str, known.Item]]:
    """The content of the file, from the registry. Imports everything that is built in."""
    catalogue: dict[str, dict[str, known.Item]] = {}
    for kind, name in known.KINDS.items():
        entries = getattr(registry, name)
        catalogue[kind] = {
            n: known.describe(entry)
            for n, entry in ((n, entries.get(n)) for n in entries.names())
            if entry.build.__module__.split(".")[0] == "fldiag"
        }
    catalogue["presets"] = {name: {"summary": text} for name, text in config.presets().items()}
    return catalogue


def text() -> str:
    return json.dumps(generate(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    with resources.as_file(resources.files("fldiag").joinpath(known.FILE)) as file:
        file.write_text(text(), "utf-8")
        sys.stdout.write(f"{file}\n")
