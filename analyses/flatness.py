"""Does flatness, of the whole or of its parts, go with accuracy and forgetting? Twelve methods on digits, three seeds each.

    python analyses/flatness.py [--out figures/flatness]

The ``digits`` preset (20 clients, 10 a round, LDA 0.1, 20 rounds), every method at its defaults. Of the last round, the measures
of ``fldiag flatness``. ``accuracy``: of the final model on the test set; ``forgetting``: accuracy of the received minus that of a
client's trained model there, mean over the clients of the last round.

runs.csv: the numbers of every run. correlations.csv: Spearman's correlation of each measure with both over all runs, with 95 %
intervals by a bootstrap over methods (the seeds of a method stay together); ``spearman_within``: of the deviations from each
method's mean, which says whether the measure tells runs of one method apart. Runs are kept under ``checkpoints/`` and used again.
About ten minutes on one core.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

import fldiag
from fldiag_papers.study import write

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
ROUNDS, SEEDS, RESAMPLES = 20, 3, 2000
OUTCOMES = ("accuracy", "forgetting")
#: Column -> metric and moment of ``fldiag flatness``.
MEASURES = {
    **{name: (name, "aggregated") for name in ("sharpness", "eigenvalue", "trace")},
    **{
        f"{name}_{kind}": (f"{name}_{kind}", "trained")
        for kind in ("parts", "gap")
        for name in ("sharpness", "eigenvalue", "trace")
    },
    **{f"{name}_gap_at_w": (f"{name}_gap", "aggregated") for name in ("sharpness", "eigenvalue")},
}


def measured(method: str, seed: int) -> dict[str, object]:
    """The numbers of one run."""
    over = {"method.name": method, "seed": seed, "checkpoint.clients": "sampled"}
    run = fldiag.train(fldiag.Config.load("digits", rounds=ROUNDS, **over), resume=True)
    flatness = fldiag.diagnose(run, "flatness", every=ROUNDS)
    row: dict[str, object] = {"method": method, "seed": seed}
    for name, (metric, moment) in MEASURES.items():
        row[name], row[f"{name}_stderr"] = _of_round(flatness, metric, moment)
    accuracy = run.metrics.query("metric == 'accuracy' and scope == 'global' and slice == 'test'")
    row["accuracy"] = accuracy["value"].iloc[-1]
    row["forgetting"], _ = _of_round(
        fldiag.diagnose(run, "forgetting", rounds="last"), "drop", "trained"
    )
    return row


def _of_round(table: pd.DataFrame, metric: str, moment: str) -> tuple[float, float]:
    """A number of all clients in the last round, and its standard error."""
    is_whole = (table["scope"] == "global") & table["layer"].isna() & table["index"].isna()
    is_it = (table["metric"] == metric) & (table["moment"] == moment) & (table["round"] == ROUNDS)
    return tuple(table.loc[is_whole & is_it, ["value", "stderr"]].iloc[0])


def correlations(runs: pd.DataFrame) -> pd.DataFrame:
    """A row for each measure and outcome."""
    rng = np.random.default_rng(0)
    rows = []
    for measure, outcome in product(MEASURES, OUTCOMES):
        pair = runs[[measure, outcome]]
        within = pair - pair.groupby(runs["method"]).transform("mean")
        methods = list(runs.groupby("method").indices.values())
        draws = rng.integers(len(methods), size=(RESAMPLES, len(methods)))
        resampled = [
            _spearman(pair.to_numpy()[np.concatenate([methods[i] for i in draw])]) for draw in draws
        ]
        low, high = np.nanpercentile(resampled, [2.5, 97.5])
        row = {"measure": measure, "outcome": outcome, "runs": len(pair)}
        row |= {"spearman": _spearman(pair), "spearman_low": low, "spearman_high": high}
        rows.append(row | {"spearman_within": _spearman(within)})
    return pd.DataFrame(rows)


def _spearman(pair: pd.DataFrame | np.ndarray) -> float:
    return float(stats.spearmanr(pair).statistic)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("figures/flatness"))
    out = parser.parse_args().out
    runs = pd.DataFrame([measured(method, seed) for method in METHODS for seed in range(SEEDS)])
    table = correlations(runs)
    print(table.to_string(index=False))
    print(*write(table, out / "correlations", {"rounds": ROUNDS, "preset": "digits"}), sep="\n")
    runs.to_csv(out / "runs.csv", index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
