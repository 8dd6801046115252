"""FedProj Table 3 (Figure 3b): the penalty on the distilled weights."""

from fldiag_papers.paper_tables import table_of

STUDY = table_of(
    "fedproj",
    "table3",
    title="FedProj and its weight penalty",
    caption="Final test accuracy in percent against gamma_wd, whose term has no effect in the released code but is "
    "active here.",
)
