"""What the code that FedTOGA builds on reports for the setting of Table 2."""

from fldiag_papers.paper_tables import table_of
from fldiag_papers.study import best

STUDY = table_of(
    "fedtoga",
    "table2_reference",
    title="Accuracy with ResNet-18: reference of FL-Simulator",
    caption="Highest test accuracy in percent of any of 1000 rounds, 10 % of 100 clients, Dirichlet 0.6; no other "
    "column is run.",
    rows_where=lambda row: row.settings["clients"] == "100" and row.settings["alpha"] == "0.6",
    ask=(best(),),
)
