"""Does the quadratic formula find the clients that harm? Predicted and true effects of leaving each of 20 clients out.

    python analyses/leave_one_out.py [--seeds 3] [--out figures/leave_one_out]

FedAvg with the ``digits`` preset (20 clients, 10 a round, LDA 0.1, 20 rounds), three seeds: ``fldiag leave-one-out`` of the last
aggregate and of the last 1, 5 and 10 rounds of training. effects.csv: every client's true and predicted effects;
correlations.csv: Spearman's correlation pooled over the seeds, with a 95 % bootstrap interval over clients. Runs are kept under
``checkpoints/``, and tables in ``checkpoints/cache``: what is there is used again. About 12 minutes on one core.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pandas as pd

import fldiag
from fldiag import Config
from fldiag.plotting import style
from fldiag.results.provenance import provenance
from fldiag.results.select import only
from fldiag.results.table import table
from fldiag.training.diagnostics.leave_one_out.measure import rank_correlations
from fldiag.training.diagnostics.leave_one_out.picture import draw

ROUNDS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("figures/leave_one_out"))
    args = parser.parse_args()
    tables = []
    for seed in range(args.seeds):
        config = Config.load("digits", rounds=ROUNDS, seed=seed, checkpoint__clients="sampled")
        tables.append(
            fldiag.diagnose(
                fldiag.train(config, resume=True), "leave-one-out", cache=Path("checkpoints/cache")
            )
        )
        print(f"seed {seed} done", flush=True)
    write(tables, args.out)


def write(tables: list[pd.DataFrame], out: Path) -> None:
    """The tables and the picture of the runs' answers."""
    found = pd.concat(
        [only(t, metric=("effect", "predicted_effect", "missing")) for t in tables],
        ignore_index=True,
    )
    ranks = table(rank_correlations(found, 0), run="pooled", scope="global", slice="train")
    out.mkdir(parents=True, exist_ok=True)
    columns = ["run", "seed", "client", "index", "metric", "estimator", "value", "stderr", "note"]
    found.reindex(columns=columns).to_csv(out / "effects.csv", index=False, float_format="%.6g")
    shown = ranks[["index", "estimator", "value", "low", "high", "n_clients"]]
    shown.to_csv(out / "correlations.csv", index=False, float_format="%.4f")
    about = provenance(rounds=ROUNDS, seeds=len(tables), preset="digits")
    (out / "correlations.json").write_text(json.dumps(about, indent=1), "utf-8")
    style.save(draw(pd.concat([found, ranks], ignore_index=True)), out / "leave_one_out.png")
    print(shown.to_string(index=False))
    print(out / "correlations.csv")


if __name__ == "__main__":
    main()
