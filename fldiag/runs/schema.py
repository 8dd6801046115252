"""A checkpoint file: tensors and one JSON manifest, nothing else; read with ``weights_only`` and no fallback.

``manifest``   JSON string: schema version, model, data, partition, method, round, seed, versions
``model``      {name: tensor}: parameters and buffers of the global model after the round (a plain state_dict)
``received``   [P] weights the clients received (only with client weights)
``clients``    [K, P] trained client weights (ids in the manifest)
``buffers``    {name: [K, ...]} the clients' buffers
``starts``     [K, P] what each client received, only where that differs (personal layers, asynchronous rounds)
``start_buffers``  {name: [K, ...]} the buffers that go with them
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fldiag.errors import FldiagError
from fldiag.results import files
from fldiag.sections import LARGEST
from fldiag.user_code import consent

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = 1
#: Levels of nested tables and lists in a file. Python reads and writes about 250 of them.
DEEPEST_FILE = 110


def is_too_deep(tree: Any, levels: int = DEEPEST_FILE) -> bool:
    """Whether mappings and lists are nested more than so many levels deep."""
    level = [tree]
    for _ in range(levels):
        parts = [v.values() if isinstance(v, dict) else v for v in level]
        level = [v for part in parts for v in part if isinstance(v, (dict, list, tuple))]
        if not level:
            return False
    return True


@dataclass(frozen=True)
class Checkpoint:
    """One round of a run, or a foreign state_dict (then ``manifest`` is empty, and model and data must be given).

    ``fldiag.load(file)`` or ``Run.checkpoint(round)`` make one.

    Args:
        path: where it was read.
        state: the global weights and buffers, by name.
        manifest: what the file says of itself: round, seed, config, shape, classes, clients, provenance.
        received: the weights that the round's clients started from, [P].
        clients: the trained weights of ``client_ids``, [K, P].
        buffers: the buffers of these clients, by name, each [K, ...].
        model: a module, a registered name or ``pkg.mod:factory``, instead of what the manifest names.
        data: (x, y), a slice, a data set's name, ``npz:PATH`` or ``pkg.mod:loader``, instead of what the manifest names.
        allow_code: user code that may be imported although only the manifest names it.
        key: which of the file's sets of weights ``state`` is, where it holds several or one was named.
        alternatives: the sets of weights that were passed over.
        starts: what each of these clients received, [K, P], where they received different weights.
        start_buffers: the buffers that go with ``starts``, by name, each [K, ...].

    Raises:
        FldiagError: from what reads a file: it is damaged, foreign or unsafe.
    """

    path: Path
    state: dict[str, Tensor]
    manifest: dict[str, Any] = field(default_factory=dict)
    received: Tensor | None = None
    clients: Tensor | None = None
    buffers: dict[str, Tensor] = field(default_factory=dict)
    model: Any = None  # what the user gave: a module, a name or pkg.mod:factory
    data: Any = None
    allow_code: frozenset[str] = frozenset()
    key: str = ""
    alternatives: tuple[str, ...] = ()
    starts: Tensor | None = None
    start_buffers: dict[str, Tensor] = field(default_factory=dict)

    def __repr__(self) -> str:
        size = sum(t.numel() for t in self.state.values())
        return f"Checkpoint({str(self.path)!r}, {self.label}, {size:,} numbers, {len(self.client_ids)} clients)"

    def allow(self, code: str | Iterable[str]) -> Checkpoint:
        """The checkpoint with the consent to import this user code (``pkg.mod:name``, one or several). Raises FldiagError for
        another form."""
        allowed = self.allow_code | consent(code)
        return self if allowed == self.allow_code else replace(self, allow_code=allowed)

    @property
    def round(self) -> int | None:
        """The round after which it was written; None where that is not known."""
        return self.manifest.get("round")

    @property
    def config(self) -> dict[str, Any]:
        """What the manifest says of the run's config."""
        return dict(self.manifest["config"]) if self.manifest else {}

    @property
    def client_ids(self) -> list[int]:
        """The clients whose trained weights it holds, in the order of the rows of ``clients``."""
        return list(self.manifest.get("clients", []))

    @property
    def label(self) -> str:
        """Short name for tables and captions."""
        if not self.manifest:
            name = (
                self.path.absolute().parent.name
                if (self.path.parent / "config.json").is_file()
                else self.path.stem
            )
            return f"{name} {self.key}".strip()
        return f"{self.manifest['method']['name']} round {self.round}"

    @cached_property
    def sha256(self) -> str:
        """Of the file, in hexadecimal digits; of an index, of the files that it names."""
        from fldiag.runs.tensor_files import files_of

        digests = [files.sha256(path) for path in files_of(self.path)]
        return (
            digests[0]
            if len(digests) == 1
            else hashlib.sha256("".join(digests).encode()).hexdigest()
        )


def write(path: Path, manifest: dict[str, Any], state: dict[str, Tensor], **tensors: Any) -> str:
    """Write a checkpoint atomically; returns its sha256. Raises FldiagError when the disk refuses."""
    import torch  # only in what reads and writes: a Checkpoint can be spoken of without it

    entries = content(manifest, state, **tensors)
    return files.write_atomic(path, lambda f: torch.save(entries, f))


def content(manifest: dict[str, Any], state: dict[str, Tensor], **tensors: Any) -> dict[str, Any]:
    """What a checkpoint's file holds; tensors that are None are left out."""
    return {
        "manifest": json.dumps({"schema": SCHEMA, **manifest}, sort_keys=True),
        "model": {k: v.detach().cpu().contiguous() for k, v in state.items()},
        **{k: v for k, v in tensors.items() if v is not None},
    }


def read(path: str | Path, key: str | None = None) -> Checkpoint:
    """A checkpoint file of fldiag, or any state_dict (of tensors), also inside a training program's own container; ``key``: of
    several sets of weights this one.

    Raises FldiagError when the content is neither, was written by a later schema, or has no such set of weights.
    """
    from fldiag.runs import foreign
    from fldiag.runs.tensor_files import check_kinds, read_tensors

    path = Path(path)
    content = read_tensors(path)
    if isinstance(content, dict) and isinstance(content.get("manifest"), str):
        if key is not None:
            raise FldiagError(
                f"key = {key!r}, and {path} is a checkpoint of fldiag, which holds one global model",
                "leave it out (--client chooses a client's weights)",
                usage=True,
            )
        try:
            manifest = json.loads(content["manifest"])
            version = int(manifest["schema"])
            if version < 1:
                raise ValueError(version)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise FldiagError(
                f"checkpoint {path}: its manifest is not valid",
                "the file was edited; use the original",
            ) from None
        if version > SCHEMA:
            raise FldiagError(
                f"checkpoint {path} has schema {version}, this fldiag reads up to {SCHEMA}",
                "update fldiag",
            )
        groups = {
            key: _tensors(path, content[key]) if content.get(key) not in (None, {}) else {}
            for key in ("buffers", "start_buffers")
        }
        checkpoint = Checkpoint(
            path,
            _tensors(path, content.get("model")),
            manifest,
            content.get("received"),
            content.get("clients"),
            groups["buffers"],
            starts=content.get("starts"),
            start_buffers=groups["start_buffers"],
        )
        _check(checkpoint)
        if (
            path.parent.name == "rounds"
            and path.stem.isdecimal()
            and int(path.stem) != checkpoint.round
        ):
            raise FldiagError(
                f"{path} is the checkpoint of round {checkpoint.round}",
                "restore the original file; to diagnose this one as it is, copy it out of the run folder",
            )
        return checkpoint
    try:
        weights = foreign.unwrap(path, content, key)
    except RecursionError:
        raise FldiagError(
            f"checkpoint {path} holds a container that holds itself",
            "save only the state_dict: torch.save(model.state_dict(), path)",
        ) from None
    check_kinds(path, weights.state)
    name = weights.key if weights.alternatives or key is not None else ""
    return Checkpoint(path, weights.state, key=name, alternatives=weights.alternatives)


def _check(c: Checkpoint) -> None:
    """The manifest must have what every reader relies on: a hand-edited one is refused here, not later."""
    from torch import Tensor

    from fldiag.runs.tensor_files import check_kinds

    kinds = {
        "round": int,
        "seed": int,
        "config": dict,
        "method": dict,
        "shape": list,
        "classes": int,
        "clients": list,
    }
    for key, kind in kinds.items():
        if not isinstance(c.manifest.get(key), kind):
            raise FldiagError(
                f"checkpoint {c.path}: its manifest has no valid {key!r}",
                "the file was edited; use the original",
            )
    if is_too_deep(c.manifest, DEEPEST_FILE):
        raise FldiagError(
            f"checkpoint {c.path}: its manifest is nested more than {DEEPEST_FILE} levels deep",
            "the file was edited; use the original",
        )
    spec = c.manifest["config"]
    elsewhere = isinstance(
        c.manifest.get("origin"), dict
    )  # recorded from another program, which may not say what data it had
    sound = (
        all(
            isinstance(spec.get(k), dict)
            for k in ("data", "model", "partition", "clients", "method")
        )
        and isinstance(c.manifest["method"].get("name"), str)
        and isinstance(c.manifest.get("provenance", {}), dict)
        and c.manifest["classes"] > (-1 if elsewhere else 0)
        and all(isinstance(i, int) and i > 0 for i in c.manifest["shape"])
        and all(
            isinstance(i, int) and 0 <= i < LARGEST
            for i in [c.round, c.manifest["seed"], *c.client_ids]
        )
    )
    if not sound:
        raise FldiagError(
            f"checkpoint {c.path}: its manifest is not valid",
            "the file was edited; use the original",
        )
    vectors = {
        name: value
        for name, value in (("clients", c.clients), ("received", c.received), ("starts", c.starts))
        if value is not None
    }
    if not all(isinstance(value, Tensor) and value.ndim for value in vectors.values()):
        raise FldiagError(
            f"checkpoint {c.path}: its client weights are not tensors",
            "the file was edited; use the original",
        )
    for tensors in (c.state, c.buffers, vectors, c.start_buffers):
        check_kinds(c.path, tensors)
    if c.starts is not None and len(c.starts) != len(c.client_ids):
        raise FldiagError(
            f"checkpoint {c.path}: its client ids do not fit what clients received",
            "the file was edited; use the original",
        )
    if c.clients is not None and len(c.clients) != len(c.client_ids):
        raise FldiagError(
            f"checkpoint {c.path}: {len(c.client_ids)} client ids do not fit its client weights",
            "the file was edited; use the original",
        )


def _tensors(path: Path, content: Any) -> dict[str, Tensor]:
    from torch import Tensor

    if (
        not isinstance(content, dict)
        or not content
        or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in content.items())
    ):
        raise FldiagError(
            f"checkpoint {path} is not a state_dict (names with tensors)",
            "save it with torch.save(model.state_dict(), path)",
        )
    return content
