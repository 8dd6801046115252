"""Models with gradient checkpointing, whose layers are evaluated again in the backward pass.

The graph of a gradient, which a product differentiates, holds all that checkpointing drops; so where products are derivatives
the model is evaluated ``without_checkpointing`` (``models/network.py``), and smaller batches bound the memory. Where products
are differences of gradients, a gradient is taken with the weights as the module's own parameters, with which the layers are
then evaluated again: it keeps the small memory for which checkpointing is there.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fldiag.curvature.hvp import derivative
from fldiag.errors import FldiagError, first_line, out_of_memory
from fldiag.problem.ingredients import Ingredients
from fldiag.problem.trees import Tree, clone, count


def recomputes(problem: Ingredients, x: Tree) -> bool:
    """Whether gradients are to be taken so. Raises FldiagError where the model replaces saved tensors in another way, and
    products are not to be differences."""
    word = "saved tensors are replaced"
    try:
        with torch.enable_grad(), torch.autograd.graph.disable_saved_tensors_hooks(word):
            problem.call(problem.w.clone().requires_grad_(), clone(x), anew=problem.differences)
    except RuntimeError as error:
        if out_of_memory(error):
            raise
        if word not in str(error):
            raise FldiagError(
                f"the model cannot be differentiated: {first_line(error)}",
                "evaluate it in a way that has a derivative here, such as attn_implementation='eager' of "
                "transformers",
            ) from error
        if problem.differences:
            return True
        raise FldiagError(
            "the model uses hooks on saved tensors",
            "take products by differences of gradients (differences = True, --differences); or switch them off, "
            "and let a smaller memory limit cut the batches",
        ) from None
    return False


def gradient(
    problem: Ingredients, w: Tensor, batches: Iterable[tuple[Tree, Tree, float]]
) -> Tensor:
    """The gradient at w [P] in float64, over batches (x, y, share of the examples)."""
    module, total = problem.loaded(w), torch.zeros_like(w, dtype=torch.float64)
    leaves = [p for p in module.parameters() if p.requires_grad]
    pieces = total.split([p.numel() for p in leaves])
    for x, y, share in batches:
        args, named = problem.arguments(x)
        with torch.enable_grad(), problem.guarded():
            parts = derivative(problem.criterion(module(*args, **named), y).reshape(()), leaves)
        for piece, part in zip(pieces, parts, strict=True):
            if part is not None:
                piece.add_(part.reshape(-1), alpha=share)
    return total


def graph_bytes(problem: Ingredients, x: Tree) -> int:
    """Bytes an example takes, from above: what all modules return, as if nothing was dropped."""
    module, held = problem.loaded(problem.w), 0

    def add(m: torch.nn.Module, args: tuple[object, ...], output: object) -> None:
        nonlocal held
        held += sum(t.nbytes for t in tree_leaves(output) if isinstance(t, Tensor))

    for m in module.modules():
        m.register_forward_hook(add)
    args, named = problem.arguments(x)
    module(*args, **named)
    return max(1, held // count(x))
