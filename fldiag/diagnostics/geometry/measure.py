"""The geometry of one round's features: how classes lie before the head, and how alike clients see the same examples."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor, nn

from fldiag import losses
from fldiag.diagnostics.lora.measure import effective_rank
from fldiag.execution import workspace
from fldiag.results.means import sample_mean
from fldiag.results.table import Row
from fldiag.runs.history import History
from fldiag.runs.pool import BATCH, Weights
from fldiag.runs.round_weights import Stored

COLLAPSE = ("nc1", "nc2_norms", "nc2_cosines", "nc3", "nc4")
METRICS = (*COLLAPSE, "effective_rank")
NO_BODY = "the model has no head: it has a single layer with weights"
NO_HEAD = (
    "the model has no head that is known (no linear layer's output is its own): a method `features`, with "
    "model(x) = head(features(x)) and head its last child with parameters, says what the head receives"
)
#: Examples that show which layer is the head: not so few that a ReLU after another layer may let all of them through.
FEW = 16
#: A number, or why there is none.
Measured = float | str


def round_rows(history: History, cohort: Stored, split: str, similar: int) -> list[Row]:
    """The rows of the received, the trained and the aggregated models of a round."""
    cohort = history.finite(cohort)
    stretch = history.stretch(split)
    models: list[tuple[Row, Weights]] = [
        ({"moment": "received", "scope": "global"}, cohort.start),
        (
            {"moment": "aggregated", "scope": "global"},
            (cohort.aggregated, cohort.buffers),
        ),
        *(
            ({"moment": "trained", "scope": "client", "client": k}, cohort.client(j))
            for j, k in enumerate(cohort.ids)
        ),
    ]
    rows: list[Row] = []
    for i, (about, weights) in enumerate(models):
        workspace().show(i, len(models), f"client {about['client']}" if i > 1 else about["moment"])
        rows += model_rows(history, weights, stretch, {**about, "slice": split})
    if cohort.ids:
        rows += means(rows, split)
        rows += similarity_rows(history, cohort, stretch, split, similar)
    return rows


def model_rows(history: History, weights: Weights, stretch: slice, columns: Row) -> list[Row]:
    """The rows of one model on a stretch of the pool; of a client's also those on its own part of it."""
    columns = {**columns, "estimator": "exact"}
    network = history.network
    results: tuple[Tensor, Tensor, Tensor | None] | str = NO_HEAD
    if not (network.stackable and network.has_split):
        results = received_and_answers(history, weights, stretch)
    if results == NO_HEAD and is_split(history, weights, stretch):
        results = features_and_answers(history, weights, stretch)
    if isinstance(results, str):
        note = {"value": None, "note": results}
        return [{**columns, "metric": metric, **note} for metric in METRICS]
    h, answers, head = results
    y = history.pool.y[stretch].to(h.device)
    parts = [(columns, slice(None))]
    if columns["slice"] == "train" and columns.get("client") is not None:
        examples = history.pool.train_slice(columns["client"])
        if examples.stop > examples.start:
            part = slice(examples.start - stretch.start, examples.stop - stretch.start)
            parts.append(({**columns, "slice": f"client:{columns['client']}/train"}, part))
    rows = []
    for about, part in parts:
        counts = class_counts(y[part])
        about = {**about, "n_examples": len(h[part])}
        if counts is not None:
            about["classes"] = len(counts)
        numbers = geometry_of(h[part], y[part], answers[part], head)
        rows += [{**about, "metric": metric, **entry(v)} for metric, v in numbers.items()]
    return rows


def entry(value: Measured) -> Row:
    return {"value": None, "note": value} if isinstance(value, str) else {"value": value}


def features_and_answers(
    history: History, weights: Weights, stretch: slice
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What the head sees [n, d] in float64, the classes that it answers [n], and its matrix if it is one linear layer."""
    w, buffers = weights
    copies = {name: b.unsqueeze(0).clone() for name, b in buffers.items()}
    bound = history.network.bind(w.unsqueeze(0), copies)
    features, answers = [], []
    with torch.no_grad():
        for piece in history.pool.batches(stretch, BATCH):
            z = bound.features(history.pool.read(piece.start, piece.stop)[0].unsqueeze(0))
            features.append(z[0].flatten(1).double())
            answers.append(losses.predicted(bound.head(z)[0]))
    h = torch.cat(features)
    return h, torch.cat(answers), head_weight(history, w, h.shape[1])


def is_split(history: History, weights: Weights, stretch: slice) -> bool:
    """Whether the model is head(features(x)) with its last child as head."""
    network, (w, buffers) = history.network, weights
    if network.stackable or not network.has_split:
        return network.has_split
    x = history.pool.read(stretch.start, min(stretch.start + FEW, stretch.stop))[0]
    copies = {name: b.unsqueeze(0) for name, b in buffers.items()}
    return network.agrees_with_split(w.unsqueeze(0), copies, x.unsqueeze(0), train=False)


def received_and_answers(
    history: History, weights: Weights, stretch: slice
) -> tuple[Tensor, Tensor, Tensor | None] | str:
    """What ``features_and_answers`` returns, for any module: its head is the linear layer whose output is the model's.

    A text says why there is none."""
    module, tensors = evaluation_copy(history, weights)
    layers = [m for m in module.modules() if [*m.parameters(recurse=False)]]
    if len(layers) < 2:
        return NO_BODY
    heads = [m for m in module.modules() if isinstance(m, nn.Linear)]
    # a few examples choose the head: to keep the inputs of all linear layers for all examples would take too much memory
    beginning = slice(stretch.start, min(stretch.start + FEW, stretch.stop))
    features, answers, matrix = list[Tensor](), list[Tensor](), None
    for i, piece in enumerate([beginning, *history.pool.batches(stretch, BATCH)]):
        x = history.pool.read(piece.start, piece.stop)[0]
        outputs, calls = call_heads(module, tensors, x, heads)
        heads = [call.layer for call in calls]
        if not heads or (i and len(heads) > 1):
            return NO_HEAD
        if i:
            features.append(calls[0].inputs.flatten(1).double())
            answers.append(losses.predicted(outputs))
            matrix = calls[0].matrix.double()
    h = torch.cat(features)
    fits = matrix is not None and matrix.shape[1] == h.shape[1]
    return h, torch.cat(answers), matrix if fits else None


@dataclass(frozen=True)
class Call:
    """A call of a linear layer: what it receives and gives, and its matrix, which may be computed from others.

    ``version`` of the output: another one later says that the model added to it in place."""

    layer: nn.Linear
    inputs: Tensor
    output: Tensor
    version: int
    matrix: Tensor


def call_heads(
    module: nn.Module, tensors: dict[str, Tensor], x: Tensor, layers: Sequence[nn.Linear]
) -> tuple[Tensor, list[Call]]:
    """The module's outputs, and the calls of the layers that give them, or give what they are the (log-)softmax of."""
    calls = list[Call]()

    def keep(layer: nn.Linear, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        calls.append(Call(layer, inputs[0], output, output._version, layer.weight))

    hooks = [layer.register_forward_hook(keep) for layer in layers]  # type: ignore[arg-type]
    if x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    with torch.no_grad():
        outputs: Tensor = torch.func.functional_call(module, tensors, (x,))
    for hook in hooks:
        hook.remove()
    calls = [call for call in calls if call.output._version == call.version]
    # by identity, for equal numbers may come from several layers: all of them zeros, or not finite
    heads = [call for call in calls if call.output is outputs]
    return outputs, heads or [call for call in calls if is_softmax(outputs, call.output)]


def is_softmax(outputs: object, logits: Tensor) -> bool:
    """Whether outputs are the softmax or the log-softmax of these logits."""
    if not isinstance(outputs, Tensor) or outputs.shape != logits.shape:
        return False
    candidates = (logits.softmax(-1), logits.log_softmax(-1))
    return any(torch.allclose(p, outputs, equal_nan=True) for p in candidates)


def evaluation_copy(history: History, weights: Weights) -> tuple[nn.Module, dict[str, Tensor]]:
    """A copy of the module that hooks may be put on, and the tensors to call it with."""
    w, buffers = weights
    module = copy.deepcopy(history.network.module).eval()
    return module, {**history.layout.views(w), **{n: b.clone() for n, b in buffers.items()}}


def head_weight(history: History, w: Tensor, width: int) -> Tensor | None:
    """The matrix [classes, d] of a head that is one linear layer; None for another head."""
    prefix = history.layout.head_name + "."
    tensors = {n: v for n, v in history.layout.views(w).items() if n.startswith(prefix)}
    matrices = [v for v in tensors.values() if v.ndim == 2]
    is_linear = len(matrices) == 1 and set(tensors) <= {f"{prefix}weight", f"{prefix}bias"}
    return matrices[0].double() if is_linear and matrices[0].shape[1] == width else None


def class_counts(y: Tensor) -> Tensor | None:
    """Examples of each class that there is; None where the targets are no classes."""
    return None if y.is_floating_point() or y.ndim != 1 else y.unique(return_counts=True)[1]


def geometry_of(h: Tensor, y: Tensor, answers: Tensor, head: Tensor | None) -> dict[str, Measured]:
    """NC1 to NC4 (Papyan, Han and Donoho, PNAS 2020) and the effective rank (Roy and Vetterli, 2007), or why there are none.

    Args:
        h: features [n, d].
        y: labels [n].
        answers: classes that the head answers [n].
        head: its matrix [classes, d], if it is one linear layer.

    A simplex frame, with the head along it:

    >>> corners = torch.eye(3, dtype=torch.float64) - 1 / 3
    >>> y = torch.tensor([0, 0, 1, 1, 2, 2])
    >>> numbers = geometry_of(5 * corners[y], y, y, corners)
    >>> {name: round(abs(value), 6) for name, value in numbers.items()}
    {'nc1': 0.0, 'nc2_norms': 0.0, 'nc2_cosines': 0.0, 'nc3': 0.0, 'nc4': 0.0, 'effective_rank': 2.0}
    """
    if not bool(h.square().sum().isfinite()):
        return dict.fromkeys(METRICS, "the features are not finite")
    singular = torch.linalg.svdvals(h - h.mean(0))
    size = float(h.abs().max()) * math.sqrt(h.numel())
    noise = torch.finfo(torch.float32).eps
    is_point = float(singular.max()) <= noise * size
    rank: Measured = (
        "the features are the same for all examples" if is_point else effective_rank(singular)
    )
    reason = ""
    if y.is_floating_point() or y.ndim != 1:
        reason = "the targets are not one class an example"
    elif len(classes := y.unique()) < 2:
        reason = "there is one class only"
    elif is_point:
        reason = "the features are the same for all examples"
    if reason:
        return {**dict.fromkeys(COLLAPSE, reason), "effective_rank": rank}
    members = (y[:, None] == classes).to(h)
    counts, number = members.sum(0), len(classes)
    means = members.T @ h / counts[:, None]
    between = means - means.mean(0)
    norms = torch.linalg.vector_norm(between, dim=1)
    label = members.argmax(1)
    _, scales, directions = torch.linalg.svd(between / number**0.5, full_matrices=False)
    is_direction = scales > noise * max(between.shape) * float(scales.max())
    is_direction[number - 1 :] = False  # the means minus their mean span one dimension less
    spread = (h - means[label]) @ directions[is_direction].T
    within = (1 / (number * counts))[label] @ spread.square()
    numbers: dict[str, Measured] = {}
    if float(scales.max()) <= noise * float(h.abs().max()):
        numbers = dict.fromkeys(COLLAPSE, "the class means are the same")
    else:
        cosines = (between @ between.T) / (norms[:, None] * norms)
        pairs = torch.triu_indices(number, number, 1, device=h.device)
        angles = (cosines[pairs[0], pairs[1]] + 1 / (number - 1)).abs()
        numbers = {
            "nc1": float((within / scales[is_direction].square()).sum()) / number,
            "nc2_norms": float(norms.std() / norms.mean()),
            "nc2_cosines": float(angles.mean())
            if bool((norms > 0).all())
            else "a class mean is the centre",
            "nc3": duality(head, classes, between),
        }
    nearest = classes[torch.cdist(h, means).argmin(1)]
    numbers["nc4"] = float((nearest != answers).double().mean())
    return {**numbers, "effective_rank": rank}


def duality(head: Tensor | None, classes: Tensor, between: Tensor) -> Measured:
    """|| W / ||W||_F - M / ||M||_F ||_F of the rows of W centred over the classes and the centred class means M [C, d]."""
    if head is None:
        return "the head is not one linear layer"
    if len(head) <= int(classes.max()):
        return f"the head has {len(head)} outputs for {int(classes.max()) + 1} classes"
    rows = head[classes] - head[classes].mean(0)
    size = torch.linalg.matrix_norm(rows)
    if float(size) == 0:
        return "the head is the same for all classes"
    return float(
        torch.linalg.matrix_norm(rows / size - between / torch.linalg.matrix_norm(between))
    )


def means(rows: Sequence[Row], split: str) -> list[Row]:
    """Over the clients: of their models on all the examples, and on their own."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["scope"] == "client":
            examples = split if row["slice"] == split else "client:*/train"
            groups.setdefault((row["metric"], examples), []).append(row)
    mean_rows: list[Row] = []
    for (metric, examples), members in groups.items():
        values = [row["value"] for row in members if row["value"] is not None]
        mean_rows.append(
            {
                "metric": metric,
                "moment": "trained",
                "scope": "global",
                "slice": examples,
                "estimator": "exact",
                "n_clients": len(values),
                **sample_mean(values),
                "note": None if values else members[0]["note"],
            }
        )
    return mean_rows


# -- how alike clients see the same examples


def similarity_rows(
    history: History, cohort: Stored, stretch: slice, split: str, count: int
) -> list[Row]:
    """Linear CKA (Kornblith et al. 2019) of every two clients' trained models, by layer, and its mean over the pairs."""
    if not count:
        return []
    x = spread_inputs(history, stretch, count)
    common: Row = {"metric": "cka", "moment": "trained", "estimator": "exact", "slice": split}
    common["n_examples"] = len(x)
    if len(cohort.ids) < 2:
        note = "one client has nobody to be compared with"
        return [{**common, "scope": "global", "value": None, "note": note}]
    grams: dict[str, list[Tensor]] = {}
    for j in range(len(cohort.ids)):
        for layer, output in layer_outputs(history, cohort.client(j), x).items():
            grams.setdefault(layer, []).append(centred_gram(output))
    rows: list[Row] = []
    for layer, of_clients in grams.items():
        stack = torch.stack([gram.flatten() for gram in of_clients])
        similarity = (stack @ stack.T).clamp(0, 1)
        about = {**common, "layer": layer}
        reasons = [undefined(gram) for gram in of_clients]
        values = {}
        for i, j in combinations(range(len(of_clients)), 2):
            pair = {"scope": "pair", "client": cohort.ids[i], "client_b": cohort.ids[j]}
            if reason := reasons[i] or reasons[j]:
                rows.append({**about, **pair, "value": None, "note": reason})
            else:
                values[i, j] = float(similarity[i, j])
                rows.append({**about, **pair, "value": values[i, j]})
        row = {**about, "scope": "global", **mean_of_pairs(values)}
        rows.append(row if values else {**row, "note": next(filter(None, reasons))})
    return rows


def undefined(gram: Tensor) -> str:
    """Why a client's outputs, whose inner products these are, are like no others; empty if they may be."""
    if not bool(gram.isfinite().all()):
        return "the outputs of a client are not finite"
    return "" if bool(gram.any()) else "the outputs of a client are the same for all examples"


def mean_of_pairs(values: dict[tuple[int, int], float]) -> Row:
    """The mean over pairs of clients, with a standard error over clients as a sample (of a U-statistic, to first order)."""
    if not values:
        return {"value": None, "n_clients": 0}
    members = sorted({i for pair in values for i in pair})
    each = torch.tensor(
        [[v for pair, v in values.items() if i in pair] for i in members], dtype=torch.float64
    ).mean(1)
    n = len(members)
    stderr = 2 * float(each.std()) / math.sqrt(n) if n > 2 else None
    return {"value": float(each.mean()), "stderr": stderr, "n_clients": n}


def spread_inputs(history: History, stretch: slice, count: int) -> Tensor:
    """At most ``count`` inputs, evenly spread over the stretch."""
    n = stretch.stop - stretch.start
    stride = -(-n // count)
    pieces = []
    for piece in history.pool.batches(stretch, BATCH):
        first = -(piece.start - stretch.start) % stride
        pieces.append(history.pool.read(piece.start, piece.stop)[0][first::stride])
    return torch.cat(pieces)


def layer_outputs(history: History, weights: Weights, x: Tensor) -> dict[str, Tensor]:
    """Outputs [n, ...] of every layer with weights, by its name; of layers that return one tensor an example."""
    module, tensors = evaluation_copy(history, weights)
    outputs = dict[str, Tensor]()
    layers = {name: m for name, m in module.named_modules() if name in history.layout.layers}

    def keep(name: str) -> object:
        def hook(layer: object, inputs: object, output: object) -> None:
            if isinstance(output, Tensor) and output.ndim > 1 and len(output) == len(x):
                outputs[name] = output.detach()

        return hook

    for name, layer in layers.items():
        if name:
            layer.register_forward_hook(keep(name))  # type: ignore[arg-type]
    with torch.no_grad():
        torch.func.functional_call(module, tensors, (x,))
    return outputs


def centred_gram(output: Tensor) -> Tensor:
    """The inner products [n, n] of the centred outputs of the examples, of unit norm; 0 where all are the same."""
    x = output.flatten(1).double()
    size = float(x.square().max()) * x.shape[1]
    x = x - x.mean(0)
    gram = x @ x.T
    norm = torch.linalg.matrix_norm(gram)
    is_flat = float(norm) <= torch.finfo(output.dtype).eps * size
    return torch.zeros_like(gram) if is_flat else gram / norm
