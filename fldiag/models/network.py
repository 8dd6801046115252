"""How rows of weights meet inputs: one spelling for a single model (K = 1) and a stack of K clients.

A chain of common layers (any ``nn.Sequential``) is evaluated for all rows at once (``stacked.py``). Any other module is called
functionally, one row at a time. Both forms are the same function (a test holds them together), so the choice is one of speed.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fldiag.errors import FldiagError
from fldiag.models.stacked import STACKED, Views, chain_of, hooked, pool_first
from fldiag.params import Layout

Buffers = dict[str, Tensor]


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
    """A module's function of weights and inputs: ``network.bind(w)(x)``. Holds its own copy of the module, never the caller's.

    Bound to weights [K, P] it takes inputs [K, B, ...] to ``features`` [K, B, ...] and logits [K, B, C].

    ``has_split``: the model is head(features(x)) with a known head: the last child that has parameters, of
    a chain or of a module with a ``features`` method.
    ``staged``: the module shows the maps after each of its stages (``stages``, ``pooled``; see residual.py).
    ``batch_dependent``: some layer uses statistics of the batch even in eval mode.
    """

    rows: int
    views: Views
    _state: Buffers
    _train: bool

    def __init__(self, module: nn.Module, *, precision: str = "fp32"):
        self.layout, self.precision = Layout.of(module), precision
        self.module = copy.deepcopy(module).requires_grad_(False)
        self.buffers = {n: b.detach().clone() for n, b in module.named_buffers()}
        chain, head = chain_of(self.module), self.layout.head_name
        self.stackable = chain is not None and not self.buffers
        self.chain = pool_first(chain or [])
        starts = [
            i for i, (n, _) in enumerate(self.chain) if head and f"{n}.".startswith(f"{head}.")
        ]
        self._cut = min(starts, default=len(self.chain))
        # maps of several models lie side by side as channels, which nobody but a layer of the chain can read
        has_maps = any(isinstance(m, nn.Flatten) for _, m in self.chain[self._cut :])
        has_features = callable(getattr(module, "features", None)) and not hooked(module)
        self.has_split = self.layout.has_head and (
            (self.stackable and not has_maps) or has_features
        )
        self._head = self.layout.part(self.cut, self.size)
        self.staged = all(callable(getattr(module, name, None)) for name in ("stages", "pooled"))
        self._call = _Split(self.module, head)
        self.batch_dependent = batch_dependent(module)

    @property
    def size(self) -> int:
        return self.layout.size

    @property
    def cut(self) -> int:
        """Where the head's weights begin in the row; its end, where there is no split."""
        return self.size - (self.layout.head_size if self.has_split else 0)

    def autocast(self, device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16")

    def bind(self, w: Tensor, buffers: Buffers | None = None, *, train: bool = False) -> Network:
        """The function of the inputs for rows ``w`` [K, P]; K > 1 only if the network is ``stackable``.

        ``buffers`` (name -> [1, ...]) are updated in place in training mode.
        """
        if w.shape[0] > 1 and not self.stackable:
            raise FldiagError("this model cannot be stacked", "train.stack = 'off' or 'auto'")
        bound = copy.copy(self)
        bound.rows, bound.views = w.shape[0], self.layout.views(w)
        bound._state, bound._train = buffers or {}, train
        return bound

    def __call__(self, x: Tensor) -> Tensor:
        if self.stackable or self.has_split:
            return self.head(self.features(x))
        return self._functional("all", x)

    def features(self, x: Tensor) -> Tensor:
        """What the head sees."""
        if not self.stackable:
            return self._functional("features", x)
        if x.dim() == 5 and not isinstance(self.chain[0][1], nn.Flatten):
            # as channels: [K, B, C, H, W] -> [B, K*C, H, W]
            x = x.transpose(0, 1).flatten(1, 2).to(memory_format=torch.channels_last)
        return self._run(slice(0, self._cut), x, self.views)

    def head(self, z: Tensor, weights: Tensor | None = None) -> Tensor:
        """Logits from features; ``weights`` [K, H] replaces the head's own parameters."""
        views = self.views
        if weights is not None:
            views = {**views, **self._head.views(weights)}
        if not self.stackable:
            return self._functional("head", z, views)
        out = self._run(slice(self._cut, None), z, views)
        return out.float() if self.precision == "bf16" else out

    def call(self, method: str, x: Any, views: Views | None = None, **options: Any) -> Any:
        """A method of the module on inputs without the leading row (a single row of weights)."""
        views = views or self.views
        if isinstance(x, Tensor) and x.dim() == 4:
            x = x.to(memory_format=torch.channels_last)
        tensors = {f"m.{n}": v[0] for n, v in (*views.items(), *self._state.items())}
        self._call.train(self._train)
        with self.autocast(next(iter(views.values())).device):
            return torch.func.functional_call(self._call, tensors, (method, x), options)

    def _run(self, part: slice, x: Tensor, views: Views) -> Tensor:
        with self.autocast(x.device):
            for name, m in self.chain[part]:
                x = STACKED[type(m)](m, name, views, x, self.rows)
        return x

    def _functional(self, method: str, x: Tensor, views: Views | None = None) -> Tensor:
        out = self.call(method, x[0], views)
        if not isinstance(out, Tensor):
            raise FldiagError(
                f"the model returns a {type(out).__name__}, and here one tensor [n, outputs] is needed",
                "let forward return it; or give the inputs by name, ({'x': x}, y), and the entry 'logits' is taken",
            )
        out = out.unsqueeze(0)
        return out.float() if self.precision == "bf16" and method != "features" else out

    # -- what is tried once, on some inputs

    def confirm(self, w: Tensor, buffers: Buffers, x: Tensor) -> None:
        """Try a module that is no chain on inputs x [1, B, ...]: give up a split where it does more than head(features(x)).

        Raises FldiagError where outputs or gradients are not those of the weights w [1, P].
        """
        if self.stackable:
            return
        if self.has_split:
            modes = (False, True)
            self.has_split = all(self.agrees_with_split(w, buffers, x, train=t) for t in modes)
        own = [(p, p.clone()) for p in self.module.parameters()]
        before = self._try("all", w, buffers, x)
        for p, _ in own:
            p.fill_(torch.nan)
        try:
            with torch.enable_grad():
                at = w.clone().requires_grad_()
                after = self._try("all", at, buffers, x)
                (g,) = torch.autograd.grad(after.sum(), at)
            is_sound = bool(after.isfinite().all()) and bool(g.isfinite().all())
        except RuntimeError:  # checkpointing notices it in some cases
            is_sound = False
        finally:
            for p, value in own:
                p.copy_(value)
        if bool(before.isfinite().all()) and not is_sound:
            raise FldiagError(
                "the model's outputs or gradients are not those of the weights at which it is evaluated: it reads weights "
                "that the module itself holds, as gradient checkpointing does",
                "switch gradient checkpointing off (gradient_checkpointing_disable())",
            )

    def agrees_with_split(self, w: Tensor, buffers: Buffers, x: Tensor, *, train: bool) -> bool:
        """Whether the module gives head(features(x)) on these inputs, in training or evaluation mode: where the two differ by no
        more than rounding explains, for outputs of their size."""
        tolerance = 1e-2 if self.precision == "bf16" else 1e-9 if w.dtype == torch.float64 else 1e-4
        expected = self._try("all", w, buffers, x, train).double()
        try:
            split = self._try("split", w, buffers, x, train).double()
        except (RuntimeError, TypeError, ValueError):
            return False
        size = float(expected.nan_to_num(0, 0, 0).abs().max())
        return split.shape == expected.shape and torch.allclose(
            split, expected, rtol=0, atol=tolerance * size, equal_nan=True
        )

    def _try(self, form: str, w: Tensor, buffers: Buffers, x: Tensor, train: bool = True) -> Tensor:
        """The outputs as ``all`` or as ``split``, with the same random numbers each time: dropout in between shows."""
        bound = self.bind(w, {n: b.clone() for n, b in buffers.items()}, train=train)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return bound._functional("all", x) if form == "all" else bound.head(bound.features(x))


def batch_dependent(module: nn.Module) -> bool:
    """Whether an example's output depends on the others of its batch, also in eval mode, as far as the layers tell."""
    return any(isinstance(m, _BatchNorm) and m.running_mean is None for m in module.modules())


def forward_macs(module: nn.Module, shape: tuple[int, ...]) -> int:
    """Multiply-adds of one example: half of the operations that torch counts, of matrix products and convolutions."""
    from torch.utils.flop_counter import FlopCounterMode  # a tenth of a second

    probe = copy.deepcopy(module).cpu().eval()
    tokens = any(isinstance(m, nn.Embedding) for m in probe.modules())
    dtype = torch.int64 if tokens else next(probe.parameters()).dtype
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        probe(torch.zeros(1, *shape, dtype=dtype))
    return int(counter.get_total_flops()) // 2
