"""What can be known about a type of layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from fldiag.models.layers.links import Link, Views, Weighted


def always(m: Any) -> bool:
    return True


def never(m: Any) -> bool:
    return False


def unknown(m: Any) -> str | None:
    return f"({type(m).__name__})"


def no_obstacle(m: Any) -> str | None:
    return None


def as_it_is(m: Any, name: str, views: Views, x: Tensor, rows: int) -> Tensor:
    """The ``stacked`` rule of a layer without weights that treats examples and channels alike."""
    return m(x)


#: What a layer does with the units (channels, features) of its input: makes ``new`` ones (weight [units, units of the input,
#: ...]), has numbers of its ``own`` for each, leaves them as they are (``kept``), or lays out the positions of each side by side
#: (``flat``).
Units = Literal["new", "own", "kept", "flat"]


def no_units(m: Any) -> Units | None:
    return None


def kept(m: Any) -> Units | None:
    return "kept"


def the_input(m: Any, a: Tensor) -> Tensor:
    return a


@dataclass(frozen=True)
class Layer:
    """The rules for one type of layer. Where a rule is left out, a network with such a layer takes the general way.

    In all of them ``m`` is the layer, ``name`` its place in the network, and ``views`` holds the network's weights by
    their full names.

    ``fits(m)``: whether ``call``, ``stacked`` and ``links`` hold for a layer with these settings.
    ``call(m, name, views, x)``: the output with the weights in ``views``; only a layer with weights needs it.
    ``stacked(m, name, views, x, rows)``: the outputs of several models side by side. Each view is [rows, ...]; images
    are [B, rows * C, H, W], anything else is [rows, B, ...].
    ``takes_rows``: ``stacked`` also takes images as [rows, B, C, H, W].
    ``overwrite(x)``: the output of a layer without weights, written over its input.
    ``links(m, name, buffers)``: the layer as links for the R-operator, in order.
    ``squares(m, a, g, total)``: name of a weight -> the sum over examples of its squared gradients, or with ``total``
    the sum over all entries, for inputs a [b, ...] and r cotangents of each output, g [b, r, ...].
    ``seen(m, a)``: what ``squares`` takes for an input a. It is asked while the layer is evaluated: only then do its
    buffers hold the values that belong to the weights.
    ``obstacle(m)``: what keeps the output from being piecewise linear in the input and in the weights, with the other
    one fixed, in eval mode; None where nothing does.
    ``macs(m, out)``: multiply-adds of one example, whose output is ``out`` [1, ...].
    ``slim(m, x, width)``: from the channels (features) that x has to the first ``width`` in (0, 1] of the layer's own.
    ``mixes_examples(m)``: whether an example's output depends on the others of its batch, also in eval mode.
    ``monotone``: its output, number by number, never falls as the input rises. ``takes_maximum``: its output is the maximum
    over some positions; it can then change places with a monotone layer.
    ``random``: it draws random numbers in training mode.
    ``units(m)``: how the layer lets the order of its input's units be changed; None where it does not, or is not known to.
    ``channels_last``: without gradients it is faster in that memory format.
    """

    fits: Callable[[Any], bool] = always
    call: Callable[[Any, str, Views, Tensor], Tensor] | None = None
    stacked: Callable[[Any, str, Views, Tensor, int], Tensor] | None = None
    takes_rows: bool = False
    overwrite: Callable[[Tensor], Tensor] | None = None
    links: Callable[[Any, str, Views], list[Link | Weighted] | None] | None = None
    squares: Callable[[Any, Tensor, Tensor, bool], dict[str, Tensor]] | None = None
    seen: Callable[[Any, Tensor], Tensor] = the_input
    obstacle: Callable[[Any], str | None] = unknown
    macs: Callable[[Any, Tensor], int] | None = None
    slim: Callable[[Any, Tensor, float], Tensor] | None = None
    mixes_examples: Callable[[Any], bool] = never
    monotone: bool = False
    takes_maximum: bool = False
    random: bool = False
    units: Callable[[Any], Units | None] = no_units
    channels_last: bool = False
