"""Low-rank adapters (LoRA, Hu et al., ICLR 2022): frozen matrices W, and W + s B A with small A and B to train and to send.

Frozen weights are neither parameters nor buffers, so that a row of weights, and a checkpoint, holds the others alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fldiag.errors import FldiagError

Rank = Annotated[
    int, Field(ge=0, description="Rank r of adapters; 0: none, all weights are trained.")
]
Alpha = Annotated[float, Field(gt=0, description="Adapters are scaled by alpha / r.")]
On = Annotated[
    Literal["attention", "all"],
    Field(
        description="Which affine layers get adapters: attention (its queries and values) or all."
    ),
]
Head = Annotated[bool, Field(description="With adapters: train the head, too.")]


class Adapter(nn.Module):
    """x -> W x + b + s B A x with weights ``A`` [r, in], random at first, and ``B`` [out, r], first 0; W and b are ``base``."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float):
        super().__init__()
        if rank > min(base.in_features, base.out_features):
            raise FldiagError(
                f"adapters of rank {rank} for a layer of {base.in_features} inputs and {base.out_features} outputs",
                "lower model.lora_rank",
                usage=True,
            )
        self.base, self.scale = base, alpha / rank
        self.A, self.B = (
            nn.Parameter(torch.empty(rank, base.in_features)),
            nn.Parameter(torch.zeros(base.out_features, rank)),
        )
        nn.init.kaiming_uniform_(self.A, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.scale * ((x @ self.A.T) @ self.B.T)
        return out


def with_adapters(
    module: nn.Module, rank: int, alpha: float, patterns: tuple[str, ...], head: str
) -> nn.Module:
    """The module with adapters on the affine layers whose names fit the ``patterns``, and all else frozen but the parameters of
    ``head`` ('': these too). Without ``rank``: as it is."""
    if not rank:
        return module
    layers = {
        name: m
        for name, m in module.named_modules()
        if isinstance(m, nn.Linear) and any(fnmatch(name, p) for p in patterns)
    }
    for name, layer in layers.items():
        setattr(*_place(module, name), Adapter(layer, rank, alpha))
    trained = {f"{name}.{part}" for name in layers for part in "AB"}
    others = [n for n, _ in module.named_parameters() if n not in trained]
    freeze(module, [n for n in others if not (head and n.startswith(f"{head}."))])
    return module


def freeze(module: nn.Module, names: Iterable[str]) -> None:
    """These parameters of the module become plain tensors: every layer finds them as before, ``parameters()`` does not."""
    for name in (names := tuple(names)):
        owner, last = _place(module, name)
        tensor = owner._parameters.pop(last)
        assert tensor is not None
        setattr(owner, last, tensor.detach())
    module.__dict__["frozen_weights"] = names
    module.__dict__["_apply"] = partial(_apply, module)  # a partial is copied with its module


def frozen_weights(module: nn.Module) -> dict[str, Tensor]:
    """The frozen weights by name."""
    return {
        name: getattr(*_place(module, name)) for name in module.__dict__.get("frozen_weights", ())
    }


def load_frozen(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put other frozen weights in. Raises FldiagError for those of another model."""
    present = frozen_weights(module)
    if {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in present.items()}:
        raise FldiagError(
            "the frozen weights are those of another model",
            "give those with which the others were trained",
        )
    for name, tensor in present.items():
        setattr(*_place(module, name), tensors[name].detach().to(tensor))


def _place(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has the tensor or module of this name, and its last part."""
    path, _, last = name.rpartition(".")
    return module.get_submodule(path), last


def _apply(module: nn.Module, fn: Callable[..., Any], recurse: bool = True) -> Any:
    """What ``to`` does with parameters, with the frozen weights, too."""
    for name, tensor in frozen_weights(module).items():
        setattr(*_place(module, name), fn(tensor))
    return type(module)._apply(module, fn, recurse)


@dataclass(frozen=True)
class AdapterFactors:
    """Of an adapted layer: the names of its A and B among the parameters, and the scale s of their product."""

    a: str
    b: str
    scale: float


def adapters(module: nn.Module) -> dict[str, AdapterFactors]:
    """Adapted layers by name: those of fldiag, and those of peft (of its first adapter)."""
    factors = {
        name: AdapterFactors(f"{name}.A", f"{name}.B", m.scale)
        for name, m in module.named_modules()
        if isinstance(m, Adapter)
    }
    for name, m in module.named_modules():
        scaling = getattr(m, "scaling", None)
        if (
            isinstance(scaling, dict)
            and scaling
            and isinstance(getattr(m, "lora_A", None), nn.ModuleDict)
            and len(m.lora_A)
        ):
            adapter = next(iter(m.lora_A))
            a, b = (f"{name}.{lora}.{adapter}.weight" for lora in ("lora_A", "lora_B"))
            factors[name] = AdapterFactors(a, b, float(scaling[adapter]))
    return factors
