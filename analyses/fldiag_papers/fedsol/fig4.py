"""FedSOL Figure 4: FedAvg and FedSOL over learning factors."""

import math
from typing import Any

from fldiag_papers import pictures
from fldiag_papers.lines import lines
from fldiag_papers.study import Study, Trial, final

PRESET, TEXT = (
    "fedsol-cifar10-lda0.1",
    {
        "ratio": "share of clients sampled [%]",
        "epochs": "local epochs",
        "lr": "learning rate",
        "rho": "radius ρ of FedSOL",
    },
)
SWEEPS: tuple[tuple[str, float, dict[str, Any]], ...] = (
    *(("ratio", r, {"clients.per_round": round(100 * r)}) for r in (0.02, 0.05, 0.1, 0.2)),
    *(("epochs", e, {"train.epochs": e}) for e in (1, 5, 10, 20)),
    *(("lr", lr, {"train.lr": lr}) for lr in (0.003, 0.01, 0.03, 0.1)),
)
RHOS = (0.1, 0.5, 1.0, 1.5, 2.0)


def trained(row):
    """Factor, and its value as it was trained: a scale changes shares of clients and epochs."""
    ((factor, value),) = pictures.parse(row["setting"]).items()
    values = pictures.parse(row.get("trained_with"))
    if factor == "ratio":
        total = float(values.get("clients.total", 100))
        return factor, 100 * float(values.get("clients.per_round", 100 * float(value))) / total
    if factor == "rho":  # FedAvg has none
        return factor, float(value) or math.nan
    key = {"epochs": "train.epochs", "lr": "train.lr"}[factor]
    return factor, float(values.get(key, value))


def draw(table):
    factors, values = zip(*(trained(row) for _, row in table.iterrows()), strict=True)
    table = table.assign(metric=factors, at=values)
    return lines(table, "at", TEXT, log=("ratio", "epochs", "lr"))


STUDY = Study(
    title="Learning factors",
    source="FedSOL Figure 4",
    caption="Final test accuracy against the share of sampled clients, the local epochs, the learning rate and rho (1.5 where "
    "it does not vary). The axes show the values that were trained. A cross marks diverged weights.",
    trials=(
        *(
            Trial(PRESET, method, over, label, setting=f"{factor}={value}")
            for factor, value, over in SWEEPS
            for method, label in (("fedavg", "FedAvg"), ("fedsol", "FedSOL"))
        ),
        Trial(PRESET, "fedavg", label="FedAvg", setting="rho=0"),
        *(Trial(PRESET, "fedsol", {"method.rho": rho}, "FedSOL", f"rho={rho}") for rho in RHOS),
    ),
    ask=(final(),),
    draw=draw,
)
