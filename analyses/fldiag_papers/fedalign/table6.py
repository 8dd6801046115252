"""FedAlign Table 6: FedAlign in the settings of Tables 2 to 4."""

from fldiag_papers.paper_tables import table_of

STUDY = table_of(
    "fedalign",
    "table6",
    title="FedAlign in all settings",
    caption="Final test accuracy in percent.",
)
