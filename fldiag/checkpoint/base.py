"""The frozen weights beneath adapters: once in a run, named by their hash in every checkpoint."""

from __future__ import annotations

import contextlib

from torch import nn

from fldiag.checkpoint.run import Run
from fldiag.checkpoint.schema import Checkpoint
from fldiag.errors import FldiagError
from fldiag.models.lora import Adaptable
from fldiag.results.provenance import digest

FILE = "base.safetensors"


def name_of(module: nn.Module) -> str | None:
    """Names the frozen weights (as float32) of a model with adapters; None for other models."""
    if not (isinstance(module, Adaptable) and module.frozen):
        return None
    return digest({name: t.float() for name, t in module.base.items()})[:32]


def keep(run: Run, module: nn.Module) -> None:
    """Write the frozen weights, if there are any, into the run."""
    if isinstance(module, Adaptable) and module.frozen:
        from safetensors.torch import save

        content = save({name: t.float().cpu().contiguous() for name, t in module.base.items()})
        run.put(FILE, lambda f: f.write(content))
        run.commit()


def restore(module: nn.Module, c: Checkpoint) -> nn.Module:
    """The module with the frozen weights that the checkpoint names: those with which it was built, or the run's.

    Raises FldiagError when they are neither.
    """
    wanted, folder = c.manifest.get("provenance", {}).get("base"), c.path.parent.parent
    if wanted is None or name_of(module) in (None, wanted):
        return module
    assert isinstance(module, Adaptable)
    if (folder / "run.json").is_file() and FILE in (run := Run.open(folder)).index["files"]:
        from fldiag.checkpoint.tensor_files import read_tensors

        with contextlib.suppress(AttributeError):  # of tensors that are none
            module.load_base(read_tensors(run.verified(FILE)))
    if name_of(module) != wanted:
        raise FldiagError(f"{c.path} holds adapters, and the frozen weights beneath them ({wanted}) are not here",
                          f"keep the file in its run, which has {FILE}")
    return module
