"""A question: a diagnostic with its options and those of its subject, parsed once for the command line, the report and Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pydantic
import torch

from fldiag import registry, user_code
from fldiag.device import device_of
from fldiag.diagnosis.options import BY_SUBJECT, SubjectOptions
from fldiag.errors import FldiagError, nearest
from fldiag.registry import Diagnostic


@dataclass(frozen=True)
class Question:
    """What to measure. ``options``: the diagnostic's own."""

    entry: Diagnostic
    options: pydantic.BaseModel
    subject_options: SubjectOptions


def parse_question(name: str, values: Mapping[str, Any]) -> Question:
    """Check a diagnostic's options, those of its subject, which are passed together.

    Raises:
        FldiagError: an unknown diagnostic or option, one of another kind of subject, or a value out of range.
    """
    entry = find_diagnostic(name)
    schema, names = BY_SUBJECT[entry.on], entry.options.model_fields
    own_values, subject_values = {}, {}
    for option, value in values.items():
        if option in names:
            own_values[option] = value
        elif option not in schema.model_fields:
            raise _unknown_option(entry, option)
        elif value is not None and not (
            option == "rounds" and isinstance(value, str) and value == "all"
        ):
            subject_values[option] = value
    title = f"{entry.kind} {entry.name!r}"
    subject_options = registry.parse(schema, subject_values, title)
    if "device" in subject_values:
        dtype = torch.float64 if subject_values.get("precision") == "fp64" else torch.float32
        device = device_of(subject_values["device"], dtype)
        subject_options = subject_options.model_copy(update={"device": device})
    options = registry.parse(entry.options, own_values, title)
    # decided here, so that the cache tells the answers apart
    parsed, updates = dict(options), dict[str, Any]()
    if "device" in parsed:
        updates["device"] = device_of(parsed["device"])
    if parsed.get("every_round", False) is None:
        updates["every_round"] = "rounds" in subject_values
    options = options.model_copy(update=updates)
    return Question(entry, options, subject_options)


def _unknown_option(entry: Diagnostic, name: str) -> FldiagError:
    if any(name in schema.model_fields for schema in BY_SUBJECT.values()):
        return FldiagError(
            f"option {name!r} has no effect on {entry.name}, which takes another kind of target",
            f"leave it out; fldiag explain {entry.name} lists its options",
            usage=True,
        )
    names = {*entry.options.model_fields, *BY_SUBJECT[entry.on].model_fields}
    return FldiagError(
        f"{entry.kind} {entry.name!r}: unknown key {name!r}", nearest(name, names), usage=True
    )


def find_diagnostic(name: str) -> Diagnostic:
    """The diagnostic of this name, or the function ``pkg.mod:function``, which is imported because it is named here.

    Raises FldiagError for an unknown name, and for code that cannot be imported.
    """
    if not user_code.is_code(name):
        return registry.diagnostic.get(name)
    return registry.diagnostic.own(name, user_code.load_user(name, {name}, "diagnostic"))
