"""FedProj Table 2: language tasks."""

from fldiag_papers.paper_tables import table_of

STUDY = table_of(
    "fedproj",
    "table2",
    title="Accuracy on language tasks",
    caption="Final test accuracy in percent. The paper's TinyBERT is pretrained; bert_tiny starts from scratch "
    "here.",
)
