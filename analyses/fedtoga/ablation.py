"""FedTOGA's ablation: what each of its terms adds."""

from fldiag.figures.paper_tables import table_of
from fldiag.figures.study import best

STUDY = table_of(
    "fedtoga",
    "ablation",
    title="Ablation of FedTOGA",
    caption="Highest test accuracy of any round in percent: FedSAM; with dynamic regulariser (FedSpeed); with dual "
    "correction (FedTOGA at kappa = 0); with corrected perturbation (FedTOGA).",
    ask=(best(),),
)
