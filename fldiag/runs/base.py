"""The frozen weights beneath adapters: once in a run, named by their hash in every checkpoint."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from fldiag.errors import FldiagError
from fldiag.models import lora
from fldiag.results.provenance import digest
from fldiag.runs.checkpoint import Checkpoint, read_tensors
from fldiag.runs.run import Run

FILE = "base.safetensors"


def frozen(module: nn.Module) -> dict[str, Tensor]:
    """The frozen weights, in single precision."""
    return {name: t.float() for name, t in lora.frozen_weights(module).items()}


def provenance(module: nn.Module) -> dict[str, Any]:
    """``base``: the name of the frozen weights, where there are any."""
    weights = frozen(module)
    return {"base": digest(weights)[:32]} if weights else {}


def keep(run: Run, module: nn.Module) -> None:
    """Write the frozen weights, if there are any, into the run."""
    if weights := frozen(module):
        run.put_tensors(FILE, {}, **weights)


def restore(module: nn.Module, c: Checkpoint) -> nn.Module:
    """A copy of the module with the frozen weights that the checkpoint names: those of its run, else its own. In a model without
    frozen weights those are frozen that the checkpoint does not hold.

    Raises FldiagError when they are neither.
    """
    name = c.manifest.get("provenance", {}).get("base")
    if name is None:
        return module
    module = copy.deepcopy(module)
    if not lora.frozen_weights(module):
        lora.freeze(module, [n for n, _ in module.named_parameters() if n not in c.state])
    if (file := c.beside(FILE)) is not None:
        lora.load_frozen(module, read_tensors(file))
    elif provenance(module) != {"base": name}:
        raise FldiagError(
            f"{c.path} holds adapters, and the frozen weights beneath them ({name}) are not here",
            f"keep the file in its run, which has {FILE}",
        )
    return module
