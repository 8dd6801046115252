"""How rows of weights meet inputs: one spelling for a single model (K = 1) and a stack of K clients.

A chain of common layers (any ``nn.Sequential``) is evaluated for all rows at once: affine layers as one
batched product, convolutions as one grouped convolution. Any other module is called functionally, one row
at a time. Both forms are the same function (a test holds them together), so the choice is one of speed.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fldiag.errors import FldiagError
from fldiag.models.layers import (
    LAYERS,
    Views,
    batch_dependent,
    hooked,
    leaves,
    pool_first,
    rules,
)
from fldiag.params import Layout


def chain_of(module: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """The layers of nested ``nn.Sequential``s in order, or None when the module is anything else or a layer has no
    rule for several models side by side."""
    if type(module).forward is not nn.Sequential.forward:
        return None
    chain = leaves(module)
    if chain is None or not all(
        rules(m).stacked is not None and rules(m).fits(m) for _, m in chain
    ):
        return None
    return chain


class _Split(nn.Module):
    """Lets ``functional_call`` reach the head and every method of a module (``features``, ``stages``, ...)."""

    def __init__(self, module: nn.Module, head: str):
        super().__init__()
        self.m, self.head = module, head

    def forward(self, method: str, x: Any, **options: Any) -> Any:
        if method == "all":
            return self.m(x)
        return getattr(self.m, self.head if method == "head" else method)(x, **options)


class Network:
    """A module's function of (weights, inputs). Holds its own copy of the module, never the caller's.

    ``has_split``: the model is head(features(x)) with a known head: the last child that has parameters, of
    a chain or of a module with a ``features`` method.
    ``staged``: the module shows the maps after each of its stages (``stages``, ``pooled``; see residual.py).
    ``batch_dependent``: some layer uses statistics of the batch even in eval mode.
    """

    def __init__(self, module: nn.Module, *, precision: str = "fp32"):
        self.layout = Layout.of(module)
        self.module = copy.deepcopy(module).requires_grad_(False)
        chain = chain_of(self.module)
        self.chain = None if chain is None else pool_first(chain)
        self.precision = precision
        head = self.layout.head_name
        self.buffers = {n: b.detach().clone() for n, b in module.named_buffers()}
        self.stackable = self.chain is not None and not self.buffers
        chain = self.chain or []
        self.takes_rows = bool(chain) and rules(chain[0][1]).takes_rows
        self._cut = next(
            (i for i, (n, _) in enumerate(chain) if head and f"{n}.".startswith(f"{head}.")),
            len(chain),
        )
        # maps of several models lie side by side as channels, which nobody but a layer of the chain can read
        has_maps = any(isinstance(m, nn.Flatten) for _, m in chain[self._cut :])
        self.has_split = self.layout.has_head and (
            (self.stackable and not has_maps)
            or (callable(getattr(self.module, "features", None)) and not hooked(self.module))
        )
        self.staged = all(
            callable(getattr(self.module, name, None)) for name in ("stages", "pooled")
        )
        self._call = _Split(self.module, head)
        self.batch_dependent = batch_dependent(module)

    @property
    def size(self) -> int:
        return self.layout.size

    @property
    def cut(self) -> int:
        """Where the head's weights begin in the row; its end, where there is no split."""
        return self.size - (self.layout.head_size if self.has_split else 0)

    def bind(
        self, w: Tensor, buffers: dict[str, Tensor] | None = None, *, train: bool = False
    ) -> Bound:
        """The function of the inputs for rows ``w`` [K, P]; K > 1 only if the network is ``stackable``.

        ``buffers`` (name -> [1, ...]) are updated in place in training mode.
        """
        if w.shape[0] > 1 and not self.stackable:
            raise FldiagError("this model cannot be stacked", "train.stack = 'off' or 'auto'")
        return Bound(self, w, buffers, train)

    def confirm_split(self, w: Tensor, buffers: dict[str, Tensor], x: Tensor) -> None:
        """Give up the split of a module that does more than head(features(x)), on inputs x [1, B, ...]: where the two
        differ by more than rounding explains, for outputs of their size."""
        if self.stackable or not self.has_split:
            return
        self.has_split = all(
            self.agrees_with_split(w, buffers, x, train=train) for train in (False, True)
        )

    def agrees_with_split(
        self, w: Tensor, buffers: dict[str, Tensor], x: Tensor, *, train: bool
    ) -> bool:
        """Whether the module gives head(features(x)) on these inputs, in training or evaluation mode."""
        tolerance = 1e-2 if self.precision == "bf16" else 1e-9 if w.dtype == torch.float64 else 1e-4
        with torch.random.fork_rng(devices=[]):
            # the same random numbers twice: dropout between features and head shows
            bound = self.bind(w, {n: b.clone() for n, b in buffers.items()}, train=train)
            torch.manual_seed(0)
            with self.autocast(x.device):
                expected = bound._functional("all", x).double()
            bound = self.bind(w, {n: b.clone() for n, b in buffers.items()}, train=train)
            torch.manual_seed(0)
            try:
                with self.autocast(x.device):
                    split = bound.head(bound.features(x)).double()
            except (RuntimeError, TypeError, ValueError):
                return False
        size = float(expected.nan_to_num(0, 0, 0).abs().max())
        return split.shape == expected.shape and torch.allclose(
            split, expected, rtol=0, atol=tolerance * size, equal_nan=True
        )

    def autocast(self, device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16")


class Bound:
    """A network with weights: inputs [K, B, ...] -> features [K, B, ...] -> logits [K, B, C]."""

    def __init__(self, network: Network, w: Tensor, buffers: dict[str, Tensor] | None, train: bool):
        self.net, self.rows, self.train, self.buffers = network, w.shape[0], train, buffers
        self._w = w

    @cached_property
    def views(self) -> Views:
        return self.net.layout.views(self._w)

    def __call__(self, x: Tensor) -> Tensor:
        if self.net.stackable or self.net.has_split:
            return self.head(self.features(x))
        with self.net.autocast(x.device):
            return self._functional("all", x)

    def features(self, x: Tensor) -> Tensor:
        """What the head sees."""
        with self.net.autocast(x.device):
            if self.net.stackable:
                if x.dim() == 5 and not self.net.takes_rows:
                    # as channels: [K, B, C, H, W] -> [B, K*C, H, W]
                    x = x.transpose(0, 1).flatten(1, 2).to(memory_format=torch.channels_last)
                return self._run(slice(0, self.net._cut), x, self.views)
            return self._functional("features", x)

    def call(self, name: str, x: Any, **options: Any) -> Any:
        """Method ``name`` of the module on inputs without the leading row (a single row of weights)."""
        if isinstance(x, Tensor) and x.dim() == 4:
            x = x.to(memory_format=torch.channels_last)
        with self.net.autocast(self.views[self.net.layout.names[0]].device):
            return self._apply(name, x, self.views, **options)

    def head(self, z: Tensor, weights: Tensor | None = None) -> Tensor:
        """Logits from features; ``weights`` [K, H] replaces the head's own parameters."""
        views = self.views
        layout = self.net.layout
        if weights is not None:
            prefix = layout.head_name + "."
            shapes = {
                n: shape
                for n, shape in zip(layout.names, layout.shapes, strict=True)
                if f"{n}.".startswith(prefix)
            }
            tensors = weights.split([shape.numel() for shape in shapes.values()], dim=-1)
            views = {
                **views,
                **{
                    n: t.reshape(t.shape[:-1] + shape)
                    for (n, shape), t in zip(shapes.items(), tensors, strict=True)
                },
            }
        with self.net.autocast(z.device):
            if self.net.stackable:
                out = self._run(slice(self.net._cut, None), z, views)
                return out.float() if self.net.precision == "bf16" else out
            return self._functional("head", z, views)

    def _run(self, part: slice, x: Tensor, views: Views) -> Tensor:
        for name, m in (self.net.chain or [])[part]:
            x = LAYERS[type(m)].stacked(m, name, views, x, self.rows)  # type: ignore[misc]  # chain_of took no others
        return x

    def _apply(self, method: str, x: Any, views: Views, **options: Any) -> Any:
        tensors = {f"m.{n}": v[0] for n, v in (*views.items(), *(self.buffers or {}).items())}
        call = self.net._call
        call.train(self.train)
        with without_checkpointing():
            return torch.func.functional_call(call, tensors, (method, x), options)

    def _functional(self, method: str, x: Tensor, views: Views | None = None) -> Tensor:
        x = x[0]
        if x.dim() == 4:
            x = x.to(memory_format=torch.channels_last)
        out = self._apply(method, x, views or self.views)
        if not isinstance(out, Tensor):
            raise FldiagError(
                f"the model returns a {type(out).__name__}, and here one tensor [n, outputs] is needed",
                "let forward return it; or give the inputs by name, ({'x': x}, y), and the entry 'logits' is taken",
            )
        out = out.unsqueeze(0)
        return out.float() if self.net.precision == "bf16" and method != "features" else out


def forward_macs(module: nn.Module, shape: tuple[int, ...]) -> int:
    """Multiply-adds of one example: half of the operations that torch counts, of matrix products and convolutions."""
    probe = copy.deepcopy(module).cpu().eval()
    tokens = any(isinstance(m, nn.Embedding) for m in probe.modules())
    dtype = torch.int64 if tokens else next(probe.parameters()).dtype
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        probe(torch.zeros(1, *shape, dtype=dtype))
    return int(counter.get_total_flops()) // 2


# Gradient checkpointing drops what a layer computes and evaluates the layer again in the backward pass, with the parameters that
# the module then has: not those that ``functional_call`` had put in their place. The gradient would silently be that of other
# weights. So where weights are put in place, what a layer computes is kept, as if the model did not ask for checkpointing.


def _run_layer(layer: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    return layer(*args)


def _no_context(*args: Any, **options: Any) -> Iterator[None]:
    yield


#: What ``checkpoint`` calls (use_reentrant=False: around a layer that it runs itself, by versions of torch), and what instead.
CHECKPOINTING: list[tuple[Any, str, Callable[..., Any]]] = [
    (checkpoint.CheckpointFunction, "apply", _run_layer),
    *(
        (checkpoint, name, _no_context)
        for name in (
            "_checkpoint_without_reentrant_generator",
            "_checkpoint_without_reentrant_generator_impl",
        )
        if hasattr(checkpoint, name)
    ),
]
_lock, _contexts, _restore = threading.Lock(), 0, contextlib.ExitStack()


@contextlib.contextmanager
def without_checkpointing() -> Iterator[None]:
    """In this context checkpointed layers keep what they compute; also in other threads, for which that changes no value."""
    global _contexts
    with _lock:
        _contexts += 1
        if _contexts == 1:
            for owner, name, function in CHECKPOINTING:
                if name in vars(owner):
                    _restore.callback(setattr, owner, name, vars(owner)[name])
                else:  # inherited
                    _restore.callback(delattr, owner, name)
                setattr(owner, name, function)
    try:
        yield
    finally:
        with _lock:
            _contexts -= 1
            if not _contexts:
                _restore.close()
