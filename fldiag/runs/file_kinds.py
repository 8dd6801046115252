"""What a file is by its first bytes: how to convert those kinds of weights that are read by other programs only."""

from __future__ import annotations

import zipfile
from pathlib import Path

from fldiag.errors import FldiagError

#: How many bytes tell a kind.
START = 512
#: First bytes, what such a file is, and what makes a file of it that fldiag reads.
KINDS = (
    (
        b"\x89HDF\r\n\x1a\n",
        "an HDF5 file, as Keras writes it (.h5)",
        "read it with Keras, set its arrays into the PyTorch model (a Dense kernel transposed), and "
        "torch.save(model.state_dict(), 'weights.pt')",
    ),
    (
        b"GGUF",
        "a GGUF file of quantised weights (llama.cpp)",
        "take the model that it was made of: model.save_pretrained(folder)",
    ),
    (
        b"version https://git-lfs",
        "a pointer of Git LFS, not the file itself",
        "fetch it: git lfs pull",
    ),
    (b"\x1f\x8b", "a gzip archive", "unpack it: gunzip or tar -xzf, and give the file inside"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive", "unpack it: unzstd, and give the file inside"),
    (b"\xfd7zXZ", "an xz archive", "unpack it: unxz or tar -xJf, and give the file inside"),
    (b"BZh", "a bzip2 archive", "unpack it: bunzip2 or tar -xjf, and give the file inside"),
    (b"%PDF", "a PDF document", "give a .pt or .safetensors file"),
    (b"\x89PNG", "a picture", "give a .pt or .safetensors file"),
)
PAGE = ("an html page, as a failed download leaves it", "download the file itself again")
TAR = ("a tar archive", "unpack it: tar -xf, and give the file inside")
ONNX = (
    "an ONNX graph",
    "save the PyTorch model that it was exported from: torch.save(model.state_dict(), 'weights.pt')",
)
MSGPACK = (
    "a msgpack file, as Flax writes it",
    "in transformers: Model.from_pretrained(folder, from_flax=True).save_pretrained(folder); else read it with "
    "flax.serialization.msgpack_restore and torch.save a dict of torch.from_numpy(array)",
)
TORCHSCRIPT = (
    "a TorchScript archive, which holds code beside its weights",
    "make a file of its weights: torch.save(torch.jit.load(path).state_dict(), 'weights.pt')",
)
KERAS = (
    "a Keras archive (.keras)",
    "read it with keras.models.load_model, set its arrays into the PyTorch model (a Dense kernel transposed), and "
    "torch.save(model.state_dict(), 'weights.pt')",
)


def is_safetensors(start: bytes) -> bool:
    """Whether a file begins as safetensors do: the length of a header, and the header's JSON."""
    return start[8:9] == b"{" and start[:2] != b"PK"


def check_kind(path: Path, start: bytes) -> None:
    """Raises FldiagError for a kind of file that fldiag does not read. ``start``: its first bytes."""
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    kind = next(((name, remedy) for magic, name, remedy in KINDS if start.startswith(magic)), None)
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        kind = PAGE
    elif start[257:262] == b"ustar":
        kind = TAR
    elif path.suffix == ".onnx" or _is_onnx(start):
        kind = ONNX
    elif path.suffix == ".msgpack" or _is_msgpack(start):
        kind = MSGPACK
    elif start[:4] == b"PK\x03\x04":
        kind = _archive_kind(path)
    if kind is not None:
        name, remedy = kind
        raise FldiagError(f"{path} is {name}", remedy, usage=True)


def _is_onnx(start: bytes) -> bool:
    """A small version of the format (field 1), then the producer's name (field 2) as printable text."""
    return (
        len(start) > 4
        and start[:1] == b"\x08"
        and 0 < start[1] < 32
        and start[2:3] == b"\x12"
        and start[4 : 4 + start[3]].decode("ascii", "replace").isprintable()
    )


def _is_msgpack(start: bytes) -> bool:
    """A map with entries, whose first key is text. (0x80, a map without entries, begins pickles.)"""
    sizes = {0xDE: 3, 0xDF: 5, **dict.fromkeys(range(0x81, 0x90), 1)}
    place = sizes.get(start[0]) if start else None
    return (
        place is not None
        and place < len(start)
        and (0xA1 <= start[place] <= 0xBF or start[place] in (0xD9, 0xDA))
    )


def _archive_kind(path: Path) -> tuple[str, str] | None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        return None  # the checksums will tell
    if "config.json" in names and "metadata.json" in names:
        return KERAS
    is_script = any(name.endswith("/constants.pkl") for name in names)
    return TORCHSCRIPT if is_script and any("/code/" in name for name in names) else None
