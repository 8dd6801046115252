"""FedAlign Table 2: how unlike the clients are."""

from fldiag_papers.paper_tables import table_of

STUDY = table_of(
    "fedalign",
    "table2",
    title="Accuracy and heterogeneity",
    caption="Final test accuracy in percent under LDA 0.1, 0.5, 2.5 and with equal clients. For FedAlign see Table "
    "6.",
)
