"""Files of tensors, from anywhere: nothing in them is executed, and they are verified as far as their format allows.

- ``.pt`` as torch.save writes it is a zip archive, which holds a CRC-32 of every member. All of them are verified. A file that
  was written without them (``torch.serialization.set_crc32_options(False)``) is read as it is, and so is the format that
  torch.save wrote before version 1.6: neither can be verified.
- ``.safetensors`` has no checksum. What its header says of sizes and places is checked against the file, so a file that was cut
  off is refused; a flipped bit in a weight is not noticed. Of a model in several files the ``*.index.json`` is read.
- ``.npz`` and ``.npy`` hold arrays without names: ``arr_0``, ``arr_1``, ... in the order of a state_dict, or one vector.

Files of other programs are known by their first bytes (not by their names), and what to do with them is said.

Inside a run every file is verified by the sha256 in run.json as well.
"""

from __future__ import annotations

import argparse
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

#: What a file may claim to hold: so many times its own size, and so many bytes more. Compression and shared storages make a
#: tensor larger than its bytes in the file, though never by much in a checkpoint.
TIMES, MORE = 8, 2**24
#: Dicts and lists in one another.
DEEPEST = 100
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
#: How the names of the list of a model's files end.
INDEX = ".index.json"
#: Names of arrays in an npz that are examples.
EXAMPLES = {"train_images", "train_labels", "test_images", "test_labels"}
#: First bytes (lower case), or the end of the name where a format has none -> what such a file is, and what to do.
OTHERS: dict[bytes | str, tuple[str, str]] = {
    b"version https://git-lfs": (
        "a git-lfs pointer in place of the file",
        "fetch it: git lfs pull",
    ),
    b"<!doctype html": ("a web page", "the download failed: download the file itself"),
    b"<html": ("a web page", "the download failed: download the file itself"),
    b"\x89hdf\r\n\x1a\n": ("an HDF5 file (Keras, TensorFlow)", "{framework}"),
    b"gguf": ("a GGUF file (llama.cpp)", "give the safetensors files that it was made from"),
    ".keras": ("a Keras model", "{framework}"),
    ".onnx": ("an ONNX graph", "{framework}"),
    ".msgpack": ("a msgpack file (Flax)", "{framework}"),
}
FRAMEWORK = (
    "open it with the program that wrote it, copy the arrays into the same model of PyTorch, and "
    "torch.save(model.state_dict(), path)"
)
#: Pickled numbers, arrays and options beside the weights: plain data, whose making runs nothing else.
PLAIN: list[Any] = [
    argparse.Namespace,
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in "?bBhHiIlLqQefdgFDGSUVO"},
    *(
        (value.__reduce__()[0], f"numpy.{package}.multiarray.{name}")
        for value, name in ((np.float64(0), "scalar"), (np.zeros(1), "_reconstruct"))
        for package in ("core", "_core")
    ),
]


def read_tensors(path: Path) -> Any:
    """The content of a ``.pt``, ``.safetensors``, ``.npz`` or ``.npy`` file, tensors and plain containers only.

    Raises FldiagError for a missing, empty, truncated, damaged or foreign file, for one that claims to hold far more than
    its size, and for one that holds pickled objects (nothing of it is executed).
    """
    check_name(path)
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
        content = (
            _shards(path)
            if path.name.endswith(INDEX)
            else _safetensors(path)
            if path.suffix == ".safetensors"
            else _pt(path, size)
        )
    except OSError as error:
        raise FldiagError(
            f"checkpoint {path} cannot be read: {error.strerror or type(error).__name__}",
            "copy it again, or use another file",
        ) from None
    if not path.name.endswith(INDEX):
        _bounded(path, content, size)
    return content


def _shards(path: Path) -> Any:
    """The tensors in the files of one model, as the list of them says."""
    try:
        names = sorted(set(json.loads(path.read_text("utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise FldiagError(f"{path} lists no files of weights", "use the original") from None
    content: dict[str, Any] = {}
    for name in names:
        if Path(name).name != name or not name.endswith((".safetensors", ".bin")):
            raise FldiagError(
                f"{path} names {name!r}, which is not a safetensors file in this folder",
                "use the original",
            )
        content |= read_tensors(path.parent / name)
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

    with open(path, "rb") as content:
        _refuse_others(path, content.read(64))
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


def _pt(path: Path, size: int) -> Any:
    with open(path, "rb") as file:
        start = file.read(64)
    _refuse_others(path, start)
    if start[:4] == b"PK\x03\x04" and _verify(path, size):
        return _arrays(path)
    if start.startswith(b"\x93NUMPY"):
        return _arrays(path)
    try:
        with torch.serialization.safe_globals(PLAIN):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if start[:2] != b"PK" and start[:1] != b"\x80":
            raise _damaged(path) from None
        names = re.findall(r"GLOBAL ([\w.]+)", str(error))
        kind = f"a pickled object ({names[0]})" if names else "something other than tensors"
        raise FldiagError(
            f"checkpoint {path} holds {kind} and was refused; nothing in it was executed",
            "save only the weights: model.state_dict() of a whole module, of a dict the entry with the weights; "
            "docs/other_frameworks.md has the two lines for each",
        ) from None
    except Exception as error:  # a damaged file can make the reader raise anything
        if out_of_memory(error):
            raise FldiagError(
                f"checkpoint {path} needs more memory than there is", "read it on a larger machine"
            ) from None
        raise _damaged(path) from None


def _refuse_others(path: Path, start: bytes) -> None:
    """Raises FldiagError, with what to do, for a file of a program whose files are not read."""
    start = start.lstrip().lower()
    for mark, (kind, remedy) in OTHERS.items():
        if start.startswith(mark) if isinstance(mark, bytes) else path.name.endswith(str(mark)):
            raise FldiagError(f"{path} is {kind}", remedy.format(framework=FRAMEWORK))


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
            if any(name.endswith("/constants.pkl") for name in names):
                raise FldiagError(
                    f"{path} is a TorchScript archive, which holds code",
                    "save its weights: torch.save(torch.jit.load(path).state_dict(), 'weights.pt')",
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
        f"checkpoint {path} is truncated, damaged or not a checkpoint at all",
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
