"""FedSOL Table 1: the proximal loss as a term of the loss, and as a direction to project out of the gradient."""

from fldiag_papers.paper_tables import table_of

STUDY = table_of(
    "fedsol",
    "table1",
    title="Proximal loss: additive or projected",
    caption="Final test accuracy in percent: L2 (fedprox) and KL (strategy:A5) as additive terms, and the local "
    "gradient without the part that opposes their gradient (gradient_projection). The weight of KL is "
    "assumed to be 1.",
)
