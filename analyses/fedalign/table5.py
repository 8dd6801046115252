"""FedAlign Table 5: accuracy, and what the methods cost."""

from fldiag.figures.paper_tables import table_of
from fldiag.figures.study import ACCURACY, final, seconds

STUDY = table_of(
    "fedalign", "table5", title="Accuracy and seconds",
    caption="Final test accuracy in percent; seconds of processor time per round on one thread of this machine: only their "
            "ratios mean something. What is counted is beside it (table5_counts).",
    ask=(final(), seconds()), pick={**ACCURACY, "seconds_per_round": {"metric": "seconds_per_round"}})
