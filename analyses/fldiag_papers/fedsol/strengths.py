"""FedSOL Table 2 with the strengths that the paper leaves open: over what FedSOL normalises Lambda, and FedProx's weight.

The paper's text normalises Lambda by layer; its released code, whose settings are another radius and all layers, each tensor
along its first axis (``lambda_norm = "dim0"``), which perturbs far more. All lines have the same clients in every round.
"""

from typing import Any

from fldiag_papers.lines import ends, learning
from fldiag_papers.study import Study, Trial, curve

PRESET, SETTING = "fedsol-cifar10-lda0.1", "partition=lda;alpha=0.1"
LINES: dict[str, tuple[str, dict[str, Any]]] = {
    "FedAvg": ("fedavg", {}),
    "FedProx, μ = 1": ("fedprox", {}),
    "FedProx, μ = 0.1": ("fedprox", {"method.mu": 0.1}),
    "FedNTD": ("fedntd", {}),
    "FedSOL, Λ by layer": ("fedsol", {"method.lambda_norm": "layer"}),
    "FedSOL, Λ dim0": ("fedsol", {}),
    "FedSOL, Λ dim0, all layers, ρ = 1": ("fedsol", {"method.part": "full", "method.rho": 1.0}),
}

STUDY = Study(
    title="FedSOL with both readings of Λ, FedProx with two weights",
    source="FedSOL Table 2",
    caption="Test accuracy over the rounds under LDA 0.1. FedSOL perturbs the head with ρ = 1.5, with Λ normalised by layer (the "
    "paper's text) and along the first axis of each tensor (dim0, its released code), and all layers with ρ = 1 (the code's "
    "settings). With thirty rounds or more, lines are moving means over a fifteenth of the rounds, and raw curves are faint.",
    trials=tuple(
        Trial(PRESET, method, over, label, SETTING if not over else f"{SETTING};line={label}")
        for label, (method, over) in LINES.items()
    ),
    ask=(curve(),),
    derive=lambda table: ends(table, "FedAvg", by="label", alike=("data", "seed", "round")),
    draw=learning,
    seeds=3,
    varies="table2",
)
