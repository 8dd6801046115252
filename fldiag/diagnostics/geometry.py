"""The geometry of features: neural collapse, effective rank, and how alike clients' layers see the same examples.

Papyan, Han and Donoho, "Prevalence of neural collapse during the terminal phase of deep learning training" (PNAS 2020); Roy and
Vetterli, "The effective rank" (EUSIPCO 2007, definition 2); Kornblith et al., "Similarity of neural network representations
revisited" (ICML 2019).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import Annotated, Any, Literal

import pandas as pd
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fldiag import losses
from fldiag.params import cosine
from fldiag.plotting import style
from fldiag.plotting.style import bars, dots, floats, lines, wide_range
from fldiag.registry import diagnostic
from fldiag.results.statistics import sample_mean
from fldiag.results.table import Options, Row, SmallTable, Summary, last_round, only
from fldiag.runs.history import BATCH, History, Stored, Weights

#: Metric -> how tables and panels call it.
METRICS = {
    "nc1": "NC1: within classes",
    "nc2_norms": "NC2: lengths",
    "nc2_cosines": "NC2: angles",
    "nc3": "NC3: head and means",
    "nc4": "NC4: not nearest mean",
    "effective_rank": "effective rank",
}
#: Examples of a whole run.
Split = Annotated[
    Literal["train", "test"],
    Field(description="Examples: train (those of all clients) or test."),
]
#: Examples on which clients' layers are compared.
SIMILAR = 200
UNDEFINED = (
    "not defined: no head, one class, targets that are no classes, or equal features or means"
)


# The measures


def geometry_of(h: Tensor, y: Tensor, answers: Tensor, head: Tensor) -> dict[str, float]:
    """NC1 to NC4 (Papyan, Han and Donoho 2020) and the effective rank of features; nan where a number is not defined.

    Args:
        h: features [n, d] in float64.
        y: labels [n].
        answers: classes that the head answers [n].
        head: its matrix [classes, d].

    A simplex frame, with the head along it:

    >>> corners = torch.eye(3, dtype=torch.float64) - 1 / 3
    >>> y = torch.tensor([0, 0, 1, 1, 2, 2])
    >>> numbers = geometry_of(5 * corners[y], y, y, corners)
    >>> {name: round(abs(value), 6) for name, value in numbers.items()}
    {'nc1': 0.0, 'nc2_norms': 0.0, 'nc2_cosines': 0.0, 'nc3': 0.0, 'nc4': 0.0, 'effective_rank': 2.0}
    """
    numbers = dict.fromkeys(METRICS, math.nan)
    noise, largest = torch.finfo(torch.float32).eps, h.abs().max()
    if not math.isfinite(largest):
        return numbers
    singular = torch.linalg.svdvals(h - h.mean(0))
    if singular.max() <= noise * largest * math.sqrt(h.numel()):
        return numbers
    numbers["effective_rank"] = effective_rank(singular)
    classes, label, sizes = y.unique(return_inverse=True, return_counts=True)
    count = len(classes)
    if y.is_floating_point() or y.ndim > 1 or count < 2:
        return numbers
    means = F.one_hot(label).to(h).T @ h / sizes[:, None]
    nearest = classes[torch.cdist(h, means).argmin(1)]
    numbers["nc4"] = float((nearest != answers).double().mean())
    between = means - means.mean(0)
    if between.abs().max() <= noise * largest:
        return numbers
    # the square roots of Sigma_B^+ / C: with each class alike, Sigma_B is between' between / C
    inverse = torch.linalg.pinv(between, rtol=noise * max(between.shape))
    spread = ((h - means[label]) @ inverse).square().sum(1)
    norms = between.norm(dim=1)
    i, j = torch.triu_indices(count, count, 1)
    angles = cosine(between[i], between[j]) + 1 / (count - 1)
    numbers["nc1"] = float((spread / sizes[label]).sum()) / count
    numbers["nc2_norms"] = float(norms.std() / norms.mean())
    numbers["nc2_cosines"] = float(angles.abs().mean())
    if len(head) > classes.max():
        rows = head[classes] - head[classes].mean(0)
        numbers["nc3"] = float((rows / rows.norm() - between / between.norm()).norm())
    return numbers


def effective_rank(singular: Tensor) -> float:
    """exp of the entropy of the singular values' shares of their sum (Roy and Vetterli 2007): 1 to their number.

    >>> round(effective_rank(torch.tensor([2.0, 2.0, 0.0])), 6)
    2.0
    """
    shares = (singular / singular.sum()).double()
    return float(torch.special.entr(shares).sum().exp())


def unit_gram(output: Tensor) -> Tensor:
    """The inner products [n * n] of the centred outputs [n, ...] of the examples, of length 1; nan where all are the same."""
    x = output.flatten(1).double()
    size = x.square().max() * x.shape[1]
    x = x - x.mean(0)
    gram = (x @ x.T).flatten()
    norm = gram.norm()
    return gram / torch.where(norm > torch.finfo(output.dtype).eps * size, norm, torch.nan)


# A run


@torch.no_grad()
def round_rows(history: History, stored: Stored, split: str) -> list[Row]:
    """The rows of the received, the aggregated and the trained models of a round."""
    segment, rows = history.segment(split), list[Row]()
    models = [
        ("received", None, stored.start),
        ("aggregated", None, stored.end),
        *(("trained", k, stored.client(j)) for j, k in enumerate(stored.ids)),
    ]
    for moment, k, weights in models:
        features, outputs, head = seen_by_head(history, weights, segment)
        numbers = dict.fromkeys(METRICS, math.nan)
        if head is not None:
            y, matrix = history.pool.y[segment].to(outputs.device), head.weight.double()
            numbers = geometry_of(features.double(), y, losses.predicted(outputs), matrix)
        rows += [
            {
                "moment": moment,
                "scope": "global" if k is None else "client",
                "client": k,
                "n_examples": len(outputs),
                "metric": metric,
                "value": value,
            }
            for metric, value in numbers.items()
        ]
    clients = only(pd.DataFrame(rows), moment="trained").groupby("metric", sort=False)["value"]
    common = [
        *({"metric": m, "n_clients": v.count(), **sample_mean(v.dropna())} for m, v in clients),
        *similarity_rows(history, stored, segment),
    ]
    return [*rows, *({"moment": "trained", "scope": "global", **row} for row in common)]


def watch(layers: Iterable[nn.Module]) -> dict[nn.Module, tuple[Any, Any]]:
    """What these layers receive and give, each at its last call from now on."""
    calls: dict[nn.Module, tuple[Any, Any]] = {}
    for layer in layers:
        layer.register_forward_hook(lambda m, inputs, output: calls.update({m: (inputs, output)}))
    return calls


@torch.no_grad()
def seen_by_head(history: History, weights: Weights, segment: slice) -> tuple[Tensor, Tensor, Any]:
    """What a model's head receives on a segment of the pool [n, d], the model's outputs, and the head: the linear layer whose
    output is the model's. Without one (None), or another layer, the outputs stand for the features."""
    problem, head = history.problem(weights, segment, ""), None
    features, outputs = list[Tensor](), list[Tensor]()
    is_deep = len(problem.layout.layers) > 1
    calls = watch(m for m in problem.module.modules() if isinstance(m, nn.Linear) and is_deep)
    for start in range(0, problem.n, BATCH):
        output = problem.module(problem.read(start, start + BATCH)[0])
        head = next((m for m, (_, made) in calls.items() if made is output), None)
        features.append((calls[head][0][0] if head else output).flatten(1))
        outputs.append(output)
    return torch.cat(features), torch.cat(outputs), head


def similarity_rows(history: History, stored: Stored, segment: slice) -> Iterator[Row]:
    """Linear CKA (Kornblith et al. 2019) of every two clients' trained models, by layer, and its mean over the pairs."""
    if len(stored.ids) < 2:
        return
    step = -(-(segment.stop - segment.start) // SIMILAR)
    spread, grams = slice(segment.start, segment.stop, step), dict[str, list[Tensor]]()
    for j in range(len(stored.ids)):
        problem = history.problem(stored.client(j), spread, "")
        module, names = problem.module, problem.layout.layers
        layers = {m: n for n, m in module.named_modules() if n and n in names}
        calls = watch(layers)
        module(problem.read(0, problem.n)[0])
        for m, (_, output) in calls.items():
            if isinstance(output, Tensor) and output.ndim > 1 and len(output) == problem.n:
                grams.setdefault(layers[m], []).append(unit_gram(output))
    for layer, of_clients in grams.items():
        stack = torch.stack(of_clients)
        similarity = (stack @ stack.T).clamp(0, 1).fill_diagonal_(torch.nan).cpu().numpy()
        frame = pd.DataFrame(similarity, stored.ids, stored.ids)
        about = {"metric": "cka", "layer": layer, "n_examples": problem.n}
        for a, b in combinations(stored.ids, 2):
            yield {**about, "scope": "pair", "client": a, "client_b": b, "value": frame.at[a, b]}
        each = frame.mean().dropna()
        # over clients as a sample: of a U-statistic, to first order
        stderr = 2 * each.sem() if len(each) > 2 else None
        yield {**about, "value": each.mean(), "stderr": stderr, "n_clients": len(each)}


# Picture and summary


def draw(frame: pd.DataFrame) -> style.Figure:
    """A panel a number that has values, over the rounds (clients: mean with standard error, and a dot each), and the mean CKA of
    two clients by layer in the last round."""
    frame = frame.dropna(subset=["value"])
    rows = only(frame, metric=set(METRICS))
    looks, groups = (
        style.looks(("received", "trained", "aggregated")),
        rows.groupby("metric", sort=False),
    )
    cka = only(frame, metric="cka", scope="global", round=last_round(frame, "cka"))
    with style.paper():
        fig, axes = style.panels(len(groups) + 1, 2.0, across=4, least=1.6)
        for ax, (metric, rows) in zip(axes, groups, strict=False):
            dots(ax, only(rows, scope="client"), looks["trained"].color)
            means = only(rows, scope="global").groupby("moment", sort=False)
            lines(ax, dict(list(means)), looks)
            wide_range(ax, floats(rows["value"]))
            ax.set_title(METRICS[metric])
        bars(axes[-1], cka, dict.fromkeys(cka["run"], style.look(2)))
        axes[-1].set_title("CKA, last round")
        style.legend_of_runs(fig, looks)
    return fig


def summary(frame: pd.DataFrame, options: Options) -> Summary:
    """The numbers of the last round, and how alike the layers are in it."""
    last = only(frame, scope="global", round=last_round(frame, "effective_rank"))
    numbers = only(last, metric=set(METRICS)).pivot(index="moment", columns="metric")["value"]
    yield SmallTable.of(numbers.reset_index(), {"moment": "features of", **METRICS})
    cka = only(last, metric="cka")
    yield SmallTable.of(cka[["layer", "value"]], {"layer": "layer", "value": "CKA"})


# The diagnostic


@diagnostic(
    "geometry",
    meta={
        "read": "Papyan et al.: excerpts and code; Roy and Vetterli, Kornblith et al.: as quoted"
    },
    on="run",
    draw=draw,
    summary=summary,
    example="checkpoints/digits-fedavg-s0-1a2b3c4d --slice test",
)
def geometry(
    history: History,
    *,
    slice: Split = "train",
) -> pd.DataFrame:
    """Measure the geometry of features before the head: neural collapse (NC1 to NC4), effective rank, CKA between clients.

    Of every round, for the received, every trained and the aggregated model on the ``slice``. The head is the linear layer
    whose output is the model's. h are the features that it receives, of n examples in C classes (those that occur) with
    means mu_c and their mean mu, M = [mu_c - mu], W the
    head's matrix. Every class counts alike in both covariances.

    - ``nc1`` tr(Sigma_W Sigma_B^+) / C, the covariance within classes over that between them (its pseudo-inverse on the at most
      C - 1 directions of the means).
    - ``nc2_norms`` standard deviation over mean of ||mu_c - mu||, ``nc2_cosines`` mean over pairs of
      |cos(mu_c - mu, mu_c' - mu) + 1 / (C - 1)|: both 0 for a simplex frame (with two classes always).
    - ``nc3`` || W / ||W||_F - M / ||M||_F ||_F, from 0 to 2. The norm, where the authors' code has its square; the rows of W
      are those of the classes that occur, minus their mean, which no answer depends on (their code takes W as it is).
    - ``nc4`` share of the examples whose nearest class mean is not the class that the head answers.
    - ``effective_rank`` exp of the entropy of the singular values' shares of their sum, of the centred features: 1 to d.
    - ``cka`` of two clients' trained models (scope pair) by ``layer``, and its mean over the pairs (scope global): linear CKA
      ||X'Y||_F^2 / (||X'X||_F ||Y'Y||_F) of the layer's centred outputs X and Y, on up to 200 examples evenly spread. With
      fewer examples than outputs of a layer it is biased upwards: compare runs on as many examples.

    Rows of scope global and moment trained are means over the clients with their standard error as a sample.

    Args:
        history: A run with client weights.
        slice: Which examples.

    Returns:
        A row a number, without units; masked with a reason in ``note`` where it is not defined: no head, one class, targets that
        are no classes, features that are all the same, one client.

    Raises:
        FldiagError: no round has client weights, or there are no examples.

    >>> from fldiag.registry import diagnostic
    >>> sorted(diagnostic.get("geometry").options.model_fields)
    ['slice']
    """
    rows = history.map_rounds(round_rows, split=slice)
    for row in rows:
        row |= {"slice": slice, "estimator": "exact"}
        if pd.isna(row["value"]):
            row["note"] = UNDEFINED
    return history.table([*rows, *history.final_rows()])
