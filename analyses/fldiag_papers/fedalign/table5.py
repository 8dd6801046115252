"""FedAlign Table 5: accuracy, and what the methods cost."""

from fldiag_papers.paper_tables import table_of
from fldiag_papers.study import ACCURACY, final, seconds

STUDY = table_of(
    "fedalign",
    "table5",
    title="Accuracy and seconds",
    caption="Final test accuracy in percent, and seconds of processor time per round on one thread of this machine, of which "
    "only the ratios are meaningful. Counted costs are in table5_counts.",
    ask=(final(), seconds()),
    pick={**ACCURACY, "seconds_per_round": {"metric": "seconds_per_round"}},
)
