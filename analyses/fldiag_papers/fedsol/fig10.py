"""FedSOL Figure 10: learning curves of eight methods on six data sets."""

from fldiag_papers.lines import ends, learning
from fldiag_papers.paper_tables import trials
from fldiag_papers.study import Study, curve

STUDY = Study(
    title="Learning curves",
    source="FedSOL Figure 10",
    caption="Test accuracy over the rounds under LDA 0.1. With thirty rounds or more, lines are moving means over a fifteenth "
    "of the rounds, and raw curves are faint.",
    trials=trials(
        "fedsol", "table2", rows_where=lambda row: row.setting == "partition=lda;alpha=0.1"
    ),
    ask=(curve(),),
    derive=ends,
    draw=learning,
)
