"""Convolutions of several models side by side, as batched matrix products over patches.

A grouped convolution of ten small models takes 1.3 to 2 times as long (analyses/speed/training.py: small CNN on digits).
Images lie with their channels last, so that the patches of a row of the kernel are one stretch of memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fldiag.models.layers.linear import products
from fldiag.models.layers.links import by_model

_convolution_backward = torch.ops.aten.convolution_backward
#: Numbers in the patches of one model's minibatch above which its convolution is taken alone: it then fills the processor.
MOST = 2**19
#: Channels below which the rows of an image are longer stretches of memory than the rows of a patch.
FEW = 4


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

    def patches(self, a: Tensor, rows: int) -> Tensor:
        """[K, b * positions, h * w * C]"""
        (n, c, h, w), (high, wide), (up, left) = a.shape, self.sizes(a), self.padding
        (k, l), (down, right) = self.kernel, self.stride
        if c < FEW:
            framed = a.new_zeros(n, c, h + 2 * up, w + 2 * left)
            framed[:, :, up : up + h, left : left + w] = a
            image, plane, row, _ = framed.stride()
            windows = framed.as_strided(
                (rows, k, l, c, n // rows, high, wide),
                (n // rows * image, row, 1, plane, image, row * down, right),
            )
            return windows.reshape(rows, k * l * c, -1).mT
        framed = a.new_zeros(n, h + 2 * up, w + 2 * left, c)
        framed[:, up : up + h, left : left + w] = a.permute(0, 2, 3, 1)
        image, row, column, _ = framed.stride()
        windows = framed.as_strided(
            (n, high, wide, k, l * c), (image, row * down, column * right, row, 1)
        )
        return windows.reshape(rows, -1, k * l * c)


class Patches:
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
        return len(a) // len(weight) * high * wide * weight[0, 0].numel() <= MOST

    def apply(self, a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self._fits(a, weight):
            m, biases = self.layer, [None] * len(weight) if bias is None else bias
            return torch.cat(
                [
                    F.conv2d(x, w, b, m.stride, m.padding, m.dilation, m.groups)
                    for x, w, b in zip(a.chunk(len(weight)), weight, biases, strict=True)
                ]
            )
        out = products(
            self.window.patches(a, len(weight)), weight.permute(0, 1, 3, 4, 2).flatten(2), bias
        )
        return _images(out, len(a), self.window.sizes(a))

    def weigh(self, g: Tensor, a: Tensor, weight: Tensor) -> Tensor:
        if not self._fits(a, weight):
            return self._one_by_one(g, a, weight, [False, True, False]).unflatten(
                0, weight.shape[:2]
            )
        c, h, w = weight.shape[2:]
        u, lines = (
            self.window.patches(a, len(weight)),
            by_model(g.permute(0, 2, 3, 1), weight).flatten(1, 3),
        )
        found = products(u.mT, lines.mT).mT if c < FEW else products(lines.mT, u.mT)
        return found.unflatten(2, (h, w, c)).permute(0, 1, 4, 2, 3)

    def back(self, g: Tensor, weight: Tensor, a: Tensor) -> Tensor:
        if not self._fits(a, weight):
            return self._one_by_one(g, a, weight, [True, False, False])
        if g.shape[2:] == a.shape[2:] and self.layer.stride == (
            1,
            1,
        ):  # the input's slope is a convolution as large
            mirrored = weight.permute(0, 2, 3, 4, 1).flip(2, 3).flatten(2)
            return _images(
                products(self.mirror.patches(g, len(weight)), mirrored), len(g), a.shape[2:]
            )
        (n, c, h, w), (high, wide), (up, left) = a.shape, g.shape[2:], self.padding
        (k, l), (down, right) = self.layer.kernel_size, self.layer.stride
        lines = by_model(g.permute(0, 2, 3, 1), weight).flatten(1, 3)
        found = products(lines, weight.permute(0, 3, 4, 2, 1).flatten(1, 3)).view(
            n, high, wide, k, l, c
        )
        framed = g.new_zeros(n, h + 2 * up, w + 2 * left, c)
        for i in range(k):
            for j in range(l):
                framed[:, i : i + down * high : down, j : j + right * wide : right] += found[
                    :, :, :, i, j
                ]
        return (
            framed[:, up : up + h, left : left + w]
            .permute(0, 3, 1, 2)
            .contiguous(memory_format=torch.channels_last)
        )

    def _one_by_one(self, g: Tensor, a: Tensor, weight: Tensor, wanted: list[bool]) -> Tensor:
        m, rows = self.layer, len(weight)
        found = (
            _convolution_backward(
                h, x, w, None, m.stride, self.padding, m.dilation, False, [0, 0], m.groups, wanted
            )
            for h, x, w in zip(g.chunk(rows), a.chunk(rows), weight, strict=True)
        )
        return torch.cat([pair[wanted.index(True)] for pair in found])


def _images(lines: Tensor, n: int, sizes: tuple[int, ...]) -> Tensor:
    """[K, b * positions, C] -> [n, C, high, wide], the channels last in memory."""
    return lines.reshape(n, *sizes, -1).permute(0, 3, 1, 2)
