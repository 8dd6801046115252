"""A Problem is all that a diagnostic of weights sees: a model, a loss, its weights and buffers, and a data slice."""

from __future__ import annotations

import contextlib
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from types import CodeType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from fldiag.curvature.operator import Curvature, Differences, finite, slopes
from fldiag.device import device_of
from fldiag.errors import FldiagError, error_place
from fldiag.losses import form_of
from fldiag.params import Layout, unwrap_model
from fldiag.problem.data import (
    Batch,
    Function,
    Tensors,
    Tree,
    arguments,
    as_slice,
    convert,
    join,
    same,
)
from fldiag.problem.loss import Loss, Scores, answers, as_sums
from fldiag.problem.module import check_problem, copy_module, load, named, saved, tensors_of
from fldiag.results.files import digest
from fldiag.results.table import Row
from fldiag.sections import Matrix

#: Examples of a batch at most; more gain nothing, as their activations leave the processor's caches.
LARGEST = 512
#: On a CPU, larger graphs are slower by up to 1.6. But every batch is a pass over the weights, so that a graph may be four times
#: as large as they are.
CPU_BYTES = 16 * 2**20
#: Relative rounding error of a product: what is smaller than this share of the matrix's norm counts as zero.
NOISE = {torch.float32: 1e-6, torch.float64: 1e-12}


class Problem:
    """A loss as a function of a weight vector ``w`` [P] on a fixed data slice. Sums over batches are float64.

    All named parameters count as weights, including frozen ones: ``requires_grad`` says how a model was trained, not what its
    loss surface is. ``remarks`` says in words what was decided about model, loss and data.

    Args:
        model: any module. It is copied and put in eval mode; your module, its buffers, its mode and the global random state are
            not changed.
        loss: (outputs, y) -> the mean over the examples of a batch, or a pair (sum, count) where masks or weights decide how
            much counts; then the loss of the slice is all sums over all counts. Torch's losses of class labels are understood
            with all their options, and so is the ``loss`` that a transformers model returns itself.
        data: see ``fldiag.problem.data.as_slice``.
        params: weights to take instead of the module's: a vector [P] or named tensors. The module's own ``load_state_dict``
            takes them.
        buffers: buffers to take instead of the module's, by name.
        name: what tables and pictures call it.
        dtype: float32 or float64, in which everything is evaluated.
        device: auto, cpu, cuda, cuda:N or mps; by default where the model is.
        memory: bytes that batches and their graphs may take.
        labels: columns of every result table, such as method, round, seed, moment, scope, client.
        trainable: only parameters with ``requires_grad`` count as weights (adapters, a head); the others are constants, and
            ``params`` still names them all.
        weight_decay: λ of the term λ/2 ‖w‖² over these weights, a part of the loss and of its gradient and curvature.

    Raises:
        FldiagError: model, weights, buffers or data do not fit each other.

    >>> net, x, y = nn.Linear(2, 3), torch.eye(2), torch.tensor([0, 2])
    >>> Problem(net, nn.functional.cross_entropy, (x, y), name="mine")
    Problem('mine', 9 parameters, 2 examples of 'data', torch.float32)
    """

    #: The stored checkpoint that it was opened from, and its run where that was opened (``fldiag.runs.open_problem``).
    checkpoint: Any = None
    run: Any = None

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Any],
        data: Any,
        params: Tensor | Tensors | None = None,
        buffers: Tensors | None = None,
        name: str = "",
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device | None = None,
        memory: int = 2 * 2**30,
        labels: Mapping[str, Any] | None = None,
        trainable: bool = False,
        weight_decay: float = 0.0,
    ):
        self.model, self.user_loss, self.remarks = unwrap_model(model), loss, list[str]()
        self.name, self.labels, self.trainable = name, dict(labels or {}), trainable
        self.dtype, self.memory, self.weight_decay = dtype, memory, weight_decay
        self.layout = Layout.of(self.model, trainable)
        place = next(self.model.parameters()).device
        self.device = place if device is None else torch.device(device_of(device, dtype))
        with self.guarded():
            self.data = as_slice(data)
            self.module = copy_module(self.model).to(self.device, dtype)
            if params is not None or buffers is not None:
                load(self.module, params, buffers)
            self.module.eval()
        self.n, self.slice_name = self.data.n, self.data.name
        #: What was done to the inputs before the model sees them, in words.
        self.inputs = str(getattr(self.data, "inputs", "as passed"))
        self.place(tensors_of(self.module))

    def place(self, tensors: Tensors) -> None:
        """Take copies of all the model's tensors, by name, in the problem's precision; ``w`` [P] are the weights."""
        copies = {n: t.detach().clone() for n, t in tensors.items()}
        self.state = convert(copies, self.dtype, self.device)
        self.w = self.layout.row(self.state)

    def __repr__(self) -> str:
        return f"Problem({self.name!r}, {self.layout.size:,} parameters, {self.n} examples of {self.slice_name!r}, {self.dtype})"

    def __getstate__(self) -> dict[str, Any]:
        """Without what was computed once: whoever gets a copy does that again."""
        own = {**vars(self), "model": self.module, "checkpoint": None, "run": None}
        return {k: v for k, v in own.items() if type(getattr(Problem, k, 0)) is not cached_property}

    def at(
        self,
        params: Tensor | Tensors,
        buffers: Tensors | None = None,
        *,
        name: str = "",
        labels: Mapping[str, Any] | None = None,
    ) -> Self:
        """The same loss on the same examples around other weights.

        Args:
            params: a vector of all the model's parameters, or named tensors, with buffers among them.
            buffers: by name; those that are not named stay.
            name: of the new problem.
            labels: its columns.

        Returns:
            Another problem.

        Raises:
            FldiagError: the weights do not fit.
        """
        tensors = {n: self.state[n] for n, _ in self.module.named_buffers()}
        tensors |= {**named(params, Layout.of(self.module)), **(buffers or {})}
        misfits = [
            n for n, t in self.state.items() if n not in tensors or tensors[n].shape != t.shape
        ]
        if misfits:
            raise FldiagError(f"weights do not fit the model: {', '.join(misfits[:6])}")
        # with what was computed once and does not depend on weights
        problem = object.__new__(type(self))
        vars(problem).update({k: v for k, v in vars(self).items() if k not in ("centre", "noise")})
        problem.place({n: tensors[n] for n in self.state})
        problem.name, problem.labels = name or self.name, dict(labels or self.labels)
        problem.remarks = [*self.remarks]
        return problem

    @property
    def common(self) -> Row:
        """The columns that every row of this problem's tables shares."""
        about: Row = {"run": self.name, "slice": self.slice_name, "n_examples": self.n}
        if self.weight_decay:
            about["weight_decay"] = self.weight_decay
        return about | self.labels

    def digest(self) -> str:
        """Changes when the model, loss, weights, buffers, data or precision change."""
        options = form_of(self.user_loss), self.weight_decay, self.dtype, self.layout.names
        code = [self.module, *options, *map(code_of, [self.user_loss, *self.module.modules()])]
        loss = float(self.total(self.w, *self.sample()))  # attributes of the model count, too
        # in pieces of fixed size: memory must not enter
        data = [digest(*self.read(i, min(i + 1024, self.n))) for i in range(0, self.n, 1024)]
        return digest(text_of(code), self.state, data, f"{loss:.4g}")

    # -- parts of an evaluation

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """A context in which user code runs.

        Global random states are put back, numbers are in the problem's precision, attention has a second derivative, encoder
        layers are the same function without gradients, and an error is a FldiagError.
        """
        kind, fast = self.device.type, torch.backends.mha
        numpy, python = np.random.get_state(), random.getstate()
        is_fast = fast.get_fastpath_enabled()
        fast.set_fastpath_enabled(False)
        precision, attention = torch.autocast(kind, enabled=False), sdpa_kernel(SDPBackend.MATH)
        try:
            with (
                torch.random.fork_rng([self.device] if kind == "cuda" else []),
                precision,
                attention,
            ):
                yield
        except FldiagError:
            raise
        except Exception as error:  # the user's model, loss or data may raise anything
            raise FldiagError(
                f"model, weights, loss or data failed: {type(error).__name__}: {error}{error_place(error)}",
                "check that they fit each other in shapes, types and names, with labels in range",
                usage=True,
            ) from error
        finally:
            np.random.set_state(numpy)
            random.setstate(python)
            fast.set_fastpath_enabled(is_fast)

    def read(self, start: int, stop: int) -> Batch:
        """Examples start..stop-1, fresh from the slice, on the device."""
        with self.guarded():
            return convert(self.data.batch(start, stop), self.dtype, self.device)

    def sample(self, most: int = 32) -> Batch:
        """Up to ``most`` examples in four runs over the slice, which is often sorted by class."""
        starts = [i * self.n // 4 for i in range(4)] if self.n > most else [0]
        return join([self.read(start, start + most // len(starts)) for start in starts])

    def call(self, w: Tensor | Tensors, x: Tree, buffers: Tensors | None = None) -> Any:
        """The model's outputs on x [b, ...] with weights w [P], or by name; and buffers that are not its own."""
        tensors = {**self.state, **named(w, self.layout), **(buffers or {})}
        with self.guarded():
            return torch.func.functional_call(self.module, tensors, *arguments(self.module, x))

    def total(self, w: Tensor | Tensors, x: Tree, y: Tree) -> Tensor:
        """The loss of a batch as a sum."""
        return self.criterion.total(self.call(w, x), y)

    def slope(self, w: Tensor, x: Tree, y: Tree, twice: bool = False) -> Tensor:
        """The gradient of a batch's sum [P], which can be differentiated again if ``twice``."""
        leaf = w.detach().requires_grad_()
        with torch.enable_grad(), self.guarded():
            return slopes(self.total(leaf, x, y), [leaf], twice)[0]

    @cached_property
    def criterion(self) -> Loss:
        """The loss as two sums."""
        x, y = self.sample()
        with self.guarded(), torch.no_grad():
            return as_sums(self.user_loss, partial(self.call, self.w), x, y)

    def probe(self) -> None:
        """Check once that loss and derivatives are what they seem. Raises FldiagError naming what is wrong."""
        assert self._probed

    @cached_property
    def _probed(self) -> tuple[torch.dtype, bool]:
        dtype, by_differences = check_problem(self)
        if dtype != self.dtype:
            self.remarks.append(
                f"the model computes in {str(dtype)[6:]} within its forward (autocast?): numbers are as coarse"
            )
        if by_differences:
            self.remarks.append("products are central differences of the gradient")
        if self.criterion.mean_over != "examples":
            self.remarks.append(f"the loss is the mean over {self.criterion.mean_over}")
        return dtype, by_differences

    @property
    def by_differences(self) -> bool:
        """Whether products are differences of gradients: the second derivative is wrong, or there is none."""
        return self._probed[1]

    @cached_property
    def noise(self) -> float:
        """The relative rounding error of a product."""
        dtype, operator = self._probed[0], self.hessian()
        noise = NOISE.get(dtype, torch.finfo(dtype).eps)
        return max(noise, operator.noise()) if isinstance(operator, Differences) else noise

    @cached_property
    def bytes_of_example(self) -> int:
        """Memory that an example takes in the graph of the gradient: the growth from 4 examples to 8."""
        keeps_graph = not self.by_differences  # the probe first: it is not counted

        def count_bytes(examples: int) -> int:
            run = partial(self.slope, self.w, *self.sample(examples), keeps_graph)
            storages = [t.untyped_storage() for t in saved(run)]
            return sum({s.data_ptr(): s.nbytes() for s in storages}.values())

        return max(1, (count_bytes(8) - count_bytes(4)) // 4)

    @cached_property
    def bounds(self) -> list[tuple[int, int]]:
        """The batches as (start, stop), of sizes that differ by at most one; the rule is fixed, never timed."""
        room = self.memory // 4
        if self.device.type == "cpu":
            room = min(room, max(CPU_BYTES, 4 * sum(t.nbytes for t in self.state.values())))
        size = max(1, min(LARGEST, room // self.bytes_of_example))
        parts = -(-self.n // size)
        return [(i * self.n // parts, (i + 1) * self.n // parts) for i in range(parts)]

    def rows_in_memory(self, size: int) -> int:
        """How many vectors of this size in float64 fit a quarter of the memory."""
        return self.memory // 4 // (8 * size)

    @cached_property
    def batch(self) -> Function:
        """Number -> batch, kept for the next evaluation where all of them fit a quarter of the memory."""
        size = sum(t.nbytes for t in tree_leaves(self.read(*self.bounds[0])))
        return lru_cache(self.memory // 4 // size)(lambda i: self.read(*self.bounds[i]))

    def batches(self) -> Iterator[Batch]:
        """The slice, batch by batch."""
        return map(self.batch, range(len(self.bounds)))

    def _vector(self, w: Tensor | None) -> Tensor:
        return self.w if w is None else self.layout.row(named(w, self.layout)).to(self.w)

    # -- evaluations

    @torch.no_grad()
    def evaluate(self, w: Tensor | None = None, buffers: Tensors | None = None) -> Iterator[Batch]:
        """The model's outputs and the targets of every batch at w [P] (default: ``.w``), without gradients."""
        self.probe()
        views = self._arrange(self.layout.views(self._vector(w)))
        for x, y in self.batches():
            yield self.call(views, x, buffers), y

    @cached_property
    def _arrange(self) -> Function:
        """Channels last: convolutions without gradients run up to twice as fast; a model that uses view() may refuse."""
        (x, _), views = self.sample(8), self.layout.views(self.w)
        with contextlib.suppress(FldiagError), torch.no_grad():
            if same(self.call(channels_last(views), x), self.call(views, x), 1e-4):
                return channels_last
        return dict

    def scores(self, w: Tensor | None = None, buffers: Tensors | None = None) -> Scores:
        """Loss and right answers at w [P] (default: ``.w``), of one forward pass.

        Raises FldiagError where nothing counts.
        """
        with torch.no_grad(), self.guarded():
            batches = [
                (
                    self.criterion.sums(z, y),
                    self.criterion.each(z, y),
                    answers(self.user_loss, z, y),
                )
                for z, y in self.evaluate(w, buffers)
            ]
        sums, singles, replies = zip(*batches, strict=True)
        total, weight = (math.fsum(map(float, part)) for part in zip(*sums, strict=True))
        if not weight > 0:
            raise FldiagError("the loss counts none of the targets")
        penalty = self.weight_decay / 2 * float(self._vector(w).double().square().sum())
        each = counts = right = labels = None
        if None not in singles:
            each, counts = (self.n / weight * part for part in join(singles))
            each = each + penalty * counts
        if None not in replies:
            right, labels = (t.double() for t in join(replies))
            right, labels = right * (self.n / float(labels.sum())), labels.sum(0)
        return Scores(total / weight + penalty, each, right, counts, labels, weight)

    @cached_property
    def centre(self) -> Scores:
        """``scores`` at the weights. Raises FldiagError when the loss is not finite."""
        scores = self.scores()
        finite(torch.tensor(scores.loss))
        return scores

    def outputs(self) -> Batch:
        """The model's outputs [n, ...] on the whole slice, and the targets [n, ...]."""
        return join(list(self.evaluate()))

    def loss(self, w: Tensor | None = None) -> tuple[float, float | None]:
        """The mean loss at w [P] (default: ``.w``) and its standard error over the examples.

        The standard error is None when the loss cannot be taken per example or there is only one. A loss that
        overflows far from the weights is returned as inf or NaN.
        """
        scores = self.scores(w)
        return scores.loss, scores.stderr

    def gradient(self, w: Tensor | None = None) -> Tensor:
        """The gradient of the mean loss at w [P] (default: ``.w``), [P] in float64."""
        at, weight = self._vector(w), self.centre.weight
        total = weight * self.weight_decay * at.double()
        for x, y in self.batches():
            total += self.slope(at, x, y)
        return finite(total / weight) if w is None else total / weight

    def hessian(
        self,
        w: Tensor | None = None,
        *,
        matrix: Matrix = "hessian",
        names: Sequence[str] | None = None,
    ) -> Curvature | Differences:
        """The Hessian, or the Gauss-Newton matrix, of the mean loss as an operator v -> Hv in float64.

        Args:
            w: weights [P]; default: ``.w``.
            matrix: hessian or ggn (of the cross entropy also the Fisher matrix).
            names: only the block of these tensors; v has their entries in this order.

        Returns:
            The operator. It keeps graphs for its next product, as far as half of the memory reaches.

        Raises:
            FldiagError: parts of a matrix by differences of gradients.
        """
        at, names = self._vector(w), names or self.layout.names
        if self.by_differences:
            if matrix != "hessian" or len(names) < len(self.layout.names):
                raise FldiagError("by differences there is only the whole Hessian", usage=True)
            return Differences(self.gradient, at, self.layout.sizes)
        views, weight = self.layout.views(at), self.centre.weight

        def outputs_of(i: int, leaves: Tensors) -> Any:
            x, y = self.batch(i)
            share = self.guarded()(lambda z: self.criterion.total(z, y) / weight)
            return self.call({**views, **leaves}, x), share

        batches = [partial(outputs_of, i) for i in range(len(self.bounds))]
        graph = self.bytes_of_example * self.bounds[0][1] + 2 * at.nbytes
        leaves, keep = {n: views[n] for n in names}, self.memory // 2 // graph
        return Curvature(batches, leaves, matrix=matrix, keep=keep, shift=self.weight_decay)

    def hvp(self, v: Tensor, w: Tensor | None = None) -> Tensor:
        """The Hessian at w (default: ``.w``) times v [P], in float64; ``hessian`` is for several."""
        return self.hessian(w)(v)

    def dense(self, names: Sequence[str] | None = None) -> Tensor:
        """The Hessian at ``.w``, dense [P, P] in float64, symmetric; it takes P products.

        ``names``: only the block of these tensors.
        """
        operator = self.hessian(names=names)
        rows = torch.stack([operator(row) for row in torch.eye(operator.size).to(self.w)])
        return (rows + rows.T) / 2


def channels_last(tensors: Tensors) -> dict[str, Tensor]:
    """With the channels of images and kernels last in memory."""
    return {
        n: t.clone(memory_format=torch.channels_last) if t.ndim == 4 else t
        for n, t in tensors.items()
    }


def code_of(function: Any) -> str:
    """What a function computes, as far as byte code, constants, defaults and what it closes over say.

    Of a partial function, and of an object that is called, it is that of the function behind it.
    """
    function = getattr(function, "func", function)
    if not hasattr(function, "__code__"):
        function = getattr(type(function), "forward", type(function).__call__)
    return text_of(
        [getattr(function, f"__{part}__", None) for part in ("code", "defaults", "closure")]
    )


def text_of(value: Any) -> str:
    """A value as text, the same in every process; of a function byte code, constants and names, without places in files."""
    for name in ("cell_contents", "__code__"):
        value = getattr(value, name, value)
    if isinstance(value, CodeType):
        value = value.co_code.hex(), value.co_consts, value.co_names
    if isinstance(value, (tuple, list)):
        return str([*map(text_of, value)])
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
