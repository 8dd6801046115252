"""Every method at its documented defaults on digits: accuracy, sharpness, forgetting and cost in one table.

    python analyses/methods_on_digits.py [--only fedavg fedsol] [--out figures/methods]

The ``digits`` preset as it is (20 clients, 10 a round, LDA 0.1, 5 epochs in batches of 20; plain SGD with lr 0.1, gradients
clipped at 10), 20 rounds and three seeds. It gives methods that distil 200 training examples as public inputs (no client has
them) and methods that need stages the small residual net; these are compared with FedAvg on it. Runs are kept under
``checkpoints/`` and used again. Per method, mean and deviation over the seeds:

accuracy     of the final global model on the test set (for methods with a personal phase also the clients' mean on test
             sets with their own class mixture)
lambda_1     largest Hessian eigenvalue of the final global model on the training set
forgetting   accuracy of the received model minus that of a client's trained model, on the test set, mean over the clients
             of the last round
cost         multiply-adds of a round (all clients and the server) over those of FedAvg on the same model, counted
uplink       bytes a client sends a round over those of FedAvg
"""

from __future__ import annotations

import argparse
from functools import cache
from pathlib import Path

import pandas as pd

import fldiag
from fldiag import registry
from fldiag.training.server import Federation
from fldiag.training.setup import Setup
from fldiag_papers.costs import operations
from fldiag_papers.study import write

ROUNDS, SEEDS = 20, 3
#: Column -> heading, factor and decimal places.
COLUMNS = {
    "accuracy": ("accuracy %", 100, 1),
    "personal": ("personal %", 100, 1),
    "lambda_1": ("λ1", 1, 2),
    "forgetting": ("forgetting %", 100, 1),
    "cost": ("cost", 1, 2),
    "uplink": ("uplink", 1, 2),
}


def measured(run: fldiag.Run) -> dict[str, float]:
    """The numbers of one run; of one that diverged none but what a client sends."""
    last = run.metrics.query("scope == 'global'").groupby("metric")["value"].last()
    row = {"uplink": run.metrics.query("metric == 'uplink'")["value"].iloc[0]}
    if run.status == "diverged":
        return row
    if row["uplink"]:  # otherwise the global model is the one that training began with
        spectrum = fldiag.diagnose(run, "spectrum", k=1).groupby("metric")["value"]
        forgetting = fldiag.diagnose(run, "forgetting", rounds="last", own=False)
        drop = forgetting.query("metric == 'drop' and moment == 'trained' and scope == 'global'")
        row["accuracy"] = last["accuracy"]
        row["lambda_1"] = spectrum.first()["eigenvalue"]
        row["forgetting"] = drop["value"].iloc[0]
    return row | ({"personal": last["personal_accuracy"]} if "personal_accuracy" in last else {})


@cache
def cost(method: str, model: str, public: str | None) -> int:
    """Operations of the second round: in the first, many methods have nothing to correct yet."""
    config = fldiag.Config.load(
        "digits", method__name=method, train__stack="off", model__name=model, data__public=public
    )
    return operations(Federation(Setup(config))).total()


def row(method: str) -> dict[str, object]:
    """Mean and deviation of every number, and the ratios to FedAvg's."""
    config = fldiag.Config.load("digits", method__name=method, rounds=ROUNDS)
    # the round before the last says what clients received of batch-norm
    config = config.replace(checkpoint__every=ROUNDS - 1)
    runs = [fldiag.train(config.replace(seed=seed), resume=True) for seed in range(SEEDS)]
    plain = fldiag.train(config.replace(method__name="fedavg"), resume=True)
    numbers = pd.DataFrame([measured(run) for run in runs])
    model, public = config.model.name, config.data.public
    mean = numbers.mean()
    mean["uplink"] /= measured(plain)["uplink"]
    mean["cost"] = cost(method, model, public) / cost("fedavg", model, public)
    spread = numbers.drop(columns="uplink").std(ddof=1).add_suffix("_std")
    return {"method": method, "model": model, "public": public or "", **mean, **spread}


def markdown(table: pd.DataFrame) -> str:
    """The table as a page has it."""

    def cell(row: pd.Series, column: str) -> str:
        _, scale, digits = COLUMNS[column]
        pair = [row.get(name) for name in (column, f"{column}_std")]
        values = [f"{scale * value:.{digits}f}" for value in pair if pd.notna(value)]
        return " ± ".join(values) or "–"

    lines = [["method", "model", *(heading for heading, *_ in COLUMNS.values())]]
    lines.append(["---"] * len(lines[0]))
    for _, row in table.iterrows():
        name = row["method"] + (" (public data)" if row["public"] else "")
        lines.append([name, row["model"], *(cell(row, column) for column in COLUMNS)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=registry.method.names())
    parser.add_argument("--out", type=Path, default=Path("figures/methods"))
    args = parser.parse_args()
    rows = []
    for method in args.only:
        rows.append(row(method))
        print(rows[-1], flush=True)
    table = pd.DataFrame(rows)
    about = {"rounds": ROUNDS, "seeds": SEEDS, "preset": "digits"}
    print(*write(table, args.out / "digits", about), sep="\n")
    (args.out / "digits.md").write_text(markdown(table), "utf-8")


if __name__ == "__main__":
    main()
