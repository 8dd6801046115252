"""Sub-networks that share the weights of the full one: the first channels of every layer.

Slimmable layers (Yu et al., ICLR 2019) as GradAug (Yang et al., NeurIPS 2020) and FedAlign (Mendieta et al., CVPR 2022)
use them. The functions take a plain torch layer and an input that may have fewer channels than the layer was built
for, so the full network stays an ordinary module and needs no second set of parameters.
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
    """
    if not 0 < width <= 1:
        raise FldiagError(f"width = {width!r} is not a fraction of the channels", "give a number in (0, 1]", usage=True)
    return total if width == 1 else min(total, divisible(total * width))


def conv(m: nn.Conv2d, x: Tensor, width: float) -> Tensor:
    """``m`` (groups = 1) from the channels that ``x`` [B, C, H, W] has to the first ``width`` of its outputs."""
    n = channels(m.out_channels, width)
    bias = None if m.bias is None else m.bias[:n]
    return F.conv2d(x, m.weight[:n, : x.shape[1]], bias, m.stride, m.padding, m.dilation)


def norm(m: nn.Module, x: Tensor) -> Tensor:
    """Batch-norm or group-norm of the channels that ``x`` has.

    Batch-norm uses the statistics of the batch in either mode: the running ones belong to the full network, and are
    neither read nor updated. Raises FldiagError when the channels do not split into the groups of a group-norm.
    """
    n = x.shape[1]
    if isinstance(m, nn.BatchNorm2d):
        return F.batch_norm(x, None, None, m.weight[:n], m.bias[:n], training=True, eps=m.eps)
    if not isinstance(m, nn.GroupNorm):
        raise FldiagError(f"a layer of type {type(m).__name__} has no slim form", "use batch-norm or group-norm")
    if n % m.num_groups:
        raise FldiagError(f"{n} channels do not split into the {m.num_groups} groups of a group-norm",
                          "choose a larger width, so that every layer keeps a multiple of 8 channels", usage=True)
    return F.group_norm(x, m.num_groups, m.weight[:n], m.bias[:n], m.eps)


def linear(m: nn.Linear, x: Tensor, width: float | None = None) -> Tensor:
    """``m`` from the features that ``x`` [B, d] has to the first ``width`` of its outputs (None: all, as a classifier)."""
    n = m.out_features if width is None else channels(m.out_features, width)
    return F.linear(x, m.weight[:n, : x.shape[1]], None if m.bias is None else m.bias[:n])


def layer(m: nn.Module, x: Tensor, width: float | None = None) -> Tensor:
    """``m(x)``, or the slim form of ``m`` when a ``width`` is given; layers without parameters have only one form."""
    if width is None or not any(True for _ in m.parameters()):
        return m(x)
    if isinstance(m, nn.Conv2d):
        return conv(m, x, width)
    return linear(m, x, width) if isinstance(m, nn.Linear) else norm(m, x)
