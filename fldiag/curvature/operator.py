"""A curvature matrix as a sum over batches: what every form of the product shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fldiag.errors import FldiagError

#: Numbers added at a time.
PIECE = 1 << 17


def add(total: Tensor, part: Tensor, share: float) -> None:
    """``total += share * part``, total (contiguous) in float64. On the CPU in pieces that stay in the cache: a float64 copy of
    all of a large ``part`` is fresh memory every time, which takes longer than the sum."""
    if total.device.type != "cpu" or part.dtype == total.dtype:
        total.add_(part, alpha=share)
        return
    wide = torch.empty(min(PIECE, part.numel()), dtype=total.dtype, device=total.device)
    for place, piece in zip(
        total.view(-1).split(PIECE), part.reshape(-1).split(PIECE), strict=True
    ):
        place.add_(wide[: len(piece)].copy_(piece), alpha=share)


def not_finite() -> FldiagError:
    """The error of a product that holds NaN or infinite values."""
    return FldiagError(
        "a Hessian-vector product is not finite although loss and gradient are: a norm or square root at 0, or "
        "weights that diverged",
        "keep the argument off 0, for example sqrt(x**2 + 1e-12); use dtype float64, or diagnose weights from before the "
        "training diverged",
    )


def finite(product: Tensor) -> Tensor:
    """The product. Raises FldiagError where it holds NaN or infinite values."""
    if not bool(torch.isfinite(torch.linalg.vector_norm(product))):
        raise not_finite()
    return product


class Operator:
    """``sum_i shares[i] * M_i + shift * I`` with M_i the [P, P] curvature of batch i, as ``v [P] -> Mv [P]`` in float64.

    A form of the product says how batch i is prepared (what does not depend on v: a graph, activations) and
    how the prepared batch multiplies. What was prepared for a batch stays for the next product while the
    first ``keep`` batches last; the rest is prepared anew
    every time. ``products`` counts the products, ``form`` names the form. ``w`` is not copied, and must not change meanwhile.
    """

    form = ""
    shift = 0.0

    def __init__(self, w: Tensor, shares: Sequence[float], keep: int = 0):
        # under inference_mode it could not be differentiated at
        self._w = w.clone() if w.is_inference() else w.detach()
        self._shares, self._keep = list(shares), keep
        self._prepared: dict[int, Any] = {}
        self._buffer: Tensor | None = None
        self.products = 0

    @property
    def size(self) -> int:
        return self._w.numel()

    def _prepare(self, i: int) -> Any:
        raise NotImplementedError

    def _product(self, prepared: Any, v: Tensor) -> Any:
        """M_i v as ``_add`` takes it, None for zero."""
        raise NotImplementedError

    def __call__(self, v: Tensor) -> Tensor:
        """M v [P] in float64; the batches are summed in float64.

        Raises FldiagError when v has another size, or when a part of the model has no second derivative.
        """
        if v.shape != self._w.shape:
            raise FldiagError(
                f"the vector has shape {list(v.shape)}, the weights have {list(self._w.shape)}",
                "give a vector as long as the weights",
            )
        total = (
            self.shift * v.detach().double()
            if self.shift
            else torch.zeros_like(self._w, dtype=torch.float64)
        )
        v = self._narrow(v.detach())
        with torch.autocast(self._w.device.type, enabled=False):
            for i, share in enumerate(self._shares):
                prepared = self._prepared[i] if i in self._prepared else self._prepare(i)
                if i < self._keep:
                    self._prepared[i] = prepared
                part = self._product(prepared, v)
                if part is not None:
                    self._add(total, part, share)
        self.products += 1
        return total

    def _narrow(self, v: Tensor) -> Tensor:
        """v in the weights' precision, in memory that is used again: fresh memory takes longer than the conversion."""
        if (v.dtype, v.device) == (self._w.dtype, self._w.device):
            return v
        if self._buffer is None:
            self._buffer = torch.empty_like(self._w)
        return self._buffer.copy_(v)

    def _add(self, total: Tensor, part: Any, share: float) -> None:
        add(total, part, share)

    def release(self) -> None:
        """Frees what was kept; the operator still works."""
        self._prepared.clear()
        self._buffer = None


class OperatorBlock:
    """The rows and columns ``index`` [p] of an operator: its diagonal block on some of the weights."""

    def __init__(self, operator: Operator, index: Tensor):
        self._operator, self._index = operator, index

    @property
    def size(self) -> int:
        return self._index.numel()

    @property
    def products(self) -> int:
        return self._operator.products

    def __call__(self, v: Tensor) -> Tensor:
        """[p] -> [p] in float64."""
        padded = torch.zeros(self._operator.size, dtype=torch.float64, device=v.device)
        padded[self._index] = v.double()
        return self._operator(padded)[self._index]
