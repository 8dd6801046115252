"""FedTOGA Table 9: seconds per round."""

from fldiag_papers import pictures
from fldiag_papers.paper_tables import with_values
from fldiag_papers.study import Study, Trial, seconds

METHODS = ("fedsam", "mofedsam", "fedgamma", "fedspeed", "fedsmoo", "fedlesam_d", "fedtoga")

STUDY = Study(
    title="Seconds per round",
    source="FedTOGA Table 9",
    caption="Median over the rounds after the first of the processor time on one thread of this machine; only ratios between "
    "methods are meaningful. The paper states neither model nor data; here: LeNet, CIFAR-10, Dirichlet 0.6.",
    trials=tuple(
        with_values(Trial("fedtoga-cifar10-dir0.6", m, model="", data="")) for m in METHODS
    ),
    ask=(seconds(),),
    pick={"seconds_per_round": {"metric": "seconds_per_round"}},
    draw=pictures.dots,
    layout=pictures.cells,
)
