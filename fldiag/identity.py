"""When two configs mean the same run, and what a stored config that lacks a key meant when it was written."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from fldiag import registry


def _normalised(data: Mapping[str, Any]) -> str | None:
    """Files that no registered name stands for were standardised; nothing else was normalised against its own way."""
    name = str(data.get("name"))
    is_file = name.startswith("npz:") or (":" not in name and name not in registry.dataset)
    return "standard" if is_file else None


#: Keys that were added to the config after the first runs, each with the value that those runs had without the key. A key is
#: ``section.key``, ``method.NAME.option`` or ``model.NAME.option``; a function computes the value from the section. A config with
#: this value has the same hash as one without the key, and a stored config without the key is read with this value, whatever the
#: default is now. So the hashes of presets and records never change; each new key needs a line here.
ADDED_KEYS: dict[str, Any] = {
    "train.local_decay": 1.0,
    "train.local_decay_after": 0.5,
    "data.normalise": _normalised,
    **{
        f"model.{name}.lora_{key}": value
        for name in ("mlp", "sl_vit", "bert_tiny")
        for key, value in (("rank", 0), ("alpha", 16.0), ("head", True))
    },
    "model.sl_vit.lora_on": "attention",
    "model.bert_tiny.lora_on": "attention",
    "data.validation": None,
    "data.vocabulary": None,
    "data.length": None,
    "data.examples": None,
    "data.tokenizer": None,
    "partition.path": None,
    "partition.digest": None,
    "train.initial": None,
    "train.initial_digest": None,
    "method.fedsol_ft.lambda_norm": "layer",
    "method.strategy.lambda_norm": "layer",
}
#: Where files lie, as section and key: the content counts, not the place.
PLACES = (("data", "root"), ("partition", "path"), ("train", "initial"))

#: Stands in every hash for the section ``checkpoint``, which once was part of what a run is: the defaults of that time.
CHECKPOINT = {"every": 1, "clients": "none"}


def _later(tree: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """(section of ``tree``, key, what runs had before) for the later keys that the tree's method and model can have."""
    for dotted, value in ADDED_KEYS.items():
        section, *name, key = dotted.split(".")
        table = tree.get(section)
        if isinstance(table, dict) and (not name or name == [table.get("name")]):
            yield table, key, value(table) if callable(value) else value


def as_stored(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A stored config with the keys that it lacks, saying what they meant then. An empty section stays empty: rounds of
    another program say nothing of how they were trained."""
    filled = copy.deepcopy(dict(tree))
    if isinstance(checkpoint := filled.get("checkpoint"), dict):
        checkpoint.pop("keep", None)  # once a setting of which rounds stay stored
    for table, key, value in _later(filled):
        if table:
            table.setdefault(key, value)
    return filled


def recipe(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Everything of a stored config but the seed and what leaves the numbers as they are."""
    config = json.loads(json.dumps(as_stored(tree), default=str))
    for key in ("seed", "name", "checkpoint", "metrics"):
        config.pop(key, None)
    for section, key in PLACES:
        config.get(section, {}).pop(key, None)
    return dict(config)


def fingerprint(tree: Mapping[str, Any], *, version: int = 1, checkpoint: bool = False) -> str:
    """16 hex digits over a config's tree of plain values. ``version`` of the method's formulas enters when it is not the
    first; what the checkpoints hold enters with ``checkpoint`` only."""
    content = copy.deepcopy(dict(tree))
    for table, key, value in _later(content):
        if key in table and table[key] == value:
            del table[key]
    if not checkpoint:
        content["checkpoint"] = CHECKPOINT
    if version != 1:
        content["method_version"] = version
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
