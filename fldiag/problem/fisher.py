"""Fisher matrices of a softmax classifier: exact, by sampled labels, and with the labels of the data.

With z the logits of an example, p their softmax and J = dz/dw, the gradient of -log p(y) is J' (p - e_y), e_y the unit vector of
label y. The mean of its outer products over the examples is the Fisher matrix for labels y ~ p (the expectation over them is
J' (diag(p) - pp') J, which is the Gauss-Newton matrix of the cross entropy), and the empirical one for the data's labels.

Definitions after Kunstner, Balles and Hennig 2019 (read in abstract and introduction), with the mean over examples in place of
the sum, as the loss is one. Weight decay is part of no likelihood, and so of none of these matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fldiag.choices import Fisher
from fldiag.curvature.hvp import GaussNewton, OutputsAndLoss, Weights, twice_differentiable
from fldiag.curvature.operator import Operator
from fldiag.errors import FldiagError
from fldiag.params import Layout
from fldiag.problem.memory import graphs_to_keep
from fldiag.problem.objective import entropy_of
from fldiag.seeding import torch_rng


def slopes(u: Tensor, p: Tensor, labels: Tensor) -> Tensor:
    """The derivatives (p - e_y)'u of -log p(y) along u [b, classes] for each of the labels [b, draws]."""
    return (p * u).sum(1, keepdim=True) - u.gather(1, labels)


class LabelledFisher(GaussNewton):
    """The mean over examples and labels of the outer products of the gradients of -log p(y), as an operator.

    It is the Gauss-Newton matrix of the loss 1/2 mean ((p - e_y)'z)^2 with p held fixed.

    Args:
        outputs: weights -> the logits [b, classes], of every batch.
        labels: the logits -> labels [b, draws], of every batch.
        shares: the batches' shares of the examples.
    """

    def __init__(
        self,
        outputs: Sequence[Callable[[Weights], Tensor]],
        labels: Sequence[Callable[[Tensor], Tensor]],
        shares: Sequence[float],
        w: Tensor,
        keep: int = 0,
        layout: Layout | None = None,
    ):
        self._labels = list(labels)

        def parts_of(i: int) -> OutputsAndLoss:
            def parts(weights: Weights) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
                z = outputs[i](weights)
                p, y = z.detach().softmax(1), self._labels[i](z.detach())
                return z, lambda u: slopes(u, p, y).square().mean() / 2

            return parts

        super().__init__([parts_of(i) for i in range(len(shares))], shares, w, keep, layout)

    def quotients(self, v: Tensor) -> Tensor:
        """v'Mv [draws] for a unit vector v [P] and the matrix M of each draw of the labels alone."""
        parts = []
        v = v.to(self._w)
        with twice_differentiable():
            for i, share in enumerate(self._shares):
                prepared = self._prepared[i] if i in self._prepared else self._prepare(i)
                if prepared is None:
                    continue
                z = prepared[0].detach()
                (along,) = self._forward(prepared, v)
                squares = slopes(along, z.softmax(1), self._labels[i](z)).double().square()
                parts.append(share * squares.mean(0))
        return torch.stack(parts).sum(0) if parts else v.new_zeros(1, dtype=torch.float64)


def fisher_operator(problem: Any, matrix: Fisher, *, draws: int, seed: int) -> Operator:
    """The Fisher matrix at ``problem.w``: ``fisher`` (exact), ``fisher-mc`` (of ``draws`` labels an example) or
    ``fisher-empirical``; ``problem`` is a Problem, whose module imports this one.

    Raises FldiagError where the loss is no likelihood, or products would be differences of gradients.
    """
    check_likelihood(problem, matrix)
    if matrix == "fisher" or problem.by_differences:
        operator = problem.hessian(matrix="ggn")
        operator.shift = 0.0
        return operator

    def outputs_of(i: int) -> Callable[[Weights], Tensor]:
        def outputs(weights: Weights) -> Tensor:
            with problem.guarded():
                z: Tensor = problem.call(weights, problem.batch(i)[0])
            return z

        return outputs

    def labels_of(i: int) -> Callable[[Tensor], Tensor]:
        if matrix == "fisher-empirical":
            return lambda z: problem.batch(i)[1].long()[:, None]
        start, stop = problem.bounds[i]
        return lambda z: sample_labels(z, chances[start:stop])

    chances = torch.rand(
        problem.n, draws, dtype=torch.float64, generator=torch_rng(seed, "labels of a Fisher")
    )
    batches = range(len(problem.bounds))
    shares = [(stop - start) / problem.n for start, stop in problem.bounds]
    graph = problem.probe().graph_bytes * max(stop - start for start, stop in problem.bounds)
    w = problem.w.clone()
    keep = graphs_to_keep(graph, len(batches), w, problem.memory)
    return LabelledFisher(
        [outputs_of(i) for i in batches],
        [labels_of(i) for i in batches],
        shares,
        w,
        keep,
        problem.layout,
    )


def sample_labels(z: Tensor, chances: Tensor) -> Tensor:
    """Labels [b, draws] of the softmax of z [b, classes], from numbers between 0 and 1 [b, draws].

    >>> sample_labels(torch.zeros(1, 4), torch.tensor([[0.1, 0.3, 0.9]])).tolist()
    [[0, 1, 3]]
    """
    bounds = z.double().softmax(1).cumsum(1)
    labels = torch.searchsorted(bounds, chances.to(bounds), right=True)
    return labels.clamp_max(z.shape[1] - 1)


def check_likelihood(problem: Any, matrix: Fisher) -> None:
    """Refuse a loss that is not the mean of -log p(y) for class labels y."""
    entropy = entropy_of(problem.user_loss)
    if entropy is None or entropy.take is not F.cross_entropy:
        raise FldiagError(
            f"matrix = {matrix!r} is that of a likelihood, and this loss is not the cross entropy of class labels",
            "use matrix = 'ggn', or cross_entropy (torch.nn.functional) as the loss",
            usage=True,
        )
    if entropy.weight is not None or entropy.options.get("label_smoothing"):
        raise FldiagError(
            f"matrix = {matrix!r} is that of a likelihood, which a loss with class weights or label smoothing is not",
            "use matrix = 'ggn', or the cross entropy without them",
            usage=True,
        )
    x, y = problem.sample(2)
    with problem.guarded(), torch.no_grad():
        z = problem.call(problem.w, x)
    is_integer = isinstance(y, Tensor) and not y.is_floating_point() and y.dtype != torch.bool
    if not is_integer or {problem.reduction, entropy.reduction} != {"mean"}:
        raise FldiagError(
            f"matrix = {matrix!r} takes the mean loss of labels that are class numbers",
            "use matrix = 'ggn', or the mean cross entropy of class numbers",
            usage=True,
        )
    is_simple = y.ndim == 1 and z.ndim == 2 and problem.probe().objective.counts is None
    if matrix != "fisher" and not is_simple:
        raise FldiagError(
            f"matrix = {matrix!r} takes one label an example, and some have several or none",
            "use matrix = 'fisher', whose expectation over the labels is exact",
            usage=True,
        )
