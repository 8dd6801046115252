"""What training recorded of its local steps, averaged over the clients of a round."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fldiag.plotting import curves, style
from fldiag.plotting.pages import Group, Missing, Section, picture
from fldiag.plotting.tables import floats
from fldiag.report.members import Collected, Member, reason
from fldiag.results.select import only

NAMES = {
    "cos_gu_gp": "cosine of g_u and g_p",
    "grad_norm": "norm of the gradient",
    "loss": "loss of the minibatch",
    "update_norm": "distance from the received weights",
    "lambda_mean": "mean Λ × √size",
    "proximal_loss": "proximal loss",
}
KEYS = ["index", "metric", "layer", "proximal"]


def steps(collection: Collected) -> Section | None:
    recorded = [m for m in collection.members if m.run.recorded]
    if not recorded:
        return None
    section = Section(
        "steps",
        "Inside local training",
        "Quantities recorded at the local steps of each run's last recorded round: means over its clients, with a band of "
        "one standard deviation. Clients with few examples take fewer steps, so later steps average over fewer clients. "
        "The numbers of every client and round are in the run's folder steps.",
    )
    section.missing = [absent(m) for m in collection.members if m not in recorded]
    tables: list[tuple[Member, pd.DataFrame]] = []
    for m in recorded:
        try:
            tables.append((m, means(m.run.steps(m.run.recorded[-1]))))
        except Exception as error:  # whatever is wrong with one table, the report shows the others
            section.notes.append(f"{m.label}: the recorded steps are not shown: {reason(error)}.")
    if tables:
        section.groups = [Group(pictures=[picture(draw(tables), "Local steps of the last round")])]
    if len({str(v) for _, rows in tables for v in rows["proximal"].dropna()}) > 1:
        section.notes.append(
            "The runs' proximal losses are not the same kind (see the names of the lines): train with "
            "--set metrics.proximal=kl to compare them."
        )
    return section


def means(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean and std over the clients of one round, by step, metric and layer."""
    value = rows["value"].astype(float)
    if "scaled" in rows.columns:  # comparable between layers: 1 when all entries moved alike
        value = rows["scaled"].astype(float).where(rows["scaled"].notna(), value)
    proximal = rows["proximal"] if "proximal" in rows.columns else None
    groups = rows.assign(value=value, proximal=proximal).groupby(KEYS, dropna=False, sort=False)
    return groups["value"].agg(value="mean", std="std").reset_index()


def absent(m: Member) -> Missing:
    """Why a run has no steps."""
    if "origin" in m.run.index:
        return Missing(m.label, "another program trained it and recorded no steps")
    return Missing(m.label, "its steps were not recorded; train it with --set metrics.steps=true")


def draw(tables: list[tuple[Member, pd.DataFrame]]) -> Figure:
    """A panel a metric and layer, a line a run."""
    pairs = pd.concat([rows for _, rows in tables])[["metric", "layer"]].drop_duplicates()
    with style.paper():
        fig, axes = style.panels(len(pairs), 2.0)
        looks: dict[str, style.Look] = {}
        for ax, (metric, layer) in zip(axes, pairs.itertuples(index=False), strict=True):
            for m, rows in tables:
                part = only(rows, metric=metric, layer=None if pd.isna(layer) else layer)
                for kind, curve in part.groupby("proximal", dropna=False, sort=False):
                    curve = curve.set_index("index").sort_index()
                    middle, std = floats(curve["value"]), np.nan_to_num(floats(curve["std"]))
                    curves.line(ax, curve, m.look, (middle - std, middle + std))
                    looks[m.label if pd.isna(kind) else f"{m.label} ({kind})"] = m.look
            title = NAMES.get(str(metric), str(metric).replace("_", " "))
            ax.set_title(title if pd.isna(layer) else f"{title}\n{style.plain(layer)}", fontsize=8)
            curves.rounds_axis(ax)
            ax.set_xlabel("local step")
            ax.grid(True)
        curves.legend_of_runs(fig, looks)
    return fig
