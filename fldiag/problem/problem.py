"""A Problem is all a diagnostic sees: a model, a loss, its weights and buffers, and a data slice."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fldiag.choices import Matrix
from fldiag.curvature.finite_differences import Differences, DifferenceStep, best_step
from fldiag.curvature.hvp import derivative
from fldiag.curvature.operator import Operator, OperatorBlock, finite, not_finite
from fldiag.errors import FldiagError
from fldiag.problem.ingredients import Criterion, Ingredients
from fldiag.problem.inputs import TensorData
from fldiag.problem.memory import (
    DEPENDENT,
    batch_size,
    graphs_to_keep,
)
from fldiag.problem.operators import Batches, block_index, double_backward
from fldiag.problem.probe import Facts, examine
from fldiag.problem.scores import Scores, score
from fldiag.problem.trees import Tree, count, join, nbytes
from fldiag.seeding import torch_rng


def _infinite_gradient() -> FldiagError:
    return FldiagError(
        "the loss is finite at these weights and its gradient is not: a square root, power or logarithm at 0",
        "keep its argument off 0, for example sqrt(x + 1e-12)",
    )


class Problem(Ingredients):
    """A loss as a function of a weight vector ``w`` [P] on a fixed data slice.

    All named parameters count as weights, including frozen ones: ``requires_grad`` says how a model was trained, not what its
    loss surface is. With ``trainable`` the frozen ones are constants. Sums over batches are float64.

    Args:
        model: any module. It is copied and put in eval mode; your module, its buffers, its mode and the global random state are
            not changed.
        loss: (outputs, y) -> the mean over the examples of a batch, or a pair (sum, count) where masks or weights decide how
            much counts; then the loss of the slice is all sums over all counts. Class weights, ignored labels and label
            smoothing of torch's ``cross_entropy`` are understood, and so is the ``loss`` that a transformers model returns
            itself (``lambda out, batch: out.loss``).
        data: a pair (x, y); a dict, from which the model gets the arguments of its forward and the loss all entries; a
            ``Dataset`` or ``DataLoader``, drawn once, or a list of batches; or a slice with ``n``, ``name`` and
            ``batch(start, stop)``. x and y are tensors, or tensors in dicts (passed by name) and tuples (passed by place).
            Integers stay integers. Of three or more entries the required arguments of forward are the inputs, the next one is
            the target, and ``remarks`` says so.
        params: weights to take instead of the module's: a vector [P] or a dict of named tensors.
        buffers: buffers to take instead of the module's, by name.
        name: what tables and pictures call it.
        dtype: float32 or float64, in which everything is evaluated.
        device: auto, cpu, cuda, cuda:N or mps; by default where the model is.
        memory: bytes that a batch and its graph may take.
        labels: columns of every result table, such as method, round, seed, moment, scope, client.
        trainable: only parameters with ``requires_grad`` count as weights (adapters, a head); the others are constants, and
            ``params`` still names them all.
        weight_decay: λ of the term λ/2 ‖w‖² over these weights (biases included, added once, also to a sum), a part of the
            loss and of its gradient, curvature and surfaces. Your loss does not contain it.

    Raises:
        FldiagError: model, weights, buffers or data do not fit each other.

    >>> net, x, y = torch.nn.Linear(2, 3), torch.eye(2), torch.tensor([0, 2])
    >>> Problem(net, torch.nn.functional.cross_entropy, (x, y), name="mine")
    Problem('mine', 9 parameters, 2 examples of 'data', torch.float32)
    """

    #: The stored checkpoint that it was opened from, and its run where that was opened: their clients' weights and rounds are
    #: further models (``fldiag.runs.open_problem``). They do not travel to workers.
    checkpoint: Any = None
    run: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Without what was established once: whoever gets a copy does that again."""
        state = {
            name: value
            for name, value in self.__dict__.items()
            if not isinstance(getattr(type(self), name, None), cached_property)
        }
        return {**state, "originals": (), "checkpoint": None, "run": None}

    def __repr__(self) -> str:
        name = f"{self.name!r}, " if self.name else ""
        return f"Problem({name}{self.layout.size:,} parameters, {self.n} examples of {self.slice_name!r}, {self.dtype})"

    def on(self, examples: Sequence[int], name: str) -> Problem:
        """The same loss at the same weights on some examples (their numbers in the slice), which are called ``name``."""
        problem = copy.copy(self)
        parts = [self._data.batch(i, i + 1) for i in examples]  # few: they are held in memory
        x = join([part[0] for part in parts])
        y = x if parts[0][1] is parts[0][0] else join([part[1] for part in parts])
        problem._data = TensorData(x, y, name)
        problem.n, problem.slice_name = len(examples), name
        return problem

    # -- what is known about the problem

    def probe(self) -> Facts:
        """Checks once, at ``w``, that the loss is a function of the weights alone and the mean over examples, and that its
        gradient and the products with its Hessian are its derivatives.

        Raises FldiagError naming the culprit: active dropout or other randomness, running batch-norm, data
        that change between readings, a loss that is no mean or reads the weights itself, a gradient that is not the derivative
        of the loss, labels out of range, NaN. Every evaluation calls it first.
        """
        return self._facts

    @cached_property
    def _facts(self) -> Facts:
        facts = examine(self)
        self.remarks += [text for text in facts.remarks if text not in self.remarks]
        return facts

    @property
    def criterion(self) -> Criterion:
        """(outputs, y) of a batch -> the mean over its examples, of which the loss of the slice is the mean; see ``loss``."""
        return self._facts.objective.criterion

    @property
    def batch_dependent(self) -> bool:
        """Whether an example's output depends on its batch (batch-norm without running statistics).

        The slice is then always cut into equal batches of at most ``memory.DEPENDENT`` examples.
        """
        return self._facts.batch_dependent

    @cached_property
    def bounds(self) -> list[tuple[int, int]]:
        """The batches as (start, stop), of sizes that differ by at most one; the rule is fixed, never timed."""
        all_weights = self.w.nbytes + sum(t.nbytes for t in self.frozen.values())
        size = (
            DEPENDENT
            if self.batch_dependent
            else batch_size(self._facts.graph_bytes, all_weights, self.memory, self.device)
        )
        count = -(-self.n // size)
        return [(i * self.n // count, (i + 1) * self.n // count) for i in range(count)]

    @property
    def _shares(self) -> list[float]:
        """The batches' shares of the examples."""
        return [(stop - start) / self.n for start, stop in self.bounds]

    @property
    def common(self) -> dict[str, Any]:
        """The columns every row of this problem's result tables shares."""
        decay = {"weight_decay": self.weight_decay} if self.weight_decay else {}
        return {
            "run": self.name,
            "slice": self.slice_name,
            "n_examples": self.n,
            **decay,
            **self.labels,
        }

    @property
    def by_differences(self) -> bool:
        """Whether products are taken by differences of gradients: double backward fails or is wrong for this model."""
        return self.probe().derivatives.wrong_products

    # -- parts of an evaluation

    @cached_property
    def _batches(self) -> dict[int, tuple[Tree, Tree]]:
        """The batches that stay in memory."""
        return {}

    def batch(self, i: int) -> tuple[Tree, Tree]:
        """Batch i, kept for the next evaluation while all batches fit a quarter of the memory."""
        if i not in self._batches:
            start, stop = self.bounds[i]
            with self.guarded():
                x, y = self.read(start, stop)
            if nbytes(x) / count(x) * self.n > self.memory / 4:
                return x, y
            self._batches[i] = x, y
        return self._batches[i]

    def _vector(self, w: Tensor | None) -> Tensor:
        if w is None:
            return self.w
        if w.shape != self.w.shape:
            raise FldiagError(
                f"weights {list(w.shape)} for a model of {self.layout.size} parameters",
                "give a flat vector in the order of layout.names",
            )
        return w.detach().to(self.w)

    # -- evaluations

    def views_for_evaluation(self, w: Tensor) -> dict[str, Tensor]:
        """Named weights at w [P], in the memory format that is fast without gradients."""
        views = self.layout.views(w)
        if not self._facts.channels_last:
            return views
        # also the weights: with one input channel the layout of x alone decides nothing
        return {
            n: v.clone(memory_format=torch.channels_last) if v.ndim == 4 else v
            for n, v in views.items()
        }

    def batch_for_evaluation(self, i: int) -> tuple[Tree, Tree]:
        """Batch i, its inputs in that memory format."""
        x, y = self.batch(i)
        return (
            x.contiguous(memory_format=torch.channels_last) if self._facts.channels_last else x
        ), y

    def evaluate(
        self, w: Tensor, buffers: dict[str, Tensor] | None = None
    ) -> Iterator[tuple[Any, Tree]]:
        """The model's outputs and the targets of every batch at w [P] (and copies of buffers; default: its own)."""
        views = self.views_for_evaluation(w)
        for i in range(len(self.bounds)):
            x, y = self.batch_for_evaluation(i)
            copies = None if buffers is None else {n: b.clone() for n, b in buffers.items()}
            with self.guarded(), torch.no_grad():
                z = self.call(views, x, copies)
            yield z, y

    def outputs(self, w: Tensor | None = None) -> tuple[Any, Tree]:
        """The model's outputs [n, ...] on the whole slice, and the targets [n, ...]."""
        self.probe()
        parts = list(self.evaluate(self._vector(w)))
        return join([z for z, _ in parts]), join([y for _, y in parts])

    def losses(self, w: Tensor | None = None) -> Tensor | None:
        """The loss of each example [n] in float64, None when the loss cannot be taken per example. Weight decay is in it as far
        as the example counts."""
        self.probe()
        w = self._vector(w)
        return self.losses_of(w, self.evaluate(w))

    def losses_of(self, w: Tensor, batches: Iterable[tuple[Any, Tree]]) -> Tensor | None:
        """The same from (outputs, targets) at w [P] of all batches, in their order."""
        per_example = self.probe().per_example
        if per_example is None:
            return None
        with self.guarded(), torch.no_grad():
            return self.with_decay(torch.cat([per_example(z, y) for z, y in batches]), w)

    def with_decay(self, losses: Tensor, w: Tensor) -> Tensor:
        """Losses of the examples [n] with weight decay at w [P], so that their mean is the loss."""
        if not self.weight_decay:
            return losses
        counts = self.recall("counts", self._counts)
        return losses + self.penalty(w) * (1.0 if counts is None else counts)

    def loss(self, w: Tensor | None = None) -> tuple[float, float | None]:
        """Mean loss at w [P] (default: ``.w``) and its standard error over the examples.

        The standard error is None when the loss cannot be taken per example or there is only one. A loss that
        overflows far from the weights is returned as inf or NaN.
        """
        self.probe()
        w = self._vector(w)
        return self.loss_of(w, self.evaluate(w))

    def loss_of(self, w: Tensor, batches: Iterable[tuple[Any, Tree]]) -> tuple[float, float | None]:
        """The same from (outputs, targets) at w [P] of all batches, in their order."""
        losses = self.losses_of(w, batches)
        if losses is not None:
            return float(losses.mean()), self.stderr(losses)
        with self.guarded(), torch.no_grad():
            parts = [
                float(self.criterion(z, y)) * (stop - start) / self.n
                for (z, y), (start, stop) in zip(batches, self.bounds, strict=True)
            ]
        return math.fsum(parts) + self.penalty(w), None

    def scores(self, w: Tensor | None = None, buffers: dict[str, Tensor] | None = None) -> Scores:
        """Losses and, of a classification, right answers at w [P] (default: ``.w``) and buffers, of one forward pass."""
        self.probe()
        w = self._vector(w)
        return self.scores_of(w, self.evaluate(w, buffers))

    def scores_of(self, w: Tensor, batches: Iterable[tuple[Any, Tree]]) -> Scores:
        """The same from (outputs, targets) at w [P] of all batches, in their order."""
        scores = score(self, batches, self.probe().per_example)
        if not self.weight_decay:
            return scores
        penalty, guess_loss = self.penalty(w), scores.guess_loss
        return replace(
            scores,
            loss=scores.loss + penalty,
            penalty=penalty,
            guess_loss=None if guess_loss is None else guess_loss + penalty,
            each=None if scores.each is None else self.with_decay(scores.each, w),
        )

    def stderr(self, losses: Tensor) -> float | None:
        """The standard error of the mean of the examples' losses [n]; where they are not counted alike, that of the ratio of
        sums (to first order). None for one example."""
        if self.n < 2:
            return None
        counts = self.recall("counts", self._counts)
        return float(
            (losses if counts is None else losses - losses.mean() * counts).std()
        ) / math.sqrt(self.n)

    def _counts(self) -> Tensor | None:
        """By how much every example counts [n]."""
        each = self._facts.objective.counts
        if each is None:
            return None
        with self.guarded(), torch.no_grad():
            return torch.cat([each(z, y) for z, y in self.evaluate(self.w)])

    def _terms(self) -> list[Callable[[Tensor], Tensor]]:
        """The mean loss of each batch as a function of the weights."""

        def term(i: int) -> Callable[[Tensor], Tensor]:
            def batch_loss(w: Tensor) -> Tensor:
                x, y = self.batch(i)
                with self.guarded():
                    return self.criterion(self.call(w, x), y).reshape(())

            return batch_loss

        return [term(i) for i in range(len(self.bounds))]

    def gradient(self, w: Tensor | None = None) -> Tensor:
        """The gradient of the mean loss at w, [P] in float64."""
        at_own, w = w is None, self._vector(w)
        self.probe()
        at = w.clone().requires_grad_()
        total = torch.zeros_like(w, dtype=torch.float64)
        for loss, share in zip(self._terms(), self._shares, strict=True):
            with torch.enable_grad(), self.guarded():
                (part,) = derivative(loss(at), [at])
            if part is not None:
                total.add_(part, alpha=share)
        if at_own and not bool(total.isfinite().all()):
            raise _infinite_gradient()
        return total.add_(w, alpha=self.weight_decay) if self.weight_decay else total

    @cached_property
    def _recalled(self) -> dict[Any, Any]:
        return {}

    def recall(self, key: Any, compute: Callable[[], Any]) -> Any:
        """What ``compute`` returned the first time: facts that diagnostics establish once per problem."""
        if key not in self._recalled:
            self._recalled[key] = compute()
        return self._recalled[key]

    def hessian(
        self, w: Tensor | None = None, *, keep: bool = True, matrix: Matrix = "hessian"
    ) -> Operator:
        """The Hessian (or Gauss-Newton matrix, ``ggn``) of the mean loss at w (default: ``.w``) as an operator
        ``H(v) -> Hv`` in float64.

        With ``keep``, what does not depend on v stays alive between products as far as ``memory.room_for_graphs`` reaches;
        ``release()`` frees it. ``w`` is copied; weights that you change yourself (``problem.w``) are not.

        Raises FldiagError for an unknown matrix, and for ``ggn`` by differences of gradients.
        """
        if w is None:
            not_finite_part = self.probe().derivatives.not_finite
            if not_finite_part == "gradient":
                raise _infinite_gradient()
            if not_finite_part == "product":
                raise not_finite()
        w = self.w if w is None else self._vector(w).clone()
        if self.by_differences:
            if matrix != "hessian":
                raise FldiagError(
                    "the Gauss-Newton matrix cannot be computed by differences of gradients",
                    "use matrix = 'hessian'",
                    usage=True,
                )
            return Differences(self.gradient, w, self.step.length)
        if matrix not in ("hessian", "ggn"):
            raise FldiagError(
                f"matrix = {matrix!r} is not known", "use 'hessian' or 'ggn'", usage=True
            )
        self.probe()
        batches: Batches = [lambda i=i: self.batch(i) for i in range(len(self.bounds))]  # type: ignore[misc]
        memory = self.memory if keep else 0
        graph = self.probe().graph_bytes * max(stop - start for start, stop in self.bounds)
        graphs = graphs_to_keep(graph, len(batches), w, memory)
        product = double_backward(self, matrix, w, batches, self._shares, keep=graphs)
        product.shift = self.weight_decay
        return product

    def dense(
        self,
        layers: str | Sequence[str] | None = None,
        *,
        matrix: Matrix = "hessian",
    ) -> Tensor:
        """The Hessian or Gauss-Newton matrix at ``.w`` as a dense matrix, or its block of some layers.

        Args:
            layers: names or patterns (``features.*``) of layers or of their tensors; None: the whole matrix.
            matrix: hessian or ggn (of the cross entropy also the Fisher matrix).

        Returns:
            [p, p] in float64, symmetric; rows and columns in the order of the weights. It takes p products.

        Raises:
            FldiagError: nothing has such a name, or the matrix does not fit into ``memory``.
        """
        index = torch.arange(self.layout.size, device=self.device)
        if layers is not None:
            patterns = [layers] if isinstance(layers, str) else list(layers)
            names = [
                name
                for layer, tensors in self.layout.layers.items()
                for name in tensors
                if any(fnmatchcase(text, p) for text in (layer, name) for p in patterns)
            ]
            index = block_index(self, names or patterns, "layers")
        size = len(index)
        if 16 * size * size > self.memory:
            raise FldiagError(
                f"a dense matrix of {size:,} weights takes {16 * size * size / 1e9:,.1f} GB while it is made, and "
                f"memory = {self.memory / 1e9:,.1f} GB",
                "choose fewer layers, or a larger memory",
            )
        operator = self.hessian(matrix=matrix)
        block, rows = OperatorBlock(operator, index), torch.eye(size, dtype=torch.float64)
        for i in range(size):
            rows[i] = block(rows[i].to(self.device)).cpu()
        operator.release()
        return ((rows + rows.T) / 2).to(self.device)

    @cached_property
    def step(self) -> DifferenceStep:
        """Of products by differences."""
        rng = torch_rng(0, "direction to try steps in")
        v = torch.randn(self.layout.size, dtype=torch.float64, generator=rng).to(self.device)
        return best_step(self.gradient, self.w, v)

    def estimator_name(self, estimator: str) -> str:
        """The estimator's name, with step and error where products are differences."""
        return f"{estimator} ({self.step})" if self.by_differences else estimator

    def hvp(self, v: Tensor, w: Tensor | None = None) -> Tensor:
        """The Hessian at w (default: ``.w``) times v [P], in float64; ``hessian`` is for several."""
        return finite(self.hessian(w, keep=False)(v))
