"""What averaging does to low-rank adapters.

The definitions are ours, after FedEx-LoRA (arXiv 2410.09432), FedRot-LoRA (arXiv 2602.23638) and raFLoRA (arXiv 2602.13486), of
which only the abstracts were read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import pandas as pd
import torch
from torch import Tensor

from fldiag.diagnostics.geometry import effective_rank
from fldiag.errors import FldiagError
from fldiag.models.lora import adapters
from fldiag.plotting import style
from fldiag.plotting.style import floats, lines
from fldiag.registry import diagnostic
from fldiag.results.table import Options, Row, SmallTable, Summary, last_round, only
from fldiag.runs.history import History, Stored

#: Metric -> the name of its axis.
METRICS = {
    "aggregation_error": "aggregation error",
    "misalignment": "misalignment / its maximum",
    "effective_rank": "effective rank",
}
#: Layers drawn: those with the largest error in the last round.
MOST = 6


def round_rows(history: History, stored: Stored) -> list[Row]:
    """The rows of a round's clients."""
    views = history.layout.views(stored.clients)
    p = torch.from_numpy(history.weights(stored.ids)).to(history.device)
    return [
        {"layer": layer, "estimator": "exact", **row}
        for layer, factors in adapters(history.module).items()
        for row in layer_rows(views[factors.a], views[factors.b], p, factors.scale, stored.ids)
    ]


def layer_rows(a: Tensor, b: Tensor, p: Tensor, scale: float, ids: Sequence[int]) -> Iterator[Row]:
    """Rows of one layer: factors ``a`` [K, r, in] and ``b`` [K, out, r] of the clients ``ids``, whose weights are ``p`` [K].

    Without values where the adapters do nothing yet, as all B are 0."""
    eps, a, b, p = torch.finfo(a.dtype).eps, a.double(), b.double(), p.double()
    # the mean of the products is left @ right; averaged factors give (scale mean B) @ mean A
    left, right = (scale * p[:, None, None] * b).transpose(0, 1).flatten(1), a.flatten(0, 1)
    mean_b, mean_a = scale * torch.tensordot(p, b, 1), torch.tensordot(p, a, 1)
    singular = singular_values(left, right)
    size = float(singular.norm())
    rounding = eps * left.shape[1] * float(left.norm() * right.norm())
    is_known = size > rounding  # not where all B are 0
    rest = singular_values(torch.cat([left, -mean_b], 1), torch.cat([right, mean_a]))
    numbers = {
        "update_norm": size if b.any() else None,
        "aggregation_error": float(rest.norm()) / size if is_known else None,
        "effective_rank": effective_rank(singular) if is_known else None,
    }
    for metric, value in numbers.items():
        yield {"moment": "aggregated", "scope": "global", "metric": metric, "value": value}
    bases = {k: row_space(factor, eps) for k, factor in zip(ids, a, strict=True)}
    for k, j in combinations(ids, 2):
        row: Row = {"moment": "trained", "scope": "pair", "client": k, "client_b": j, "value": None}
        most = (bases[k].shape[1] + bases[j].shape[1]) ** 0.5
        if most and b.any():
            row["value"] = procrustes(bases[k], bases[j])
            row["scaled"] = row["value"] / most
        yield {**row, "metric": "misalignment"}


def singular_values(left: Tensor, right: Tensor) -> Tensor:
    """Of left [out, m] @ right [m, in], which is not formed: its factors may be small."""
    a, b = (torch.linalg.qr(factor)[1] for factor in (left, right.T))
    return torch.linalg.svdvals(a @ b.T)


def row_space(a: Tensor, eps: float) -> Tensor:
    """An orthonormal basis [in, rank] of the rows of a matrix [r, in]; singular values of the size of the rounding ``eps`` of its
    entries are none."""
    _, singular, rows = torch.linalg.svd(a, full_matrices=False)
    return rows[singular > singular.max() * max(a.shape) * eps].T


def procrustes(first: Tensor, second: Tensor) -> float:
    """min ||first - second R||_F over orthogonal R, for orthonormal bases [n, r]: 0 for one space, sqrt(2 r) for spaces at right
    angles. A basis of fewer vectors counts as filled up with zeros."""
    common = torch.linalg.matrix_norm(first.T @ second, "nuc")
    squares = first.shape[1] + second.shape[1] - 2 * common
    return float(squares.clamp(min=0) ** 0.5)


def by_layer(frame: pd.DataFrame) -> pd.DataFrame:
    """metric, layer, round -> the number shown, a mean over pairs of clients."""
    rows = only(frame, metric=set(METRICS))
    rows = rows.assign(value=floats(rows["scaled"].fillna(rows["value"]))).dropna(subset=["value"])
    return rows.groupby(["metric", "layer", "round"], as_index=False, sort=False)["value"].mean()


def draw(frame: pd.DataFrame) -> style.Figure:
    """Aggregation error, misalignment (mean over the pairs of clients, as a share of the largest possible) and effective rank of
    the mean update, over the rounds: a line a layer, of the at most six with the largest errors."""
    means = by_layer(frame).assign(stderr=None)
    last = only(means, metric="aggregation_error", round=last_round(means))
    looks = style.looks(last.nlargest(MOST, "value")["layer"])
    with style.paper():
        fig, axes = style.panels(len(METRICS), 2.3)
        for ax, (metric, label) in zip(axes, METRICS.items(), strict=True):
            lines(ax, {v: only(means, metric=metric, layer=v) for v in looks}, looks)
            ax.set_ylabel(label)
        if more := means["layer"].nunique() - len(looks):
            fig.suptitle(f"{more} layers with smaller errors are in the table", fontsize=7)
        style.legend_of_runs(fig, looks)
    return fig


def summary(frame: pd.DataFrame, options: Options) -> Summary:
    """Every layer in the last round."""
    means, columns = by_layer(frame), {"round": "round", "layer": "layer", **METRICS}
    last = only(means, round=last_round(means))
    wide = last.pivot(index=["round", "layer"], columns="metric")["value"].reset_index()
    yield SmallTable.of(wide, columns)


@diagnostic(
    "lora",
    meta={"read": "FedEx-LoRA, FedRot-LoRA, raFLoRA: abstracts only"},
    on="run",
    draw=draw,
    summary=summary,
    example="checkpoints/texts-fedavg-s0-1a2b3c4d",
)
def lora(history: History) -> pd.DataFrame:
    """Measure what averaging does to low-rank adapters (LoRA), by round and adapted layer.

    With the clients' trained factors A_k [r, in] and B_k [out, r], scale s and aggregation weights p_k, the mean update is
    U = sum p_k s B_k A_k, and averaged factors give V = s (sum p_k B_k)(sum p_k A_k) instead. Rows of every ``layer``:

    - ``update_norm`` ||U||_F, and ``aggregation_error`` ||U - V||_F / ||U||_F: 0 where averaging the factors loses nothing.
    - ``effective_rank`` of U: exp of the entropy of its singular values' shares.
    - ``misalignment`` (scope pair): min over rotations R of ||Q_k - Q_l R||_F with orthonormal bases Q of the row spaces of A_k
      and A_l: 0 for one space, at most sqrt(2 r); ``scaled`` by that.

    Args:
        history: A run with client weights.

    Returns:
        A row a number, without units; ``masked`` where all B are 0, or U is.

    Raises:
        FldiagError: the model has no adapters, or no round has client weights.
    """
    if not adapters(history.module):
        raise FldiagError(
            f"{history.name}: its model has no low-rank adapters",
            "train with adapters (--set model.lora_rank=8), or record a model of peft",
            usage=True,
        )
    return history.table([*history.map_rounds(round_rows), *history.final_rows()])
