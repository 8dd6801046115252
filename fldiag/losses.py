"""Losses and FedSOL's perturbation: the maths that methods and diagnostics share.

Losses of outputs are per example: outputs [..., C] and targets [...] give losses [...]. Weights are rows: every
function of weights reduces over the last axis, so one spelling serves a vector [P] and a stack of clients [K, P].

FedSOL is Lee et al., "FedSOL: Stabilized Orthogonal Learning with Proximal Restrictions in Federated Learning"
(CVPR 2024). Its Algorithm 1, and where each quantity is computed:

    g_p = grad L_p(w; w_g)                                       L_p: ``kl`` or ``l2``
    Lambda^(m)[i] = |w^(m)[i] - w_g^(m)[i]| / ||w^(m) - w_g^(m)||  for every layer m: ``strengths``
    e = rho Lambda g_p / ||g_p||                                 ``perturbation``; 0 below ``noise_floor``
    g_u = grad L_l(w + e)                                        L_l: ``per_example``
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fldiag.errors import FldiagError
from fldiag.params import Layout, norm, ratio
from fldiag.sections import Proximal, Rule

#: Added to the norm of a gradient before dividing by it.
GUARD = 1e-12
#: Label of what counts for nothing: transformers' models and torch's losses pass over it unless told otherwise.
IGNORED = -100

#: Modules that are functions of torch.
FUNCTIONS = {
    nn.CrossEntropyLoss: F.cross_entropy,
    nn.NLLLoss: F.nll_loss,
    nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
}


# -- losses of a model's outputs


def per_example(outputs: Tensor, y: Tensor) -> Tensor:
    """What training minimises: cross entropy for class labels, half the squared residual for real targets.

    ``outputs`` [..., C]; ``y`` [...] integer labels or [..., C] floats. Returns [...]. One output is the logit of label 1
    against label 0.

    Raises FldiagError for labels outside 0..C-1, of one output for labels above 1.
    """
    if y.is_floating_point():
        return half_squared_error(outputs, y, reduction="none")
    if outputs.shape[-1] == 1:
        if bool((y > 1).any()):
            raise FldiagError(
                f"the model has one output, and there are labels up to {int(y.max())}",
                "give a model with an output for each label",
                usage=True,
            )
        return F.binary_cross_entropy_with_logits(
            outputs.squeeze(-1), y.to(outputs.dtype), reduction="none"
        )
    try:
        return F.cross_entropy(outputs.flatten(0, -2), y.flatten(), reduction="none").view(y.shape)
    except IndexError as error:
        raise FldiagError(
            f"the targets are taken as class numbers, and the model has {outputs.shape[-1]} outputs: {error}",
            f"labels must lie in 0..{outputs.shape[-1] - 1}; of counts, times or ranks ask spectrum, landscape or "
            "paths, with the loss that they were trained with: --loss pkg.mod:function",
        ) from None


def predicted(outputs: Tensor) -> Tensor:
    """The label [...] of the largest of outputs [..., C]; of one output, the logit of label 1: whether it is above 0."""
    return (outputs.squeeze(-1) > 0).long() if outputs.shape[-1] == 1 else outputs.argmax(-1)


def with_classes_second(outputs: Tensor, y: Tensor) -> Tensor:
    """Outputs with their classes along axis 1, as torch has them, and not along the last, as language models do."""
    return outputs if outputs.ndim < 3 or outputs[:, 0].shape == y.shape else outputs.movedim(-1, 1)


def half_squared_error(
    outputs: Tensor, y: Tensor, reduction: Literal["mean", "none"] = "mean"
) -> Tensor:
    """||outputs - y||^2 / 2 of each example [..., C] -> [...], or its mean over the examples.

    Raises FldiagError where one would be spread over the other: outputs [N, 1] and y [N] would be N x N errors.
    """
    if outputs.shape[-2:] != y.shape[-2:]:
        raise FldiagError(
            f"the outputs have shape {list(outputs.shape)} and the targets {list(y.shape)}",
            "give the targets the shape of the outputs",
            usage=True,
        )
    errors = 0.5 * (outputs - y).square().sum(-1)
    return errors if reduction == "none" else errors.mean()


def criterion(regression: bool) -> Callable[..., Tensor]:
    """The loss that training minimises as a function (outputs, y) in the manner of torch's: a mean by default."""
    return half_squared_error if regression else F.cross_entropy


def model_loss(outputs: Any, batch: Any) -> Tensor:
    """The loss that the model returns itself, as those of transformers do when labels are among their inputs."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
    if loss is None:
        raise FldiagError(
            "the model returns no loss of its own",
            "give a loss of (outputs, batch), or labels among the inputs",
        )
    return loss


def multi_label(outputs: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    """Binary cross entropy of logits [..., C] and labels 0 or 1 of every class [..., C]."""
    return F.binary_cross_entropy_with_logits(outputs, y.to(outputs), reduction=reduction)


def is_probabilities(y: Tensor) -> bool:
    """Whether each row of targets [n, classes] holds probabilities of classes: one-hot or soft labels."""
    is_rows = y.is_floating_point() and y.ndim == 2 and y.shape[1] > 1
    return is_rows and bool((y >= 0).all() and ((y.sum(1) - 1).abs() < 1e-3).all())


def form_of(loss: Any) -> tuple[Any, dict[str, Any]]:
    """The function that a loss is, and its options, where it is one of torch or partial."""
    if type(loss) in FUNCTIONS:
        names = ("weight", "ignore_index", "reduction", "label_smoothing")
        return FUNCTIONS[type(loss)], {n: getattr(loss, n) for n in names if hasattr(loss, n)}
    if isinstance(loss, functools.partial) and not loss.args:
        return loss.func, dict(loss.keywords)
    return loss, {}


def name_of(loss: Callable[..., Any]) -> str:
    """What a loss is called."""
    return str(getattr(loss, "__name__", type(loss).__name__)).replace("_", " ")


#: What a diagnostic can be told to take: functions (outputs, y) -> the mean over the examples.
BY_NAME: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "half_squared_error": half_squared_error,
    "mse": F.mse_loss,
    "multi_label": multi_label,
    "own": model_loss,
}


def kl(teacher: Tensor, student: Tensor, tau: float) -> Tensor:
    """KL(softmax(teacher / tau) || softmax(student / tau)) of logits [..., C] -> [...], without a factor tau^2.

    With the received model as constant teacher, its mean over a minibatch is FedSOL's proximal loss.
    """
    p, q = F.log_softmax(teacher / tau, dim=-1), F.log_softmax(student / tau, dim=-1)
    return (p.exp() * (p - q)).sum(-1)


# -- the proximal loss of weights


def l2(d: Tensor) -> Tensor:
    """L_p = ||w - w_g||^2 / 2 of a displacement d = w - w_g [..., P] -> [...], summed in float64; its gradient is d.

    FedProx's term (Li et al. 2020, Eq. 2) for mu = 1.
    """
    return 0.5 * d.square().sum(-1, dtype=torch.float64)


def proximal_name(loss: Proximal, tau: float) -> str:
    """How tables name a proximal loss: ``kl:3`` (at its temperature) or ``l2``."""
    return f"kl:{tau:g}" if loss == "kl" else "l2"


# -- FedSOL's perturbation


def noise_floor(dtype: torch.dtype) -> float:
    """The norm below which g_p is rounding noise.

    At w = w_g the gradient of ``kl`` is zero, but computed it has a norm of about 3e-8 in float32. The division by
    ||g_p|| would blow that up to a perturbation of length rho in an arbitrary direction.
    """
    return 1e-12 if dtype == torch.float64 else 1e-6


def perturbation(
    g: Tensor, rho: float, Lambda: Tensor | None = None, floor: float = 0.0, guard: float = GUARD
) -> Tensor:
    """e = rho Lambda g / (||g|| + guard), and 0 where ||g|| < ``floor``; [..., P].

    ``Lambda`` None: 1 everywhere (FedSOL's fixed strength; with g the local gradient, SAM).
    """
    length = norm(g)
    e = rho * g / (length + guard)
    if floor:
        e = torch.where(length >= floor, e, 0.0)
    return e if Lambda is None else e * Lambda


def strengths(d: Tensor, layout: Layout, rule: Rule = "layer") -> Tensor:
    """Lambda^(m)[i] = |d^(m)[i]| / ||d^(m)|| per layer m, of a displacement d = w - w_g [..., P] laid out by ``layout``.

    ``rule``: what has unit norm. ``layer``: weight and bias of a module together, as the paper writes; ``tensor``: each
    parameter tensor; ``dim0``: each tensor along its first axis, as the released code does. 0 where the norm is 0.
    """
    if rule == "dim0":
        first = d.dim() - 1  # the first axis of a tensor: d has as many before its last
        ratios = [
            ratio(v.abs(), torch.linalg.vector_norm(v, dim=first, keepdim=True))
            for v in _views(d, layout).values()
        ]
        return torch.cat([r.flatten(first) for r in ratios], dim=-1)
    return torch.cat([ratio(v.abs(), norm(v)) for v in _groups(d, layout, rule).values()], dim=-1)


def mean_strengths(
    Lambda: Tensor, layout: Layout, rule: Rule = "layer"
) -> dict[str, tuple[Tensor, int]]:
    """Layer -> mean of Lambda [..., P] over its entries [...] in float64, and their number.

    The mean is at most 1 / sqrt(number), reached where all entries have moved alike. A layer without a name goes by
    the name of its first tensor.
    """
    groups = _groups(Lambda, layout, rule)
    return {name: (v.double().mean(-1), v.shape[-1]) for name, v in groups.items()}


def _groups(a: Tensor, layout: Layout, rule: Rule) -> dict[str, Tensor]:
    """Layer -> its entries of a [..., P], over which Lambda is normalised together (dim0: inside which)."""
    groups = layout.layers if rule == "layer" else {n: (n,) for n in layout.names}
    sizes = dict(zip(layout.names, layout.sizes, strict=True))
    parts = a.split([sum(sizes[n] for n in names) for names in groups.values()], -1)
    return {name or ns[0]: v for (name, ns), v in zip(groups.items(), parts, strict=True)}


def _views(a: Tensor, layout: Layout) -> dict[str, Tensor]:
    """Named views of a [..., P]; a scalar parameter has one axis, with one entry."""
    return {n: v if v.dim() >= a.dim() else v.unsqueeze(-1) for n, v in layout.views(a).items()}
