"""What training recorded of its local steps, averaged over the clients of a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from fldiag.errors import FldiagError
from fldiag.plotting.collected import Claim, Collected, Member, Source
from fldiag.plotting.sections import (
    Control,
    Figure,
    Group,
    Missing,
    Section,
    Table,
    axes,
    plus_minus,
    series,
    short,
)
from fldiag.results.files import csv_text
from fldiag.results.select import only, spread

#: Tables of steps are large: at most so many rounds of a run are shown, evenly spread.
MOST = 20
NAMES = {
    "cos_gu_gp": "cosine of g_u and g_p",
    "grad_norm": "norm of the gradient",
    "loss": "loss of the minibatch",
    "update_norm": "distance from the received weights",
    "lambda_mean": "mean Λ × √size",
    "proximal_loss": "proximal loss",
}
EVERYWHERE = "all weights"
KEYS = ["round", "index", "metric", "layer", "proximal"]


def collect(found: Collected) -> None:
    """Add to every run that recorded steps a table of means and standard deviations over its clients."""
    for m in found.members:
        there = m.run.recorded
        chosen = spread(there, MOST)
        try:
            frame = (
                pd.concat([_means(m.run.steps(r)) for r in chosen], ignore_index=True)
                if chosen
                else None
            )
        except Exception as error:  # whatever is wrong with one table, the report shows the others
            found.notes.append(
                f"{m.label}: the recorded steps are not shown: "
                f"{error.what if isinstance(error, FldiagError) else repr(error)}."
            )
            continue
        if frame is None or frame.empty:
            continue
        note = (
            f"Means over the clients, computed for this report from {len(chosen)} of {len(there)} recorded rounds; every "
            "client's numbers are in the run's folder steps."
        )
        made = Source(
            "steps",
            f"steps-{m.label.replace('/', '-')}.csv",
            {**m.run.index["provenance"], "run": m.label, "config": m.run.index["hash"]},
            csv_text(frame).encode(),
            frame,
            [
                Claim(str(m.run.index["files"].get(f"steps/{r:04d}.parquet")), round=r)
                for r in chosen
            ],
            note=note,
            place=len(found.sources),
        )
        found.sources.append(made)
        m.tables["steps"] = made


def _means(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean, std and count over the clients of one round, by step, metric and layer."""
    if rows.empty:
        return pd.DataFrame(columns=[*KEYS, "value", "std", "n_clients"])
    value = rows["value"].astype(float)
    if "scaled" in rows.columns:  # comparable between layers: 1 when all entries moved alike
        value = rows["scaled"].astype(float).where(rows["scaled"].notna(), value)
    flat = rows.assign(
        value=value, proximal=rows["proximal"] if "proximal" in rows.columns else None
    )
    found = (
        flat.groupby(KEYS, dropna=False, sort=False)["value"]
        .agg(["mean", "std", "count"])
        .reset_index()
    )
    return found.rename(columns={"mean": "value", "count": "n_clients"})


def steps(found: Collected) -> Section:
    section = Section(
        "steps",
        "Inside local training",
        "Quantities recorded at the local steps: means over the clients of a "
        "round, with a band of one standard deviation. Clients with few "
        "examples take fewer steps, so later steps average over fewer clients.",
    )
    tables = {m.place: (m, s.frame) for m, s in found.having("steps")}
    section.missing = [_absent(m) for m in found.members if m.place not in tables]
    if not tables:
        return section
    whole = pd.concat([frame for _, frame in tables.values()])
    rounds = sorted({int(r) for r in whole["round"]})
    group = Group(
        controls=[
            Control(
                "step-round", "Round", [str(r) for r in rounds], slider=True, start=len(rounds) - 1
            )
        ]
    )
    for metric in sorted({str(v) for v in whole["metric"]}):
        _figure(group, metric, list(tables.values()), only(whole, metric=metric), rounds)
    section.groups = [group]
    if len({str(v) for v in whole["proximal"].dropna()}) > 1:
        section.notes.append(
            "The runs' proximal losses are not the same kind (see the names of the lines): train with "
            "--set metrics.proximal=kl to compare them."
        )
    section.tables = [
        Table(
            f"Mean over steps and clients, round {rounds[-1]}",
            (
                "Run",
                "Metric",
                "Layer",
                "Proximal loss",
                "First step",
                "Last step",
                "Mean over steps",
            ),
            [
                row
                for m, frame in tables.values()
                for row in _ends(m, only(frame, round=rounds[-1]))
            ],
        )
    ]
    section.sources = [s.place for _, s in found.having("steps")]
    return section


def _absent(m: Member) -> Missing:
    if "origin" in m.run.index:
        return Missing(m.label, "another program trained it and recorded no steps")
    return Missing(m.label, "its steps were not recorded; train it with --set metrics.steps=true")


def _figure(
    group: Group,
    metric: str,
    tables: Sequence[tuple[Member, pd.DataFrame]],
    rows: pd.DataFrame,
    rounds: Sequence[int],
) -> None:
    """One metric over the steps of a round; with a choice of layer where there are several."""
    layers = list(dict.fromkeys(None if pd.isna(v) else str(v) for v in rows["layer"]))
    controls, name = ["step-round"], NAMES.get(metric, metric.replace("_", " "))
    if len(layers) > 1:
        controls.append(f"step-layer-{metric}")
        group.controls.append(
            Control(controls[-1], f"Layer of the {name}", [v or EVERYWHERE for v in layers])
        )
    frames: dict[str, dict[str, list[dict[str, Any]]]] = {
        (f"{r}|{layer or EVERYWHERE}" if len(layers) > 1 else str(r)): {"series": []}
        for r in rounds
        for layer in layers
    }
    for m, frame in tables:
        own_rows = only(frame, metric=metric)
        for (r, layer, kind), part in own_rows.groupby(
            ["round", "layer", "proximal"], dropna=False, sort=False
        ):
            key = f"{r}|{EVERYWHERE if pd.isna(layer) else layer}" if len(layers) > 1 else str(r)
            own = m.label if pd.isna(kind) else f"{m.label} ({kind})"
            frames[key]["series"].append(series(own, part, run=m.place, x="index", spread="std"))
    low = short(rows["value"].astype(float).min())
    group.figures.append(
        Figure(
            name[0].upper()
            + name[1:]
            + (f", {layers[0]}" if len(layers) == 1 and layers[0] else ""),
            {
                "kind": "lines",
                "controls": controls,
                "frames": frames,
                **axes(name, x="local step", zero=low is not None and low < 0),
            },
        )
    )


def _ends(m: Member, rows: pd.DataFrame) -> list[list[str]]:
    made = []
    for (metric, layer, kind), part in rows.groupby(
        ["metric", "layer", "proximal"], dropna=False, sort=False
    ):
        part = part.sort_values("index").dropna(subset=["value"])
        if len(part):
            first, last = part.iloc[0], part.iloc[-1]
            made.append(
                [
                    m.label,
                    str(metric),
                    "–" if pd.isna(layer) else str(layer),
                    "–" if pd.isna(kind) else str(kind),
                    plus_minus(first["value"], first["std"]),
                    plus_minus(last["value"], last["std"]),
                    plus_minus(part["value"].astype(float).mean(), None),
                ]
            )
    return made
