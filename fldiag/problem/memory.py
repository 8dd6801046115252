"""How large a problem's batches are, and how many of their graphs are kept between products: fixed rules, never timed.

A model with gradient checkpointing is evaluated without it (``problem/checkpointing.py``), and smaller batches bound the memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fldiag.curvature.hvp import derivative, twice_differentiable
from fldiag.errors import FldiagError, first_line, out_of_memory
from fldiag.problem.ingredients import Criterion, Ingredients
from fldiag.problem.trees import Tree, clone, count, cut

#: Batch size of a model whose outputs depend on the batch (batch-norm without running statistics): such a
#: loss has no meaning without a batch size, so it is fixed and does not follow the memory at hand.
DEPENDENT = 256
#: Larger batches gain nothing: their activations leave the processor's caches (small CNN on digits, 1,500
#: examples: 46 ms at 512, 50 ms as one batch; 17 and 32 ms with channels-last weights).
LARGEST = 512
#: On a CPU larger graphs are slower by up to 1.6: they fall out of the caches and are allocated anew.
CPU_BYTES = 32 * 2**20
#: But every batch is a pass over the weights, and its gradient as large as they are. So a graph may take up to this many times
#: the size of the weights: a product of MiniLM on 32 sentences takes half as long in batches of seven as in batches of one.
CPU_WEIGHTS = 2


def batch_size(graph: int, weights: int, memory: int, device: torch.device) -> int:
    """Examples of a batch, at least one, when the graph of one takes ``graph`` bytes, all weights (frozen ones, too) ``weights``
    bytes, and there are ``memory`` bytes."""
    room = memory // 4
    if device.type == "cpu":
        room = min(room, max(CPU_BYTES, CPU_WEIGHTS * weights))
    return max(1, min(LARGEST, room // graph))


def room_for_graphs(w: Tensor, memory: int) -> int:
    """Bytes that graphs kept between products may take: half of the memory, less the product, an iteration's copy of it, the
    vector and an eigenvector, all in float64; but at least a quarter of the memory."""
    return max(memory // 4, memory // 2 - 4 * 8 * w.numel())


def graphs_to_keep(graph: int, batches: int, w: Tensor, memory: int) -> int:
    """Batches whose graphs, of ``graph`` bytes each, are kept.

    A kept graph saves 40 % of its batch's part of a product. A few of many graphs save little and fill the room: then none is.
    """
    # it also holds its gradient, and a copy of it in pieces
    fit = room_for_graphs(w, memory) // (graph + 2 * w.nbytes)
    return fit if 2 * fit >= batches else 0


def bytes_of_graph(problem: Ingredients, criterion: Criterion, x: Tree, y: Tree) -> int:
    """Bytes an example holds in the graph of the gradient: the growth from 4 examples to 8."""

    def bytes_of(size: int) -> int:
        index = torch.arange(size, device=problem.device) % count(x)
        w = problem.w.clone().requires_grad_()
        saved: dict[
            int, tuple[Tensor, int]
        ] = {}  # the tensors stay, so that no address is used twice

        def pack(t: Tensor) -> Tensor:
            saved[t.untyped_storage().data_ptr()] = (t, t.untyped_storage().nbytes())
            return t

        with twice_differentiable(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            examples = cut(x, index)
            targets = examples if y is x else cut(y, index)
            loss = criterion(problem.call(w, examples), targets)
            if not loss.requires_grad:
                raise FldiagError(
                    "the loss does not depend on the weights",
                    "remove detach() or torch.no_grad() from the model's forward",
                )
            derivative(loss, [w], twice=True)
        return sum(nbytes for _, nbytes in saved.values())

    return max(1, (bytes_of(8) - bytes_of(4)) // 4)


def refuse_hooks(problem: Ingredients, x: Tree) -> None:
    """Raises FldiagError where the model replaces tensors that autograd saves."""
    refusal = "saved tensors are replaced"
    try:
        with torch.enable_grad(), torch.autograd.graph.disable_saved_tensors_hooks(refusal):
            problem.call(problem.w.clone().requires_grad_(), clone(x))
    except RuntimeError as error:
        if out_of_memory(error):
            raise
        if refusal in str(error):
            raise FldiagError(
                "the model uses hooks on saved tensors",
                "switch them off, and let a smaller memory limit cut the batches",
            ) from None
        raise FldiagError(
            f"the model cannot be differentiated: {first_line(error)}",
            "evaluate it in a way that has a derivative here, such as attn_implementation='eager' of "
            "transformers",
        ) from error
