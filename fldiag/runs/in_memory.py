"""Examples in memory as a data set of a run, and models that read its rows: what diagnostics of whole runs see of them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fldiag.data import Dataset
from fldiag.errors import FldiagError
from fldiag.problem.data import arguments, as_slice, describe, is_split
from fldiag.problem.weights import unwrap_model
from fldiag.runs.packed import Packed

#: What tables call such data.
NAME = "given"
#: Said of a run whose examples came without test examples.
UNTESTED = "no test examples were given: accuracy and loss of the global model are those of the training examples"
#: Said of a model with one output for the labels 0 and 1, in whose place stands what its output is taken to be.
BINARY = "the model has one output for two labels, which is evaluated as {}; the loss is the binary cross entropy"
#: Entries of a dict that hold the labels.
LABELS = ("labels", "label")
#: How the names that autograd gives to operations on shapes alone begin.
_SHAPES = (
    "View",
    "UnsafeView",
    "Reshape",
    "Squeeze",
    "Unsqueeze",
    "Flatten",
    "Select",
    "Slice",
    "Alias",
    "Clone",
    "ToCopy",
)


def dataset_of(
    examples: Any, test: Any = None, forward: inspect.Signature | None = None
) -> Dataset:
    """A data set of ``(x, y)``, a dict with labels, a torch ``Dataset`` or a ``DataLoader``, or of ``(x, y, test_x, test_y)``;
    ``test`` likewise, and without it there are no test examples. Inputs that are no plain tensor are packed into rows.
    ``forward``: of the model, see ``inputs.as_data``.

    Raises FldiagError where inputs and targets do not fit each other, or the targets are not one label, or one row of numbers,
    an example.
    """
    if is_split(examples):
        examples, test = tuple(examples[:2]), tuple(examples[2:])
    parts = [
        pair(examples, "data", forward),
        *([] if test is None else [pair(test, "test", forward)]),
    ]
    pairs = [(x, y) for x, y, _ in parts]
    remarks = (*parts[0][2], *(f"test: {text}" for _, _, texts in parts[1:] for text in texts))
    for x, y in pairs:
        if not one_each(y) and not is_dense(x, y):
            raise _unusable(y)
    if len({(y.is_floating_point(), y.shape[1:]) for _, y in pairs}) > 1:
        raise FldiagError(
            f"the targets of the data are {describe(pairs[0][1])}, and those of test {describe(pairs[1][1])}",
            "give both in one form, labels as integers",
            usage=True,
        )
    packed = None if all(_plain(x) for x, _ in pairs) else Packed.of(pairs[0][0])
    if packed is not None:
        pairs = [(packed.rows(x), y) for x, y in pairs]
    x, y = pairs[0]
    test_x, test_y = pairs[1] if test is not None else (x[:0], y[:0])
    classes = y.shape[1] if y.is_floating_point() else 1 + int(torch.cat([y, test_y]).max())
    return Dataset(NAME, x, y, test_x, test_y, classes=classes, packed=packed, remarks=remarks)


def pair(
    examples: Any, name: str, forward: inspect.Signature | None = None
) -> tuple[Any, Any, tuple[str, ...]]:
    """Inputs, targets and remarks; tensors on the CPU, with floats in single precision, and of a dict without its labels the
    rest."""
    if (
        isinstance(examples, (tuple, list))
        and len(examples) == 2
        and isinstance(examples[1], list)
        and all(isinstance(label, (int, float, np.number)) for label in examples[1])
    ):
        examples = examples[0], np.asarray(examples[1])
    try:
        data = as_slice(examples)
    except FldiagError as error:
        raise FldiagError(f"{name}: {error.what}", error.remedy, usage=True) from None
    x, y = data.batch(0, data.n)
    if x is y and isinstance(x, Mapping):
        label = next((key for key in LABELS if key in x), None)
        if label is None:
            raise FldiagError(
                f"{name}: {describe(x)} has no {LABELS[0]}", "give (inputs, labels)", usage=True
            )
        x, y = {key: part for key, part in x.items() if key != label}, x[label]
    if isinstance(x, Tensor):
        x = (
            x.float() if x.is_floating_point() else x if x.dtype == torch.uint8 else x.long()
        ).cpu()
    if isinstance(y, Tensor):
        y = (
            (y[:, None] if y.ndim == 1 else y).float() if y.is_floating_point() else y.long()
        ).cpu()
    return x, y, getattr(data, "remarks", ())


def one_each(y: Any) -> bool:
    """Whether targets are a label, or a row of numbers, of each example."""
    return isinstance(y, Tensor) and y.ndim == 1 + y.is_floating_point()


def is_dense(x: Any, y: Any) -> bool:
    """Whether targets may be labels of the positions of an input. Of inputs in a dict the model's own loss decides, and it may
    shift them."""
    return (
        isinstance(x, Tensor) and isinstance(y, Tensor) and y.ndim > 1 and not y.is_floating_point()
    )


def classes_last(module: nn.Module, dataset: Dataset) -> nn.Module:
    """For labels of positions, a model that returns logits [n, positions, classes]; the module itself where it does.

    Raises FldiagError for a model with other outputs: its targets mean something else.
    """
    y = dataset.train_y[:2]
    probe = copy.deepcopy(module).cpu().eval()
    with torch.no_grad():
        output = probe(dataset.normalise(dataset.train_x[:2]))
    if not isinstance(output, Tensor) or output.ndim != y.ndim + 1:
        raise _unusable(dataset.train_y)
    if output.shape[:-1] == y.shape:
        return module
    if output[:, 0].shape != y.shape:
        raise _unusable(dataset.train_y)
    wrapped = copy.deepcopy(module)
    wrapped.register_forward_hook(_move_classes)
    return wrapped


def _move_classes(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.movedim(1, -1)


def _unusable(y: Any) -> FldiagError:
    return FldiagError(
        f"the targets are {describe(y)}, and this question needs one label, or one row of numbers, an "
        "example, or one label for each of its positions: it counts what is right or forgotten",
        "ask spectrum or landscape of the checkpoints: they take any targets and losses; drift of a "
        "recorded run compares its weights where no data are given",
        usage=True,
    )


def _plain(x: Any) -> bool:
    """Whether a data set holds such inputs as they are."""
    return isinstance(x, Tensor) and (
        (x.ndim == 2 and x.dtype != torch.uint8) or (x.ndim == 4 and x.dtype != torch.int64)
    )


def with_packed_inputs(module: nn.Module, dataset: Dataset | None) -> nn.Module:
    """The module, or where the data set's rows hold several tensors a copy of it that takes such rows and returns one tensor."""
    if dataset is None or dataset.packed is None:
        return module
    reader = copy.deepcopy(unwrap_model(module)[0])
    reader.register_forward_pre_hook(_Unpack(dataset.packed), with_kwargs=True, prepend=True)
    reader.register_forward_hook(_logits)
    return reader


class _Unpack:
    """Calls a module with the tensors of its rows, as a ``Problem`` calls it with these."""

    def __init__(self, packed: Packed):
        self.packed = packed

    def __call__(
        self, module: nn.Module, args: tuple[Tensor], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
        return arguments(inspect.signature(module.forward), self.packed.inputs(args[0], dtype))


def _logits(module: nn.Module, args: Any, output: Any) -> Tensor:
    logits = output.get("logits") if isinstance(output, Mapping) else output
    if not isinstance(logits, Tensor):
        raise FldiagError(
            f"the model returns {describe(output)}, and diagnostics of a run need one tensor [n, outputs]",
            "let forward return it, or a dict that has it as 'logits'",
        )
    return logits


def as_logits(module: nn.Module, dataset: Dataset) -> tuple[nn.Module, str | None]:
    """A model with one output z for two labels as one that returns the logits (0, z), and in words what its output is taken to
    be: the cross entropy of these is the binary one of z, and every diagnostic of classifiers takes them.

    Other models as they are, and those that cannot be called so: whoever evaluates them finds out why. A model whose last
    operation is a sigmoid returns probabilities, which become logits again.
    """
    if dataset.dense:
        return classes_last(module, dataset), None
    if dataset.regression or dataset.classes > 2:
        return module, None
    try:
        probe, x = (
            copy.deepcopy(module).cpu().eval().requires_grad_(True),
            dataset.normalise(dataset.train_x[:2]),
        )
        with torch.enable_grad():
            output = probe(x)
    except Exception:  # the user's model may raise anything
        return module, None
    if not isinstance(output, Tensor) or output.shape not in ((len(x),), (len(x), 1)):
        return module, None
    probability = _last_operation(output).startswith("SigmoidBackward")
    text = BINARY.format(
        "a probability, as it ends in a sigmoid: right where it is above 0.5 for label 1"
        if probability
        else "a logit: right where it is above 0 for label 1"
    )
    wrapped = copy.deepcopy(module)
    wrapped.register_forward_hook(_TwoLogits(probability))
    return wrapped, text


def _last_operation(output: Tensor) -> str:
    """What autograd calls the last operation that changed a number."""
    node: Any = output.grad_fn
    while (
        node is not None
        and any(node.name().startswith(shape) for shape in _SHAPES)
        and node.next_functions
    ):
        node = node.next_functions[0][0]
    return "" if node is None else str(node.name())


class _TwoLogits:
    """Turns the output of a module, logits or probabilities [n] or [n, 1] of label 1, into logits [n, 2]."""

    def __init__(self, probability: bool):
        self.probability = probability

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        output = output.reshape(-1, 1)
        if self.probability:
            output = output.logit(torch.finfo(output.dtype).eps)
        return torch.cat([torch.zeros_like(output), output], dim=1)
