"""Does flatness, of the whole or of its parts, go with accuracy and forgetting? Twelve methods on digits, three seeds each.

    python analyses/flatness.py [--seeds 3] [--only fedavg,fedsol] [--out figures/flatness]

The ``digits`` preset (20 clients, 10 a round, LDA 0.1, 20 rounds), every method at its defaults. Of the last round, the measures
of ``fldiag flatness``. ``accuracy``: of the final model on the test set;
``forgetting``: accuracy of the received minus that of a client's trained model there, mean over the clients of the last round.

correlations.csv: Spearman's and Pearson's correlation of each measure with both over all runs, with 95 % intervals by a bootstrap
over methods (the seeds of a method stay together); ``spearman_within``: of the deviations from each method's mean, which says
whether the measure tells runs of one method apart. runs.csv: the numbers of every run. Runs are kept under ``checkpoints/``, and
tables in ``checkpoints/cache``: what is there is used again. About ten minutes on one core.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy import stats

import fldiag
from fldiag import Config
from fldiag.plotting import style
from fldiag.results.provenance import provenance
from fldiag.results.select import WHOLE, number
from fldiag.seeding import numpy_rng

METHODS = (
    "fedavg",
    "fedprox",
    "scaffold",
    "feddyn",
    "fedntd",
    "fedavgm",
    "fedcm",
    "fedsam",
    "fedspeed",
    "fedlesam",
    "fedsol",
    "fedtoga",
)
ROUNDS, RESAMPLES = 20, 2000
OUTCOMES = ("accuracy", "forgetting")
#: Column -> metric, moment, and how a reader calls it.
MEASURES: dict[str, tuple[str, str, str]] = {
    "sharpness": ("sharpness", "aggregated", "sharpness of the whole"),
    "eigenvalue": ("eigenvalue", "aggregated", "λ1 of the whole"),
    "trace": ("trace", "aggregated", "trace of the whole"),
    "sharpness_parts": ("sharpness_parts", "trained", "sharpness of the parts"),
    "eigenvalue_parts": ("eigenvalue_parts", "trained", "λ1 of the parts"),
    "trace_parts": ("trace_parts", "trained", "trace of the parts"),
    "sharpness_gap": ("sharpness_gap", "trained", "flatness gap, sharpness"),
    "eigenvalue_gap": ("eigenvalue_gap", "trained", "flatness gap, λ1"),
    "trace_gap": ("trace_gap", "trained", "flatness gap, trace"),
    "sharpness_gap_at_w": ("sharpness_gap", "aggregated", "gap at one point, sharpness"),
    "eigenvalue_gap_at_w": ("eigenvalue_gap", "aggregated", "gap at one point, λ1"),
}


def measured(method: str, seed: int, cache: Path) -> dict[str, Any]:
    """The numbers of one run."""
    config = Config.load(
        "digits", method__name=method, rounds=ROUNDS, seed=seed, checkpoint__clients="sampled"
    )
    run = fldiag.train(config, resume=True)
    row: dict[str, Any] = {"method": method, "seed": seed, "status": run.status}
    if run.status != "finished":
        return row
    found = fldiag.diagnose(run, "flatness", every=ROUNDS, cache=cache)
    forgot = fldiag.diagnose(run, "forgetting", rounds="last", cache=cache)
    at: dict[str, Any] = {"scope": "global", "layer": None, "round": ROUNDS}
    for name, (metric, moment, _) in MEASURES.items():
        row[name] = number(found, metric, moment=moment, **at)
        row[f"{name}_stderr"] = number(found, metric, column="stderr", moment=moment, **at)
    row["accuracy"] = number(run.metrics, "accuracy", round=ROUNDS, slice="test", scope="global")
    row["forgetting"] = number(forgot, "drop", moment="trained", round=ROUNDS, **WHOLE)
    return row


def correlations(frame: pd.DataFrame) -> pd.DataFrame:
    """A row for each measure and outcome."""
    rows = []
    for name in MEASURES:
        for outcome in OUTCOMES:
            pairs = frame[["method", name, outcome]].dropna()
            row: dict[str, Any] = {"measure": name, "outcome": outcome, "runs": len(pairs)}
            for how, f in (("spearman", stats.spearmanr), ("pearson", stats.pearsonr)):
                row[how] = _of(f, pairs, name, outcome)
                row[f"{how}_low"], row[f"{how}_high"] = _interval(f, pairs, name, outcome)
            centred = pairs.assign(
                **{
                    c: pairs[c] - pairs.groupby("method")[c].transform("mean")
                    for c in (name, outcome)
                }
            )
            row["spearman_within"] = _of(stats.spearmanr, centred, name, outcome)
            rows.append(row)
    return pd.DataFrame(rows)


def _of(f: Any, pairs: pd.DataFrame, x: str, y: str) -> float:
    varied = len(pairs) > 2 and pairs[x].nunique() > 1 and pairs[y].nunique() > 1
    return float(f(pairs[x], pairs[y]).statistic) if varied else float("nan")


def _interval(f: Any, pairs: pd.DataFrame, x: str, y: str) -> tuple[float, float]:
    """Percentiles over resampled methods."""
    groups, rng = (
        [part for _, part in pairs.groupby("method")],
        numpy_rng(0, "bootstrap of methods"),
    )
    if len(groups) < 3:
        return float("nan"), float("nan")
    values = [
        _of(f, pd.concat([groups[i] for i in rng.integers(len(groups), size=len(groups))]), x, y)
        for _ in range(RESAMPLES)
    ]
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return float(low), float(high)


def draw(found: pd.DataFrame, runs: int) -> Figure:
    """Correlations with their intervals, a panel for each outcome."""
    names = {k: text for k, (_, _, text) in MEASURES.items()}
    with style.paper():
        fig = style.figure(style.TWO_COLUMNS, 4.2, layout="constrained")
        for ax, outcome in zip(fig.subplots(1, 2, sharey=True), OUTCOMES, strict=True):
            part = found[found["outcome"] == outcome].set_index("measure").loc[list(names)]
            y = np.arange(len(names))
            for how, shift, look in (
                ("spearman", -0.14, style.look(2)),
                ("pearson", 0.14, style.look(1)),
            ):
                value = part[how].to_numpy()
                reach = np.abs(part[[f"{how}_low", f"{how}_high"]].to_numpy().T - value)
                ax.errorbar(
                    value,
                    y + shift,
                    xerr=reach,
                    linestyle="none",
                    marker=look.marker,
                    markersize=3.5,
                    color=look.color,
                    linewidth=0.8,
                )
            ax.axvline(0, color="black", linewidth=0.6)
            ax.set(
                xlim=(-1.02, 1.02),
                xlabel="correlation",
                title=f"with the final {outcome}"
                if outcome == "accuracy"
                else "with forgetting in the last round",
            )
            ax.grid(True, axis="x")
        ax.set_yticks(y, list(names.values()))
        ax.invert_yaxis()
        keys = [
            Line2D([], [], marker=style.look(i).marker, color=style.look(i).color, markersize=3.5)
            for i in (2, 1)
        ]
        style.legend(fig, keys, ["Spearman", "Pearson"], loc="outside lower center", ncols=2)
        fig.suptitle(f"{runs} runs on digits; 95 % intervals over methods", fontsize=8.5)
    return fig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="comma-separated methods")
    parser.add_argument("--out", type=Path, default=Path("figures/flatness"))
    args = parser.parse_args()
    rows = []
    for method in args.only.split(",") if args.only else METHODS:
        for seed in range(args.seeds):
            rows.append(measured(method, seed, Path("checkpoints/cache")))
            print(
                ", ".join(
                    f"{k} {v:.3g}" if isinstance(v, float) else f"{v}"
                    for k, v in rows[-1].items()
                    if not k.endswith("_stderr")
                ),
                flush=True,
            )
    write(pd.DataFrame(rows), args.out)


def write(frame: pd.DataFrame, out: Path) -> None:
    """The tables and the picture."""
    found = correlations(frame)
    out.mkdir(parents=True, exist_ok=True)
    frame.to_csv(out / "runs.csv", index=False, float_format="%.6g")
    found.to_csv(out / "correlations.csv", index=False, float_format="%.4f")
    about = provenance(rounds=ROUNDS, runs=len(frame), preset="digits")
    (out / "correlations.json").write_text(json.dumps(about, indent=1), "utf-8")
    style.save(draw(found, int((frame["status"] == "finished").sum())), out / "correlations.png")
    print(found.to_string(index=False))
    print(out / "correlations.csv")


if __name__ == "__main__":
    main()
