"""FedAlign Table 3: local epochs."""

from fldiag_papers.paper_tables import table_of

STUDY = table_of(
    "fedalign",
    "table3",
    title="Accuracy and local epochs",
    caption="Final test accuracy in percent. For FedAlign see Table 6.",
)
