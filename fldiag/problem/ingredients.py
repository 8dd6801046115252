"""What a Problem is made of: a model, a loss, weights, buffers and data, checked and brought into one form."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import random
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from fldiag.device import device_of
from fldiag.errors import FldiagError
from fldiag.models import state_dict
from fldiag.params import Layout
from fldiag.problem import inputs
from fldiag.problem.checkpointing import without_checkpointing
from fldiag.problem.trees import Tree, arguments, cut, join
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


def unwrap_model(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """The module inside torch.compile, DataParallel and the like, and what was taken off, in words."""
    remarks: list[str] = []
    while True:
        parallel = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
        inner = getattr(model, "module" if parallel else "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model, remarks
        remarks.append(f"the model is taken out of the {type(model).__name__} that wraps it")
        model = inner


def forward_of(model: Any) -> inspect.Signature | None:
    """The arguments of a module's forward; None for what is no module."""
    return (
        inspect.signature(unwrap_model(model)[0].forward) if isinstance(model, nn.Module) else None
    )


def spread_examples(n: int, count: int = 32) -> list[range]:
    """Up to ``count`` examples in four runs spread over n (a slice is often sorted by class)."""
    return (
        [range(i * n // 4, i * n // 4 + count // 4) for i in range(4)] if n > count else [range(n)]
    )


Criterion = Callable[[Any, Any], Tensor]


class Ingredients:
    """Copies of a model and a loss, in eval mode, with the weights ``w`` [P], the buffers and the data they are evaluated on.

    The options are those of ``Problem``. Nothing is evaluated yet; ``probe.examine`` finds out whether it may be.

    Raises FldiagError when model, weights, buffers or data do not fit each other.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Any],
        data: Any,
        params: Any = None,
        buffers: Any = None,
        name: str = "",
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device | None = None,
        memory: int = 2 * 2**30,
        labels: Mapping[str, Any] | None = None,
        trainable: bool = False,
        weight_decay: float = 0.0,
    ):
        if not isinstance(model, nn.Module):
            raise FldiagError(
                f"model is a {type(model).__name__}", "give a torch.nn.Module", usage=True
            )
        model, remarks = unwrap_model(model)
        if not callable(loss):
            raise FldiagError(
                f"loss is a {type(loss).__name__}", "give a function of (outputs, y)", usage=True
            )
        if not 0 <= weight_decay < math.inf:
            raise FldiagError(
                f"weight_decay = {weight_decay}", "give a number of at least 0", usage=True
            )
        if dtype not in (torch.float32, torch.float64):
            raise FldiagError(
                f"dtype = {dtype} is too coarse for curvature",
                "use torch.float32 or torch.float64",
                usage=True,
            )
        if isinstance(model, torch.jit.ScriptModule):
            raise FldiagError(
                "the model is TorchScript, whose weights cannot be replaced for a moment",
                "give the module that it was made of",
                usage=True,
            )
        lazy = [
            n
            for n, p in model.named_parameters()
            if isinstance(p, nn.parameter.UninitializedParameter)
        ]
        if lazy:
            raise FldiagError(
                f"parameter {lazy[0]!r} has no shape yet", "run the model once on a batch first"
            )
        empty = [n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
        if empty:
            raise FldiagError(
                f"{empty[0]!r} of the model lies on the device meta and has no values",
                "make the model on another device, and load its weights",
                usage=True,
            )
        self.layout, self.remarks = Layout.of(model, trainable), remarks
        self.weight_decay = float(weight_decay)
        #: The user's own parameters, which a loss may read.
        self.originals = tuple(weakref.ref(p) for p in model.parameters())
        #: What was established for all problems of this model and loss.
        self.shared: dict[str, Any] = {}
        self.name, self.dtype, self.memory = name, dtype, int(memory)
        self.labels = dict(labels or {})
        self.device = (
            torch.device(device_of(device, dtype))
            if device is not None
            else next(model.parameters()).device
        )
        with self.guarded():  # a loader may shuffle
            self._data = inputs.as_data(data, forward_of(model))
        self.remarks += self.data_remarks
        self.n, self.slice_name = int(self._data.n), str(self._data.name)
        if isinstance(params, Mapping):
            params, prefix = state_dict.without_prefix(dict(params), model)
            self.remarks += (
                [f"the names of the weights fit the model without {prefix!r} before them"]
                if prefix
                else []
            )
        self._take(model, params, buffers)
        with self.guarded():
            try:
                # results that forward left behind, as weight_norm does, are copied without their graph; and a loss that holds
                # the model gets the same copy of it
                memo: dict[int, Any] = {
                    id(t): t.detach().clone()
                    for m in model.modules()
                    for t in vars(m).values()
                    if isinstance(t, Tensor) and t.grad_fn is not None
                }
                self.module = copy.deepcopy(model, memo)
                loss_copy = copy.deepcopy(loss, memo) if isinstance(loss, nn.Module) else loss
            except RuntimeError as error:
                raise FldiagError(
                    f"the model cannot be copied: {error}",
                    "keep no results of forward as attributes of the module",
                ) from error
        if self.weight_decay:
            self.remarks.append(
                f"the loss includes weight decay, {self.weight_decay:g}/2 ‖w‖² over all weights"
            )
        self.module.to(self.device, dtype).eval()
        for m in self.module.modules():
            if isinstance(m, nn.Embedding | nn.EmbeddingBag):
                m.sparse = False  # sparse gradients have no derivatives
        self.user_loss = (
            loss_copy.to(self.device, dtype) if isinstance(loss_copy, nn.Module) else loss_copy
        )

    def _take(self, model: nn.Module, params: Any, buffers: Any) -> None:
        """Weights and buffers, checked."""
        layout = Layout.of(model)
        self.w = inputs.weights(model, layout, params, self.dtype, self.device)
        views = {} if self.layout.size == layout.size else layout.views(self.w)
        #: Parameters that are no weights here, by name.
        self.frozen = {n: view.clone() for n, view in views.items() if n not in self.layout.names}
        if self.frozen:
            self.w = self.layout.row(views)
        self.buffers = inputs.buffers(model, buffers, params, self.dtype, self.device)

    def at(
        self,
        params: Any,
        buffers: Any = None,
        *,
        name: str | None = None,
        labels: Mapping[str, Any] | None = None,
    ) -> Self:
        """The same loss on the same examples around other weights and buffers (of the whole model, as for ``Problem``)."""
        problem = copy.copy(self)
        problem._take(self.module, params, buffers)
        problem.originals = self.originals
        problem.name = self.name if name is None else name
        problem.labels = dict(self.labels if labels is None else labels)
        return problem

    @property
    def criterion(self) -> Criterion:
        """The mean over the examples of a batch, of which the loss of the slice is the mean: see ``objective``."""
        raise NotImplementedError

    def digest(self) -> str:
        """Changes when the model, loss, weights, buffers, data or precision change."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        names = [
            re.sub(r" at 0x[0-9a-f]+", "", repr(thing)) for thing in (self.module, self.user_loss)
        ]
        names += [
            code_of(self.user_loss),
            *(code_of(type(m).forward) for m in self.module.modules()),
        ]
        with self.guarded():  # in pieces of fixed size: memory must not enter
            data = [digest(*self.read(i, min(i + 1024, self.n))) for i in range(0, self.n, 1024)]
        return digest(
            names,
            list(self.layout.names),
            self.w,
            self.buffers,
            data,
            str(self.dtype),
            *([self.frozen] if self.frozen else []),
            *(["weight decay", self.weight_decay] if self.weight_decay else []),
        )

    def penalty(self, w: Tensor) -> float:
        """Weight decay's part of the loss at w [P]: half its coefficient times the squared norm."""
        return (
            self.weight_decay / 2 * float(w.double().square().sum()) if self.weight_decay else 0.0
        )

    @property
    def in_memory(self) -> bool:
        """Whether the examples themselves were given, not a slice of a data set."""
        return isinstance(self._data, inputs.TensorData | inputs.IndexedData)

    @property
    def inputs(self) -> str:
        """What was done to the inputs before the model sees them, in words."""
        return str(getattr(self._data, "inputs", "as passed"))

    @property
    def data_remarks(self) -> tuple[str, ...]:
        """Which entries of the data are inputs and which is the target, in words, where there is a choice."""
        return getattr(self._data, "remarks", ())

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Context in which user code runs: global random states may be used and are put back, the loss is one function, and
        computes in the problem's precision whatever autocast is on around the call.

        Without gradients, torch's encoder layers would take another way (the "fast path"), on which padded places are zero; the
        loss that is evaluated would not be the one that is differentiated.
        """
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with untouched_randomness(self.device), torch.autocast(self.device.type, enabled=False):
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)

    def read(self, start: int, stop: int) -> tuple[Tree, Tree]:
        """Examples start..stop-1, fresh from the slice, on the device."""
        return inputs.convert(*self._data.batch(start, stop), self.dtype, self.device)

    def sample(self, count: int) -> tuple[Tree, Tree]:
        """Up to ``count`` examples spread over the slice."""
        parts = [self.read(r.start, r.stop) for r in spread_examples(self.n, count)]
        x = join([p[0] for p in parts])
        return x, x if parts[0][1] is parts[0][0] else join([p[1] for p in parts])

    def targets(self) -> Iterator[Tree]:
        """The targets of the whole slice, in pieces of fixed size."""
        y = getattr(self._data, "y", None)
        for i in range(0, self.n, 1024):
            stop = min(i + 1024, self.n)
            yield self.read(i, stop)[1] if y is None else cut(y, slice(i, stop))

    @cached_property
    def _forward(self) -> inspect.Signature:
        return inspect.signature(self.module.forward)

    def arguments(self, x: Tree) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """How the model is called on x."""
        return arguments(self._forward, x)

    def loaded(self, w: Tensor) -> nn.Module:
        """A copy of the model with the weights w [P] as its own parameters, those that are no weights frozen."""
        module, views = copy.deepcopy(self.module), self.layout.views(w)
        with torch.no_grad():
            for name, p in module.named_parameters():
                p.copy_(self.frozen[name] if name in self.frozen else views[name])
                p.requires_grad_(name in views)
            for name, b in module.named_buffers():
                b.copy_(self.buffers[name])
        return module

    def call(
        self,
        w: Tensor | dict[str, Tensor],
        x: Tree,
        buffers: dict[str, Tensor] | None = None,
    ) -> Any:
        """The model's outputs on x [b, ...] with weights w [P] (and buffers; default: copies of its own)."""
        if buffers is None:
            buffers = {n: b.clone() for n, b in self.buffers.items()}
        views = self.layout.views(w) if isinstance(w, Tensor) else w
        tensors = {**self.frozen, **views, **buffers}
        with without_checkpointing():
            return torch.func.functional_call(self.module, tensors, *self.arguments(x))
