"""FedSOL Table 3: three architectures."""

from fldiag_papers.paper_tables import table_of

STUDY = table_of(
    "fedsol",
    "table3",
    title="Accuracy with other architectures",
    caption="Final test accuracy in percent with VGG11, ResNet-18 and SL-ViT, LDA 0.1.",
)
