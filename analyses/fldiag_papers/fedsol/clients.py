"""FedSOL Table 2 with the clients of its released code: those of the partition, and those of every round.

The code deals the data with a seed of its own and draws a round's clients by the round's number alone, so its three runs of a
method share both. What the changes from round to round owe to the clients is then no part of the paper's deviations.
"""

from fldiag.data.partition import FEDSOL_SEED
from fldiag_papers.lines import ends, learning
from fldiag_papers.paper_tables import trials
from fldiag_papers.study import Study, curve

METHODS = ("fedavg", "fedprox", "fedntd", "fedsol")
THEIRS = {
    "partition.kind": "lda_fedsol",
    "partition.seed": FEDSOL_SEED,
    "clients.sampling": "by_round",
}

STUDY = Study(
    title="Learning curves with the clients of the released code",
    source="FedSOL Table 2",
    caption="Test accuracy over the rounds under LDA 0.1, with the partition and the clients of each round as FedSOL's released "
    "code draws them: the same for every method and seed. With thirty rounds or more, lines are moving means over a "
    "fifteenth of the rounds, and raw curves are faint. Dotted: the accuracies of the paper's Table 2.",
    trials=trials(
        "fedsol",
        "table2",
        over=THEIRS,
        rows_where=lambda row: (
            row.data == "cifar10"
            and row.method in METHODS
            and row.setting == "partition=lda;alpha=0.1"
        ),
    ),
    ask=(curve(),),
    derive=ends,
    draw=learning,
    seeds=3,
    varies="table2",
)
