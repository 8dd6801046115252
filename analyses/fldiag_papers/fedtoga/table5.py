"""FedTOGA Table 5: how many examples the data sets have."""

from fldiag_papers.paper_tables import sizes_of

STUDY = sizes_of(
    {name: f"fedtoga-{name}-dir0.6" for name in ("cifar10", "cifar100")},
    source="FedTOGA Table 5",
    caption="Number of training and test examples.",
)
