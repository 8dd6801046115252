"""FedAlign Table 4: number of clients."""

from fldiag_papers.paper_tables import table_of

STUDY = table_of(
    "fedalign",
    "table4",
    title="Accuracy and number of clients",
    caption="Final test accuracy in percent; with a quarter of 64 clients per round, after 25 and 100 rounds. For "
    "FedAlign see Table 6.",
)
