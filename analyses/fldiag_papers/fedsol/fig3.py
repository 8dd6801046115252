"""FedSOL Figure 3: how orthogonal the update is to the proximal gradient, and what proximal loss remains."""

from typing import Any

import pandas as pd

from fldiag_papers import learning_curves
from fldiag_papers.study import Study, Trial, diagnostic

PRESET = "fedsol-cifar10-lda0.1"
DRIFT: dict[str, Any] = {"steps": "kl", "rho": (), "gradients": False, "representation": False}
COSINE, LOSS = "cosine of the gradients", "mean proximal loss (KL)"


def draw(table):
    rows = table[
        (table["scope"] == "global") & (table["moment"] == "trained") & table["layer"].isna()
    ].drop(columns="slice")
    cosine = rows[(rows["metric"] == "cos_gu_gp") & (rows["estimator"] == "steps")].assign(
        metric=COSINE
    )
    loss = rows[(rows["metric"] == "proximal_loss") & (rows["estimator"] == "exact")].assign(
        metric=LOSS
    )
    return learning_curves.draw(pd.concat([cosine, loss]), (COSINE, LOSS))


STUDY = Study(
    title="Proximal orthogonality",
    source="FedSOL Figure 3",
    caption="Left: cosine between the applied gradient and the proximal gradient (KL) over all parameters, mean over the local "
    "steps of the sampled clients. Right: proximal loss of the clients on their own data after training. rho = 0 is "
    "FedAvg.",
    trials=(
        Trial(PRESET, "fedavg", label="FedAvg", ask=(diagnostic("drift", **DRIFT),)),
        *(
            Trial(
                PRESET,
                "fedsol",
                {"method.rho": rho},
                label=f"FedSOL, rho {rho}",
                ask=(diagnostic("drift", **DRIFT),),
            )
            for rho in (0.5, 1.0, 2.0)
        ),
    ),
    draw=draw,
    seeds=3,
)
