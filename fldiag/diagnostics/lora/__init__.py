"""What averaging does to low-rank adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from fldiag.errors import FldiagError
from fldiag.registry import diagnostic
from fldiag.results.select import only
from fldiag.results.summary import Item, Say, Small
from fldiag.results.table import table

if TYPE_CHECKING:
    from fldiag.runs.history import History


COLUMNS = {
    "layer": "layer",
    "aggregation_error": "aggregation error",
    "misalignment": "misalignment",
    "effective_rank": "effective rank",
}


def summary(table: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[Item]:
    """Every layer in the last round."""
    of_layers = table[table["layer"].notna()]
    last = only(of_layers, round=of_layers["round"].max())
    yield Say(
        f"adapters in round {last['round'].max()}: what averaging their factors loses (misalignment: mean over pairs of "
        "clients, as a share of the largest possible)"
    )
    lines = []
    for layer, part in last.groupby("layer", sort=False):
        line: dict[str, Any] = {"layer": layer}
        for metric in ("aggregation_error", "effective_rank"):
            values = only(part, metric=metric)["value"].dropna().astype(float)
            line[metric] = float(values.iloc[-1]) if len(values) else None
        pairs = only(part, metric="misalignment")["scaled"].dropna().astype(float)
        lines.append({**line, "misalignment": float(pairs.mean()) if len(pairs) else None})
    yield Small(lines, COLUMNS)


@diagnostic(
    "lora",
    meta={"read": "FedEx-LoRA, FedRot-LoRA, raFLoRA: abstracts only"},
    on="run",
    draw="fldiag.diagnostics.lora.picture:draw",
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

    Rows without a value (``masked``): all B are 0, or U is. The definitions are ours, after FedEx-LoRA (arXiv 2410.09432),
    FedRot-LoRA (arXiv 2602.23638) and raFLoRA (arXiv 2602.13486), of which only the abstracts were read.

    Raises FldiagError when the model has no adapters, or no round has client weights.
    """
    from fldiag.diagnostics.lora import measure
    from fldiag.models.lora import adapters

    if not adapters(history.network.module):
        raise FldiagError(
            f"{history.name}: its model has no low-rank adapters",
            "train with adapters (--set model.lora_rank=8), or record a model of peft",
            usage=True,
        )
    rows = history.map_rounds(measure.round_rows)
    rows += history.final_rows()
    return table(
        [{"masked": row["value"] is None, **row} for row in rows] + history.notes, **history.common
    )
