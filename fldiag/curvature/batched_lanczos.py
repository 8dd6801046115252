"""Several operators at once: searches for eigenpairs in lockstep, whose products are taken together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fldiag.curvature.lanczos import EigenPairs, Steps
from fldiag.errors import FldiagError


def batched_lanczos(
    operator: Callable[[Sequence[int]], Callable[[Tensor], Tensor]], searches: Sequence[Steps]
) -> list[EigenPairs | FldiagError]:
    """Several searches, whose products are taken together; of each its result, or why it failed.

    ``operator(active)`` gives the products [len(active), P] -> [len(active), P] of these searches. It is asked for
    another one when a quarter of the searches it serves have come to their end; until then, those get zeros.
    """
    found: dict[int, EigenPairs | FldiagError] = {}
    wanted = {i: next(one) for i, one in enumerate(searches)}
    served: list[int] = []
    while wanted:
        if not served or 4 * len(wanted) <= 3 * len(served):
            served = sorted(wanted)
            multiply = operator(served)
        some = next(iter(wanted.values()))
        products = multiply(
            torch.stack([wanted[i] if i in wanted else torch.zeros_like(some) for i in served])
        )
        for i, product in zip(served, products, strict=True):
            if i not in wanted:
                continue
            try:
                wanted[i] = searches[i].send(product)
            except StopIteration as end:
                found[i] = end.value
            except FldiagError as error:
                found[i] = error
        wanted = {i: v for i, v in wanted.items() if i not in found}
    return [found[i] for i in range(len(searches))]
