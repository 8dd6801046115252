"""FedTOGA Table 2: accuracy with ResNet-18."""

from fldiag.figures.tables import table_of

STUDY = table_of("fedtoga", "table2", title="Accuracy with ResNet-18",
                 caption="Final test accuracy in percent, ResNet-18 with group norm; cells that survive in the paper's text.")
