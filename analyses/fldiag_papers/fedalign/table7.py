"""FedAlign Table 7: CIFAR-10 and ImageNet-200."""

from fldiag_papers.paper_tables import table_of

STUDY = table_of(
    "fedalign",
    "table7",
    title="Accuracy on CIFAR-10 and ImageNet-200",
    caption="Final test accuracy in percent. Counted costs are in table7_counts.",
)
