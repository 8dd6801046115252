"""The content of a checkpoint as safetensors hold it: named tensors and text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fldiag.errors import FldiagError

#: Keys of the file's metadata: the manifest as it is, and the order of the entries, which safetensors does not keep.
MANIFEST, ORDER = "fldiag.manifest", "fldiag.order"


def flatten(content: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, metadata) of a checkpoint of fldiag, entries of inner dicts as ``model/NAME``, or of a state_dict.

    Raises FldiagError for anything that safetensors cannot hold.
    """
    tensors: dict[str, Tensor] = {}
    if not isinstance(content.get("manifest"), str):
        _put(tensors, content, "")
        return tensors, {"format": "pt"}
    order: list[list[str]] = []
    for top, entry in content.items():
        if top == "manifest":
            order.append([top])
        elif isinstance(entry, Mapping):
            order += [[top, str(name)] for name in entry] or [[top, ""]]
            _put(tensors, entry, f"{top}/")
        else:
            order.append([top])
            _put(tensors, {top: entry}, "")
    return tensors, {"format": "pt", MANIFEST: content["manifest"], ORDER: json.dumps(order)}


def unflatten(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> dict[str, Any]:
    """What ``flatten`` was given. Raises ValueError when metadata and tensors do not belong together."""
    if not metadata or MANIFEST not in metadata:
        return dict(tensors)
    content: dict[str, Any] = {}
    try:
        for where in json.loads(metadata[ORDER]):
            if where == ["manifest"]:
                content["manifest"] = metadata[MANIFEST]
            elif len(where) == 1:
                content[where[0]] = tensors[where[0]]
            else:
                held = content.setdefault(where[0], {})
                if where[1]:
                    held[where[1]] = tensors["/".join(where)]
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"its manifest does not fit its tensors ({type(error).__name__})"
        ) from None
    return content


def _put(tensors: dict[str, Tensor], entries: Mapping[str, Any], prefix: str) -> None:
    held = {t.untyped_storage().data_ptr() for t in tensors.values() if t.layout == torch.strided}
    for name, value in entries.items():
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized:
            kind = (
                f"a {str(value.layout).removeprefix('torch.')} tensor"
                if isinstance(value, Tensor)
                else type(value).__name__
            )
            raise FldiagError(
                f"{prefix}{name} is {kind}, which a safetensors file cannot hold",
                "leave it out, or keep the .pt file",
            )
        value = value.detach().cpu().contiguous()
        # safetensors refuses tensors that share memory, such as tied weights and views of one vector
        if (
            value.untyped_storage().data_ptr() in held
            or value.untyped_storage().nbytes() != value.numel() * value.element_size()
        ):
            value = value.clone()
        held.add(value.untyped_storage().data_ptr())
        tensors[prefix + str(name)] = value
