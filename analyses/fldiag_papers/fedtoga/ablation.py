"""FedTOGA's ablation: what each of its terms adds."""

from fldiag_papers.paper_tables import table_of
from fldiag_papers.study import best

STUDY = table_of(
    "fedtoga",
    "ablation",
    title="Ablation of FedTOGA",
    caption="Highest test accuracy of any round in percent: FedSAM; with dynamic regulariser (FedSpeed); with dual "
    "correction (FedTOGA at kappa = 0); with corrected perturbation (FedTOGA).",
    ask=(best(),),
)
