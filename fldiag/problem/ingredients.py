"""What a Problem is made of: a model, a loss, weights, buffers and data, checked and brought into one form."""

from __future__ import annotations

import contextlib
import copy
import random
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fldiag.device import device_of
from fldiag.errors import FldiagError
from fldiag.params import Layout
from fldiag.problem import inputs
from fldiag.results.provenance import digest


@contextlib.contextmanager
def untouched_randomness(device: torch.device) -> Iterator[None]:
    """Global random states of torch, numpy and Python come out as they went in, also after an exception."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)


def code_of(function: Any) -> str:
    """What a Python function computes, as far as its byte code and constants say ('' for a built-in one)."""
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    inner = [repr(cell.cell_contents) for cell in function.__closure__ or ()]
    text = f"{code.co_code.hex()} {code.co_consts} {code.co_names} {inner} {function.__defaults__}"
    return re.sub(r" at 0x[0-9a-f]+", "", text)


class Ingredients:
    """Copies of a model and a loss, in eval mode, with the weights ``w`` [P], the buffers and the data they are evaluated on.

    The options are those of ``Problem``. Nothing is evaluated yet; ``probe.examine`` finds out whether it may be.

    Raises FldiagError when model, weights, buffers or data do not fit each other.
    """

    def __init__(self, model: nn.Module, loss: Callable[[Any, Tensor], Tensor], data: Any, params: Any = None,
                 buffers: Any = None, name: str = "", *, dtype: torch.dtype = torch.float32,
                 device: str | torch.device | None = None, memory: int = 2 * 2**30,
                 labels: Mapping[str, Any] | None = None):
        if not isinstance(model, nn.Module):
            raise FldiagError(f"model is a {type(model).__name__}", "give a torch.nn.Module", usage=True)
        if not callable(loss):
            raise FldiagError(f"loss is a {type(loss).__name__}",
                              "give a function of (outputs, y)", usage=True)
        if dtype not in (torch.float32, torch.float64):
            raise FldiagError(f"dtype = {dtype} is too coarse for curvature",
                              "use torch.float32 or torch.float64", usage=True)
        lazy = [n for n, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
        if lazy:
            raise FldiagError(f"parameter {lazy[0]!r} has no shape yet",
                              "run the model once on a batch first")
        self.layout = Layout.of(model)
        self.name, self.dtype, self.memory, self.labels = name, dtype, int(memory), dict(labels or {})
        self.device = torch.device(device_of(device, dtype)) if device is not None else next(model.parameters()).device
        self._data = inputs.as_data(data)
        self.n, self.slice_name = int(self._data.n), str(self._data.name)
        self.w = inputs.weights(model, self.layout, params, dtype, self.device)
        self.buffers = inputs.buffers(model, buffers, params, dtype, self.device)
        with self.guarded():
            try:
                self.module = copy.deepcopy(model)
                own_loss = copy.deepcopy(loss) if isinstance(loss, nn.Module) else loss
            except RuntimeError as error:
                raise FldiagError(f"the model cannot be copied: {error}",
                                  "keep no results of forward as attributes of the module") from error
        self.module.to(self.device, dtype).eval()
        self.criterion = own_loss.to(self.device, dtype) if isinstance(own_loss, nn.Module) else own_loss

    def digest(self) -> str:
        """Changes when the model, loss, weights, buffers, data or precision change."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        names = [re.sub(r" at 0x[0-9a-f]+", "", repr(thing)) for thing in (self.module, self.criterion)]
        names += [code_of(self.criterion), *(code_of(type(m).forward) for m in self.module.modules())]
        with self.guarded():  # in pieces of fixed size: memory must not enter
            data = [digest(*self.read(i, min(i + 1024, self.n))) for i in range(0, self.n, 1024)]
        return digest(names, list(self.layout.names), self.w, self.buffers, data, str(self.dtype))

    def guarded(self) -> contextlib.AbstractContextManager[None]:
        """Context in which global random states may be used and are put back."""
        return untouched_randomness(self.device)

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Examples start..stop-1, fresh from the slice, on the device."""
        return inputs.convert(*self._data.batch(start, stop), self.dtype, self.device)

    def call(self, w: Tensor | dict[str, Tensor], x: Tensor, buffers: dict[str, Tensor] | None = None) -> Any:
        """The model's outputs on x [b, ...] with weights w [P] (and buffers; default: copies of its own)."""
        if buffers is None:
            buffers = {n: b.clone() for n, b in self.buffers.items()}
        views = self.layout.views(w) if isinstance(w, Tensor) else w
        return torch.func.functional_call(self.module, {**views, **buffers}, (x,))
