"""Sub-networks that share the weights of the full one: the first channels of every layer.

Slimmable layers (Yu et al., ICLR 2019) as GradAug (Yang et al., NeurIPS 2020) and FedAlign (Mendieta et al., CVPR 2022)
use them. A plain torch layer takes an input that may have fewer channels than it was built for, so the full network stays
an ordinary module and needs no second set of parameters. The rule of each type is in ``models/layers``.
"""

from __future__ import annotations

from torch import Tensor, nn

from fldiag.errors import FldiagError
from fldiag.models.layers import kin


def layer(m: nn.Module, x: Tensor, width: float | None = None) -> Tensor:
    """``m(x)``, or the slim form of ``m`` when a ``width`` is given: from the channels that ``x`` has to the first ``width``
    of its own; layers without parameters have only one form."""
    if width is None or not any(True for _ in m.parameters()):
        return m(x)
    slim = kin(m).slim
    if slim is None:
        raise FldiagError(
            f"a layer of type {type(m).__name__} has no slim form", "use batch-norm or group-norm"
        )
    return slim(m, x, width)
