"""What training recorded of its local steps, averaged over the clients of a round."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fldiag.errors import FldiagError
from fldiag.plotting import series, style
from fldiag.plotting.pages import Group, Missing, Section, picture
from fldiag.plotting.tables import floats
from fldiag.report.members import Claim, Collected, Member, Source
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
KEYS = ["round", "index", "metric", "layer", "proximal"]


def collect(collection: Collected) -> None:
    """Add to every run that recorded steps a table of means and standard deviations over its clients."""
    for m in collection.members:
        recorded = m.run.recorded
        rounds = spread(recorded, MOST)
        try:
            frame = (
                pd.concat([_means(m.run.steps(r)) for r in rounds], ignore_index=True)
                if rounds
                else None
            )
        except Exception as error:  # whatever is wrong with one table, the report shows the others
            collection.notes.append(
                f"{m.label}: the recorded steps are not shown: "
                f"{error.what if isinstance(error, FldiagError) else repr(error)}."
            )
            continue
        if frame is None or frame.empty:
            continue
        note = (
            f"Means over the clients, computed for this report from {len(rounds)} of {len(recorded)} recorded rounds; "
            "every client's numbers are in the run's folder steps."
        )
        source = Source(
            "steps",
            f"steps-{m.folder.replace('/', '-')}.csv",
            {**m.run.index["provenance"], "run": m.folder, "config": m.run.index["hash"]},
            csv_text(frame).encode(),
            frame,
            [
                Claim(str(m.run.index["files"].get(f"steps/{r:04d}.parquet")), round=r)
                for r in rounds
            ],
            note=note,
            place=len(collection.sources),
        )
        collection.sources.append(source)
        m.tables["steps"] = source


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
    means = (
        flat.groupby(KEYS, dropna=False, sort=False)["value"]
        .agg(["mean", "std", "count"])
        .reset_index()
    )
    return means.rename(columns={"mean": "value", "count": "n_clients"})


def steps(collection: Collected) -> Section | None:
    tables = collection.having("steps")
    if not tables:
        return None
    section = Section(
        "steps",
        "Inside local training",
        "Quantities recorded at the local steps of each run's last recorded round: means over its clients, with a band of "
        "one standard deviation. Clients with few examples take fewer steps, so later steps average over fewer clients. "
        "The tables have the other rounds.",
        sources=[s.place for _, s in tables],
    )
    with_steps = {m.place for m, _ in tables}
    section.missing = [absent(m) for m in collection.members if m.place not in with_steps]
    last = [(m, s.frame[s.frame["round"] == s.frame["round"].max()]) for m, s in tables]
    section.groups = [Group(pictures=[picture(draw(last), "Local steps of the last round")])]
    if len({str(v) for _, rows in last for v in rows["proximal"].dropna()}) > 1:
        section.notes.append(
            "The runs' proximal losses are not the same kind (see the names of the lines): train with "
            "--set metrics.proximal=kl to compare them."
        )
    return section


def absent(m: Member) -> Missing:
    """Why a run has no steps."""
    if "origin" in m.run.index:
        return Missing(m.label, "another program trained it and recorded no steps")
    return Missing(m.label, "its steps were not recorded; train it with --set metrics.steps=true")


def draw(runs: list[tuple[Member, pd.DataFrame]]) -> Figure:
    """A panel a metric and layer, a line a run."""
    table = pd.concat([rows for _, rows in runs])
    panels = list(table[["metric", "layer"]].drop_duplicates().itertuples(index=False))
    with style.paper():
        fig, axes = style.panels(len(panels), 2.0, 0.15 * len(runs))
        keys, texts = [], []
        for ax, (metric, layer) in zip(axes, panels, strict=True):
            for m, rows in runs:
                part = only(rows, metric=metric, layer=None if pd.isna(layer) else layer)
                for kind, curve in part.groupby("proximal", dropna=False, sort=False):
                    curve = curve.set_index("index").sort_index()
                    middle, std = floats(curve["value"]), np.nan_to_num(floats(curve["std"]))
                    series.line(ax, curve, m.look, (middle - std, middle + std))
                    text = m.label if pd.isna(kind) else f"{m.label} ({kind})"
                    if text not in texts:
                        keys.append(series.key(m.look))
                        texts.append(text)
            title = NAMES.get(str(metric), str(metric).replace("_", " "))
            ax.set_title(title if pd.isna(layer) else f"{title}\n{style.plain(layer)}", fontsize=8)
            series.rounds_axis(ax)
            ax.set_xlabel("local step")
            ax.grid(True)
        style.legend(fig, keys, texts, loc="outside lower center", ncols=3)
    return fig
