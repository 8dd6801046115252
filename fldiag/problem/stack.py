"""Which models are multiplied side by side, and their eigenpairs.

A product with the Hessian of a small network on few examples spends most of its time between the operations: those of
ten such networks take half to a tenth of the time as one batch of matrix products. With more work a product the gain is
gone, and grouped convolutions gain nothing: they take as long as the convolutions one by one, or longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fldiag.choices import Stack
from fldiag.curvature.lanczos import EigenPairs, Search, batched_lanczos
from fldiag.curvature.r_operator import ChainOperator
from fldiag.errors import FldiagError
from fldiag.models.layers import network_links
from fldiag.models.links import Weighted
from fldiag.models.network import Network
from fldiag.problem.eigenpairs import NOISE, basis_limit
from fldiag.problem.operators import AGREEMENT, COMPARED, double_backward
from fldiag.problem.problem import Problem
from fldiag.registry import Progress
from fldiag.seeding import torch_rng

#: Weights times examples of one model up to which a stack is faster (analyses/speed/curvature.py, job round).
WORK = 2_300_000
#: Models in one stack, and how many times their own examples they may be padded to.
ROWS, PADDING = 16, 1.25


def groups(network: Network, examples: Mapping[int, int], stack: Stack) -> list[list[int]]:
    """Clients whose Hessians are multiplied together, from their numbers of ``examples``; one alone is not stacked.

    A fixed rule on shapes, whatever the order of the clients: networks of affine layers and what needs no weights, at
    most ``ROWS`` clients of similar size, each with little ``WORK``. ``on``: also with more work.

    Raises FldiagError for ``on`` and a network that cannot be stacked.
    """
    chain = network_links(network.module, network.buffers)
    is_stackable = (
        chain is not None
        and not network.buffers
        and all(link.stacks for link in chain if isinstance(link, Weighted))
    )
    if stack == "on" and not is_stackable:
        raise FldiagError(
            "stack = 'on', and the Hessians of this model cannot be stacked: it is not a sequence of affine layers",
            "use stack = 'auto' or 'off'",
            usage=True,
        )
    if not is_stackable or stack == "off":
        return [[c] for c in examples]
    stacks: list[list[int]] = []
    for c in sorted(examples, key=lambda c: (examples[c], c)):
        n, group = examples[c], stacks[-1] if stacks else []
        is_small = stack == "on" or n * network.size <= WORK
        padded = n * (len(group) + 1)
        if (
            group
            and is_small
            and len(group) < ROWS
            and padded <= PADDING * (n + sum(examples[i] for i in group))
        ):
            group.append(c)
        else:
            stacks.append([c])
    return stacks


def side_by_side(
    problems: Sequence[Problem], examples: Sequence[tuple[Tensor, Tensor]]
) -> ChainOperator:
    """Products [K, P] -> [K, P] with the Hessians of K problems of one network, each on its own (x, y).

    Where examples are fewer, a copy of the first fills up, and counts nothing.
    """
    first, longest = problems[0], max(len(y) for _, y in examples)
    loss_per_example, chain = first.probe().per_example, network_links(first.module, first.buffers)
    assert loss_per_example is not None and chain is not None

    def filled(t: Tensor) -> Tensor:
        return torch.cat([t, t[:1].expand(longest - len(t), *t.shape[1:])])

    x, y = torch.cat([filled(x) for x, _ in examples]), torch.cat([filled(y) for _, y in examples])
    share = torch.zeros(len(problems), longest, dtype=torch.float64, device=first.device)
    for row, (_, targets) in zip(share, examples, strict=True):
        row[: len(targets)] = 1 / len(targets)

    def summed(z: Tensor, y: Tensor) -> Tensor:
        with first.guarded():
            return (loss_per_example(z, y) * share.flatten()).sum()

    operator = ChainOperator(
        chain,
        summed,
        [lambda: (x, y)],
        [1.0],
        torch.stack([p.w for p in problems]),
        first.layout,
        room=first.memory // 2,
    )
    operator.shift = first.weight_decay
    return operator


def eigenpairs(
    problems: Sequence[Problem],
    k: int,
    *,
    tol: float,
    max_products: int,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[EigenPairs | None]:
    """The k largest eigenpairs of every problem as ``eigenpairs.strict_pairs`` finds them, in stacks.

    None for a problem that must go alone: its weights or loss are not finite, its examples do not count one by one, the
    stacked product is not that of double backward, a product fails, or memory is too small for two.
    """
    pairs: list[EigenPairs | None] = [None] * len(problems)
    if len(problems) < 2:
        return pairs
    able = _agreeing(problems, [i for i, p in enumerate(problems) if _is_sound(p)])
    if not able:
        return pairs
    first, size = problems[able[0]], problems[0].layout.size
    limit = basis_limit(first, k, size)
    graph = first.probe().graph_bytes * max(problems[i].n for i in able)
    rows = first.memory // 2 // (graph + 8 * size * limit)
    for start in range(0, len(able), rows) if rows > 1 else ():
        stack = able[start : start + rows]
        counts = [0] * len(stack)

        def progress_of(i: int, counts: list[int] = counts) -> Progress:
            def count(done: int, total: int, text: str) -> None:
                counts[i] = done
                if progress:
                    progress(sum(counts), total * len(counts), text)

            return count

        def operator(active: Sequence[int], stack: list[int] = stack) -> ChainOperator:
            members = [problems[stack[i]] for i in active]
            return side_by_side(members, [_examples(p) for p in members])

        # the settings of a spectrum alone, so that the results are the same
        searches = [
            Search(
                size,
                k,
                tol=tol,
                max_products=max_products,
                noise=NOISE[first.dtype],
                seed=seed,
                limit=limit,
                strict=True,
                device=first.device,
                dtype=first.dtype,
                progress=progress_of(i),
            ).steps()
            for i in range(len(stack))
        ]
        for i, result in zip(stack, batched_lanczos(operator, searches), strict=True):
            pairs[i] = None if isinstance(result, FldiagError) else result
    return pairs


def _examples(problem: Problem) -> tuple[Tensor, Tensor]:
    parts = [problem.batch(i) for i in range(len(problem.bounds))]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def _is_sound(problem: Problem) -> bool:
    try:
        facts = problem.probe()
    except FldiagError:
        return False
    return (
        facts.per_example is not None
        and facts.objective.each is None
        and not facts.batch_dependent
        and not problem.by_differences
        and not facts.derivatives.not_finite
    )


def _agreeing(problems: Sequence[Problem], able: list[int]) -> list[int]:
    """Those for which the stacked product of a random vector, on a few examples, is that of double backward."""
    members = [problems[i] for i in able]
    if not members:
        return []
    samples = [p.sample(COMPARED) for p in members]
    v = torch.randn(
        members[0].layout.size, dtype=torch.float64, generator=torch_rng(0, "compared products")
    ).to(members[0].device)
    try:
        products = side_by_side(members, samples)(v.expand(len(members), -1))
    except (RuntimeError, NotImplementedError, IndexError):  # a shape that has no rule
        return []
    agreeing = []
    for i, p, xy, product in zip(able, members, samples, products, strict=True):
        alone = double_backward(p, "hessian", p.w, [lambda xy=xy: xy], [1.0])  # type: ignore[misc]
        alone.shift = p.weight_decay
        expected = alone(v)
        if bool((product - expected).norm() <= AGREEMENT[p.dtype] * expected.norm()):
            agreeing.append(i)
    return agreeing
