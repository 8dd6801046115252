"""Write the catalogue anew from the registry: ``python -m fldiag.write_catalogue``."""

from __future__ import annotations

import json
import sys
from importlib import resources

from fldiag import config, known, registry
from fldiag.diagnosis.options import BY_SUBJECT, SubjectOptions


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
    catalogue["subjects"] = {
        on: {"options": subject_options(BY_SUBJECT[on])} for on in known.SUBJECTS.values()
    }
    return catalogue


def subject_options(schema: type[SubjectOptions]) -> list[known.Item]:
    """Those of the subject at hand first, then those that it shares. What Python takes as any object is text when it is typed."""
    names = dict.fromkeys(
        name for one in schema.__mro__ for name in vars(one).get("__annotations__", ())
    )
    options = [known.option(n, schema.model_fields[n]) for n in names if n in schema.model_fields]
    return [o | {"type": "str"} if o["type"] == "python" else o for o in options]


def text() -> str:
    return json.dumps(generate(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    with resources.as_file(resources.files("fldiag").joinpath(known.FILE)) as file:
        file.write_text(text(), "utf-8")
        sys.stdout.write(f"{file}\n")
