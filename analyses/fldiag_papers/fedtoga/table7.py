"""FedTOGA Table 7: published results beside new ones."""

from fldiag_papers.paper_tables import table_of
from fldiag_papers.study import best

STUDY = table_of(
    "fedtoga",
    "table7",
    title="Old and new results with ResNet-18",
    caption="Highest test accuracy of any round (as the released code reports it) in percent, for the surviving "
    "cells whose column is known; the runs are those of Table 2.",
    ask=(best(),),
)
