"""FedSOL Table 2: eight methods on six data sets."""

from fldiag_papers.paper_tables import table_of

STUDY = table_of(
    "fedsol",
    "table2",
    title="Accuracy of eight methods",
    caption="Final test accuracy in percent under sharding and LDA partitions.",
)
