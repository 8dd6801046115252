"""FedProj Table 1: nine methods."""

from fldiag_papers.paper_tables import table_of

STUDY = table_of(
    "fedproj",
    "table1",
    title="Accuracy of nine methods",
    caption="Final test accuracy in percent; FedProj with the weight penalty that was best in the paper's tests. "
    "Here the proximal term of FedProx is active; in the released code it has no effect.",
)
