"""FedSOL Table 10: ways to combine the local and the proximal loss."""

from fldiag_papers.paper_tables import table_of

STUDY = table_of(
    "fedsol",
    "table10",
    title="Strategies",
    caption="Final test accuracy in percent of the strategies A0 (FedAvg), A1 (FedSOL) to A6. The paper does not "
    "print their radius and weight; here rho = 1.5, weight 1, with the head perturbed.",
)
