"""Write the catalogue anew from the registry: ``python -m fldiag.write_catalogue``."""

from __future__ import annotations

import json
import sys
import tomllib
from importlib import resources
from typing import Any

from fldiag import config, known, registry
from fldiag.diagnosis.options import BY_SUBJECT, SubjectOptions

#: How the names of a paper's presets begin -> the paper; and values that are listed.
PAPERS = {"fedalign": "FedAlign", "fedproj": "FedProj", "fedsol": "FedSOL", "fedtoga": "FedTOGA"}
MOST = 4


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
    catalogue["settings"] = settings()
    return catalogue


def subject_options(schema: type[SubjectOptions]) -> list[known.Item]:
    """Those of the subject at hand first, then those that it shares. What Python takes as any object is text when it is typed."""
    names = dict.fromkeys(
        name for one in schema.__mro__ for name in vars(one).get("__annotations__", ())
    )
    options = [known.option(n, schema.model_fields[n]) for n in names if n in schema.model_fields]
    return [o | {"type": "str"} if o["type"] == "python" else o for o in options]


def settings() -> dict[str, known.Item]:
    """Every key of a config: what it is, and what the papers' presets set."""
    fields: dict[str, Any] = {}
    for name, field in config.Config.model_fields.items():
        keys = getattr(field.annotation, "model_fields", None)
        fields |= {name: field} if keys is None else {f"{name}.{k}": f for k, f in keys.items()}
    trees = {name: tomllib.loads(text) for name, text in config.preset_texts().items()}
    items = {}
    for key, field in fields.items():
        section, _, inner = key.rpartition(".")
        values: dict[str, list[Any]] = {}
        for name, tree in trees.items():
            value = (tree.get(section, {}) if section else tree).get(inner)
            paper = PAPERS.get(name.partition("-")[0])
            if paper and value is not None and key != "name":
                values.setdefault(paper, []).append(value)
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        option = known.option(key, field)
        items[key] = {
            "summary": option["help"],
            "values": option["values"],
            "default": option["default"],
            "unit": extra.get("unit", ""),
            "papers": {paper: _values(of_paper) for paper, of_paper in values.items()},
        }
    return items


def _values(values: list[Any]) -> str:
    """The different values of a paper's presets; of many numbers the least and the largest."""
    unique = sorted(set(values))
    if len(unique) > MOST and not isinstance(unique[0], str):
        return f"{unique[0]} to {unique[-1]}"
    return ", ".join(
        str(value).lower() if isinstance(value, bool) else str(value) for value in unique
    )


def text() -> str:
    return json.dumps(generate(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    with resources.as_file(resources.files("fldiag").joinpath(known.FILE)) as file:
        file.write_text(text(), "utf-8")
        sys.stdout.write(f"{file}\n")
