"""Files of tensors, from anywhere: nothing in them is executed, and they are verified as far as their format allows.

- ``.pt`` as torch.save writes it is a zip archive, which holds a CRC-32 of every member. All of them are verified. A file that
  was written without them (``torch.serialization.set_crc32_options(False)``) is read as it is, and so is the format that
  torch.save wrote before version 1.6: neither can be verified. Below torch 2.10 it is read with consent only (trust.py).
- numpy numbers and arrays and ``argparse.Namespace`` beside the weights are passed over: nothing of them is rebuilt.
- ``.safetensors`` has no checksum. What its header says of sizes and places is checked against the file, so a file that was cut
  off is refused; a flipped bit in a weight is not noticed.
- ``.npz`` and ``.npy`` hold arrays without names: ``arr_0``, ``arr_1``, ... in the order of a state_dict, or one vector.

Inside a run every file is verified by the sha256 in run.json as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fldiag.errors import FldiagError, check_name, first_line, out_of_memory, short_path
from fldiag.runs.trust import check_trust

#: What a file may claim to hold: so many times its own size, and so many bytes more. Compression and shared storages make a
#: tensor larger than its bytes in the file, though never by much in a checkpoint.
TIMES, MORE = 8, 2**24
#: Dicts and lists in one another.
DEEPEST = 100
#: How the name of an index ends.
INDEX = ".index.json"
#: With which fldiag computes.
DTYPES = {
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
}
#: Names of arrays in an npz that are examples.
EXAMPLES = {"train_images", "train_labels", "test_images", "test_labels"}


class PlainObject:
    """Stands for an object beside the weights of a ``.pt`` file; it keeps nothing of what the file says of it."""

    def __new__(cls, *values: Any) -> PlainObject:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


#: Objects that training programs save beside the weights, and that a stand-in takes the place of.
PLAIN_OBJECTS: list[Any] = [
    (PlainObject, name)
    for name in (
        "argparse.Namespace",
        "numpy.ndarray",
        "numpy.dtype",
        *(
            f"numpy.{core}.multiarray.{f}"
            for core in ("core", "_core")
            for f in ("scalar", "_reconstruct")
        ),
    )
]


def read_tensors(path: Path) -> Any:
    """The content of a ``.pt``, ``.safetensors``, ``.npz`` or ``.npy`` file, or of the parts that an index names; tensors and
    plain containers only.

    Raises FldiagError for a missing, empty, truncated, damaged or foreign file, for one that claims to hold far more than
    its size, and for one that holds pickled objects (nothing of it is executed).
    """
    check_name(path)
    if path.name.endswith(INDEX):
        parts = [read_tensors(part) for part in files_of(path)]
        if not all(isinstance(part, Mapping) for part in parts):
            raise FldiagError(
                f"{path} names files that hold no tensors by name", "use the original"
            )
        return {name: tensor for part in parts for name, tensor in part.items()}
    if not os.path.isfile(path):
        problem = "is not a file" if os.path.exists(path) else "is not there"
        raise FldiagError(
            f"checkpoint {short_path(path)} {problem}",
            "give the path of a .pt or .safetensors file",
            usage=True,
        )
    try:
        size = path.stat().st_size
        if size == 0:
            raise FldiagError(
                f"checkpoint {path} is empty",
                "use another round's file, or train again with --resume",
            )
        with open(path, "rb") as file:
            start = file.read(16)
        # safetensors begin with the length of a header and the header's JSON
        is_safetensors = start[8:9] == b"{" and start[:2] != b"PK"
        content = _safetensors(path) if is_safetensors else _pt(path, size, start)
    except OSError as error:
        raise FldiagError(
            f"checkpoint {path} cannot be read: {error.strerror or type(error).__name__}",
            "copy it again, or use another file",
        ) from None
    _bounded(path, content, size)
    return content


def check_kinds(path: Path, state: Mapping[str, Tensor]) -> None:
    """Raises FldiagError for a tensor that holds no plain numbers of a usual type."""
    for name, tensor in state.items():
        if tensor.is_meta:
            raise FldiagError(
                f"checkpoint {path}: {name} is on the device meta: it has a shape and no values",
                "save the model after its weights were loaded",
            )
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype not in DTYPES:
            kind = str(
                tensor.dtype if tensor.layout == torch.strided else tensor.layout
            ).removeprefix("torch.")
            raise FldiagError(
                f"checkpoint {path}: {name} is a {kind} tensor, which fldiag does not support",
                "save it as float32: tensor.dequantize(), .to_dense() or .float()",
            )


def _safetensors(path: Path) -> Any:
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            return unflatten({name: file.get_tensor(name) for name in names}, file.metadata())
    except OSError:
        raise
    except Exception as error:  # a damaged file can make the reader raise anything
        raise FldiagError(
            f"checkpoint {path} is not a readable safetensors file: {first_line(error)}",
            "copy it again, or use another file",
        ) from None


def files_of(path: Path) -> list[Path]:
    """The file itself; of an index (``model.safetensors.index.json``) the parts of the model that it names.

    Raises FldiagError for an index that cannot be read, and for a part in another folder.
    """
    if not path.name.endswith(INDEX):
        return [path]
    try:
        names = sorted(map(str, set(json.loads(path.read_text("utf-8"))["weight_map"].values())))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FldiagError(
            f"{path} is no index of a model's parts ({type(error).__name__})", "use the original"
        ) from None
    for name in names:
        if Path(name).name != name or name.endswith(INDEX):
            raise FldiagError(
                f"{path} names {name!r}, which is not a file of weights in this folder",
                "use the original",
            )
    return [path.parent / name for name in names]


def _pt(path: Path, size: int, start: bytes) -> Any:
    if start.startswith(b"\x93NUMPY") or (start[:4] == b"PK\x03\x04" and _verify(path, size)):
        return _arrays(path)
    check_trust(path)
    try:
        # torch 2.4 has no such context: there plain objects beside the weights are refused
        passed_over = getattr(torch.serialization, "safe_globals", contextlib.nullcontext)
        with open(path, "rb") as file, passed_over(PLAIN_OBJECTS):
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if start[:2] != b"PK" and start[:1] != b"\x80":
            raise _damaged(path) from None
        names = re.findall(r"GLOBAL ([\w.]+)", str(error))
        kind = f"a pickled object ({names[0]})" if names else "something other than tensors"
        raise FldiagError(
            f"checkpoint {path} holds {kind} and was refused; nothing in it was executed",
            "where you trust it: content = torch.load(path, weights_only=False), then "
            "torch.save(content['model'], 'weights.pt') with the entry that is the state_dict, or "
            "torch.save(content.state_dict(), 'weights.pt') where it is a whole module (docs/how_to/frameworks.md)",
        ) from None
    except Exception as error:  # a damaged file can make the reader raise anything
        if out_of_memory(error):
            raise FldiagError(
                f"checkpoint {path} needs more memory than there is", "read it on a larger machine"
            ) from None
        raise _damaged(path) from None


def _verify(path: Path, size: int) -> bool:
    """The archive's own checksums, a piece at a time, and whether it holds arrays of numpy. Raises FldiagError when a checksum
    does not hold, or the archive holds no weights."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            names = {member.filename for member in members}
            has_arrays = bool(names) and all(name.endswith(".npy") for name in names)
            if EXAMPLES & {name.removesuffix(".npy") for name in names}:
                raise FldiagError(
                    f"{path} holds numpy arrays and no weights: it may be data",
                    f"give a checkpoint, and this file as its data: --data npz:{path}",
                    usage=True,
                )
            _claim(path, sum(member.file_size for member in members), size)
            bad = archive.testzip() if any(member.CRC for member in members) else None
    except (FldiagError, OSError):
        raise
    except Exception:  # a damaged archive can make the reader raise anything
        raise _damaged(path) from None
    if bad is not None:
        raise FldiagError(
            f"checkpoint {path} is damaged: the checksum of its member {bad[-80:]} does not match",
            "copy it again, or use another round's file",
        )
    return has_arrays


def _arrays(path: Path) -> dict[str, Tensor]:
    """The arrays of a file of numpy as tensors; the one of an npy is ``arr_0``."""
    try:
        content = np.load(path, allow_pickle=False)
        arrays = {"arr_0": content} if isinstance(content, np.ndarray) else dict(content)
        return {
            name: torch.from_numpy(np.ascontiguousarray(a)).reshape(a.shape)
            for name, a in arrays.items()
        }
    except OSError:
        raise
    except Exception as error:  # a damaged file can make the reader raise anything
        if not isinstance(error, TypeError) and "pickle" not in str(error):
            raise _damaged(path) from None
        raise FldiagError(
            f"{path} holds arrays that are not numbers: {first_line(error)}",
            "save the weights alone: np.savez(path, *arrays); Flower's Parameters become arrays by "
            "flwr.common.parameters_to_ndarrays",
        ) from None


def _bounded(path: Path, content: Any, size: int) -> None:
    """Raises FldiagError for tensors that are far larger than the file, and for containers that are nested too deeply."""
    waiting: list[tuple[Any, int]] = [(content, 0)]
    visited: set[int] = set()
    total = 0
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, Tensor):
            total += (
                0
                if value.is_meta or value.layout != torch.strided
                else value.numel() * value.element_size()
            )
        elif isinstance(value, Mapping | list | tuple) and id(value) not in visited:
            visited.add(id(value))
            waiting += [
                (v, depth + 1) for v in (value.values() if isinstance(value, Mapping) else value)
            ]
        if depth > DEEPEST:
            raise FldiagError(
                f"checkpoint {path} holds containers nested more than {DEEPEST} deep",
                "save only the state_dict: torch.save(model.state_dict(), path)",
            )
    _claim(path, total, size)


def _claim(path: Path, claimed: int, size: int) -> None:
    if claimed > TIMES * size + MORE:
        raise FldiagError(
            f"checkpoint {path} claims to hold {claimed / 1e6:,.0f} MB and has {size / 1e6:,.1f} MB",
            "save it again with torch.save, every tensor with .clone()",
        )


def _damaged(path: Path) -> FldiagError:
    return FldiagError(
        f"checkpoint {path} is truncated or not a checkpoint that is read (.pt, .safetensors, .npz)",
        "copy it again, or use another round's file",
    )


#: Keys of the file's metadata: the manifest as it is, and the order of the entries, which safetensors does not keep.
MANIFEST, ORDER = "fldiag.manifest", "fldiag.order"


def flatten(content: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, metadata) of a checkpoint of fldiag, entries of inner dicts as ``model/NAME``, or of a state_dict.

    Raises FldiagError for anything that safetensors cannot hold.
    """
    tensors: dict[str, Tensor] = {}
    if not isinstance(content.get("manifest"), str):
        _add_tensors(tensors, content, "")
        return tensors, {"format": "pt"}
    order: list[list[str]] = []
    for top, entry in content.items():
        if top == "manifest":
            order.append([top])
        elif isinstance(entry, Mapping):
            order += [[top, str(name)] for name in entry] or [[top, ""]]
            _add_tensors(tensors, entry, f"{top}/")
        else:
            order.append([top])
            _add_tensors(tensors, {top: entry}, "")
    return tensors, {"format": "pt", MANIFEST: content["manifest"], ORDER: json.dumps(order)}


def unflatten(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> dict[str, Any]:
    """What ``flatten`` was given. Raises ValueError when metadata and tensors do not belong together."""
    if not metadata or MANIFEST not in metadata:
        return dict(tensors)
    content: dict[str, Any] = {}
    try:
        for names in json.loads(metadata[ORDER]):
            if names == ["manifest"]:
                content["manifest"] = metadata[MANIFEST]
            elif len(names) == 1:
                content[names[0]] = tensors[names[0]]
            else:
                entries = content.setdefault(names[0], {})
                if names[1]:
                    entries[names[1]] = tensors["/".join(names)]
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"its manifest does not fit its tensors ({type(error).__name__})"
        ) from None
    return content


def _add_tensors(tensors: dict[str, Tensor], entries: Mapping[str, Any], prefix: str) -> None:
    pointers = {
        t.untyped_storage().data_ptr() for t in tensors.values() if t.layout == torch.strided
    }
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
            value.untyped_storage().data_ptr() in pointers
            or value.untyped_storage().nbytes() != value.numel() * value.element_size()
        ):
            value = value.clone()
        pointers.add(value.untyped_storage().data_ptr())
        tensors[prefix + str(name)] = value
