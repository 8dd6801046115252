"""FedSOL Figure 6: how far clients go from the global model and from each other."""

from typing import Any

from fldiag_papers import learning_curves
from fldiag_papers.study import Ask, Study, Trial, diagnostic

PRESET = "fedsol-cifar10-lda0.1"
DRIFT: dict[str, Any] = {"steps": "kl", "rho": (), "gradients": False, "representation": False}
METRICS = ("global_local_divergence", "local_local_divergence")


def draw(table):
    rows = (
        table[(table["scope"] == "global") & (table["moment"] == "trained") & table["layer"].isna()]
        if "layer" in table
        else table[(table["scope"] == "global") & (table["moment"] == "trained")]
    )
    figure = learning_curves.draw(rows, METRICS)
    for ax in figure.axes:
        ax.set_ylim(bottom=0)
    return figure


STUDY = Study(
    title="Weight divergence",
    source="FedSOL Figure 6",
    caption="Distance of the clients' trained weights from the received global ones (left) and between two clients (right), "
    "mean over the sampled clients; FedSOL with rho = 2.",
    trials=(
        Trial(
            PRESET,
            "fedavg",
            label="FedAvg",
            ask=(diagnostic("drift", **DRIFT),),
        ),
        Trial(
            PRESET,
            "fedsol",
            {"method.rho": 2.0},
            label="FedSOL",
            ask=(diagnostic("drift", **DRIFT), Ask("propositions", needs="clients")),
        ),
    ),
    draw=draw,
    seeds=3,
)
