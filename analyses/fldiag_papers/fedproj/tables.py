"""The tables of the FedProj paper whose cells come straight from the runs of their rows."""

from fldiag_papers.paper_tables import table_of

STUDIES = (
    table_of(
        "fedproj",
        "table1",
        title="Accuracy of nine methods",
        caption="Final test accuracy in percent; FedProj with the weight penalty that was best in the paper's tests. "
        "Here the proximal term of FedProx is active; in the released code it has no effect.",
    ),
    table_of(
        "fedproj",
        "table2",
        title="Accuracy on language tasks",
        caption="Final test accuracy in percent. The paper's TinyBERT is pretrained; bert_tiny starts from scratch "
        "here.",
    ),
    table_of(
        "fedproj",
        "table3",
        title="FedProj and its weight penalty",
        caption="Final test accuracy in percent against gamma_wd, whose term has no effect in the released code but is "
        "active here.",
    ),
)
