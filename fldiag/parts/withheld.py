"""A method's part whose term is kept out of the local objective, to perturb along its gradient instead."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from fldiag.method import Part
from fldiag.parts.contrast import ModelContrast
from fldiag.parts.control import ControlVariates, DynamicRegulariser
from fldiag.parts.proximal import KL, L2, ProximalLoss
from fldiag.parts.server import MeanGradientCorrection, NormalisedMean
from fldiag.step import Output, Step

#: What a withheld part no longer does: its two terms are withheld, and the perturbation is along them.
WITHHELD = frozenset({"loss", "correct", "perturb"})
T = TypeVar("T", bound=Part)


def _rest_of_part(cls: type[T]) -> type[T]:
    """Class decorator: every public name of Part that is not withheld is that of ``self.part``, so that no slot is lost."""
    for name, of in vars(Part).items():
        if not name.startswith("_") and name not in WITHHELD:
            setattr(cls, name, _slot(name, of) if callable(of) else _attribute(name))
    return cls


def _slot(name: str, of: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(of)
    def delegate(self: Withheld, *args: Any) -> Any:
        return getattr(self.part, name)(*args)

    return delegate


def _attribute(name: str) -> property:
    return property(lambda self: getattr(self.part, name))


@_rest_of_part
class Withheld(Part):
    """``part`` without its loss term and its correction; everything else (states, uploads, server step, ...) stays.

    As a proximal loss its gradient is what those two would have added to the local gradient (FedSOL with another
    method's proximal loss, Lee et al. 2024, Table 4).
    """

    kind, exact = "own", False

    def __init__(self, part: Part):
        self.part = part

    def gradient(self, step: Step) -> tuple[Tensor | None, Tensor]:
        """(None, gradient [k, P]) at w: of the part's loss term and the part's correction of a zero gradient."""
        decay = step.decay
        g = self.part.correct(step, torch.zeros_like(step.w))
        # what a penalty leaves to the weight decay belongs to it
        g = g + step.w * (step.decay - decay)
        step.decay = decay
        if type(self.part).loss is Part.loss:
            return None, g

        def term(step: Step, out: Output) -> Tensor:
            value = self.part.loss(step, out)
            return out.leaf.sum(-1) * 0 if value is None else value

        return None, g + step.gradient(term)[1]


def proximal_loss(loss: str, tau: float, tau_moon: float) -> tuple[ProximalLoss, tuple[Part, ...]]:
    """FedSOL's L_p by name, and the parts of the method that it comes from.

    Of another method only the term changes its role, from the objective to the direction of e; its states, uploads and
    server step stay. The term's weight is 1: g_p is normalised, so it would change nothing.
    """
    if loss == "kl":
        return KL(tau), ()
    if loss == "l2":
        return L2(), ()
    term, *companions = {
        "scaffold": (ControlVariates(server_lr=1.0),),
        "fednova": (MeanGradientCorrection(update=True), NormalisedMean()),
        "feddyn": (DynamicRegulariser(lam=1.0),),
        "moon": (ModelContrast(mu=1.0, tau=tau_moon),),
    }[loss]
    withheld = Withheld(term)
    return withheld, (withheld, *companions)
