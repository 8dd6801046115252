"""FedTOGA Table 2: accuracy with ResNet-18."""

from fldiag_papers.paper_tables import table_of
from fldiag_papers.study import best

STUDY = table_of(
    "fedtoga",
    "table2",
    title="Accuracy with ResNet-18",
    caption="Highest test accuracy of any round (as the released code reports it) in "
    "percent, ResNet-18 with group norm; cells that survive in the paper's text.",
    ask=(best(),),
)
