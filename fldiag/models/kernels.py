"""The sums and products of affine and convolutional layers that are large enough for their algorithm to matter.

Affine products of one model or of K side by side, convolutions of K models as batched products over patches, and sums of
squared per-example gradients. ``layers.py`` says what a layer computes; here is how.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fldiag.models.links import by_model

_convolution_backward = torch.ops.aten.convolution_backward

#: Multiplications in a product from which on the choice of kernel shows.
LARGE_PRODUCT = 2**20
#: Numbers in the patches of one model's minibatch above which its convolution is taken alone: it then fills the processor.
LARGEST_PATCHES = 2**19
#: Channels below which the rows of an image are longer stretches of memory than the rows of a patch.
FEW_CHANNELS = 4
#: Bytes of one piece of a sum of squares; larger ones fall out of the processor's caches.
PIECE = 8 * 2**20


def product(a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """a [b, I], weight [O, I], bias [O] -> [b, O]."""
    return _onednn(a, weight, bias) if by_onednn(a, weight) else F.linear(a, weight, bias)


def products(a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``product`` of K models: a [K, b, I], weight [K, O, I], bias [K, O] -> [K, b, O]."""
    if by_onednn(a, weight):
        biases = [None] * len(a) if bias is None else bias
        return torch.stack([_onednn(*model) for model in zip(a, weight, biases, strict=True)])
    if bias is None:
        return torch.bmm(a, weight.mT)
    return torch.baddbmm(bias.unsqueeze(1), a, weight.mT)


def _onednn(a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    dense = None if bias is None else bias.contiguous()  # it reads a bias as one stretch of memory
    return torch.ops.mkldnn._linear_pointwise(a, weight, dense, "none", [], "")


def by_onednn(a: Tensor, weight: Tensor) -> bool:
    """Whether a product [..., b, I] by [..., O, I] is oneDNN's: large ones in float32 without a graph on a CPU, as MKL's take
    up to twice as long on processors that are not Intel's. (PyTorch asks oneDNN for bfloat16 by itself, also under autocast,
    which the kernel itself would not follow.)"""
    return (
        a.shape[-2] * weight.shape[-2] * weight.shape[-1]
        >= LARGE_PRODUCT  # first, as most products of small models end here
        and a.dtype == weight.dtype == torch.float32
        and a.device.type == "cpu"
        and not torch.is_grad_enabled()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
    )


# Convolutions of several models side by side, as batched matrix products over patches. A grouped convolution of ten small
# models takes 1.3 to 2 times as long (analyses/speed/training.py: small CNN on digits). Images lie with their channels last,
# so that the patches of a row of the kernel are one stretch of memory.


@dataclass(frozen=True)
class Window:
    """What a kernel sees of images [n, C, H, W], and where."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]

    def sizes(self, a: Tensor) -> tuple[int, int]:
        """How many positions it has, down and across."""
        high, wide = (
            (n + 2 * p - k) // s + 1
            for n, p, k, s in zip(a.shape[2:], self.padding, self.kernel, self.stride, strict=True)
        )
        return high, wide

    def patches(self, a: Tensor, models: int) -> Tensor:
        """[K, b * positions, h * w * C]"""
        (n, c, h, w), (high, wide), (up, left) = a.shape, self.sizes(a), self.padding
        (k, l), (down, right) = self.kernel, self.stride
        if c < FEW_CHANNELS:
            framed = a.new_zeros(n, c, h + 2 * up, w + 2 * left)
            framed[:, :, up : up + h, left : left + w] = a
            image, plane, row, _ = framed.stride()
            windows = framed.as_strided(
                (models, k, l, c, n // models, high, wide),
                (n // models * image, row, 1, plane, image, row * down, right),
            )
            return windows.reshape(models, k * l * c, -1).mT
        framed = a.new_zeros(n, h + 2 * up, w + 2 * left, c)
        framed[:, up : up + h, left : left + w] = a.permute(0, 2, 3, 1)
        image, row, column, _ = framed.stride()
        windows = framed.as_strided(
            (n, high, wide, k, l * c), (image, row * down, column * right, row, 1)
        )
        return windows.reshape(models, -1, k * l * c)


class StackedConvolution:
    """``layer`` with weights [K, O, C, h, w] on images [K * b, C, H, W]."""

    def __init__(self, layer: nn.Conv2d, padding: tuple[int, ...]):
        self.layer, self.padding = layer, padding
        self.window = Window(layer.kernel_size, layer.stride, padding)
        self.mirror = Window(
            layer.kernel_size,
            (1, 1),
            tuple(k - 1 - p for k, p in zip(layer.kernel_size, padding, strict=True)),
        )

    def _fits(self, a: Tensor, weight: Tensor) -> bool:
        m = self.layer
        if m.groups != 1 or m.dilation != (1, 1):
            return False
        high, wide = self.window.sizes(a)
        return len(a) // len(weight) * high * wide * weight[0, 0].numel() <= LARGEST_PATCHES

    def apply(self, a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self._fits(a, weight):
            m, biases = self.layer, [None] * len(weight) if bias is None else bias
            return torch.cat(
                [
                    F.conv2d(x, w, b, m.stride, m.padding, m.dilation, m.groups)
                    for x, w, b in zip(a.chunk(len(weight)), weight, biases, strict=True)
                ]
            )
        patches = self.window.patches(a, len(weight))
        out = products(patches, weight.permute(0, 1, 3, 4, 2).flatten(2), bias)
        return _images(out, len(a), self.window.sizes(a))

    def weigh(self, g: Tensor, a: Tensor, weight: Tensor) -> Tensor:
        if not self._fits(a, weight):
            slope = self._one_by_one(g, a, weight, [False, True, False])
            return slope.unflatten(0, weight.shape[:2])
        c, h, w = weight.shape[2:]
        patches = self.window.patches(a, len(weight))
        lines = by_model(g.permute(0, 2, 3, 1), weight).flatten(1, 3)
        slope = (
            products(patches.mT, lines.mT).mT
            if c < FEW_CHANNELS
            else products(lines.mT, patches.mT)
        )
        return slope.unflatten(2, (h, w, c)).permute(0, 1, 4, 2, 3)

    def back(self, g: Tensor, weight: Tensor, a: Tensor) -> Tensor:
        if not self._fits(a, weight):
            return self._one_by_one(g, a, weight, [True, False, False])
        if g.shape[2:] == a.shape[2:] and self.layer.stride == (1, 1):
            # the input's slope is a convolution as large
            mirrored = weight.permute(0, 2, 3, 4, 1).flip(2, 3).flatten(2)
            patches = self.mirror.patches(g, len(weight))
            return _images(products(patches, mirrored), len(g), a.shape[2:])
        (n, c, h, w), (high, wide), (up, left) = a.shape, g.shape[2:], self.padding
        (k, l), (down, right) = self.layer.kernel_size, self.layer.stride
        lines = by_model(g.permute(0, 2, 3, 1), weight).flatten(1, 3)
        slopes = products(lines, weight.permute(0, 3, 4, 2, 1).flatten(1, 3))
        slopes = slopes.view(n, high, wide, k, l, c)
        framed = g.new_zeros(n, h + 2 * up, w + 2 * left, c)
        for i in range(k):
            for j in range(l):
                window = framed[:, i : i + down * high : down, j : j + right * wide : right]
                window += slopes[:, :, :, i, j]
        inner = framed[:, up : up + h, left : left + w].permute(0, 3, 1, 2)
        return inner.contiguous(memory_format=torch.channels_last)

    def _one_by_one(self, g: Tensor, a: Tensor, weight: Tensor, mask: list[bool]) -> Tensor:
        """The gradient of the input, the weight or the bias, whichever the mask picks."""
        m, models = self.layer, len(weight)
        gradients = (
            _convolution_backward(
                h, x, w, None, m.stride, self.padding, m.dilation, False, [0, 0], m.groups, mask
            )
            for h, x, w in zip(g.chunk(models), a.chunk(models), weight, strict=True)
        )
        return torch.cat([gradient[mask.index(True)] for gradient in gradients])


def _images(lines: Tensor, n: int, sizes: tuple[int, ...]) -> Tensor:
    """[K, b * positions, C] -> [n, C, high, wide], the channels last in memory."""
    return lines.reshape(n, *sizes, -1).permute(0, 3, 1, 2)


# Sums of squared per-example weight gradients, layer by layer. For cotangents g of a layer's output (r to an example) and its
# input a, the gradient of the weight for example n and cotangent c is a product G_nc of g_nc and a_n. Needed are sum_nc G_nc^2
# entry by entry (the diagonal) or its total (the trace), and no G needs to be formed where the layer allows it: an outer
# product squares entrywise, and over L positions sum_c (sum_p g_cp u_p)^2 = sum_pq (sum_c g_cp g_cq) u_p u_q.


def outer_squares(g: Tensor, a: Tensor, total: bool) -> Tensor:
    """One position: g [b, r, O], a [b, I] -> [O, I], or its sum."""
    squared = g.square().sum(1)
    if total:
        return squared.sum(1).double() @ a.square().sum(1).double()
    return squared.T @ a.square()


def position_squares(g: Tensor, u: Tensor, total: bool) -> Tensor:
    """L positions: g [b, r, O, L], u [b, K, L] -> sum_nr (g_nr u_n^T)^2 [O, K], or its sum.

    Three ways of the same sum, the cheapest by its count of multiplications.
    """
    (b, r, o, length), k = g.shape, u.shape[1]
    pairs = length * (length + 1) // 2
    if total and length * (r * o + k) < r * o * k:
        return _gram_squares(g, u)
    if not total and pairs < r * length:
        return _paired_squares(g, u)
    out = g.new_zeros(o, k, dtype=torch.float64)
    for s in _pieces(b, r * o * k * g.element_size()):
        gradients = g[s].reshape(-1, r * o, length) @ u[s].transpose(1, 2)
        out += gradients.square_().reshape(-1, o, k).sum(0)
    return out.sum() if total else out


def bias_squares(g: Tensor, total: bool) -> Tensor:
    """g [b, r, O, L] -> [O]."""
    squared = g.sum(3).square().sum((0, 1), dtype=torch.float64)
    return squared.sum() if total else squared


def _gram_squares(g: Tensor, u: Tensor) -> Tensor:
    b, r, o, length = g.shape
    flat = g.reshape(b, r * o, length)
    return ((flat.transpose(1, 2) @ flat) * (u.transpose(1, 2) @ u)).sum(dtype=torch.float64)


def _paired_squares(g: Tensor, u: Tensor) -> Tensor:
    (b, r, o, length), k = g.shape, u.shape[1]
    out = g.new_zeros(o, k, dtype=torch.float64)
    for s in _pieces(b, (k + 2 * r * o) * length * g.element_size()):
        gs, us = g[s].transpose(2, 3).contiguous(), u[s].transpose(1, 2).contiguous()
        for p in range(length):
            # with the positions from p on; a pair of two positions counts twice
            gg = (gs[:, :, p : p + 1] * gs[:, :, p:]).sum(1)
            gg[:, 1:] *= 2
            out += gg.reshape(-1, o).T @ (us[:, p : p + 1] * us[:, p:]).reshape(-1, k)
    return out


def _pieces(count: int, bytes_each: int) -> list[slice]:
    step = max(1, PIECE // max(1, bytes_each))
    return [slice(i, min(i + step, count)) for i in range(0, count, step)]
