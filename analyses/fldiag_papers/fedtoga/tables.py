"""The tables of the FedTOGA paper whose cells come straight from the runs of their rows."""

from fldiag_papers.paper_tables import sizes_of, table_of
from fldiag_papers.study import best

STUDIES = (
    table_of(
        "fedtoga",
        "table1",
        title="Accuracy with LeNet",
        caption="Highest test accuracy of any round (as the released code reports it) in "
        "percent under Dirichlet and pathological partitions, 10 % of 100 or 5 % of 200 "
        "clients. Only cells that survive in the paper's text, and the lost cells next to them.",
        ask=(best(),),
    ),
    table_of(
        "fedtoga",
        "table2",
        title="Accuracy with ResNet-18",
        caption="Highest test accuracy of any round (as the released code reports it) in "
        "percent, ResNet-18 with group norm; cells that survive in the paper's text.",
        ask=(best(),),
    ),
    table_of(
        "fedtoga",
        "table2_reference",
        title="Accuracy with ResNet-18: reference of FL-Simulator",
        caption="Highest test accuracy in percent of any of 1000 rounds, 10 % of 100 clients, Dirichlet 0.6; no other "
        "column is run.",
        rows_where=lambda row: row.settings["clients"] == "100" and row.settings["alpha"] == "0.6",
        ask=(best(),),
    ),
    sizes_of(
        "table5",
        {name: f"fedtoga-{name}-dir0.6" for name in ("cifar10", "cifar100")},
        source="FedTOGA Table 5",
        caption="Number of training and test examples.",
    ),
    table_of(
        "fedtoga",
        "table7",
        title="Old and new results with ResNet-18",
        caption="Highest test accuracy of any round (as the released code reports it) in percent, for the surviving "
        "cells whose column is known; the runs are those of Table 2.",
        ask=(best(),),
    ),
    table_of(
        "fedtoga",
        "ablation",
        title="Ablation of FedTOGA",
        caption="Highest test accuracy of any round in percent: FedSAM; with dynamic regulariser (FedSpeed); with dual "
        "correction (FedTOGA at kappa = 0); with corrected perturbation (FedTOGA).",
        ask=(best(),),
    ),
)
