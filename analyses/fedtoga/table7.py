"""FedTOGA Table 7: published results beside new ones."""

from fldiag.figures.tables import table_of

STUDY = table_of("fedtoga", "table7", title="Old and new results with ResNet-18",
                 caption="Final test accuracy in percent of the surviving cells whose column is known; the runs of Table 2.")
