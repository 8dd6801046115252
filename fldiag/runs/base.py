"""The frozen weights beneath adapters: once in a run, named by their hash in every checkpoint."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

from torch import nn

from fldiag.errors import FldiagError
from fldiag.models import lora
from fldiag.results.provenance import digest
from fldiag.runs.checkpoint import Checkpoint, read_tensors
from fldiag.runs.run import Run

FILE = "base.safetensors"


def provenance(module: nn.Module) -> dict[str, Any]:
    """``base``: the name of the frozen weights (as float32), where there are any."""
    weights = lora.frozen_weights(module)
    return (
        {"base": digest({name: t.float() for name, t in weights.items()})[:32]} if weights else {}
    )


def keep(run: Run, module: nn.Module) -> None:
    """Write the frozen weights, if there are any, into the run."""
    if weights := lora.frozen_weights(module):
        from safetensors.torch import save

        content = save({name: t.float().cpu().contiguous() for name, t in weights.items()})
        run.put(FILE, lambda f: f.write(content))


def restore(module: nn.Module, c: Checkpoint) -> nn.Module:
    """The module with the frozen weights that the checkpoint names: those that it has, or the run's. Of a model without frozen
    weights a copy, in which those are frozen that the checkpoint does not hold.

    Raises FldiagError when they are neither.
    """
    base = {"base": name} if (name := c.manifest.get("provenance", {}).get("base")) else {}
    if not base:
        return module
    if not lora.frozen_weights(module):
        module = copy.deepcopy(module)
        lora.freeze(module, [n for n, _ in module.named_parameters() if n not in c.state])
    folder = c.path.parent.parent
    if (
        provenance(module) != base
        and (folder / "run.json").is_file()
        and FILE in (run := Run.open(folder)).files
    ):
        with contextlib.suppress(AttributeError):  # of tensors that are none
            lora.load_frozen(module, read_tensors(run.verified(FILE)))
    if provenance(module) != base:
        raise FldiagError(
            f"{c.path} holds adapters, and the frozen weights beneath them ({base['base']}) are not here",
            f"keep the file in its run, which has {FILE}",
        )
    return module
