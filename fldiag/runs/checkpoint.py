"""Weights in files: checkpoints of a run, and other programs' state_dicts. Nothing in a file is executed.

A run writes safetensors. Tensors lie flat under names joined by ``/``, and everything else is JSON in the metadata:

``manifest``        (JSON) round, seed, config, shape, classes, clients, provenance
``model/NAME``      parameters and buffers of the global model after the round
``received``        [P] weights that the clients received (only with clients' weights)
``clients``         [K, P] their weights after training, in the order of ``clients`` in the manifest
``buffers/NAME``    [K, ...] their buffers
``starts``          [K, P] what each client received, only where that differs; ``start_buffers/NAME`` go with it

A ``.pt`` file holds the same entries as dicts, or is a foreign one. It is read with ``weights_only``, which is safe from torch
2.10 on (CVE-2026-24747); below that only with the user's word that the file is their own.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_leaves

from fldiag.errors import FldiagError, first_line
from fldiag.models import State
from fldiag.results import files

Json = dict[str, Any]
#: Weights as transformers names them, the safest first.
PRETRAINED = ("model.safetensors", "pytorch_model.bin")
#: The oldest torch that reads a stranger's ``.pt`` file safely, and what says that files are the user's own.
SAFE_TORCH, TRUST = "2.10", "FLDIAG_TRUST_FILES"
#: Key of the metadata, and names of the tensors beside the model.
ABOUT = "fldiag"
GROUPS = ("received", "clients", "buffers", "starts", "start_buffers")


@dataclass(frozen=True)
class Checkpoint:
    """One round of a run, or a foreign state_dict (then ``manifest`` is empty, and model and data must be given).

    ``fldiag.load(file)`` or ``Run.checkpoint(round)`` make one.

    Args:
        path: Where it was read.
        state: The global weights and buffers, by name.
        manifest: What the file says of itself: round, seed, config, shape, classes, clients, provenance.
        received: The weights that the round's clients started from, [P].
        clients: The trained weights of ``client_ids``, [K, P].
        buffers: The buffers of these clients, by name, each [K, ...].
        model: A module, a registered name or ``pkg.mod:factory``, instead of what the manifest names.
        data: (x, y), a slice, a data set's name, ``npz:PATH`` or ``pkg.mod:loader``, instead of what the manifest names.
        key: Which of the file's sets of weights ``state`` is, where one was named.
        starts: What each of these clients received, [K, P], where they received different weights.
        start_buffers: The buffers that go with ``starts``, by name, each [K, ...].
        run: The ``Run`` in which it lies, where it does.

    Raises:
        FldiagError: From what reads a file: it is damaged, foreign or unsafe.
    """

    path: Path
    state: State
    manifest: Json = field(default_factory=dict)
    received: Tensor | None = None
    clients: Tensor | None = None
    buffers: State = field(default_factory=dict)
    model: Any = None
    data: Any = None
    key: str = ""
    starts: Tensor | None = None
    start_buffers: State = field(default_factory=dict)
    run: Any = None

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {self.label}, {len(self.client_ids)} clients)"

    @property
    def round(self) -> int | None:
        """The round after which it was written; None where that is not known."""
        return self.manifest.get("round")

    @property
    def config(self) -> Json:
        """The run's config, as the manifest has it."""
        return self.manifest.get("config", {})  # type: ignore[no-any-return]

    @property
    def client_ids(self) -> list[int]:
        """The clients whose trained weights it holds, in the order of the rows of ``clients``."""
        return self.manifest.get("clients", [])  # type: ignore[no-any-return]

    @property
    def label(self) -> str:
        """Short name for tables and captions."""
        if self.manifest:
            return f"{self.config['method']['name']} round {self.round}"
        path = self.path.absolute()
        name = path.parent.name if path.name in PRETRAINED else path.stem
        return f"{name} {self.key}".strip()

    def beside(self, name: str) -> Path | None:
        """Another file of its run, verified; None where it lies in no run, or the run has no such file."""
        return self.run.verified(name) if self.run and name in self.run.files else None

    @property
    def sha256(self) -> str:
        """Of the file, in hexadecimal digits."""
        return files.sha256(self.path)


# Writing


def pack(about: Json, **tensors: Any) -> bytes:
    """The bytes of a safetensors file.

    Args:
        about: Plain values, for the metadata.
        tensors: Tensors, or dicts of tensors by name; None is left out.
    """
    flat: State = {}
    for group, value in tensors.items():
        is_dict = isinstance(value, Mapping)
        flat |= {f"{group}/{n}": t for n, t in value.items()} if is_dict else {group: value}
    flat = {n: t.detach().cpu().clone().contiguous() for n, t in flat.items() if t is not None}
    # safetensors sorts the names, and a state_dict has an order
    text = json.dumps({**about, "names": list(flat)}, sort_keys=True)
    return save(flat, {"format": "pt", ABOUT: text})


# Reading


def trust_files() -> None:
    """The user says that ``.pt`` files are their own; until the process ends, also in workers that it starts."""
    os.environ[TRUST] = "1"


def read_checkpoint(path: str | Path, key: str | None = None, **more: Any) -> Checkpoint:
    """A checkpoint of fldiag, a state_dict in whatever container, or a folder that transformers wrote.

    Args:
        path: The file or folder.
        key: Which of several sets of weights in a foreign file, such as ``model_ema``.
        more: Fields of the checkpoint that its file does not say.

    Raises:
        FldiagError: It cannot be read, holds objects, no weights, or several sets of weights.
    """
    path = weights_file(Path(path))
    content = read_tensors(path)
    if key is not None or "manifest" not in content:
        return Checkpoint(path, _weights(path, content, key), key=key or "", **more)
    try:
        manifest = content["manifest"]
        manifest = json.loads(manifest) if isinstance(manifest, str) else dict(manifest)
        more |= {name: content[name] for name in GROUPS if name in content}
        return Checkpoint(path, dict(content["model"]), manifest, **more)
    except (ValueError, KeyError, TypeError) as error:
        raise FldiagError(f"{path}: its manifest is not valid ({first_line(error)})") from None


def weights_file(path: Path) -> Path:
    """Of a folder that ``save_pretrained`` of transformers wrote the file with its weights; any other path as it is."""
    return next((path / name for name in PRETRAINED if (path / name).is_file()), path)


def read_tensors(path: Path) -> Json:
    """What a ``.safetensors`` or ``.npz`` file holds, or a ``.pt`` file of any other name.

    Raises:
        FldiagError: There is none, it is damaged, or it holds objects or tensors that are no plain numbers.
    """
    if not path.is_file():
        why = "" if path.exists() else ": it does not exist"
        what = f"{path} is no run and no file of weights{why}"
        raise FldiagError(what, "give a run's folder, or a .pt or .safetensors file", usage=True)
    try:
        content = dict(READERS.get(path.suffix, _pt)(path))
        for leaf in tree_leaves(content):
            if isinstance(leaf, Tensor):
                plain(leaf)
        return content
    except FldiagError:
        raise
    except Exception as error:  # a damaged file can make a reader raise anything
        raise FldiagError(
            f"{path} cannot be read as weights, and nothing in it was executed: {first_line(error)}",
            "save the weights alone, torch.save(model.state_dict(), path), or copy the file again",
        ) from None


def plain(value: Any) -> Tensor:
    """As a dense tensor of real numbers, each with its own bytes. Raises TypeError or RuntimeError for anything else."""
    t = torch.as_tensor(value).detach()
    if t.is_meta or t.is_complex() or t.layout != torch.strided:
        raise TypeError(f"it holds a tensor of {t.dtype}, {t.layout}, on {t.device}")
    if t.nbytes > t.untyped_storage().nbytes():  # views of one number
        raise TypeError(f"it holds a tensor that claims {t.nbytes / 1e6:,.0f} MB")
    return t


def _safetensors(path: Path) -> Json:
    with safe_open(path, framework="pt") as file:
        flat = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata() or {}
    content: Json = json.loads(metadata.get(ABOUT, "{}"))
    if not content:
        return flat
    for name in content.pop("names"):
        group, slash, rest = name.partition("/")
        (content.setdefault(group, {}) if slash else content)[rest or group] = flat[name]
    return content


def _arrays(path: Path) -> State:
    with np.load(path, allow_pickle=False) as file:
        return {name: torch.from_numpy(array) for name, array in file.items()}


READERS = {".safetensors": _safetensors, ".npz": _arrays}


class PlainObject:
    """Stands for an object beside the weights of a ``.pt`` file, such as its options; keeps nothing of it."""

    def __init__(self, *values: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass


PLAIN_OBJECTS: list[Any] = [
    (PlainObject, name)
    for name in (
        *("argparse.Namespace", "numpy.ndarray", "numpy.dtype"),
        *("numpy.core.multiarray.scalar", "numpy.core.multiarray._reconstruct"),
        *("numpy._core.multiarray.scalar", "numpy._core.multiarray._reconstruct"),
    )
]


def _pt(path: Path) -> Any:
    if TorchVersion(torch.__version__) < SAFE_TORCH and TRUST not in os.environ:
        raise FldiagError(
            f"{path} is in torch's format, and a prepared file of that kind can harm this machine with torch {torch.__version__}",
            f"install torch {SAFE_TORCH}, take a .safetensors file, or say that it is your own: --trust-file, trust_file=True",
            usage=True,
        )
    # torch does not look at the checksums
    if zipfile.is_zipfile(path) and (bad := zipfile.ZipFile(path).testzip()) is not None:
        raise FldiagError(f"{path} is damaged: the checksum of {bad} does not match")
    with torch.serialization.safe_globals(PLAIN_OBJECTS):
        return torch.load(path, map_location="cpu", weights_only=True)


def _weights(path: Path, content: Json, key: str | None) -> State:
    """The file's own tensors, or the set in it, which ``key`` names where there are several."""
    if key is None and _is_state(content):
        return content
    sets = {str(name): dict(value) for name, value in content.items() if _is_state(value)}
    matches = [state for name, state in sets.items() if key in (None, name)]
    if len(matches) == 1:
        return matches[0]
    raise FldiagError(
        f"{path} holds {'several sets' if matches else 'no set'} of weights {key or ''}".strip(),
        f"choose with --key NAME or key=NAME: {', '.join(sets) or 'it has none'}",
        usage=key is not None,
    )


def _is_state(value: Any) -> bool:
    """Whether it is a dict of tensors by name."""
    is_dict = isinstance(value, Mapping) and len(value) > 0
    return is_dict and all(isinstance(n, str) and isinstance(t, Tensor) for n, t in value.items())
