"""FedTOGA Table 1: accuracy with LeNet."""

from fldiag_papers.paper_tables import table_of
from fldiag_papers.study import best

STUDY = table_of(
    "fedtoga",
    "table1",
    title="Accuracy with LeNet",
    caption="Highest test accuracy of any round (as the released code reports it) in "
    "percent under Dirichlet and pathological partitions, 10 % of 100 or 5 % of 200 "
    "clients. Only cells that survive in the paper's text, and the lost cells next to them.",
    ask=(best(),),
)
