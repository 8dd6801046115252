"""Convolutions of several models side by side, as batched matrix products over patches.

A grouped convolution of ten small models takes 1.3 to 2 times as long (analyses/speed/training.py: small CNN on digits).
Images lie with their channels last, so that the patches of a row of the kernel are one stretch of memory.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fldiag.models.layers.links import by_model

_convolution_backward = torch.ops.aten.convolution_backward
#: Numbers in the patches of one model's minibatch above which its convolution is taken alone: it then fills the processor.
MOST = 2**19


class Patches:
    """``layer`` with weights [K, O, C, h, w] on images [K * b, C, H, W]."""

    def __init__(self, layer: nn.Conv2d, padding: tuple[int, ...]):
        self.layer, self.padding = layer, padding

    def _fits(self, a: Tensor, weight: Tensor) -> bool:
        m, (high, wide) = self.layer, self._sizes(a)
        return m.groups == 1 and m.dilation == (1, 1) and len(a) // len(weight) * high * wide * weight[0, 0].numel() <= MOST

    def _sizes(self, a: Tensor) -> tuple[int, int]:
        m = self.layer
        high, wide = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, p, d, k, s in
                      zip(a.shape[2:], self.padding, m.dilation, m.kernel_size, m.stride, strict=True))
        return high, wide

    def _patches(self, a: Tensor, rows: int) -> Tensor:
        """[K, b * positions, h * w * C]"""
        (n, c, h, w), (high, wide), (up, left) = a.shape, self._sizes(a), self.padding
        framed = a.new_zeros(n, h + 2 * up, w + 2 * left, c)
        framed[:, up: up + h, left: left + w] = a.permute(0, 2, 3, 1)
        image, row, column, _ = framed.stride()
        (k, l), (down, right) = self.layer.kernel_size, self.layer.stride
        windows = framed.as_strided((n, high, wide, k, l * c), (image, row * down, column * right, row, 1))
        return windows.reshape(rows, -1, k * l * c)

    @staticmethod
    def _matrix(weight: Tensor) -> Tensor:
        """[K, h * w * C, O]"""
        return weight.permute(0, 3, 4, 2, 1).flatten(1, 3)

    def apply(self, a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self._fits(a, weight):
            m, biases = self.layer, [None] * len(weight) if bias is None else bias
            return torch.cat([F.conv2d(x, w, b, m.stride, m.padding, m.dilation, m.groups)
                              for x, w, b in zip(a.chunk(len(weight)), weight, biases, strict=True)])
        u, matrix = self._patches(a, len(weight)), self._matrix(weight)
        out = torch.bmm(u, matrix) if bias is None else torch.baddbmm(bias.unsqueeze(1), u, matrix)
        return out.reshape(len(a), *self._sizes(a), -1).permute(0, 3, 1, 2)

    def weigh(self, g: Tensor, a: Tensor, weight: Tensor) -> Tensor:
        if not self._fits(a, weight):
            return self._one_by_one(g, a, weight, [False, True, False]).unflatten(0, weight.shape[:2])
        found = torch.bmm(self._lines(g, weight).mT, self._patches(a, len(weight)))
        k, o, c, h, w = weight.shape
        return found.view(k, o, h, w, c).permute(0, 1, 4, 2, 3)

    def back(self, g: Tensor, weight: Tensor, a: Tensor) -> Tensor:
        if not self._fits(a, weight):
            return self._one_by_one(g, a, weight, [True, False, False])
        (n, c, h, w), (high, wide), (up, left) = a.shape, g.shape[2:], self.padding
        (k, l), (down, right) = self.layer.kernel_size, self.layer.stride
        found = torch.bmm(self._lines(g, weight), self._matrix(weight).mT).view(n, high, wide, k, l, c)
        framed = g.new_zeros(n, h + 2 * up, w + 2 * left, c)
        for i in range(k):
            for j in range(l):
                framed[:, i: i + down * high: down, j: j + right * wide: right] += found[:, :, :, i, j]
        return framed[:, up: up + h, left: left + w].permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)

    @staticmethod
    def _lines(g: Tensor, weight: Tensor) -> Tensor:
        """[K, b * positions, O]"""
        return by_model(g.permute(0, 2, 3, 1), weight).flatten(1, 3)

    def _one_by_one(self, g: Tensor, a: Tensor, weight: Tensor, wanted: list[bool]) -> Tensor:
        m, rows = self.layer, len(weight)
        found = (_convolution_backward(h, x, w, None, m.stride, self.padding, m.dilation, False, [0, 0], m.groups, wanted)
                 for h, x, w in zip(g.chunk(rows), a.chunk(rows), weight, strict=True))
        return torch.cat([pair[wanted.index(True)] for pair in found])
