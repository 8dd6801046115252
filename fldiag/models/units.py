"""The hidden units of a network, and in which axis of which tensor each of them has its place.

A network computes the same with its units in another order, if every axis that a group of units has is put in that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fldiag.errors import FldiagError
from fldiag.models.layers import leaves, rules
from fldiag.models.links import tensor_name
from fldiag.models.residual import ResidualBlock, ResNet


@dataclass(frozen=True)
class Axis:
    """Axis ``axis`` of a tensor is that of a ``group`` of units; each has so many ``positions`` side by side (flattened maps)."""

    tensor: str
    axis: int
    group: int
    positions: int = 1

    def place(self, order: Tensor) -> Tensor:
        """The index that puts the axis in this order of the units."""
        inside = torch.arange(self.positions, device=order.device)
        return (order[:, None] * self.positions + inside).flatten()


@dataclass
class Units:
    """``sizes`` and ``names`` of the groups: how many units, and the layer that makes them (of several that are added up, the
    first). A group of None is one that has a fixed order: inputs and outputs."""

    sizes: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    axes: list[Axis] = field(default_factory=list)

    @staticmethod
    def of(module: nn.Module) -> Units:
        """Of a sequential network of known layers, or a residual one. Raises FldiagError naming the layer that is not known."""
        units = Units()
        last = (
            units._residual(module)
            if isinstance(module, ResNet)
            else units._chain(module, "", None)
        )
        # the outputs have their order
        units.axes = [axis for axis in units.axes if axis.group != last]
        return units

    def of_tensor(self, name: str) -> list[Axis]:
        return [axis for axis in self.axes if axis.tensor == name]

    def reorder(
        self, tensor: Tensor, name: str, orders: Sequence[Tensor], but: Axis | None = None
    ) -> Tensor:
        """A tensor with its units in these orders (one a group); the axis ``but`` stays as it is."""
        for axis in self.of_tensor(name):
            if axis != but:
                tensor = tensor.index_select(
                    axis.axis, axis.place(orders[axis.group]).to(tensor.device)
                )
        return tensor

    def _chain(self, module: nn.Module, prefix: str, group: int | None) -> int | None:
        chain = leaves(module)
        if chain is None:
            raise FldiagError(
                "the model shares weights between layers or has hooks, so its units cannot be put in another order",
                "leave out --align",
            )
        for name, m in chain:
            group = self._layer(m, ".".join(n for n in (prefix, name) if n), group)
        return group

    def _layer(
        self, m: nn.Module, name: str, group: int | None, out: int | None = None
    ) -> int | None:
        """From the group of a layer's input to that of its output; ``out``: its units are added to those of that group."""
        rule = rules(m).units(m)
        if rule is None:
            who = f"layer {name!r}" if name else "the model"
            raise FldiagError(
                f"how {who} ({type(m).__name__}) treats the order of its units is not known, so models "
                "cannot be aligned",
                "leave out --align; known are sequential networks and "
                "fldiag's ResNets, of affine, convolutional and normalising layers",
            )
        if rule == "mixes":
            weight = m.get_parameter("weight")
            if group is not None:
                positions = self._positions(weight, name, group)
                self.axes.append(Axis(tensor_name(name, "weight"), 1, group, positions))
            if out is None:
                out = len(self.sizes)
                self.sizes.append(len(weight))
                self.names.append(name)
            group = out
        if rule in ("mixes", "scales") and group is not None:
            self.axes += [
                Axis(tensor_name(name, n), 0, group)
                for n, t in (*m.named_parameters(), *m.named_buffers())
                if t.ndim and len(t) == self.sizes[group]
            ]
        return group

    def _positions(self, weight: Tensor, name: str, group: int) -> int:
        if weight.shape[1] % self.sizes[group]:
            raise FldiagError(
                f"layer {name!r} takes {weight.shape[1]} numbers of the {self.sizes[group]} units before it",
                "leave out --align: which of them belong to which unit is not known",
            )
        return weight.shape[1] // self.sizes[group]

    def _residual(self, net: ResNet) -> int | None:
        group = self._layer(net.bn1, "bn1", self._layer(net.conv1, "conv1", None))
        for number, stage in enumerate(net.layers, start=1):
            for place, block in enumerate(stage):
                assert isinstance(block, ResidualBlock)
                group = self._block(block, f"layer{number}.{place}", group)
        return self._layer(
            net.fc,
            "fc",
            self._chain(net.projection, "projection", group) if len(net.projection) else group,
        )

    def _block(self, block: ResidualBlock, name: str, group: int | None) -> int | None:
        """What the branch makes is added to what the shortcut makes: one group."""
        out = (
            group
            if block.downsample is None
            else self._chain(block.downsample, f"{name}.downsample", group)
        )
        convolutions = [n for n, _ in block.named_children() if n.startswith("conv")]
        for n in convolutions:
            last = n == convolutions[-1]
            group = self._layer(block.get_submodule(n), f"{name}.{n}", group, out if last else None)
            norm = n.replace("conv", "bn")
            self._layer(block.get_submodule(norm), f"{name}.{norm}", group)
        return group
