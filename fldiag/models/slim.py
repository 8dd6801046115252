"""Layers at a fraction of their channels, with the weights of the full network, which stays an ordinary module.

Slimmable layers (Yu et al., ICLR 2019) as GradAug (Yang et al., NeurIPS 2020) and FedAlign (Mendieta et al., CVPR 2022) use them:
the first channels of every layer.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from fldiag.errors import FldiagError


def divisible(v: float, by: int = 8) -> int:
    """``v`` rounded to a multiple of ``by``, one step up when that would lose more than 10 %; at least 1."""
    n = max(1, int(v + by / 2) // by * by)
    return n + by if n < 0.9 * v else n


def channels(total: int, width: float) -> int:
    """How many of a layer's ``total`` channels the fraction ``width`` in (0, 1] keeps; all of them at 1.

    Raises FldiagError when ``width`` is no such fraction.

    >>> channels(64, 0.5), channels(10, 0.5), channels(10, 1)
    (32, 8, 10)
    """
    if not 0 < width <= 1:
        raise FldiagError(
            f"width = {width!r} is not a fraction of the channels",
            "give a number in (0, 1]",
            usage=True,
        )
    return total if width == 1 else min(total, divisible(total * width))


def apply_slim(m: nn.Module, x: Tensor, width: float | None = None) -> Tensor:
    """``m(x)``, or with a ``width`` the slim form: from the channels that ``x`` has to the first ``width`` of the layer's own.

    Batch-norm then uses the statistics of the batch in either mode: the running ones belong to the full network, and are neither
    read nor updated. Convolutions have one group. Layers without parameters have only one form.

    Raises FldiagError for a layer that has no slim form, and where a group-norm cannot split the channels.
    """
    if width is None or not any(True for _ in m.parameters()):
        out: Tensor = m(x)
        return out
    n = x.shape[1]
    if isinstance(m, nn.Linear):
        k = channels(m.out_features, width)
        return F.linear(x, m.weight[:k, :n], None if m.bias is None else m.bias[:k])
    if isinstance(m, nn.Conv2d):
        k = channels(m.out_channels, width)
        bias = None if m.bias is None else m.bias[:k]
        return F.conv2d(x, m.weight[:k, :n], bias, m.stride, m.padding, m.dilation)
    if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d):
        return F.batch_norm(x, None, None, m.weight[:n], m.bias[:n], training=True, eps=m.eps)
    if not isinstance(m, nn.GroupNorm):
        raise FldiagError(
            f"a layer of type {type(m).__name__} has no slim form", "use batch-norm or group-norm"
        )
    if n % m.num_groups:
        raise FldiagError(
            f"{n} channels do not split into the {m.num_groups} groups of a group-norm",
            "choose a larger width, so that every layer keeps a multiple of 8 channels",
            usage=True,
        )
    return F.group_norm(x, m.num_groups, m.weight[:n], m.bias[:n], m.eps)
