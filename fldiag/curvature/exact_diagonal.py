"""The exact diagonal and trace of the Gauss-Newton matrix, from squares of per-example gradients.

With the Hessian of an example's loss in its outputs written as S S^T, the matrix is the sum over examples n
and columns c of G_nc G_nc^T, where G_nc is the gradient of s_nc^T z_n (Dangel, Kunstner and Hennig 2020, DiagGGN).
Per column one cotangent pass to the layers' outputs is needed, and no pass to the weights. For networks that
are piecewise linear in each layer's weights (``piecewise_linear.obstacle``) this is the diagonal of the Hessian.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fldiag.curvature.layer_rules import rules

#: More outputs than these make the Hessian of the loss in the outputs too large to be factored.
OUTPUTS = 1024


def factors(
    criterion: Callable[[Tensor, Tensor], Tensor], z: Tensor, y: Tensor
) -> list[tuple[float, Tensor]]:
    """(sign, S [b, r, ...]) with the Hessian of the loss in z [b, ...] = sum sign * S_n^T S_n, example by example.

    One pair for a convex loss; empty for a loss linear in z. Columns that are zero for all examples are left
    out (the last one of cross entropy). Raises ValueError when examples are coupled or have too many outputs.
    """
    b, size = len(z), z[0].numel()
    if size > OUTPUTS:
        raise ValueError(f"{size} outputs")
    try:  # softmax of confident outputs cancels: 1 - p has no digits left in single precision
        h, *products = _curvature(criterion, z.detach().double(), y)
    except RuntimeError as error:
        if not any(word in str(error) for word in ("dtype", "Double", "double")):
            raise
        # the loss holds single precision tensors of its own
        h, *products = _curvature(criterion, z.detach(), y)
    if not _agree(*products):
        # Where every example is fitted, both are rounding; whether a loss couples examples shows at mild outputs.
        mild = z.detach() / max(1.0, float(z.detach().abs().max()))
        if not _agree(*_curvature(criterion, mild.to(h.dtype), y)[1:]):
            raise ValueError("the loss couples the examples of a batch")
    values, vectors = torch.linalg.eigh((h + h.transpose(1, 2)) / 2)
    pairs = []
    for sign in (1.0, -1.0):
        part = (sign * values).clamp_min(0)
        part = part * (part > 1e-12 * values.abs().amax(1, keepdim=True))
        columns = (part > 0).any(0)
        if bool(columns.any()):
            s = (vectors * part.sqrt().unsqueeze(1))[:, :, columns].transpose(1, 2)
            pairs.append((sign, s.reshape(b, -1, *z.shape[1:]).to(z)))
    return pairs


def _agree(of_batch: Tensor, of_examples: Tensor) -> bool:
    tolerance = 1e-4 * float(of_examples.abs().max())
    return torch.allclose(of_batch, of_examples, rtol=1e-4, atol=tolerance)


def _curvature(
    criterion: Callable[[Tensor, Tensor], Tensor], z: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The Hessian in z [b, ...] example by example, [b, D, D]; its product with some vector, taken at once for
    the whole batch and from those blocks."""
    b, size = len(z), z[0].numel()
    with torch.enable_grad():
        at = z.requires_grad_()
        slope = torch.autograd.grad(criterion(at, y), at, create_graph=True)[0]

    def column(v: Tensor) -> Tensor:
        if not slope.requires_grad:  # a linear loss
            return torch.zeros_like(v)
        return torch.autograd.grad(slope, at, v.reshape(z.shape), retain_graph=True)[0].reshape(
            b, size
        )

    eye = torch.eye(size, dtype=z.dtype, device=z.device)
    h = torch.stack([column(e.expand(b, -1)) for e in eye], 2).double()
    # any vector would do
    v = torch.cos(torch.arange(b * size, device=z.device)).reshape(b, size).to(z)
    return h, column(v).double(), (h @ v.double().unsqueeze(2)).squeeze(2)


class _LayerRecord:
    """Inputs and outputs of the affine layers in one evaluation."""

    def __init__(self) -> None:
        self.layers: list[tuple[str, nn.Module, Tensor, Tensor]] = []
        self.versions: list[int] = []

    def hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]:
        def add(m: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
            a = rules(m).squares_input(m, inputs[0].detach())
            out = out if out.requires_grad else out.detach().requires_grad_()
            self.layers.append((name, m, a, out))
            self.versions.append(a._version)
            return out.clone()  # an operation in place after the layer must not change the record

        return add

    def changed(self) -> bool:
        return any(
            a._version != v for (_, _, a, _), v in zip(self.layers, self.versions, strict=True)
        )


@contextlib.contextmanager
def _watched(module: nn.Module, only: Collection[str] | None) -> Iterator[_LayerRecord]:
    record = _LayerRecord()
    handles = [
        m.register_forward_hook(record.hook(name))
        for name, m in module.named_modules()
        if rules(m).squares is not None
        and any(True for _ in m.parameters())
        and (only is None or name in only)
    ]
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()


def batch(
    module: nn.Module,
    call: Callable[[Tensor], Tensor],
    criterion: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    *,
    total: bool = False,
    only: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """Per weight tensor the diagonal (or, with ``total``, the trace) of the Gauss-Newton matrix of the mean loss
    of one batch, in float64.

    ``call`` evaluates ``module`` on x with weights of which none may require a gradient. ``only``: names of affine layers
    (default: all).
    Raises ValueError for a loss that couples examples, or a model that changes the input of a layer in place.
    """
    with torch.enable_grad(), _watched(module, only) as record:
        z = call(x)
        if not isinstance(z, Tensor):
            raise ValueError(f"the model returns a {type(z).__name__}")
        parts = factors(criterion, z, y)
    if record.changed():
        raise ValueError("the model changes the input of a layer in place")
    if len({name for name, _, _, _ in record.layers}) < len(record.layers):
        raise ValueError("a layer is used twice")
    outs = [out for _, _, _, out in record.layers]
    sums: dict[str, Tensor] = {}
    for sign, s in parts:
        # one pass per column; the cotangents of all of them side by side, [b, r, ...] a layer
        passes = [
            torch.autograd.grad(z, outs, s[:, c], retain_graph=True, allow_unused=True)
            for c in range(s.shape[1])
        ]
        for i, (name, m, a, _) in enumerate(record.layers):
            rows = [p[i] for p in passes]
            if rows[0] is None:
                continue
            g = torch.stack(rows, 1)
            for tensor, value in rules(m).squares(m, a, g, total).items():  # type: ignore[misc]  # watched for having one
                key = f"{name}.{tensor}" if name else tensor
                sums[key] = sums.get(key, 0.0) + sign * value.double()
    return sums
