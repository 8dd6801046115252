"""FedSOL Table 7: how many examples the data sets have."""

from fldiag_papers.paper_tables import sizes_of

STUDY = sizes_of(
    {
        name: f"fedsol-{name}-lda0.1"
        for name in ("mnist", "cifar10", "svhn", "cinic10", "pathmnist", "tissuemnist")
    },
    source="FedSOL Table 7",
    caption="Number of training and test examples. The other columns of the paper's table are the clients, rounds and ratios of "
    "the presets.",
)
